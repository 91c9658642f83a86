"""Kills workers, nodes and the driver of runs on a Ray cluster, in turn, at random moments, and judges the runs.

`python benchmarks/kill_training.py [--kills 20] [--seed 0]`, some ten minutes on two cores. The cluster has three
nodes; the run is `voxlane train --workers 2 --address ...`, started again with --auto-resume when its driver is killed.
A kill is survived when the run went on from no earlier than the last checkpoint there was. The run is judged at its end
against one of as many local processes without a pause: every epoch once, every patch once and in its step, the same
weights, to the bit where the number of workers never changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tests.volume import made

from measure import RESULTS, facts, save
from voxlane.launch.cluster import set_defaults
from voxlane.train.fit import train
from voxlane.volume.prepared import Prepared

VICTIMS = ("worker", "node", "driver")
KILLS_A_RUN = 5
STEPS, EPOCHS, BATCH = 40, 12, 4
WORKERS = 2
_NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
_LIMIT_S = 900.0
_TOLERANCE = 1e-3
"""Of weights where an epoch ran on another number of workers: sums are then rounded in another order."""


@dataclass
class Kill:
    """One kill and what came of it."""

    run: int
    victim: str
    moment: str
    epochs_saved: int
    """Epochs in the last checkpoint when it fell."""
    epochs_next: int | None = None
    """Epochs in the history when it next grew; fewer than `epochs_saved` + 1 would be a loss."""
    recovered_s: float | None = None
    """From the kill to the next epoch's end."""
    problems: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """One run at its end."""

    run: int
    kills: int
    attempts: int
    drivers: int
    workers: list[int]
    """Of every epoch."""
    weights_differ_by: float
    problems: list[str]


def main() -> None:
    """Run the campaign, print the verdict, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="how many, of all victims together")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same moments and victims")
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_training.json", help="result file")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    began = time.monotonic()
    kills: list[Kill] = []
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="voxlane-kills-") as folder:
        root = Path(folder)
        data, said = _prepare(root)
        train(data, str(root / "straight"), {**said, "devices": WORKERS}, progress=False)
        with _cluster() as cluster:
            while len(kills) < arguments.kills:
                number = len(verdicts)
                share = min(KILLS_A_RUN, arguments.kills - len(kills))
                campaign = _Campaign(root / f"run{number}", data, said, cluster, draw, number)
                victims = [VICTIMS[(len(kills) + n) % len(VICTIMS)] for n in range(share)]
                kills += campaign.kill(victims)
                verdicts.append(campaign.judge(root / "straight", len(victims)))
                print(f"run {number}: {verdicts[-1]}", flush=True)
    line = summary(kills, verdicts)
    print(line, flush=True)
    document = {
        **facts(["torch", "ray", "lightning"]),
        "seed": arguments.seed,
        "took_s": round(time.monotonic() - began, 1),
        "summary": line,
        "config": {"epochs": EPOCHS, "steps_per_epoch": STEPS, "batch": BATCH, "workers": WORKERS, "nodes": 3},
        "kills": [asdict(kill) for kill in kills],
        "runs": [asdict(verdict) for verdict in verdicts],
    }
    save(arguments.out, document)
    if any(found.problems for found in (*kills, *verdicts)):
        sys.exit(1)


def summary(kills: list[Kill], verdicts: list[Verdict]) -> str:
    """The result in one line."""
    by_victim = Counter(kill.victim for kill in kills)
    well = sum(not verdict.problems for verdict in verdicts)
    times = sorted(kill.recovered_s for kill in kills if kill.recovered_s is not None)
    middle = f"{times[len(times) // 2]:.0f} s to the next epoch's end (median)" if times else "none recovered"
    return (
        f"kills: {len(kills)} ({', '.join(f'{name} {count}' for name, count in by_victim.items())}), "
        f"survived: {sum(not kill.problems for kill in kills)}; runs: {len(verdicts)}, complete and equal to the run "
        f"without a pause: {well}; {middle}; weights differ by at most "
        f"{max((verdict.weights_differ_by for verdict in verdicts), default=0.0):.1e}"
    )


def _prepare(root: Path) -> tuple[str, dict[str, Any]]:
    made.prepared(made.save(root / "scans", made.kits()), str(root / "data"))
    fold = int(Prepared.load(str(root / "data")).table.column("fold")[0].as_py())
    network = {"features": [4, 8], "strides": [[1, 1, 1], [2, 2, 2]], "kernels": [[3, 3, 3], [3, 3, 3]]}
    return str(root / "data"), {
        "fold": fold,
        "epochs": EPOCHS,
        "steps_per_epoch": STEPS,
        "batch": BATCH,
        "network": network,
        "validation": {"every_epochs": 4, "images": 0},
        "optimizer": {"name": "sgd", "lr": 0.001},
    }


class _cluster:  # noqa: N801 - used as a function
    """Three nodes: a head that trains nothing, so that it is no victim, and two of one CPU, replaced when killed."""

    def __enter__(self) -> Any:
        set_defaults()
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={**_NODE, "num_cpus": 0, "include_dashboard": False}
        )
        for _ in range(WORKERS):
            self._cluster.add_node(**_NODE)
        return self._cluster

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()


class _Campaign:
    """One run, and its kills."""

    def __init__(
        self, run: Path, data: str, said: dict[str, Any], cluster: Any, draw: random.Random, number: int
    ) -> None:
        self._run = run
        self._cluster = cluster
        self._draw = draw
        self._number = number
        fields = [f"{name}={json.dumps(value)}" for name, value in said.items()]
        self._command = [sys.executable, "-m", "voxlane.cli.main", "train", data, "--run", str(run), *fields]
        self._command += ["--workers", str(WORKERS), "--address", cluster.address, "--auto-resume", "--no-progress"]
        self._drivers = 0
        self._driver = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._drivers += 1
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, victims: list[str]) -> list[Kill]:
        """Kill each, one after another has been survived, and see the run to its end."""
        return [self._kill(victim) for victim in victims]

    def _kill(self, victim: str) -> Kill:
        """A quarter of the moments lie while ranks start, the others anywhere in an epoch."""
        starting = self._draw.random() < 0.25 and victim != "worker"
        moment, wait_s = ("starting", 6 * self._draw.random()) if starting else ("training", self._draw.random())
        known = len(self._attempts())
        if starting:
            if known:  # a rank's death is what makes new ones start
                self._kill_worker()
            self._until(lambda: len(self._attempts()) > known)
            time.sleep(wait_s)
        else:
            seen = len(self._history())
            self._until(lambda: len(self._history()) > seen)
            time.sleep(self._epoch_s() * wait_s)
        getattr(self, f"_kill_{victim}")()
        fell = time.monotonic()
        kill = Kill(self._number, victim, moment, self._saved())
        before = self._stamp()
        try:
            self._until(lambda: self._stamp() != before or self._done())
        except TimeoutError as error:
            kill.problems.append(str(error))
            return kill
        kill.recovered_s = round(time.monotonic() - fell, 1)
        kill.epochs_next = len(self._history())
        if kill.epochs_next < min(EPOCHS, kill.epochs_saved + 1):
            kill.problems.append(f"went on from before epoch {kill.epochs_saved}")
        print(f"run {self._number}: {kill}", flush=True)
        return kill

    def _kill_worker(self) -> None:
        ranks = self._attempts()[-1]["ranks"]
        if ranks:
            _signal(self._draw.choice(ranks)["pid"])

    def _kill_node(self) -> None:
        self._cluster.remove_node(self._draw.choice(sorted(self._cluster.worker_nodes, key=str)), allow_graceful=False)
        self._cluster.add_node(**_NODE)

    def _kill_driver(self) -> None:
        self._driver.kill()
        self._driver.wait()
        self._driver = self._start()

    def judge(self, straight: Path, num_kills: int) -> Verdict:
        """Wait for the end and compare with the run without a pause."""
        problems = []
        try:
            self._until(lambda: self._driver.poll() == 0)
        except TimeoutError as error:
            problems.append(str(error))
            self._driver.kill()
        ours, theirs = self._history(), _read(straight / "history.json")
        problems += [
            f"{name} differs from the run without a pause"
            for name in ("epoch", "step", "patches", "order")
            if [entry[name] for entry in ours] != [entry[name] for entry in theirs]
        ]
        differ = _differ(self._run, straight)
        ranks = [entry["ranks"] for entry in ours]
        if not differ <= (0.0 if set(ranks) == {WORKERS} else _TOLERANCE):
            problems.append(f"weights differ by {differ:.1e}")
        return Verdict(self._number, num_kills, len(self._attempts()), self._drivers, ranks, differ, problems)

    def _until(self, what: Any) -> Any:
        """Wait until `what` is true; a driver that gave up is started again, as a scheduler would."""
        end = time.monotonic() + _LIMIT_S
        while time.monotonic() < end:
            if found := what():
                return found
            if self._driver.poll() not in (None, 0):
                self._driver = self._start()
            time.sleep(0.05)
        raise TimeoutError(f"nothing happened for {_LIMIT_S:.0f} s")

    def _attempts(self) -> list[dict[str, Any]]:
        return _read(self._run / "workers.json")

    def _history(self) -> list[dict[str, Any]]:
        return _read(self._run / "history.json")

    def _stamp(self) -> float:
        try:
            return (self._run / "history.json").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _done(self) -> bool:
        return len(self._history()) == EPOCHS

    def _epoch_s(self) -> float:
        ends = [0.0, *(entry["seconds"] for entry in self._history())]
        return max(0.1, ends[-1] - ends[-2]) if len(ends) > 1 else 0.5

    def _saved(self) -> int:
        try:
            found = torch.load(self._run / "checkpoints" / "last.ckpt", weights_only=True)
        except FileNotFoundError:
            return 0
        return int(found["global_step"]) // STEPS


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    return found


def _differ(ours: Path, theirs: Path) -> float:
    """The largest difference of any weight."""
    a, b = (torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for run in (ours, theirs))
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself just now


if __name__ == "__main__":
    main()
