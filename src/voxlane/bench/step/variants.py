"""The variants of a training step that `voxlane bench step` compares. Needs torch alone (and Triton)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from voxlane.bench.step.settings import Kind, StepSettings, VariantSpec
from voxlane.model.cuda_graphs import RecordedStep
from voxlane.model.kernels import support
from voxlane.model.loss import SMOOTH, DiceCE, downsample_label, head_weights
from voxlane.model.networks import SLOPE, UNet, UNet3D

if TYPE_CHECKING:
    from voxlane.volume.plan import Network

CLIP_NORM = 12.0
_LAST = torch.channels_last_3d
_SPACE = (2, 3, 4)


@dataclass(frozen=True)
class NetworkShape:
    """nnU-Net's plan for patches of 128 cubed (3d_fullres), with the fields of voxlane.volume.plan.Network, which needs
    more packages than torch."""

    kind: Literal["unet"] = "unet"
    features: tuple[int, ...] = (32, 64, 128, 256, 320, 320)
    strides: tuple[tuple[int, int, int], ...] = ((1, 1, 1), *((2, 2, 2),) * 5)
    kernels: tuple[tuple[int, int, int], ...] = ((3, 3, 3),) * 6
    convs: int = 2
    encoder_convs: None = None
    decoder_convs: None = None
    norm: Literal["instance"] = "instance"


@dataclass(frozen=True)
class Batch:
    """Patches on the device, and their labels in the form that each variant needs."""

    image_BCDHW: Tensor  # noqa: N815
    """Intensities of the patches, float32."""
    label_BDHW: Tensor  # noqa: N815
    """Class of each voxel, uint8."""
    label_pyramid: tuple[Tensor, ...]
    """int16 (batch, 1, z, y, x), finest first, one per head, as nnU-Net's loader makes them."""


def make_batches(settings: StepSettings, patch: tuple[int, int, int], device: torch.device) -> list[Batch]:
    """Return batches of noise with brighter blobs, which are the classes."""
    random = torch.Generator(device).manual_seed(settings.seed)
    axes = [torch.linspace(-1, 1, size, device=device) for size in patch]
    grid_3DHW = torch.stack(torch.meshgrid(axes, indexing="ij"))  # noqa: N806
    batches = []
    for _ in range(settings.batches):
        image = torch.randn((settings.batch, settings.channels, *patch), generator=random, device=device)
        label = torch.zeros((settings.batch, *patch), dtype=torch.uint8, device=device)
        for sample in label:
            for blob in range(2 * min(settings.outputs - 1, 8)):
                numbers = torch.rand(7, generator=random, device=device)
                centre, radii = numbers[:3] * 1.6 - 0.8, numbers[3:6] * 0.3 + 0.15
                distance = ((grid_3DHW - centre.view(3, 1, 1, 1)) / radii.view(3, 1, 1, 1)).square().sum(0)
                sample[distance < 1] = 1 + blob % (settings.outputs - 1)
        image += label[:, None] / (settings.outputs - 1)
        halves = [[size >> i for size in patch] for i in range(4)]
        pyramid = tuple(downsample_label(label, shape)[:, None].short().contiguous() for shape in halves)
        batches.append(Batch(image, label, pyramid))
    return batches


class Marks:
    """Marks where the loss and the optimizer of a step begin and end on the GPU's time line, by a kernel that does
    nothing. Active only while profiling."""

    KERNEL = "spin_kernel"

    def __init__(self) -> None:
        self.on = False

    def add(self) -> None:
        """Add a mark, if active."""
        if self.on:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def around_loss(self, logits: Any) -> Any:
        """Return the logits, with a mark now and one when their gradients arrive."""
        if not self.on:
            return logits
        if isinstance(logits, Tensor):
            return _Marked.apply(self, logits)[0]  # type: ignore[no-untyped-call]
        return list(_Marked.apply(self, *logits))  # type: ignore[no-untyped-call]


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marks: Marks, *logits: Tensor) -> tuple[Tensor, ...]:
        ctx.marks = marks
        marks.add()
        return tuple(tensor.view_as(tensor) for tensor in logits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.marks.add()
        return (None, *gradients)


@dataclass
class Variant:
    """A variant that is ready to step."""

    name: str
    loss_of: Callable[[Batch], Tensor]
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    clip_norm: float | None
    scaler: torch.amp.GradScaler | None
    marks: Marks
    phases: tuple[str, ...]
    """Names of the phases between marks, in order."""
    notes: list[str] = field(default_factory=list)
    """Replacements that a reader must know about."""

    def step(self, batch: Batch) -> Tensor:
        """Run forward, loss, backward and optimizer, and return a loss that later calls do not overwrite."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(batch)
        scaler = self.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        self.marks.add()
        if self.clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.marks.add()
        return loss.detach()


def build(name: str, spec: VariantSpec, settings: StepSettings, device: torch.device, sample: Batch) -> Variant:
    """Return a variant with the seed's weights. A compiled one compiles at its first step; ours is captured here."""
    torch.manual_seed(settings.seed)
    notes: list[str] = []
    network = make_network(spec, settings, notes).to(device).train()
    if spec.channels_last:
        network = network.to(memory_format=_LAST)  # type: ignore[call-overload]
    on_gpu = device.type == "cuda"
    if not on_gpu:
        notes.append("float32 on a CPU")
    marks = Marks()
    parameters = list(network.parameters())
    dtype = getattr(torch, spec.precision)
    if spec.uses_our_kernels:
        loss_of = make_recorded_loss(spec.kind, network, settings, device, dtype, sample, notes)
        phases: tuple[str, ...] = ("step", "optimizer")
    else:
        loss_of = make_peer_loss(spec, network, device, dtype, marks, notes)
        phases = ("forward", "loss", "backward", "optimizer")
    scaled = spec.precision == "float16" and on_gpu
    return Variant(
        name=name,
        loss_of=loss_of,
        optimizer=make_optimizer(spec, parameters),
        parameters=parameters,
        clip_norm=CLIP_NORM if spec.kind == "nnunet" else None,
        scaler=torch.amp.GradScaler(device.type) if scaled else None,
        marks=marks,
        phases=phases,
        notes=notes,
    )


def make_network(spec: VariantSpec, settings: StepSettings, notes: list[str]) -> nn.Module:
    """Return the network of a variant, with initial weights."""
    if spec.kind == "nnunet" and not spec.uses_our_kernels:
        shipped = nnunet_network(settings.channels, settings.outputs)
        if shipped is not None:
            notes.append("PlainConvUNet of dynamic_network_architectures")
            return shipped
        notes.append("our plain UNet, the same network: dynamic_network_architectures is not installed")
    return plain_or_fused(spec.kind, settings.channels, settings.outputs, fused=spec.uses_our_kernels)


def plain_or_fused(kind: Kind, channels: int, outputs: int, *, fused: bool) -> nn.Module:
    """Return our network of a kind, of PyTorch's own modules or of the fused ones."""
    if kind == "mlperf":
        return UNet3D(channels, outputs, fused=fused)
    return UNet(channels, outputs, cast("Network", NetworkShape()), fused=fused)


def nnunet_network(channels: int, outputs: int) -> nn.Module | None:
    """Return nnU-Net's own network, or None if its package is not installed."""
    try:
        unet = importlib.import_module("dynamic_network_architectures.architectures.unet")
        weights = importlib.import_module("dynamic_network_architectures.initialization.weight_init")
    except ImportError:
        return None
    shape = NetworkShape()
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


def make_optimizer(spec: VariantSpec, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with the parameters of the kind; fused in our variants."""
    fused = True if spec.uses_our_kernels else None
    if spec.kind == "mlperf":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=fused)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5, fused=fused)


def make_peer_loss(
    spec: VariantSpec, network: nn.Module, device: torch.device, dtype: torch.dtype, marks: Marks, notes: list[str]
) -> Callable[[Batch], Tensor]:
    """Return forward and loss as the peers run them: under autocast, with a separate loss."""
    on_gpu = device.type == "cuda"
    compiled = spec.compiled and (on_gpu or spec.kind == "mlperf")
    if spec.compiled and not compiled:
        notes.append("not compiled, as nnU-Net does not on a CPU")
    forward: Callable[[Tensor], Any] = torch.compile(network) if compiled else network
    mlperf = torch.compile(mlperf_loss) if compiled and spec.kind == "mlperf" else mlperf_loss
    nnunet = NnunetLoss(compiled=compiled and spec.kind == "nnunet")

    def loss_of(batch: Batch) -> Tensor:
        image = batch.image_BCDHW
        if spec.channels_last:
            image = image.contiguous(memory_format=_LAST)
        with torch.autocast(device.type, dtype, enabled=on_gpu):
            logits = marks.around_loss(forward(image))
            if spec.kind == "mlperf":
                return mlperf(logits, batch.label_BDHW[:, None])
            return nnunet(logits, batch.label_pyramid, head_weights(len(batch.label_pyramid)))

    return loss_of


def make_recorded_loss(
    kind: Kind,
    network: nn.Module,
    settings: StepSettings,
    device: torch.device,
    dtype: torch.dtype,
    sample: Batch,
    notes: list[str],
) -> Callable[[Batch], Tensor]:
    """Return forward and loss as this package trains: recorded once, then replayed."""
    on_gpu = device.type == "cuda"
    targets = [[value] for value in range(1, settings.outputs)]
    criterion = DiceCE(False, target_values=targets, recipe=kind).to(device)

    def compute_loss(image: Tensor, label: Tensor) -> Tensor:
        # Casts of weights must be recorded too, so none may come from a cache.
        with torch.autocast(device.type, dtype, enabled=on_gpu, cache_enabled=False):
            loss: Tensor = criterion(network(image), label)
            return loss

    def inputs(batch: Batch) -> tuple[Tensor, Tensor]:
        return batch.image_BCDHW.contiguous(memory_format=_LAST), batch.label_BDHW

    if not on_gpu:
        notes.append("our kernels and CUDA graphs need a GPU: PyTorch's own operations instead")
        return lambda batch: compute_loss(*inputs(batch))
    why_not = support.unsupported_reason(sample.image_BCDHW.device.index)
    if why_not is not None:
        notes.append(f"without our kernels: {why_not}")
    replay = RecordedStep(compute_loss, list(network.parameters()), inputs(sample))
    return lambda batch: replay(*inputs(batch))


# -- the losses that MLPerf and nnU-Net ship, operation by operation, so that a step costs the same as there -----------


def mlperf_loss(logits: Tensor, label_B1DHW: Tensor) -> Tensor:  # noqa: N803
    """Return (Dice + cross-entropy) / 2 of MLPerf's reference: one-hot float labels, Dice of the foreground by
    sample."""
    index = label_B1DHW.squeeze(1).long()
    truth = functional.one_hot(index, logits.shape[1]).permute(0, 4, 1, 2, 3).float()[:, 1:]
    chances = torch.softmax(logits, 1)[:, 1:]
    smooth = SMOOTH["mlperf"]
    both = (truth * chances).sum(_SPACE)
    dice = (2.0 * both + smooth) / (truth.sum(_SPACE) + chances.sum(_SPACE) + smooth)
    return (1.0 - dice.mean() + functional.cross_entropy(logits, index)) / 2


class NnunetLoss:
    """nnU-Net's Dice and cross-entropy of every head but the coarsest, each against its own label.

    `compiled` compiles only the Dice, as nnU-Net does. The sum has 1 added, as in our loss, which does not change the
    gradient and makes the losses comparable.
    """

    def __init__(self, *, compiled: bool) -> None:
        self.dice: Callable[[Tensor, Tensor], Tensor] = torch.compile(soft_dice) if compiled else soft_dice

    def __call__(self, heads: Sequence[Tensor], labels_B1DHW: Sequence[Tensor], weights: Sequence[float]) -> Tensor:  # noqa: N803
        """Return the weighted sum over heads whose weight is not zero."""
        scored = zip(heads, labels_B1DHW, weights, strict=False)  # labels end where weights are zero
        losses = [
            weight * (1 - self.dice(head, label) + functional.cross_entropy(head, label[:, 0].long()))
            for head, label, weight in scored
            if weight
        ]
        return torch.stack(losses).sum()


def soft_dice(logits: Tensor, label_B1DHW: Tensor) -> Tensor:  # noqa: N803
    """Return the mean Dice over foreground classes and samples, as nnU-Net's memory-efficient version does."""
    chances = torch.softmax(logits, 1)
    with torch.no_grad():
        truth = torch.zeros(chances.shape, dtype=torch.bool, device=logits.device)
        truth.scatter_(1, label_B1DHW.long(), 1)
        truth = truth[:, 1:]
        sizes = truth.sum(_SPACE)
    chances = chances[:, 1:]
    both, sums = (chances * truth).sum(_SPACE), chances.sum(_SPACE)
    smooth = SMOOTH["nnunet"]
    return ((2 * both + smooth) / torch.clip(sizes + sums + smooth, 1e-8)).mean()
