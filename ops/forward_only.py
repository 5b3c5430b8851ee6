"""Standard operators that have neither a gradient nor a lowering rule here: their traits alone."""

from __future__ import annotations

from amp_transpiler.ir.opdef import traits

# Signals, vision and pools.
traits(
    "AffineGrid",
    "BlackmanWindow",
    "Col2Im",
    "DeformConv",
    "Det",
    "DFT",
    "GlobalLpPool",
    "HammingWindow",
    "HannWindow",
    "LpPool",
    "MaxRoiPool",
    "MelWeightMatrix",
    "NonMaxSuppression",
    "RoiAlign",
    "STFT",
    "TfIdfVectorizer",
    "Upsample",
)
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
traits("BitCast", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear")
# Layers that are decomposed before they are differentiated, and products.
traits(
    "Attention",
    "CausalConvWithState",
    "CumProd",
    "LinearAttention",
    "MeanVarianceNormalization",
    "RMSNormalization",
    "RotaryEmbedding",
    "SwiGLU",
    "Swish",
)
