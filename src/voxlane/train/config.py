"""What a training run is told: one record, with presets for common jobs."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pydantic

from voxlane import settings
from voxlane.errors import ConfigError
from voxlane.model.augment import AugmentSettings
from voxlane.settings import record
from voxlane.volume.array import MAX_GAP_BYTES
from voxlane.volume.draw import Placement
from voxlane.volume.plan import Network, Norm, Plan, Triple, Voxels


@record
class Optimizer:
    """How weights are updated."""

    name: Literal["sgd", "adamw"] = "sgd"
    """sgd: with Nesterov momentum, nnU-Net's. adamw: Adam with decoupled weight decay."""
    lr: float = pydantic.Field(default=0.01, gt=0)
    """Learning rate at its highest, for batches of `lr_batch`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows the batch: none, linear (twice the batch, twice the rate) or sqrt (1.41 times). It
    follows the batch, never the number of workers, so that a run that goes on with fewer keeps its rate."""
    lr_batch: int | None = pydantic.Field(default=None, ge=1)
    """The batch that `lr` is meant for; null: the plan's."""
    momentum: float = pydantic.Field(default=0.99, ge=0, lt=1)
    """sgd: momentum."""
    nesterov: bool = True
    """sgd: Nesterov's momentum."""
    weight_decay: float = pydantic.Field(default=3e-5, ge=0)
    """Weight decay."""
    clip_norm: float | None = pydantic.Field(default=12.0, gt=0)
    """Gradients longer than this are shortened to it; null: never."""
    schedule: Literal["poly", "cosine", "constant"] = "poly"
    """How the learning rate falls from its highest to zero over the run."""
    power: float = pydantic.Field(default=0.9, gt=0)
    """poly: exponent."""
    warmup_steps: int = pydantic.Field(default=0, ge=0)
    """Steps over which the learning rate first rises from zero."""


@record
class Validation:
    """Sliding windows over the whole held-out volumes, while training."""

    every_epochs: int = pydantic.Field(default=5, ge=1)
    """Epochs between validations; the last epoch is always validated."""
    max_cases: int | None = pydantic.Field(default=None, ge=1)
    """Validate only so many of the held-out cases while training; `voxlane evaluate` takes all."""
    overlap: float = pydantic.Field(default=0.5, ge=0, lt=1)
    """Share of a window that its neighbour covers too."""
    window_batch: int = pydantic.Field(default=4, ge=1)
    """Windows predicted at once."""
    images: int = pydantic.Field(default=3, ge=0)
    """Cases drawn as a row of truth, scan and prediction, into TensorBoard."""


@record
class Loader:
    """How patches come from the bucket."""

    workers: int | None = pydantic.Field(default=None, ge=0)
    """Processes that fetch and decode; 0: threads of the training process. null: 0 on a CPU, where they would take
    cores from the training, and up to 8 a GPU, half of the cores at most."""
    in_flight: int = pydantic.Field(default=16, ge=1)
    """Patches fetched ahead at once, over all of them."""
    max_gap_bytes: int = pydantic.Field(default=MAX_GAP_BYTES, ge=0)
    """Chunks that lie at most so far apart in an object come in one request: more means fewer requests, which a bucket
    charges for, and more bytes."""
    ram_cache_bytes: int = pydantic.Field(default=1 << 30, ge=0)
    """Compressed chunks kept in memory, over all of them; 0: none."""
    disk_cache: str | None = None
    """A folder to keep chunks in, for all processes of a machine."""
    disk_cache_bytes: int = pydantic.Field(default=100 << 30, ge=1)
    """At most so much there."""
    staged: str | None = None
    """A folder into which `voxlane stage` copied the dataset, on every machine, or the folder of the copy itself, as
    a container has it mounted; what is not there comes from the bucket."""


@record
class TrainConfig:
    """One training run."""

    preset: Literal["nnunet", "small", "mlperf"] = "nnunet"
    """Where the defaults come from. nnunet: those shown here. small: for a laptop without a GPU. mlperf: the MLPerf
    U-Net3D benchmark, for a dataset prepared with recipe=mlperf-kits19."""
    fold: int | None = pydantic.Field(default=0, ge=0)
    """The part of the cases that is held out; null: train on all, and validate on none."""
    seed: int = pydantic.Field(default=0, ge=0)
    """Fixes the weights at the start, the patches and their augmentation."""
    epochs: int = pydantic.Field(default=250, ge=1)
    """How often `steps_per_epoch` steps are done."""
    steps_per_epoch: int = pydantic.Field(default=250, ge=1)
    """Steps in an epoch."""
    batch: int | None = pydantic.Field(default=None, ge=1)
    """Patches a step, over all workers; null: the plan's."""
    batch_per_worker: int | None = pydantic.Field(default=None, ge=1)
    """Patches a step on each worker that the run begins with, instead of `batch`; their sum is the batch from then on,
    also when the run goes on with fewer or more workers."""
    device_batch: int | None = pydantic.Field(default=None, ge=1)
    """Patches on a device at once; a larger share of the batch is done in parts whose gradients are added up. null: as
    many as each worker had when the run began; all, where the plan counts Dice over the batch as one (batch_dice),
    which parts would change."""
    patch: tuple[Voxels, Voxels, Voxels] | None = None
    """Voxels of a patch (z, y, x); null: the plan's."""
    network: Network | None = None
    """The network; null: the plan's."""
    base_features: int | None = pydantic.Field(default=None, ge=1)
    """Channels at the finest resolution, the coarser ones in proportion; null: the plan's."""
    depth: int | None = pydantic.Field(default=None, ge=2, le=8)
    """Resolutions of the network; null: the plan's."""
    norm: Norm | None = None
    """Normalisation after each convolution: instance, batch or group; null: the network's own, which is instance. batch
    counts over all GPUs of a run, but on CPUs over each worker's own patches."""
    deep_supervision: bool = True
    """Score the network's coarser resolutions too."""
    loss: Literal["nnunet", "mlperf"] = "nnunet"
    """Dice + cross-entropy, or MLPerf's half of it."""
    optimizer: Optimizer = Optimizer()
    augment: AugmentSettings = AugmentSettings()
    foreground_share: float = pydantic.Field(default=0.33, ge=0, le=1)
    """Share of patches drawn around foreground."""
    placement: Placement = "centre"
    """Where that foreground lies in its patch: centre, or inside (anywhere)."""
    validation: Validation = Validation()
    early_stop: int | None = pydantic.Field(default=None, ge=1)
    """Stop after so many validations without a better Dice; null: never."""
    max_minutes: float | None = pydantic.Field(default=None, gt=0, le=1e6)
    """Stop after this time, with a checkpoint; null: never."""
    loader: Loader = Loader()
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to train; auto: on GPUs where there are any."""
    devices: int = pydantic.Field(default=1, ge=1)
    """GPUs, or CPU processes, of this machine that share each batch. For several machines, or workers that may be lost:
    voxlane train --workers."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How several devices share a model. ddp: each holds it whole. fsdp: weights and optimizer states are spread over
    them, for networks that are too large for one."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of the network; auto: bfloat16 on GPUs, float32 elsewhere."""
    compile: bool | None = None
    """torch.compile the network and its loss, which takes about a minute at the start; null or false: on a GPU this
    package's kernels instead, and where one GPU trains, the step recorded once and replayed (CUDA graphs)."""
    fused: bool = True
    """Use this package's GPU kernels where they run; false: PyTorch's own."""
    channels_last: bool = True
    """Channels innermost in memory: faster on GPUs, and with few features on CPUs too (1.6 times with 8)."""
    checkpoint_every_epochs: int = pydantic.Field(default=1, ge=1)
    """Epochs between checkpoints to go on from."""


MAX_FEATURES = 320
"""Channels that nnU-Net gives a 3D network at most."""

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
"""What each preset sets; see `TrainConfig.preset`."""


def load(path: str | os.PathLike[str] | None, overrides: Sequence[str]) -> tuple[TrainConfig, dict[str, Any]]:
    """The config of a file and overrides over its preset, and the values that were said, without defaults."""
    said = settings.read_file(path) if path is not None else {}
    for override in overrides:
        settings.set_dotted(said, override)
    return build(said, origin="" if path is None else os.fspath(path)), said


def build(said: Mapping[str, Any], *, origin: str = "") -> TrainConfig:
    """The config of plain values over their preset."""
    name = said.get("preset", "nnunet")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset: no preset {name!r}", uri=origin, fix=f"There are: {', '.join(PRESETS)}")
    return settings.build(TrainConfig, merged(PRESETS[name], said), origin=origin)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values of both, those of `above` first."""
    both = {**below, **above}
    for name, value in above.items():
        under = below.get(name)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            both[name] = merged(under, value)
    return both


def network_for(config: TrainConfig, plan: Plan) -> Network:
    """The network that is trained."""
    network = config.network or (Network(kind="mlperf") if config.preset == "mlperf" else plan.network)
    if network.kind == "mlperf":
        for name in ("depth", "norm"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name}: MLPerf's network is fixed", fix="Leave it out")
        return network
    if config.depth is not None:
        network = _of_depth(network, config.depth)
    if config.base_features is not None:
        first = network.features[0]
        scaled = tuple(max(1, round(f * config.base_features / first)) for f in network.features)
        network = dataclasses.replace(network, features=scaled)
    return dataclasses.replace(network, norm=config.norm) if config.norm is not None else network


def _of_depth(network: Network, depth: int) -> Network:
    """The network with its coarsest resolutions left out, or more of them added as the planner would."""
    more = depth - len(network.features)
    if more <= 0:
        cut = {name: getattr(network, name)[:depth] for name in ("features", "strides", "kernels")}
        return dataclasses.replace(network, **cut)
    features = network.features
    for _ in range(more):
        features = (*features, max(features[-1], min(2 * features[-1], MAX_FEATURES)))
    halved: Triple = (2, 2, 2)
    return dataclasses.replace(
        network,
        features=features,
        strides=(*network.strides, *[halved] * more),
        kernels=(*network.kernels, *[network.kernels[-1]] * more),
    )


def learning_rate(config: TrainConfig, plan: Plan) -> float:
    """The highest learning rate, for the batch that is trained with."""
    how = config.optimizer
    ratio = (config.batch or plan.batch) / (how.lr_batch or plan.batch)
    return how.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[how.lr_scaling]


def with_batch(config: TrainConfig, plan: Plan, ranks: int) -> TrainConfig:
    """The config with its batch settled, for a run that begins on so many ranks."""
    if config.batch is not None and config.batch_per_worker is not None:
        raise ConfigError("batch and batch_per_worker say the same thing twice", fix="Leave one of them out")
    each = config.batch_per_worker
    return dataclasses.replace(config, batch=each * ranks if each else config.batch or plan.batch)


def share_of(batch: int, ranks: int) -> int:
    """Patches of a batch on each rank."""
    if batch % ranks:
        below = max(n for n in range(1, ranks) if batch % n == 0)
        raise ConfigError(
            f"batch: {batch} patches do not share out evenly over {ranks} workers",
            fix=f"Give batch={-(-batch // ranks) * ranks}, or {below} worker{'s' if below > 1 else ''}",
        )
    return batch // ranks
