"""Program: what a user holds, and the programs that building code adds to.

The current programs are their thread's (or asyncio task's) own, so that two threads may build two programs at once. A
thread that stands in no ``program_guard`` builds into the default programs, of which the process has one pair.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError, OrderError
from amp_transpiler.ir import clone, context, onnx_in, onnx_out, verify
from amp_transpiler.ir.blocks import Blocks
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import FORWARD, Variable
from amp_transpiler.ir.parameter_names import names_of_parameter
from amp_transpiler.ir.patterns import matching_names
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.lists import TARGET_OPSET
from amp_transpiler.lists.paddle import paddle_arguments, paddle_attributes
from amp_transpiler.passes.canonicalize import opset
from amp_transpiler.passes.lowering import cost_estimate, lowering, memory_estimate
from amp_transpiler.passes.lowering.cost_estimate import CostEstimate
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.memory_estimate import MemoryEstimate
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.passes.view.lookups import is_row_lookup
from amp_transpiler.passes.view.synchronized import mark_synchronized


class Program(Blocks):
    """A static program: operators and variables, ordered inputs and outputs, and state updates.

    ``name`` is what messages call it: that of its file, or ``program_<n>`` where none is given. ``updates`` maps a
    persistable variable to the variable whose value it takes when a step ends. ``startup`` is the program that
    initialises these (None for a startup program). A program is its own, only block, by Paddle's names of both.
    """

    def __init__(self, name: str | None = None, startup: Program | None = None) -> None:
        super().__init__(name, startup)
        #: What ``amp.convert`` did to make it, which says its type; None for any other.
        self.conversion: Any = None

    if not TYPE_CHECKING:  # to a type checker an unknown name is an error
        __getattr__ = paddle_attributes("amp_transpiler.Program")

    # -- files and copies ----------------------------------------------------------------------
    @classmethod
    def from_onnx(
        cls,
        model_or_path: str | os.PathLike[str] | onnx.ModelProto,
        *,
        name: str | None = None,
        external_data_dir: str | os.PathLike[str] | None = None,
    ) -> Program:
        """The program of an ONNX model, with its startup program in ``startup``; nothing of the model is lost.

        A ModelProto is not changed; its weights are shared, not copied. External data is mapped from disk (from the
        model's folder, or ``external_data_dir``). Float initializers that are weights are trainable parameters, running
        statistics are state, and the others (masks, bounds, single numbers) constants; all carry their content in
        ``data``. Element types and shapes come from the file and from ONNX's inference; :meth:`untyped` names the rest.
        ModelFileError (or ModelFileNotFoundError) for no usable model file, GraphError for a malformed graph.
        """
        return onnx_in.load(model_or_path, cls, name=name, external_data_dir=external_data_dir)

    def to_onnx(
        self, path: str | os.PathLike[str] | None = None, *, scope: Any = None, external_data: bool | str | None = None
    ) -> onnx.ModelProto:
        """The program as a ModelProto, written to ``path`` where one is given: whole, or not at all.

        Persistable variables get the value that ``scope.find_var(name)`` gives, else the content that they carry
        (``data``), else they are graph inputs. ``external_data``: None keeps embedded what was embedded and puts what
        was external (everything, beyond 2 GB) into ``<path>.data``, which is replaced only where it is that model's;
        True or a file name puts weights there or into the file named, False embeds all. The same program gives the
        same bytes. GraphError: a malformed program, or a value that does not fit; ModelFileWriteError: no such file.
        """
        return onnx_out.save(self, path, scope=scope, external_data=external_data)

    def verify(self) -> None:
        """Check edges, names, producers, captures, element types, attributes, updates; GraphError with ten findings."""
        verify.verify(self)

    def untyped(self) -> list[str]:
        """Names of the variables, those of nested programs included, whose type is not known."""
        return verify.untyped(self)

    def clone(self, for_test: bool = False) -> Program:
        """A copy that shares constant content and the startup program with this one, and nothing else.

        ``for_test`` keeps forward operators only, turned into their form for evaluation, and drops the updates,
        what served them alone, and variables that have no use left.
        """
        return clone.clone(self, for_test)

    def __copy__(self) -> Program:
        return self.clone()  # one that shares operators would be changed with this one, and not know

    # -- places --------------------------------------------------------------------------------
    def convert_opset(self, target: int = TARGET_OPSET) -> bool:
        """Rewrite every ai.onnx operator, nested ones too, to ``target`` (7 to what onnx knows); whether any changed.

        GraphError, and an unchanged program, where ``target`` cannot express an operator.
        """
        with unchanged_on_error(self):
            return opset.convert_opset(self, target)

    @paddle_arguments("Program.lower")
    def lower(
        self,
        place: Place | str,
        feed_shapes: Mapping[str, Sequence[int]] | None = None,
        fetch_list: Sequence[Variable | str] = (),
    ) -> Lowered:
        """The ONNX model that ``place`` runs: CPUPlace(), CUDAPlace(0), WebGPUPlace(0), or the kind of one ("cuda").

        None of them needs a GPU.

        ``feed_shapes`` gives the shapes of feeds whose declared shape is not fixed; ``fetch_list`` (variables or
        names) what the model returns beside the updated state, by default the outputs. ``to_onnx(path)`` of the result
        writes the model. ArgumentError for an unknown feed or a shape that does not fit it, GraphError for an unknown
        fetch or a shape that has to be fixed and is not.
        """
        return lowering.lower_for(self, place, feed_shapes, fetch_list)

    def memory_estimate(
        self,
        feed_shapes: Mapping[str, Sequence[int]] | None = None,
        place: Place | str | None = None,
        fetch_list: Sequence[Variable | str] = (),
        rank: int | None = None,
    ) -> MemoryEstimate:
        """Forecast what running it takes on ``place`` (default ``CPUPlace()``), by following the lowered model.

        ``feed_shapes`` maps the names of feeds whose declared shape is not fixed to their shapes; sizes under one
        symbolic name need to be given once. ``fetch_list`` is the run's. ``rank``: of those that share optimizer state,
        by default the one that has most. Liveness follows onnxruntime: its order of nodes, kernels that write over an
        input, products that take on a bias or a transposition, views, tensors that take a dead one's buffer, updates in
        place, and on CPU the arena and the copies in which pooling and recurrent kernels run. Steps measured on CPU are
        within 10 % of it, a GRU in mixed precision 17 % below. Not counted: the runtime's code and thread pools (tens
        of MiB), temporaries inside of loops (a few MiB) and of convolutions that unfold their input, what CUDA
        libraries take, and that regions of the arena which an earlier program took serve this one too.

        ArgumentError names a feed whose shape is missing or does not fit, GraphError a fetch that is unknown or a
        tensor whose shape depends on data.
        """
        return memory_estimate.memory_estimate(self, feed_shapes, place, fetch_list, rank)

    def cost_estimate(
        self,
        place: Place | str,
        feed_shapes: Mapping[str, Sequence[int]] | None = None,
        fetch_list: Sequence[Variable | str] = (),
    ) -> CostEstimate:
        """Count what a run costs on ``place``: kernels, bytes that they move, arithmetic, memory. Nothing runs.

        ``feed_shapes`` and ``fetch_list`` as for :meth:`memory_estimate`, which raises the same errors. Every node of
        the lowered model counts with what it reads and writes, as if nothing were fused or found in a cache.
        The result's ``forecast("A100")`` says how long that takes on a device, and
        ``amp.compare_costs`` whether 16 bit pays there.
        """
        return cost_estimate.cost_estimate(self, place, feed_shapes, fetch_list)

    def export_training(
        self,
        folder: str | os.PathLike[str],
        place: Place | str | Sequence[Place | str],
        feed_shapes: Mapping[str, Sequence[int]] | None = None,
        *,
        outputs: Sequence[Variable | str] | None = None,
        fetch_list: Sequence[Variable | str] = (),
        eval_shapes: Mapping[str, Sequence[int]] | None = None,
        infer_shapes: Mapping[str, Sequence[int]] | None = None,
        test_program: Program | None = None,
        scope: Any = None,
        portable: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Write the training step as a folder that any onnxruntime trains with, without Python; returns the folder.

        It has ``train.onnx`` (one step: forward, backward, loss scaling, updates), ``eval.onnx``, ``infer.onnx``, with
        gradient accumulation ``accumulate.onnx`` (a run inside of a window), the state as a checkpoint
        (``state.safetensors``, ``meta.json``) and ``manifest.json``, which says how they fit together; see
        docs/exported_steps.md, and ``demo/runners`` for programs that train with it. ``amp.load_checkpoint`` reads the
        checkpoints that these save, and they those of ``amp.save_checkpoint``. It appears whole or not at all.

        Args:
            folder: a new one, an empty one, or with ``overwrite`` one that holds an exported step.
            place: what the step is lowered for, as by :meth:`lower`; no GPU is needed. Or several, which share a state.
            feed_shapes: the shapes of feeds whose declared shape is not fixed; ``eval_shapes`` and ``infer_shapes``
                those of ``eval.onnx`` and ``infer.onnx``, where they differ.
            outputs: what ``infer.onnx`` gives, and ``eval.onnx`` beside the loss. By default the test program's
                declared outputs, or what the loss compares with its labels.
            fetch_list: what ``train.onnx`` gives beside the losses, ``found_inf`` and scheduled learning rates.
            test_program: what evaluates and infers, with the same names of state; by default ``clone(for_test=True)``.
            scope: holds the state (default: the global one), as after the startup program and ``amp_init``.
            portable: on CPU, the same bits under every build of onnxruntime (x86, wasm), not those of the executor.

        Raises:
            OrderError: the program has no training step. ScopeError: the scope lacks state, or holds another type.
            ArgumentError: a folder with something else in it, unknown feeds, a program of several ranks.
            GraphError: a shape that has to be fixed and is not. PrecisionError: a type that other runtimes lack.
            ModelFileWriteError: the folder cannot be written.
        """
        return _export(
            self,
            folder,
            place,
            feed_shapes,
            outputs=outputs,
            fetch_list=fetch_list,
            eval_shapes=eval_shapes,
            infer_shapes=infer_shapes,
            test_program=test_program,
            scope=scope,
            portable=portable,
            overwrite=overwrite,
        )

    def mark_sparse(self, *patterns: str) -> int:
        """Mark parameters whose name, or the name or scope of what reads them, fits a pattern as sparse tables, as
        ``amp.nn.embedding(is_sparse=True)`` does: ``mark_sparse("embeddings/*")``.

        Where a step looks rows of such a table up, by a Gather of its first axis, its gradient is that of these rows.
        Returns the number of tables; ArgumentError for no pattern, one that fits no parameter that is looked up, or a
        program that has gradients already: then none is marked.
        """
        if not patterns:
            raise ArgumentError(f"mark_sparse of program '{self.name}' takes at least one pattern, such as 'table_*'")
        if any(v.grad_of is not None for v in self.variables):
            raise OrderError(f"program '{self.name}' has gradients already; mark its sparse tables before minimize")
        kind = f"parameter of program '{self.name}' whose rows are looked up"
        marked = matching_names(looked_up(self), patterns, "mark_sparse", names_of_parameter, kind)
        for table in marked:
            table.sparse = True
        self.touch()
        return len(marked)

    def synchronize_batch_norm(self, *patterns: str) -> int:
        """Let batch normalisations whose name or scope fits a pattern, all by default, take their statistics over the
        batches of all ranks, as ``amp.nn.batch_norm(synchronized=True)`` does.

        Returns their number; ArgumentError for a pattern that fits none, or a program without any, OrderError for one
        that has gradients already.
        """
        return mark_synchronized(self, patterns or ("*",))


_export: Callable[..., Path]


def set_exporter(export: Callable[..., Path]) -> None:
    """Let ``export`` write training steps: ``amp_transpiler.export``, which takes state from scopes, above programs."""
    global _export
    _export = export


def looked_up(program: Graph) -> list[Variable]:
    """Parameters of which an operator looks rows up: a Gather of the first axis."""
    return [v for v in program.parameters if v.shape and any(is_row_lookup(op, slot) for op, slot in v.readers)]


def split_embedding_parameters(program: Program) -> tuple[list[Variable], list[Variable]]:
    """(tables, others): parameters of which rows are looked up and nothing else is read, and the rest.

    For an optimizer each, under one loss scale: ``amp.decorate([Adagrad(0.1, parameter_list=tables),
    Adam(1e-3, parameter_list=others)])``. A table that a product reads too, as where input and output embeddings are
    tied, is among the others. ArgumentTypeError: no program.
    """
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"split_embedding_parameters: {program!r} is no amp.Program")
    tables = {
        table.key
        for table in looked_up(program)
        if all(is_row_lookup(op, slot) for op, slot in table.readers if op.role == FORWARD)
    }
    parameters = program.parameters
    return [v for v in parameters if v.key in tables], [v for v in parameters if v.key not in tables]


def program_of(variable: Variable) -> Program:
    """The program that a variable belongs to; GraphError where that is a bare graph, which no user holds."""
    program = variable.program
    if not isinstance(program, Program):
        raise GraphError(f"variable '{variable.name}' belongs to the graph '{program.name}', which is no amp.Program")
    return program


_default: list[tuple[Program, Program]] = []
_lock = threading.Lock()
_programs: ContextVar[tuple[Program, Program] | None] = ContextVar("programs", default=None)


def _current() -> tuple[Program, Program]:
    current = _programs.get()
    if current is not None:
        return current
    with _lock:
        if not _default:
            startup = Program("startup")
            _default.append((Program("main", startup), startup))
    return _default[0]


def default_main_program() -> Program:
    """The program that building code adds to."""
    return _current()[0]


def default_startup_program() -> Program:
    """The program that initialisers are added to."""
    return _current()[1]


@paddle_arguments("program_guard")
@contextmanager
def program_guard(main: Program, startup: Program | None = None) -> Iterator[None]:
    """Build into ``main``, and put initialisers into ``startup`` (default: ``main.startup``, made if missing).

    ArgumentTypeError for what is no Program.
    """
    for argument, given in (("main", main), ("startup", startup)):
        if not isinstance(given, Program) and not (given is None and argument == "startup"):
            raise ArgumentTypeError(f"program_guard: {argument} is {given!r}; expected an amp.Program")
    if startup is None:
        startup = main.ensure_startup()
    elif main.startup is None and main is not startup:
        main.startup = startup
    with context.inside(_programs, (main, startup)):
        yield
