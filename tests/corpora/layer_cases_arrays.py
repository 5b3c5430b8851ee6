"""Functions of the builder beside torch's: arithmetic, activations, axes, products, shapes, losses; see ``layer_cases``."""

from __future__ import annotations

from tests.corpora.layer_inputs import IMAGE, LINE, Case, D, I, P, U, X

#: Comparisons: our name -> torch's.
TORCH = {
    "equal": "eq",
    "not_equal": "ne",
    "less_than": "lt",
    "less_equal": "le",
    "greater_than": "gt",
    "greater_equal": "ge",
}
ARRAYS: dict[str, Case] = {
    # -- activations
    **{
        name: ([X], (lambda F, x, name=name: getattr(F, name)(x)), (lambda T, t, x, name=name: getattr(T, name)(x)))
        for name in (
            "relu6",
            "silu",
            "mish",
            "hardswish",
            "hardsigmoid",
            "leaky_relu",
            "elu",
            "selu",
            "celu",
            "softplus",
            "softsign",
            "hardtanh",
            "hardshrink",
            "softshrink",
            "tanhshrink",
            "glu",
        )
    },
    "log_sigmoid": ([X], lambda F, x: F.log_sigmoid(x * 30), lambda T, t, x: T.logsigmoid(x * 30)),
    "softplus_beta": ([X], lambda F, x: F.softplus(x, beta=3), lambda T, t, x: T.softplus(x, 3)),
    "thresholded_relu": ([X], lambda F, x: F.thresholded_relu(x, 0.4), lambda T, t, x: T.threshold(x, 0.4, 0.0)),
    "elu_alpha": ([X], lambda F, x: F.elu(x, 0.3), lambda T, t, x: T.elu(x, 0.3)),
    "celu_alpha": ([X], lambda F, x: F.celu(x, 0.3), lambda T, t, x: T.celu(x, 0.3)),
    "leaky_relu_slope": ([X], lambda F, x: F.leaky_relu(x, 0.3), lambda T, t, x: T.leaky_relu(x, 0.3)),
    "hardtanh_range": ([X], lambda F, x: F.hardtanh(x, -0.5, 0.2), lambda T, t, x: T.hardtanh(x, -0.5, 0.2)),
    "prelu": ([IMAGE, (4,)], lambda F, x, w: F.prelu(x, w), lambda T, t, x, w: T.prelu(x, w)),
    "prelu_one": ([IMAGE, (1,)], lambda F, x, w: F.prelu(x, w), lambda T, t, x, w: T.prelu(x, w)),
    "swish": ([X], lambda F, x: F.swish(x) * F.hardswish(x), lambda T, t, x: T.silu(x) * T.hardswish(x)),
    "maxout": ([IMAGE], lambda F, x: F.maxout(x, 2), lambda T, t, x: x.reshape(2, 2, 2, 7, 6).amax(2)),
    # -- arithmetic
    **{
        name: (
            [P(3, 4)],
            (lambda F, x, name=name: getattr(F, name)(x)),
            (lambda T, t, x, name=name: getattr(t, name)(x)),
        )
        for name in (
            "abs",
            "exp",
            "log",
            "sqrt",
            "rsqrt",
            "square",
            "reciprocal",
            "erf",
            "sin",
            "cos",
            "log2",
            "log10",
            "log1p",
            "expm1",
            "neg",
            "prod",
            "norm",
            "std",
            "var",
        )
    },
    **{
        name: (
            [X],
            (lambda F, x, name=name: getattr(F, name)(x)),
            (lambda T, t, x, name=name: getattr(t, name)(x.detach())),
        )
        for name in ("sign", "floor", "ceil", "round")
    },
    **{
        name: (
            [U(3, 4)],
            (lambda F, x, name=name: getattr(F, name)(x)),
            (lambda T, t, x, name=name: getattr(t, name)(x)),
        )
        for name in ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "atanh")
    },
    "acosh": ([P(3, 4)], lambda F, x: F.acosh(x + 1), lambda T, t, x: t.acosh(x + 1)),
    "maximum": ([X, (4,)], lambda F, x, y: F.maximum(x, y), lambda T, t, x, y: t.maximum(x, y)),
    "minimum": ([X, (4,)], lambda F, x, y: F.minimum(x, y), lambda T, t, x, y: t.minimum(x, y)),
    "arithmetic": (
        [X, (4,)],
        lambda F, x, y: F.divide(F.subtract(F.multiply(x, y), 2), F.add(F.square(y), 1)),
        lambda T, t, x, y: (x * y - 2) / (y * y + 1),
    ),
    **{
        name: (
            [I(3, 4, 5), I(3, 5)],
            (lambda F, x, y, name=name: F.cast(getattr(F, name)(x, y), "float32")),
            (lambda T, t, x, y, name=name: getattr(t, TORCH[name])(x, y).float()),
        )
        for name in TORCH
    },
    **{
        name: (
            [I(2, 4, 5), I(2, 5)],
            (lambda F, x, y, name=name: F.cast(getattr(F, name)(x > 0, F.logical_not(y > 0)), "float32")),
            (lambda T, t, x, y, name=name: getattr(t, name)(x > 0, y == 0).float()),
        )
        for name in ("logical_and", "logical_or")
    },
    "isnan": (
        [X],
        lambda F, x: F.cast(F.isnan(F.log(x)), "float32"),
        lambda T, t, x: t.isnan(t.log(x.detach())).float(),
    ),
    "isinf": ([X], lambda F, x: F.cast(F.isinf(F.relu(x) * 1e38 * 10), "float32"), lambda T, t, x: (x > 0.35).float()),
    "full": ([X], lambda F, x: x * F.full([3, 4], 2.5) + F.zeros([4]) - F.ones([3, 1]), lambda T, t, x: x * 2.5 - 1),
    "full_like": (
        [X],
        lambda F, x: F.full_like(x, 2.5) * x - F.ones_like(x) + F.zeros_like(x),
        lambda T, t, x: x * 2.5 - 1,
    ),
    "arange": (
        [X],
        lambda F, x: x * F.cast(F.arange(0, 8, 2) + 1, "float32") + F.arange(0.5, 4),
        lambda T, t, x: x * t.arange(1, 9, 2) + t.arange(0.5, 4),
    ),
    "assign": ([X], lambda F, x: F.assign(x) + F.assign([1, 2.5, 3, 4]), lambda T, t, x: x + t.tensor([1, 2.5, 3, 4])),
    "clip": ([X], lambda F, x: F.clip(x, -0.4, 0.3), lambda T, t, x: x.clip(-0.4, 0.3)),
    "clip_below": ([X], lambda F, x: F.clip(x, max=0.3), lambda T, t, x: x.clip(max=0.3)),
    "scale": (
        [X],
        lambda F, x: F.scale(F.scale(x, 2.0, 1.0), 3.0, 1.0, bias_after_scale=False),
        lambda T, t, x: 3 * (2 * x + 2),
    ),
    # -- along axes
    "max": ([IMAGE], lambda F, x: F.max(x, [1, -1], keepdim=True), lambda T, t, x: x.amax((1, -1), keepdim=True)),
    "min": ([X], lambda F, x: F.min(x), lambda T, t, x: x.min()),
    "prod_axis": ([X], lambda F, x: F.prod(x, 0), lambda T, t, x: x.prod(0)),
    "logsumexp": ([X], lambda F, x: F.logsumexp(x, -1), lambda T, t, x: x.logsumexp(-1)),
    "var_axis": (
        [X],
        lambda F, x: F.var(x, 1, unbiased=False, keepdim=True),
        lambda T, t, x: x.var(1, unbiased=False, keepdim=True),
    ),
    "norm_1": ([X], lambda F, x: F.norm(x, 1, -1), lambda T, t, x: x.norm(1, -1)),
    "norm_3": ([X], lambda F, x: F.norm(x, 3, -1), lambda T, t, x: x.norm(3, -1)),
    "norm_inf": ([X], lambda F, x: F.norm(x, float("inf")), lambda T, t, x: x.norm(float("inf"))),
    "norm_least": (
        [X],
        lambda F, x: F.norm(x, -float("inf"), 0, keepdim=True),
        lambda T, t, x: x.norm(-float("inf"), 0, keepdim=True),
    ),
    "normalize_3": ([X], lambda F, x: F.normalize(x, 2.5), lambda T, t, x: T.normalize(x, 2.5)),
    "cumprod": ([IMAGE], lambda F, x: F.cumprod(x, 1), lambda T, t, x: x.cumprod(1)),
    "cumprod_zeros": ([IMAGE], lambda F, x: F.cumprod(F.relu(x), -1), lambda T, t, x: T.relu(x).cumprod(-1)),
    "normalize": ([X], lambda F, x: F.normalize(x), lambda T, t, x: T.normalize(x)),
    "normalize_1": ([X], lambda F, x: F.normalize(x, 1, 0), lambda T, t, x: T.normalize(x, 1, 0)),
    "cosine_similarity": (
        [X, X],
        lambda F, a, b: F.cosine_similarity(a, b),
        lambda T, t, a, b: T.cosine_similarity(a, b),
    ),
    "cumsum": ([X], lambda F, x: F.cumsum(x, -1), lambda T, t, x: x.cumsum(-1)),
    "cumsum_flat": ([X], lambda F, x: F.cumsum(x), lambda T, t, x: x.reshape(-1).cumsum(0)),
    "topk": ([IMAGE], lambda F, x: F.topk(x, 3)[0], lambda T, t, x: x.topk(3)[0]),
    "topk_smallest": (
        [IMAGE],
        lambda F, x: F.topk(x, 2, axis=1, largest=False)[0],
        lambda T, t, x: x.topk(2, 1, largest=False)[0],
    ),
    "sort": ([X], lambda F, x: F.sort(x, descending=True), lambda T, t, x: x.sort(descending=True)[0]),
    "argsort": ([X], lambda F, x: F.argsort(x, 0), lambda T, t, x: x.argsort(0)),
    "argmax": ([X], lambda F, x: F.argmax(x, 1, keepdim=True), lambda T, t, x: x.argmax(1, keepdim=True)),
    "argmax_flat": ([X], lambda F, x: F.argmax(x), lambda T, t, x: x.argmax()),
    "argmin": ([X], lambda F, x: F.argmin(x, 0, dtype="int32"), lambda T, t, x: x.argmin(0).int()),
    # -- matrix products
    "bmm": ([(2, 3, 4), (2, 4, 5)], lambda F, a, b: F.bmm(a, b), lambda T, t, a, b: t.bmm(a, b)),
    "mm": ([X, (4, 2)], lambda F, a, b: F.mm(a, b), lambda T, t, a, b: t.mm(a, b)),
    "dot": ([(4,), (4,)], lambda F, a, b: F.dot(a, b), lambda T, t, a, b: t.dot(a, b)),
    "dot_rows": ([X, X], lambda F, a, b: F.dot(a, b), lambda T, t, a, b: (a * b).sum(-1)),
    "einsum": (
        [(2, 3, 4), (2, 5, 4)],
        lambda F, a, b: F.einsum("bid, bjd -> bij", a, b),
        lambda T, t, a, b: t.einsum("bid,bjd->bij", a, b),
    ),
    "linear": (
        [(2, 3, 4), (4, 5), (5,)],
        lambda F, x, w, b: F.linear(x, w, b),
        lambda T, t, x, w, b: T.linear(x, w.T, b),
    ),
    # -- shapes and indices
    "stack": ([X, X], lambda F, a, b: F.stack([a, b], 1), lambda T, t, a, b: t.stack([a, b], 1)),
    "stack_last": ([X, X], lambda F, a, b: F.stack([a, b], -1), lambda T, t, a, b: t.stack([a, b], -1)),
    "unstack": ([X], lambda F, x: F.unstack(x, 1)[2], lambda T, t, x: x.unbind(1)[2]),
    "unbind": ([X], lambda F, x: F.unbind(x)[1], lambda T, t, x: x.unbind()[1]),
    "strided_slice": (
        [IMAGE],
        lambda F, x: F.strided_slice(x, [2, 3], [0, 5], [6, 0], [2, -3]),
        lambda T, t, x: x[:, :, 0:6:2][..., [5, 2]],
    ),
    "chunk": ([X], lambda F, x: F.chunk(x, 2, -1)[1], lambda T, t, x: x.chunk(2, -1)[1]),
    "expand": ([(3, 1)], lambda F, x: F.expand(x, [2, -1, 5]), lambda T, t, x: x.expand(2, -1, 5)),
    "broadcast_to": ([(4,)], lambda F, x: F.broadcast_to(x, [2, 3, 4]), lambda T, t, x: x.expand(2, 3, 4)),
    "expand_as": ([(3, 1), X], lambda F, x, y: F.expand_as(x, y) * y, lambda T, t, x, y: x.expand_as(y) * y),
    "tile": ([X], lambda F, x: F.tile(x, [2, 1, 3]), lambda T, t, x: x.repeat(2, 1, 3)),
    "tile_last": ([X], lambda F, x: F.tile(x, [2]), lambda T, t, x: x.repeat(1, 2)),
    "flip": ([IMAGE], lambda F, x: F.flip(x, [1, -1]), lambda T, t, x: x.flip(1, -1)),
    "roll": ([X], lambda F, x: F.roll(x, -1, 1), lambda T, t, x: x.roll(-1, 1)),
    "tril": ([X], lambda F, x: F.tril(x, 1), lambda T, t, x: x.tril(1)),
    "triu": ([X], lambda F, x: F.triu(x), lambda T, t, x: x.triu()),
    "pad_all": ([X], lambda F, x: F.pad(x, [1, 0, 2, 3], value=0.5), lambda T, t, x: T.pad(x, (2, 3, 1, 0), value=0.5)),
    "pad_image": ([IMAGE], lambda F, x: F.pad(x, [1, 2, 0, 3]), lambda T, t, x: T.pad(x, (1, 2, 0, 3))),
    "pad_reflect": (
        [IMAGE],
        lambda F, x: F.pad(x, [1, 2, 0, 3], mode="reflect"),
        lambda T, t, x: T.pad(x, (1, 2, 0, 3), mode="reflect"),
    ),
    "pad_replicate": (
        [LINE],
        lambda F, x: F.pad(x, 2, mode="replicate", data_format="NCL"),
        lambda T, t, x: T.pad(x, (2, 2), mode="replicate"),
    ),
    "pad_circular": (
        [IMAGE],
        lambda F, x: F.pad(x, [1, 2, 0, 3], mode="circular"),
        lambda T, t, x: T.pad(x, (1, 2, 0, 3), mode="circular"),
    ),
    "squeeze_all": ([(1, 3, 1)], lambda F, x: F.squeeze(x), lambda T, t, x: x.squeeze()),
    "gather_nd": ([IMAGE, I(2, 5, 2)], lambda F, x, i: F.gather_nd(x, i), lambda T, t, x, i: x[i[:, 0], i[:, 1]]),
    "index_select": ([X, I(4, 6)], lambda F, x, i: F.index_select(x, i, 1), lambda T, t, x, i: x.index_select(1, i)),
    "take_along_axis": ([X, I(4, 3, 2)], lambda F, x, i: F.take_along_axis(x, i, 1), lambda T, t, x, i: x.gather(1, i)),
    "scatter_add": (
        [X, I(3, 5), (5, 4)],
        lambda F, x, i, u: F.scatter_nd_add(x, F.unsqueeze(i, 1), u),
        lambda T, t, x, i, u: x.index_add(0, i, u),
    ),
    "scatter": (
        [X, (2, 4)],
        lambda F, x, u: F.scatter(x, F.cast(F.argsort(F.sum(u, 1)), "int32"), u),
        lambda T, t, x, u: x.index_copy(0, u.sum(1).argsort(), u),
    ),
    "scatter_overwritten": (
        [X, I(3, 5), (5, 4)],
        lambda F, x, i, u: F.scatter(x, i, u, overwrite=False),
        lambda T, t, x, i, u: x.index_fill(0, i, 0).index_add(0, i, u),
    ),
    "one_hot": ([I(4, 3, 2)], lambda F, i: F.one_hot(i, 5), lambda T, t, i: T.one_hot(i, 5).float()),
    "embedding": ([I(4, 3, 2), (4, 5)], lambda F, i, w: F.embedding(i, w), lambda T, t, i, w: T.embedding(i, w)),
    # -- losses
    **{
        f"{name}_{reduction}": (
            [X, X],
            (lambda F, x, y, name=name, r=reduction: getattr(F, name)(x, y, reduction=r)),
            (lambda T, t, x, y, name=name, r=reduction: getattr(T, name)(x, y.detach(), reduction=r)),
        )
        for name in ("l1_loss", "mse_loss")
        for reduction in ("mean", "sum", "none")
    },
    "smooth_l1": (
        [X, X],
        lambda F, x, y: F.smooth_l1_loss(3 * x, y, delta=1.5, reduction="none"),
        lambda T, t, x, y: T.huber_loss(3 * x, y, delta=1.5, reduction="none"),
    ),
    "square_error_cost": ([X, X], lambda F, x, y: F.square_error_cost(x, y), lambda T, t, x, y: (x - y) ** 2),
    "bce": (
        [U(3, 4), U(3, 4), P(4)],
        lambda F, x, y, w: F.binary_cross_entropy(x, y, w, reduction="sum"),
        lambda T, t, x, y, w: T.binary_cross_entropy(x, y.detach(), w.detach().expand(3, 4), reduction="sum"),
    ),
    "bce_logits": (
        [X, U(3, 4), P(4), P(4)],
        lambda F, x, y, w, p: F.binary_cross_entropy_with_logits(5 * x, y, w, "none", p),
        lambda T, t, x, y, w, p: T.binary_cross_entropy_with_logits(
            5 * x, y.detach(), w.detach().expand(3, 4), pos_weight=p.detach(), reduction="none"
        ),
    ),
    "nll_loss": (
        [IMAGE, I(4, 2, 7, 6), P(4)],
        lambda F, x, i, w: F.nll_loss(F.log_softmax(x, 1), i, w, ignore_index=2),
        lambda T, t, x, i, w: T.nll_loss(x.log_softmax(1), i, w.detach(), ignore_index=2),
    ),
    "ce_weight": (
        [(5, 4), I(4, 5), P(4)],
        lambda F, x, i, w: F.cross_entropy(x, i, weight=w, ignore_index=1),
        lambda T, t, x, i, w: T.cross_entropy(x, i, w.detach(), ignore_index=1),
    ),
    "ce_axis": (
        [IMAGE, I(4, 2, 7, 6)],
        lambda F, x, i: F.cross_entropy(x, i, axis=1, reduction="none"),
        lambda T, t, x, i: T.cross_entropy(x, i, reduction="none"),
    ),
    "ce_soft": (
        [(5, 4), D(5, 4)],
        lambda F, x, y: F.cross_entropy(x, y, soft_label=True),
        lambda T, t, x, y: T.cross_entropy(x, y),
    ),
    "ce_soft_none": (
        [(5, 4), D(5, 4)],
        lambda F, x, y: F.cross_entropy(x, y, soft_label=True, reduction="none"),
        lambda T, t, x, y: T.cross_entropy(x, y, reduction="none")[:, None],
    ),
    "ce_smooth": (
        [(5, 4), I(4, 5)],
        lambda F, x, i: F.cross_entropy(x, i, label_smoothing=0.1, ignore_index=2),
        lambda T, t, x, i: T.cross_entropy(x, i, label_smoothing=0.1, ignore_index=2),
    ),
    "ce_smooth_soft": (
        [(5, 4), D(5, 4)],
        lambda F, x, y: F.cross_entropy(x, y, "sum", soft_label=True, label_smoothing=0.2),
        lambda T, t, x, y: T.cross_entropy(x, y, label_smoothing=0.2, reduction="sum"),
    ),
    "ce_probabilities": (
        [D(5, 4), I(4, 5)],
        lambda F, x, i: F.cross_entropy(x, i, use_softmax=False),
        lambda T, t, x, i: T.nll_loss(x.log(), i),
    ),
    "softmax_ce": (
        [(5, 4), I(4, 5, 1)],
        lambda F, x, i: F.softmax_with_cross_entropy(x, i),
        lambda T, t, x, i: T.cross_entropy(x, i[:, 0], reduction="none")[:, None],
    ),
    "label_prior": (
        [D(5, 4), D(1, 4)],
        lambda F, y, p: F.label_smooth(y, p, 0.2),
        lambda T, t, y, p: 0.8 * y + 0.2 * p,
    ),
    "label_smooth": ([D(5, 4)], lambda F, y: F.label_smooth(y, epsilon=0.2), lambda T, t, y: 0.8 * y + 0.05),
}
