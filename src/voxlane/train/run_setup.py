"""Check what a run needs and write run.json, once, before its ranks start."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch

from voxlane import __version__, redaction, settings
from voxlane.dataset.cache import DiskCache
from voxlane.errors import ConfigError, PermissionDeniedError, RunError
from voxlane.model.networks import build as build_network
from voxlane.model.networks import check_patch
from voxlane.store import StoreConfig
from voxlane.store.lease import Lease
from voxlane.train.config import TrainConfig, build_config, merge_values, resolve_batch, resolve_network, split_batch
from voxlane.train.run import Run, TrainedRun
from voxlane.volume.dataset_objects import check_complete
from voxlane.volume.grid import MLPERF_RECIPE
from voxlane.volume.prepared_dataset import Prepared

_CHANGEABLE_ON_RESUME = (
    "epochs",
    "max_minutes",
    "early_stop",
    "devices",
    "device_batch",
    "strategy",
    "accelerator",
    "loader",
    "validation",
    "compile",
    "fused",
    "checkpoint_every_epochs",
)


def prepare_run(
    data: str | Prepared,
    run_uri: str,
    config_values: Mapping[str, Any] | None = None,
    store: StoreConfig | None = None,
    *,
    ranks: int | None = None,
    resume: bool = False,
    command: Sequence[str] = (),
    check_local_devices: bool = False,
    lease: Lease | None = None,
) -> TrainConfig:
    """Check everything that a run on this many ranks needs, and write run.json. One process does it, before the ranks.

    `data`: the prepared dataset or its URI. `ranks`: None means the config's `devices`. `check_local_devices`: the
    ranks will run on this machine, so its devices are checked too. `lease`: acquired before run.json is written; by
    default it is held only meanwhile.
    """
    prepared = data if isinstance(data, Prepared) else Prepared.load(data, store)
    with suppress(PermissionDeniedError):  # credentials may allow reading, and not listing
        check_complete(prepared)
    values = config_values or {}
    run = Run(run_uri, store)
    config = _resume_config(run, prepared, values) if resume else build_config(values)
    if ranks is None:
        ranks = config.devices
    elif values.get("devices", 1) != 1:
        raise ConfigError(f"devices: {config.devices} conflicts with the {ranks} workers", fix="Leave devices out")
    else:
        config = dataclasses.replace(config, devices=1)
    if not resume:
        config = resolve_batch(config, prepared.plan, ranks)
    if config.loader.disk_cache is not None:  # ranks may have another working directory
        absolute = os.path.abspath(os.path.expanduser(config.loader.disk_cache))
        config = dataclasses.replace(config, loader=dataclasses.replace(config.loader, disk_cache=absolute))
    _check(config, prepared, ranks)
    if check_local_devices:
        check_devices(config, config.devices)
    facts = _describe_run(config, prepared, ranks, command)
    with nullcontext() if lease is not None else run.open_lease():
        if lease is not None:
            lease.acquire()
        if resume:
            run.write_json("run.json", {**run.read_facts(), **{k: facts[k] for k in ("config", "environment")}})
        else:
            run.create(facts)
    return config


def check_config(prepared: Prepared, config_values: Mapping[str, Any], ranks: int = 1) -> TrainConfig:
    """Return the config with its batch set. Raises if this many ranks cannot train it on `prepared`; writes nothing."""
    config = resolve_batch(build_config(config_values), prepared.plan, ranks)
    _check(config, prepared, ranks)
    return config


def _resume_config(run: Run, prepared: Prepared, config_values: Mapping[str, Any]) -> TrainConfig:
    trained = TrainedRun.load(run)
    if trained.data_digest != prepared.digest:
        raise RunError(
            f"the run trains on {trained.data_uri}, which is another dataset or has been prepared again since",
            uri=run.folder_uri,
            fix="Give the dataset of the run, or start a new run",
        )
    previous = settings.to_plain(trained.config)
    merged = merge_values(previous, config_values)
    changed = [name for name in merged if merged[name] != previous.get(name) and name not in _CHANGEABLE_ON_RESUME]
    if changed:
        raise ConfigError(
            f"{changed[0]}: cannot change when a run is resumed",
            uri=run.folder_uri,
            fix="Leave it out, or start a new run",
        )
    return settings.build(TrainConfig, merged)


def _check(config: TrainConfig, prepared: Prepared, ranks: int) -> None:
    """Raise for a config that cannot be trained, before anything is written."""
    plan = prepared.plan
    if config.preset == "mlperf" and plan.recipe != MLPERF_RECIPE:
        raise ConfigError(
            f"preset: mlperf needs a dataset prepared with recipe={MLPERF_RECIPE}, this one has recipe={plan.recipe}",
            uri=prepared.uri,
        )
    check_patch(resolve_network(config, plan), config.patch or plan.patch)
    split_batch(config.batch or plan.batch, ranks)
    prepared.split(config.fold)
    if config.loader.disk_cache is not None:
        DiskCache(config.loader.disk_cache, config.loader.disk_cache_bytes).open()
    if config.optimizer.fused and config.optimizer.clip_norm is not None and config.precision == "float16":
        raise ConfigError(
            "optimizer.fused: gradients in float16 are scaled, and a fused step cannot clip them",
            fix="Leave it out, or use optimizer.clip_norm=null or precision=bfloat16",
        )
    if config.fold is None and config.early_stop is not None:
        raise ConfigError("early_stop: without a held-out fold there is no Dice to stop by", fix="Give a fold")


def check_devices(config: TrainConfig, devices: int) -> None:
    """Raise if this machine does not have the devices that the config needs."""
    if config.accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError("accelerator: torch finds no GPU on this machine", fix="Leave it out to train on the CPU")
    if not uses_gpu(config) and config.precision not in ("auto", "float32"):
        raise ConfigError(
            f"precision: {config.precision} needs a GPU; torch's 3D convolutions in it crash on some CPUs",
            fix="Leave it out",
        )
    if not uses_gpu(config) and config.optimizer.capturable:
        raise ConfigError("optimizer.capturable: only GPUs support it", fix="Leave it out")
    gpus = torch.cuda.device_count()
    if uses_gpu(config) and devices > gpus:
        raise ConfigError(f"devices: {devices} requested, but this machine has {gpus} GPU{'s' * (gpus != 1)}")


def uses_gpu(config: TrainConfig) -> bool:
    """Return whether the run trains on GPUs on this machine."""
    return config.accelerator == "gpu" or (config.accelerator == "auto" and torch.cuda.is_available())


def _describe_run(config: TrainConfig, prepared: Prepared, ranks: int, command: Sequence[str]) -> dict[str, Any]:
    """Return the content of run.json."""
    train_rows, held_out_rows = prepared.split(config.fold)
    ids = prepared.ids
    description, plan = prepared.description, prepared.plan
    network_config = resolve_network(config, plan)
    with torch.device("meta"):
        network = build_network(network_config, len(description.channels), description.outputs)
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": redaction.redact_words(command),
        "config": settings.to_plain(config),
        "plan": settings.to_plain(plan),
        "network": settings.to_plain(network_config),
        "description": settings.to_plain(description),
        "data": {"uri": prepared.uri, "name": description.name, "fingerprint": prepared.digest},
        "cases": {"train": [ids[i] for i in train_rows], "validation": [ids[i] for i in held_out_rows]},
        "fold": config.fold,
        "ranks": ranks,
        "parameters": sum(p.numel() for p in network.parameters()),
        "environment": {
            "voxlane": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "cpu_count": os.cpu_count(),
        },
    }
