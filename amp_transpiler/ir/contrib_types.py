"""Element types of onnxruntime's own operators (com.microsoft), which ONNX's inference does not know.

A table because onnxruntime's schemas cannot be read without its session library; a test compares it with them.
"""

from __future__ import annotations

from amp_transpiler.ir.contrib_shapes import contrib_shape
from amp_transpiler.ir.nodes import Operator, TensorType

DOMAIN = "com.microsoft"
#: Where its optimisers put convolutions and poolings whose channels lie in blocks, for CPUs: all in float32.
_BLOCKED = "com.microsoft.nchwc"

#: Every output has the element type of input 0.
_AS_FIRST = frozenset(
    """
    Attention AttnLSTM BiasAdd BiasGelu BiasSoftmax BiasSplitGelu BifurcationDetector BranchwiseRMSNorm CDist
    CausalConvWithState ComplexMul ComplexMulConj ConvStateReplay ConvTransposeWithDynamicPads CropAndResize
    DecoderAttention DecoderMaskedSelfAttention DynamicQuantizeLSTM DynamicQuantizeMatMul EngramGate ExpandDims
    FastGelu FusedConv FusedGemm FusedMatMul FusedMatMulActivation GatedAdd GatedDeltaNetStateReplay GatedRMSNorm
    GatedRelativePositionBias GatherND Gelu GemmFastGelu GreedySearch GroupNorm HyperConnectionLowRankMix
    HyperConnectionPostMix HyperConnectionPreMix Inverse Irfft LinearAttentionGate LongformerAttention
    MRotaryEmbedding MatMulBlockQuantizedFp4Weight MatMulBlockQuantizedFp8Weight MatMulBnb4 MatMulFpQ4 MatMulNBits
    MatMulNBitsMlp MatMulNBitsQLoRA MatMulNBitsQkv MatMulPacked MaxpoolWithMask MoE MoEPacked NGramHashMapping
    NhwcConv NhwcFusedConv NhwcMaxPool PackedAttention PackedMultiHeadAttention PackedSparseAttentionIndexerMerge Pad
    QLinearAdd QLinearAveragePool QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearReduceMean
    QLinearSigmoid QLinearSoftmax QMoE QOrderedAttention QOrderedGelu QOrderedLayerNormalization
    QOrderedLongformerAttention QOrderedMatMul QuickGelu Range RelativePositionBias RestorePadding Rfft
    RotaryEmbedding RouterGateUpProj ScaledSiLU SparseAttention SwiGLU TorchEmbedding TransposeMatMul
    Trilu UnfoldTensor VarlenCausalConvWithState
    """.split()  # noqa: SIM905
)
#: Element types by output: the input that has it, or the type itself.
_BY_OUTPUT: dict[str, tuple[int | str, ...]] = {
    "BeamSearch": (1, 5, 5),
    "BiasDropout": (0, "bool"),
    "BitmaskBiasDropout": (0, "uint32"),
    "BitmaskDropout": (0, "uint32"),
    "DecoderMaskedMultiHeadAttention": (0, 0, 0),
    "DequantizeLinear": (1,),
    "DynamicSparseAttention": (5, 3, 3, "int32"),
    "DynamicTimeWarping": ("int32",),
    "EmbedLayerNormalization": (2, 0, 2),
    "GatedDeltaNet": (0, "float32", "float32"),
    "GatherBlockQuantized": (2,),
    "GemmaRotaryEmbedding": (1, 1),
    "GroupQueryAttention": (0, 3, 3, 0),
    "IsAllFinite": ("bool",),
    "LinearAttention": (0, 3),
    "Mamba2Verify": (0, 0, 2, 0, 2),
    "MatMulIntegerToFloat": (2,),
    "MoEGroupRouter": (0, 1, 1),
    "MulInteger": ("int32",),
    "MultiHeadAttention": (0, 0, 0),
    "NGramRepeatBlock": (1,),
    "PackedSparseAttentionIndexer": (6, 6, 12, 0, 0, 6, 0, 6, 6),
    "PagedAttention": (0, 3, 3),
    "QAttention": (2, 2),
    "QEmbedLayerNormalization": (8, 0),
    "QLinearConcat": (1,),
    "QLinearConv": (7,),
    "QLinearWhere": (1,),
    "QuantizeBFP": ("uint8", "int64", "int64"),
    "QuantizeLinear": (2,),
    "QuantizeWithOrder": ("int8",),
    "RemovePadding": (0, 1, 1, 1),
    "Sampling": (0, 3),
    "SkipGroupNorm": (0, 0),
    "SkipLayerNormalization": (0, "float32", "float32", 0),
    "SkipSimplifiedLayerNormalization": (0, "float32", "float32", 0),
    "SparseAttentionIndexer": (12, 0, 0),
    "SparsePagedAttention": (0, 3, 3),
    "SparseToDenseMatMul": (1,),
    "SpeculativePrefixCommit": (2, 0, 0),
    "Tokenizer": ("string",),
    "Unique": (0, "int64", "int64"),
    "VarlenNGramHashMapping": (0, 0, 3, 0),
    "WhisperBeamSearch": (1, 5, 5, "float32", 5),
    "WordConvEmbedding": (1,),
}
#: What ONNX tried out and withdrew, and onnxruntime has before this opset (ops/withdrawn.py).
WITHDRAWN_AT = 10
WITHDRAWN = ("Affine", "Crop", "DynamicSlice", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh")
#: The same for operators that onnxruntime has in ai.onnx itself, those that its optimisers write among them.
_IN_ONNX: dict[str, tuple[int | str, ...]] = {
    "SimplifiedLayerNormalization": (0, "float32"),
    **dict.fromkeys(WITHDRAWN, (0,)),
}
#: Inputs that are float32 whatever the data is, of operators that operator lists name: scales of a quantised cache and
#: of whole experts, and what CUDA's group norms take for that though their schema lets it be of the data's type.
_PINNED_INPUTS: dict[str, frozenset[int]] = {
    "GroupNorm": frozenset({1, 2}),
    "GroupQueryAttention": frozenset({12, 13}),
    "QMoE": frozenset({15, 16, 17, 18}),
    "SkipGroupNorm": frozenset({1, 2}),
}


def contrib_types(op: Operator) -> list[TensorType] | None:
    """Element type and shape of each output of onnxruntime's own operators; None where the table has no such one."""
    rule = _by_output(op.type, op.domain)
    if op.domain == DOMAIN and op.type in _AS_FIRST:
        rule = (0,) * len(op.outputs)
    elif op.domain == DOMAIN and op.type == "QGemm":  # a float, unless it quantises its result
        rule = ("float32",) if op.input(8) is None else (8,)
    if rule is None:
        return None
    types: list[TensorType] = []
    for slot in range(len(op.outputs)):
        entry = rule[slot] if slot < len(rule) else None
        source = op.input(entry) if isinstance(entry, int) else None
        dtype = entry if isinstance(entry, str) else (source.dtype if source is not None else None)
        types.append((dtype, contrib_shape(op, slot)))
    return types


def settled_types(op: Operator) -> list[TensorType]:
    """The same, or what is declared where the table knows nothing."""
    known = contrib_types(op) or [(None, None)] * len(op.outputs)
    declared = [(None, None) if v is None else (v.dtype, v.shape) for v in op.outputs]
    return [
        (dtype or said, shape if shape is not None else size)
        for (dtype, shape), (said, size) in zip(known, declared, strict=True)
    ]


def _by_output(type_: str, domain: str) -> tuple[int | str, ...] | None:
    if not domain:
        return _IN_ONNX.get(type_)
    if domain == _BLOCKED:
        return ("float32",)
    return _BY_OUTPUT.get(type_) if domain == DOMAIN else None


def pinned_slots(type_: str, domain: str) -> tuple[frozenset[int], frozenset[int]]:
    """Inputs and outputs that one of onnxruntime's own operators has in float32, whatever its data is."""
    inputs = _PINNED_INPUTS.get(type_) if domain == DOMAIN else None
    made = enumerate(_by_output(type_, domain) or ())
    return inputs or frozenset(), frozenset(slot for slot, entry in made if entry == "float32")
