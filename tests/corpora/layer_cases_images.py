"""Functions of the builder beside torch's: convolutions, pools, images, norms; see ``layer_cases``."""

from __future__ import annotations

from tests.corpora.layer_inputs import CUBE, IMAGE, LINE, Case

IMAGES: dict[str, Case] = {
    # -- convolutions
    "conv1d": (
        [LINE, (6, 2, 3), (6,)],
        lambda F, x, w, b: F.conv1d(x, w, b, stride=2, padding=1, dilation=2, groups=2),
        lambda T, t, x, w, b: T.conv1d(x, w, b, 2, 1, 2, 2),
    ),
    "conv1d_pads": (
        [LINE, (3, 4, 3)],
        lambda F, x, w: F.conv1d(x, w, padding=[2, 1]),
        lambda T, t, x, w: T.conv1d(T.pad(x, (2, 1)), w),
    ),
    "conv2d_same": (
        [IMAGE, (3, 4, 3, 2)],
        lambda F, x, w: F.conv2d(x, w, padding="SAME"),
        lambda T, t, x, w: T.conv2d(x, w, padding="same"),
    ),
    "conv2d_same_stride": (
        [IMAGE, (3, 4, 3, 2)],
        lambda F, x, w: F.conv2d(x, w, stride=2, padding="same"),
        lambda T, t, x, w: T.conv2d(T.pad(x, (0, 0, 1, 1)), w, stride=2),
    ),
    "conv2d_valid": (
        [IMAGE, (3, 4, 3, 2)],
        lambda F, x, w: F.conv2d(x, w, padding="VALID"),
        lambda T, t, x, w: T.conv2d(x, w),
    ),
    "conv2d_pairs": (
        [IMAGE, (3, 4, 3, 2)],
        lambda F, x, w: F.conv2d(x, w, padding=[[0, 0], [0, 0], [1, 0], [2, 1]]),
        lambda T, t, x, w: T.conv2d(T.pad(x, (2, 1, 1, 0)), w),
    ),
    "conv2d_last": (
        [(2, 7, 6, 4), (3, 4, 3, 2), (3,)],
        lambda F, x, w, b: F.conv2d(x, w, b, padding=[1, 0, 2, 1], data_format="NHWC"),
        lambda T, t, x, w, b: T.conv2d(T.pad(x.permute(0, 3, 1, 2), (2, 1, 1, 0)), w, b).permute(0, 2, 3, 1),
    ),
    "conv3d": (
        [CUBE, (4, 2, 2, 3, 2), (4,)],
        lambda F, x, w, b: F.conv3d(x, w, b, stride=(1, 2, 1), padding=(1, 0, 1)),
        lambda T, t, x, w, b: T.conv3d(x, w, b, (1, 2, 1), (1, 0, 1)),
    ),
    "conv1d_transpose": (
        [LINE, (4, 3, 3), (6,)],
        lambda F, x, w, b: F.conv1d_transpose(x, w, b, stride=3, padding=1, output_padding=1, groups=2),
        lambda T, t, x, w, b: T.conv_transpose1d(x, w, b, 3, 1, 1, 2),
    ),
    "conv2d_transpose": (
        [IMAGE, (4, 3, 3, 2), (3,)],
        lambda F, x, w, b: F.conv2d_transpose(x, w, b, stride=2, padding=(1, 0), output_size=[14, 13]),
        lambda T, t, x, w, b: T.conv_transpose2d(x, w, b, 2, (1, 0), output_padding=(1, 1)),
    ),
    "conv3d_transpose": (
        [CUBE, (2, 3, 2, 3, 2), (3,)],
        lambda F, x, w, b: F.conv3d_transpose(x, w, b, stride=(1, 2, 1), padding=(1, 0, 1), dilation=2),
        lambda T, t, x, w, b: T.conv_transpose3d(x, w, b, (1, 2, 1), (1, 0, 1), dilation=2),
    ),
    # -- pools
    "max_pool1d": ([LINE], lambda F, x: F.max_pool1d(x, 3, 2, 1), lambda T, t, x: T.max_pool1d(x, 3, 2, 1)),
    "max_pool2d_ceil": (
        [IMAGE],
        lambda F, x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda T, t, x: T.max_pool2d(x, 2, ceil_mode=True),
    ),
    "max_pool2d_last": (
        [(2, 7, 6, 4)],
        lambda F, x: F.max_pool2d(x, 3, 2, data_format="NHWC"),
        lambda T, t, x: T.max_pool2d(x.permute(0, 3, 1, 2), 3, 2).permute(0, 2, 3, 1),
    ),
    "max_pool3d": ([CUBE], lambda F, x: F.max_pool3d(x, 2, 1), lambda T, t, x: T.max_pool3d(x, 2, 1)),
    "avg_pool1d": (
        [LINE],
        lambda F, x: F.avg_pool1d(x, 3, 2, 1, exclusive=False),
        lambda T, t, x: T.avg_pool1d(x, 3, 2, 1),
    ),
    "avg_pool2d_ceil": (
        [IMAGE],
        lambda F, x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, exclusive=True),
        lambda T, t, x: T.avg_pool2d(x, 3, 2, 1, True, False),
    ),
    "avg_pool2d_divisor": (
        [IMAGE],
        lambda F, x: F.avg_pool2d(x, 2, divisor_override=3),
        lambda T, t, x: T.avg_pool2d(x, 2, divisor_override=3),
    ),
    "avg_pool3d": ([CUBE], lambda F, x: F.avg_pool3d(x, 2, 2), lambda T, t, x: T.avg_pool3d(x, 2, 2)),
    "adaptive_avg_pool1d": (
        [LINE],
        lambda F, x: F.adaptive_avg_pool1d(x, 4),
        lambda T, t, x: T.adaptive_avg_pool1d(x, 4),
    ),
    "adaptive_avg_pool2d": (
        [IMAGE],
        lambda F, x: F.adaptive_avg_pool2d(x, (3, 4)),
        lambda T, t, x: T.adaptive_avg_pool2d(x, (3, 4)),
    ),
    "adaptive_avg_pool3d": (
        [CUBE],
        lambda F, x: F.adaptive_avg_pool3d(x, (2, None, 3)),
        lambda T, t, x: T.adaptive_avg_pool3d(x, (2, None, 3)),
    ),
    "adaptive_max_pool1d": (
        [LINE],
        lambda F, x: F.adaptive_max_pool1d(x, 3),
        lambda T, t, x: T.adaptive_max_pool1d(x, 3),
    ),
    "adaptive_max_pool2d": (
        [IMAGE],
        lambda F, x: F.adaptive_max_pool2d(x, (3, 4)),
        lambda T, t, x: T.adaptive_max_pool2d(x, (3, 4)),
    ),
    "adaptive_max_pool3d": (
        [CUBE],
        lambda F, x: F.adaptive_max_pool3d(x, 1),
        lambda T, t, x: T.adaptive_max_pool3d(x, 1),
    ),
    # -- images
    "nearest": ([IMAGE], lambda F, x: F.interpolate(x, size=[9, 11]), lambda T, t, x: T.interpolate(x, (9, 11))),
    "nearest_scale": (
        [LINE],
        lambda F, x: F.upsample(x, scale_factor=2),
        lambda T, t, x: T.interpolate(x, scale_factor=2),
    ),
    "linear1d": (
        [LINE],
        lambda F, x: F.interpolate(x, size=5, mode="linear"),
        lambda T, t, x: T.interpolate(x, 5, mode="linear"),
    ),
    "bilinear": (
        [IMAGE],
        lambda F, x: F.interpolate(x, size=[10, 4], mode="bilinear"),
        lambda T, t, x: T.interpolate(x, (10, 4), mode="bilinear"),
    ),
    "bilinear_corners": (
        [IMAGE],
        lambda F, x: F.interpolate(x, size=[10, 4], mode="bilinear", align_corners=True),
        lambda T, t, x: T.interpolate(x, (10, 4), mode="bilinear", align_corners=True),
    ),
    "bilinear_last": (
        [(2, 7, 6, 4)],
        lambda F, x: F.interpolate(x, scale_factor=2, mode="bilinear", data_format="NHWC"),
        lambda T, t, x: T.interpolate(x.permute(0, 3, 1, 2), scale_factor=2, mode="bilinear").permute(0, 2, 3, 1),
    ),
    "bilinear_last_size": (
        [(2, 7, 6, 4)],
        lambda F, x: F.interpolate(x, size=[3, 9], mode="bilinear", data_format="NHWC"),
        lambda T, t, x: T.interpolate(x.permute(0, 3, 1, 2), (3, 9), mode="bilinear").permute(0, 2, 3, 1),
    ),
    "trilinear": (
        [CUBE],
        lambda F, x: F.interpolate(x, size=[3, 7, 6], mode="trilinear"),
        lambda T, t, x: T.interpolate(x, (3, 7, 6), mode="trilinear"),
    ),
    "bicubic": (
        [IMAGE],
        lambda F, x: F.interpolate(x, size=[10, 9], mode="bicubic"),
        lambda T, t, x: T.interpolate(x, (10, 9), mode="bicubic"),
    ),
    "area": (
        [IMAGE],
        lambda F, x: F.interpolate(x, size=[3, 2], mode="area"),
        lambda T, t, x: T.interpolate(x, (3, 2), mode="area"),
    ),
    "pixel_shuffle": ([IMAGE], lambda F, x: F.pixel_shuffle(x, 2), lambda T, t, x: T.pixel_shuffle(x, 2)),
    # -- norms
    "layer_norm": (
        [LINE, (4, 9), (4, 9)],
        lambda F, x, w, b: F.layer_norm(x, [4, 9], w, b),
        lambda T, t, x, w, b: T.layer_norm(x, (4, 9), w, b),
    ),
}
