"""Calls as a user writes them, for type checkers alone: every right one is taken, every wrong one found.

``make test`` runs ``mypy --strict`` on it, to which a ``type: ignore`` that hides nothing is an error; pyright agrees
with ``reportUnnecessaryTypeIgnoreComment``. Nothing here runs.
"""

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

# -- the builder ------------------------------------------------------------------------------------------------
x = amp.data("x", [None, 3, 28, 28], "float32")
label = amp.data("label", [None, 1], "int64")
y: amp.Variable = F.relu(x, name="first")
y = F.max_pool2d(x, 2, stride=(2, 2), padding="SAME", name="pool")
y = F.adaptive_avg_pool2d(x, [1, None])
y = F.mean(x, axis=[2, 3], keepdim=True, name="mean") + F.conv2d(x, y, bias=None, stride=2)
y = amp.nn.conv2d(x, 8, 3, act="relu", name="conv")
y = F.softmax(amp.nn.fc(F.dropout(y, 0.1), 10), axis=-1)
loss = F.cross_entropy(y, label, reduction="mean", name="loss")
values, places = F.topk(y, 2)
y = x.reshape([0, -1]).mean(axis=1)

x.reshap[0]  # type: ignore[index]
F.relu("x")  # type: ignore[arg-type]
F.relu(x, "first")  # type: ignore[call-arg]
F.relu(x, nam="first")  # type: ignore[call-arg]
F.max_pool2d(x)  # type: ignore[call-arg]
F.max_pool2d(x, kernel=2)  # type: ignore[call-arg]
F.avg_pool1d(x, 2, exclusive="no")  # type: ignore[arg-type]
F.adaptive_max_pool3d(x, output_size=2.5)  # type: ignore[arg-type]
F.mean(x, keepdims=True)  # type: ignore[call-arg]
F.conv1d_transpose(x)  # type: ignore[call-arg]
F.conv3d(x, y, groups="all")  # type: ignore[arg-type]
F.softmax(x, name=3)  # type: ignore[arg-type]
amp.nn.conv2d(x, "8", 3)  # type: ignore[arg-type]

# -- optimizers ---------------------------------------------------------------------------------------------------
adam = amp.optimizer.Adam(
    amp.optimizer.lr.CosineAnnealingDecay(1e-3, 100),
    parameter_list=["fc_*"],
    grad_clip=amp.optimizer.ClipGradByGlobalNorm(1.0),
    multi_precision=True,
)
opt = amp.decorate(adam, use_pure_fp16=True, accumulate_steps=2)
opt = amp.decorate([adam, amp.optimizer.Lamb()], level="O2", master_grad=True, scaler=amp.LossScaler.torch())
operators, pairs = opt.minimize(loss)
print(operators[0].type, pairs[0][1].name)

amp.optimizer.Adam(lr=1e-3)  # type: ignore[call-arg]
amp.optimizer.AdamW(beta1="0.9")  # type: ignore[arg-type]
amp.optimizer.SGD(0.1, parameter_list=3)  # type: ignore[arg-type]
amp.optimizer.Momentum(0.1, 0.9, grad_clip=1.0)  # type: ignore[arg-type]
amp.decorate(adam, use_pure_fp16=True, level="O2")  # type: ignore[call-overload]
amp.decorate(adam, dynamic=True)  # type: ignore[call-overload]
amp.decorate("adam")  # type: ignore[arg-type]
opt.minimize(loss, params=[])  # type: ignore[call-arg]

# -- models -------------------------------------------------------------------------------------------------------
converted = amp.convert("model.onnx", mode="mixed", keep_io=["image"], calibration={"image": np.zeros(3)}, check=True)
if converted.conversion.verdict is not None:
    name, error = converted.conversion.verdict.worst
    print(name.upper(), error + 1.0, converted.conversion.notes[0].upper())
result = amp.fit("model.onnx", "out.onnx", data="train.npz", epochs=3, lr=1e-3, freeze=["stem*"], loss_scale=None)
print(result.history[0].epoch + 1, result.output.name)

amp.convert("model.onnx", modes="mixed")  # type: ignore[call-arg]
amp.convert("model.onnx", tolerance="small")  # type: ignore[arg-type]
print(converted.conversion.verdicts)  # type: ignore[attr-defined]
amp.fit("model.onnx", "out.onnx", data="train.npz", epoch=3)  # type: ignore[call-arg]
amp.fit("model.onnx", "out.onnx", data="train.npz", epochs="3")  # type: ignore[arg-type]
amp.fit("model.onnx", "out.onnx")  # type: ignore[call-arg]

# -- running ------------------------------------------------------------------------------------------------------
executor = amp.Executor(amp.CPUPlace())
with amp.scope_guard(amp.Scope()):
    found = executor.run(amp.default_main_program(), feed={"x": np.zeros(3)}, fetch_list=[loss, "conv.tmp_0"])
try:
    executor.close()
except amp.errors.ExecutionError as refused:
    print(refused.args)
executor.run(fetches=[loss])  # type: ignore[call-arg]
executor.run(feed=[1])  # type: ignore[arg-type]
amp.Executor(place=0)  # type: ignore[arg-type]
executor.runn()  # type: ignore[attr-defined]
amp.ClipGradByGlobalNorm(1.0)  # type: ignore[attr-defined]
F.rellu(x)  # type: ignore[attr-defined]
amp.optimizer.Adm()  # type: ignore[attr-defined]
adam.minimise(loss)  # type: ignore[attr-defined]
