"""CUDA sessions without a GPU: the real provider over stub libraries says what it would refuse, and why."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fake_nccl import COMPUTE
from tests.helpers.placement import cuda_stubs, needs_placement_tool
from tests.helpers.where import ROOT
from tests.runtime.test_decided_sizes import FORMS
from tests.tools.cuda_placement import over_stubs

pytestmark = needs_placement_tool

SCRIPT = """
import os
import threading
import warnings
from pathlib import Path
import numpy as np
from onnx import parser
import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.in_place import refusals
from amp_transpiler.runtime.session import Settings, create_session
from tests.helpers.programs import build

def model(signature, body):
    text = f'<ir_version: 10, opset_import: ["" : 21]> net {signature} {{ {body} }}'
    return amp.Program.from_onnx(parser.parse_model(text))

def attempt(label, action):
    try:
        print(label, "|", action())
    except amp.AmpError as error:
        print(label, "|", type(error).__name__, error)

exe = amp.Executor(amp.CUDAPlace(0))
attempt("device", lambda: amp.Executor(amp.CUDAPlace(3)))
alone = model("(float[1,2,2] x) => (float[1] y)", "k = Neg(x) y = Det(k)")
attempt("refused", lambda: exe.run(alone, {"x": np.ones((1, 2, 2), np.float32)}, ["y"]))
lowered = lower(alone, "cuda", {}, [alone.var("y")]).model
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    session, _ = create_session(lowered, amp.CUDAPlace(0), Settings(allow_cpu_fallback=True), "net")
print("allowed |", session.get_providers()[0], [str(w.message) for w in caught])
bf16 = lower(half := model("(bfloat16[2] x) => (bfloat16[2] y)", "y = Reciprocal(x)"), "cuda", {}, [half.var("y")]).model
attempt("no kernel", lambda: create_session(bf16, amp.CUDAPlace(0), Settings(), "net"))
gated = model(
    "(float[2] s, float[2] x) => (float[2] n)",
    "ok = Equal(x, x) t = Sub(s, x) n = Where(ok, t, s)")
_, graph = create_session(lower(gated, "cuda", {}, [gated.var("n")]).model, amp.CUDAPlace(0), Settings(), "net", True)
print("in place |", refusals(graph, [("s", "n")]))

log = Path(os.environ["CUDA_STUB_LOG"])
main, startup = amp.Program(), amp.Program()
with amp.program_guard(main, startup):
    h = amp.data("x", [4, 8])
    for _ in range(20):
        h = amp.nn.fc(h, 8)
    loss = amp.nn.functional.mean(h)
    amp.optimizer.Adam(0.1).minimize(loss, startup)
exe.run(startup)
log.write_text("")
amp.Executor(amp.CUDAPlace(0), cuda_graph=True).run(main, {"x": np.ones((4, 8), np.float32)}, [loss])
print("many parameters |", " ".join(log.read_text().split()))
net = build("mlp", "pure-fp16")
scope, graphs = amp.Scope(), amp.Executor(amp.CUDAPlace(0), cuda_graph=True)
exe.run(net.startup, scope=scope)
net.optimizer.amp_init(amp.CUDAPlace(0), scope=scope)

def asked(label, of=graphs, where=scope, feeds=net.feeds):
    log.write_text("")
    of.run(net.main, feeds, [net.loss], where)
    print(label, "|", " ".join(log.read_text().split()))

asked("captured"), asked("launched"), asked("launched again", feeds=graphs.stage(net.feeds))
thread = threading.Thread(target=asked, args=("in a thread",))
thread.start(), thread.join()
asked("launched then"), asked("one by one", exe)
print("sizes |", *[a.nbytes for a in net.feeds.values()])
pixels = np.ones((1, 1, 3, 3), np.float32)
folded = model("(float[1,1,3,3] x, float[1,1,1,1] w) => (float[1,1,3,3] y)", "y = Conv(x, w)")
attempt("no cuDNN", lambda: exe.run(folded, {"x": pixels, "w": pixels[..., :1, :1]}, ["y"]))
chosen = model("(float[2] x, bool c) => (float[2] y)",
    "y = If (c) <then_branch = t () => (float[2] p) { p = Neg(x) }, else_branch = e () => (float[2] q) { q = Abs(x) }>")
x = np.ones(2, np.float32)
attempt("control flow", lambda: graphs.run(chosen, {"x": x, "c": np.array(True)}, ["y"]))
from tests.runtime.test_decided_sizes import FORMS, MASKS, WIDTH, X, trained
shapes = {"x": X.shape, "mask": MASKS["some"].shape}
for form in FORMS:
    main, _, loss, gradients = trained(form, "pure")
    more = {"full": (int(MASKS["some"].sum()) * WIDTH,)} if "full" in FORMS[form] else {}
    lowered = lower(main, "cuda", shapes | more, [loss, *gradients.values()]).model
    attempt("decided, " + form, lambda: create_session(lowered, amp.CUDAPlace(0), Settings(), "net")[0].get_providers()[0])
undone = model(
    "(bool[4] m, float[1,2,2] x) => (float[1] y, int64[1] n)",
    "at = NonZero(m) two = Constant<value_ints: ints = [2]>() s = Shape(at) n = Mul(s, two) k = Neg(x) y = Det(k)")
lowered = lower(undone, "cuda", {}, list(undone.outputs)).model
attempt("with sizes", lambda: create_session(lowered, amp.CUDAPlace(0), Settings(), "net"))
attempt("on the processor", lambda: graphs.run(alone, {"x": np.ones((1, 2, 2), np.float32)}, ["y"]))
"""


RANKS = """
import os
import threading
from pathlib import Path
import onnxruntime as ort
import amp_transpiler as amp
from amp_transpiler.passes.lowering import rounds
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.runtime import session
from amp_transpiler.runtime.session import Settings, create_session
from tests.helpers.fake_nccl import on_devices
from tests.helpers.programs import build
from tests.helpers.rank_training import Trainer
from tests.helpers.tables import Recommender

place, log = amp.CUDAPlace(0), Path(os.environ["CUDA_STUB_LOG"])
providers, streams = session._providers, set()

def seen(*given):
    made = providers(*given)
    if given[0] == place:
        streams.add(made[0][1].get("user_compute_stream"))
    return made

def parts(engine, fake):
    def made(label, main, feeds, loss):
        if engine.rank:
            return
        lowered = lower(main, "cuda", {feed: array.shape for feed, array in feeds.items()}, [loss])
        streams.clear()
        chain, _ = create_session(lowered.model, place, Settings(), label, in_parts=True)
        print(label, "|", len(chain.sessions), sorted(streams))
    for name, mode, dtype in (
        ("mlp", "fp32", "float16"), ("use_case", "amp", "float16"), ("resnet", "pure-fp16", "float16"),
        ("transformer", "amp", "bfloat16"), ("transformer", "pure-fp16", "float16"),
    ):
        net = build(name, mode, dtype=dtype, black=["pool2d"] if name == "use_case" else None)
        made(f"{name} {mode} {dtype}", net.main, net.feeds, net.loss)
    net = Recommender(lambda _: amp.optimizer.Adam(0.01), "mixed")
    made("tables", net.main, net.feed(0), net.loss)
    net = Trainer("normed", "mixed", place)
    made("normed", net.main, net.feed(0), net.loss)

rounds.BUCKET = 1 << 12
session._providers = seen
on_devices(2, parts, place=place)
run, turn, ended = ort.InferenceSession.run_with_iobinding, threading.Lock(), threading.Barrier(2)
begun, own = threading.Barrier(2), threading.local()
within = []

def logged(self, binding, options=None):
    if not hasattr(own, "begun"):  # what a rank does before its first part is not the other rank's
        own.begun = begun.wait(30)
    with turn:
        before = log.read_text()
        run(self, binding, options)
        within.append({line.split(":")[0] for line in log.read_text()[len(before):].split()})

def step(engine, fake):
    trainer = Trainer("mlp", "pure", place)
    trainer.train(range(1))
    finish = engine.finish
    engine.finish = lambda: (finish(), ended.wait(30))
    engine.barrier()
    ort.InferenceSession.run_with_iobinding = logged
    engine.barrier()
    log.write_text("")
    engine.barrier()
    trainer.exe.run(trainer.main, trainer.feed(1), [trainer.loss], trainer.scope)

rounds.BUCKET, rounds.MOST = 1 << 9, 2
on_devices(2, step, place=place)
print("asked in parts |", len(within), *sorted(set.union(*within)))
print("asked in all |", *(line.split(":")[0] for line in log.read_text().split()))
"""


def printed(script: str, folder: Path) -> dict[str, str]:
    """What a script prints, by label; ``folder`` is for the log."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=over_stubs(cuda_stubs()) | {"CUDA_STUB_LOG": str(folder / "asked")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device_id=0" not in done.stderr  # onnxruntime warns of each session that is told its device
    return dict(line.split(" | ", 1) for line in done.stdout.splitlines() if " | " in line)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return printed(SCRIPT, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return printed(RANKS, tmp_path_factory.mktemp("of_ranks"))


def test_a_device_that_is_not_there(lines: dict[str, str]) -> None:
    assert lines["device"].startswith("PlaceError CUDAPlace(3) cannot be used") and "device ID: 3" in lines["device"]


def test_an_operator_that_would_fall_to_the_cpu_is_named(lines: dict[str, str]) -> None:
    assert lines["refused"].startswith("PlaceError program 'net' does not run on CUDAPlace(0) alone")
    assert "no kernel there for Det 'y" in lines["refused"] and "allow_cpu_fallback=True" in lines["refused"]


def test_allowed_fallback_warns_and_names(lines: dict[str, str]) -> None:
    assert lines["allowed"].startswith("CUDAExecutionProvider") and "except Det" in lines["allowed"]


def test_sizes_are_computed_beside_the_gpu(lines: dict[str, str]) -> None:
    """onnxruntime takes what it computes of shapes to the CPU, whatever kernels there are."""
    assert {form: lines[f"decided, {form}"] for form in FORMS} == dict.fromkeys(FORMS, "CUDAExecutionProvider")


def test_what_else_falls_to_the_cpu_is_named_beside_sizes(lines: dict[str, str]) -> None:
    found = lines["with sizes"].partition("no kernel there for ")[2]
    assert found.startswith("Det 'y") and "Mul" not in found


def test_an_element_type_without_a_kernel(lines: dict[str, str]) -> None:
    assert lines["no kernel"].startswith("PlaceError") and "Reciprocal" in lines["no kernel"]


def test_the_graph_that_cuda_runs_is_proved(lines: dict[str, str]) -> None:
    assert lines["in place"] == "['']"


def test_a_library_that_is_not_there_is_named(lines: dict[str, str]) -> None:
    assert re.match(r"ExecutionError .*libcudnn.*Install it: onnxruntime-gpu\[cuda,cudnn\]", lines["no cuDNN"])


# -- CUDA graphs ---------------------------------------------------------------------------------------------------
def asked(line: str, *kinds: str) -> list[tuple[str, str, int]]:
    """What was asked of CUDA: what, where, bytes."""
    rows = [call.split(":") for call in line.split()]
    return [(what, at, int(size)) for what, at, size in rows if what in kinds]


def test_a_graph_is_recorded_once_and_launched_from_then_on(lines: dict[str, str]) -> None:
    """The call that records launches as well: the states are brought back, and the step's own launch follows."""
    kinds = ("record", "launch")
    graph = asked(lines["captured"], "launch")[0]
    assert [what for what, *_ in asked(lines["captured"], *kinds)] == ["record", "launch", "launch"]
    assert asked(lines["launched"], *kinds) == asked(lines["launched again"], *kinds) == [graph]
    assert asked(lines["launched then"], *kinds) == [graph]
    assert asked(lines["one by one"], *kinds) == []


def test_nothing_is_read_from_the_host_inside_a_graph(lines: dict[str, str]) -> None:
    """A replay would read what lies at that address by then; and a table for each step would take longer than it."""
    what = [kind for kind, *_ in asked(lines["many parameters"], "record", "launch", "upload", "download")]
    assert what.index("launch") == what.index("record") + 1


def test_states_come_back_between_recording_and_launch(lines: dict[str, str]) -> None:
    calls = asked(lines["captured"], "download", "upload", "launch")
    first, second = (i for i, (what, *_) in enumerate(calls) if what == "launch")
    kept = {(at, size) for what, at, size in calls[:first] if what == "download"}
    back = {(at, size) for what, at, size in calls[first:second] if what == "upload"}
    assert kept == back and sum(size for _, size in kept) > 1 << 20, "parameters, masters and what else is in place"


def test_a_thread_has_graphs_of_its_own(lines: dict[str, str]) -> None:
    found = asked(lines["in a thread"], "record", "launch")
    assert [what for what, *_ in found] == ["record", "launch", "launch"]
    assert found[-1] != asked(lines["launched"], "launch")[0]


def test_feeds_are_copied_to_where_the_graph_reads_them(lines: dict[str, str]) -> None:
    sizes = sorted(int(size) for size in lines["sizes"].split())
    launched = asked(lines["launched"], "upload")
    assert sorted(size for *_, size in launched) == sizes
    assert asked(lines["launched then"], "upload") == launched
    staged = [(at, size) for _, at, size in asked(lines["launched again"], "copy")]
    assert {(at, size) for _, at, size in launched} <= set(staged), "from the device, not from the host"


@pytest.mark.parametrize(
    ("label", "why"), [("control flow", "If 'y.*' decides in the run"), ("on the processor", "no kernel there for Det")]
)
def test_what_cannot_be_captured_is_told(label: str, why: str, lines: dict[str, str]) -> None:
    assert re.match(f"PlaceError program 'net' .*{why}", lines[label])


# -- several ranks -------------------------------------------------------------------------------------------------
def test_every_part_of_a_step_is_on_cuda_entirely_and_on_the_stream_of_the_engine(of_ranks: dict[str, str]) -> None:
    """A session for a part that is not could not have been made."""
    found = {label: said.split(maxsplit=1) for label, said in of_ranks.items() if "asked" not in label}
    assert len(found) == 7 and all(int(parts) >= 2 for parts, _ in found.values()), found
    assert {streams for _, streams in found.values()} == {f"['{COMPUTE}']"}


def test_parts_are_given_to_the_device_without_a_stop(of_ranks: dict[str, str]) -> None:
    """Nothing goes to the host before the end: a copy there waits until the stream has computed what it copies."""
    count, *kinds = of_ranks["asked in parts"].split()
    assert int(count) == 2 * 3 and not {"download", "wait"} & set(kinds), kinds
    assert of_ranks["asked in all"].split().count("download") == 2, "the losses"
