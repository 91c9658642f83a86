"""The folder of a training run in a bucket.

RUN/run.json            the command, the config, and the plan, description and cases that the run trains on
RUN/initial.ckpt        the weights that the run starts from, if it has `init_from`
RUN/history.json        one entry per epoch; `cut` is the number of steps of one that max_minutes cut short
RUN/stall.json          how the run's time was spent
RUN/checkpoints/        last.ckpt and best.ckpt
RUN/lease.json          the process that trains the run, while it does (voxlane.store.lease)
RUN/done.json           written once the run has finished and its last checkpoint is published: after how many epochs,
                        and how many steps if max_minutes ended it
RUN/tensorboard/        event files
RUN/evaluation/<name>/  scores, masks and overlays
RUN/report.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import AlreadyExistsError, RunError
from voxlane.store import Store, StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.store.lease import JobStart, Lease
from voxlane.train.config import TrainConfig
from voxlane.train.model_files import MODEL_JSON
from voxlane.volume.description import Description
from voxlane.volume.plan import Plan, Triple
from voxlane.volume.prepared_dataset import as_prefix

VERSION = 1


@dataclass(frozen=True)
class Run:
    """One run. It does no I/O until a method or property needs some."""

    uri: str
    config: StoreConfig | None = field(default=None, compare=False)
    lease: Lease | None = field(default=None, compare=False)
    """The lease without which nothing may be written, of a process that trains the run."""

    @property
    def folder_uri(self) -> str:
        """Normalized URI of the folder, without a trailing slash."""
        return self.store.uri(self.key("")).rstrip("/")

    @cached_property
    def store(self) -> Store:
        """Store of the bucket that holds the run."""
        return Store(self.uri, self.config)

    def key(self, name: str) -> str:
        """Return the key of a file of this run."""
        return as_prefix(uris.parse(self.uri).key) + name

    def file_uri(self, name: str) -> str:
        """Return the URI of a file of this run."""
        return f"{self.folder_uri}/{name}"

    def open_lease(self, token: str | None = None, start: JobStart | None = None) -> Lease:
        """Return the lease on this run, which is not acquired yet. `token`: of the job that this process belongs to."""
        return Lease(self.store, self.key(""), "run", token=token, start=start)

    def check_lease(self) -> None:
        """Raise LeaseError if another process has taken this run over."""
        if self.lease is not None:
            self.lease.check()

    def create(self, facts: dict[str, Any]) -> None:
        """Write run.json. Raises RunError if the run exists, unless it has no results: then it starts again."""
        body = json.dumps({"version": VERSION, **facts}, indent=1).encode()
        try:
            self.store.put(self.key("run.json"), body, if_absent=True)
        except AlreadyExistsError:
            if self.has_results:
                raise self.already_exists_error() from None
            self.store.delete_prefix(self.key("tensorboard/"))
            self.store.delete(self.key("stall.json"))
            self.store.put(self.key("run.json"), body)

    def already_exists_error(self) -> RunError:
        """Return the error for a new run that would overwrite this one."""
        return RunError(
            "a run already exists here", uri=self.folder_uri, fix="Continue it with --resume, or choose another --run"
        )

    def read_facts(self) -> dict[str, Any]:
        """Return the content of run.json."""
        facts = self.read_json("run.json")
        if facts is None:
            raise self._missing_error()
        if not isinstance(facts, dict):
            raise self.damaged_error()
        if facts.get("version") != VERSION:
            raise RunError(
                f"the run was written by another version of voxlane (format {facts.get('version')}; this version "
                f"reads format {VERSION})",
                uri=self.folder_uri,
            )
        return facts

    def _missing_error(self) -> RunError:
        if self.store.exists(self.key(MODEL_JSON)):
            return RunError(
                "this is an exported model, and not a run",
                uri=self.folder_uri,
                fix="Give the run, or segment scans with voxlane predict and score the masks with voxlane score",
            )
        return RunError("no run exists here", uri=self.folder_uri, fix="Train one: voxlane train DATA --run RUN")

    def damaged_error(self) -> RunError:
        """Return the error for a run.json whose content training did not write."""
        return RunError(
            "the file does not have the content that training writes",
            uri=self.file_uri("run.json"),
            fix="Restore it, or train again into another folder",
        )

    @property
    def exists(self) -> bool:
        """Whether run.json exists."""
        return self.store.exists(self.key("run.json"))

    @property
    def has_results(self) -> bool:
        """Whether anything was trained: a run that failed before its first epoch leaves neither of these."""
        has_history = self.store.exists(self.key("history.json"))
        return has_history or any(True for _ in self.store.list_pages(self.key("checkpoints/")))

    @property
    def is_done(self) -> bool:
        """Whether the run finished, after its last epoch, by early_stop or by max_minutes, with its last checkpoint
        published."""
        done = self.read_json("done.json")
        return done is not None and covers_config(done, self.read_facts()["config"])

    def finished_error(self, config: Mapping[str, Any]) -> RunError | None:
        """Return the error for resuming a run that has nothing left to do under `config`, plain values, or None."""
        done = self.read_json("done.json")
        if done is None or not covers_config(done, config):
            return None
        if cut := describe_cut(done):
            fix = "Give a larger limit with max_minutes=N, or max_minutes=null for none"
            return RunError(cut, uri=self.folder_uri, fix=fix)
        if done["epochs"] < config["epochs"]:  # early_stop ended it
            return None
        message = f"the run has finished its {config['epochs']} epochs"
        return RunError(message, uri=self.folder_uri, fix="Give a larger number with epochs=N")

    def mark_done(self, epochs_done: int, epochs_planned: int, **cut: Any) -> None:
        """Record that the run finished and that its checkpoints are published. `cut`: `max_minutes` if that ended the
        run, with the `steps` it trained and those that were `planned_steps`."""
        self.write_json("done.json", {"epochs": epochs_done, "of": epochs_planned, **cut})

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file of this run, or None if the file does not exist."""
        try:
            with ignore_missing_object():
                return json.loads(bytes(self.store.get(self.key(name))))
        except ValueError:
            raise RunError(
                "not JSON: the file is damaged",
                uri=self.file_uri(name),
                fix="Restore it, or train again into another folder",
            ) from None
        return None

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of this run atomically."""
        self.write_bytes(name, json.dumps(value, indent=1).encode())

    def write_bytes(self, name: str, body: bytes) -> None:
        """Write a file of this run atomically."""
        self.check_lease()
        self.store.put(self.key(name), body)

    @property
    def checkpoints_uri(self) -> str:
        """URI of the checkpoint folder; a plain path if it is local, because Lightning mistakes file:// for a name."""
        return f"/{self.key('checkpoints')}" if self.store.scheme == "file" else self.file_uri("checkpoints")


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """The content of run.json as records."""

    config: TrainConfig
    plan: Plan
    """Plan of the dataset when it was prepared. `patch` is the patch size that the run trains with."""
    description: Description
    fold: int | None
    """Index of the held-out fold; None if the run trains on all cases."""
    training_cases: list[str]
    """Names of the cases that the run trains on."""
    held_out_cases: list[str]
    """Names of the cases that the run never trains on."""
    data_uri: str
    """URI of the prepared dataset."""
    data_digest: str
    """Digest of the dataset when the run was created."""
    facts: dict[str, Any]
    """All of run.json."""

    @classmethod
    def load(cls, run: Run) -> TrainedRun:
        """Read and validate run.json."""
        facts = run.read_facts()
        origin = run.file_uri("run.json")
        try:
            trained = cls(
                config=settings.build(TrainConfig, facts["config"], origin=origin),
                plan=settings.build(Plan, facts["plan"], origin=origin),
                description=settings.build(Description, facts["description"], origin=origin),
                fold=facts["fold"],
                training_cases=list(facts["cases"]["train"]),
                held_out_cases=list(facts["cases"]["validation"]),
                data_uri=facts["data"]["uri"],
                data_digest=facts["data"]["fingerprint"],
                facts=facts,
            )
            is_valid = isinstance(trained.data_uri, str) and set(trained.training_cases).isdisjoint(
                trained.held_out_cases
            )
        except (KeyError, TypeError):
            is_valid = False
        if not is_valid:
            raise run.damaged_error()
        return trained

    @property
    def batch(self) -> int:
        """Number of patches per step, over all ranks."""
        return self.config.batch or self.plan.batch

    @property
    def patch(self) -> Triple:
        """Size of a patch in voxels (z, y, x)."""
        return self.config.patch or self.plan.patch


def covers_config(done: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether a run that finished as done.json says has nothing to do under `config`, plain values."""
    limit, new_limit = done.get("max_minutes"), config.get("max_minutes")
    if limit is not None and (new_limit is None or new_limit > limit):
        return False
    return limit is not None or bool(done["of"] >= config["epochs"])


def describe_cut(done: Mapping[str, Any]) -> str:
    """Say how far a run came, given its done.json, if max_minutes ended it; otherwise return an empty text."""
    if done.get("max_minutes") is None:
        return ""
    return (
        f"max_minutes={done['max_minutes']:g} ended the run after {done['steps']:,} of {done['planned_steps']:,} steps"
    )


def find_runs(uri: str, config: StoreConfig | None = None) -> list[Run]:
    """Return the run at `uri`, or all runs one folder below it (`fold_0`, `fold_1`, ...) if `uri` itself is none."""
    run = Run(uri, config)
    if run.exists:
        return [run]
    keys = [key for page in run.store.list_pages(run.key("")) for key in page.column("path").to_pylist()]
    paths = [key.removeprefix(run.key("")).split("/") for key in keys]
    names = {path[0] for path in paths if len(path) == 2 and path[1] == "run.json"}
    if not names:
        raise run._missing_error()
    return [Run(run.file_uri(name), config) for name in sorted(names)]
