"""What the layer builder refuses: a clear error at the call, and a program that is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from amp_transpiler import nn
from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn import functional as F, initializer as I
from tests.helpers.building import building


def image() -> Variable:
    return nn.data("image", [None, 4, 6, 6])


def rows() -> Variable:
    return nn.data("rows", [None, 4])


def ids() -> Variable:
    return nn.data("ids", [None], "int64")


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "data twice": (lambda: (rows(), rows()), r"data: program 'main' already has a variable 'rows'"),
    "data shape": (lambda: nn.data("x", [2, -3]), r"data: -3 in the shape of 'x' is no size"),
    "data dtype": (lambda: nn.data("x", [2], "float33"), r"unknown element type 'float33'"),
    "data name": (lambda: nn.data("@x", [2]), r"cannot be a name"),
    "parameter again": (
        lambda: (nn.create_parameter([2], name="w"), nn.create_parameter([3], name="w")),
        r"already has a parameter 'w' \(float32 \[2\]\), not float32 \[3\]",
    ),
    "parameter like a feed": (
        lambda: (rows(), nn.create_parameter([4], name="rows")),
        r"'rows' is a variable .* no parameter",
    ),
    "parameter shape": (lambda: nn.create_parameter([2, None]), r"None in the shape .* is no fixed size"),
    "parameter array": (
        lambda: nn.create_parameter([2], initializer=np.zeros(3)),
        r"has shape \(3,\), the parameter \(2,\)",
    ),
    "layer again": (
        lambda: (nn.fc(rows(), 2, name="a"), nn.fc(nn.data("y", [None, 5]), 2, name="a")),
        r"fc: program '(main|startup)' already has a parameter 'a.w_0'",
    ),
    "shared parameter": (
        lambda: nn.fc(rows(), 2, param_attr=nn.create_parameter([2, 4])),
        r"fc: parameter .* does not fit",
    ),
    "conv rank": (lambda: nn.conv2d(rows(), 2, 3), r"conv2d: x 'rows' .* must have 4 dimensions, not 2"),
    "conv channels": (lambda: nn.conv2d(nn.data("x", [None, None, 6, 6]), 2, 3), r"dimension 1 of x .* must be known"),
    "conv groups": (
        lambda: nn.conv2d(image(), 6, 3, groups=4),
        r"groups=4 must divide the 4 channels .* and the 6 filters",
    ),
    "conv window": (lambda: nn.conv2d(image(), 6, 9, padding=1), r"a window of 9 does not fit dimension 2"),
    "conv filters": (lambda: nn.conv2d(image(), 0, 3), r"num_filters must be at least 1, not 0"),
    "conv kernel": (lambda: nn.conv2d(image(), 2, (3, 3, 3)), r"filter_size must be one integer or two"),
    "conv weight": (lambda: nn.conv2d(image(), 2, 3, param_attr=False), r"param_attr=False"),
    "conv act": (
        lambda: nn.conv2d(image(), 2, 3, act="rellu"),
        r"conv2d: act='rellu' is no activation; known are relu",
    ),
    "conv integers": (
        lambda: nn.conv2d(nn.data("x", [None, 1, 6, 6], "int64"), 2, 3),
        r"must have element type bfloat16 or float16 or",
    ),
    "fc rank": (lambda: nn.fc(nn.data("x", [4]), 2), r"fc: x 'x' .* must have more than 1 dimensions"),
    "fc features": (lambda: nn.fc(nn.data("x", [4, None]), 2), r"fc: dimension 1 of x 'x' .* must be known"),
    "fc size": (lambda: nn.fc(rows(), -2), r"fc: size must be at least 1, not -2"),
    "momentum": (lambda: nn.batch_norm(image(), momentum=9), r"momentum must be in \[0, 1\]"),
    "layer norm axis": (lambda: nn.layer_norm(rows(), 2), r"begin_norm_axis 2 is outside 'rows'"),
    "embedding ids": (
        lambda: nn.embedding(rows(), [3, 4]),
        r"embedding: x 'rows' .* must have element type int64 or int32",
    ),
    "embedding size": (lambda: nn.embedding(ids(), [3]), r"size must be \[rows, width\]"),
    "dropout p": (lambda: F.dropout(rows(), 1.5), r"p must be in \[0, 1\], not 1.5"),
    "heads": (
        lambda: nn.multi_head_attention(nn.data("x", [None, 3, 10]), num_heads=3),
        r"num_heads=3 does not divide",
    ),
    "label type": (
        lambda: F.cross_entropy(rows(), nn.data("y", [None], "float32")),
        r"cross_entropy: label 'y' .* must have element type int64 or int32",
    ),
    "label rank": (
        lambda: F.cross_entropy(rows(), nn.data("y", [None, 2], "int64")),
        r"label 'y' .* does not fit input 'rows'",
    ),
    "label length": (
        lambda: F.cross_entropy(nn.data("x", [3, 4]), nn.data("y", [5], "int64")),
        r"does not fit input 'x'",
    ),
    "reduction": (
        lambda: F.cross_entropy(rows(), ids(), reduction="avg"),
        r"reduction is 'avg'; expected one of mean, sum, none",
    ),
    "mse shapes": (lambda: F.mse_loss(rows(), nn.data("y", [None, 1])), r"mse_loss: .* must have one shape"),
    "accuracy k": (lambda: F.accuracy(rows(), ids(), k=5), r"k=5, but 'rows' .* has 4 classes"),
    "broadcast": (
        lambda: rows() + nn.data("y", [None, 3]),
        r"add: 'rows' .*, 'y' .* do not fit Add: Incompatible dimensions",
    ),
    "matmul": (lambda: rows() @ nn.data("y", [3, 4]), r"matmul: .* do not fit MatMul"),
    "element types": (lambda: rows() + nn.data("y", [4], "float16"), r"have different element types; cast one of them"),
    "element type": (lambda: F.relu(ids()), r"relu: x 'ids' .* must have element type"),
    "operator type": (lambda: nn.data("b", [2], "bool") + nn.data("c", [2], "bool"), r"Add cannot take 'b' \(bool"),
    "fraction": (lambda: ids() * 0.5, r"0.5 is no int64"),
    "pool pad": (lambda: F.max_pool2d(image(), 2, padding=2), r"padding 2 must be smaller than the kernel"),
    "pool window": (lambda: F.avg_pool2d(image(), 7), r"a window of 7 does not fit"),
    "adaptive": (
        lambda: F.adaptive_avg_pool2d(nn.data("x", [None, 4, None, 6]), 4),
        r"dimension 2 of x .* must be known",
    ),
    "reshape": (lambda: F.reshape(nn.data("x", [2, 3]), [4, -1]), r"reshape: 'x' .* cannot take the shape \[4, -1\]"),
    "reshape twice": (lambda: F.reshape(rows(), [-1, -1]), r"only one size may be -1"),
    "reshape known": (lambda: F.reshape(nn.data("x", [None, 6]), [0, 4]), r"cannot take the shape"),
    "transpose": (lambda: F.transpose(rows(), [0, 0]), r"must name each of the 2 dimensions"),
    "concat": (lambda: F.concat([rows(), nn.data("y", [None, 3, 1])], 1), r"concat: .* do not fit Concat"),
    "split": (lambda: F.split(rows(), 3, 1), r"cannot be cut into 3 equal parts"),
    "sections": (lambda: F.split(rows(), [1, 2], 1), r"parts of \[1, 2\] do not add up"),
    "slice": (lambda: F.slice(rows(), [0, 1], [0], [1]), r"must be equally long"),
    "axis": (lambda: F.softmax(rows(), 2), r"softmax: axis 2 is outside 'rows'"),
    "reduce axes": (lambda: F.sum(rows(), [1, -1]), r"must name each axis once"),
    "condition": (lambda: F.where(rows(), ids(), 0), r"where: condition 'rows' .* must have element type bool"),
    "uniform": (lambda: I.Uniform(2, 1), r"low 2 is above high 1"),
    "normal": (lambda: I.Normal(0, -1), r"std is -1; expected a number from 0 on"),
}

WRONG_TYPES: dict[str, tuple[Callable[[], Any], str]] = {
    "no variable": (lambda: F.relu(np.ones(3)), r"relu: x must be a Variable, not ndarray"),
    "open size": (lambda: F.zeros([rows().shape[0], 1]), r"zeros: .* only the run knows; F.zeros_like\(x\) takes"),
    "size of a run": (lambda: F.full(F.shape(rows()), 1), r"full: .* only the run knows; F.full_like\(x\) takes"),
    "layer": (lambda: nn.fc("x", 3), r"fc: x must be a Variable, not str"),
    "operand": (lambda: rows() + "1", r"add: cannot use str as an operand"),
    "none": (lambda: rows() * None, r"multiply: cannot use NoneType as an operand"),
    "size": (lambda: nn.fc(rows(), 2.5), r"fc: size must be an integer, not 2.5"),
    "flag": (lambda: nn.fc(rows(), True), r"fc: size must be an integer"),
    "padding": (lambda: nn.conv2d(image(), 2, 3, padding=1.5), r"padding must be an integer, not 1.5"),
    "shape": (lambda: nn.data("x", 3), r"must be a list of sizes, not 3"),
    "name": (lambda: nn.data(3, [2]), r"a name must be a string, not 3"),
    "initializer": (
        lambda: nn.create_parameter([2], initializer="xavier"),
        r"must be an amp.nn.initializer or an array",
    ),
    "concat": (lambda: F.concat(rows()), r"concat: x must be a list of variables"),
    "probability": (lambda: F.dropout(rows(), "half"), r"p must be a number"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_value(name: str) -> None:
    build, message = BAD[name]
    with building(), pytest.raises(ArgumentError, match=message):
        build()


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_bad_type(name: str) -> None:
    build, message = WRONG_TYPES[name]
    with building(), pytest.raises(ArgumentTypeError, match=message):
        build()


def test_a_refused_call_leaves_nothing_behind() -> None:
    with building() as (main, startup):
        x, y = nn.data("x", [2, 3]), nn.data("y", [4])
        before = (main.version, list(main.variables), len(startup.operators))
        for call in (
            lambda: x + y,
            lambda: x * np.ones(4),
            lambda: nn.conv2d(x, 2, 3),
            lambda: F.reshape(x, [5, -1]),
            lambda: nn.create_parameter([2], initializer=np.zeros(3)),
        ):
            with pytest.raises(ArgumentError):
                call()
        assert (list(main.variables), len(startup.operators)) == before[1:] and not main.operators
        assert not list(startup.variables)


def test_variable_of_another_program() -> None:
    with building():
        x = nn.data("x", [2, 3])
    with building():
        for call in (lambda: x + 1, lambda: F.relu(x), lambda: nn.fc(x, 2)):
            with pytest.raises(
                ArgumentError,
                match=r"variable 'x' belongs to another program called 'main', which is not the current one",
            ):
                call()
