"""Check what a run needs and write run.json, once, before its ranks start."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch

from voxlane import __version__, redaction, settings
from voxlane.dataset.cache import DiskCache
from voxlane.errors import ConfigError, PermissionDeniedError
from voxlane.model.networks import build as build_network
from voxlane.model.networks import check_patch
from voxlane.store import StoreConfig
from voxlane.store.lease import Lease
from voxlane.train.config import TrainConfig, build_config, merge_values, resolve_batch, resolve_network, split_batch
from voxlane.train.dataset_location import check_dataset, describe_location
from voxlane.train.initial_weights import InitialWeights, plan_start
from voxlane.train.run import Run, TrainedRun, covers_config
from voxlane.train.weight_transfer import format_transfer
from voxlane.volume.dataset_objects import check_complete
from voxlane.volume.grid import MLPERF_RECIPE
from voxlane.volume.prepared_dataset import Prepared
from voxlane.volume.split_files import choose_split
from voxlane.volume.splits import Split

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
    print_line: Callable[[str], None] | None = None,
) -> TrainConfig:
    """Check everything that a run on this many ranks needs, and write run.json. One process does it, before the ranks.

    `data`: the prepared dataset or its URI. `ranks`: None means the config's `devices`. `check_local_devices`: the
    ranks will run on this machine, so its devices are checked too. `lease`: acquired before run.json is written; by
    default it is held only meanwhile. `print_line`: receives the lines about the weights that the run starts from.
    """
    prepared = data if isinstance(data, Prepared) else Prepared.load(data, store)
    with suppress(PermissionDeniedError):  # credentials may allow reading, and not listing
        check_complete(prepared)
    values = settings.make_paths_absolute(TrainConfig, config_values or {})
    run = Run(run_uri, store)
    config = _resume_config(run, prepared, values) if resume else build_config(values)
    if ranks is None:
        ranks = config.devices
    elif values.get("devices", 1) != 1:
        raise ConfigError(f"devices: {config.devices} conflicts with the {ranks} workers", fix="Leave devices out")
    else:
        config = dataclasses.replace(config, devices=1)
    start = None
    if not resume:
        config = resolve_batch(config, prepared.plan, ranks)
        config, start = plan_start(config, values, prepared, store)
    if config.loader.disk_cache is not None:  # ranks may have another working directory
        absolute = os.path.abspath(os.path.expanduser(config.loader.disk_cache))
        config = dataclasses.replace(config, loader=dataclasses.replace(config.loader, disk_cache=absolute))
    _check(config, prepared, ranks)
    split = None if resume else choose_split(prepared, config.split, store)
    if check_local_devices:
        check_devices(config, config.devices)
    facts = _describe_run(config, prepared, ranks, command)
    weights = None if start is None else start.load()
    facts["data"] |= describe_location(run, prepared.uri)
    if split is not None:  # a resumed run keeps its own
        facts |= _describe_split(config, split, prepared.uri)
    with nullcontext() if lease is not None else run.open_lease():
        if lease is not None:
            lease.acquire()
        if resume:
            if error := run.finished_error(facts["config"]):
                raise error
            run.write_json("run.json", _describe_resume(run.read_facts(), facts))
        else:
            _create_run(run, facts, weights)
    if weights is not None and print_line is not None:
        for line in format_transfer(weights.facts):
            print_line(line)
    return config


def _create_run(run: Run, facts: dict[str, Any], weights: InitialWeights | None) -> None:
    """Write run.json, and before it the weights that the run starts from."""
    if weights is not None:
        if run.exists and run.has_results:
            raise run.already_exists_error()
        weights.save(run)
        facts = {**facts, "init": weights.facts}
    run.create(facts)


def check_config(prepared: Prepared, config_values: Mapping[str, Any], ranks: int = 1) -> TrainConfig:
    """Return the config with its batch set. Raises if this many ranks cannot train it on `prepared`; writes nothing."""
    values = settings.make_paths_absolute(TrainConfig, config_values)
    config = resolve_batch(build_config(values), prepared.plan, ranks)
    _check(plan_start(config, values, prepared, prepared.config)[0], prepared, ranks)
    choose_split(prepared, config.split, prepared.config).select(config.fold, prepared.uri)
    return config


def is_done(run: Run, config_values: Mapping[str, Any]) -> bool:
    """Return whether a run has nothing left to do, also with these changes to its config."""
    done = run.read_json("done.json")
    if done is None:
        return False
    config = settings.build(TrainConfig, merge_values(run.read_facts()["config"], config_values))
    return covers_config(done, settings.to_plain(config))


def _describe_resume(stored: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of run.json after a resume: `stored` before it, with what `facts` of the new start change.

    `command` becomes the command that would train the run as it is now, from its start. `resumes` holds the commands
    that were really given.
    """
    before = settings.to_plain(settings.build(TrainConfig, stored["config"]))  # with fields that are new since
    changes = find_changes(before, facts["config"])
    resume = {name: facts[name] for name in ("created", "command")}
    return {
        **stored,
        **{name: facts[name] for name in ("config", "environment", "data")},
        "command": change_command(stored.get("command") or [], changes, stored["data"]["uri"], facts["data"]["uri"]),
        "resumes": [*(stored.get("resumes") or []), resume],
    }


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values that differ, by dotted name."""
    changes: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            changes |= find_changes(old, value, f"{prefix}{name}.")
        elif value != old:
            changes[prefix + name] = value
    return changes


def change_command(command: Sequence[str], changes: Mapping[str, Any], data: str, new_data: str) -> list[str]:
    """Return a command with the fields of `changes` as overrides, and with the dataset's new place."""
    if not command:
        return []
    words = [word for word in command if word.partition("=")[0] not in changes]
    if data != new_data:
        words = replace_data(words, data, new_data)
    return [*words, *(f"{name}={settings.format_value(value)}" for name, value in changes.items())]


def replace_data(command: Sequence[str], data: str, new_data: str) -> list[str]:
    """Return a command with the word that names the dataset at `data`, perhaps as a relative path, replaced."""
    words = list(command)
    for index in range(2, len(words)):  # after voxlane train
        if words[index - 1] != "--run" and f"/{data}".endswith(f"/{words[index].removeprefix('./').strip('/')}"):
            words[index] = new_data
            break
    return words


def _resume_config(run: Run, prepared: Prepared, config_values: Mapping[str, Any]) -> TrainConfig:
    trained = TrainedRun.load(run)
    check_dataset(run, trained, prepared)
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


def _describe_split(config: TrainConfig, split: Split, data_uri: str) -> dict[str, Any]:
    """Return the cases of the run and where its split comes from, for run.json."""
    cases = split.select(config.fold, data_uri)
    return {
        "cases": {"train": list(cases.train), "validation": list(cases.held_out)},
        "fold": config.fold,
        "split": {"method": split.method, "source": split.source, "folds": len(split.folds)},
    }


def _describe_run(config: TrainConfig, prepared: Prepared, ranks: int, command: Sequence[str]) -> dict[str, Any]:
    """Return the content of run.json."""
    description, plan = prepared.description, prepared.plan
    network_config = resolve_network(config, plan)
    with torch.device("meta"):
        network = build_network(network_config, len(description.channels), description.outputs)
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": redaction.redact_words(command),
        "config": {
            **settings.to_plain(config),
            "init_from": config.init_from and redaction.redact_urls(config.init_from),
        },
        "plan": settings.to_plain(plan),
        "network": settings.to_plain(network_config),
        "description": settings.to_plain(description),
        "data": {"uri": prepared.uri, "name": description.name, "fingerprint": prepared.digest},
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
