"""Which layers share a parameter: exporters merge tensors of equal content, and write copies of one that is tied.

Each function undoes one of these, in place, and returns what it did, in words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping

import networkx as nx
import numpy as np

from amp_transpiler.finetune.called_layers import Calls, Use
from amp_transpiler.finetune.layer_names import called, is_vector, module_of, name_of, uniform
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.parameter_names import made_up
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.torch_marks import exported_from, torch_name, torch_weights
from amp_transpiler.ir.weights import STATISTICS, not_a_weight
from amp_transpiler.option_checks import listed
from amp_transpiler.program import Program

#: Operators by which a module may read several parameters: scales of its branches, tokens.
_SEVERAL = frozenset({"Concat", "Mul"})
#: Elements of the shortest vector that is equal to another by no chance.
_FEW = 4
_ELEMENTS = 64  # of a tensor: enough to tell most apart before they are compared


def retie(program: Program, frozen: Collection[Variable]) -> list[str]:
    """Let a parameter that is a copy of another, perhaps transposed, be that other one.

    A language model's output layer and its embedding, say, or the filters of a convolution that is called several
    times. Both have the same content, which no training leaves by chance; vectors may. Layers that were copied when
    the model was made, as PyTorch's transformers are, have it until they are trained: what belongs to modules whose
    names differ in numbers alone stays apart. So does what PyTorch's dynamo exporter says were two parameters, and what
    is ``frozen`` from what is trained in modules that are copies of each other: the reference of a policy, which begins
    as it.
    """
    notes: list[str] = []
    kept: dict[bytes, list[Variable]] = {}
    for variable in sorted(program.parameters, key=lambda v: made_up(v.name)):
        if variable.data is None or variable.shape is None or uniform(variable):
            continue
        if is_vector(variable) and made_up(variable.name):
            notes += _retie_vector(variable)
            continue
        if is_vector(variable):
            continue
        array = np.asarray(as_array(variable.data))
        for other in kept.get(_digest(array), []):
            held = np.asarray(as_array(other.data))
            transposed = held.shape != array.shape or not np.array_equal(held, array)
            if transposed and not (array.ndim == 2 and held.shape == array.T.shape and np.array_equal(held.T, array)):
                continue
            if len(_siblings((_owner_of(variable), _owner_of(other)))) > 1 or _apart_in_torch(variable, other):
                continue
            if (variable in frozen) != (other in frozen) and _copied(variable, other):
                notes.append(f"'{variable.name}' is equal to '{other.name}', and stays apart: one of them is frozen")
                continue
            _share(variable, other, transposed)
            notes.append(f"'{variable.name}' is '{other.name}'{' transposed' * transposed}: tied again")
            break
        else:
            kept.setdefault(_digest(array), []).append(variable)
    return notes


def _copied(one: Variable, other: Variable) -> bool:
    """Whether the outermost modules that tell two parameters apart have the same parameters, several, all equal."""
    first, second = one.name.split("."), other.name.split(".")
    while first and second and first[-1] == second[-1]:
        del first[-1], second[-1]
    if not first or not second:
        return False
    held = {v.name: v for v in one.program.parameters}
    begins, instead = (f"{'.'.join(path)}." for path in (first, second))
    pairs = [(v, held.get(instead + name.removeprefix(begins))) for name, v in held.items() if name.startswith(begins)]
    return len(pairs) > 1 and all(
        w is not None and np.array_equal(np.asarray(as_array(v.data)), np.asarray(as_array(w.data))) for v, w in pairs
    )


def _apart_in_torch(one: Variable, other: Variable) -> bool:
    """Whether PyTorch's dynamo exporter says of all readers of two parameters what they read, and nothing is common; of
    what it computed of a parameter it says so."""
    if any(held.name in _sources(made) for made, held in ((one, other), (other, one))):
        return False
    read = [[torch_weights(op) for op, _ in variable.readers] for variable in (one, other)]
    first, second = ({name for names in each for name in names} for each in read)
    return all(names for each in read for names in each) and first.isdisjoint(second)


def _sources(variable: Variable) -> list[str]:
    return [name for _, name in exported_from(variable)]


def _retie_vector(variable: Variable) -> list[str]:
    """Let a vector that the exporter computed, as from zeros and a bias, be the parameter that it is a copy of."""
    array = np.asarray(as_array(variable.data)).reshape(-1)
    for other in variable.program.parameters if array.size >= _FEW else ():
        if other is variable or other.data is None or not is_vector(other) or made_up(other.name):
            continue
        if np.array_equal(np.asarray(as_array(other.data)).reshape(-1), array):
            program, sizes = variable.program, np.array(variable.shape, np.int64)
            moved = program.fresh_variable(f"{other.name}.moved", variable.dtype, variable.shape)
            program.add_operator("Reshape", [other, program.add_constant(f"{other.name}.sizes", sizes)], [moved])
            program.replace_uses(variable, moved)
            program.remove_variable(variable)
            return [f"'{variable.name}' is '{other.name}': tied again"]
    return []


def shared_by_layers(program: Program) -> list[str]:
    """Say which parameters several layers of one kind read: exporters merge those that are equal."""
    shared = [v.name for v in program.parameters if _is_shared(v)]
    if not shared:
        return []
    return [
        f"read by several layers, as the model has it, and trained as one parameter: {listed(shared)}. "
        "Where that is not meant, export weights that differ"
    ]


def _is_shared(variable: Variable) -> bool:
    """Whether layers of one kind read it that are several modules."""
    uses = variable.readers
    if len(uses) == 1 and uses[0][0].type == "Transpose" and uses[0][0].outputs[0] is not None:
        uses = uses[0][0].outputs[0].readers
    return len({(op.type, slot) for op, slot in uses}) == 1 and len(set(called(op for op, _ in uses).values())) > 1


def _owner_of(variable: Variable) -> str:
    """The module that a parameter belongs to: that of its name; where exporters made that up, that of its reader."""
    if not made_up(variable.name):
        return variable.name.rpartition(".")[0]
    return next((module_of(op) for op, _ in variable.readers), "")


def _siblings(modules: Iterable[str]) -> list[str]:
    """Modules, each once, if their names differ in numbers alone."""
    names = list(dict.fromkeys(modules))
    return names if len({re.sub(r"\d+", "#", name) for name in names}) == 1 else []


def _digest(array: np.ndarray) -> bytes:
    """Equal for equal arrays, and for a matrix and its transpose."""
    first = np.diag(array) if array.ndim == 2 else array.reshape(-1)
    small = np.concatenate([first[:_ELEMENTS], [array.ndim, array.size]]).astype(np.float64)
    return small.tobytes()


def _share(variable: Variable, other: Variable, transposed: bool) -> None:
    program, source = variable.program, other
    if transposed:
        source = program.fresh_variable(f"{other.name}.T", variable.dtype, variable.shape)
        program.add_operator("Transpose", [other], [source], attrs={"perm": [1, 0]})
    program.replace_uses(variable, source)
    program.outputs = [source if v is variable else v for v in program.outputs]
    program.remove_variable(variable)


def untie(program: Program, keep: Collection[Variable], turns: Mapping[Operator, Hashable]) -> list[str]:
    """Give each layer that reads a parameter which exporters merged its own copy.

    PyTorch's dynamo exporter says of an operator what it read before: what were several parameters are several. Where
    nothing is said, those are meant of which all elements are alike: biases, scales and running statistics that were
    not trained yet, matrices that begin with zeros. What has a content of its own stays tied, and so does what ``keep``
    holds, what one layer reads several times, and what reads a matrix and is no layer. The parameter itself stays with
    the reader that it is named after. ``turns``: those of loops that were unrolled, as ``expand_control_flow`` gives
    them.
    """
    copies, sources, calls = 0, 0, Calls(program, turns)
    for variable in [v for v in program.variables if v.persistable and v.data is not None]:
        _without_identities(variable)
        if len(variable.readers) < 2 or variable in keep:
            continue
        if any(isinstance(slot, str) for _, slot in variable.readers):
            continue  # a nested graph reads it: one parameter for all its iterations
        before = copies
        for uses in _other_layers(variable, calls):
            (op, slot), *_ = uses
            told = _in_torch(variable, op, slot)
            name = told or name_of(op, slot) or f"{variable.name}.{next(v.name for v in op.outputs if v is not None)}"
            turned = made_up(variable.name) and op.type == "MatMul"  # it is named when it is turned back
            new = program.fresh_variable(
                variable.name if turned else name,
                variable.dtype,
                variable.shape,
                persistable=True,
                trainable=variable.trainable,
                data=variable.data,
            )
            for reader, place in uses:
                reader.set_input(place, new)
            new.metadata |= variable.metadata if told and slot not in traits_of(op).statistics else {}
            new.trainable &= not_a_weight(new) != STATISTICS
            if variable.trainable and not_a_weight(new) not in ("", STATISTICS):  # a number that was equal to it
                new.persistable = new.trainable = False
                program.rename_variable(new, program.unique(f"{variable.name}.number"))
            copies += 1
        variable.trainable &= copies == before or not_a_weight(variable) != STATISTICS
        sources += copies > before
    if not copies:
        return []
    got = f"{sources} equal parameters that the exporter merged got {copies} copies, one for each layer"
    return [f"{got}; keep_tied names those that are to stay one"]


def _other_layers(variable: Variable, calls: Calls) -> list[list[Use]]:
    """The readers that get copies of a parameter, together where they are of one layer."""
    uses, owner = [(op, int(slot)) for op, slot in variable.readers], _owner(variable)
    if variable.is_parameter and (layers := _layers_in_torch(uses)):
        return [layer for layer in layers if owner not in layer]
    if not uniform(variable):
        return []
    modules, told = called(op for op, _ in uses), {}
    found: dict[Hashable, list[Use]] = {}
    for use in uses:
        layer = _layer(*use, modules[use[0]])
        told[use] = layer is not None
        found.setdefault(use if layer is None else layer, []).append(use)
    return [
        layer
        for layer in calls.joined(list(found.values()))
        if owner not in layer and (is_vector(variable) or any(told[use] for use in layer))
    ]


def _layers_in_torch(uses: list[Use]) -> list[list[Use]]:
    """The readers of a parameter, together where they read one in PyTorch; none where that is not said of each."""
    read = nx.Graph((use, name) for use in uses for name in _names_in_torch(*use))
    if not all(use in read for use in uses):
        return []
    return [[use for use in part if isinstance(use, tuple)] for part in nx.connected_components(read)]


def _names_in_torch(op: Operator, slot: int) -> list[str]:
    """What PyTorch's dynamo exporter calls that which an operator may have read in this slot: a norm with parameters
    reads these, and beside them its running statistics, in their order."""
    names, statistics = torch_weights(op), traits_of(op).statistics
    buffers = [name for name in names if name.startswith("b_")]
    if not statistics or len(buffers) != len(statistics) or len(names) == len(buffers):
        return names
    return [buffers[statistics.index(slot)]] if slot in statistics else [n for n in names if n not in buffers]


def _in_torch(variable: Variable, op: Operator, slot: int) -> str:
    """What PyTorch calls the parameter that another layer read: the only one, or that of a layer of the same kind, in a
    name with dots for underscores; "" where its dynamo exporter does not say it."""
    read = set(_names_in_torch(op, slot))
    if len(read) == 1 and (name := torch_name(read.pop(), op.program)):
        return name
    words, numbers = re.split(r"\d+", variable.name), r"(\d+)"
    pattern = re.compile("._" + numbers.join(re.escape(re.sub(r"\W", "_", word)) for word in words))
    found = next(filter(None, map(pattern.fullmatch, torch_weights(op))), None)
    return "" if found is None else "".join(map("".join, zip(words, (*found.groups(), ""), strict=True)))


def _layer(op: Operator, slot: int, module: str) -> Hashable:
    """What is equal for what one layer reads each time that it is called; None where that is not told by its name."""
    if not name_of(op, slot) or op.type in _SEVERAL:
        return None
    if op.type != "Add":
        return module, slot
    added = op.input(1 - slot)
    made = None if added is None else added.producer
    return None if made is None or made.type != "MatMul" else (module, made.input(1))


def _owner(variable: Variable) -> Use:
    """The reader, and its slot, that a variable is named after; else the first of the module in its name, or of all."""
    uses, module = [(op, int(slot)) for op, slot in variable.readers], variable.name.rpartition(".")[0]
    named = [use for use in uses if name_of(*use) == variable.name]
    said = [use for use in uses if "p_" + re.sub(r"\W", "_", variable.name) in torch_weights(use[0])]
    inside = [use for use in uses if module and module_of(use[0]) == module]
    return (named or said or inside or uses)[0]


def _without_identities(variable: Variable) -> None:
    """Let readers behind Identities, which exporters write where they merge, and one behind the other in loops, read
    the variable itself."""
    program, pending = variable.program, variable.readers
    while pending:
        op, slot = pending.pop()
        out = op.output(0)
        if slot == 0 and op.full_type == "Identity" and out is not None and out not in program.outputs:
            pending += out.readers
            program.replace_uses(out, variable)
            program.remove_operator(op)
            program.remove_variable(out)
