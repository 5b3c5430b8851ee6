"""Standard operators that have neither a gradient nor a lowering rule here: their traits alone."""

from __future__ import annotations

from amp_transpiler.ir.opdef import traits

# Signals, vision and pools.
traits(
    "BlackmanWindow",
    "HammingWindow",
    "HannWindow",
    "TfIdfVectorizer",
)
traits("MelWeightMatrix", settings=(3, 4))
traits("NonMaxSuppression", settings=(0, 1, 3, 4), places=(0,))
# Control flow, sequences and optionals: what is inside moves, the operators of nested graphs compute.
traits(
    "ConcatFromSequence",
    "If",
    "Loop",
    "Optional",
    "OptionalGetElement",
    "OptionalHasElement",
    "Scan",
    "SequenceAt",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceErase",
    "SequenceInsert",
    "SequenceLength",
    "SequenceMap",
    "SplitToSequence",
)
# Quantised numbers and bit patterns.
traits("BitCast", bits=True)
traits("DynamicQuantizeLinear", settings=(0,), quantises=True)
