"""What each rank of the loading benchmark does: take batches as training does, and sleep instead of training."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from voxlane import uri as uris
from voxlane.bench import process_usage, ranks
from voxlane.bench.loading.raw_scans import RawDataset, WholeObjects, find_cases
from voxlane.bench.loading.settings import DEFAULT_PATCH, RAM_CACHE_BYTES, Cache, LoadingSettings, Mode
from voxlane.bench.report import print_progress
from voxlane.bench.server_counters import describe_server, read_counters
from voxlane.dataset.cache import DiskCache
from voxlane.distributed import run_on_rank_zero
from voxlane.errors import ConfigError, LayoutError, NotFoundError
from voxlane.store import Store
from voxlane.store.listing import Manifest, list_objects
from voxlane.train.patch_loader import PatchLoader
from voxlane.volume.case_volumes import CacheLimits
from voxlane.volume.patch_stream import PatchStream
from voxlane.volume.prepared_dataset import HEADER, Prepared, as_prefix

_FILLING_EPOCH = 0
"""The epoch that fills a warm cache. Measured ones count from 1, so that all caches see the same samples."""


@dataclass(frozen=True)
class Source:
    """A dataset and the mode in which it is read."""

    uri: str
    mode: Mode


@dataclass(frozen=True, kw_only=True)
class RankEpoch:
    """Measurements of one epoch on one rank."""

    source: int
    """Index of the dataset."""
    cache: Cache
    epoch: int
    rank: int
    node: int
    host: str
    seconds: float
    steps: int
    samples: int
    waited_s: float
    """Seconds of waiting for batches."""
    first_batch_s: float
    """Seconds from asking for the first batch to having it, including the start of workers."""
    bytes: int
    """Bytes of objects that this rank's processes received."""
    requests: int
    retries: int
    bucket_s: float
    """Thread seconds of waiting for the bucket."""
    decode_s: float
    """Thread seconds of decoding."""
    cpu_s: float
    memory_bytes: int
    server: dict[str, float] | None
    """What the server counted meanwhile for all ranks; None on ranks other than the first, and for servers without
    counters."""


@dataclass(frozen=True, kw_only=True)
class LoadingResult:
    """Measurements of all ranks."""

    data: list[dict[str, Any]]
    """URI, mode, cases and bytes per sample of each dataset."""
    patch: tuple[int, int, int]
    samples: list[int]
    """Samples per epoch of each dataset."""
    epochs: list[RankEpoch]
    start: dict[str, float | None]
    """Seconds of the first rank from the start of its process to its work, to its open datasets and to its first
    batch."""
    server: dict[str, Any] | None
    """Kind and behaviour of the server; None if it does not report them."""


def recognise(uri: str, requested: Mode | None, settings: LoadingSettings) -> Source:
    """Return the mode in which a dataset is read: patches if it has the header of a prepared dataset."""
    if uri.lower().endswith((".json", ".csv", ".parquet")):
        raise ConfigError(
            "a list of cases cannot be read",
            uri=uri,
            fix="Give the folder: .npy pairs, or KiTS19, Decathlon, nnU-Net or BraTS in NIfTI; or a prepared dataset",
        )
    store, prefix = Store(uri, settings.store), as_prefix(uris.parse(uri).key)
    try:
        header = json.loads(bytes(store.get(prefix + HEADER)))
    except NotFoundError as error:
        if type(error) is not NotFoundError:  # the bucket itself does not exist
            raise
        header = None
    except ValueError:
        header = {}
    mode: Mode = "whole-object" if header is None else "patches"
    if requested is None or requested == mode:
        return Source(uri, mode)
    if requested == "patches":
        raise ConfigError(
            "--mode patches needs a prepared dataset, and this is none",
            uri=uri,
            fix="Run voxlane prepare SRC DST and give DST, or measure raw scans with --mode whole-object",
        )
    origin = (header or {}).get("source", {}).get("uri")
    raise ConfigError(
        "--mode whole-object needs raw scans, but this is a prepared dataset",
        uri=uri,
        fix=f"Give the scans that it was prepared from{f' ({origin})' if origin else ''}, or --mode patches",
    )


def time_listing(settings: LoadingSettings, source: Source) -> dict[str, Any]:
    """List a dataset on the first rank and return the duration and the number of requests."""

    def work() -> dict[str, Any]:
        store = Store(source.uri, settings.store)
        start = time.perf_counter()
        manifest = list_objects(_as_folder(source.uri), store=store)
        seconds = time.perf_counter() - start
        return {
            "uri": source.uri,
            "keys": len(manifest),
            "bytes": manifest.total_bytes,
            "seconds": seconds,
            "requests": store.counters.read().requests,
            "keys_per_s": len(manifest) / seconds,
        }

    return run_on_rank_zero(work)


def load(settings: LoadingSettings, sources: tuple[Source, ...]) -> LoadingResult:
    """Measure as one rank and return the measurements of all ranks."""
    torch.set_num_threads(1)  # nothing is computed
    rank = _Rank()
    started_s = process_usage.find_age_s()
    datasets = [_Dataset(settings, source) for source in sources]
    # All ranks use the same name, so that those of a node share its cache.
    name = run_on_rank_zero(lambda: f"voxlane-bench-{uuid.uuid4().hex}")
    cache_folder = settings.cache_dir or os.path.join(tempfile.gettempdir(), name)
    planned = next((dataset.prepared.plan.patch for dataset in datasets if dataset.prepared is not None), DEFAULT_PATCH)
    patch = settings.patch_shape or planned
    runs = [
        _Run(cache, settings, dataset, index, patch, rank, cache_folder)
        for index, dataset in enumerate(datasets)
        for cache in settings.caches
    ]
    opened_s = process_usage.find_age_s()
    epochs = _measure_runs(settings, runs, rank)
    first_batch_s = None
    if opened_s is not None and settings.caches[0] != "warm":
        first_batch_s = opened_s + epochs[0].first_batch_s
    gathered = ranks.gather(epochs)
    return LoadingResult(
        data=[dataset.to_json() for dataset in datasets],
        patch=patch,
        samples=[dataset.samples for dataset in datasets],
        epochs=[epoch for rank_epochs in gathered for epoch in rank_epochs],
        start={"work_s": started_s, "open_s": opened_s, "first_batch_s": first_batch_s},
        server=describe_server(sources[0].uri, settings.store) if rank.rank == 0 else None,
    )


def _measure_runs(settings: LoadingSettings, runs: Sequence[_Run], rank: _Rank) -> list[RankEpoch]:
    """Measure every epoch of every run; runs take turns, so that a drift of the machine affects all alike."""
    epochs: list[RankEpoch] = []
    try:
        for run in runs:
            if run.cache == "warm":
                rank.print(f"{run.name}: filling the cache")
                run.measure_epoch(_FILLING_EPOCH)
        for number in range(_FILLING_EPOCH + 1, _FILLING_EPOCH + 1 + settings.epochs):
            for run in runs:
                epochs.append(run.measure_epoch(number))
                rank.print(_format_progress(run, epochs[-1], settings))
    except BaseException:
        for run in runs:
            run.close(wait=False)
        raise
    for run in runs:
        run.close()
    return epochs


@dataclass(frozen=True)
class _Rank:
    """This rank among all, as its launcher describes it."""

    rank: int = field(default_factory=lambda: dist.get_rank() if dist.is_initialized() else 0)
    node: int = field(default_factory=lambda: int(os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK") or 0))
    is_first_of_node: bool = field(default_factory=lambda: int(os.environ.get("LOCAL_RANK") or 0) == 0)
    host: str = field(default_factory=socket.gethostname)

    def print(self, text: str) -> None:
        if self.rank == 0:
            print_progress(text)


class _Dataset:
    """An opened dataset, whose cases are known."""

    def __init__(self, settings: LoadingSettings, source: Source) -> None:
        self.source = source
        self._settings = settings
        self.prepared: Prepared | None = None
        self.raw: RawDataset | None = None
        if source.mode == "patches":
            self.prepared = Prepared.load(source.uri, settings.store)
            self.cases = len(self.prepared)
        else:
            # One rank lists for all: at a thousand nodes the lists of the others would be a load of their own.
            self.raw = run_on_rank_zero(partial(_open_raw, source.uri, settings))
            self.cases = len(self.raw.cases)
        self.samples = settings.samples_per_epoch(self.cases)

    def open_stream(self, patch: tuple[int, int, int], cache: DiskCache | None) -> PatchStream:
        """Return the stream of samples. With a cache, patches are cached in memory as well, as in training."""
        settings = self._settings
        arguments: dict[str, Any] = {
            "samples": self.samples,
            "patch": patch,
            "foreground_share": settings.foreground_share,
            "seed": settings.seed,
            "in_flight": settings.in_flight or settings.batch * (1 if settings.workers else settings.prefetch),
        }
        if self.raw is not None:
            return WholeObjects(self.raw, settings.store, cache=cache, **arguments)
        assert self.prepared is not None
        limits = CacheLimits(ram_bytes=0, index_bytes=0)
        if cache is not None:
            limits = CacheLimits(ram_bytes=RAM_CACHE_BYTES, folder=cache.folder, disk_bytes=cache.max_bytes)
        return PatchStream(self.prepared, caching=limits, max_gap_bytes=settings.max_gap_bytes, **arguments)

    def to_json(self) -> dict[str, Any]:
        """Return the description for the result file."""
        fields = {"uri": self.source.uri, "mode": self.source.mode, "cases": self.cases}
        if self.raw is None:
            return {**fields, "sample_bytes": None}
        return {**fields, "sample_bytes": self.raw.sample_bytes, "object_bytes": self.raw.object_bytes}


def _open_raw(uri: str, settings: LoadingSettings) -> RawDataset:
    """Return the raw scans of a folder, listed now or read from the manifest."""
    folder = _as_folder(uri)
    manifest = Manifest.load(settings.manifest, settings.store) if settings.manifest else None
    if manifest is None:
        manifest = list_objects(folder, config=settings.store)
    elif not _as_folder(manifest.uri).startswith(folder):
        raise ConfigError(
            f"the manifest lists {manifest.uri}", uri=folder, fix="Save one of DATA: voxlane ls URI --save FILE"
        )
    if not len(manifest):
        raise LayoutError("the folder is empty", uri=folder, fix="Check the spelling of the bucket and the folder")
    description = manifest.folder + "dataset.json"
    has_description = bool(manifest.match("*dataset.json").keys().count(description))
    store = Store(folder, settings.store)
    return find_cases(manifest, json.loads(bytes(store.get(description))) if has_description else None)


def _as_folder(uri: str) -> str:
    return uri.rstrip("/") + "/"


@dataclass
class _Run:
    """A dataset read with one kind of cache, epoch after epoch."""

    cache: Cache
    _settings: LoadingSettings
    _dataset: _Dataset
    _index: int
    """Index of the dataset."""
    _patch: tuple[int, int, int]
    _rank: _Rank
    _cache_folder: str
    _loader: PatchLoader | None = None

    @property
    def name(self) -> str:
        """Name in progress messages."""
        return f"{self._dataset.source.mode}, cache {self.cache}"

    @property
    def _folder(self) -> str:
        return os.path.join(self._cache_folder, f"node-{self._rank.node}", f"{self._index}-{self.cache}")

    def _open_loader(self, epoch: int) -> PatchLoader:
        """Return the loader of an epoch. A cold cache is empty every time; others stay."""
        if self._loader is None or self.cache == "cold":
            self.close()
            disk = None
            if self.cache != "none":
                disk = DiskCache(os.path.join(self._folder, str(epoch)), self._settings.cache_bytes)
            workers = self._settings.workers
            self._loader = PatchLoader(
                self._dataset.open_stream(self._patch, disk),
                self._settings.batch,
                num_workers=workers,
                prefetch_factor=self._settings.prefetch if workers else None,
                persistent_workers=workers > 0,
            )
        self._loader.set_epoch(epoch)
        return self._loader

    def close(self, *, wait: bool = True) -> None:
        """End the workers and remove the cache. Without `wait`, this rank failed and the others will not come."""
        self._loader = None
        if self.cache == "none":
            return
        if wait:
            ranks.gather(None)  # one rank of a node removes what all have used
        if self._rank.is_first_of_node:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # other runs have files in it
                os.rmdir(os.path.dirname(self._folder))
                if not self._settings.cache_dir:
                    os.rmdir(os.path.dirname(os.path.dirname(self._folder)))
        if wait:
            ranks.gather(None)

    def measure_epoch(self, epoch: int) -> RankEpoch:
        """Read one epoch."""
        loader = self._open_loader(epoch)
        stream: Any = loader.dataset
        traffic_before, times_before = stream.traffic(), stream.times_s
        ranks.gather(None)
        counters_before = self._read_counters()
        ranks.gather(None)
        process_usage.release_memory()
        cpu_before_s = process_usage.measure_cpu_s()
        title = f"{self.name}, epoch {epoch}" if self._rank.rank == 0 else None
        with process_usage.TreeMemorySampler() as memory:
            loop = _run_loop(loader, self._settings, title)
        cpu_s = process_usage.measure_cpu_s() - cpu_before_s
        ranks.gather(None)
        traffic, times = stream.traffic(), stream.times_s
        counters = self._read_counters() if counters_before else {}
        return RankEpoch(
            source=self._index,
            cache=self.cache,
            epoch=epoch,
            rank=self._rank.rank,
            node=self._rank.node,
            host=self._rank.host,
            **loop,
            bytes=traffic.bytes_read - traffic_before.bytes_read,
            requests=traffic.requests - traffic_before.requests,
            retries=traffic.retries - traffic_before.retries,
            bucket_s=times[0] - times_before[0],
            decode_s=times[1] - times_before[1],
            cpu_s=cpu_s,
            memory_bytes=memory.bytes,
            server={name: total - counters_before[name] for name, total in counters.items()} or None,
        )

    def _read_counters(self) -> dict[str, float]:
        """Return what the server has counted; empty on ranks other than the first, and for other servers."""
        if self._rank.rank > 0:
            return {}
        return read_counters(self._dataset.source.uri, self._settings.store) or {}


def _run_loop(loader: PatchLoader, settings: LoadingSettings, title: str | None) -> dict[str, Any]:
    """Run the training loop without training and return its times; `title` is that of the progress bar."""
    synced = settings.sync and dist.is_initialized()
    gradients = torch.zeros(1)
    waited_before_s = loader.waited_s
    first_batch_s = 0.0
    steps = samples = 0
    is_hidden = True if title is None else None
    with tqdm(desc=title, total=len(loader), unit="step", leave=False, disable=is_hidden) as bar:
        start = time.perf_counter()
        for batch in loader:
            first_batch_s = first_batch_s or loader.waited_s - waited_before_s
            steps += 1
            samples += len(batch["position"])
            if settings.step_time_s:
                time.sleep(settings.step_time_s)
            if synced:
                dist.all_reduce(gradients)
            bar.update()
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "steps": steps,
        "samples": samples,
        "waited_s": loader.waited_s - waited_before_s,
        "first_batch_s": first_batch_s,
    }


def _format_progress(run: _Run, epoch: RankEpoch, settings: LoadingSettings) -> str:
    stall = f", waited {1 - epoch.steps * settings.step_time_s / epoch.seconds:.0%}" if settings.step_time_s else ""
    rate = epoch.samples * settings.world_size / epoch.seconds
    return f"{run.name}, epoch {epoch.epoch} of {settings.epochs}: {epoch.seconds:.1f} s, {rate:.1f} samples/s{stall}"
