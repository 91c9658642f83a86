"""What a loading benchmark is to do. Checked here, before anything slow begins."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from voxlane.bench.setting import in_job
from voxlane.errors import ConfigError

if TYPE_CHECKING:
    from voxlane.store import StoreConfig

Mode = Literal["patches", "whole-object"]
Cache = Literal["none", "cold", "warm"]
MODES: tuple[Mode, ...] = ("patches", "whole-object")
CACHES: tuple[Cache, ...] = ("none", "cold", "warm")
LAUNCHERS = ("local", "ray")
DEFAULT_PATCH = (128, 128, 128)
_LONGEST_PATCH = 1024
RAM_CACHE_BYTES = 1 << 30
"""Of a process, with a cache and in mode patches: as much as training keeps by default."""


@dataclass(frozen=True, kw_only=True)
class LoadingSetting:
    """A whole benchmark. It travels to every rank."""

    data: tuple[str, ...]
    """URIs; what is compared is measured in turns."""
    mode: Mode | None
    """None: patches from a prepared dataset, whole objects from raw scans."""
    batch: int
    """Samples a rank and step."""
    step_time_s: float
    """What a step takes once its batch is there; 0: none, which shows the loader's top speed."""
    workers: int
    """DataLoader processes of a rank; 0: the rank itself loads."""
    prefetch: int
    """Batches on their way, a rank or, where there are workers, a worker."""
    in_flight: int | None
    """Samples that a process fetches at once; None: as many as are on their way, in a worker a batch."""
    epochs: int
    samples: int | None
    """An epoch's, over all ranks; None: one a case."""
    steps: int | None
    """An epoch's; instead of `samples`."""
    patch: tuple[int, int, int] | None
    """None: the prepared dataset's own, for raw scans 128 cubed."""
    foreground_share: float
    """Share of patches that are drawn around foreground."""
    max_gap_bytes: int
    """patches: chunks that lie at most so far apart come in one request."""
    ranks: int
    """Processes a node."""
    nodes: int
    caches: tuple[Cache, ...]
    cache_folder: str
    """On a disk of each node; empty: a new one among its temporary files."""
    cache_bytes: int
    sync: bool
    """Ranks wait for one another at every step, as averaging gradients makes them."""
    launcher: str
    """local: processes of this machine. ray: ranks through Ray Train."""
    address: str | None
    """ray: a cluster to use; None: one of its own on this machine."""
    manifest: str
    """Of a raw set, so that it is not listed; empty: it is."""
    listing_only: bool
    seed: int
    store: StoreConfig

    def __post_init__(self) -> None:
        for name in ("batch", "prefetch", "epochs", "ranks", "nodes", "samples", "steps", "in_flight", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", fix="Give 1 or more")
        for name in ("workers", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} {getattr(self, name)}", fix="Give zero or more")
        if not 0 <= self.step_time_s <= 3600 or math.isnan(self.step_time_s):
            raise ConfigError(
                f"--step-time {self.step_time_s:g}", fix="Give seconds, up to 3600; 0 shows the loader's top speed"
            )
        if not 0 <= self.foreground_share <= 1:
            raise ConfigError(f"--foreground-share {self.foreground_share:g}", fix="Give a share from 0 to 1")
        if self.patch is not None and min(self.patch) < 1:
            raise ConfigError(f"--patch {self.patch}", fix="Give 1 or more voxels along each of z,y,x")
        if self.patch is not None and max(self.patch) > _LONGEST_PATCH:
            raise ConfigError(f"--patch {self.patch}", fix=f"Give at most {_LONGEST_PATCH} voxels along each of z,y,x")
        if self.samples is not None and self.steps is not None:
            raise ConfigError("--samples and --steps both say how long an epoch is", fix="Give one of them")
        if not 1 <= len(self.data) <= 2:
            raise ConfigError(f"{len(self.data)} datasets", fix="Give one, or two to compare them")
        if self.listing_only and (self.manifest or len(self.data) > 1):
            what = "a saved listing" if self.manifest else f"{len(self.data)} datasets"
            raise ConfigError(f"--listing-only with {what}", fix="Give one dataset, without --manifest")
        if self.manifest and len(self.data) > 1:
            raise ConfigError("--manifest is one dataset's", fix="Measure one dataset")
        if self.launcher != "ray" and self.address is not None:
            raise ConfigError("--address names a Ray cluster", fix="Add --launcher ray")

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.ranks * self.nodes

    def samples_of(self, cases: int) -> int:
        """Samples of an epoch over a dataset of `cases`: whole steps only, as many on every rank."""
        a_step = self.batch * self.world_size
        if self.steps is not None:
            return self.steps * a_step
        asked = cases if self.samples is None else self.samples
        if asked < a_step:
            have = f"{cases} cases, one sample each" if self.samples is None else f"--samples {asked}"
            raise ConfigError(
                f"a step takes {a_step} samples, {self.batch} on each of {self.world_size} ranks; an epoch has {have}",
                fix=f"Give --steps 10, --samples {10 * a_step} or more, a smaller --batch, or fewer ranks",
            )
        return asked // a_step * a_step

    def to_json(self) -> dict[str, Any]:
        """As plain data, without credentials."""
        hidden = ("store", "cache_folder")
        plain = {name: value for name, value in vars(self).items() if name not in hidden}
        return {**plain, "endpoint": self.store.endpoint}


def from_options(options: Any, store: StoreConfig, environment: Mapping[str, str] = os.environ) -> LoadingSetting:
    """From parsed flags (see `voxlane.bench.loading_command`); in a job that a launcher started, ranks and nodes are
    those that it says."""
    from voxlane.sizes import bytes_of

    ranks, nodes = options.ranks, options.nodes
    if in_job(environment):
        ranks = int(environment.get("LOCAL_WORLD_SIZE") or 1)
        nodes = max(1, int(environment["WORLD_SIZE"]) // ranks)
    return LoadingSetting(
        data=tuple(options.words),
        mode=options.mode,
        batch=options.batch,
        step_time_s=options.step_time,
        workers=options.workers,
        prefetch=options.prefetch,
        in_flight=options.in_flight,
        epochs=options.epochs,
        samples=options.samples,
        steps=options.steps,
        patch=None if options.patch is None else triple(options.patch),
        foreground_share=options.foreground_share,
        max_gap_bytes=bytes_of(options.max_gap, what="--max-gap"),
        ranks=ranks,
        nodes=nodes,
        caches=tuple(dict.fromkeys(options.cache or ["none"])),
        cache_folder=options.cache_dir or "",
        cache_bytes=bytes_of(options.cache_bytes, what="--cache-bytes"),
        sync=not options.no_sync,
        launcher=options.launcher,
        address=options.address,
        manifest=options.manifest or "",
        listing_only=options.listing_only,
        seed=options.seed,
        store=store,
    )


def triple(text: str) -> tuple[int, int, int]:
    """`128` or `96,128,128` as voxels (z, y, x)."""
    words = text.split(",")
    if len(words) not in (1, 3) or not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--patch {text}", fix="Give one number, or three as z,y,x")
    z, y, x = (int(word) for word in (words if len(words) == 3 else words * 3))
    return z, y, x
