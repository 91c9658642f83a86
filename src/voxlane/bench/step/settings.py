"""Settings of the step benchmark, and the variants that it measures. Needs no torch, and no pydantic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from voxlane.errors import ConfigError

if TYPE_CHECKING:
    from voxlane.settings import Flag, PathOrUri, record
else:
    try:
        from voxlane.settings import Flag, PathOrUri, record
    except ImportError:  # with torch alone, `python -m voxlane.bench.step` takes the values as they are
        from functools import partial

        record = partial(dataclass, frozen=True, kw_only=True)

Kind = Literal["mlperf", "nnunet"]
GPU_PATCH, CPU_PATCH = (128, 128, 128), (64, 32, 32)
DIVISOR = 32
"""Each side of a patch must be a multiple of this: both networks halve it five times."""


@dataclass(frozen=True)
class VariantSpec:
    """One implementation of the step."""

    kind: Kind
    """mlperf: its U-Net3D, loss and optimizer. nnunet: its topology at 128 cubed with deep supervision, loss and
    optimizer."""
    about: str
    precision: Literal["float16", "bfloat16"]
    """Data type of autocast on a GPU; float16 comes with a gradient scaler."""
    channels_last: bool
    compiled: bool = False
    uses_our_kernels: bool = False
    """Whether it uses this package's kernels, CUDA graphs and the fused optimizer."""


VARIANTS: dict[str, VariantSpec] = {
    "reference": VariantSpec("mlperf", "MLPerf's reference: channels-first, fp16 autocast, eager", "float16", False),
    "channels-last": VariantSpec("mlperf", "bf16, channels-last, eager", "bfloat16", True),
    "compile": VariantSpec("mlperf", "bf16, channels-last, torch.compile", "bfloat16", True, compiled=True),
    "ours": VariantSpec(
        "mlperf", "fused kernels, bf16, channels-last, CUDA graphs", "bfloat16", True, uses_our_kernels=True
    ),
    "nnunet": VariantSpec(
        "nnunet", "nnU-Net as it ships: channels-first, fp16, compiled", "float16", False, compiled=True
    ),
    "nnunet-ours": VariantSpec(
        "nnunet", "the same network by our kernels and graphs", "bfloat16", True, uses_our_kernels=True
    ),
}
"""Variants in the order of the tables. The first of each kind is the reference for the others."""


@record
class StepSettings:
    """Options of `voxlane bench step`."""

    variant: Annotated[tuple[str, ...], Flag(metavar="NAME")] = ()
    """Variant to measure (repeatable; default: all that the device supports)."""
    device: str = ""
    """cpu, cuda or cuda:N (default: a GPU if there is one)."""
    patch: Annotated[str, Flag(metavar="Z,Y,X")] = ""
    """Voxels of a patch along each axis, multiples of 32 (default: 128,128,128; on a CPU 64,32,32)."""
    batch: int = 2
    """Number of patches per step."""
    channels: int = 1
    """Number of channels of a patch."""
    outputs: int = 3
    """Number of classes, including background."""
    rounds: int = 5
    """Number of rounds."""
    steps: int = 10
    """Number of measured steps per variant and round."""
    warmup: int = 10
    """Number of steps per variant before the first round."""
    seed: int = 0
    """Seed of weights and patches."""
    commit: str = ""
    """Commit of the source for the result file, if this is not a git checkout."""
    out: Annotated[PathOrUri, Flag(metavar="FILE")] = "step-bench.json"
    """Result file; the plot is saved beside it as .png."""
    no_profile: bool = False
    """Do not profile."""
    no_plot: bool = False
    """Draw no plot; without matplotlib there is none either."""
    plot_from: Annotated[PathOrUri, Flag(metavar="FILE")] = ""
    """Measure nothing, and draw the plot of this result file."""

    batches: ClassVar[int] = 4
    """Number of different batches that the steps use in turn."""
    _RESULT_FIELDS: ClassVar[tuple[str, ...]] = (
        *("device", "batch", "channels", "outputs", "rounds", "steps", "warmup", "batches", "seed"),
    )

    def __post_init__(self) -> None:
        for name in self.variant:
            if name not in VARIANTS:
                raise ConfigError(f"--variant {name}: no such variant", fix=f"Choose one of {', '.join(VARIANTS)}")
        for name, least in (("batch", 1), ("channels", 1), ("outputs", 2), ("rounds", 1), ("steps", 1), ("warmup", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} {getattr(self, name)}", fix=f"Give {least} or more")
        if self.outputs > 256:
            raise ConfigError(f"--outputs {self.outputs}", fix="Give 256 or fewer, because labels are bytes")
        if not re.fullmatch(r"|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"--device {self.device}", fix="Give cpu, cuda or cuda:N")
        if self.patch_shape is not None:
            check_patch(self.patch_shape)

    @property
    def variants(self) -> tuple[str, ...]:
        """Variants to measure, each once; empty: all that the device supports."""
        return tuple(dict.fromkeys(self.variant))

    @property
    def patch_shape(self) -> tuple[int, int, int] | None:
        """Voxels (z, y, x) of a patch; None: the default of the device."""
        return parse_patch(self.patch) if self.patch else None

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        fields = {name: getattr(self, name) for name in self._RESULT_FIELDS}
        return {
            **fields,
            "variants": list(self.variants),
            "patch": list(self.patch_shape or ()),
            "profile": not self.no_profile,
        }


def parse_patch(text: str) -> tuple[int, int, int]:
    """Return the voxels (z, y, x) of `128` or `96,128,128`."""
    words = text.split(",")
    if len(words) not in (1, 3) or not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--patch {text}", fix="Give one number, or three as z,y,x")
    z, y, x = (int(word) for word in (words if len(words) == 3 else words * 3))
    return z, y, x


def check_patch(patch: Sequence[int]) -> None:
    """Raise ConfigError unless both networks accept the patch."""
    text = ",".join(map(str, patch))
    for size in patch:
        if size < DIVISOR or size % DIVISOR:
            nearest = [n for n in (size // DIVISOR * DIVISOR, (size // DIVISOR + 1) * DIVISOR) if n]
            raise ConfigError(
                f"--patch {text}: {size} is not a multiple of {DIVISOR}, which five halvings need",
                fix=f"Give {' or '.join(map(str, nearest))}",
            )
    if set(patch) == {DIVISOR}:
        raise ConfigError(
            f"--patch {text} leaves one voxel at the coarsest resolution, which cannot be normalised",
            fix=f"Give {2 * DIVISOR} along one axis or more",
        )
