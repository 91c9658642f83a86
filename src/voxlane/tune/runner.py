"""`tune`: run a search from its start, or from the point where it was killed, to its best config.

OUT/tune.json       every trial: values, curve, state, times
OUT/space.json      the space and settings, which --resume must repeat
OUT/trials/ID/      the run of each trial, or fold_0, fold_1, ... below it
OUT/best.yaml       the best trial's complete config, for voxlane train --config
OUT/best.json       its run, checkpoints and values
OUT/report.html, OUT/tensorboard/
"""

from __future__ import annotations

import datetime
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from voxlane import redaction, settings
from voxlane.cluster.ray.cluster import list_nodes, open_cluster
from voxlane.errors import AlreadyExistsError, ConfigError, MissingExtraError, TuneError
from voxlane.store import StoreConfig
from voxlane.store.lease import Lease
from voxlane.train.config import TrainConfig
from voxlane.train.ranks import read_job_start
from voxlane.train.run import Run
from voxlane.train.run_setup import check_config
from voxlane.tune.capacity import plan_capacity
from voxlane.tune.ledger import SearchLedger
from voxlane.tune.progress import SearchProgress
from voxlane.tune.report import publish, write_page
from voxlane.tune.space import Space, parse_space, rungs
from voxlane.tune.task import Report, TrialTask
from voxlane.tune.trials import Search
from voxlane.volume.prepared_dataset import Prepared
from voxlane.volume.split_files import choose_split

VERSION = 1
_CHANGEABLE_ON_RESUME = ("trials", "max_concurrent", "cpus_per_trial", "gpus_per_trial", "workers_per_trial", "cache")


def tune(
    values: Mapping[str, Any],
    data: str,
    out: str,
    store: StoreConfig | None = None,
    *,
    resume: bool = False,
    address: str | None = None,
    command: Sequence[str] = (),
    progress: bool | None = None,
    origin: str = "",
    work: Callable[[TrialTask, Report], None] | None = None,
) -> Search:
    """Search the space of `values` on the prepared dataset `data`, write into the folder `out`, and return the record.

    `values`: content of a space file, which `origin` names. `resume`: continue a search; trials that ended are not
    repeated, and those that were running continue from their checkpoints. `address`: a Ray cluster; None starts one on
    this machine. `progress`: a bar (True) or nothing (False); by default a bar on a terminal, and otherwise a line per
    trial. `work`: what a trial does instead of training; every machine must be able to import it.
    """
    if importlib.util.find_spec("optuna") is None:
        raise MissingExtraError.of("ray", "searching")
    space = parse_space(settings.make_paths_absolute(TrainConfig, values), origin=origin)  # trials run in other folders
    prepared = Prepared.load(data, store)
    _check_trainable(space, prepared)
    run = Run(out, store)
    lease = Lease(run.store, run.key(""), "search", start=read_job_start())
    searched = {"fields": space.plain(), "fixed": space.fixed, "tune": settings.to_plain(space.tune)}
    values = json.loads(json.dumps(searched, default=str))  # as a resumed search reads them
    request = {"version": VERSION, "data": prepared.uri, "fingerprint": prepared.digest, "values": values}
    if resume:
        search = _load_resumed(run, request, space, command)
    elif search_exists(out, store):
        raise _already_exists(run)
    else:
        search = _new_search(run, space, prepared.uri, command)
    display = SearchProgress(space, search, progress)

    def write_ledger(search: Search) -> None:
        lease.check()
        run.write_bytes("tune.json", search.to_json().encode())

    ledger = SearchLedger(
        search,
        space,
        run.folder_uri,
        write=write_ledger,
        on_end=display.add_ended,
    )
    if not ledger.finished:
        try:
            with open_cluster(address) as head_address, ExitStack() as cleanup:
                from voxlane.tune import ray_tune

                capacity = plan_capacity(list_nodes(), space.tune, space.example_config.accelerator)
                cleanup.enter_context(lease)
                if not resume:
                    try:  # only once it is certain that the search can run
                        run.store.put(run.key("space.json"), json.dumps(request, indent=1).encode(), if_absent=True)
                    except AlreadyExistsError:
                        raise _already_exists(run) from None
                ledger.set_devices(capacity.trials)
                training = ray_tune.Training(
                    prepared.uri, run.config, capacity, space.tune.cache, tuple(command), lease_token=lease.token
                )
                with display.show(capacity):
                    ray_tune.run_search(
                        ledger, work or training, space, capacity, head_address, on_wait=display.show_waiting
                    )
        except KeyboardInterrupt:
            write_page(ledger.search, run)
            raise

    publish(ledger.search, run, prepared, space)
    return ledger.search


def search_exists(out: str, store: StoreConfig | None = None) -> bool:
    """Return whether there is a search at `out`."""
    run = Run(out, store)
    return run.store.exists(run.key("space.json"))


def load_search(out: str, store: StoreConfig | None = None) -> Search:
    """Return the record of the search at `out`."""
    run = Run(out, store)
    if (record := run.read_json("tune.json")) is None:
        raise TuneError("no search found", uri=run.folder_uri, fix="Start one: voxlane tune SPACE DATA --run OUT")
    return Search.from_json(json.dumps(record), origin=run.file_uri("tune.json"))


def _check_trainable(space: Space, prepared: Prepared) -> None:
    """Raise if no trial, or a trial with one of the listed values or range ends, could be trained on the dataset."""
    rungs(space.tune, space.max_epochs)
    split = choose_split(prepared, space.example_config.split, prepared.config)
    for fold in space.folds:
        split.select(fold, prepared.uri)
    for name, params in space.probes():
        try:
            values = {**space.config_values(params), "fold": space.folds[0]}
            check_config(prepared, values, space.tune.workers_per_trial)
        except ConfigError as error:
            raise ConfigError(f"{name}={params[name]}: {error}", uri=space.origin) from None


def _already_exists(run: Run) -> TuneError:
    return TuneError(
        "a search already exists", uri=run.folder_uri, fix="Continue it with --resume, or choose another --run"
    )


def _new_search(run: Run, space: Space, data: str, command: Sequence[str]) -> Search:
    return Search(
        name=run.folder_uri.rsplit("/", 1)[-1],
        data=data,
        space=space.plain(),
        config=settings.to_plain(space.tune),
        command=redaction.redact_words(command),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        devices=1.0,
    )


def _load_resumed(run: Run, request: Mapping[str, Any], space: Space, command: Sequence[str]) -> Search:
    before = run.read_json("space.json")
    if before is None:
        raise TuneError("no search found", uri=run.folder_uri, fix="Remove --resume to start one")
    try:
        if before["fingerprint"] != request["fingerprint"]:
            raise TuneError(
                f"the search ran on {before['data']}, which is another dataset or was prepared again since",
                uri=run.folder_uri,
                fix="Use the dataset of the search, or start a new search",
            )
        changed = _find_changed_field(before["values"], request["values"])
    except (KeyError, TypeError, AttributeError):
        raise TuneError("not the space of a search", uri=run.file_uri("space.json")) from None
    if changed:
        raise ConfigError(
            f"{changed} cannot change when a search is resumed",
            uri=run.folder_uri,
            fix="Restore it, or start a new search",
        )
    if run.read_json("tune.json") is None:  # the search was killed between its first two files
        return _new_search(run, space, request["data"], command)
    return replace(load_search(run.folder_uri, run.config), config=settings.to_plain(space.tune))


def _find_changed_field(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first field that differs and may not change; an empty string if there is none."""
    for name, value in now["tune"].items():
        if name not in _CHANGEABLE_ON_RESUME and value != before["tune"].get(name):
            return f"tune.{name}"
    for part in ("fields", "fixed"):
        for name in sorted({*before[part], *now[part]}):
            if before[part].get(name) != now[part].get(name):
                return str(name)
    return ""
