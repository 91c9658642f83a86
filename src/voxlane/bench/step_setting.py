"""What a benchmark of a training step is to do. Checked here, before anything slow begins; needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from voxlane.bench.loading_setting import triple
from voxlane.errors import ConfigError

if TYPE_CHECKING:
    import argparse

Kind = Literal["mlperf", "nnunet"]
GPU_PATCH, CPU_PATCH = (128, 128, 128), (64, 32, 32)
DIVISOR = 32
"""Of each side of a patch: both networks halve five times."""


@dataclass(frozen=True)
class Way:
    """One way to do the step, by what it is made of."""

    kind: Kind
    """mlperf: its U-Net3D, loss and optimizer. nnunet: its topology at 128 cubed, deep supervision, its own ones."""
    about: str
    precision: Literal["float16", "bfloat16"]
    """Of autocast, on a GPU; float16 with a gradient scaler."""
    channels_last: bool
    compiled: bool = False
    ours: bool = False
    """This package's kernels, the step as CUDA graphs, the fused optimizer."""


WAYS: dict[str, Way] = {
    "reference": Way("mlperf", "MLPerf's reference: channels-first, fp16 autocast, eager", "float16", False),
    "channels-last": Way("mlperf", "bf16, channels-last, eager", "bfloat16", True),
    "compile": Way("mlperf", "bf16, channels-last, torch.compile", "bfloat16", True, compiled=True),
    "ours": Way("mlperf", "fused kernels, bf16, channels-last, CUDA graphs", "bfloat16", True, ours=True),
    "nnunet": Way("nnunet", "nnU-Net as it ships: channels-first, fp16, compiled", "float16", False, compiled=True),
    "nnunet-ours": Way("nnunet", "the same network by our kernels and graphs", "bfloat16", True, ours=True),
}
"""In the order of the tables. The first of a kind is what the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """All of it."""

    variants: tuple[str, ...]
    """Empty: all that the device can do."""
    device: str
    """cpu, cuda, cuda:N; empty: a GPU if there is one."""
    patch: tuple[int, int, int] | None
    """Voxels (z, y, x); None: by the device."""
    batch: int = 2
    channels: int = 1
    outputs: int = 3
    rounds: int = 5
    steps: int = 10
    """Measured steps of a variant in a round."""
    warmup: int = 10
    """Steps before those; their losses are kept, to compare variants by."""
    batches: int = 4
    """That the steps take in turn."""
    profile: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.variants:
            if name not in WAYS:
                raise ConfigError(f"--variant {name} is none of them", fix=f"Take one of: {', '.join(WAYS)}")
        for name, least in (("batch", 1), ("channels", 1), ("outputs", 2), ("rounds", 1), ("steps", 1), ("warmup", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} {getattr(self, name)}", fix=f"Give {least} or more")
        if self.outputs > 256:
            raise ConfigError(f"--outputs {self.outputs}", fix="Labels are bytes: give 256 or fewer")
        if not re.fullmatch(r"|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"--device {self.device}", fix="Give cpu, cuda or cuda:N")
        if self.patch is not None:
            check_patch(self.patch)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "patch": list(self.patch or ()), "variants": list(self.variants)}


def check_patch(patch: Sequence[int]) -> None:
    """Raise unless both networks take it."""
    told = ",".join(map(str, patch))
    for size in patch:
        if size < DIVISOR or size % DIVISOR:
            near = [n for n in (size // DIVISOR * DIVISOR, (size // DIVISOR + 1) * DIVISOR) if n]
            raise ConfigError(
                f"--patch {told}: {size} is no multiple of {DIVISOR}, which five halvings need",
                fix=f"Take {' or '.join(map(str, near))}",
            )
    if set(patch) == {DIVISOR}:
        raise ConfigError(
            f"--patch {told} leaves one voxel at the coarsest resolution, which has no spread to normalise by",
            fix=f"Take {2 * DIVISOR} along one axis or more",
        )


def from_options(options: argparse.Namespace) -> StepSetting:
    """The flags, checked."""
    return StepSetting(
        variants=tuple(dict.fromkeys(options.variant or ())),
        device=options.device,
        patch=None if options.patch is None else triple(options.patch),
        batch=options.batch,
        channels=options.channels,
        outputs=options.outputs,
        rounds=options.rounds,
        steps=options.steps,
        warmup=options.warmup,
        profile=not options.no_profile,
        seed=options.seed,
    )
