"""What a program is made of: variables and operators.

Changes of edges go through the methods here and those of :class:`~amp_transpiler.ir.graph.Graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from amp_transpiler.errors import AmpError, ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.ir.adjacency import add_edge, contents, filled, predecessors, successors, trim
from amp_transpiler.ir.attributes import Attributes
from amp_transpiler.ir.reasons import Reason, parse
from amp_transpiler.ir.trains import Trains
from amp_transpiler.ir.variable_operators import PythonOperators
from amp_transpiler.lists import full_name, plain_domain
from amp_transpiler.lists.paddle import paddle_attributes
from amp_transpiler.option_checks import is_whole, shown

if TYPE_CHECKING:
    from amp_transpiler.ir.graph import Graph

FORWARD, BACKWARD, SCALING, UPDATE = "forward", "backward", "loss_scaling", "update"
ROLES = (FORWARD, BACKWARD, SCALING, UPDATE)
#: The domain of this package's own operators.
OWN = "amp_transpiler"
CAPTURE = "capture"

Shape = tuple[int | str | None, ...]
#: Element type and shape of a variable, each None where it is unknown.
TensorType = tuple[str | None, Shape | None]
#: Those of an operator's outputs; None for one that is left out.
Types = list[TensorType | None]
#: Functions that are methods of variables.
_method: Callable[[Any, str], Callable[..., Any]] = paddle_attributes("amp_transpiler.Variable")


class Variable(PythonOperators, Trains):
    """A value in a program.

    ``dtype`` is an element type name ("float32"), None while unknown or where the value is no tensor
    (then ``type_proto`` holds its ONNX type). ``shape`` is None while unknown; its entries are sizes,
    symbolic names, or None. A ``persistable`` variable lives in a scope between runs; a *parameter* is persistable and
    ``trainable``, without ``stop_gradient``. ``data`` is constant content (a TensorProto, a numpy array, or what
    ``np.asarray`` takes: a tensor of a large file). ``outer`` is the variable of the enclosing program that this one,
    in a nested program, stands for. ``grad_of`` is the forward variable that this one is the gradient of; it has its
    shape. Where ``rows`` is set, int64, it holds these rows alone, as for a table that is marked ``sparse``. Where
    ``owner`` is set, that rank alone updates it, and of state other than parameters alone holds it. Where
    ``dealt`` is set, its rows are dealt out among so many ranks (``ir/dealt_rows.py``). ``startup`` is the startup
    program that begins it, of state that a training step has beside its parameters.
    """

    __slots__ = (
        "data",
        "dealt",
        "declared",
        "doc",
        "dtype",
        "grad_of",
        "is_input",
        "key",
        "metadata",
        "name",
        "outer",
        "owner",
        "persistable",
        "producer",
        "producer_slot",
        "program",
        "rows",
        "shape",
        "sparse",
        "startup",
        "type_proto",
    )

    def __init__(self, program: Graph, key: int, name: str, dtype: str | None, shape: Shape | None) -> None:
        self.program = program
        self.key = key
        self.name = name
        self.dtype = dtype
        #: The element type that a precision pass took from it, and in which it is still fetched; None: it has its own.
        self.declared: str | None = None
        self.shape = shape
        self.persistable = self._trainable = self._stop_gradient = self.is_input = self.sparse = False
        self.data: Any = None
        self.producer: Operator | None = None
        self.producer_slot = -1
        self.outer: Variable | None = None
        self.grad_of: Variable | None = None
        self.rows: Variable | None = None
        self.owner: int | None = None
        self.dealt: int | None = None
        self.startup: Graph | None = None
        self.type_proto: Any = None
        self.doc = ""
        self.metadata: dict[str, str] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _method(self, name)

    @property
    def is_constant(self) -> bool:
        """Content fixed in the program itself, not kept in a scope."""
        return self.data is not None and not self.persistable

    @property
    def readers(self) -> list[tuple[Operator, int | str]]:
        """(operator, slot) for each use, in the order in which the operators were added."""
        nodes, reads = contents(self.program.graph), successors(self.program.graph)[self.key]
        found = [(nodes[key]["item"], slot) for key, slots in reads.items() for slot in slots]
        if len(found) > 1:
            found.sort(key=lambda use: (use[0].key, str(use[1])))
        return found

    def __repr__(self) -> str:
        shape = "?" if self.shape is None else "x".join("?" if d is None else str(d) for d in self.shape)
        return f"<{self.name}: {self.dtype or 'untyped'}[{shape}]>"


class Operator:
    """One operator. ``why`` says why it has its precision, ``guard`` whether it lies in an fp16 guard, ``inserted``
    whether it is a cast that a pass put in: passes look through those, so that running twice changes nothing."""

    #: By name, with what is to be said of those that nobody sets.
    __slots__ = {
        "attrs": None,
        "doc": None,
        "domain": None,
        "guard": None,
        "inputs": "Input variables by slot; None where an optional input is left out.",
        "inserted": None,
        "key": None,
        "metadata": None,
        "name": None,
        "outputs": "Output variables by slot; None where an optional output is left out.",
        "overload": None,
        "precision": None,
        "program": None,
        "role": None,
        "scope": None,
        "source": None,
        "type": None,
        "why": None,
    }

    def __init__(self, program: Graph, key: int, type: str, domain: str, attrs: Attributes | None = None) -> None:
        self.program = program
        self.key = key
        self.type = type
        self.domain = domain and plain_domain(domain)
        self.name = ""
        self.overload = ""
        self.attrs = Attributes() if attrs is None else attrs
        self.role = FORWARD
        self.guard = False
        self.scope = ""
        #: "float16", "bfloat16" or "float32" once a precision pass has decided; "" before.
        self.precision = ""
        self.why: Reason | None = None
        self.inserted = False
        self.doc = ""
        self.metadata: dict[str, str] = {}
        #: Fields of the file's NodeProto that have no place here (None where there are none).
        self.source: Any = None
        self.inputs: Sequence[Variable | None] = []
        self.outputs: Sequence[Variable | None] = []

    @property
    def reason(self) -> str:
        """The text of ``why``; "" where there is none."""
        return "" if self.why is None else str(self.why)

    @reason.setter
    def reason(self, text: str) -> None:
        self.why = parse(text) if text else None

    @property
    def input_arg_names(self) -> list[str]:
        """Names of the inputs that are there."""
        return [v.name for v in self.inputs if v is not None]

    @property
    def output_arg_names(self) -> list[str]:
        """Names of the outputs that are there."""
        return [v.name for v in self.outputs if v is not None]

    def has_attr(self, name: str) -> bool:
        """Whether the operator has this attribute."""
        return name in self.attrs

    def attr(self, name: str) -> Any:
        """An attribute; MissingKeyError where there is none of this name."""
        return self.attrs[name]

    @property
    def captures(self) -> list[Variable]:
        """Variables of this program that nested graphs of the operator read."""
        graph = self.program.graph
        return [graph.nodes[key]["item"] for key, slots in predecessors(graph)[self.key].items() if CAPTURE in slots]

    @property
    def full_type(self) -> str:
        """``Type`` for ai.onnx, ``domain::Type`` elsewhere, as operator lists name it."""
        return full_name(self.type, self.domain)

    @property
    def label(self) -> str:
        """A name for messages: the operator's own, else that of its first output."""
        first = next((v.name for v in self.outputs if v is not None), "")
        return self.name or (f"{self.type} -> {first}" if first else self.type)

    def input(self, slot: int) -> Variable | None:
        """The input in ``slot``, None where it is absent."""
        try:
            return self.inputs[slot] if slot < len(self.inputs) else None
        except (TypeError, IndexError):
            raise _no_slot(self, "input", slot, self.inputs) from None

    def output(self, slot: int) -> Variable | None:
        """The output in ``slot``, None where it is absent."""
        try:
            return self.outputs[slot] if slot < len(self.outputs) else None
        except (TypeError, IndexError):
            raise _no_slot(self, "output", slot, self.outputs) from None

    def set_input(self, slot: int, variable: Variable | None) -> None:
        """Make ``variable`` the input in ``slot``."""
        self._check_slot("input", slot, self.inputs, variable)
        graph, inputs = self.program.graph, filled(self.inputs, slot)
        old = inputs[slot]
        if old is not None:
            graph.remove_edge(old.key, self.key, key=slot)
        inputs[slot] = variable
        if variable is not None:
            add_edge(graph, variable.key, self.key, slot)
        else:
            trim(inputs)
        self.program.touch()

    def set_output(self, slot: int, variable: Variable | None) -> None:
        """Make this operator the producer of ``variable``, in output ``slot``."""
        self._check_slot("output", slot, self.outputs, variable)
        graph, outputs = self.program.graph, filled(self.outputs, slot)
        old = outputs[slot]
        if variable is not None and variable is not old and variable.producer is not None:
            _refuse(variable, variable.producer.label, self.label)
        if old is not None:
            graph.remove_edge(self.key, old.key, key=slot)
            old.producer, old.producer_slot = None, -1
        outputs[slot] = variable
        if variable is not None:
            variable.producer, variable.producer_slot = self, slot
            add_edge(graph, self.key, variable.key, slot)
        else:
            trim(outputs)
        self.program.touch()

    def _check_slot(self, what: str, slot: int, slots: _Slots, variable: Variable | None) -> None:
        """An error where a slot cannot be set to this variable, before anything has changed."""
        if not is_whole(slot) or slot < 0:
            raise _no_slot(self, what, slot, slots)
        if variable is not None:
            self.program.must_own(variable)

    def add_capture(self, variable: Variable) -> None:
        """Record that a nested graph of this operator reads ``variable``."""
        self.program.must_own(variable)
        if not self.program.graph.has_edge(variable.key, self.key, key=CAPTURE):
            add_edge(self.program.graph, variable.key, self.key, CAPTURE)
            self.program.touch()

    def remove_capture(self, variable: Variable) -> None:
        """Record that no nested graph of this operator reads ``variable`` any more."""
        self.program.graph.remove_edge(variable.key, self.key, key=CAPTURE)
        self.program.touch()

    def __repr__(self) -> str:
        ins = ", ".join("" if v is None else v.name for v in self.inputs)
        outs = ", ".join("" if v is None else v.name for v in self.outputs)
        return f"<{outs} = {self.full_type}({ins})>"


_Slots = Sequence[Variable | None]


def role_after(role: str, inputs: _Slots) -> str:
    """The role of a new operator where ``role`` is the context's: in forward code the latest of its inputs' makers."""
    made = [v.producer.role for v in inputs if v is not None and v.producer is not None]
    return max([role, *made], key=ROLES.index) if role == FORWARD else role


def check_operator(program: Graph, type: str, inputs: _Slots, outputs: _Slots, role: str | None) -> None:
    """GraphError where a new operator of this type may not have these slots, or ArgumentTypeError; ArgumentError for a
    role that there is none."""
    if not isinstance(type, str) or not type:
        raise ArgumentTypeError(f"add_operator: type is {shown(type)}; expected that of an operator, such as 'Relu'")
    if role is not None and role not in ROLES:
        raise ArgumentError(f"add_operator: role of {type} is {shown(role)}; expected one of {', '.join(ROLES)}")
    try:
        for variable in (*inputs, *outputs):
            if variable is not None and variable.program is not program:
                program.must_own(variable)
    except (AttributeError, TypeError):
        _check_kinds(type, inputs=inputs, outputs=outputs)
        raise
    made: set[Variable] = set()
    for variable in outputs:
        if variable is not None and (variable.producer is not None or variable in made):
            _refuse(variable, type if variable.producer is None else variable.producer.label, type)
        if variable is not None:
            made.add(variable)


def _check_kinds(type: str, **slots: Any) -> None:
    """ArgumentTypeError where slots are no lists of variables."""
    for what, given in slots.items():
        listed = isinstance(given, (list, tuple))
        wrong = next((v for v in given if not isinstance(v, Variable | None)), None) if listed else given
        if not listed or wrong is not None:
            held = f"{what} of {type} {'hold' if listed else 'are'} {shown(wrong)}"
            raise ArgumentTypeError(
                f"add_operator: {held}; expected a list of variables, None for one that is left out. program.var(name) "
                "gives a variable by its name"
            )


def _no_slot(op: Operator, what: str, slot: Any, slots: _Slots) -> AmpError:
    """The error where an operator has no such slot."""
    held = ", ".join(f"{number}: {'none' if v is None else repr(v.name)}" for number, v in enumerate(slots))
    return ArgumentError(
        f"operator '{op.label}' ({op.full_type}) has no {what} {shown(slot)}; slots are numbers from 0 on, and its "
        f"{what}s are {held or 'none'}"
    )


def other_program(program: Graph, current: Graph) -> str:
    """``program`` in a message that tells it from ``current``."""
    return f"program '{program.name}'" if program.name != current.name else f"another program called '{program.name}'"


def not_owned(variable: Variable, program: Graph) -> AmpError:
    """The error where a variable is none of ``program``."""
    if not isinstance(variable, Variable):
        return ArgumentTypeError(f"{shown(variable)} is no variable; program.var(name) gives one by its name")
    return GraphError(
        f"variable '{variable.name}' belongs to {other_program(variable.program, program)}, not to '{program.name}'; "
        "build both under one program_guard"
    )


def not_held(op: Operator, program: Graph) -> AmpError:
    """The error where an operator is none of ``program``."""
    if not isinstance(op, Operator):
        return ArgumentTypeError(f"{shown(op)} is no operator; program.operators has them")
    return GraphError(
        f"operator '{op.label}' ({op.full_type}) is not in program '{program.name}': it was removed, or is another's"
    )


def _refuse(variable: Variable, one: str, other: str) -> NoReturn:
    """GraphError: another operator makes the variable."""
    raise GraphError(
        f"variable '{variable.name}' would have two producers: '{one}' and '{other}'; a variable is written once"
    )


def origin(variable: Variable) -> Variable:
    """The variable itself, or the one of an enclosing program that it stands for."""
    while variable.outer is not None:
        variable = variable.outer
    return variable
