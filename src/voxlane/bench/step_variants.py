"""The ways to do a training step that `voxlane bench step` compares, each ready to be stepped."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from voxlane.bench.step_losses import NnunetLoss, mlperf_loss
from voxlane.bench.step_setting import Kind, StepSetting, Way
from voxlane.kernels import support
from voxlane.model.loss import DiceCE, head_weights, shrink
from voxlane.model.mlperf import UNet3D
from voxlane.model.recorded import Recorded
from voxlane.model.unet import SLOPE, UNet

if TYPE_CHECKING:
    from voxlane.volume.plan import Network

CLIP_NORM = 12.0
_LAST = torch.channels_last_3d


@dataclass(frozen=True)
class Topology:
    """What nnU-Net plans for patches of 128 cubed (3d_fullres); the fields of voxlane.volume.plan.Network, whose own
    class needs more packages than torch."""

    kind: Literal["unet"] = "unet"
    features: tuple[int, ...] = (32, 64, 128, 256, 320, 320)
    strides: tuple[tuple[int, int, int], ...] = ((1, 1, 1), *((2, 2, 2),) * 5)
    kernels: tuple[tuple[int, int, int], ...] = ((3, 3, 3),) * 6
    convs: int = 2
    norm: Literal["instance"] = "instance"


@dataclass(frozen=True)
class Batch:
    """Patches on the device, and their labels as each variant takes them."""

    image_BCDHW: Tensor  # noqa: N815
    """float32"""
    label_BDHW: Tensor  # noqa: N815
    """uint8"""
    label_pyramid: tuple[Tensor, ...]
    """int16 (batch, 1, z, y, x), finest first: nnU-Net's loader makes one for each head."""


def make_batches(setting: StepSetting, patch: tuple[int, int, int], device: torch.device) -> list[Batch]:
    """Noise with brighter blobs in it; the blobs are the classes."""
    random = torch.Generator(device).manual_seed(setting.seed)
    axes = [torch.linspace(-1, 1, size, device=device) for size in patch]
    grid_3DHW = torch.stack(torch.meshgrid(axes, indexing="ij"))  # noqa: N806
    made = []
    for _ in range(setting.batches):
        image = torch.randn((setting.batch, setting.channels, *patch), generator=random, device=device)
        label = torch.zeros((setting.batch, *patch), dtype=torch.uint8, device=device)
        for sample in label:
            for blob in range(2 * min(setting.outputs - 1, 8)):
                where = torch.rand(7, generator=random, device=device)
                centre, radii = where[:3] * 1.6 - 0.8, where[3:6] * 0.3 + 0.15
                distance = ((grid_3DHW - centre.view(3, 1, 1, 1)) / radii.view(3, 1, 1, 1)).square().sum(0)
                sample[distance < 1] = 1 + blob % (setting.outputs - 1)
        image += label[:, None] / (setting.outputs - 1)
        halves = [[size >> i for size in patch] for i in range(4)]
        pyramid = tuple(shrink(label, shape)[:, None].short().contiguous() for shape in halves)
        made.append(Batch(image, label, pyramid))
    return made


class Marks:
    """Tells where a step's loss and optimizer begin and end on the GPU's own time line, by a kernel that does nothing.
    Off but while profiling."""

    KERNEL = "spin_kernel"

    def __init__(self) -> None:
        self.on = False

    def here(self) -> None:
        """Leave a mark."""
        if self.on:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def around_loss(self, logits: Any) -> Any:
        """The logits, with a mark now and one when gradients come back to them."""
        if not self.on:
            return logits
        if isinstance(logits, Tensor):
            return _Marked.apply(self, logits)[0]  # type: ignore[no-untyped-call]
        return list(_Marked.apply(self, *logits))  # type: ignore[no-untyped-call]


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marks: Marks, *logits: Tensor) -> tuple[Tensor, ...]:
        ctx.marks = marks
        marks.here()
        return tuple(each.view_as(each) for each in logits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.marks.here()
        return (None, *gradients)


@dataclass
class Variant:
    """One way, built."""

    name: str
    loss_of: Callable[[Batch], Tensor]
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    clip_norm: float | None
    scaler: torch.amp.GradScaler | None
    marks: Marks
    phases: tuple[str, ...]
    """What lies between marks, in turn."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know: what was used in place of what."""

    def step(self, batch: Batch) -> Tensor:
        """Forward, loss, backward, optimizer; returns the loss, which is this call's own."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(batch)
        scaler = self.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        self.marks.here()
        if self.clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.marks.here()
        return loss.detach()


def build(name: str, way: Way, setting: StepSetting, device: torch.device, sample: Batch) -> Variant:
    """A variant with the seed's weights; a compiled one compiles at its first step, ours is captured here."""
    torch.manual_seed(setting.seed)
    notes: list[str] = []
    network = make_network(way, setting, notes).to(device).train()
    if way.channels_last:
        network = network.to(memory_format=_LAST)  # type: ignore[call-overload]
    on_gpu = device.type == "cuda"
    if not on_gpu:
        notes.append("float32 on a CPU")
    marks = Marks()
    parameters = list(network.parameters())
    dtype = getattr(torch, way.precision)
    if way.ours:
        loss_of = our_loss(way.kind, network, setting, device, dtype, sample, notes)
        phases: tuple[str, ...] = ("step", "optimizer")
    else:
        loss_of = their_loss(way, network, device, dtype, marks, notes)
        phases = ("forward", "loss", "backward", "optimizer")
    scaled = way.precision == "float16" and on_gpu
    return Variant(
        name=name,
        loss_of=loss_of,
        optimizer=make_optimizer(way, parameters),
        parameters=parameters,
        clip_norm=CLIP_NORM if way.kind == "nnunet" else None,
        scaler=torch.amp.GradScaler(device.type) if scaled else None,
        marks=marks,
        phases=phases,
        notes=notes,
    )


def make_network(way: Way, setting: StepSetting, notes: list[str]) -> nn.Module:
    """Its network, with fresh weights."""
    if way.kind == "nnunet" and not way.ours:
        shipped = nnunet_network(setting.channels, setting.outputs)
        if shipped is not None:
            notes.append("PlainConvUNet of dynamic_network_architectures")
            return shipped
        notes.append("our plain UNet, the same network: dynamic_network_architectures is not installed")
    return plain_or_fused(way.kind, setting.channels, setting.outputs, fused=way.ours)


def plain_or_fused(kind: Kind, channels: int, outputs: int, *, fused: bool) -> nn.Module:
    """Our network of a kind, of PyTorch's own modules or of the fused ones."""
    if kind == "mlperf":
        return UNet3D(channels, outputs, fused=fused)
    return UNet(channels, outputs, cast("Network", Topology()), fused=fused)


def nnunet_network(channels: int, outputs: int) -> nn.Module | None:
    """nnU-Net's own, where its package is installed."""
    try:
        unet = importlib.import_module("dynamic_network_architectures.architectures.unet")
        weights = importlib.import_module("dynamic_network_architectures.initialization.weight_init")
    except ImportError:
        return None
    shape = Topology()
    network: nn.Module = unet.PlainConvUNet(
        input_channels=channels,
        n_stages=len(shape.features),
        features_per_stage=list(shape.features),
        conv_op=nn.Conv3d,
        kernel_sizes=[list(kernel) for kernel in shape.kernels],
        strides=[list(stride) for stride in shape.strides],
        n_conv_per_stage=[shape.convs] * len(shape.features),
        num_classes=outputs,
        n_conv_per_stage_decoder=[shape.convs] * (len(shape.features) - 1),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )
    return network.apply(weights.InitWeights_He(SLOPE))


def make_optimizer(way: Way, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD as the kind trains with it; fused in ours."""
    fused = True if way.ours else None
    if way.kind == "mlperf":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=fused)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5, fused=fused)


def their_loss(
    way: Way, network: nn.Module, device: torch.device, dtype: torch.dtype, marks: Marks, notes: list[str]
) -> Callable[[Batch], Tensor]:
    """Forward and loss as the peers do them: under autocast, the loss apart."""
    on_gpu = device.type == "cuda"
    compiled = way.compiled and (on_gpu or way.kind == "mlperf")
    if way.compiled and not compiled:
        notes.append("not compiled, as nnU-Net does not on a CPU")
    forward: Callable[[Tensor], Any] = torch.compile(network) if compiled else network
    mlperf = torch.compile(mlperf_loss) if compiled and way.kind == "mlperf" else mlperf_loss
    nnunet = NnunetLoss(compiled=compiled and way.kind == "nnunet")

    def loss_of(batch: Batch) -> Tensor:
        image = batch.image_BCDHW
        if way.channels_last:
            image = image.contiguous(memory_format=_LAST)
        with torch.autocast(device.type, dtype, enabled=on_gpu):
            logits = marks.around_loss(forward(image))
            if way.kind == "mlperf":
                return mlperf(logits, batch.label_BDHW[:, None])
            return nnunet(logits, batch.label_pyramid, head_weights(len(batch.label_pyramid)))

    return loss_of


def our_loss(
    kind: Kind,
    network: nn.Module,
    setting: StepSetting,
    device: torch.device,
    dtype: torch.dtype,
    sample: Batch,
    notes: list[str],
) -> Callable[[Batch], Tensor]:
    """Forward and loss as this package trains: recorded once, then replayed."""
    on_gpu = device.type == "cuda"
    targets = [[value] for value in range(1, setting.outputs)]
    criterion = DiceCE(False, target_values=targets, recipe=kind).to(device)

    def whole(image: Tensor, label: Tensor) -> Tensor:
        # Casts of weights must be part of what is recorded, so none is taken from a cache.
        with torch.autocast(device.type, dtype, enabled=on_gpu, cache_enabled=False):
            loss: Tensor = criterion(network(image), label)
            return loss

    def inputs(batch: Batch) -> tuple[Tensor, Tensor]:
        return batch.image_BCDHW.contiguous(memory_format=_LAST), batch.label_BDHW

    if not on_gpu:
        notes.append("our kernels and CUDA graphs need a GPU: PyTorch's own operations instead")
        return lambda batch: whole(*inputs(batch))
    why_not = support.why_not(sample.image_BCDHW.device.index)
    if why_not is not None:
        notes.append(f"without our kernels: {why_not}")
    replay = Recorded(whole, list(network.parameters()), inputs(sample))
    return lambda batch: replay(*inputs(batch))
