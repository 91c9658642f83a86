"""Kill workers, nodes and the driver of runs on a Ray cluster at random moments, and check the runs.

`python benchmarks/kill_training.py [--kills 20] [--seed 0]` takes about ten minutes on two cores. The cluster has three
nodes. The run is `voxlane train --workers 2 --address ...`, restarted with --auto-resume after its driver is killed.
A kill is survived if the run continues from the last checkpoint or later. At its end the run is compared with an
uninterrupted run on as many local processes: every epoch once, every patch once and in its step, and the same weights,
bit for bit if the number of workers never changed.
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
from tests.volume import sample_data

from isolated_runs import RESULTS, facts, save
from voxlane.cluster.ray.cluster import set_defaults
from voxlane.train.fit import train
from voxlane.volume.prepared_dataset import Prepared

VICTIMS = ("worker", "node", "driver")
KILLS_A_RUN = 5
STEPS, EPOCHS, BATCH = 40, 12, 4
WORKERS = 2
_NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
_LIMIT_S = 900.0
_TOLERANCE = 1e-3
"""Tolerance of weights if an epoch ran on another number of workers, which changes the order of rounding."""


@dataclass
class Kill:
    """A kill and its outcome."""

    run: int
    victim: str
    moment: str
    epochs_saved: int
    """Epochs in the last checkpoint at the time of the kill."""
    epochs_next: int | None = None
    """Epochs in the history when it next grew; fewer than `epochs_saved` + 1 means that work was lost."""
    recovered_s: float | None = None
    """Seconds from the kill to the end of the next epoch."""
    problems: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """The result of a run at its end."""

    run: int
    kills: int
    attempts: int
    drivers: int
    workers: list[int]
    """Number of workers in every epoch."""
    weights_differ_by: float
    problems: list[str]


def main() -> None:
    """Run all kills, print the summary and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="number of kills of all victims together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and victims")
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_training.json", help="result file")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    began = time.monotonic()
    kills: list[Kill] = []
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="voxlane-kills-") as folder:
        root = Path(folder)
        data, config_values = _prepare(root)
        train(data, str(root / "straight"), {**config_values, "devices": WORKERS}, progress=False)
        with _cluster() as cluster:
            while len(kills) < arguments.kills:
                number = len(verdicts)
                share = min(KILLS_A_RUN, arguments.kills - len(kills))
                campaign = _Campaign(root / f"run{number}", data, config_values, cluster, draw, number)
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
    if any(checked.problems for checked in (*kills, *verdicts)):
        sys.exit(1)


def summary(kills: list[Kill], verdicts: list[Verdict]) -> str:
    """Return the result in one line."""
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
    sample_data.prepare_dataset(sample_data.write_folder(root / "scans", sample_data.make_kits19()), str(root / "data"))
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
    """A cluster of a head that does not train and is never killed, and two nodes of one CPU, replaced when killed."""

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
    """A run and its kills."""

    def __init__(
        self, run: Path, data: str, config_values: dict[str, Any], cluster: Any, draw: random.Random, number: int
    ) -> None:
        self._run = run
        self._cluster = cluster
        self._draw = draw
        self._number = number
        fields = [f"{name}={json.dumps(value)}" for name, value in config_values.items()]
        self._command = [sys.executable, "-m", "voxlane.cli.main", "train", data, "--run", str(run), *fields]
        self._command += ["--workers", str(WORKERS), "--address", cluster.address, "--auto-resume", "--no-progress"]
        self._drivers = 0
        self._driver = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._drivers += 1
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, victims: list[str]) -> list[Kill]:
        """Kill each victim after the previous kill has been survived."""
        return [self._kill(victim) for victim in victims]

    def _kill(self, victim: str) -> Kill:
        """Kill while ranks start in a quarter of the cases, otherwise at any moment of an epoch."""
        starting = self._draw.random() < 0.25 and victim != "worker"
        moment, wait_s = ("starting", 6 * self._draw.random()) if starting else ("training", self._draw.random())
        num_attempts = len(self._attempts())
        if starting:
            if num_attempts:  # the death of a rank starts new ranks
                self._kill_worker()
            self._until(lambda: len(self._attempts()) > num_attempts)
            time.sleep(wait_s)
        else:
            num_epochs = len(self._history())
            self._until(lambda: len(self._history()) > num_epochs)
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
            kill.problems.append(f"continued from before epoch {kill.epochs_saved}")
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
        """Wait for the end and compare with the uninterrupted run."""
        problems = []
        try:
            self._until(lambda: self._driver.poll() == 0)
        except TimeoutError as error:
            problems.append(str(error))
            self._driver.kill()
        history, expected = self._history(), _read(straight / "history.json")
        problems += [
            f"{name} differs from the uninterrupted run"
            for name in ("epoch", "step", "patches", "order")
            if [entry[name] for entry in history] != [entry[name] for entry in expected]
        ]
        differ = _differ(self._run, straight)
        ranks = [entry["ranks"] for entry in history]
        if not differ <= (0.0 if set(ranks) == {WORKERS} else _TOLERANCE):
            problems.append(f"weights differ by {differ:.1e}")
        return Verdict(self._number, num_kills, len(self._attempts()), self._drivers, ranks, differ, problems)

    def _until(self, condition: Any) -> Any:
        """Wait until `condition` holds; a driver that failed is started again, as a scheduler would do."""
        end = time.monotonic() + _LIMIT_S
        while time.monotonic() < end:
            if result := condition():
                return result
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
            checkpoint = torch.load(self._run / "checkpoints" / "last.ckpt", weights_only=True)
        except FileNotFoundError:
            return 0
        return int(checkpoint["global_step"]) // STEPS


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    return entries


def _differ(first_run: Path, second_run: Path) -> float:
    """Return the largest difference of any weight."""
    a, b = (
        torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for run in (first_run, second_run)
    )
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has just ended by itself


if __name__ == "__main__":
    main()
