"""Models for serving: the part of a program that computes the fetches from the feeds, with its parameters, as ONNX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.ir.decompose import write_out
from amp_transpiler.ir.nodes import OWN, Variable
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.passes.canonicalize.standard_form import decompose_for_runtime
from amp_transpiler.passes.lowering.lowered import needed
from amp_transpiler.passes.numerics.mixed_norms import write_mixed_norms
from amp_transpiler.passes.numerics.one_type_norms import write_norms_of_one_type
from amp_transpiler.passes.numerics.quantised import let_load
from amp_transpiler.program import Program, default_main_program, program_of
from amp_transpiler.runtime.executor import Executor
from amp_transpiler.runtime.given_executor import given_executor
from amp_transpiler.runtime.plan import names_of
from amp_transpiler.runtime.scope import Scope, check_scope
from amp_transpiler.runtime.states import not_in_scope

Variables = Sequence[Variable | str]


@paddle_arguments("inference", "save_inference")
def save_inference_model(
    path: str | os.PathLike[str],
    feed_vars: Variables,
    fetch_vars: Variables,
    executor: Executor,
    program: Program | None = None,
    *,
    scope: Scope | None = None,
) -> None:
    """Write what computes ``fetch_vars`` from ``feed_vars`` as an ONNX model: whole, or not at all.

    The model has real 16-bit operators, parameters from ``scope`` (default: the global one), and no training forms. An
    output is of the type that it is computed in, float16 too, where ``Executor.run`` gives it as it was declared.
    Batch normalisations read their fp32 parameters through casts, for kernels want one type.
    onnxruntime alone loads it; a bfloat16 model on CUDA only, for it has no bfloat16 arithmetic on CPU, and one that
    scatters sums in float16 (``scatter_nd_add``): ``decorate(numeric_guards=True)`` keeps these fp32. ``feed_vars`` are
    inputs of ``program`` (default: the program of the first fetch variable, else the current main program), by
    variable or name; a training program is turned into its form for evaluation first. Parameters go into the file, but
    into ``<path>.data`` where those of the program were read from such a file, or take more than 2 GB. Folders on the
    way are made, as Paddle makes them.

    ArgumentError where a feed is missing or not needed, or a fetch is nothing that the program computes; ScopeError
    where the scope lacks a parameter; GraphError where it holds another type than the program declares;
    ModelFileWriteError where the file cannot be written.
    """
    given_executor(executor, "save_inference_model takes an Executor as fourth argument")
    if program is not None and not isinstance(program, Program):
        raise ArgumentTypeError(f"save_inference_model: program is {program!r:.80}; expected a Program")
    feeds, fetches = _names(feed_vars, "feed_vars"), _names(fetch_vars, "fetch_vars")
    if not fetches:
        raise ArgumentError("save_inference_model: fetch_vars is empty; name what the model is to compute")
    if program is None:
        first = fetch_vars[0]
        program = program_of(first) if isinstance(first, Variable) else default_main_program()
    scope = check_scope(scope)
    served = pruned(program, feeds, fetches)
    lacking = [v.name for v in served.variables if v.persistable and v.producer is None and not scope.has_var(v.name)]
    if lacking:
        raise not_in_scope(f"parameter '{lacking[0]}'", program.name, len(lacking))
    if isinstance(path, str | os.PathLike):
        with suppress(OSError, ValueError):  # to_onnx says what is wrong with it
            os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
    served.to_onnx(path, scope=scope)


@paddle_arguments("inference", "load_inference")
def load_inference_model(
    path: str | os.PathLike[str], executor: Executor, *, scope: Scope | None = None
) -> tuple[Program, list[str], list[Variable]]:
    """The program of a model file, the names of its feeds, and its fetch variables; parameters go into ``scope``.

    They replace variables of the same names there, and their fp32 master weights: give the model a scope of its own
    (``scope_guard(Scope())``, or ``scope=``) where others must stay. ModelFileError and GraphError as
    :meth:`Program.from_onnx`.
    """
    executor = given_executor(executor, "load_inference_model takes an Executor as second argument")
    program = Program.from_onnx(path)
    if program.startup is not None:
        executor.run(program.startup, scope=check_scope(scope))
    return program, [v.name for v in program.inputs], list(program.outputs)


def _names(variables: Variables, what: str) -> list[str]:
    names = list(names_of(variables, what))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError(f"{what} names '{twice}' twice")
    return names


def pruned(program: Program, feeds: list[str], fetches: list[str]) -> Program:
    """A copy for evaluation that has these inputs and outputs, and nothing that they do not need."""
    for name in (*feeds, *fetches):
        _check_known(program, name)
    program = program.clone(for_test=True)
    for name in (*feeds, *fetches):
        if not program.has_var(name):
            raise ArgumentError(
                f"variable '{name}' serves only the training of program '{program.name}'; a served model computes "
                "forward values"
            )
    outputs = [program.var(name) for name in fetches]
    for variable in outputs:
        if variable.producer is None:
            kind = "a parameter" if variable.persistable else "an input" if variable.is_input else "a constant"
            raise ArgumentError(
                f"fetch_vars: '{variable.name}' is {kind} of program '{program.name}'; nothing computes it"
            )
    kept = needed(program, outputs)
    foreign = next((op for op in kept if op.domain == OWN), None)
    if foreign is not None:
        raise GraphError(
            f"operator '{foreign.label}' ({foreign.full_type}) of program '{program.name}' is this package's own; "
            "onnxruntime alone cannot serve it"
        )
    _check_feeds(program, feeds, {v.name for op in kept for v in (*op.inputs, *op.captures) if v is not None})
    keys = {op.key for op in kept}
    for op in reversed(program.operators):
        if op.key not in keys:
            program.remove_operator(op)
    program.inputs = [program.var(name) for name in feeds]
    program.outputs = outputs
    for variable in list(program.variables):
        if not program.graph.degree(variable.key):
            program.remove_variable(variable)
    write_out(program)
    decompose_for_runtime(program)
    write_norms_of_one_type(program)
    write_mixed_norms(program)
    let_load(program)
    return program


def _check_known(program: Program, name: str) -> None:
    try:
        program.var(name)
    except GraphError as error:
        raise ArgumentError(f"save_inference_model: {error}") from None


def _check_feeds(program: Program, feeds: list[str], read: set[str]) -> None:
    inputs = {v.name: v for v in program.inputs}
    for name in feeds:
        if name not in inputs:
            raise ArgumentError(f"feed_vars: '{name}' is no input of program '{program.name}'")
        if name not in read:
            raise ArgumentError(f"feed_vars: '{name}' is not needed for what is fetched; leave it out")
    for name, variable in inputs.items():
        if name in read and name not in feeds and variable.data is None:
            raise ArgumentError(f"feed_vars: what is fetched needs the input '{name}' of program '{program.name}' too")
