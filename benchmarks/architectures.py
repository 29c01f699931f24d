"""torchvision's image classification networks by name, without torchvision: what they allocate, not what they know.

    model = build("ResNet50")
    model = build("mobilenet_v3_small", num_classes=10)

Parameters and buffers have the shapes and the order of torchvision 0.29.1's (their names differ), and a training step
runs the same operators in the same order on tensors that alias each other and die at the same points. What no memory
depends on is left out: initial weights are what torch's layers come with, and batch norms have torch's epsilon and
momentum. Nothing here reads a value of a tensor, so models can be built on the meta device or as fake tensors.

Above each family stands the module of torchvision 0.29.1 whose allocations it repeats.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Activation = Callable[[], nn.Module]
Kernel = int | tuple[int, int]

relu: Activation = partial(nn.ReLU, inplace=True)
relu6: Activation = partial(nn.ReLU6, inplace=True)
silu: Activation = partial(nn.SiLU, inplace=True)
hardswish: Activation = partial(nn.Hardswish, inplace=True)

# --- shared pieces ----------------------------------------------------------------------------------------------------


def conv_bn(
    inputs: int,
    outputs: int,
    kernel: Kernel = 1,
    stride: int = 1,
    groups: int = 1,
    activation: Activation | None = relu,
    *,
    pad: bool = True,
) -> list[nn.Module]:
    """A convolution without bias, its batch norm and an activation; padded such that stride 1 keeps the size."""
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (size[0] // 2, size[1] // 2) if pad else (0, 0)
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), *([activation()] if activation else [])]


def cell(
    inputs: int,
    outputs: int,
    kernel: Kernel = 1,
    stride: int = 1,
    groups: int = 1,
    activation: Activation | None = relu,
    *,
    pad: bool = True,
) -> nn.Sequential:
    """`conv_bn` as a module of its own: whoever calls it holds its input until the activation is done."""
    return nn.Sequential(*conv_bn(inputs, outputs, kernel, stride, groups, activation, pad=pad))


def head(width: int, classes: int, dropout: float | None = None, *, inplace: bool = False) -> list[nn.Module]:
    """Pooling to 1x1 and a linear layer, after a dropout unless it is None."""
    linear: nn.Module = nn.Linear(width, classes)
    if dropout is not None:
        linear = nn.Sequential(nn.Dropout(dropout, inplace=inplace), linear)
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), linear]


def rounded(width: float, divisor: int = 8, keep: float = 0.9) -> int:
    """The nearest multiple of `divisor`, one more where that would be less than `keep` of `width`."""
    nearest = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return nearest if nearest >= keep * width else nearest + divisor


class AddInPlace(nn.Module):
    """The branch's output takes the shortcut's on in place, then the activation."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None, activation: Activation | None = None):
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.activation = activation() if activation else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.branch(x)
        skipped = x if self.shortcut is None else self.shortcut(x)
        out += skipped
        return out if self.activation is None else self.activation(out)


class Add(nn.Module):
    """A new tensor for shortcut + branch, or for branch + shortcut, then the activation."""

    def __init__(
        self,
        branch: nn.Module,
        shortcut: nn.Module | None = None,
        activation: Activation | None = None,
        *,
        branch_first: bool = False,
    ):
        super().__init__()
        self.shortcut = shortcut
        self.branch = branch
        self.activation = activation() if activation else None
        self.branch_first = branch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.branch_first:
            x = self.branch(x) + x
        elif self.shortcut is None:
            x = x + self.branch(x)
        else:
            x = self.shortcut(x) + self.branch(x)
        return x if self.activation is None else self.activation(x)


class Concat(nn.ModuleList):
    """What each branch makes of the same input, joined by channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


class Permute(nn.Module):
    def __init__(self, *dims: int):
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class SpatialMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean([2, 3])


class StochasticDepth(nn.Module):
    """In training, whole samples are dropped and the others scaled up. torchvision.ops.stochastic_depth, mode "row"."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        keep = 1 - self.p
        kept = torch.empty([len(x)] + [1] * (x.dim() - 1), dtype=x.dtype, device=x.device).bernoulli_(keep)
        if keep > 0:
            kept.div_(keep)
        return x * kept


class SqueezeExcitation(nn.Module):
    """Channels scaled by a gate that sees all positions. torchvision.ops.misc."""

    def __init__(self, width: int, squeezed: int, activation: Activation = nn.ReLU, gate: Activation = nn.Sigmoid):
        super().__init__()
        down, up = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), down, activation(), up, gate())

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.gate(x)
        return gate * x


def mlp(width: int, hidden: int, dropout: float) -> nn.Sequential:
    """The feed-forward part of a transformer's layer. torchvision.ops.misc."""
    return nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
    )


# --- AlexNet: torchvision.models.alexnet ------------------------------------------------------------------------------


def alexnet(*, num_classes: int = 1000, dropout: float = 0.5) -> nn.Module:
    features: list[nn.Module] = []
    for inputs, outputs, kernel, stride, padding, pooled in (
        (3, 64, 11, 4, 2, True),
        (64, 192, 5, 1, 2, True),
        (192, 384, 3, 1, 1, False),
        (384, 256, 3, 1, 1, False),
        (256, 256, 3, 1, 1, True),
    ):
        features += [nn.Conv2d(inputs, outputs, kernel, stride, padding), relu()]
        features += [nn.MaxPool2d(3, 2)] if pooled else []
    classifier = [nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), relu()]
    classifier += [nn.Dropout(dropout), nn.Linear(4096, 4096), relu(), nn.Linear(4096, num_classes)]
    return nn.Sequential(nn.Sequential(*features), nn.AdaptiveAvgPool2d(6), nn.Flatten(1), nn.Sequential(*classifier))


# --- VGG: torchvision.models.vgg --------------------------------------------------------------------------------------


def vgg(repeats: Sequence[int], *, norm: bool = False, num_classes: int = 1000, dropout: float = 0.5) -> nn.Module:
    features: list[nn.Module] = []
    width = 3
    for outputs, repeat in zip((64, 128, 256, 512, 512), repeats, strict=True):
        for _ in range(repeat):
            features.append(nn.Conv2d(width, outputs, 3, padding=1))
            features += [nn.BatchNorm2d(outputs), relu()] if norm else [relu()]
            width = outputs
        features.append(nn.MaxPool2d(2, 2))
    classifier: list[nn.Module] = []
    for inputs in (512 * 7 * 7, 4096):
        classifier += [nn.Linear(inputs, 4096), relu(), nn.Dropout(dropout)]
    classifier.append(nn.Linear(4096, num_classes))
    return nn.Sequential(nn.Sequential(*features), nn.AdaptiveAvgPool2d(7), nn.Flatten(1), nn.Sequential(*classifier))


# --- ResNet, ResNeXt, Wide ResNet: torchvision.models.resnet ----------------------------------------------------------


def resnet(
    repeats: Sequence[int], *, bottleneck: bool = True, groups: int = 1, group_width: int = 64, num_classes: int = 1000
) -> nn.Module:
    stages: list[nn.Module] = []
    width = 64
    for index, repeat in enumerate(repeats):
        planes = 64 << index
        inner = planes * group_width // 64 * groups
        outputs = planes * 4 if bottleneck else planes
        blocks = []
        for block in range(repeat):
            stride = 2 if index and not block else 1
            if bottleneck:
                branch = [*conv_bn(width, inner), *conv_bn(inner, inner, 3, stride, groups)]
                branch += conv_bn(inner, outputs, activation=None)
            else:
                branch = [*conv_bn(width, planes, 3, stride), *conv_bn(planes, planes, 3, activation=None)]
            same = stride == 1 and width == outputs
            shortcut = None if same else cell(width, outputs, 1, stride, activation=None)
            blocks.append(AddInPlace(nn.Sequential(*branch), shortcut, relu))
            width = outputs
        stages.append(nn.Sequential(*blocks))
    return nn.Sequential(*conv_bn(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), *stages, *head(width, num_classes))


# --- MobileNetV2: torchvision.models.mobilenetv2 ----------------------------------------------------------------------

MOBILENET_V2 = (  # expansion, outputs, repeats, stride
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2(*, num_classes: int = 1000, width_mult: float = 1.0, dropout: float = 0.2) -> nn.Module:
    width = rounded(32 * width_mult)
    features: list[nn.Module] = [cell(3, width, 3, 2, activation=relu6)]
    for expansion, planes, repeats, first_stride in MOBILENET_V2:
        outputs = rounded(planes * width_mult)
        for block in range(repeats):
            stride = 1 if block else first_stride
            inner = width * expansion
            layers: list[nn.Module] = [cell(width, inner, activation=relu6)] if expansion != 1 else []
            layers.append(cell(inner, inner, 3, stride, inner, relu6))
            branch = nn.Sequential(*layers, *conv_bn(inner, outputs, activation=None))
            features.append(Add(branch) if stride == 1 and width == outputs else branch)
            width = outputs
    last = rounded(1280 * max(1.0, width_mult))
    features.append(cell(width, last, activation=relu6))
    return nn.Sequential(nn.Sequential(*features), *head(last, num_classes, dropout))


# --- MobileNetV3: torchvision.models.mobilenetv3 ----------------------------------------------------------------------

V3Block = tuple[int, int, int, bool, bool, int]
# kernel, expanded, outputs, squeeze and excitation, hardswish instead of ReLU, stride
MOBILENET_V3_LARGE: tuple[V3Block, ...] = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
MOBILENET_V3_SMALL: tuple[V3Block, ...] = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


def mobilenet_v3(
    blocks: Sequence[V3Block], last: int, *, num_classes: int = 1000, width_mult: float = 1.0, dropout: float = 0.2
) -> nn.Module:
    width = rounded(16 * width_mult)
    features: list[nn.Module] = [cell(3, width, 3, 2, activation=hardswish)]
    for kernel, expanded, planes, squeeze, hard, stride in blocks:
        inner, outputs = rounded(expanded * width_mult), rounded(planes * width_mult)
        activation = hardswish if hard else relu
        layers: list[nn.Module] = [cell(width, inner, activation=activation)] if inner != width else []
        layers.append(cell(inner, inner, kernel, stride, inner, activation))
        if squeeze:
            layers.append(SqueezeExcitation(inner, rounded(inner // 4), gate=nn.Hardsigmoid))
        branch = nn.Sequential(*layers, cell(inner, outputs, activation=None))
        features.append(AddInPlace(branch) if stride == 1 and width == outputs else branch)
        width = outputs
    features.append(cell(width, 6 * width, activation=hardswish))
    hidden = rounded(last * width_mult)
    classifier = nn.Sequential(
        nn.Linear(6 * width, hidden), hardswish(), nn.Dropout(dropout, inplace=True), nn.Linear(hidden, num_classes)
    )
    return nn.Sequential(nn.Sequential(*features), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), classifier)


# --- MnasNet: torchvision.models.mnasnet ------------------------------------------------------------------------------

MNASNET = (  # kernel, stride, expansion, repeats, outputs
    (3, 2, 3, 3, 24),
    (5, 2, 3, 3, 40),
    (5, 2, 6, 3, 80),
    (3, 1, 6, 2, 96),
    (5, 2, 6, 4, 192),
    (3, 1, 6, 1, 320),
)


def mnasnet(alpha: float, *, num_classes: int = 1000, dropout: float = 0.2) -> nn.Module:
    first, width = rounded(32 * alpha), rounded(16 * alpha)
    layers = [*conv_bn(3, first, 3, 2), *conv_bn(first, first, 3, groups=first)]
    layers += conv_bn(first, width, activation=None)
    for kernel, first_stride, expansion, repeats, planes in MNASNET:
        outputs = rounded(planes * alpha)
        stage: list[nn.Module] = []
        for block in range(repeats):
            stride, inner = 1 if block else first_stride, width * expansion
            branch = [*conv_bn(width, inner), *conv_bn(inner, inner, kernel, stride, inner)]
            sequence = nn.Sequential(*branch, *conv_bn(inner, outputs, activation=None))
            stage.append(Add(sequence, branch_first=True) if stride == 1 and width == outputs else sequence)
            width = outputs
        layers.append(nn.Sequential(*stage))
    layers += conv_bn(width, 1280)
    classifier = nn.Sequential(nn.Dropout(dropout, inplace=True), nn.Linear(1280, num_classes))
    return nn.Sequential(nn.Sequential(*layers), SpatialMean(), classifier)


# --- RegNet: torchvision.models.regnet --------------------------------------------------------------------------------


def regnet(
    depth: int,
    first_width: int,
    slope: float,
    ratio: float,
    group_width: int,
    *,
    squeeze: bool = False,
    num_classes: int = 1000,
) -> nn.Module:
    def block_width(index: int) -> int:
        step = round(math.log(1 + index * slope / first_width) / math.log(ratio))
        return round(first_width * ratio**step / 8) * 8

    width = 32
    stages = []
    for wanted, equal in groupby(map(block_width, range(depth))):
        group = min(group_width, wanted)
        outputs = rounded(wanted, group)
        blocks: list[nn.Module] = []
        for _ in equal:
            stride = 1 if blocks else 2
            same = stride == 1 and width == outputs
            shortcut = None if same else cell(width, outputs, 1, stride, activation=None)
            layers: list[nn.Module] = [cell(width, outputs), cell(outputs, outputs, 3, stride, outputs // group)]
            if squeeze:
                layers.append(SqueezeExcitation(outputs, round(width / 4)))
            layers.append(cell(outputs, outputs, activation=None))
            blocks.append(Add(nn.Sequential(*layers), shortcut, relu))
            width = outputs
        stages.append(nn.Sequential(*blocks))
    return nn.Sequential(cell(3, 32, 3, 2), nn.Sequential(*stages), *head(width, num_classes))


# --- ConvNeXt: torchvision.models.convnext ----------------------------------------------------------------------------


def channel_norm(width: int) -> nn.Sequential:
    return nn.Sequential(Permute(0, 2, 3, 1), nn.LayerNorm(width, eps=1e-6), Permute(0, 3, 1, 2))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, scale: float, drop: float):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width, 1, 1), scale))
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(width, eps=1e-6),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            Permute(0, 3, 1, 2),
        )
        self.drop = StochasticDepth(drop)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.branch(x)
        out = self.drop(out)
        out += x
        return out


def convnext(
    width: int,
    repeats: Sequence[int],
    *,
    stochastic_depth_prob: float,
    layer_scale: float = 1e-6,
    num_classes: int = 1000,
) -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(3, width, 4, 4), channel_norm(width))]
    done, last = 0, sum(repeats) - 1
    for index, repeat in enumerate(repeats):
        if index:
            layers.append(nn.Sequential(channel_norm(width), nn.Conv2d(width, 2 * width, 2, 2)))
            width *= 2
        drops = [stochastic_depth_prob * block / last for block in range(done, done + repeat)]
        layers.append(nn.Sequential(*(ConvNeXtBlock(width, layer_scale, drop) for drop in drops)))
        done += repeat
    classifier = nn.Sequential(channel_norm(width), nn.Flatten(1), nn.Linear(width, num_classes))
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), classifier)


# --- DenseNet: torchvision.models.densenet ----------------------------------------------------------------------------


def bn_conv(inputs: int, outputs: int, kernel: int = 1) -> list[nn.Module]:
    return [nn.BatchNorm2d(inputs), relu(), nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)]


class DenseLayer(nn.Module):
    def __init__(self, width: int, growth: int, drop_rate: float):
        super().__init__()
        self.narrow = nn.Sequential(*bn_conv(width, 4 * growth))
        self.grow = nn.Sequential(*bn_conv(4 * growth, growth, 3))
        self.drop_rate = drop_rate

    def forward(self, features: list[Tensor]) -> Tensor:
        narrow = self.narrow(torch.cat(features, 1))
        new: Tensor = self.grow(narrow)
        return F.dropout(new, self.drop_rate, self.training) if self.drop_rate > 0 else new


class DenseBlock(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self, features: Iterable[nn.Module], width: int, classes: int):
        super().__init__()
        self.features = nn.Sequential(*features)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        out = F.adaptive_avg_pool2d(F.relu(features, inplace=True), 1).flatten(1)
        return self.classifier(out)  # type: ignore[no-any-return]


def densenet(
    growth: int, repeats: Sequence[int], width: int, *, num_classes: int = 1000, drop_rate: float = 0.0
) -> nn.Module:
    features = [*conv_bn(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for index, repeat in enumerate(repeats):
        if index:
            features.append(nn.Sequential(*bn_conv(width, width // 2), nn.AvgPool2d(2, 2)))
            width //= 2
        features.append(DenseBlock(DenseLayer(width + layer * growth, growth, drop_rate) for layer in range(repeat)))
        width += repeat * growth
    return DenseNet([*features, nn.BatchNorm2d(width)], width, num_classes)


# --- EfficientNet, V2: torchvision.models.efficientnet ----------------------------------------------------------------

EfficientStage = tuple[bool, int, int, int, int, int]
# fused, expansion, kernel, stride, outputs, repeats
EFFICIENTNET: tuple[EfficientStage, ...] = (
    (False, 1, 3, 1, 16, 1),
    (False, 6, 3, 2, 24, 2),
    (False, 6, 5, 2, 40, 2),
    (False, 6, 3, 2, 80, 3),
    (False, 6, 5, 1, 112, 3),
    (False, 6, 5, 2, 192, 4),
    (False, 6, 3, 1, 320, 1),
)
EFFICIENTNET_V2_S: tuple[EfficientStage, ...] = (
    (True, 1, 3, 1, 24, 2),
    (True, 4, 3, 2, 48, 4),
    (True, 4, 3, 2, 64, 4),
    (False, 4, 3, 2, 128, 6),
    (False, 6, 3, 1, 160, 9),
    (False, 6, 3, 2, 256, 15),
)
EFFICIENTNET_V2_M: tuple[EfficientStage, ...] = (
    (True, 1, 3, 1, 24, 3),
    (True, 4, 3, 2, 48, 5),
    (True, 4, 3, 2, 80, 5),
    (False, 4, 3, 2, 160, 7),
    (False, 6, 3, 1, 176, 14),
    (False, 6, 3, 2, 304, 18),
    (False, 6, 3, 1, 512, 5),
)
EFFICIENTNET_V2_L: tuple[EfficientStage, ...] = (
    (True, 1, 3, 1, 32, 4),
    (True, 4, 3, 2, 64, 7),
    (True, 4, 3, 2, 96, 7),
    (False, 4, 3, 2, 192, 10),
    (False, 6, 3, 1, 224, 19),
    (False, 6, 3, 2, 384, 25),
    (False, 6, 3, 1, 640, 7),
)


def mbconv(width: int, outputs: int, expansion: int, kernel: int, stride: int, *, fused: bool) -> list[nn.Module]:
    inner = rounded(width * expansion)
    if fused:
        if inner == width:
            return [cell(width, outputs, kernel, stride, activation=silu)]
        return [cell(width, inner, kernel, stride, activation=silu), cell(inner, outputs, activation=None)]
    layers: list[nn.Module] = [cell(width, inner, activation=silu)] if inner != width else []
    layers.append(cell(inner, inner, kernel, stride, inner, silu))
    layers.append(SqueezeExcitation(inner, max(1, width // 4), silu))
    return [*layers, cell(inner, outputs, activation=None)]


def efficientnet(
    stages: Sequence[EfficientStage],
    stem: int,
    *,
    wider: float = 1.0,
    deeper: float = 1.0,
    last: int | None = None,
    dropout: float,
    stochastic_depth_prob: float = 0.2,
    num_classes: int = 1000,
) -> nn.Module:
    counts = [math.ceil(repeats * deeper) for *_, repeats in stages]
    width = rounded(stem * wider)
    features: list[nn.Module] = [cell(3, width, 3, 2, activation=silu)]
    done = 0
    for count, (fused, expansion, kernel, first_stride, planes, _) in zip(counts, stages, strict=True):
        outputs = rounded(planes * wider)
        blocks: list[nn.Module] = []
        for _ in range(count):
            stride = 1 if blocks else first_stride
            layers = mbconv(width, outputs, expansion, kernel, stride, fused=fused)
            if stride == 1 and width == outputs:
                drop = StochasticDepth(stochastic_depth_prob * done / sum(counts))
                blocks.append(AddInPlace(nn.Sequential(*layers, drop)))
            else:
                blocks.append(nn.Sequential(*layers))
            width = outputs
            done += 1
        features.append(nn.Sequential(*blocks))
    last = last or 4 * width
    features.append(cell(width, last, activation=silu))
    return nn.Sequential(nn.Sequential(*features), *head(last, num_classes, dropout, inplace=True))


# --- ShuffleNetV2: torchvision.models.shufflenetv2 --------------------------------------------------------------------


def shuffle(x: Tensor) -> Tensor:
    """Channels of the first half and of the second by turns."""
    batch, channels, height, width = x.shape
    x = x.view(batch, 2, channels // 2, height, width)
    x = x.transpose(1, 2).contiguous()
    return x.view(batch, channels, height, width)


class ShuffleUnit(nn.Module):
    """With stride 1, half of the channels pass by the branch; with stride 2, a second branch sees them all."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        half = outputs // 2
        self.other: nn.Sequential | None = None
        if stride > 1:
            narrowed = conv_bn(inputs, inputs, 3, stride, inputs, None)
            self.other = nn.Sequential(*narrowed, *conv_bn(inputs, half))
        layers = conv_bn(inputs if stride > 1 else half, half)
        self.branch = nn.Sequential(*layers, *conv_bn(half, half, 3, stride, half, None), *conv_bn(half, half))

    def forward(self, x: Tensor) -> Tensor:
        if self.other is None:
            kept, given = x.chunk(2, 1)
            out = torch.cat((kept, self.branch(given)), 1)
        else:
            out = torch.cat((self.other(x), self.branch(x)), 1)
        out = shuffle(out)
        return out  # noqa: RET504


def shufflenet_v2(widths: Sequence[int], last: int = 1024, *, num_classes: int = 1000) -> nn.Module:
    width = 24
    stages = []
    for outputs, repeats in zip(widths, (4, 8, 4), strict=True):
        first = ShuffleUnit(width, outputs, 2)
        stages.append(nn.Sequential(first, *(ShuffleUnit(outputs, outputs, 1) for _ in range(repeats - 1))))
        width = outputs
    stem = [cell(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *stages, cell(width, last), SpatialMean(), nn.Linear(last, num_classes))


# --- SqueezeNet: torchvision.models.squeezenet ------------------------------------------------------------------------


def squeezenet(
    stem: tuple[int, int], pools: Sequence[int], *, num_classes: int = 1000, dropout: float = 0.5
) -> nn.Module:
    """`stem` is the first convolution's width and kernel, `pools` says before which of the eight units to pool."""
    width, kernel = stem
    features: list[nn.Module] = [nn.Conv2d(3, width, kernel, 2), relu()]
    for unit in range(8):
        if unit in pools:
            features.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        squeezed = 16 * (unit // 2 + 1)
        expanded = 4 * squeezed
        expand = [nn.Sequential(nn.Conv2d(squeezed, expanded, size, padding=size // 2), relu()) for size in (1, 3)]
        features.append(nn.Sequential(nn.Conv2d(width, squeezed, 1), relu(), Concat(expand)))
        width = 2 * expanded
    last = nn.Conv2d(width, num_classes, 1)
    classifier = nn.Sequential(nn.Dropout(dropout), last, relu(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(nn.Sequential(*features), classifier, nn.Flatten(1))


# --- GoogLeNet, InceptionV3: torchvision.models.googlenet, .inception -------------------------------------------------


class GoogLeNetOutputs(NamedTuple):
    logits: Tensor
    aux_logits2: Tensor
    aux_logits1: Tensor


class InceptionOutputs(NamedTuple):
    logits: Tensor
    aux_logits: Tensor


class WithAuxiliary(nn.Module):
    """Stages one after another; in training, what auxiliary heads make of some stages' outputs is given back as well.

    `heads` are by the stage after which they run. They are registered there too, or with `late` before the last stage.
    """

    def __init__(
        self, stages: Sequence[nn.Module], heads: dict[int, nn.Module], outputs: Callable[..., Any], *, late: bool
    ):
        super().__init__()
        for index, stage in enumerate(stages):
            if late and index == len(stages) - 1:
                for after, head in heads.items():
                    self.add_module(f"head{after}", head)
            self.add_module(f"stage{index}", stage)
            if not late and index in heads:
                self.add_module(f"head{index}", heads[index])
        self.count = len(stages)
        self.heads_after = frozenset(heads)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Any:
        said: list[Tensor] = []
        for index in range(self.count):
            x = getattr(self, f"stage{index}")(x)
            if self.training and index in self.heads_after:
                said.insert(0, getattr(self, f"head{index}")(x))
        return self.outputs(x, *said) if said else x


class Fork(nn.Module):
    """`Concat` after a stem whose output is let go of before the parts are joined."""

    def __init__(self, stem: nn.Module, branches: Iterable[nn.Module]):
        super().__init__()
        self.stem = stem
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        parts = [branch(x) for branch in self.branches]
        del x
        return torch.cat(parts, 1)


def concat(*branches: Sequence[nn.Module]) -> Concat:
    return Concat(nn.Sequential(*branch) if len(branch) > 1 else branch[0] for branch in branches)


def pooled_head(width: int, classes: int, dropout: float) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Dropout(dropout), nn.Linear(width, classes)]


GOOGLENET = {  # inputs; outputs of the 1x1 branch, the 3x3 branch with its bottleneck, the second one, the pooled one
    "3a": (192, 64, (96, 128), (16, 32), 32),
    "3b": (256, 128, (128, 192), (32, 96), 64),
    "4a": (480, 192, (96, 208), (16, 48), 64),
    "4b": (512, 160, (112, 224), (24, 64), 64),
    "4c": (512, 128, (128, 256), (24, 64), 64),
    "4d": (512, 112, (144, 288), (32, 64), 64),
    "4e": (528, 256, (160, 320), (32, 128), 128),
    "5a": (832, 256, (160, 320), (32, 128), 128),
    "5b": (832, 384, (192, 384), (48, 128), 128),
}


def googlenet(
    *, num_classes: int = 1000, aux_logits: bool = True, dropout: float = 0.2, dropout_aux: float = 0.7
) -> nn.Module:
    def pool(kernel: int = 3) -> nn.Module:
        return nn.MaxPool2d(kernel, 2, ceil_mode=True)

    stages = [cell(3, 64, 7, 2), pool(), cell(64, 64), cell(64, 192, 3), pool()]
    heads: dict[int, nn.Module] = {}
    for name, (inputs, single, (narrow, wide), (narrow2, wide2), after_pool) in GOOGLENET.items():
        if name in ("4a", "5a"):
            stages.append(pool(3 if name == "4a" else 2))
        pooled = [nn.MaxPool2d(3, 1, 1, ceil_mode=True), cell(inputs, after_pool)]
        doubles = [
            [cell(inputs, first), cell(first, second, 3)] for first, second in ((narrow, wide), (narrow2, wide2))
        ]
        stages.append(concat([cell(inputs, single)], *doubles, pooled))
        if aux_logits and name in ("4a", "4d"):
            width = single + wide + wide2 + after_pool
            hidden = [nn.Linear(2048, 1024), relu(), nn.Dropout(dropout_aux), nn.Linear(1024, num_classes)]
            heads[len(stages) - 1] = nn.Sequential(nn.AdaptiveAvgPool2d(4), cell(width, 128), nn.Flatten(1), *hidden)
    return WithAuxiliary([*stages, *pooled_head(1024, num_classes, dropout)], heads, GoogLeNetOutputs, late=True)


def inception_v3(*, num_classes: int = 1000, aux_logits: bool = True, dropout: float = 0.5) -> nn.Module:
    def chain(inputs: int, *steps: tuple[int, Kernel]) -> list[nn.Module]:
        cells: list[nn.Module] = []
        for outputs, kernel in steps:
            cells.append(cell(inputs, outputs, kernel))
            inputs = outputs
        return cells

    def shrink(inputs: int, outputs: int) -> nn.Sequential:
        return cell(inputs, outputs, 3, 2, pad=False)

    def average(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.AvgPool2d(3, 1, 1), cell(inputs, outputs)]

    def fork(*stem: nn.Module) -> list[nn.Module]:
        branches = [cell(384, 384, kernel) for kernel in ((1, 3), (3, 1))]
        return [Fork(nn.Sequential(*stem), branches)]

    row, column = (1, 7), (7, 1)
    stages: list[nn.Module] = [cell(3, 32, 3, 2, pad=False), cell(32, 32, 3, pad=False), cell(32, 64, 3)]
    stages += [nn.MaxPool2d(3, 2), cell(64, 80), cell(80, 192, 3, pad=False), nn.MaxPool2d(3, 2)]
    for width, pooled in ((192, 32), (256, 64), (288, 64)):
        fives, threes = chain(width, (48, 1), (64, 5)), chain(width, (64, 1), (96, 3), (96, 3))
        stages.append(concat(chain(width, (64, 1)), fives, threes, average(width, pooled)))
    threes = [*chain(288, (64, 1), (96, 3)), shrink(96, 96)]
    stages.append(concat([shrink(288, 384)], threes, [nn.MaxPool2d(3, 2)]))
    for inner in (128, 160, 160, 192):
        once = chain(768, (inner, 1), (inner, row), (192, column))
        twice = chain(768, (inner, 1), (inner, column), (inner, row), (inner, column), (192, row))
        stages.append(concat(chain(768, (192, 1)), once, twice, average(768, 192)))
    heads: dict[int, nn.Module] = {}
    if aux_logits:
        narrow = [nn.AvgPool2d(5, 3), cell(768, 128), cell(128, 768, 5, pad=False)]
        heads[len(stages) - 1] = nn.Sequential(*narrow, *head(768, num_classes))
    threes = [*chain(768, (192, 1)), shrink(192, 320)]
    sevens = [*chain(768, (192, 1), (192, row), (192, column)), shrink(192, 192)]
    stages.append(concat(threes, sevens, [nn.MaxPool2d(3, 2)]))
    for width in (1280, 2048):
        once, twice = fork(cell(width, 384)), fork(*chain(width, (448, 1), (384, 3)))
        stages.append(concat(chain(width, (320, 1)), once, twice, average(width, 192)))
    pool, flatten, drop, linear = pooled_head(2048, num_classes, dropout)
    return WithAuxiliary([*stages, pool, drop, flatten, linear], heads, InceptionOutputs, late=False)


# --- Vision Transformer: torchvision.models.vision_transformer --------------------------------------------------------


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, dropout=attention_dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = mlp(width, 4 * width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm1(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        y = self.dropout(y)
        y = y + x
        z: Tensor = self.norm2(y)
        z = self.mlp(z)
        return y + z


class Encoder(nn.Module):
    def __init__(self, length: int, width: int, layers: Iterable[nn.Module], dropout: float):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, length, width))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        return self.norm(self.layers(self.dropout(x)))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    def __init__(self, patch: int, width: int, encoder: nn.Module, classes: int):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.encoder = encoder
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        token = self.token.expand(len(x), -1, -1)
        x = torch.cat([token, x], 1)
        x = self.encoder(x)
        x = x[:, 0]
        return self.head(x)  # type: ignore[no-any-return]

    def embed(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = x.reshape(len(x), x.shape[1], x.shape[2:].numel())
        return x.permute(0, 2, 1)


def vit(
    patch: int,
    depth: int,
    width: int,
    heads: int,
    *,
    image_size: int = 224,
    num_classes: int = 1000,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
) -> nn.Module:
    layers = [EncoderLayer(width, heads, dropout, attention_dropout) for _ in range(depth)]
    encoder = Encoder((image_size // patch) ** 2 + 1, width, layers, dropout)
    return VisionTransformer(patch, width, encoder, num_classes)


# --- Swin Transformer: torchvision.models.swin_transformer ------------------------------------------------------------

WINDOW = 7


class WindowAttention(nn.Module):
    """Attention inside of windows, which are moved by `shift` where the image has more than one of them."""

    offsets: Tensor

    def __init__(self, width: int, heads: int, shift: int, dropout: float, attention_dropout: float):
        super().__init__()
        self.heads, self.shift = heads, shift
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        span = 2 * WINDOW - 1
        self.bias_table = nn.Parameter(torch.zeros(span * span, heads))
        places = torch.arange(WINDOW)
        distance = places[:, None] - places + WINDOW - 1
        offsets = distance[:, None, :, None] * span + distance[None, :, None, :]
        self.register_buffer("offsets", offsets.flatten())

    def bias(self) -> Tensor:
        bias = self.bias_table[self.offsets].view(WINDOW**2, WINDOW**2, -1)
        return bias.permute(2, 0, 1).contiguous().unsqueeze(0)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias()
        return self.attend(x, bias)

    def attend(self, given: Tensor, bias: Tensor) -> Tensor:
        batch, height, width, channels = given.shape
        x = F.pad(given, (0, 0, 0, -width % WINDOW, 0, -height % WINDOW))
        rows, columns = x.shape[1] // WINDOW, x.shape[2] // WINDOW
        shift = [self.shift if count > 1 else 0 for count in (rows, columns)]
        if any(shift):
            x = torch.roll(x, (-shift[0], -shift[1]), (1, 2))
        x = x.view(batch, rows, WINDOW, columns, WINDOW, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(batch * rows * columns, WINDOW**2, channels)

        qkv = F.linear(x, self.qkv.weight, self.qkv.bias)
        qkv = qkv.reshape(len(x), WINDOW**2, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv[0], qkv[1], qkv[2]
        query = query * (channels // self.heads) ** -0.5
        scores = query.matmul(key.transpose(-2, -1))
        scores = scores + bias
        if any(shift):
            mask = self.mask(x, rows, columns, shift)
            scores = scores.view(batch, rows * columns, self.heads, WINDOW**2, WINDOW**2)
            scores = scores + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, self.heads, WINDOW**2, WINDOW**2)
        scores = F.softmax(scores, -1)
        scores = F.dropout(scores, self.attention_dropout, self.training)
        x = scores.matmul(value).transpose(1, 2).reshape(len(x), WINDOW**2, channels)
        x = F.linear(x, self.out.weight, self.out.bias)
        x = F.dropout(x, self.dropout, self.training)

        x = x.view(batch, rows, columns, WINDOW, WINDOW, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(batch, rows * WINDOW, columns * WINDOW, channels)
        if any(shift):
            x = torch.roll(x, (shift[0], shift[1]), (1, 2))
        return x[:, :height, :width, :].contiguous()

    def mask(self, like: Tensor, rows: int, columns: int, shift: Sequence[int]) -> Tensor:
        """-100 between positions that the shift has brought together from different parts of the image, else 0."""
        part = like.new_zeros((rows * WINDOW, columns * WINDOW))
        vertical, horizontal = ((slice(0, -WINDOW), slice(-WINDOW, -step), slice(-step, None)) for step in shift)
        for index, (down, across) in enumerate((down, across) for down in vertical for across in horizontal):
            part[down, across] = index
        part = part.view(rows, WINDOW, columns, WINDOW)
        part = part.permute(0, 2, 1, 3).reshape(rows * columns, WINDOW**2)
        part = part.unsqueeze(1) - part.unsqueeze(2)
        return part.masked_fill(part != 0, -100.0).masked_fill(part == 0, 0.0)


class SwinBlock(nn.Module):
    def __init__(self, width: int, heads: int, shift: int, drop: float, dropout: float, attention_dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, shift, dropout, attention_dropout)
        self.drop = StochasticDepth(drop)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = mlp(width, 4 * width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        x = x + self.drop(self.mlp(self.norm2(x)))
        return x  # noqa: RET504


class PatchMerging(nn.Module):
    """Four neighbours become one, with twice the channels."""

    def __init__(self, width: int):
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gather(x)
        x = self.norm(x)
        x = self.reduction(x)
        return x  # noqa: RET504

    def gather(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[-2] % 2, 0, x.shape[-3] % 2))
        return torch.cat([x[..., row::2, column::2, :] for column in (0, 1) for row in (0, 1)], -1)


def swin(
    width: int,
    repeats: Sequence[int],
    heads: int,
    *,
    stochastic_depth_prob: float,
    num_classes: int = 1000,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
) -> nn.Module:
    layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, width, 4, 4), Permute(0, 2, 3, 1), nn.LayerNorm(width))]
    done, last = 0, sum(repeats) - 1
    for index, repeat in enumerate(repeats):
        if index:
            layers.append(PatchMerging(width))
            width, heads = 2 * width, 2 * heads
        blocks = []
        for block in range(repeat):
            shift, drop = block % 2 * (WINDOW // 2), stochastic_depth_prob * done / last
            blocks.append(SwinBlock(width, heads, shift, drop, dropout, attention_dropout))
            done += 1
        layers.append(nn.Sequential(*blocks))
    return nn.Sequential(nn.Sequential(*layers), nn.LayerNorm(width), Permute(0, 3, 1, 2), *head(width, num_classes))


# --- by name ----------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": alexnet,
    "vgg11": partial(vgg, (1, 1, 2, 2, 2)),
    "vgg11_bn": partial(vgg, (1, 1, 2, 2, 2), norm=True),
    "vgg13": partial(vgg, (2, 2, 2, 2, 2)),
    "vgg13_bn": partial(vgg, (2, 2, 2, 2, 2), norm=True),
    "vgg16": partial(vgg, (2, 2, 3, 3, 3)),
    "vgg16_bn": partial(vgg, (2, 2, 3, 3, 3), norm=True),
    "vgg19": partial(vgg, (2, 2, 4, 4, 4)),
    "vgg19_bn": partial(vgg, (2, 2, 4, 4, 4), norm=True),
    "resnet18": partial(resnet, (2, 2, 2, 2), bottleneck=False),
    "resnet34": partial(resnet, (3, 4, 6, 3), bottleneck=False),
    "resnet50": partial(resnet, (3, 4, 6, 3)),
    "resnet101": partial(resnet, (3, 4, 23, 3)),
    "resnet152": partial(resnet, (3, 8, 36, 3)),
    "resnext50_32x4d": partial(resnet, (3, 4, 6, 3), groups=32, group_width=4),
    "resnext101_32x8d": partial(resnet, (3, 4, 23, 3), groups=32, group_width=8),
    "resnext101_64x4d": partial(resnet, (3, 4, 23, 3), groups=64, group_width=4),
    "wide_resnet50_2": partial(resnet, (3, 4, 6, 3), group_width=128),
    "wide_resnet101_2": partial(resnet, (3, 4, 23, 3), group_width=128),
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v3_small": partial(mobilenet_v3, MOBILENET_V3_SMALL, 1024),
    "mobilenet_v3_large": partial(mobilenet_v3, MOBILENET_V3_LARGE, 1280),
    "mnasnet0_5": partial(mnasnet, 0.5),
    "mnasnet0_75": partial(mnasnet, 0.75),
    "mnasnet1_0": partial(mnasnet, 1.0),
    "mnasnet1_3": partial(mnasnet, 1.3),
    "regnet_x_400mf": partial(regnet, 22, 24, 24.48, 2.54, 16),
    "regnet_x_800mf": partial(regnet, 16, 56, 35.73, 2.28, 16),
    "regnet_x_1_6gf": partial(regnet, 18, 80, 34.01, 2.25, 24),
    "regnet_x_3_2gf": partial(regnet, 25, 88, 26.31, 2.25, 48),
    "regnet_x_8gf": partial(regnet, 23, 80, 49.56, 2.88, 120),
    "regnet_x_16gf": partial(regnet, 22, 216, 55.59, 2.1, 128),
    "regnet_x_32gf": partial(regnet, 23, 320, 69.86, 2.0, 168),
    "regnet_y_400mf": partial(regnet, 16, 48, 27.89, 2.09, 8, squeeze=True),
    "regnet_y_800mf": partial(regnet, 14, 56, 38.84, 2.4, 16, squeeze=True),
    "regnet_y_1_6gf": partial(regnet, 27, 48, 20.71, 2.65, 24, squeeze=True),
    "regnet_y_3_2gf": partial(regnet, 21, 80, 42.63, 2.66, 24, squeeze=True),
    "regnet_y_8gf": partial(regnet, 17, 192, 76.82, 2.19, 56, squeeze=True),
    "regnet_y_16gf": partial(regnet, 18, 200, 106.23, 2.48, 112, squeeze=True),
    "regnet_y_32gf": partial(regnet, 20, 232, 115.89, 2.53, 232, squeeze=True),
    "regnet_y_128gf": partial(regnet, 27, 456, 160.83, 2.52, 264, squeeze=True),
    "convnext_tiny": partial(convnext, 96, (3, 3, 9, 3), stochastic_depth_prob=0.1),
    "convnext_small": partial(convnext, 96, (3, 3, 27, 3), stochastic_depth_prob=0.4),
    "convnext_base": partial(convnext, 128, (3, 3, 27, 3), stochastic_depth_prob=0.5),
    "convnext_large": partial(convnext, 192, (3, 3, 27, 3), stochastic_depth_prob=0.5),
    "densenet121": partial(densenet, 32, (6, 12, 24, 16), 64),
    "densenet161": partial(densenet, 48, (6, 12, 36, 24), 96),
    "densenet169": partial(densenet, 32, (6, 12, 32, 32), 64),
    "densenet201": partial(densenet, 32, (6, 12, 48, 32), 64),
    "efficientnet_b0": partial(efficientnet, EFFICIENTNET, 32, dropout=0.2),
    "efficientnet_b1": partial(efficientnet, EFFICIENTNET, 32, deeper=1.1, dropout=0.2),
    "efficientnet_b2": partial(efficientnet, EFFICIENTNET, 32, wider=1.1, deeper=1.2, dropout=0.3),
    "efficientnet_b3": partial(efficientnet, EFFICIENTNET, 32, wider=1.2, deeper=1.4, dropout=0.3),
    "efficientnet_b4": partial(efficientnet, EFFICIENTNET, 32, wider=1.4, deeper=1.8, dropout=0.4),
    "efficientnet_b5": partial(efficientnet, EFFICIENTNET, 32, wider=1.6, deeper=2.2, dropout=0.4),
    "efficientnet_b6": partial(efficientnet, EFFICIENTNET, 32, wider=1.8, deeper=2.6, dropout=0.5),
    "efficientnet_b7": partial(efficientnet, EFFICIENTNET, 32, wider=2.0, deeper=3.1, dropout=0.5),
    "efficientnet_v2_s": partial(efficientnet, EFFICIENTNET_V2_S, 24, last=1280, dropout=0.2),
    "efficientnet_v2_m": partial(efficientnet, EFFICIENTNET_V2_M, 24, last=1280, dropout=0.3),
    "efficientnet_v2_l": partial(efficientnet, EFFICIENTNET_V2_L, 32, last=1280, dropout=0.4),
    "shufflenet_v2_x0_5": partial(shufflenet_v2, (48, 96, 192)),
    "shufflenet_v2_x1_0": partial(shufflenet_v2, (116, 232, 464)),
    "shufflenet_v2_x1_5": partial(shufflenet_v2, (176, 352, 704)),
    "shufflenet_v2_x2_0": partial(shufflenet_v2, (244, 488, 976), 2048),
    "squeezenet1_0": partial(squeezenet, (96, 7), (0, 3, 7)),
    "squeezenet1_1": partial(squeezenet, (64, 3), (0, 2, 4)),
    "googlenet": googlenet,
    "inception_v3": inception_v3,
    "vit_b_16": partial(vit, 16, 12, 768, 12),
    "vit_b_32": partial(vit, 32, 12, 768, 12),
    "vit_l_16": partial(vit, 16, 24, 1024, 16),
    "vit_l_32": partial(vit, 32, 24, 1024, 16),
    "vit_h_14": partial(vit, 14, 32, 1280, 16),
    "swin_t": partial(swin, 96, (2, 2, 6, 2), 3, stochastic_depth_prob=0.2),
    "swin_s": partial(swin, 96, (2, 2, 18, 2), 3, stochastic_depth_prob=0.3),
    "swin_b": partial(swin, 128, (2, 2, 18, 2), 4, stochastic_depth_prob=0.5),
}

ALSO_CALLED = {
    "mnasnet": "mnasnet1_0",
    "squeezenet": "squeezenet1_0",
    "shufflenet_v2": "shufflenet_v2_x1_0",
    "inception": "inception_v3",
    "resnext50": "resnext50_32x4d",
    "wide_resnet50": "wide_resnet50_2",
    "wide_resnet101": "wide_resnet101_2",
    "swin_tiny": "swin_t",
    "swin_small": "swin_s",
    "swin_base": "swin_b",
    "vit_base_16": "vit_b_16",
    "vit_base_32": "vit_b_32",
    "vit_large_16": "vit_l_16",
    "vit_large_32": "vit_l_32",
    "vit_huge_14": "vit_h_14",
}


def spelled(name: str) -> str:
    """Lower case without separators, but for those between digits: RegNet X has 16GF and 1.6GF."""
    name = name.lower().replace("mobenet", "mobilenet")  # as xMem's tables have it
    return re.sub(r"(?<!\d)[^a-z0-9]+|[^a-z0-9]+(?!\d)", "", name)


def spellings() -> dict[str, str]:
    """Names by how they may be written; where no other name is written so, separators between digits can go, too."""
    known = {name: name for name in MODELS} | ALSO_CALLED
    found = {re.sub(r"[^a-z0-9]", "", written): name for written, name in known.items()}
    return found | {re.sub(r"[^a-z0-9]+", ".", spelled(written)): name for written, name in known.items()}


def find(name: str) -> str:
    """torchvision's name for what `name` means."""
    known = spellings()
    wanted = re.sub(r"[^a-z0-9]+", ".", spelled(name))
    if wanted in known:
        return known[wanted]
    near = dict.fromkeys(known[close] for close in difflib.get_close_matches(wanted, known, n=5))
    raise KeyError(f"no model is called {name!r}" + (f"; near it are {', '.join(near)}" if near else ""))


def names() -> list[str]:
    """Every model, by torchvision's name, one family after another."""
    return list(MODELS)


def build(name: str, **kwargs: Any) -> nn.Module:
    """The model of that name, whatever its case and separators, in training mode; the options are torchvision's."""
    return MODELS[find(name)](**kwargs)
