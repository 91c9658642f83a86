"""A training run's folder in a bucket.

RUN/run.json            the command, the config, the plan and description it was trained by, its cases
RUN/history.json        one entry an epoch
RUN/stall.json          where the time went
RUN/checkpoints/        last.ckpt and best.ckpt
RUN/done.json           written when the run has ended by itself and its last checkpoint is there
RUN/tensorboard/        event files
RUN/evaluation/<name>/  scores, masks and overlays
RUN/report.html
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import AlreadyExistsError, NotFoundError, RunError
from voxlane.store import Store, StoreConfig
from voxlane.train.config import TrainConfig
from voxlane.volume.description import Description
from voxlane.volume.plan import Plan, Triple
from voxlane.volume.prepared import folder

VERSION = 1


@dataclass(frozen=True)
class Run:
    """One run. Cheap: it reads and writes when asked."""

    uri: str
    config: StoreConfig | None = field(default=None, compare=False)

    @property
    def where(self) -> str:
        """The folder's URI, without a slash at the end."""
        return self.store.uri(self._prefix).rstrip("/")

    @property
    def store(self) -> Store:
        """The bucket."""
        return Store(self.uri, self.config)

    @property
    def _prefix(self) -> str:
        return folder(uris.parse(self.uri).key)

    def key(self, name: str) -> str:
        """The key of a file of this run."""
        return self._prefix + name

    def file_uri(self, name: str) -> str:
        """The URI of a file of this run."""
        return f"{self.where}/{name}"

    def create(self, facts: dict[str, Any]) -> None:
        """Write run.json, unless the run exists."""
        body = json.dumps({"version": VERSION, **facts}, indent=1).encode()
        try:
            self.store.put(self.key("run.json"), body, if_absent=True)
        except AlreadyExistsError:
            raise self.here_already() from None

    def here_already(self) -> RunError:
        """What to raise where a run would be written over."""
        return RunError(
            "a run is here already", uri=self.where, fix="Go on with it (--resume), or choose another --run"
        )

    def update(self, facts: dict[str, Any]) -> None:
        """Write run.json anew."""
        self.write_json("run.json", {"version": VERSION, **facts})

    def facts(self) -> dict[str, Any]:
        """What run.json says."""
        found = self.read_json("run.json")
        if found is None:
            raise RunError("no run is here", uri=self.where, fix="Train one: voxlane train DATA --run RUN")
        if not isinstance(found, dict):
            raise self.damaged()
        if found.get("version") != VERSION:
            raise RunError(
                f"a run of another voxlane (format {found.get('version')}, this one reads {VERSION})", uri=self.where
            )
        facts: dict[str, Any] = found
        return facts

    def damaged(self) -> RunError:
        """What to raise for a run.json that does not hold what training writes."""
        return RunError(
            "it does not hold what training writes",
            uri=self.file_uri("run.json"),
            fix="Restore it, or train again into another folder",
        )

    @property
    def begun(self) -> bool:
        """Whether the run is there."""
        return self.store.exists(self.key("run.json"))

    @property
    def done(self) -> bool:
        """Whether it came to its end, after its last epoch or by early_stop, and was saved there."""
        ended = self.read_json("done.json")
        return ended is not None and bool(ended["of"] >= self.facts()["config"]["epochs"])

    def end(self, epochs: int, of: int) -> None:
        """Note that the run ended after so many of its epochs, its checkpoints published."""
        self.write_json("done.json", {"epochs": epochs, "of": of})

    def read_json(self, name: str) -> Any:
        """A JSON file of this run, or None."""
        try:
            return json.loads(bytes(self.store.get(self.key(name))))
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise
            return None
        except ValueError:
            raise RunError(
                "not JSON: the file is damaged",
                uri=self.file_uri(name),
                fix="Restore it, or train again into another folder",
            ) from None

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of this run, whole or not at all."""
        self.store.put(self.key(name), json.dumps(value, indent=1).encode())

    def write(self, name: str, body: bytes) -> None:
        """Write a file of this run."""
        self.store.put(self.key(name), body)

    @property
    def checkpoints(self) -> str:
        """The folder of checkpoints: a URI, or a path where it is local, because Lightning takes file:// for a name."""
        return f"/{self.key('checkpoints')}" if self.store.scheme == "file" else self.file_uri("checkpoints")


@dataclass(frozen=True)
class Trained:
    """What run.json says, as records."""

    config: TrainConfig
    plan: Plan
    """As it was prepared; the patch is the one that was trained with."""
    description: Description
    facts: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> Trained:
        """Read a run's records."""
        facts = run.facts()
        where = run.file_uri("run.json")
        try:
            made = cls(
                settings.build(TrainConfig, facts["config"], origin=where),
                settings.build(Plan, facts["plan"], origin=where),
                settings.build(Description, facts["description"], origin=where),
                facts,
            )
            whole = isinstance(made.data_uri, str) and not set(made.trained_on) & set(made.held_out)
            _ = made.digest, made.fold
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise run.damaged()
        return made

    @property
    def patch(self) -> Triple:
        """Voxels of a window (z, y, x)."""
        return self.config.patch or self.plan.patch

    @property
    def fold(self) -> int | None:
        """The fold that was held out; None: it was trained on all cases."""
        fold: int | None = self.facts["fold"]
        return fold

    @property
    def trained_on(self) -> list[str]:
        """Its training cases."""
        return list(self.facts["cases"]["train"])

    @property
    def held_out(self) -> list[str]:
        """The cases it never saw."""
        return list(self.facts["cases"]["validation"])

    @property
    def data_uri(self) -> str:
        """The prepared dataset."""
        uri: str = self.facts["data"]["uri"]
        return uri

    @property
    def digest(self) -> str:
        """The dataset's content when the run was begun."""
        digest: str = self.facts["data"]["fingerprint"]
        return digest


def runs_at(uri: str, config: StoreConfig | None = None) -> list[Run]:
    """The run at `uri`, or, where it holds one run a fold (`fold_0`, `fold_1`, ...), all of those."""
    run = Run(uri, config)
    if run.begun:
        return [run]
    names = set()
    for page in run.store.list_pages(run.key("")):
        for key in page.column("path").to_pylist():
            parts = key[len(run.key("")) :].split("/")
            if len(parts) == 2 and parts[1] == "run.json":
                names.add(parts[0])
    if not names:
        raise RunError("no run is here", uri=run.where, fix="Train one: voxlane train DATA --run RUN")
    return [Run(run.file_uri(name), config) for name in sorted(names)]
