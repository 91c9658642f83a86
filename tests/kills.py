"""Kills saving processes at random moments and checks from outside what they leave behind.

One saver runs undisturbed to measure how long a round of saves takes. After that each one is killed (SIGKILL) at a
moment drawn uniformly from such a round. Savers are forked from a process that has imported torch, and the next one
starts while the last one is checked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

from tests import savers
from tests.servers import seaweedfs
from voxlane import RetryConfig, Store, StoreConfig
from voxlane.checkpoint import distributed_metadata, lifecycle
from voxlane.errors import IncompleteError
from voxlane.testing import Emulator
from voxlane.uri import parse

NUM_RANKS = 4
_MAX_CHECKPOINTS = 2
"""Number of newest checkpoints that remain after each kill; the rest is pruned to save space."""
_QUIET_S = 0.3
_READY_S = 300.0
_ROUND_S = 300.0
_STAGED = re.compile(r"#\d+$")
"""Suffix that the engine gives to incomplete files in a folder."""
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "__main__",
    "torch._dynamo",  # DTensor imports it at its first use
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "voxlane.checkpoint.distributed_reader",
    "voxlane.checkpoint.distributed_writer",
    "tests.savers",
]


# -- targets of checkpoints ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """An empty bucket, and functions that list its contents by the server's own means."""

    uri: str
    config: StoreConfig
    keys: Callable[[], list[str]]
    """Function that returns all objects as paths below `uri`."""
    uploads: Callable[[], list[str]]
    """Function that returns the path below `uri` and the id of each open upload."""


@contextlib.contextmanager
def open_target(server: str) -> Iterator[Target]:
    """Yield a bucket on its own server: seaweedfs, emulator or folder."""
    opened = {"seaweedfs": _on_seaweedfs, "emulator": _on_emulator, "folder": _on_folder}[server]
    with tempfile.TemporaryDirectory(prefix="voxlane-kills-") as folder, opened(Path(folder)) as target:
        yield target


def _config(**options: Any) -> StoreConfig:
    return StoreConfig(
        retry=RetryConfig(deadline_s=20.0, initial_delay_s=0.01, max_delay_s=0.2), part_bytes=5 << 20, **options
    )


@contextlib.contextmanager
def _on_seaweedfs(folder: Path) -> Iterator[Target]:
    with seaweedfs(folder, "test", "testtest") as url:
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "testtest"}
        with contextlib.closing(boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)) as client:
            client.create_bucket(Bucket="bkt")

            def listed(method: str, entries: str) -> list[dict[str, Any]]:
                pages = client.get_paginator(method).paginate(Bucket="bkt")
                return [entry for page in pages for entry in page.get(entries, [])]

            yield Target(
                "s3://bkt",
                _config(endpoint=url, access_key_id="test", secret_access_key="testtest"),
                lambda: [entry["Key"] for entry in listed("list_objects_v2", "Contents")],
                lambda: [f"{u['Key']} {u['UploadId']}" for u in listed("list_multipart_uploads", "Uploads")],
            )


@contextlib.contextmanager
def _on_emulator(folder: Path) -> Iterator[Target]:
    with Emulator() as emulator:
        emulator.create_bucket("bkt")
        yield Target(
            "gs://bkt",
            _config(endpoint=emulator.url),
            lambda: emulator.keys("bkt"),
            lambda: [f"{upload.key} {upload.upload_id}" for upload in emulator.uploads("bkt")],
        )


@contextlib.contextmanager
def _on_folder(folder: Path) -> Iterator[Target]:
    def files(*, staged: bool) -> list[str]:
        paths = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        return [path for path in paths if bool(_STAGED.search(path)) == staged]

    yield Target(f"file://{folder}", _config(), lambda: files(staged=False), lambda: files(staged=True))


# -- killed savers ---------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a saver reported before it was killed."""

    name: str = ""
    """Name of the checkpoint that it was saving."""
    step: int = 0
    phase: str = "between saves"
    saved: dict[str, int] = field(default_factory=dict)
    """Step of each finished save by name."""
    error: str = ""

    def update(self, kind: str, value: Any) -> None:
        """Process one message."""
        if kind == "saving":
            self.name, self.step = value
            self.phase = "serialising"
        elif kind == "phase":
            self.phase = value
        elif kind == "saved":
            name, step = value
            self.saved[name] = step
            self.phase = "between saves"
        elif kind == "error":
            self.error = value


class Saver:
    """A process that saves, or four ranks that save together, and the pipes to them."""

    def __init__(self, uri: str, config: StoreConfig, num_ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="voxlane-ranks-")
        self._processes, self._pipes = [], []
        for rank in range(num_ranks):
            parent_end, child_end = _CONTEXT.Pipe()
            work: Any = savers.save_alone
            arguments: tuple[Any, ...] = (child_end, uri, config)
            if num_ranks > 1:
                work = savers.save_together
                arguments += (rank, num_ranks, f"{self._folder.name}/rendezvous")
            process = _CONTEXT.Process(target=work, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self._processes.append(process)
            self._pipes.append(parent_end)
        self.progress = [Progress() for _ in range(num_ranks)]

    def begin(self, step: int) -> None:
        """Wait until all are ready, then let them save from this step on."""
        for pipe in self._pipes:
            if not pipe.poll(_READY_S) or pipe.recv() != ("ready", None):
                raise RuntimeError("a saver did not start")
        for pipe in self._pipes:
            pipe.send(step)

    def round_s(self) -> float:
        """Wait for one undisturbed round, a save under a new name and one over `last`, and return its duration."""
        start = time.monotonic()
        while len(self.progress[0].saved) < 2:
            if not self._pipes[0].poll(_ROUND_S):
                raise RuntimeError("an undisturbed save did not end")
            self.progress[0].update(*self._pipes[0].recv())
            if self.progress[0].error:
                raise RuntimeError(f"an undisturbed save failed: {self.progress[0].error}")
        return time.monotonic() - start

    def kill(self, victim: int, *, others_s: float) -> list[int]:
        """Kill one process; the others have `others_s` seconds to end by themselves. Return those that did not."""
        self._processes[victim].kill()
        deadline = time.monotonic() + others_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self._processes) if rank != victim and process.is_alive()]
        for process in self._processes:
            process.kill()
            process.join()
        for pipe, progress in zip(self._pipes, self.progress, strict=True):
            with contextlib.suppress(EOFError, OSError):  # the pipe ends where its writer died
                while pipe.poll(0):
                    progress.update(*pipe.recv())
            pipe.close()
        self._folder.cleanup()
        return late


# -- checking --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketContents:
    """What is in the bucket below a run's folder, determined without the code under test."""

    complete: frozenset[str]
    """Names of complete checkpoints."""
    orphans: frozenset[str]
    """Objects that belong to no complete checkpoint, and open uploads."""


def list_contents(target: Target, folder: str, *, quiet_s: float = 0.0) -> BucketContents:
    """Return the contents once nothing has changed for `quiet_s` seconds: requests that were in flight at a kill may
    still take effect."""
    before: Any = None
    while (now := (sorted(target.keys()), sorted(target.uploads()))) != before:
        before = now
        time.sleep(quiet_s)
    keys = {key.removeprefix(f"{folder}/") for key in now[0] if key.startswith(f"{folder}/")}
    uploads = {f"upload of {key.removeprefix(f'{folder}/')}" for key in now[1] if key.startswith(f"{folder}/")}
    files = {key for key in keys if key.endswith(".ckpt")}
    owned = files | {f"{key}.sums" for key in files}
    sharded = {key.removesuffix("/.metadata") for key in keys if key.endswith("/.metadata")}
    store = Store(target.uri, target.config)
    for name in sharded:
        metadata = distributed_metadata.read(store, parse(f"{target.uri}/{folder}/{name}/").key)
        owned |= {f"{name}/{path}" for path in [".metadata", *distributed_metadata.file_sizes(*metadata)]}
    return BucketContents(frozenset(files | sharded), frozenset((keys - owned) | uploads))


class KillChecker:
    """Checks a run's folder after each kill and describes problems."""

    def __init__(self, target: Target, folder: str, last: str) -> None:
        self._target, self._folder, self._last = target, folder, last
        self._uri = f"{target.uri}/{folder}"
        self._checked: set[str] = set()
        self._last_step = 0
        self.problems: list[str] = []
        self.num_orphans = 0
        self.num_left = 0

    def check(self, saved: dict[str, int], newest_step: int) -> None:
        """Check the folder. `saved`: step of each finished save by name; `newest_step`: step of the killed save."""
        self.problems = []
        contents = list_contents(self._target, self._folder, quiet_s=_QUIET_S)
        listed = self._list_complete()
        if listed != contents.complete:
            self.problems.append(f"listed as complete: {sorted(listed)}; complete are: {sorted(contents.complete)}")
        if lost := saved.keys() - contents.complete:
            self.problems.append(f"saved, but gone: {sorted(lost)}")
        for name in sorted(contents.complete - self._checked):
            self._load(name)
        self._checked = set(contents.complete) - {self._last}
        if self._last in contents.complete:
            step = self._load(self._last)
            least = max(self._last_step, saved.get(self._last, 0))
            if step is not None and not least <= step <= newest_step:
                self.problems.append(f"{self._last} holds step {step}, not one from {least} to {newest_step}")
            self._last_step = step or least
        elif self._last_step:
            self.problems.append(f"{self._last} is gone")
        self._collect(contents, max(saved.values(), default=0))

    def _list_complete(self) -> set[str]:
        return {entry.name for entry in lifecycle.list_checkpoints(self._uri, self._target.config) if entry.complete}

    def _load(self, name: str) -> int | None:
        try:
            return savers.load_step(self._uri, name, self._target.config)
        except Exception as error:  # noqa: BLE001 - any error is a problem to report
            self.problems.append(f"{name} does not load: {type(error).__name__}: {error}")
            return None

    def _collect(self, before: BucketContents, saved_step: int) -> None:
        """Run gc; check that it removed the orphans and nothing else, and that the latest checkpoint then loads."""
        latest = self._latest()
        self.num_orphans = self._remove_orphans()
        if self.num_orphans < len(before.orphans):
            self.problems.append(f"gc found {self.num_orphans} orphans, there are {sorted(before.orphans)}")
        after = list_contents(self._target, self._folder)
        if after.orphans - before.orphans:  # a request of the killed process took effect only now
            self.num_orphans += self._remove_orphans()
            after = list_contents(self._target, self._folder, quiet_s=_QUIET_S)
        self.num_left = len(after.orphans)
        if after.orphans:
            self.problems.append(f"left after gc: {sorted(after.orphans)}")
        if after.complete != before.complete:
            self.problems.append(f"gone after gc: {sorted(before.complete - after.complete)}")
        if latest not in after.complete or self._latest() != latest:
            self.problems.append(f"latest named {latest}, after gc {self._latest()}")
        elif (step := self._load(latest)) is not None and step < saved_step:
            self.problems.append(f"latest is step {step}, but step {saved_step} was saved")

    def _remove_orphans(self) -> int:
        orphans = lifecycle.find_orphans(self._uri, self._target.config, older_than_s=0)
        orphans.remove()
        return len(orphans)

    def _latest(self) -> str:
        try:
            return lifecycle.latest(self._uri, self._target.config).name
        except IncompleteError:
            return "nothing"


# -- a series of kills -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KillResult:
    """The result of one kill."""

    mode: str
    kill: int
    moment_s: float
    """Seconds from the start of the savers to the kill."""
    phase: str
    """Phase in which the process was killed."""
    name: str
    """Name of the checkpoint that it was saving."""
    orphans: int
    """Number of orphans that gc found."""
    left: int
    """Number of orphans after gc."""
    problems: list[str]
    errors: list[str]
    """Errors of the ranks that survived the killed one."""


def run_kills(target: Target, mode: str, num_kills: int, seed: int) -> Iterator[KillResult]:
    """Kill `num_kills` savers, `single` processes or one rank of a `distributed` group, and check after each."""
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    rng = random.Random(f"{seed} {mode}")
    num_ranks = 1 if mode == "single" else NUM_RANKS
    checker = KillChecker(target, mode, "last.ckpt" if mode == "single" else "last")

    def start_saver() -> Saver:
        return Saver(f"{target.uri}/{mode}", target.config, num_ranks)

    first = start_saver()
    first.begin(1)
    round_s = first.round_s()
    first.kill(0, others_s=0)
    step = first.progress[0].step + 1
    saver = start_saver()
    for kill in range(num_kills):
        moment_s = rng.uniform(0, 1.1 * round_s)
        victim = rng.randrange(num_ranks)
        # A machine that fails takes all its ranks with it; after the failure of a process the others must notice.
        others_s = rng.choice([0.0, 2 * savers.GROUP_TIMEOUT_S])
        saver.begin(step)
        time.sleep(moment_s)
        late = saver.kill(victim, others_s=others_s)
        killed, saver = saver, start_saver()
        victim_progress = killed.progress[victim]
        newest = max([step, *(progress.step for progress in killed.progress)])
        checker.check({name: s for progress in killed.progress for name, s in progress.saved.items()}, newest)
        problems = list(checker.problems)
        if late and others_s:
            problems.append(f"ranks {late} still waited {others_s:.0f} s after the kill")
        if victim_progress.error:
            problems.append(f"the save failed before the kill: {victim_progress.error}")
        errors = [progress.error for progress in killed.progress if progress is not victim_progress and progress.error]
        yield KillResult(
            mode,
            kill,
            round(moment_s, 3),
            victim_progress.phase,
            victim_progress.name,
            checker.num_orphans,
            checker.num_left,
            problems,
            errors,
        )
        _prune(target, mode)
        step = newest + 1
    saver.begin(step)
    saver.kill(0, others_s=0)


def _prune(target: Target, folder: str) -> None:
    """Delete all but the newest checkpoints, each beginning with the object that publishes it."""
    store = Store(target.uri, target.config)
    keys = [key for key in target.keys() if key.startswith(f"{folder}/step-")]
    names = sorted({key.split("/")[1].removesuffix(".sums") for key in keys})
    for name in names[:-_MAX_CHECKPOINTS]:
        doomed = [key for key in keys if key.split("/")[1].removesuffix(".sums") == name]
        for key in sorted(doomed, key=lambda key: not key.endswith((".metadata", ".ckpt"))):
            store.delete_one(parse(f"{target.uri}/{key}").key)
