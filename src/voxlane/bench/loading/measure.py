"""Run the loading benchmark: training's data path, on one rank or many, with a sleep in place of a step."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from voxlane.bench import ranks
from voxlane.bench.loading import rank
from voxlane.bench.loading.rank import LoadingResult, recognise
from voxlane.bench.loading.settings import LoadingSettings
from voxlane.bench.report import in_job
from voxlane.errors import ConfigError
from voxlane.volume.prepared_dataset import Prepared


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
            return settings, ranks.join_job(lambda _: rank.time_listing(settings, sources[0]), "cpu")
        return settings, ranks.join_job(lambda _: rank.load(settings, sources), "cpu")
    if settings.listing_only:
        settings = dataclasses.replace(settings, ranks=1, nodes=1)
        return settings, rank.time_listing(settings, sources[0])
    for source in sources:
        if source.mode == "patches":  # reports a mistake before ranks are started
            settings.samples_per_epoch(len(Prepared.load(source.uri, settings.store)))
    if settings.launcher == "ray":
        work = partial(rank.load, settings, sources)
        nodes = settings.nodes if settings.nodes > 1 else None
        with ranks.launch_on_ray(settings.address, settings.world_size, nodes=nodes) as launch:
            return settings, launch(work, workers=settings.world_size)
    with _temporary_cache(settings) as local_settings:
        work = partial(rank.load, local_settings, sources)
        if settings.world_size == 1:
            return settings, work()
        return settings, ranks.launch_local(work, workers=settings.world_size, per_node=settings.ranks)


@contextmanager
def _temporary_cache(settings: LoadingSettings) -> Iterator[LoadingSettings]:
    """Yield settings with a temporary cache folder, removed when the ranks have ended, even if they were interrupted,
    and again at the end of the process, when the last reading threads have ended."""
    if settings.cache_dir or set(settings.caches) == {"none"}:
        yield settings
        return
    folder = tempfile.mkdtemp(prefix="voxlane-bench-")
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)
    try:
        yield dataclasses.replace(settings, cache_dir=folder)
    finally:
        remove()
