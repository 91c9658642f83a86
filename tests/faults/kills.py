"""Kills real commands at random moments, and finds what they leave behind: processes, temporary files, broken targets.

Every process of a command carries a mark in its environment, by which it is found wherever it went. Temporary files go
to a folder of the harness's own. After each kill no marked process may live longer than `ORPHAN_S`; the next start of
any command must remove all temporary files; and after a few kills in a row the command must run to its end.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.train.tiny_runs import CONFIG, PLAN, case_ids, prepare_balls, write_cases
from voxlane.train.fit import train

ORPHAN_S = 5.0
_END_S = 120.0
"""Seconds in which a command must end after SIGTERM or SIGINT, on a busy machine."""
_MARK = "VOXLANE_KILL_HARNESS"
_SHARED_MEMORY = Path("/dev/shm")
_FOLDER = re.compile(r"(voxlane-\d+|torchinductor_\w+)")
"""Caches that commands share and keep on purpose."""
_PENDING_FILE = re.compile(r"#\d+$")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STOPPED = {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: 130}


@dataclass(frozen=True)
class Scenario:
    """A command to kill. `words(target)` returns its arguments; what it writes lies below the folder `target`."""

    name: str
    words: Callable[[Path], list[str]]
    written: Callable[[Path], bool]
    """Function that returns whether a complete run left what it should below `target`."""


@dataclass
class KillCounts:
    """What a series of kills left."""

    kills: Counter[str] = field(default_factory=Counter)
    """Kills by command and signal."""
    after_end: int = 0
    """Commands that ended before the signal was sent, which are no kills."""
    orphans: list[str] = field(default_factory=list)
    """Processes that lived too long, and temporary files, bad statuses and failed reruns, each as a line."""
    litter: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    failed_reruns: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Return all lines."""
        return self.orphans + self.litter + self.tracebacks + self.statuses + self.failed_reruns

    def format(self) -> str:
        """Return the counts as lines."""
        rows = [f"{name}: {count}" for name, count in sorted(self.kills.items())]
        rows.append(f"kills {sum(self.kills.values())}; commands that ended before their kill {self.after_end}")
        for name in ("orphans", "litter", "tracebacks", "statuses", "failed_reruns"):
            lines = getattr(self, name)
            rows += [f"{name} {len(lines)}", *(f"  {line}" for line in lines)]
        return "\n".join(rows)


class KillHarness:
    """Tiny data below `folder`, and the commands that run on it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._mark = uuid.uuid4().hex
        self.counts = KillCounts()
        self.scans = write_cases(folder / "scans", case_ids(12))
        self.data = prepare_balls(folder / "small")
        self.config = folder / "config.json"
        self.config.write_text(json.dumps({**CONFIG, "fold": 0, "epochs": 3, "steps_per_epoch": 8}))
        plan = {"plan": PLAN, "folds": 2, "workers": 2}
        self.plan = folder / "plan.json"
        self.plan.write_text(json.dumps(plan))
        self.space = folder / "space.json"
        tuned = {"trials": 2, "max_concurrent": 1, "cpus_per_trial": 1}
        space = {**CONFIG, "optimizer": {"lr": {"loguniform": [0.001, 0.1]}}, "tune": tuned}
        self.space.write_text(json.dumps(space))
        self.run = folder / "trained"
        train(self.data, str(self.run), {**CONFIG, "fold": 0}, progress=False)

    def scenarios(self) -> dict[str, Scenario]:
        """Return the commands, by name."""
        scan = str(next(self._folder.glob("scans/case_*[0-9].nii.gz")))

        def train_words(target: Path, *more: str) -> list[str]:
            config = ["--config", str(self.config), "--auto-resume"]
            return ["train", self.data, "--run", str(target), *config, *more]

        listed = [
            Scenario(
                "prepare",
                lambda target: ["prepare", str(self.scans), str(target), "--config", str(self.plan)],
                lambda target: (target / "prepared.json").exists(),
            ),
            Scenario("train", lambda target: train_words(target, "loader.workers=2"), _is_trained),
            Scenario("train devices=2", lambda target: train_words(target, "devices=2"), _is_trained),
            Scenario(
                "evaluate",
                lambda target: ["evaluate", str(self.run), "-o", str(target)],
                lambda target: any(target.rglob("summary.json")),
            ),
            Scenario(
                "predict",
                lambda target: ["predict", str(self.run), scan, "-o", str(target)],
                lambda target: any(target.glob("*.nii.gz")),
            ),
            Scenario(
                "stage",
                lambda target: ["stage", self.data, str(target)],
                lambda target: any(target.rglob("staged.json")),
            ),
            Scenario(
                "bench loading",
                lambda target: [
                    *("bench", "loading", self.data, "--ranks", "2", "--workers", "1", "--steps", "4"),
                    *("--step-time", "0.2", "--cache", "warm", "--out", f"{target}.json"),
                ],
                lambda target: target.with_suffix(".json").exists(),
            ),
            Scenario(
                "bench checkpoint",
                lambda target: [
                    *("bench", "checkpoint", "--dir", str(target), "--ranks", "2", "--layers", "2", "--saves", "3"),
                    *("--loads", "1", "--accelerator", "cpu", "--out", f"{target}.json"),
                ],
                lambda target: True,
            ),
            Scenario(
                "tune",
                lambda target: ["tune", str(self.space), self.data, "--run", str(target), "--auto-resume"],
                lambda target: (target / "best.json").exists(),
            ),
        ]
        return {scenario.name: scenario for scenario in listed}

    def run_series(self, scenario: Scenario, kills: int, duration_s: float | None = None) -> float:
        """Run a command undisturbed unless it is known how long it takes, kill it `kills` times on a new target, and
        let it end. Return how long it takes."""
        if duration_s is None:
            started_s = time.monotonic()
            self._complete(scenario, self._new_target())
            duration_s = time.monotonic() - started_s
        target = self._new_target()
        for _ in range(kills):
            while not self._kill(scenario, target, duration_s):
                duration_s *= 0.8  # the machine was busier when it was measured, or the target is nearly complete
                self._remove(target)
                target = self._new_target()
        self._complete(scenario, target)
        return duration_s

    def _new_target(self) -> Path:
        return self._folder / f"target{next(self._numbers)}"

    def _start(self, words: list[str]) -> subprocess.Popen[str]:
        environment = {**os.environ, _MARK: self._mark, "TMPDIR": str(self._temporary), "OMP_WAIT_POLICY": "PASSIVE"}
        return subprocess.Popen(
            [sys.executable, "-m", "voxlane", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def _kill(self, scenario: Scenario, target: Path, duration_s: float) -> bool:
        """Start a command and kill it; return False if it ended before."""
        process = self._start(scenario.words(target))
        moment_s = self._random.uniform(0.1, duration_s)
        number = self._random.choice(SIGNALS)
        to_group = self._random.random() < 0.25
        kill = f"{scenario.name}, {number.name} {'to the group ' if to_group else ''}after {moment_s:.1f} s"
        has_ended, started = True, set()
        try:
            process.wait(moment_s)
        except subprocess.TimeoutExpired:
            has_ended = False
            started = set(self._list_marked())
            if to_group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        # Everything that the command started must end with it: also what holds its stderr.
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.counts.statuses.append(f"{kill}: did not end within {_END_S:.0f} s")
            process.kill()
        deadline = time.monotonic() + ORPHAN_S
        # A process that is ending has lost its environment, and still counts as running for its successors.
        while (orphans := self._list_marked()) or any(map(_is_running, started)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.counts.orphans += [f"{kill}: {line}" for line in orphans.values()]
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate()
        self.counts.kills[f"{scenario.name} {number.name}"] += not has_ended
        self.counts.after_end += has_ended
        status = process.returncode
        if status not in (0, -number, STOPPED.get(number)):
            self.counts.statuses.append(f"{kill}: status {status}: {errors[-500:]}")
        if "Traceback" in errors:
            self.counts.tracebacks.append(f"{kill}: {errors[-1500:]}")
        self._check_litter(kill)
        return not has_ended

    def _check_litter(self, kill: str) -> None:
        """Start another command, and list the temporary files that remain."""
        self._start(["ls", str(self._folder / "scans")]).communicate()
        remaining = [path.name for path in self._temporary.iterdir() if not _FOLDER.fullmatch(path.name)]
        remaining += [path.name for path in _SHARED_MEMORY.glob("sem.voxlane-*") if _is_ended(path.name)]
        self.counts.litter += [f"{kill}: {name}" for name in remaining]
        for name in remaining:
            shutil.rmtree(self._temporary / name, ignore_errors=True)

    def _complete(self, scenario: Scenario, target: Path) -> None:
        process = self._start(scenario.words(target))
        try:
            _, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.kill()
            errors = "did not end within 600 s"
        if process.returncode != 0 or not scenario.written(target):
            self.counts.failed_reruns.append(f"{scenario.name}: status {process.returncode}: {errors[-1500:]}")
        pending = [path for path in target.rglob("*") if _PENDING_FILE.search(path.name)]
        if scenario.name.startswith(("prepare", "train")):
            self.counts.litter += [f"{scenario.name}: {path}" for path in pending]
        self._check_litter(f"{scenario.name}, complete")
        self._remove(target)

    def _remove(self, target: Path) -> None:
        if target.is_dir():
            shutil.rmtree(target)

    def _list_marked(self) -> dict[int, str]:
        """Return the command lines of the harness's processes that run, by pid."""
        mark = f"{_MARK}={self._mark}".encode()
        marked = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark in environment.split(b"\0") and state not in "ZX":
                marked[pid] = words[:300]
        return marked


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _is_ended(name: str) -> bool:
    return not Path(f"/proc/{name.split('-')[1]}").exists()


def _is_trained(target: Path) -> bool:
    return (target / "done.json").exists()


def plan_series(total: int, names: list[str], length: int, seed: int) -> Iterator[tuple[str, int]]:
    """Yield commands and numbers of kills in a row, `total` in all, evenly over the commands; of `tune`, which starts a
    Ray cluster, a quarter as many."""
    weights = {name: 0.25 if name == "tune" else 1.0 for name in names}
    shares = {name: max(1, round(total * weight / sum(weights.values()))) for name, weight in weights.items()}
    shares[names[0]] += total - sum(shares.values())
    series = [(name, min(length, share - start)) for name, share in shares.items() for start in range(0, share, length)]
    yield from sorted(series, key=lambda entry: names.index(entry[0]))


def run_kills(folder: Path, total: int, seed: int, names: list[str] | None = None, length: int = 4) -> KillCounts:
    """Kill commands `total` times; return the counts."""
    harness = KillHarness(folder, seed)
    scenarios: dict[str, Any] = harness.scenarios()
    durations: dict[str, float] = {}
    for name, kills in plan_series(total, names or list(scenarios), length, seed):
        durations[name] = harness.run_series(scenarios[name], kills, durations.get(name))
        print(f"{name}: {kills} kills, problems so far {len(harness.counts.problems())}", flush=True)
    return harness.counts
