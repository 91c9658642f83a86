"""Jobs at their real time limit: SLURM itself warns and ends them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.slurm import rig
from tests.cluster.slurm.rig import Rig, until
from voxlane.cluster.slurm.script import SlurmJob, render_script

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 300.0
"""One minute is the smallest time limit. SLURM looks every 30 s for jobs that have reached theirs, and a requeued job
starts again after a few seconds."""
COMMANDS = {
    "stops": "exit 143",
    "stops slowly": "sleep 3; exit 143",
    "does not stop": ":",
    "is not warned": "exit 143",
    "fails": "exit 1",
    "is cancelled": 'scancel "$SLURM_JOB_ID"; exit 143',
}
"""What commands do when they are asked to stop."""
REQUEUED = ("stops", "stops slowly", "does not stop", "is not warned")


def submit(slurm: Rig, folder: Path, kind: str) -> int:
    """Submit a job of one minute whose command, in place of training, only waits; its second start ends well."""
    python = folder / f"{kind.replace(' ', '-')}.sh"
    if not python.exists():  # another job may be reading it
        python.write_text(
            f"#!/bin/bash\n[[ $* != *--auto-resume* ]] || exit 0\ntrap '{COMMANDS[kind]}' TERM\n"
            "sleep 600 & while :; do wait; done\n"
        )
        python.chmod(0o755)
    command = ("train", "/data", "--run", "/run")
    job = SlurmJob(
        command=command, launcher="none", python=str(python), output=str(folder), time="1", grace_s=10, name="limit"
    )
    # The user's signal goes to steps, of which this job has none: as if SLURM's warning were lost.
    options = ["--signal=USR1@10"] if kind == "is not warned" else []
    done = subprocess.run(
        ["sbatch", "--parsable", *options],
        input=render_script(job),
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def run_to_the_limit(slurm: Rig, folder: Path, kinds: Counter[str]) -> dict[str, Counter[tuple[str, str]]]:
    """Run jobs of these kinds at once until all have ended; return how many of each kind ended in which state, after
    how many restarts."""
    folder.mkdir(parents=True)
    jobs = {submit(slurm, folder, kind): kind for kind in kinds.elements()}

    def results() -> dict[int, tuple[str, str]]:
        states = {}
        for line in slurm.run("scontrol", "show", "job", "--oneliner").splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            states[int(fields["JobId"])] = (fields["JobState"], fields["Restarts"])
        return {job: states[job] for job in jobs}

    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    until(lambda: all(state in ended for state, _ in results().values()), LIMIT_S, lambda: f"jobs to end: {results()}")
    counts: dict[str, Counter[tuple[str, str]]] = {kind: Counter() for kind in kinds}
    for job, result in results().items():
        counts[jobs[job]][result] += 1
        log = (folder / f"limit-{job}.log").read_text()
        assert (jobs[job] in REQUEUED) == ("returns to the queue" in log), log
    return counts


@contextmanager
def large_cluster() -> Iterator[Rig]:
    with rig.cluster(nodes=4, cpus=32) as running:
        yield running


def test_jobs_at_their_time_limit_return_to_the_queue(slurm: Rig) -> None:
    kinds = Counter({"stops": 8, "does not stop": 2, "is not warned": 2, "fails": 2, "is cancelled": 2})
    counts = run_to_the_limit(slurm, slurm.folder / "limit", kinds)
    for kind in REQUEUED:
        assert counts.get(kind, Counter()) == Counter({("COMPLETED", "1"): kinds[kind]} if kinds[kind] else {}), kind
    assert counts["fails"] == Counter({("FAILED", "0"): 2})
    assert counts["is cancelled"] == Counter({("CANCELLED", "0"): 2})


@pytest.mark.faults
@pytest.mark.usefixtures("slurm_allowed")
def test_100_of_100_jobs_at_their_time_limit_return_to_the_queue() -> None:
    kinds = Counter({"stops": 70, "stops slowly": 10, "does not stop": 10, "is not warned": 10})
    controls = Counter({"fails": 10, "is cancelled": 10})
    with large_cluster() as slurm:
        counts = run_to_the_limit(slurm, slurm.folder / "limit", kinds + controls)
    requeued = sum((counts[kind] for kind in kinds), Counter())
    print(f"{requeued[('COMPLETED', '1')]} of {kinds.total()} jobs at their time limit were requeued: {counts}")
    assert requeued == Counter({("COMPLETED", "1"): 100}), counts
    assert counts["fails"] == Counter({("FAILED", "0"): 10})
    assert counts["is cancelled"] == Counter({("CANCELLED", "0"): 10})


def test_sbatch_reads_hostile_values_as_data(slurm: Rig) -> None:
    folder = slurm.folder / 'log %j "it\'s" $HOME `id` #1'
    folder.mkdir()
    run = 'gs://b/it\'s a "set" $HOME `id` # ; & é'
    words = ("train", "/d", "--run", run)
    jobs = [
        SlurmJob(
            command=words, launcher="none", run=run, python="/bin/echo", output=str(folder), name=name, sbatch=options
        )
        for name, options in ((None, ()), ("a%jb", ("--comment=x  y",)))
    ]
    for job, comment in zip(jobs, (f"voxlane:train:{run}", "x  y"), strict=True):
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=render_script(job),
            env=slurm.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        number = int(done.stdout)
        slurm.wait(number, "COMPLETED", within_s=90)
        assert f"-m voxlane train /d --run {run}" in Path(job.log_path(number)).read_text()
        shown = re.search(r"Comment=(.*)", slurm.run("scontrol", "show", "job", str(number)))
        assert shown is not None
        assert shown[1].strip() == comment
