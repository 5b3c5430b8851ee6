"""Model-local functions inlined, for lowering and for precision passes that must see inside them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice

import onnx
import onnx.inliner

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.control import every_node
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.model_file import ModelFile
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.onnx_in import program_of
from amp_transpiler.ir.onnx_inference import ONNX_ERRORS
from amp_transpiler.ir.onnx_out import weightless
from amp_transpiler.ir.proto_residue import source_of
from amp_transpiler.lists import plain_domain
from amp_transpiler.passes.canonicalize.opset import keeps_form
from amp_transpiler.passes.pipeline import Context, Pass, Property


def inline_functions(program: Graph) -> bool:
    """Replace each call of a model-local function by the function's body, in place; whether there are functions.

    The operators of a body get role, guard, precision and reason of the call, and its scope where they have none.
    Variables of the main graph keep names, content and flags, but are new objects, to be asked for by name; the old
    ones belong to ``program`` no longer. GraphError where a body cannot be inlined (a missing function, another
    opset); then nothing has changed.
    """
    if not program.info.functions:
        return False
    written = weightless(program)
    _import_alike(written, program)
    _give_defaults(written)
    try:
        model = onnx.inliner.inline_local_functions(written)
    except ONNX_ERRORS as error:
        raise GraphError(f"the functions of program '{program.name}' cannot be inlined: {str(error).strip()}") from None
    read = ModelFile(model, f"program '{program.name}'", None, list(model.graph.initializer))
    # Which of its constants are weights is carried over, since it takes their content to tell.
    new = program_of(read, type(program), program.name, weights=False)
    source, made = source_of(program), source_of(new)
    if source is not None and made is not None:
        made.path, made.external = source.path, source.external
    if new.info.functions:
        left = ", ".join(f"'{function.name}'" for function in new.info.functions)
        raise GraphError(
            f"program '{program.name}' still calls {left} after inlining; every function must be defined once"
        )
    _carry_variables(program, new)
    _carry_marks(program, new, _lengths(program))
    program.exchange(new)
    return True


def _import_alike(model: onnx.ModelProto, program: Graph) -> None:
    """Let all import one version of a domain where that means the same, as it does of domains of functions: the inliner
    leaves a function as it is that imports another one than the model does. GraphError where it means something else.
    """
    own = {function.domain for function in model.functions} - {schema.domain for schema in onnx.defs.get_all_schemas()}
    versions: dict[str, int] = {}
    for imported in [*model.opset_import, *(each for f in model.functions for each in f.opset_import)]:
        if imported.domain in own:
            imported.version = versions.setdefault(imported.domain, imported.version)
    version = program.info.opsets.get("")
    if version is None:
        return
    for function in model.functions:
        for imported in function.opset_import:
            if not plain_domain(imported.domain) and imported.version != version:
                _check_forms(function, imported.version, version, program)
                imported.version = version


def _check_forms(function: onnx.FunctionProto, version: int, target: int, program: Graph) -> None:
    for node in every_node(function.node):
        if not plain_domain(node.domain) and not keeps_form(node.op_type, version, target):
            raise GraphError(
                f"function '{function.name}' imports opset {version}, program '{program.name}' imports {target}, and "
                f"{node.op_type}, which the function has, is written in another way there; export the model with one "
                "opset for all"
            )


def _give_defaults(model: onnx.ModelProto) -> None:
    """Write the defaults of functions' attributes at the calls that leave them out: the inliner does not know them."""
    defaults = {(plain_domain(f.domain), f.name, f.overload): f.attribute_proto for f in model.functions}
    if not any(defaults.values()):
        return
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in every_node(nodes):
            given = {attribute.name for attribute in node.attribute}
            called = defaults.get((plain_domain(node.domain), node.op_type, node.overload), ())
            node.attribute.extend(default for default in called if default.name not in given)


def _lengths(program: Graph) -> dict[tuple[str, str, str], int]:
    """How many operators a call of each function becomes, those of functions that this calls counted too."""
    bodies = {(plain_domain(f.domain), f.name, f.overload): f.node for f in program.info.functions}

    @cache
    def length(called: tuple[str, str, str]) -> int:
        nodes = ((plain_domain(node.domain), node.op_type, node.overload) for node in bodies.get(called, ()))
        return sum(map(length, nodes)) if called in bodies else 1

    return {called: length(called) for called in bodies}


def _carry_variables(old: Graph, new: Graph) -> None:
    """Content and flags, by name; the inliner saw neither."""
    for variable in old.variables:
        if not new.has_var(variable.name):
            continue
        made = new.var(variable.name)
        made.persistable, made.trainable = variable.persistable, variable.trainable
        made.stop_gradient, made.sparse, made.dealt = variable.stop_gradient, variable.sparse, variable.dealt
        made.data = variable.data
        made.dtype, made.shape = variable.dtype or made.dtype, variable.shape or made.shape
        if variable.grad_of is not None and new.has_var(variable.grad_of.name):
            made.grad_of = new.var(variable.grad_of.name)
        if variable.rows is not None and new.has_var(variable.rows.name):
            made.rows = new.var(variable.rows.name)
    new.updates = _named(old.updates, new)
    if old.accumulation is not None:
        counter, updates = new.var(old.accumulation.counter.name), _named(old.accumulation.updates, new)
        new.accumulation = replace(old.accumulation, counter=counter, updates=updates)


def _named(updates: dict[Variable, Variable], graph: Graph) -> dict[Variable, Variable]:
    """Updates by the variables that ``graph`` has under their names."""
    return {graph.var(state.name): graph.var(value.name) for state, value in updates.items()}


def _carry_marks(old: Graph, new: Graph, lengths: dict[tuple[str, str, str], int]) -> None:
    """The inliner puts a body where its call stood, so both programs are walked side by side."""
    rest = iter(new.operators)
    for before in old.operators:
        length = lengths.get((before.domain, before.type, before.overload))
        if length is None:
            for one, other in zip(before.attrs.programs, next(rest).attrs.programs, strict=True):
                _carry_marks(one, other, lengths)
        else:
            for op in islice(rest, length):
                _mark(op, before)


def _mark(op: Operator, call: Operator) -> None:
    for inner in [op, *(o for nested in op.attrs.programs for o in nested.walk())]:
        inner.role, inner.guard, inner.precision, inner.why = call.role, call.guard, call.precision, call.why
        inner.scope = inner.scope or call.scope


class InlineFunctions(Pass):
    """Each call of a model-local function becomes the body of the function."""

    name = "inline-functions"
    guarantees = (Property.INLINED,)

    def applies(self, graph: Graph, context: Context) -> bool:
        return bool(graph.info.functions)

    def run(self, graph: Graph, context: Context) -> bool:
        return inline_functions(graph)


class TryInlineFunctions(Pass):
    """Each call of a model-local function becomes its body where that can be; a note says where not."""

    name = "try-inline-functions"

    def run(self, graph: Graph, context: Context) -> bool:
        try:
            return inline_functions(graph)
        except GraphError as error:
            context.notes.append(f"the model's functions stay as they are, in float32: {error}")
            return False
