"""What the speech demo hears, and how it is scored: recordings, strings of them, features, batches, error rate."""

from __future__ import annotations

import functools
import lzma
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RATE = 8000
WINDOW, HOP, BANDS = 200, 80, 40  # samples: 25 ms every 10 ms, as usual for speech
BLANK, CLASSES = 0, 11  # class 1 + d is digit d
_FFT = 256
#: Mel energies below this are silence.
_FLOOR = np.float32(1e-5)


@dataclass
class Recordings:
    """Spoken digits: samples in [-1, 1], which digit, by whom, and whether the take is held out for the test."""

    waves: list[np.ndarray]
    labels: np.ndarray
    speakers: np.ndarray
    held_out: np.ndarray

    def __len__(self) -> int:
        return len(self.waves)


def read(folder: Path) -> Recordings:
    """The Free Spoken Digit Dataset: its ``{digit}_{speaker}_{index}.wav`` files, or ``audio_int16le_8k.raw[.xz]`` with
    ``meta.npz`` (label, speaker, index, length). Takes 0 to 4 are held out, as its authors do."""
    if (folder / "meta.npz").exists():
        with np.load(folder / "meta.npz") as meta:
            label, speaker, index, length = (meta[key] for key in ("label", "speaker", "index", "length"))
        waves = np.split(_samples(folder / "audio_int16le_8k.raw"), np.cumsum(length)[:-1])
    else:
        files = sorted(file for sub in (folder, folder / "recordings") for file in sub.glob("?_*_*.wav"))
        if not files:
            raise SystemExit(
                f"error: {folder} has no {{digit}}_{{speaker}}_{{index}}.wav. Clone the Free Spoken Digit "
                "Dataset, github.com/Jakobovski/free-spoken-digit-dataset, and pass its folder "
                "'recordings' as --data. Or pass --synthetic"
            )
        parts = np.array([file.stem.split("_") for file in files])
        label, speaker, index = parts[:, 0].astype(int), parts[:, 1], parts[:, 2].astype(int)
        waves = [_wav(file) for file in files]
    scaled = [samples.astype(np.float32) / np.float32(32768) for samples in waves]
    return Recordings(scaled, np.asarray(label), np.unique(speaker, return_inverse=True)[1], np.asarray(index) < 5)


def _samples(path: Path) -> np.ndarray:
    packed = path.with_name(path.name + ".xz")
    if not path.exists() and not packed.exists():
        raise SystemExit(f"error: {path}[.xz] is missing; it belongs to meta.npz")
    with lzma.open(packed) if packed.exists() else path.open("rb") as file:
        return np.frombuffer(file.read(), "<i2")


def _wav(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"error: {path} is not 8 kHz mono 16 bit")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def synthetic(count: int, seed: int) -> Recordings:
    """Digits as the two tones of a telephone key, of random length and loudness, in some noise; a quarter held out."""
    rng = np.random.default_rng(seed)
    low, high = (941, 697, 697, 697, 770, 770, 770, 852, 852, 852), (1336, *[1209, 1336, 1477] * 3)
    labels, waves = np.arange(count) % 10, []
    for digit in labels:
        time = np.arange(rng.integers(1200, 3000)) / RATE
        tones = sum(np.sin(2 * np.pi * f[digit] * time) for f in (low, high))
        waves.append((rng.uniform(0.1, 0.4) * tones + rng.normal(0, 0.01, len(time))).astype(np.float32))
    return Recordings(waves, labels, np.zeros(count, int), np.arange(count) // 10 % 4 == 0)


# -- features ----------------------------------------------------------------------------------------
@functools.cache
def mel_filters() -> np.ndarray:
    """[bins, BANDS] triangles of equal width on the mel scale, 2595 log10(1 + f / 700), up to half the rate."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    bins = np.fft.rfftfreq(_FFT, 1 / RATE)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    rise, fall = (bins - low) / (middle - low), (high - bins) / (high - middle)
    return np.maximum(0, np.minimum(rise, fall)).astype(np.float32)


def log_mel(samples: np.ndarray) -> np.ndarray:
    """float32 [frames, BANDS]: logarithms of the mel energies; samples behind the last whole window are left out."""
    if len(samples) < WINDOW:
        samples = np.pad(samples, (0, WINDOW - len(samples)))
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    spectrum = np.fft.rfft(frames * np.hanning(WINDOW).astype(np.float32), _FFT)
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    return np.log(np.maximum(power @ mel_filters(), _FLOOR))


@dataclass
class Features:
    """Log-mel features, each band shifted and scaled to mean 0 and deviation 1 over the training recordings."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, data: Recordings) -> Features:
        """From the recordings that are not held out."""
        all_ = np.concatenate([log_mel(w) for w, out in zip(data.waves, data.held_out, strict=True) if not out])
        return cls(all_.mean(0), 1 / (all_.std(0) + np.float32(1e-3)))

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        return (log_mel(samples) - self.mean) * self.scale

    @property
    def silence(self) -> np.ndarray:
        """The features of a frame of zeros: what batches are padded with."""
        return (np.log(_FLOOR) - self.mean) * self.scale


# -- strings of digits -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sizes:
    """Of batches: ``batch`` strings of up to ``longest`` digits, padded to one of ``buckets`` (frames, rising): few
    sizes, for each is compiled once."""

    batch: int
    longest: int
    buckets: tuple[int, ...]

    @property
    def samples(self) -> int:
        """What fits the largest bucket."""
        return self.buckets[-1] * HOP


@dataclass
class Utterance:
    """Features [frames, BANDS] of a string of digits, and the digits."""

    features: np.ndarray
    digits: list[int]


def utterances(
    data: Recordings, chosen: np.ndarray, sizes: Sizes, features: Features, rng: np.random.Generator, vary: bool = False
) -> list[Utterance]:
    """Strings of 1 to ``sizes.longest`` digits of one speaker, with short silences; each chosen recording occurs once.

    A string that would not fit the largest bucket ends early; a single recording that does not is cut.
    ``vary``: other speeds, loudness and noise, for training.
    """
    found = []
    for speaker in np.unique(data.speakers[chosen]):
        left = list(rng.permutation(np.flatnonzero(chosen & (data.speakers == speaker))))
        while left:
            pieces: list[np.ndarray] = [_silence(rng)]
            digits: list[int] = []
            for _ in range(rng.integers(1, sizes.longest + 1)):
                samples = data.waves[left[-1]] if left else None
                if samples is not None and vary:
                    samples = _varied(samples, rng)
                if samples is None or (digits and sum(map(len, [*pieces, samples])) > sizes.samples):
                    break
                digits.append(int(data.labels[left.pop()]))
                pieces += [samples, _silence(rng)]
            whole = np.concatenate(pieces)[: sizes.samples]
            if vary:
                whole = whole + rng.normal(0, 10 ** rng.uniform(-5, -3), len(whole)).astype(np.float32)
            found.append(Utterance(features(whole), digits))
    return found


def _silence(rng: np.random.Generator) -> np.ndarray:
    return np.zeros(rng.integers(RATE // 20, RATE // 6), np.float32)


def _varied(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Up to 15 % faster or slower, up to twice as loud or half."""
    places = np.arange(0, len(samples) - 1, rng.uniform(0.87, 1.15))
    return (2 ** rng.uniform(-1, 1) * np.interp(places, np.arange(len(samples)), samples)).astype(np.float32)


@dataclass
class Batch:
    """``features`` float32 [batch, 1, frames, BANDS], ``frames`` of each string, ``labels`` [batch, longest] as
    classes, ``symbols``: how many of each; ``rows``: the numbers of the utterances."""

    features: np.ndarray
    frames: np.ndarray
    labels: np.ndarray
    symbols: np.ndarray
    rows: np.ndarray


def batches(data: list[Utterance], sizes: Sizes, features: Features, rng: np.random.Generator) -> list[Batch]:
    """All utterances in batches of similar length, each padded to a bucket with silence, in random order.

    The last is filled up with utterances that occur elsewhere too.
    """
    rows = np.concatenate([np.arange(len(data)), rng.integers(0, len(data), -len(data) % sizes.batch)])
    rows = rows[np.argsort([len(data[r].features) for r in rows], kind="stable")]
    return [
        _batch([data[r] for r in part], part, sizes, features)
        for part in rng.permutation(rows.reshape(-1, sizes.batch))
    ]


def _batch(data: list[Utterance], rows: np.ndarray, sizes: Sizes, features: Features) -> Batch:
    frames = np.array([len(u.features) for u in data])
    padded = np.tile(features.silence, (len(data), next(b for b in sizes.buckets if b >= frames.max()), 1))
    labels = np.zeros((len(data), sizes.longest), np.int64)
    for row, utterance in enumerate(data):
        padded[row, : frames[row]] = utterance.features
        labels[row, : len(utterance.digits)] = np.array(utterance.digits) + 1
    return Batch(padded[:, None].astype(np.float32), frames, labels, np.array([len(u.digits) for u in data]), rows)


# -- scores ------------------------------------------------------------------------------------------
def greedy(logits: np.ndarray) -> list[int]:
    """The digits of the most likely path of [steps, CLASSES]: repeats are one, blanks none (Graves et al. 2006)."""
    path = np.argmax(logits, 1)
    first = np.append(True, path[1:] != path[:-1])
    return [int(c) - 1 for c in path[first] if c != BLANK]


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """The least number of insertions, deletions and substitutions that make ``b`` of ``a``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def error_rate(heard: Sequence[Sequence[int]], spoken: Sequence[Sequence[int]]) -> float:
    """Edits over symbols, of all strings together."""
    return sum(map(edit_distance, heard, spoken)) / sum(map(len, spoken))
