"""What each rank of a loading benchmark does: take batches as training takes them, and sleep instead of training."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from voxlane import uri as uris
from voxlane.bench import process_tree, ranks
from voxlane.bench.loading_setting import DEFAULT_PATCH, RAM_CACHE_BYTES, Cache, LoadingSetting, Mode
from voxlane.bench.raw_set import RawSet, raw_set
from voxlane.bench.served import Counted, Server
from voxlane.bench.whole_objects import WholeObjects
from voxlane.dataset import DataLoader
from voxlane.dataset.cache import DiskCache
from voxlane.errors import ConfigError, LayoutError, NotFoundError
from voxlane.listing import Manifest, list_objects
from voxlane.store import Store
from voxlane.volume.cases import Caching
from voxlane.volume.prepared import HEADER, Prepared, folder
from voxlane.volume.stream import PatchStream

_NOT_MEASURED = 0
"""The epoch that fills a warm cache; measured ones count from 1, so that all see the same samples."""


@dataclass(frozen=True)
class Leg:
    """One dataset and how it is read."""

    uri: str
    mode: Mode


@dataclass(frozen=True, kw_only=True)
class RankEpoch:
    """What one rank saw of one epoch."""

    leg: int
    cache: Cache
    epoch: int
    rank: int
    node: int
    host: str
    seconds: float
    steps: int
    samples: int
    waited_s: float
    """For batches."""
    first_batch_s: float
    """From asking for the first batch, with the start of workers, to having it."""
    bytes: int
    """Of objects, as this rank's processes received them."""
    requests: int
    retries: int
    bucket_s: float
    """Of threads that waited for the bucket."""
    decode_s: float
    """Of threads that decoded."""
    cpu_s: float
    memory_bytes: int
    server: dict[str, float] | None
    """What the server counted meanwhile for all ranks; None on others than the first, and where it does not tell."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What all ranks saw."""

    data: list[dict[str, Any]]
    """One a leg: its URI, mode, cases, and what a whole-object sample holds."""
    patch: tuple[int, int, int]
    samples: list[int]
    """Of an epoch, one a leg."""
    epochs: list[RankEpoch]
    start: dict[str, float | None]
    """Of the first rank: seconds from its process's begin to its work, to its datasets being open, to its first batch.
    """
    server: dict[str, Any] | None


def recognised(uri: str, wanted: Mode | None, setting: LoadingSetting) -> Leg:
    """How a dataset is read, by what is there: a prepared dataset has a header."""
    if uri.lower().endswith((".json", ".csv", ".parquet")):
        raise ConfigError(
            "a list of cases is not read here",
            uri=uri,
            fix="Give the folder: .npy pairs, or KiTS19, Decathlon, nnU-Net or BraTS in NIfTI; or a prepared dataset",
        )
    store, prefix = Store(uri, setting.store), folder(uris.parse(uri).key)
    try:
        header = json.loads(bytes(store.get(prefix + HEADER)))
    except NotFoundError as error:
        if type(error) is not NotFoundError:  # the bucket itself is not there
            raise
        header = None
    except ValueError:
        header = {}
    mode: Mode = "whole-object" if header is None else "patches"
    if wanted is None or wanted == mode:
        return Leg(uri, mode)
    if wanted == "patches":
        raise ConfigError(
            "mode patches reads a prepared dataset, and none is here",
            uri=uri,
            fix="Run voxlane prepare SRC DST and give DST, or measure raw scans with --mode whole-object",
        )
    source = (header or {}).get("source", {}).get("uri")
    raise ConfigError(
        "mode whole-object reads raw scans, and here is a prepared dataset, whose chunks nobody reads as wholes",
        uri=uri,
        fix=f"Give the scans that it was made from{f' ({source})' if source else ''}, or --mode patches",
    )


def listed(setting: LoadingSetting, leg: Leg) -> dict[str, Any]:
    """List a dataset really, on the first rank, and say what it took."""

    def work() -> dict[str, Any]:
        store = Store(leg.uri, setting.store)
        began = time.perf_counter()
        manifest = list_objects(_as_folder(leg.uri), store=store)
        seconds = time.perf_counter() - began
        requests = store.counters.read().requests
        return {
            "uri": leg.uri,
            "keys": len(manifest),
            "bytes": manifest.total_bytes,
            "seconds": seconds,
            "requests": requests,
            "keys_per_s": len(manifest) / seconds,
        }

    found: dict[str, Any] = ranks.from_first(work)
    return found


def load(setting: LoadingSetting, legs: tuple[Leg, ...]) -> Found:
    """Measure as one rank; returns what all ranks saw."""
    torch.set_num_threads(1)  # nothing is computed
    here = _Here()
    started_s = process_tree.age_s()
    sources = [_Source(setting, leg, here) for leg in legs]
    # One name for all ranks: those of a node share its cache.
    caches = setting.cache_folder or os.path.join(tempfile.gettempdir(), ranks.from_first(_new_name))
    patch = next((source.patch for source in sources if source.leg.mode == "patches"), setting.patch or DEFAULT_PATCH)
    runs = [
        _Run(setting, source, number, cache, patch, here, caches)
        for number, source in enumerate(sources)
        for cache in setting.caches
    ]
    opened_s = process_tree.age_s()
    mine: list[RankEpoch] = []
    first_s: float | None = None
    try:
        for run in runs:
            if run.cache == "warm":
                _say(here, f"{run.name}: filling the cache")
                run.epoch(_NOT_MEASURED)
        for epoch in range(_NOT_MEASURED + 1, _NOT_MEASURED + 1 + setting.epochs):
            for run in runs:  # in turns, so that a drift of the machine falls on all alike
                found = run.epoch(epoch)
                if first_s is None and opened_s is not None and setting.caches[0] != "warm":
                    first_s = opened_s + found.first_batch_s
                mine.append(found)
                _say(here, _told(run, found, setting))
    except BaseException:
        for run in runs:
            run.close(alone=True)
        raise
    for run in runs:
        run.close()
    every = [found for rank in _gathered(mine) for found in rank]
    return Found(
        data=[source.told() for source in sources],
        patch=patch,
        samples=[source.samples for source in sources],
        epochs=every,
        start={"work_s": started_s, "open_s": opened_s, "first_batch_s": first_s},
        server=Server(legs[0].uri, setting.store).description() if here.rank == 0 else None,
    )


class _Here:
    """This rank among all, as whoever started it says."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.node = int(os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK") or 0)
        self.first_of_node = int(os.environ.get("LOCAL_RANK") or 0) == 0
        self.host = socket.gethostname()


class _Source:
    """A dataset, opened: its cases are known."""

    def __init__(self, setting: LoadingSetting, leg: Leg, here: _Here) -> None:
        self.leg = leg
        self._setting = setting
        self.prepared: Prepared | None = None
        self.raw: RawSet | None = None
        if leg.mode == "patches":
            self.prepared = Prepared.load(leg.uri, setting.store)
            self.cases = len(self.prepared)
        else:
            # One rank lists for all: at a thousand nodes the others' lists would be a load of their own.
            self.raw = ranks.from_first(partial(_raw, leg.uri, setting))
            self.cases = len(self.raw.cases)
        self.samples = setting.samples_of(self.cases)

    @property
    def patch(self) -> tuple[int, int, int]:
        """Voxels (z, y, x) of a sample, in mode patches."""
        assert self.prepared is not None
        return self._setting.patch or self.prepared.plan.patch

    def stream(self, patch: tuple[int, int, int], cache: DiskCache | None) -> PatchStream | WholeObjects:
        """Its samples. With a cache, patches are kept in memory as well, as training does."""
        setting = self._setting
        common: dict[str, Any] = {
            "samples": self.samples,
            "patch": patch,
            "foreground_share": setting.foreground_share,
            "seed": setting.seed,
            "in_flight": setting.in_flight or setting.batch * (1 if setting.workers else setting.prefetch),
        }
        if self.raw is not None:
            return WholeObjects(self.raw, setting.store, cache=cache, **common)
        assert self.prepared is not None
        kept = Caching(ram_bytes=0, index_bytes=0)
        if cache is not None:
            kept = Caching(ram_bytes=RAM_CACHE_BYTES, folder=cache.folder, disk_bytes=cache.max_bytes)
        return PatchStream(self.prepared, caching=kept, max_gap_bytes=setting.max_gap_bytes, **common)

    def told(self) -> dict[str, Any]:
        """For the result file."""
        told: dict[str, Any] = {"uri": self.leg.uri, "mode": self.leg.mode, "cases": self.cases, "sample_bytes": None}
        if self.raw is not None:
            told |= {"sample_bytes": self.raw.sample_bytes, "object_bytes": self.raw.object_bytes}
        return told


def _raw(uri: str, setting: LoadingSetting) -> RawSet:
    """The raw set of a folder, listed now or by its manifest."""
    place = _as_folder(uri)
    manifest = Manifest.load(setting.manifest, setting.store) if setting.manifest else None
    if manifest is None:
        manifest = list_objects(place, config=setting.store)
    elif not _as_folder(manifest.uri).startswith(place):
        raise ConfigError(f"a manifest of {manifest.uri}", uri=place, fix="Save one: voxlane ls URI --save FILE")
    if not len(manifest):
        raise LayoutError("nothing is here", uri=place, fix="Check the spelling of the bucket and the folder")
    description = manifest.folder + "dataset.json"
    store = Store(place, setting.store)
    there = bool(manifest.match("*dataset.json").keys().count(description))
    return raw_set(manifest, json.loads(bytes(store.get(description))) if there else None)


def _as_folder(uri: str) -> str:
    return uri.rstrip("/") + "/"


class _Run:
    """A dataset read with one kind of cache, epoch after epoch."""

    def __init__(
        self,
        setting: LoadingSetting,
        source: _Source,
        number: int,
        cache: Cache,
        patch: tuple[int, int, int],
        here: _Here,
        caches: str,
    ) -> None:
        self.cache: Cache = cache
        self.name = f"{source.leg.mode}, cache {cache}"
        self._setting = setting
        self._source = source
        self._number = number
        self._patch = patch
        self._here = here
        self._folder = os.path.join(caches, f"node-{here.node}", f"{number}-{cache}")
        self._loader: DataLoader | None = None

    @cached_property
    def _server(self) -> Server | None:
        return Server(self._source.leg.uri, self._setting.store) if self._here.rank == 0 else None

    def _open(self, epoch: int) -> DataLoader:
        """The loader of an epoch: a cold cache begins empty every time, others stay."""
        if self._loader is None or self.cache == "cold":
            self.close()
            disk = None
            if self.cache != "none":
                disk = DiskCache(os.path.join(self._folder, str(epoch)), self._setting.cache_bytes)
            stream = self._source.stream(self._patch, disk)
            workers = self._setting.workers
            more: dict[str, Any] = (
                {"prefetch_factor": self._setting.prefetch, "persistent_workers": True} if workers else {}
            )
            self._loader = DataLoader(stream, self._setting.batch, num_workers=workers, **more)
        self._loader.set_epoch(epoch)
        return self._loader

    def close(self, *, alone: bool = False) -> None:
        """End its workers and remove its cache. `alone`: this rank failed, and the others wait elsewhere, so that to
        wait for them would be for ever."""
        self._loader = None
        if self.cache == "none":
            return
        if not alone:
            _barrier()  # of a node's ranks one removes what all have used
        if self._here.first_of_node:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # others are in it
                os.rmdir(os.path.dirname(self._folder))
                if not self._setting.cache_folder:
                    os.rmdir(os.path.dirname(os.path.dirname(self._folder)))
        if not alone:
            _barrier()

    def epoch(self, epoch: int) -> RankEpoch:
        """Read one."""
        loader = self._open(epoch)
        stream: Any = loader.dataset
        traffic, times = stream.traffic(), stream.times_s
        _barrier()
        served = self._served()
        _barrier()
        process_tree.release_memory()
        cpu_s = process_tree.cpu_s()
        with process_tree.PeakMemory() as memory:
            watch = _train(loader, self._setting, f"{self.name}, epoch {epoch}" if self._here.rank == 0 else None)
        cpu_s = process_tree.cpu_s() - cpu_s
        _barrier()
        now, after = stream.traffic(), stream.times_s
        return RankEpoch(
            leg=self._number,
            cache=self.cache,
            epoch=epoch,
            rank=self._here.rank,
            node=self._here.node,
            host=self._here.host,
            **watch,
            bytes=now.bytes_read - traffic.bytes_read,
            requests=now.requests - traffic.requests,
            retries=now.retries - traffic.retries,
            bucket_s=after[0] - times[0],
            decode_s=after[1] - times[1],
            cpu_s=cpu_s,
            memory_bytes=memory.bytes,
            server=asdict(ended - served) if served is not None and (ended := self._served()) is not None else None,
        )

    def _served(self) -> Counted | None:
        return None if self._server is None else self._server.counted()


def _train(loader: DataLoader, setting: LoadingSetting, title: str | None) -> dict[str, Any]:
    """The training loop, without training: what a rank takes and how long it waited. `title`: of its progress bar."""
    synced = setting.sync and dist.is_initialized()
    gradients = torch.zeros(1)
    waited_s = first_batch_s = 0.0
    steps = samples = 0
    total = len(loader)
    with tqdm(desc=title, total=total, unit="step", leave=False, disable=True if title is None else None) as bar:
        began = time.perf_counter()
        for batch, wait_s in _timed(iter(loader)):
            waited_s += wait_s
            first_batch_s = first_batch_s or wait_s
            steps += 1
            samples += len(batch["position"])
            if setting.step_time_s:
                time.sleep(setting.step_time_s)
            if synced:
                dist.all_reduce(gradients)
            bar.update()
        seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "steps": steps,
        "samples": samples,
        "waited_s": waited_s,
        "first_batch_s": first_batch_s,
    }


def _timed(batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
    """Each with the seconds that it was waited for."""
    with contextlib.suppress(StopIteration):
        while True:
            asked = time.perf_counter()
            batch = next(batches)
            yield batch, time.perf_counter() - asked


def _told(run: _Run, found: RankEpoch, setting: LoadingSetting) -> str:
    """One line of progress, as the first rank sees it."""
    stall = f", waited {1 - found.steps * setting.step_time_s / found.seconds:.0%}" if setting.step_time_s else ""
    rate = found.samples * setting.world_size / found.seconds
    return f"{run.name}, epoch {found.epoch} of {setting.epochs}: {found.seconds:.1f} s, {rate:.1f} samples/s{stall}"


def _say(here: _Here, text: str) -> None:
    if here.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _new_name() -> str:
    return f"voxlane-bench-{uuid.uuid4().hex}"


def _barrier() -> None:
    if dist.is_initialized():
        ranks.gather(None)


def _gathered(mine: list[RankEpoch]) -> list[list[RankEpoch]]:
    return ranks.gather(mine) if dist.is_initialized() else [mine]
