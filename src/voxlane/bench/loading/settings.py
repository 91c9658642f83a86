"""Settings of the loading benchmark."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from voxlane.bench.field_types import SIZE, Fraction, Positive, default_size
from voxlane.bench.report import in_job
from voxlane.bench.step.settings import parse_patch
from voxlane.errors import ConfigError, UsageError
from voxlane.settings import NO_FLAG, Flag, PathOrUri, record
from voxlane.store.config import StoreConfig

Mode = Literal["patches", "whole-object"]
Cache = Literal["none", "cold", "warm"]
DEFAULT_PATCH = (128, 128, 128)
_LONGEST_PATCH = 1024
RAM_CACHE_BYTES = 1 << 30
"""Bytes of patches that a process caches in memory, with a cache and in mode patches: the default of training."""


@record
class LoadingSettings:
    """Options of `voxlane bench loading`. They travel to every rank."""

    data: Annotated[tuple[PathOrUri, ...], Flag(positional=True, metavar="DATA")] = ()
    """Prepared dataset, raw scans, or both to compare them."""
    mode: Mode | None = None
    """Fail unless DATA is read in this mode (default: by what DATA is)."""
    listing_only: bool = False
    """List DATA, report how long that took, and stop."""
    step_time_s: Annotated[float, pydantic.Field(ge=0, le=3600), Flag(long="--step-time", metavar="SECONDS")] = 0.1
    """Seconds of a step once its batch is available; 0 shows the loader's top speed."""
    batch: Positive = 2
    """Number of samples per rank and step."""
    epochs: Positive = 2
    """Number of epochs to measure."""
    samples: Positive | None = None
    """Number of samples per epoch over all ranks (default: one per case)."""
    steps: Positive | None = None
    """Number of steps per epoch, instead of --samples."""
    patch: Annotated[str, Flag(metavar="Z,Y,X")] = ""
    """Voxels of a patch along each axis, or one number for all (default: the plan's; raw scans: 128)."""
    foreground_share: Fraction = 0.33
    """Fraction of patches drawn around foreground. With 0, both modes cut exactly the same patches if preparing kept
    the grid."""
    no_sync: bool = False
    """Do not make ranks wait for one another at every step."""
    seed: Annotated[int, pydantic.Field(ge=0)] = 0
    """Seed of the order and of the patches."""
    workers: Annotated[int, pydantic.Field(ge=0)] = 0
    """Number of DataLoader processes per rank; 0: the rank itself loads."""
    prefetch: Positive = 2
    """Number of batches to prefetch per rank or, with workers, per worker."""
    in_flight: Positive | None = None
    """Number of samples that a process fetches at once (default: --prefetch batches; one batch in a worker)."""
    max_gap_bytes: Annotated[int, SIZE, Flag(long="--max-gap", metavar="SIZE")] = default_size("128Ki")
    """Largest gap between chunks that are read in one request (mode patches)."""
    cache: tuple[Cache, ...] = ("none",)
    """Kind of cache to measure (repeatable)."""
    cache_dir: PathOrUri = ""
    """Folder for the cache on each node's disk (default: a temporary folder)."""
    cache_bytes: Annotated[int, SIZE, Flag(metavar="SIZE")] = default_size("100Gi")
    """Size of the cache on each node's disk."""
    manifest: Annotated[PathOrUri, Flag(metavar="FILE")] = ""
    """Saved listing of raw scans (voxlane ls --save), read instead of listing."""
    ranks: Positive = 1
    """Number of processes per node."""
    nodes: Positive = 1
    """Number of nodes; with the local launcher they are simulated on this machine."""
    launcher: Literal["local", "ray"] = "local"
    """local: processes of this machine. ray: ranks through Ray Train."""
    address: str | None = None
    """Running Ray cluster to use: host:port, or auto."""
    out: Annotated[PathOrUri, Flag(metavar="FILE")] = "loading-bench.json"
    """Result file, a path or a URI; the plot is saved beside it as .png."""
    no_plot: bool = False
    """Draw no plot (needs no matplotlib)."""
    store: Annotated[StoreConfig, NO_FLAG] = StoreConfig()

    _RESULT_FIELDS: ClassVar[tuple[str, ...]] = (
        *("data", "mode", "batch", "step_time_s", "workers", "prefetch", "in_flight", "epochs", "samples", "steps"),
        *("foreground_share", "max_gap_bytes", "ranks", "nodes", "caches", "cache_bytes", "sync", "launcher"),
        *("address", "manifest", "listing_only", "seed"),
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_from_job(cls, values: Any) -> Any:
        """In a job that a launcher started, set its numbers of ranks and nodes."""
        if in_job():
            fields = values if isinstance(values, dict) else values.kwargs
            fields["ranks"] = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
            fields["nodes"] = max(1, int(os.environ["WORLD_SIZE"]) // fields["ranks"])
        return values

    def __post_init__(self) -> None:
        self._check_datasets()
        if self.samples is not None and self.steps is not None:
            raise ConfigError("--samples and --steps both set the length of an epoch", fix="Give one of them")
        if not all(1 <= size <= _LONGEST_PATCH for size in self.patch_shape or ()):
            raise ConfigError(f"--patch {self.patch}", fix=f"Give 1 to {_LONGEST_PATCH} voxels along each of z,y,x")
        if self.launcher != "ray" and self.address is not None:
            raise ConfigError("--address names a Ray cluster", fix="Add --launcher ray")
        if self.cache_bytes < 1:
            raise ConfigError(f"--cache-bytes {self.cache_bytes}", fix="Give 1 or more")

    def _check_datasets(self) -> None:
        if not self.data:
            raise UsageError("voxlane bench loading: missing DATA", fix="See: voxlane bench loading --help")
        if len(self.data) > 2:
            raise ConfigError(f"got {len(self.data)} datasets", fix="Give one, or two to compare them")
        if self.listing_only and (self.manifest or len(self.data) > 1):
            conflict = "a saved listing" if self.manifest else f"{len(self.data)} datasets"
            raise ConfigError(f"--listing-only with {conflict}", fix="Give one dataset, without --manifest")
        if self.manifest and len(self.data) > 1:
            raise ConfigError("--manifest describes one dataset", fix="Measure one dataset")

    @cached_property
    def patch_shape(self) -> tuple[int, int, int] | None:
        """Voxels (z, y, x) of a patch; None: the plan's, or 128 cubed for raw scans."""
        return parse_patch(self.patch) if self.patch else None

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Kinds of cache to measure, each once."""
        return tuple(dict.fromkeys(self.cache))

    @property
    def sync(self) -> bool:
        """Whether ranks wait for one another at every step, as averaging gradients makes them."""
        return not self.no_sync

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return self.ranks * self.nodes

    def samples_per_epoch(self, cases: int) -> int:
        """Return the samples of an epoch over a dataset of `cases`: full steps only, equally many on every rank."""
        samples_per_step = self.batch * self.world_size
        if self.steps is not None:
            return self.steps * samples_per_step
        samples = cases if self.samples is None else self.samples
        if samples < samples_per_step:
            available = f"{cases} cases, one sample each" if self.samples is None else f"--samples {samples}"
            raise ConfigError(
                f"a step takes {samples_per_step} samples, {self.batch} on each of {self.world_size} ranks, but an "
                f"epoch has {available}",
                fix=f"Give --steps 10, --samples {10 * samples_per_step} or more, a smaller --batch, or fewer ranks",
            )
        return samples // samples_per_step * samples_per_step

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain data, without credentials."""
        fields = {name: getattr(self, name) for name in self._RESULT_FIELDS}
        return {**fields, "patch": self.patch_shape, "endpoint": self.store.endpoint}
