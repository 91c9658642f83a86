"""`tune`: a search from its start, or from where it was killed, to its best config.

OUT/tune.json       every trial: values, curve, state, times
OUT/space.json      what was asked for, so that --resume asks for the same
OUT/trials/ID/      the run of each trial, or fold_0, fold_1, ... below it
OUT/best.yaml       the best trial's whole config, for voxlane train --config
OUT/best.json       its run, checkpoints and values
OUT/report.html, OUT/tensorboard/
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from voxlane import settings
from voxlane.errors import AlreadyExistsError, ConfigError, MissingExtraError, TuneError
from voxlane.launch.cluster import cluster
from voxlane.store import StoreConfig
from voxlane.train import config as configs
from voxlane.train import fit
from voxlane.train.run import Run
from voxlane.tune import outcome
from voxlane.tune import space as spaces
from voxlane.tune.config import rungs
from voxlane.tune.ledger import Ledger
from voxlane.tune.progress import Progress
from voxlane.tune.room import Room, room
from voxlane.tune.space import Space
from voxlane.tune.trial import Report, Task
from voxlane.tune.trials import Search, Trial
from voxlane.volume.prepared import Prepared

VERSION = 1
_FREE_ON_RESUME = ("trials", "max_concurrent", "cpus_per_trial", "gpus_per_trial", "workers_per_trial", "cache")


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
    work: Callable[[Task, Report], None] | None = None,
) -> Search:
    """Search the space of `values` on the prepared dataset `data` into the folder `out`; returns all that was tried.

    `values`: as in a space file, which `origin` names. With `resume` a search goes on: trials that had ended are not
    repeated, those that were running go on from their checkpoints. `address`: of a Ray cluster; None: one of our own.
    `progress`: a bar (True) or nothing (False); by default a bar on a terminal, and otherwise a line a trial. `work`:
    what a trial does in place of training; importable on every machine.
    """
    _need_optuna()
    space = spaces.parse(values, origin=origin)
    prepared = Prepared.load(data, store)
    folds = _folds(space)
    _check(space, prepared, folds)
    place = Run(out, store)
    asked = {"version": VERSION, "data": prepared.uri, "fingerprint": prepared.digest, "values": _plain(space)}
    if resume:
        search = _resumed(place, asked, space, command)
    elif begun(out, store):
        raise _here_already(place)
    else:
        search = _empty(place, space, prepared.uri, command)
    told = Progress(space, search, progress)
    ledger = Ledger(search, space, place.where, lambda now: _write(place, now), told.ended)
    if not ledger.finished:
        try:
            _run(ledger, space, prepared, folds, place, address, command, work, told, None if resume else asked)
        except KeyboardInterrupt:
            outcome.so_far(ledger.search, place)
            raise

    def config_of(trial: Trial) -> configs.TrainConfig:
        return fit.checked(prepared, space.said(trial.params), space.tune.workers_per_trial)

    return outcome.publish(ledger.search, place, config_of, folds)


def _run(
    ledger: Ledger,
    space: Space,
    prepared: Prepared,
    folds: tuple[int, ...],
    place: Run,
    address: str | None,
    command: Sequence[str],
    work: Callable[[Task, Report], None] | None,
    told: Progress,
    asked: Mapping[str, Any] | None,
) -> None:
    """`asked`: what is kept of a search that is new, once it is known that it can run."""
    with cluster(address) as found:
        from voxlane.tune import on_ray

        given = room(found.nodes(), space.tune, spaces.config_of(space).accelerator)
        if asked is not None:
            _create(place, asked)
        ledger.on(given.trials)
        epochs = space.max_epochs
        training = on_ray.Training(prepared.uri, place.config, given, space.tune.cache, tuple(command))
        with told.shown(given):
            on_ray.run(
                ledger,
                lambda trial: task(trial, space, folds, given),
                work or training,
                space.tune,
                epochs,
                given,
                found,
                model_based=space.search == "optuna",
            )


def task(trial: Trial, space: Space, folds: tuple[int, ...], given: Room) -> Task:
    """What is sent to where `trial` runs."""
    said = space.said(trial.params)
    if not given.gpus:
        said["accelerator"] = "cpu"
    epochs = configs.build(said).epochs
    steps = [rung for rung in rungs(space.tune, space.max_epochs) if rung < epochs]
    return Task(trial.number, trial.run, said, folds, (*steps, epochs), trial.epochs)


def _folds(space: Space) -> tuple[int, ...]:
    if space.tune.folds is not None:
        return space.tune.folds
    fold = spaces.config_of(space).fold
    assert fold is not None  # the space was checked
    return (fold,)


def _check(space: Space, prepared: Prepared, folds: tuple[int, ...]) -> None:
    """Raise for what no trial, or a trial with one of the values named, could be trained with."""
    rungs(space.tune, space.max_epochs)
    for fold in folds:
        prepared.split(fold)
    for name, params in space.probes():
        try:
            fit.checked(prepared, {**space.said(params), "fold": folds[0]}, space.tune.workers_per_trial)
        except ConfigError as error:
            raise ConfigError(f"{name}={params[name]}: {error}", uri=space.origin) from None


def _plain(space: Space) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(
        json.dumps({"fields": space.plain(), "fixed": space.fixed, "tune": settings.plain(space.tune)}, default=str)
    )
    return values


def _need_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise MissingExtraError.of("ray", "searching") from None


def _create(place: Run, asked: Mapping[str, Any]) -> None:
    try:
        place.store.put(place.key("space.json"), json.dumps(asked, indent=1).encode(), if_absent=True)
    except AlreadyExistsError:
        raise _here_already(place) from None


def _here_already(place: Run) -> TuneError:
    return TuneError(
        "a search is here already", uri=place.where, fix="Go on with it (--resume), or choose another --run"
    )


def _empty(place: Run, space: Space, data: str, command: Sequence[str]) -> Search:
    return Search(
        name=place.where.rsplit("/", 1)[-1],
        data=data,
        space=space.plain(),
        config=settings.plain(space.tune),
        command=list(command),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        devices=1.0,
    )


def begun(out: str, store: StoreConfig | None = None) -> bool:
    """Whether a search is at `out`."""
    place = Run(out, store)
    return place.store.exists(place.key("space.json"))


def load(out: str, store: StoreConfig | None = None) -> Search:
    """The search at `out`."""
    place = Run(out, store)
    found = place.read_json("tune.json")
    if found is None:
        raise TuneError("no search is here", uri=place.where, fix="Begin one: voxlane tune SPACE DATA --run OUT")
    return Search.from_json(json.dumps(found), origin=place.file_uri("tune.json"))


def _resumed(place: Run, asked: Mapping[str, Any], space: Space, command: Sequence[str]) -> Search:
    before = place.read_json("space.json")
    if before is None:
        raise TuneError("no search is here", uri=place.where, fix="Leave --resume out to begin one")
    try:
        if before["fingerprint"] != asked["fingerprint"]:
            raise TuneError(
                f"it searched on {before['data']}, which was not this dataset or has been prepared anew since",
                uri=place.where,
                fix="Give the dataset of the search, or begin a new one",
            )
        changed = _changed(before["values"], asked["values"])
    except (KeyError, TypeError, AttributeError):
        raise TuneError("it does not hold what a search writes", uri=place.file_uri("space.json")) from None
    if changed:
        raise ConfigError(
            f"{changed}: a search that is resumed keeps it", uri=place.where, fix="Leave it as it was, or begin anew"
        )
    kept = place.read_json("tune.json")  # None: killed between its two first files
    if kept is None:
        return _empty(place, space, asked["data"], command)
    search = Search.from_json(json.dumps(kept), origin=place.file_uri("tune.json"))
    return replace(search, config=settings.plain(space.tune))


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first field that is another than before and may not be; empty: none."""
    was = {name: value for name, value in before["tune"].items() if name not in _FREE_ON_RESUME}
    is_now = {name: value for name, value in now["tune"].items() if name not in _FREE_ON_RESUME}
    for name in is_now:
        if is_now[name] != was.get(name):
            return f"tune.{name}"
    for part in ("fields", "fixed"):
        for name in sorted({*before[part], *now[part]}):
            if before[part].get(name) != now[part].get(name):
                return str(name)
    return ""


def _write(place: Run, search: Search) -> None:
    place.write("tune.json", search.to_json().encode())
