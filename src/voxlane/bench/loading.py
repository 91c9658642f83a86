"""The loading benchmark: training's data path, on one rank or many, with a sleep for a step."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from voxlane.bench import loading_ranks, ranks
from voxlane.bench.launching import local, on_ray
from voxlane.bench.loading_ranks import Found, Leg, recognised
from voxlane.bench.loading_setting import LoadingSetting
from voxlane.bench.setting import in_job
from voxlane.errors import ConfigError
from voxlane.volume.prepared import Prepared


def measure(setting: LoadingSetting) -> tuple[LoadingSetting, Found | dict[str, Any] | None]:
    """Run the benchmark; returns the setting as it ran and what was found, or with `listing_only` what listing took.
    None in a job that a launcher started, on others than the first rank."""
    legs = tuple(recognised(uri, setting.mode, setting) for uri in setting.data)
    if len({leg.mode for leg in legs}) < len(legs):
        raise ConfigError(
            f"two datasets to compare are both read as {legs[0].mode}",
            fix="Give raw scans and the prepared dataset made from them, or one of them",
        )
    if setting.manifest and legs[0].mode != "whole-object":
        raise ConfigError("a prepared dataset is not listed: it has its table of cases", fix="Leave --manifest out")
    if in_job():
        if setting.launcher == "ray":
            raise ConfigError("the launcher of this job has made its ranks already", fix="Leave --launcher ray out")
        return setting, ranks.take_part(_in_group, "cpu", setting, legs)
    if setting.listing_only:
        setting = dataclasses.replace(setting, ranks=1, nodes=1)
        return setting, loading_ranks.listed(setting, legs[0])
    for leg in legs:
        if leg.mode == "patches":  # a mistake is told before ranks are started
            setting.samples_of(len(Prepared.load(leg.uri, setting.store)))
    if setting.launcher == "ray":
        work = partial(loading_ranks.load, setting, legs)
        nodes = setting.nodes if setting.nodes > 1 else None
        with on_ray(setting.address, setting.world_size, nodes=nodes) as launch:
            return setting, launch(work, workers=setting.world_size)
    with _own_cache(setting) as here:
        work = partial(loading_ranks.load, here, legs)
        if setting.world_size == 1:
            return setting, work()
        return setting, local(work, workers=setting.world_size, per_node=setting.ranks)


@contextmanager
def _own_cache(setting: LoadingSetting) -> Iterator[LoadingSetting]:
    """With a folder for caches that goes when the ranks have gone, also when they were interrupted and could not remove
    it, and again at the end of the process, when threads that were still reading have ended."""
    if setting.cache_folder or set(setting.caches) == {"none"}:
        yield setting
        return
    folder = tempfile.mkdtemp(prefix="voxlane-bench-")
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)
    try:
        yield dataclasses.replace(setting, cache_folder=folder)
    finally:
        remove()


def _in_group(device: Any, setting: LoadingSetting, legs: tuple[Leg, ...]) -> Found | dict[str, Any]:
    """As one rank of the job."""
    if setting.listing_only:
        return loading_ranks.listed(setting, legs[0])
    return loading_ranks.load(setting, legs)
