"""Which of onnxruntime's graph optimisers a model has no use for.

Each of them sorts the whole graph before it looks for its pattern, whether the graph holds the operators of that
pattern or not: leaving out those that cannot find anything halves the time to make a session of a training step, and
changes nothing about what it runs.
"""

from __future__ import annotations

import onnx

from amp_transpiler.ir.control import every_node

_QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear"})
_GELU = frozenset({"Erf", "Tanh", "Sigmoid", "Gelu", "FastGelu", "QuickGelu", "BiasGelu"})
_ROOTS = frozenset({"Sqrt", "ReduceMean"})  # what a normalisation that is written out has
_NORMS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"}) | {
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
}
_CONVS = frozenset({"Conv", "FusedConv", "NhwcFusedConv", "QLinearConv", "ConvTranspose"})
_POOLS = frozenset({"MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "QLinearGlobalAveragePool"}) | {
    "QLinearAveragePool"
}

#: What takes more memory than it saves time: parts of a tensor that are cut out where they are read (the directions of
#: a recurrent layer) are all cut out at once. What quantises again behind each Slice of something quantised, as the
#: gradient of a convolution has many, and writes pairs of two types there at opset 21, which do not load (1.31).
UNWANTED = ("GatherSliceToSplitFusion", "QDQPropagationTransformer")

#: Moves what turns a tensor behind operators, those that give truth values too.
TURNS = "TransposeOptimizer"

#: What is fake-quantised is computed as it is written: integer kernels round what lies between two integers to the
#: other one at times, and an exported step is run so too.
PAIRS_AS_THEY_ARE = ("session.disable_quant_qdq", "1")
#: Where integers are only brought back, as 4-bit weights are: by default a product with them rounds its other operand
#: to 8 bits, which puts it off by half a per cent.
IN_FP32 = ("session.qdq_matmulnbits_accuracy_level", "1")

#: Optimiser of onnxruntime 1.31 -> operators without any of which it finds nothing. Those that another optimiser makes
#: of others stand beside them.
_LOOKS_FOR: dict[str, frozenset[str]] = {
    "AttentionFusion": frozenset({"Softmax"}),
    "BiasDropoutFusion": frozenset({"Dropout"}),
    "BiasGeluFusion": _GELU,
    "BiasSkipLayerNormFusion": _NORMS | _ROOTS,
    "BiasSoftmaxFusion": frozenset({"Softmax"}),
    "ConvActivationFusion": _CONVS,
    "ConvAddActivationFusion": _CONVS,
    "DoubleQDQPairsRemover": _QUANTIZED,
    "DynamicQuantizeMatMulFusion": frozenset({"DynamicQuantizeLinear", "MatMulIntegerToFloat"}),
    "EmbedLayerNormFusion": frozenset({"Gather"}),
    "EnsureUniqueDQForNodeUnit": _QUANTIZED,
    "FastGeluFusion": frozenset({"Tanh"}),
    "FreeDimensionOverrideTransformer": frozenset(),  # no session here overrides one
    "GatherToSliceFusion": frozenset({"Gather"}),
    "GeluFusionL1": frozenset({"Erf"}),
    "GeluFusionL2": frozenset({"Erf"}),
    "GroupQueryAttentionFusion": frozenset({"GroupQueryAttention"}),
    "GroupQueryAttentionPreNormFusion": frozenset({"GroupQueryAttention"}),
    "LayerNormFusionL1": frozenset({"ReduceMean"}),
    "LayerNormFusionL2": frozenset({"ReduceMean"}),
    "MatMulIntegerToFloatFusion": frozenset({"MatMulInteger"}),
    "MatMulNBitsFusion": frozenset({"MatMulNBits", "DequantizeLinear"}),
    "NchwcTransformer": _CONVS | _POOLS,
    "NhwcTransformer": _CONVS | _POOLS,
    "QDQFinalCleanupTransformer": _QUANTIZED,
    "QDQPropagationTransformer": _QUANTIZED,
    "QDQS8ToU8Transformer": _QUANTIZED,
    "QDQSelectorActionTransformer": _QUANTIZED,
    "QuickGeluFusion": frozenset({"Sigmoid"}),
    "SimplifiedLayerNormFusion": frozenset({"ReduceMean"}),
    "SkipLayerNormFusion": _NORMS | _ROOTS,
    "SliceConcatToSpaceToDepthFusion": frozenset({"Slice"}),
    "WeightBiasQuantization": _QUANTIZED,
    "WhereDummyDq": _QUANTIZED,
}


def useless_optimizers(model: onnx.ModelProto) -> list[str]:
    """The names of the optimisers that find nothing in ``model``, its functions and nested graphs."""
    held = {node.op_type for node in every_node(model.graph.node)}
    for function in model.functions:
        held |= {node.op_type for node in every_node(function.node)}
    return [name for name, wanted in _LOOKS_FOR.items() if held.isdisjoint(wanted)]
