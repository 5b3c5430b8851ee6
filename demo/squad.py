"""SQuAD for the demo: reading, WordPiece windows, the best span, and the official scores."""

from __future__ import annotations

import json
import lzma
import re
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Text to (piece numbers, first and last character of each piece in the text).
Encode = Callable[[list[str]], list[tuple[list[int], list[tuple[int, int]]]]]
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = frozenset(string.punctuation)


@dataclass
class Question:
    """A question on a paragraph. ``answers``: all that count as right; ``start``: where ``text`` stands in it."""

    question: str
    context: str
    answers: list[str]
    start: int
    text: str


@dataclass
class Pieces:
    """A vocabulary and its tokeniser; ``cls``, ``sep`` and ``pad`` are the numbers of the marks."""

    encode: Encode
    size: int
    cls: int
    sep: int
    pad: int


# -- data --------------------------------------------------------------------------------------------
def _text(path: Path, what: str) -> str:
    for candidate, opener in ((path, open), (path.with_name(path.name + ".xz"), lzma.open)):
        if candidate.exists():
            with opener(candidate, "rt", encoding="utf8") as file:
                return str(file.read())
    raise SystemExit(
        f"error: there is no {path}[.xz]. {what} Or pass --synthetic for a small synthetic set that needs no file"
    )


def read_questions(folder: Path, part: str) -> list[Question]:
    """The questions of a folder: from the official ``<part>-v1.1.json``, or from ``squad11_<part>.jsonl[.xz]`` with a
    paragraph a line, {context, qas: [{q, a, start, start_text, exact}]}."""
    official = folder / f"{part}-v1.1.json"
    if official.exists():
        articles = json.loads(official.read_text(encoding="utf8"))["data"]
        found = [(p["context"], qa) for article in articles for p in article["paragraphs"] for qa in p["qas"]]
        return [_official(context, qa) for context, qa in found]
    lines = _text(
        folder / f"squad11_{part}.jsonl",
        "Put SQuAD's train-v1.1.json and dev-v1.1.json into a folder and pass it as --data.",
    ).splitlines()
    paragraphs = [json.loads(line) for line in lines if line]
    return [
        Question(
            qa["q"], p["context"], qa["a"], qa["start"] if part != "train" or qa["exact"] else -1, qa["start_text"]
        )
        for p in paragraphs
        for qa in p["qas"]
    ]


def _official(context: str, qa: dict[str, Any]) -> Question:
    answers = [answer["text"] for answer in qa["answers"]]
    return Question(qa["question"], context, answers, qa["answers"][0]["answer_start"], answers[0])


def wordpiece(vocabulary: Path) -> Pieces:
    """BERT's uncased WordPiece (``vocab.txt[.xz]`` in a folder) by the tokenizers library."""
    try:
        from tokenizers import BertWordPieceTokenizer
    except ImportError:
        raise SystemExit("error: WordPiece needs the tokenizers library: pip install tokenizers") from None
    entries = _text(vocabulary / "vocab.txt", "It is the vocabulary of bert-base-uncased; pass its folder as --vocab.")
    numbers = {entry: number for number, entry in enumerate(entries.split("\n")) if entry}
    tokenizer = BertWordPieceTokenizer(numbers, lowercase=True)

    def encode(texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        return [(e.ids, e.offsets) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return Pieces(encode, len(numbers), numbers["[CLS]"], numbers["[SEP]"], numbers["[PAD]"])


def synthetic(count: int, seed: int) -> tuple[list[Question], Pieces]:
    """Synthetic questions, "which door does k3 open" on "k7 opens d2 . k3 opens d9", and their words as pieces."""
    rng = np.random.default_rng(seed)
    words = ["which", "does", "open", "opens", "door", ".", *(f"{kind}{n}" for kind in "kd" for n in range(20))]
    numbers = {word: number for number, word in enumerate(words, 3)}
    questions = []
    for _ in range(count):
        keys, doors = rng.permutation(20)[:6], rng.permutation(20)[:6]
        context = " ".join(f"k{key} opens d{door} ." for key, door in zip(keys, doors, strict=True))
        which = rng.integers(6)
        start = context.index(f"k{keys[which]} ") + len(f"k{keys[which]} opens ")
        answer = f"d{doors[which]}"
        questions.append(Question(f"which door does k{keys[which]} open", context, [answer], start, answer))

    def encode(texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        found = [list(re.finditer(r"\S+", text)) for text in texts]
        return [([numbers[m.group()] for m in each], [m.span() for m in each]) for each in found]

    return questions, Pieces(encode, len(words) + 3, 1, 2, 0)


# -- windows -----------------------------------------------------------------------------------------
@dataclass
class Windows:
    """``[CLS] question [SEP] part of the paragraph [SEP]``, n windows of ``length`` pieces.

    ``ids``, ``segments``, ``mask`` int64 [n, length]; a segment is 0 for the question, 1 for the paragraph, and 2 for
    those pieces of it that the question has as well. ``spans`` int32 [n, length, 2]: characters of each piece of the
    paragraph, -1 elsewhere. ``start``, ``end`` int64 [n]: places of the answer, -1 where it lies outside.
    ``question`` int64 [n]: the number of the question.
    """

    ids: np.ndarray
    segments: np.ndarray
    mask: np.ndarray
    spans: np.ndarray
    start: np.ndarray
    end: np.ndarray
    question: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def pick(self, rows: Any) -> Windows:
        """These windows alone."""
        return Windows(**{name: array[rows] for name, array in vars(self).items()})


def windows(questions: list[Question], pieces: Pieces, length: int, stride: int, longest_question: int = 40) -> Windows:
    """Sliding windows over each paragraph, ``stride`` pieces apart; a long question is cut.

    Where a question leaves room for fewer pieces than ``stride``, windows lie side by side: none is skipped.
    """
    contexts = list(dict.fromkeys(q.context for q in questions))
    encoded = dict(zip(contexts, pieces.encode(contexts), strict=True))
    rows = []
    for number, (question, (asked, _)) in enumerate(
        zip(questions, pieces.encode([q.question for q in questions]), strict=True)
    ):
        asked = asked[:longest_question]
        ids, offsets = encoded[question.context]
        first, last = _answer(question, offsets)
        room = length - len(asked) - 3
        if room < 1:
            raise SystemExit(f"error: --seq-len {length} leaves no room beside a question of {len(asked)} pieces")
        step = min(stride, room)
        for begin in range(0, max(1, len(ids) - room + step), step):
            part = slice(begin, begin + room)
            rows.append((number, asked, ids[part], offsets[part], first - begin, last - begin))
    return _filled(rows, pieces, length)


def _answer(question: Question, offsets: list[tuple[int, int]]) -> tuple[int, int]:
    """First and last piece of the answer; (-1, -1) where its place is not known."""
    begin, end = question.start, question.start + len(question.text)
    inside = [i for i, (a, b) in enumerate(offsets) if begin >= 0 and a < end and b > begin]
    return (inside[0], inside[-1]) if inside else (-1, -1)


def _filled(rows: list[tuple], pieces: Pieces, length: int) -> Windows:
    count = len(rows)
    ids, segments, mask = (np.zeros((count, length), np.int64) for _ in range(3))
    ids[:] = pieces.pad
    spans = np.full((count, length, 2), -1, np.int32)
    start, end, number = (np.full(count, -1, np.int64) for _ in range(3))
    for row, (question, asked, part, offsets, first, last) in enumerate(rows):
        head, tail = len(asked) + 2, len(asked) + 2 + len(part)
        ids[row, : tail + 1] = [pieces.cls, *asked, pieces.sep, *part, pieces.sep]
        mask[row, : tail + 1] = 1
        segments[row, head : tail + 1] = 1
        segments[row, head:tail] += np.isin(part, asked)
        spans[row, head:tail] = offsets
        number[row] = question
        if 0 <= first <= last < len(part):
            start[row], end[row] = head + first, head + last
    return Windows(ids, segments, mask, spans, start, end, number)


# -- answers -----------------------------------------------------------------------------------------
def best_spans(
    data: Windows, start: np.ndarray, end: np.ndarray, questions: list[Question], longest: int = 30
) -> dict[int, str]:
    """The answer to each question: the span of at most ``longest`` pieces with the largest start + end logit, over
    all windows of the question. ``start``, ``end``: logits [n, length]."""
    inside = data.spans[:, :, 0] >= 0
    start, end = (np.where(inside, each.astype(np.float64), -np.inf) for each in (start, end))
    best: dict[int, tuple[float, int, int, int]] = {}
    allowed = np.triu(np.tri(data.ids.shape[1], k=longest - 1, dtype=bool))  # first <= last < first + longest
    for row in range(len(data)):
        scores = np.where(allowed, start[row][:, None] + end[row][None, :], -np.inf)
        place = int(np.argmax(scores))
        first, last = divmod(place, scores.shape[1])
        found = (float(scores[first, last]), row, first, last)
        question = int(data.question[row])
        if question not in best or found[0] > best[question][0]:
            best[question] = found
    return {
        q: questions[q].context[data.spans[row, first, 0] : data.spans[row, last, 1]]
        for q, (_, row, first, last) in best.items()
    }


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space: as the official script compares answers."""
    text = "".join(sign for sign in text.lower() if sign not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(answer: str, gold: str) -> float:
    """1 where both are the same when normalised, else 0."""
    return float(normalised(answer) == normalised(gold))


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the words of both, as bags."""
    given, wanted = normalised(answer).split(), normalised(gold).split()
    common = (Counter(given) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def score(answers: dict[int, str], questions: list[Question]) -> tuple[float, float]:
    """(exact match, F1) in per cent over all questions, each the best over its golds; no answer scores 0.

    Source: the official evaluate-v1.1.py of SQuAD (Rajpurkar et al. 2016).
    """
    totals = [0.0, 0.0]
    for number, question in enumerate(questions):
        for index, metric in enumerate((exact_match, f1)):
            if number in answers:
                totals[index] += max(metric(answers[number], gold) for gold in question.answers)
    return 100 * totals[0] / len(questions), 100 * totals[1] / len(questions)
