"""Run the loading benchmark: on one rank or many, take batches as training does, and sleep instead of training."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from voxlane import uri as uris
from voxlane.bench import process_usage, ranks
from voxlane.bench.loading.raw_scans import RawDataset, WholeObjects, find_cases
from voxlane.bench.loading.settings import DEFAULT_PATCH, RAM_CACHE_BYTES, Cache, LoadingSettings, Mode
from voxlane.bench.report import in_job
from voxlane.dataset.cache import DiskCache
from voxlane.distributed import run_on_rank_zero
from voxlane.errors import ConfigError, LayoutError, NotFoundError
from voxlane.processes import ProcessId
from voxlane.store import Store, StoreConfig
from voxlane.store.credentials import resolve_endpoint
from voxlane.store.listing import Manifest, list_objects
from voxlane.temporary import make_temporary_folder
from voxlane.train.patch_loader import PatchLoader
from voxlane.volume.case_volumes import CacheLimits
from voxlane.volume.patch_stream import PatchStream
from voxlane.volume.prepared_dataset import HEADER, Prepared, as_prefix

_FILLING_EPOCH = 0
"""The epoch that fills a warm cache. Measured ones count from 1, so that all caches see the same samples."""
_SERVER_TIMEOUT_S = 10.0
_REFUSED_STATUSES = ("429", "503")
_OTHER_COUNTERS = ("max_concurrent", "injected", "cpu_s")


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


def measure(settings: LoadingSettings) -> tuple[LoadingSettings, LoadingResult | dict[str, Any] | None]:
    """Run the benchmark; return the settings that were used and the result, or with `listing_only` that of listing. In
    a job that a launcher started, ranks other than the first get None."""
    sources = tuple(recognise(uri, settings.mode, settings) for uri in settings.data)
    if len({source.mode for source in sources}) < len(sources):
        raise ConfigError(
            f"both datasets are read as {sources[0].mode}, so there is nothing to compare",
            fix="Give raw scans and the prepared dataset made from them, or one of them",
        )
    if settings.manifest and sources[0].mode != "whole-object":
        raise ConfigError("a prepared dataset has its own table of cases and is not listed", fix="Leave --manifest out")
    if in_job():
        if settings.launcher == "ray":
            raise ConfigError("the launcher of this job has already started its ranks", fix="Leave --launcher ray out")
        if settings.listing_only:
            return settings, ranks.join_job(lambda _: time_listing(settings, sources[0]), "cpu")
        return settings, ranks.join_job(lambda _: load(settings, sources), "cpu")
    if settings.listing_only:
        settings = dataclasses.replace(settings, ranks=1, nodes=1)
        return settings, time_listing(settings, sources[0])
    for source in sources:
        if source.mode == "patches":  # reports a mistake before ranks are started
            settings.samples_per_epoch(len(Prepared.load(source.uri, settings.store)))
    if settings.launcher == "ray":
        work = partial(load, settings, sources)
        nodes = settings.nodes if settings.nodes > 1 else None
        with ranks.launch_on_ray(settings.address, settings.world_size, nodes=nodes) as launch:
            return settings, launch(work, workers=settings.world_size)
    work = partial(load, _set_cache_folder(settings), sources)
    if settings.world_size == 1:
        return settings, work()
    return settings, ranks.launch_local(work, workers=settings.world_size, per_node=settings.ranks)


def _set_cache_folder(settings: LoadingSettings) -> LoadingSettings:
    """Return settings with a cache folder, if a cache is measured. A temporary one is removed at the end of this
    process, when the last reading threads have ended, even if the ranks were interrupted."""
    if settings.cache_dir or set(settings.caches) == {"none"}:
        return settings
    folder = make_temporary_folder("bench")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return dataclasses.replace(settings, cache_dir=folder)


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
    started_s = process_usage.find_age_s()
    datasets = [_Dataset(settings, source) for source in sources]
    # All ranks use the same name, so that those of a node share its cache.
    name = run_on_rank_zero(lambda: f"voxlane-bench-{ProcessId.current()}-{uuid.uuid4().hex}")
    cache_folder = settings.cache_dir or os.path.join(tempfile.gettempdir(), name)
    plans = [dataset.content.plan for dataset in datasets if isinstance(dataset.content, Prepared)]
    patch = settings.patch_shape or (plans[0].patch if plans else DEFAULT_PATCH)
    runs = [
        _Run(cache, settings, dataset, index, patch, cache_folder)
        for index, dataset in enumerate(datasets)
        for cache in settings.caches
    ]
    opened_s = process_usage.find_age_s()
    epochs = _measure_runs(settings, runs)
    first_batch_s = None
    if opened_s is not None and settings.caches[0] != "warm":
        first_batch_s = opened_s + epochs[0].first_batch_s
    return LoadingResult(
        data=[dataset.to_json() for dataset in datasets],
        patch=patch,
        samples=[dataset.samples for dataset in datasets],
        epochs=[epoch for rank_epochs in ranks.gather(epochs) for epoch in rank_epochs],
        start={"work_s": started_s, "open_s": opened_s, "first_batch_s": first_batch_s},
        server=describe_server(sources[0].uri, settings.store) if ranks.rank() == 0 else None,
    )


def _measure_runs(settings: LoadingSettings, runs: Sequence[_Run]) -> list[RankEpoch]:
    """Measure every epoch of every run; runs take turns, so that a drift of the machine affects all alike."""
    epochs: list[RankEpoch] = []
    try:
        for run in runs:
            if run.cache == "warm":
                ranks.print_on_rank_zero(f"{run.name}: filling the cache")
                run.measure_epoch(_FILLING_EPOCH)
        for number in range(_FILLING_EPOCH + 1, _FILLING_EPOCH + 1 + settings.epochs):
            for run in runs:
                epochs.append(run.measure_epoch(number))
                ranks.print_on_rank_zero(_format_progress(run, epochs[-1], settings))
    except BaseException:
        for run in runs:
            run.close(wait=False)
        raise
    for run in runs:
        run.close()
    return epochs


class _Dataset:
    """An opened dataset, whose cases are known."""

    def __init__(self, settings: LoadingSettings, source: Source) -> None:
        self.source = source
        self._settings = settings
        self.content: Prepared | RawDataset
        if source.mode == "patches":
            self.content = Prepared.load(source.uri, settings.store)
        else:
            # One rank lists for all: at a thousand nodes the lists of the others would be a load of their own.
            self.content = run_on_rank_zero(partial(_open_raw, source.uri, settings))
            if left_out := self.content.left_out:
                total = len(self.content) + left_out
                ranks.print_on_rank_zero(f"{source.uri}: {left_out} of {total} cases left out: no label, or no image")
        self.samples = settings.samples_per_epoch(len(self.content))

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
        if isinstance(self.content, RawDataset):
            return WholeObjects(self.content, settings.store, cache=cache, **arguments)
        limits = CacheLimits(ram_bytes=0, index_bytes=0)
        if cache is not None:
            limits = CacheLimits(ram_bytes=RAM_CACHE_BYTES, folder=cache.folder, disk_bytes=cache.max_bytes)
        return PatchStream(self.content, caching=limits, max_gap_bytes=settings.max_gap_bytes, **arguments)

    def to_json(self) -> dict[str, Any]:
        """Return the description for the result file."""
        fields = {"uri": self.source.uri, "mode": self.source.mode, "cases": len(self.content)}
        if isinstance(self.content, Prepared):
            return {**fields, "sample_bytes": None}
        return {**fields, "sample_bytes": self.content.sample_bytes, "object_bytes": self.content.object_bytes}


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
    _cache_folder: str
    _loader: PatchLoader | None = None

    @property
    def name(self) -> str:
        """Name in progress messages."""
        return f"{self._dataset.source.mode}, cache {self.cache}"

    @property
    def _folder(self) -> str:
        return os.path.join(self._cache_folder, f"node-{_read_node()}", f"{self._index}-{self.cache}")

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
        if not int(os.environ.get("LOCAL_RANK") or 0):
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
        title = f"{self.name}, epoch {epoch}" if ranks.rank() == 0 else None
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
            rank=ranks.rank(),
            node=_read_node(),
            host=socket.gethostname(),
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
        if ranks.rank() > 0:
            return {}
        return read_counters(self._dataset.source.uri, self._settings.store) or {}


def _read_node() -> int:
    """Return the index of this rank's node, as its launcher numbers them."""
    return int(os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK") or 0)


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
    return {"seconds": seconds, "steps": steps, "samples": samples, "first_batch_s": first_batch_s}


def _format_progress(run: _Run, epoch: RankEpoch, settings: LoadingSettings) -> str:
    stall = f", waited {1 - epoch.steps * settings.step_time_s / epoch.seconds:.0%}" if settings.step_time_s else ""
    rate = epoch.samples * settings.world_size / epoch.seconds
    return f"{run.name}, epoch {epoch.epoch} of {settings.epochs}: {epoch.seconds:.1f} s, {rate:.1f} samples/s{stall}"


# -- counters of the server, if it is one that reports them: voxlane's emulator ----------------------------------------


def read_counters(uri: str, config: StoreConfig) -> dict[str, float] | None:
    """Return totals since the server of a bucket started; None if it has no counters.

    bytes: bytes of the bodies of all responses.
    refused: requests answered with 429 or 503, because there were too many at once.
    cpu_s: processor seconds that the server used.
    """
    counters = _get_from_emulator(uri, config, "counters")
    if counters is None:
        return None
    kinds = [value for name, value in counters.items() if name not in _OTHER_COUNTERS]
    return {
        "bytes": sum(kind["bytes_out"] for kind in kinds),
        "requests": sum(kind["requests"] for kind in kinds),
        "refused": sum(kind["statuses"].get(status, 0) for kind in kinds for status in _REFUSED_STATUSES),
        "cpu_s": counters["cpu_s"],
    }


def describe_server(uri: str, config: StoreConfig) -> dict[str, Any] | None:
    """Return the kind of the server and the faults it was configured with; None if it does not report them."""
    faults = _get_from_emulator(uri, config, "faults")
    return None if faults is None else {"kind": "emulator", "faults": faults}


def _get_from_emulator(uri: str, config: StoreConfig, path: str) -> Any:
    endpoint = resolve_endpoint(uris.parse(uri), config)
    if endpoint is None:
        return None
    try:
        with urllib.request.urlopen(f"{endpoint}/_emulator/{path}", timeout=_SERVER_TIMEOUT_S) as response:
            answer = json.load(response)
    except (OSError, ValueError):  # another server, which does not know the path
        return None
    return answer if isinstance(answer, dict) else None
