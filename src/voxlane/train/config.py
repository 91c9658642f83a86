"""The config of a training run: one record, with presets for common jobs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic

from voxlane import settings
from voxlane.errors import ConfigError
from voxlane.model.augment import AugmentSettings
from voxlane.settings import PathOrUri, record
from voxlane.volume.patch_sampling import Placement
from voxlane.volume.plan import MAX_FEATURES, Network, Norm, Plan, Voxels
from voxlane.volume.zarr_array import MAX_GAP_BYTES

_Beta = Annotated[float, pydantic.Field(ge=0, lt=1)]


@record
class OptimizerConfig:
    """The optimizer and its learning rate schedule."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer. sgd: stochastic gradient descent with Nesterov momentum, as nnU-Net uses. adamw: Adam with decoupled
    weight decay."""
    lr: float = pydantic.Field(default=0.01, gt=0)
    """Peak learning rate, for a batch of `lr_batch` patches."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate scales with the batch: none, linear (twice the batch, twice the rate) or sqrt (twice the
    batch, 1.41 times the rate). It depends on the batch and never on the number of workers, so that a run which
    continues with fewer workers keeps its rate."""
    lr_batch: int | None = pydantic.Field(default=None, ge=1)
    """Batch that `lr` is meant for. null: the plan's batch."""
    weight_decay: float = pydantic.Field(default=3e-5, ge=0)
    """Weight decay of the optimizer."""
    momentum: float = pydantic.Field(default=0.99, ge=0, lt=1)
    """Momentum of sgd."""
    nesterov: bool = True
    """Use Nesterov momentum with sgd."""
    dampening: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Dampening of sgd's momentum; needs nesterov=false."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Decay rates of adamw's running means of the gradient and of its square."""
    b1: _Beta | None = None
    """First of the betas, to set or search it alone. null: that of `betas`."""
    b2: _Beta | None = None
    """Second of the betas, to set or search it alone. null: that of `betas`."""
    eps: float = pydantic.Field(default=1e-8, ge=0)
    """Term that adamw adds to its denominator against division by zero."""
    amsgrad: bool = False
    """Use the AMSGrad variant of adamw."""
    capturable: bool = False
    """Keep the number of steps of adamw on the GPU, as recording in a CUDA graph requires."""
    maximize: bool = False
    """Maximise the loss instead of minimising it."""
    foreach: bool | None = None
    """Update all weights with a few operations on lists of tensors. null: torch's choice."""
    fused: bool | None = None
    """Update all weights with one kernel. null: on a GPU, unless precision is float16."""
    clip_norm: float | None = pydantic.Field(default=12.0, gt=0)
    """Largest gradient norm; larger gradients are clipped to it. null: do not clip."""
    schedule: Literal["poly", "cosine", "constant"] = "poly"
    """How the learning rate falls from its peak to zero over the run."""
    power: float = pydantic.Field(default=0.9, gt=0)
    """Exponent of the poly schedule."""
    warmup_steps: int = pydantic.Field(default=0, ge=0)
    """Number of steps over which the learning rate first rises from zero to its peak."""

    def __post_init__(self) -> None:
        for owner, names in _OWN_ARGUMENTS.items():
            for name in names if owner != self.name else ():
                default = getattr(OptimizerConfig, name)
                if getattr(self, name) != default and name not in _IGNORED_BY_OTHERS:
                    fix = f"Leave it out, or use optimizer.name={owner}"
                    raise ConfigError(f"{self.name} has no argument {name}", fix=fix)
        if self.name == "sgd" and self.dampening and self.nesterov and self.momentum:
            raise ConfigError("dampening is not possible with Nesterov momentum", fix="Use optimizer.nesterov=false")
        if self.foreach and self.fused:
            raise ConfigError("foreach and fused exclude each other", fix="Leave one of them out")

    def torch_arguments(self) -> dict[str, Any]:
        """Return the arguments of torch's optimizer, except the weights, `lr` and `fused`, which depend on the run."""
        shared = {name: getattr(self, name) for name in ("weight_decay", "maximize", "foreach")}
        if self.name == "sgd":
            nesterov = self.nesterov and self.momentum > 0
            return {**shared, "momentum": self.momentum, "nesterov": nesterov, "dampening": self.dampening}
        first, second = self.betas
        betas = (first if self.b1 is None else self.b1, second if self.b2 is None else self.b2)
        return {**shared, "betas": betas, "eps": self.eps, "amsgrad": self.amsgrad, "capturable": self.capturable}


_OWN_ARGUMENTS = {
    "sgd": ("momentum", "nesterov", "dampening"),
    "adamw": ("betas", "b1", "b2", "eps", "amsgrad", "capturable"),
}
"""Fields that only one optimizer has."""
_IGNORED_BY_OTHERS = ("momentum", "nesterov")
"""Those of sgd that other optimizers ignore, because presets set them and searches compare optimizers."""


@record
class ValidationConfig:
    """Validation while training: sliding windows over the whole held-out volumes."""

    every_epochs: int = pydantic.Field(default=5, ge=1)
    """Number of epochs between validations. The last epoch is always validated."""
    max_cases: int | None = pydantic.Field(default=None, ge=1)
    """Largest number of held-out cases to validate on while training; `voxlane evaluate` uses all. null: all."""
    overlap: float = pydantic.Field(default=0.5, ge=0, lt=1)
    """Fraction of a window that the next window overlaps."""
    window_batch: int = pydantic.Field(default=4, ge=1)
    """Number of windows predicted at once."""
    images: int = pydantic.Field(default=3, ge=0)
    """Number of cases to draw into TensorBoard, each as a row of truth, scan and prediction."""


@record
class LoaderConfig:
    """The loader that fetches patches from the bucket."""

    workers: int | None = pydantic.Field(default=None, ge=0)
    """Number of processes per rank that fetch and decode patches; 0 uses threads of the training process. null: 0 on a
    CPU, where they would take cores from training, and up to 8 per GPU, at most half of the cores."""
    in_flight: int = pydantic.Field(default=16, ge=1)
    """Number of patches to fetch ahead, over all loader processes of a rank."""
    max_gap_bytes: int = pydantic.Field(default=MAX_GAP_BYTES, ge=0)
    """Largest gap between two chunks of an object that are read in one request. A larger gap means fewer requests,
    which a bucket charges for, and more bytes."""
    ram_cache_bytes: int = pydantic.Field(default=1 << 30, ge=0)
    """Memory for compressed chunks, over all loader processes of a rank. 0: no cache."""
    disk_cache: str | None = None
    """Folder that caches chunks on disk, shared by all processes of a machine. null: no cache."""
    disk_cache_bytes: int = pydantic.Field(default=100 << 30, ge=1)
    """Largest size of the disk cache."""
    staged: str | None = None
    """Folder to which `voxlane stage` copied the dataset on every machine, or the folder of the copy itself, as a
    container has it mounted. Objects missing there are read from the bucket."""


@record
class FinetuneConfig:
    """How a run uses and trains the weights that it starts from (`init_from`)."""

    checkpoint: Literal["last", "best"] = "last"
    """Checkpoint to take the weights from, if init_from is a run. best: the one with the highest Dice in the
    validations while training; the last one if the run validated nothing."""
    member: str | None = None
    """Name of the network to take, if init_from is an exported model of several. null: its only one."""
    network: Literal["plan", "source"] = "plan"
    """Network to train. plan: that of the dataset's plan and of this config; layers that do not fit start anew. source:
    that of init_from, so that all layers but the first and the last are sure to fit."""
    new_heads: bool = False
    """Start the layers that compute logits anew even if they fit, because the labels mean something else."""
    freeze_encoder: bool = False
    """Keep the weights of the encoder, except those of layers that start anew."""
    freeze_steps: int | None = pydantic.Field(default=None, ge=1)
    """Number of steps after which a frozen encoder is trained too. null: it stays frozen."""
    encoder_lr_factor: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Factor of the learning rate for the encoder."""
    layer_decay: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Factor of the learning rate from one stage of the network to the stage before it. The logits have the full rate,
    the finest stage of the decoder this factor of it, and so on to the first stage of the encoder."""


@record
class TrainConfig:
    """The config of one training run."""

    preset: Literal["nnunet", "small", "mlperf"] = "nnunet"
    """Source of the defaults. nnunet: the defaults shown here. small: for a laptop without a GPU. mlperf: the MLPerf
    U-Net3D benchmark, for a dataset prepared with recipe=mlperf-kits19."""
    fold: int | None = pydantic.Field(default=0, ge=0)
    """Index of the fold of cases to hold out. null: train on all cases and validate on none."""
    split: str | None = None
    """URI of a .json or .csv file that lists the cases of each fold, such as nnU-Net's splits_final.json. It is read
    once, and the run stores its cases. null: the split of the dataset."""
    seed: int = pydantic.Field(default=0, ge=0)
    """Seed of the initial weights, the patches and their augmentation."""
    epochs: int = pydantic.Field(default=250, ge=1)
    """Number of epochs, each of `steps_per_epoch` steps."""
    steps_per_epoch: int = pydantic.Field(default=250, ge=1)
    """Number of steps in an epoch."""
    batch: int | None = pydantic.Field(default=None, ge=1)
    """Number of patches per step, over all workers. null: the plan's."""
    batch_per_worker: int | None = pydantic.Field(default=None, ge=1)
    """Number of patches per step on each worker that the run starts with, instead of `batch`. Their sum stays the batch
    when the run continues with fewer or more workers."""
    device_batch: int | None = pydantic.Field(default=None, ge=1)
    """Largest number of patches on a device at once; a larger share of the batch is computed in parts whose gradients
    are summed. null: the share of each worker when the run started, or the whole share if the plan computes Dice over
    the batch as one (batch_dice), which parts would change."""
    patch: tuple[Voxels, Voxels, Voxels] | None = None
    """Size of a patch in voxels (z, y, x). null: the plan's."""
    init_from: PathOrUri | None = None
    """Run or exported model whose weights the run starts from. Layers that do not fit, such as those for other channels
    or labels, start anew. null: all weights are random."""
    finetune: FinetuneConfig = FinetuneConfig()
    network: Network | None = None
    """Network architecture. null: the plan's."""
    base_features: int | None = pydantic.Field(default=None, ge=1)
    """Number of channels at the finest resolution; coarser resolutions scale in proportion. null: the plan's."""
    depth: int | None = pydantic.Field(default=None, ge=2, le=8)
    """Number of resolutions of the network. null: the plan's."""
    norm: Norm | None = None
    """Normalisation after each convolution: instance, batch or group. batch normalises over all GPUs of a run, but on
    CPUs over each worker's own patches. null: the network's own, which is instance."""
    deep_supervision: bool = True
    """Compute the loss at the network's coarser resolutions too."""
    loss: Literal["nnunet", "mlperf"] = "nnunet"
    """Loss. nnunet: Dice plus cross-entropy. mlperf: half of that sum."""
    optimizer: OptimizerConfig = OptimizerConfig()
    augment: AugmentSettings = AugmentSettings()
    foreground_share: float = pydantic.Field(default=0.33, ge=0, le=1)
    """Fraction of the patches that are drawn around foreground."""
    placement: Placement = "centre"
    """Position of that foreground in its patch: centre, or inside (anywhere)."""
    validation: ValidationConfig = ValidationConfig()
    early_stop: int | None = pydantic.Field(default=None, ge=1)
    """Stop after this many validations without a better Dice. null: never."""
    max_minutes: float | None = pydantic.Field(default=None, gt=0, le=1e6)
    """Minutes to train, over all starts of the run. If they do not suffice for all epochs, the learning rate falls to
    zero by then, and the run stops within two steps, validates, saves and ends. null: no limit."""
    loader: LoaderConfig = LoaderConfig()
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to train on. auto: GPUs if there are any."""
    devices: int = pydantic.Field(default=1, ge=1)
    """Number of GPUs, or of CPU processes, on this machine that share each batch. For several machines, or for workers
    that may be lost, use voxlane train --workers."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How several devices share a model. ddp: each holds all of it. fsdp: weights and optimizer states are sharded over
    the devices, for networks that are too large for one."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the network's arithmetic. auto: bfloat16 on GPUs, float32 elsewhere."""
    compile: bool | None = None
    """Run torch.compile on the network and its loss, which takes about a minute at the start. null or false: on a GPU,
    use this package's kernels instead and, with one GPU, record the step once and replay it (CUDA graphs)."""
    fused: bool = True
    """Use this package's GPU kernels where they apply. false: use PyTorch's own."""
    channels_last: bool = True
    """Store channels innermost in memory: faster on GPUs, and on CPUs with few features (1.6 times with 8)."""
    checkpoint_every_epochs: int = pydantic.Field(default=1, ge=1)
    """Number of epochs between the checkpoints that a run can resume from."""

    def __post_init__(self) -> None:
        finetune = self.finetune
        if self.init_from is None and finetune != FinetuneConfig():
            name = next(f.name for f in dataclasses.fields(finetune) if getattr(finetune, f.name) != f.default)
            raise ConfigError(f"finetune.{name}: without init_from all weights are random", fix="Give init_from=RUN")
        if finetune.freeze_steps is not None and not finetune.freeze_encoder:
            raise ConfigError("finetune.freeze_steps: nothing is frozen", fix="Give finetune.freeze_encoder=true too")

    @property
    def total_steps(self) -> int:
        """Number of steps of all epochs."""
        return self.epochs * self.steps_per_epoch


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "nnunet": {},
    "small": {
        "epochs": 14,
        "steps_per_epoch": 50,
        "base_features": 8,
        "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.01, "schedule": "cosine", "warmup_steps": 50},
        "validation": {"every_epochs": 2, "max_cases": 8},
    },
    "mlperf": {
        "batch": 2,
        "epochs": 4000,
        "steps_per_epoch": 84,
        "deep_supervision": False,
        "loss": "mlperf",
        "foreground_share": 0.4,
        "placement": "inside",
        "augment": {"preset": "mlperf"},
        "optimizer": {
            "lr": 0.8,
            "momentum": 0.9,
            "weight_decay": 0.0,
            "clip_norm": None,
            "schedule": "constant",
            "warmup_steps": 16800,
        },
        "validation": {"every_epochs": 20},
    },
}
"""Values that each preset sets; see `TrainConfig.preset`."""


def build_config(values: Mapping[str, Any], *, origin: str = "") -> TrainConfig:
    """Build the config from plain values and the defaults of their preset."""
    name = values.get("preset", "nnunet")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset: unknown preset {name!r}", uri=origin, fix=f"Choose from: {', '.join(PRESETS)}")
    return settings.build(TrainConfig, merge_values(PRESETS[name], values), origin=origin)


def merge_values(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested values; those of `overrides` win."""
    merged = {**base, **overrides}
    for name, value in overrides.items():
        nested = base.get(name)
        if isinstance(value, Mapping) and isinstance(nested, Mapping):
            merged[name] = merge_values(nested, value)
    return merged


def resolve_network(config: TrainConfig, plan: Plan) -> Network:
    """Return the network to train, from the config or else the plan."""
    network = config.network or (Network(kind="mlperf") if config.preset == "mlperf" else plan.network)
    if network.kind == "mlperf":
        for name in ("depth", "norm"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name}: MLPerf's network is fixed", fix="Leave it out")
        return network
    if config.depth is not None:
        network = _change_depth(network, config.depth)
    if config.base_features is not None:
        first = network.features[0]
        scaled = tuple(max(1, round(f * config.base_features / first)) for f in network.features)
        network = dataclasses.replace(network, features=scaled)
    return dataclasses.replace(network, norm=config.norm) if config.norm is not None else network


def _change_depth(network: Network, depth: int) -> Network:
    """Drop the coarsest resolutions of the network, or add more as the planner would."""
    features = network.features[:depth]
    while len(features) < depth:
        features = (*features, max(features[-1], min(2 * features[-1], MAX_FEATURES)))
    strides = (network.strides + ((2, 2, 2),) * depth)[:depth]
    kernels = (network.kernels + network.kernels[-1:] * depth)[:depth]
    down, up = network.encoder_convs, network.decoder_convs
    return dataclasses.replace(
        network,
        features=features,
        strides=strides,
        kernels=kernels,
        encoder_convs=down and (down + down[-1:] * depth)[:depth],
        decoder_convs=up and (up + up[-1:] * depth)[: depth - 1],
    )


def resolve_learning_rate(config: TrainConfig, plan: Plan) -> float:
    """Return the peak learning rate for the batch that the run trains with."""
    optimizer = config.optimizer
    ratio = (config.batch or plan.batch) / (optimizer.lr_batch or plan.batch)
    return optimizer.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optimizer.lr_scaling]


def resolve_batch(config: TrainConfig, plan: Plan, ranks: int) -> TrainConfig:
    """Return the config with its batch set, for a run that starts on this many ranks."""
    if config.batch is not None and config.batch_per_worker is not None:
        raise ConfigError("batch and batch_per_worker exclude each other", fix="Leave one of them out")
    per_worker = config.batch_per_worker
    return dataclasses.replace(config, batch=per_worker * ranks if per_worker else config.batch or plan.batch)


def split_batch(batch: int, ranks: int) -> int:
    """Return the number of patches per rank. Raises ConfigError if the batch does not divide evenly."""
    if batch % ranks:
        fewer = max(n for n in range(1, ranks) if batch % n == 0)
        raise ConfigError(
            f"batch: {batch} patches do not divide evenly over {ranks} workers",
            fix=f"Give batch={-(-batch // ranks) * ranks}, or {fewer} worker{'s' if fewer > 1 else ''}",
        )
    return batch // ranks
