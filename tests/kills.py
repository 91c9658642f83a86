"""Kills saving processes at random moments and judges from outside what they leave behind.

A saver runs undisturbed once, to learn how long a round of saves takes; after that each one is killed (SIGKILL) at a
moment drawn evenly from such a round. Savers are forked from a process that has torch imported already, and the next
one is made ready while the last is judged.
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
_KEPT = 2
"""Checkpoints left in place after each kill, the newest; the rest is pruned to save space."""
_QUIET_S = 0.3
_READY_S = 60.0
_ROUND_S = 60.0
_STAGED = re.compile(r"#\d+$")
"""How the engine names files in a folder that are not whole yet."""
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


# -- where checkpoints go --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """An empty bucket, and the server's own word on what is in it."""

    uri: str
    config: StoreConfig
    keys: Callable[[], list[str]]
    """All objects, as paths below `uri`."""
    uploads: Callable[[], list[str]]
    """Uploads that were neither completed nor aborted: each a path below `uri`, and its id."""


@contextlib.contextmanager
def open_target(server: str) -> Iterator[Target]:
    """A bucket on a server of its own: seaweedfs, emulator or folder."""
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


# -- savers that die -------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a saver said before it died."""

    name: str = ""
    """Of the checkpoint it was at."""
    step: int = 0
    phase: str = "between saves"
    saved: dict[str, int] = field(default_factory=dict)
    """Step by name, of the saves that came to their end."""
    error: str = ""

    def hear(self, kind: str, value: Any) -> None:
        """Take one message in."""
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
            mine, theirs = _CONTEXT.Pipe()
            work: Any = savers.save_alone
            arguments: tuple[Any, ...] = (theirs, uri, config)
            if num_ranks > 1:
                work = savers.save_together
                arguments += (rank, num_ranks, f"{self._folder.name}/rendezvous")
            process = _CONTEXT.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        self.progress = [Progress() for _ in range(num_ranks)]

    def begin(self, step: int) -> None:
        """Wait until all are ready, then let them save, from this step on."""
        for pipe in self._pipes:
            if not pipe.poll(_READY_S) or pipe.recv() != ("ready", None):
                raise RuntimeError("a saver did not start")
        for pipe in self._pipes:
            pipe.send(step)

    def round_s(self) -> float:
        """Wait for one undisturbed round, one save under a new name and one over `last`; returns how long it took."""
        start = time.monotonic()
        while len(self.progress[0].saved) < 2:
            if not self._pipes[0].poll(_ROUND_S):
                raise RuntimeError("an undisturbed save did not end")
            self.progress[0].hear(*self._pipes[0].recv())
            if self.progress[0].error:
                raise RuntimeError(f"an undisturbed save failed: {self.progress[0].error}")
        return time.monotonic() - start

    def kill(self, victim: int, *, others_s: float) -> list[int]:
        """Kill one; the others have `others_s` seconds to end by themselves. Returns those that did not."""
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
                    progress.hear(*pipe.recv())
            pipe.close()
        self._folder.cleanup()
        return late


# -- judging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """What is in the bucket below a run's folder, told without the code that is being judged."""

    complete: frozenset[str]
    """Names of whole checkpoints."""
    orphans: frozenset[str]
    """Objects that belong to no whole checkpoint, and open uploads."""


def look(target: Target, folder: str, *, quiet_s: float = 0.0) -> Contents:
    """What is there, once nothing has changed for `quiet_s` seconds: requests that were under way at a kill still take
    effect."""
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
    return Contents(frozenset(files | sharded), frozenset((keys - owned) | uploads))


class Judge:
    """Looks at a run's folder after each kill. What is not as it should be is said in words."""

    def __init__(self, target: Target, folder: str, last: str) -> None:
        self._target, self._folder, self._last = target, folder, last
        self._uri = f"{target.uri}/{folder}"
        self._judged: set[str] = set()
        self._last_step = 0
        self.problems: list[str] = []
        self.num_orphans = 0
        self.num_left = 0

    def judge(self, saved: dict[str, int], newest_step: int) -> None:
        """`saved`: the saves that came to their end, by name; `newest_step`: of the save under way at the kill."""
        self.problems = []
        there = look(self._target, self._folder, quiet_s=_QUIET_S)
        listed = self._listed()
        if listed != there.complete:
            self.problems.append(f"listed as complete: {sorted(listed)}; complete are: {sorted(there.complete)}")
        if lost := saved.keys() - there.complete:
            self.problems.append(f"saved, but gone: {sorted(lost)}")
        for name in sorted(there.complete - self._judged):
            self._load(name)
        self._judged = set(there.complete) - {self._last}
        if self._last in there.complete:
            step = self._load(self._last)
            least = max(self._last_step, saved.get(self._last, 0))
            if step is not None and not least <= step <= newest_step:
                self.problems.append(f"{self._last} holds step {step}, not one from {least} to {newest_step}")
            self._last_step = step or least
        elif self._last_step:
            self.problems.append(f"{self._last} is gone")
        self._collect(there, max(saved.values(), default=0))

    def _listed(self) -> set[str]:
        return {entry.name for entry in lifecycle.list_checkpoints(self._uri, self._target.config) if entry.complete}

    def _load(self, name: str) -> int | None:
        try:
            return savers.load_step(self._uri, name, self._target.config)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this kill's verdict
            self.problems.append(f"{name} does not load: {type(error).__name__}: {error}")
            return None

    def _collect(self, there: Contents, saved_step: int) -> None:
        """Let gc remove what is left over; see that it removed that and nothing else, and that latest then loads."""
        latest = self._latest()
        self.num_orphans = self._remove_orphans()
        if self.num_orphans < len(there.orphans):
            self.problems.append(f"gc found {self.num_orphans} orphans, there are {sorted(there.orphans)}")
        after = look(self._target, self._folder)
        if after.orphans - there.orphans:  # a request of the killed process took effect only now
            self.num_orphans += self._remove_orphans()
            after = look(self._target, self._folder, quiet_s=_QUIET_S)
        self.num_left = len(after.orphans)
        if after.orphans:
            self.problems.append(f"left after gc: {sorted(after.orphans)}")
        if after.complete != there.complete:
            self.problems.append(f"gone after gc: {sorted(there.complete - after.complete)}")
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


# -- a campaign ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One kill."""

    mode: str
    kill: int
    moment_s: float
    """After the savers began."""
    phase: str
    """What the killed process was at."""
    name: str
    """The checkpoint it was at."""
    orphans: int
    """Found by gc."""
    left: int
    """Orphans after gc."""
    problems: list[str]
    errors: list[str]
    """Of the ranks that outlived the killed one."""


def run_kills(target: Target, mode: str, num_kills: int, seed: int) -> Iterator[Verdict]:
    """Kill `num_kills` savers, `single` processes or one rank of a `distributed` group, and judge after each."""
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    rng = random.Random(f"{seed} {mode}")
    num_ranks = 1 if mode == "single" else NUM_RANKS
    judge = Judge(target, mode, "last.ckpt" if mode == "single" else "last")

    def fresh() -> Saver:
        return Saver(f"{target.uri}/{mode}", target.config, num_ranks)

    first = fresh()
    first.begin(1)
    round_s = first.round_s()
    first.kill(0, others_s=0)
    step = first.progress[0].step + 1
    saver = fresh()
    for kill in range(num_kills):
        moment_s = rng.uniform(0, 1.1 * round_s)
        victim = rng.randrange(num_ranks)
        # A machine that goes takes all its ranks with it; a process that goes leaves the others to find out.
        others_s = rng.choice([0.0, 2 * savers.GROUP_TIMEOUT_S])
        saver.begin(step)
        time.sleep(moment_s)
        late = saver.kill(victim, others_s=others_s)
        dead, saver = saver, fresh()
        died = dead.progress[victim]
        newest = max([step, *(progress.step for progress in dead.progress)])
        judge.judge({name: s for progress in dead.progress for name, s in progress.saved.items()}, newest)
        problems = list(judge.problems)
        if late and others_s:
            problems.append(f"ranks {late} still waited {others_s:.0f} s after the kill")
        if died.error:
            problems.append(f"the save failed before the kill: {died.error}")
        errors = [progress.error for progress in dead.progress if progress is not died and progress.error]
        yield Verdict(
            mode, kill, round(moment_s, 3), died.phase, died.name, judge.num_orphans, judge.num_left, problems, errors
        )
        _prune(target, mode)
        step = newest + 1
    saver.begin(step)
    saver.kill(0, others_s=0)


def _prune(target: Target, folder: str) -> None:
    """Delete all but the newest checkpoints, what makes each complete first."""
    store = Store(target.uri, target.config)
    keys = [key for key in target.keys() if key.startswith(f"{folder}/step-")]
    names = sorted({key.split("/")[1].removesuffix(".sums") for key in keys})
    for name in names[:-_KEPT]:
        doomed = [key for key in keys if key.split("/")[1].removesuffix(".sums") == name]
        for key in sorted(doomed, key=lambda key: not key.endswith((".metadata", ".ckpt"))):
            store.delete_one(parse(f"{target.uri}/{key}").key)
