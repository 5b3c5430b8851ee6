"""The speech demo: its scores, features and batches against what they are defined as, and a few steps."""

from __future__ import annotations

import argparse
import sys
import wave
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import amp_transpiler as amp
from tests.helpers.placement import needs_placement_tool, place
from tests.helpers.where import DATA, NO_DATA

FSDD = DATA / "fsdd"

import speech_ctc  # noqa: E402
import spoken  # noqa: E402
import training  # noqa: E402

DIGITS = st.lists(st.integers(0, 2), max_size=6)
SIZES = spoken.Sizes(8, 3, (64, 128, 160))


@cache
def distance(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The definition, by its last step."""
    if not a or not b:
        return len(a) + len(b)
    return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))


# -- scores ------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(DIGITS, DIGITS)
def test_edit_distance_is_its_definition(a: list[int], b: list[int]) -> None:
    assert spoken.edit_distance(a, b) == distance(tuple(a), tuple(b))


def test_the_error_rate_weighs_strings_by_length() -> None:
    assert spoken.error_rate([[1, 2, 3], [4]], [[1, 2, 3], [5]]) == 1 / 4
    assert spoken.error_rate([[], [4, 4, 4]], [[7], [4]]) == 3 / 2  # more can be inserted than there is


@pytest.mark.parametrize(
    "path, digits",
    [
        ([0, 1, 1, 0, 1, 2, 2, 0], [0, 0, 1]),  # a repeat counts only across a blank
        ([3, 3, 3], [2]),
        ([1, 2, 1], [0, 1, 0]),
        ([0, 0], []),
        ([10, 0, 10, 10], [9, 9]),
    ],
)
def test_greedy_decoding_merges_repeats_then_drops_blanks(path: list[int], digits: list[int]) -> None:
    assert spoken.greedy(np.eye(spoken.CLASSES)[path]) == digits


# -- features ----------------------------------------------------------------------------------------
def test_features_are_logarithms_of_mel_energies() -> None:
    samples = np.random.default_rng(0).normal(0, 0.1, 1000).astype(np.float32)
    found = spoken.log_mel(samples)
    assert found.shape == (11, spoken.BANDS) and found.dtype == np.float32
    n, k = np.arange(200), np.arange(129)[:, None]
    windowed = samples[5 * 80 : 5 * 80 + 200] * (0.5 - 0.5 * np.cos(2 * np.pi * n / 199))
    power = np.abs((windowed * np.exp(-2j * np.pi * k * n / 256)).sum(1)) ** 2
    corners = 700 * (10 ** (np.arange(spoken.BANDS + 2) * 2595 * np.log10(1 + 4000 / 700) / 41 / 2595) - 1)
    for band in range(spoken.BANDS):
        weight = np.interp(k[:, 0] * 8000 / 256, corners[band : band + 3], [0, 1, 0], left=0, right=0)
        assert weight.any()
        np.testing.assert_allclose(found[5, band], np.log(max(1e-5, weight @ power)), rtol=1e-4)


def test_silence_and_short_recordings_have_features() -> None:
    assert (spoken.log_mel(np.zeros(50, np.float32)) == np.log(np.float32(1e-5))).all()
    data = spoken.synthetic(40, 0)
    features = spoken.Features.of(data)
    kept = np.concatenate([features(w) for w, out in zip(data.waves, data.held_out, strict=True) if not out])
    np.testing.assert_allclose(kept.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(kept.std(0), 1, atol=0.01)
    np.testing.assert_allclose(features(np.zeros(200, np.float32))[0], features.silence, rtol=1e-6)


# -- strings and batches -----------------------------------------------------------------------------
def test_every_chosen_recording_is_in_one_string() -> None:
    data = spoken.synthetic(80, 0)
    data.speakers = np.arange(80) % 3
    data.waves = [np.full(len(w), n + 1, np.float32) for n, w in enumerate(data.waves)]  # a recording says its number
    strings = spoken.utterances(data, ~data.held_out, SIZES, lambda whole: whole[:, None], np.random.default_rng(0))
    seen = []
    for string in strings:
        whole = string.features[:, 0]
        assert len(whole) <= 160 * spoken.HOP and 1 <= len(string.digits) <= 3
        takes = [int(n) - 1 for n in whole[np.flatnonzero(np.diff(whole, prepend=0))] if n]
        assert string.digits == [data.labels[n] for n in takes] and len({data.speakers[n] for n in takes}) == 1
        seen += takes
    assert sorted(seen) == list(np.flatnonzero(~data.held_out))
    assert len({len(s.digits) for s in strings}) == 3


def test_batches_hold_all_strings_padded_with_silence() -> None:
    data = spoken.synthetic(80, 0)
    features = spoken.Features.of(data)
    strings = spoken.utterances(data, ~data.held_out, SIZES, features, np.random.default_rng(0), vary=True)
    parts = spoken.batches(strings, SIZES, features, np.random.default_rng(0))
    assert set(np.concatenate([part.rows for part in parts])) == set(range(len(strings)))
    assert len({part.features.shape[2] for part in parts} - set(SIZES.buckets)) == 0
    for part in parts:
        for row, number in enumerate(part.rows):
            string, length = strings[number], part.frames[row]
            assert np.array_equal(part.features[row, 0, :length], string.features.astype(np.float32))
            assert (part.features[row, 0, length:] == features.silence).all()
            assert list(part.labels[row, : part.symbols[row]] - 1) == string.digits
            assert not part.labels[row, part.symbols[row] :].any()


# -- files -------------------------------------------------------------------------------------------
def test_both_forms_of_the_data_set_are_read(tmp_path: Path) -> None:
    samples = [np.arange(n, dtype="<i2") * 7 for n in (300, 500, 400)]
    (tmp_path / "recordings").mkdir()
    for name, each in zip(("3_anna_0", "3_anna_12", "8_bert_4"), samples, strict=True):
        with wave.open(str(tmp_path / "recordings" / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(each.tobytes())
    one = spoken.read(tmp_path)
    np.savez(tmp_path / "meta.npz", label=[3, 3, 8], speaker=[0, 0, 1], index=[0, 12, 4], length=[300, 500, 400])
    (tmp_path / "audio_int16le_8k.raw").write_bytes(np.concatenate(samples).tobytes())
    other = spoken.read(tmp_path)
    for data in (one, other):
        assert list(data.labels) == [3, 3, 8] and list(data.speakers) == [0, 0, 1]
        assert list(data.held_out) == [True, False, True]
        for found, given_ in zip(data.waves, samples, strict=True):
            assert np.array_equal(found * 32768, given_)


def test_the_stored_half_of_the_data_set() -> None:
    if not FSDD.is_dir():
        pytest.skip(NO_DATA)
    data = spoken.read(FSDD)
    assert len(data) == 1500 and data.held_out.sum() == 300 and len(set(data.speakers)) == 6
    assert np.bincount(data.labels[data.held_out]).tolist() == [30] * 10


# -- the program -------------------------------------------------------------------------------------
def options(*more: str) -> argparse.Namespace:
    sizes = ("--longest", "2", "--buckets", "64", "96", "128")
    return speech_ctc.checked(speech_ctc.arguments().parse_args(["--synthetic", "--threads", "1", *sizes, *more]))


def run(monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    small = ("--channels", "8", "--hidden", "16", "--longest", "2", "--buckets", "64", "128")
    monkeypatch.setattr(sys, "argv", ["speech_ctc.py", "--synthetic", "--threads", "1", *small, *more])
    return speech_ctc.main()


def test_every_mode_trains_and_is_served(monkeypatch, capsys, tmp_path: Path) -> None:
    assert run(monkeypatch, "--steps", "12", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(training.MODES)}
    assert rows.keys() == set(training.MODES)
    for mode, (error, *numbers) in rows.items():
        loss, scale, skipped, steps, speed = map(float, numbers)
        assert error.endswith("%") and 0 < loss < 40 and skipped < 12 and steps == 12 and speed > 0
        assert (scale == 1) == (mode == "fp32")
    assert "bare onnxruntime hears: " in out and (tmp_path / "speech.onnx").exists()


@pytest.mark.parametrize(
    "more",
    [
        ("--mode", "pure", "--dtype", "bf16"),
        ("--mode", "amp", "--dtype", "bf16"),
        ("--mode", "pure", "--loss-scale", "512"),
        ("--mode", "pure", "--cell", "lstm", "--layers", "2"),
    ],
)
def test_options_reach_the_program(more: tuple[str, ...], monkeypatch, capsys, tmp_path: Path) -> None:
    assert run(monkeypatch, *more, "--steps", "3", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert ("needs a CUDA device" in out) == ("bf16" in more) and ("hears" in out) == ("bf16" not in more)
    if "512" in more:
        assert " 512 " in out


def test_pure_fp16_learns_tones_and_onnxruntime_hears_what_it_hears(tmp_path: Path) -> None:
    chosen = options("--steps", "200", "--lr", "1e-2")
    data = spoken.synthetic(200, 0)
    features = spoken.Features.of(data)
    trained = speech_ctc.prepare("pure", chosen)
    types = {name: trained.main.var(name).dtype for name in ("conv2d_0.w_0", "gru_0.w_1", "logits.w_0")}
    assert types == {"conv2d_0.w_0": "float16", "gru_0.w_1": "float16", "logits.w_0": "float32"}
    speech_ctc.train(trained, data, features, chosen, lambda *_: None)
    rng, sizes = np.random.default_rng(1), speech_ctc.sizes_of(chosen)
    strings = spoken.utterances(data, data.held_out, sizes, features, rng)
    heard = speech_ctc.transcribe(trained, strings, features, chosen)
    assert spoken.error_rate(heard, [string.digits for string in strings]) <= 0.1
    speech_ctc.save(trained, tmp_path / "m.onnx")
    for string, expected in list(zip(strings, heard, strict=True))[:4]:
        assert speech_ctc.serve(tmp_path / "m.onnx", string) == expected


@pytest.mark.parametrize("mode", training.MODES)
@needs_placement_tool
def test_the_step_is_on_cuda_entirely(mode: str, tmp_path: Path) -> None:
    main = speech_ctc.prepare(mode, options()).main
    shapes = {"features": (4, 1, 64, spoken.BANDS), "labels": (4, 2), "steps": (4,), "symbols": (4,)}
    done = place(main.lower(amp.CUDAPlace(0), feed_shapes=shapes).model, tmp_path / "step.onnx")
    assert done.status == 0 and " 0 on CPU, 0 copies" in done.said, done.said


def test_wrong_options_are_refused(monkeypatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--loss-scale is 'dynamic' or a number, not 'much'"):
        run(monkeypatch, "--loss-scale", "much")
    with pytest.raises(SystemExit, match="--hidden must be at least 1"):
        run(monkeypatch, "--hidden", "0")
    with pytest.raises(SystemExit, match="a bucket of 8 frames holds no digit"):
        run(monkeypatch, "--buckets", "8", "64")
    monkeypatch.setattr(sys, "argv", ["speech_ctc.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"has no \{digit\}_\{speaker\}_\{index\}.wav. Clone .* Or pass --synthetic"):
        speech_ctc.main()
