"""Jobs on a real SLURM cluster of four nodes, each with its own network, processes, /tmp and disk."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.slurm.rig import Rig, until
from voxlane.train.fit import train

pytestmark = pytest.mark.timeout(900)
EPOCHS, STEPS = 8, 30
"""Enough that a job can be stopped in the middle."""
FIELDS = [f"steps_per_epoch={STEPS}", "batch=4", "augment.preset=none", "optimizer.name=adamw", "optimizer.lr=0.01"]
FIELDS += ["validation.every_epochs=1", "validation.max_cases=1", "accelerator=cpu"]
JOB = ["--cpus-per-node", "2", "--time", "20", "--start-timeout", "240"]
START_S = 400.0
"""For a job's Ray and its ranks, on a machine that other things may be running on."""


def history(run: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((run / "history.json").read_text())
    return entries


def submit(slurm: Rig, logs: Path, *words: str) -> int:
    """Submit a job; returns its number."""
    done = slurm.voxlane("slurm", "submit", *JOB, "--output", str(logs), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.match(r"job (\d+):", done.stdout)[1])  # type: ignore[index]


def ended(slurm: Rig, job: int, logs: Path, state: str = "COMPLETED") -> str:
    """Wait for a job to end as it should; returns its log."""
    last = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", within_s=START_S)
    text = next(logs.glob(f"*-{job}.log")).read_text()
    assert last == state, text + "".join(log.read_text() for log in logs.glob(f"*-{job}-ray-*.log"))
    return text


def nothing_left(slurm: Rig, job: int, without_power: str = "") -> None:
    """No process and no temporary file of a job on any node; on one that lost its power nobody could remove files."""
    until(
        lambda: not any(slurm.processes(node) for node in slurm.nodes),
        60,
        lambda: f"processes to end: { {node: slurm.processes(node) for node in slurm.nodes} }",
    )
    for node in slurm.nodes:
        left = [name for name in slurm.on(node, "ls", "/tmp").split() if f"vl-{job}-" in name or "ray" in name]
        assert not left or node == without_power


def begun(run: Path, epochs: int = 1) -> bool:
    """Whether a run has done so many epochs."""
    return (run / "history.json").exists() and len(history(run)) >= epochs


@pytest.fixture(scope="session")
def undisturbed(slurm: Rig, data: str) -> list[dict[str, Any]]:
    """History of the same epochs in one process."""
    run = slurm.folder / "undisturbed"
    config: dict[str, Any] = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "batch": 4, "augment": {"preset": "none"}}
    config |= {"optimizer": {"name": "adamw", "lr": 0.01}, "validation": {"every_epochs": 1, "max_cases": 1}}
    train(data, str(run), {**config, "accelerator": "cpu"}, progress=False)
    return history(run)


def orders(entries: list[dict[str, Any]]) -> list[str]:
    """Which patches were consumed, epoch by epoch."""
    return [entry["order"] for entry in entries]


def test_two_node_job_trains_on_ray_to_the_end(
    slurm: Rig, data: str, shared: Path, undisturbed: list[dict[str, Any]]
) -> None:
    run, logs = shared / "run", shared / "logs"
    words = [
        "--nodes",
        "2",
        "--output",
        str(logs),
        "--follow",
        "--",
        "train",
        data,
        "--run",
        str(run),
        f"epochs={EPOCHS}",
    ]
    done = slurm.voxlane("slurm", "submit", *JOB, *words, *FIELDS, within_s=START_S)
    assert done.returncode == 0, done.stdout + done.stderr
    job = int(re.search(r"job (\d+)", done.stdout)[1])  # type: ignore[index]
    assert "node0, node1 joined" in done.stdout
    assert "ended with status 0" in done.stdout
    assert orders(history(run)) == orders(undisturbed)
    assert history(run)[-1]["ranks"] == 2
    assert history(run)[0]["loss"] == pytest.approx(undisturbed[0]["loss"], rel=1e-3)
    nothing_left(slurm, job)
    status = slurm.voxlane("slurm", "status", str(job)).stdout
    assert "COMPLETED" in status
    assert f"epoch {EPOCHS} of {EPOCHS}" in status
    logged = slurm.voxlane("slurm", "logs", str(job)).stdout
    assert logged in done.stdout


def test_token_of_a_job_cannot_be_read(slurm: Rig, data: str, shared: Path) -> None:
    logs, run = shared / "logs", shared / "run"
    job = submit(slurm, logs, "--nodes", "2", "--", "train", data, "--run", str(run), "epochs=500", *FIELDS)
    until(lambda: begun(run), START_S, "the first epoch")
    # A process of Ray has it in its environment, which only its own user can read.
    environments = slurm.on("node0", "bash", "-c", "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
    token = re.search(r"^RAY_AUTH_TOKEN=([0-9a-f]{64})$", environments, re.MULTILINE)
    assert token is not None
    everywhere = slurm.on("node0", "ps", "-eo", "args=") + slurm.on("node1", "ps", "-eo", "args=")
    everywhere += slurm.run("scontrol", "show", "job", "-dd", str(job))
    everywhere += slurm.run("scontrol", "write", "batch_script", str(job), "-")
    everywhere += "".join(
        path.read_text(errors="replace") for path in shared.rglob("*") if path.suffix != ".ckpt" and path.is_file()
    )
    everywhere += "".join(path.read_text() for path in (slurm.folder / "home").rglob("*.json"))
    for node in ("node0", "node1"):
        everywhere += slurm.on(node, "bash", "-c", "grep -rhsI '' /tmp/vl-*/session_latest/logs || true")
    assert "ray start" in everywhere or "raylet" in everywhere
    assert token[1] not in everywhere
    # Without it nobody gets in.
    address = re.search(r"Ray at ([\d.:]+)", next(logs.glob(f"*-{job}.log")).read_text())[1]  # type: ignore[index]
    stranger = "import ray, sys\ntry: ray.init(address=sys.argv[1])\nexcept Exception as e: print('refused', type(e))"
    output = slurm.on(
        "node2", "env", "-u", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE=disabled", slurm.python, "-c", stranger, address
    )
    assert "refused" in output
    slurm.run("scancel", str(job))
    slurm.wait(job, "CANCELLED")
    nothing_left(slurm, job)


def test_cancelled_job_leaves_nothing_running(slurm: Rig, data: str, shared: Path) -> None:
    logs, run = shared / "logs", shared / "run"
    job = submit(
        slurm,
        logs,
        "--nodes",
        "3",
        "--",
        "train",
        data,
        "--run",
        str(run),
        "epochs=500",
        "batch=6",
        *FIELDS[:1],
        *FIELDS[2:],
    )
    until(lambda: begun(run), START_S, "the first epoch")
    assert all(slurm.processes(node) for node in slurm.nodes[:3])
    done = slurm.voxlane("slurm", "cancel", str(job))
    assert done.returncode == 0, done.stderr
    slurm.wait(job, "CANCELLED", within_s=90)
    nothing_left(slurm, job)
    assert "CANCELLED" in slurm.voxlane("slurm", "status", str(job)).stdout
    assert "had ended" in slurm.voxlane("slurm", "cancel", str(job)).stdout


@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
def test_job_at_its_time_limit_is_requeued_and_continues(
    slurm: Rig, data: str, shared: Path, undisturbed: list[dict[str, Any]], launcher: str
) -> None:
    logs, run = shared / "logs", shared / "run"
    words = ["--launcher", launcher, "--nodes", "2", "--", "train", data, "--run", str(run), "epochs=5000"]
    job = submit(slurm, logs, *words, *FIELDS)
    until(lambda: begun(run, 2), START_S, "two epochs")
    # The smallest time limit that is not over yet; SLURM then does all the rest.
    minutes = int(time.time() - time.mktime(time.strptime(slurm.fact(job, "StartTime"), "%Y-%m-%dT%H:%M:%S"))) // 60
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 1}")
    until(lambda: slurm.fact(job, "Restarts") == "1", 200, lambda: f"a restart: {slurm.state(job)}")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    epochs = len(history(run))
    until(lambda: begun(run, max(epochs + 1, EPOCHS)), START_S, "another epoch")
    slurm.run("scancel", str(job))
    text = ended(slurm, job, logs, "CANCELLED")
    assert slurm.fact(job, "Restarts") == "1"
    first, second = text.split("start 2, on")
    assert "asked to stop: the time limit is near" in first
    assert "returns to the queue" in first
    assert "returns to the queue" not in second
    assert orders(history(run))[:EPOCHS] == orders(undisturbed)
    nothing_left(slurm, job)


def test_preempted_job_continues_after_the_urgent_one(
    slurm: Rig, data: str, shared: Path, undisturbed: list[dict[str, Any]]
) -> None:
    logs, run = shared / "logs", shared / "run"
    job = submit(slurm, logs, "--nodes", "2", "--", "train", data, "--run", str(run), f"epochs={EPOCHS}", *FIELDS)
    until(lambda: begun(run, 1), START_S, "an epoch")
    urgent = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=hostname"]
    other = int(slurm.run("sbatch", "--parsable", *urgent))
    slurm.wait(other, "COMPLETED", within_s=200)
    text = ended(slurm, job, logs)
    assert slurm.fact(job, "Restarts") == "1"
    assert f"epoch {EPOCHS} of" in text.split("start 2, on")[1]
    assert slurm.fact(job, "PreemptTime") == "None"  # a failure of the second start would not requeue it
    assert orders(history(run)) == orders(undisturbed)
    nothing_left(slurm, job)


def test_two_jobs_at_once_on_the_same_nodes_do_not_meet(slurm: Rig, data: str, shared: Path) -> None:
    logs = shared / "logs"
    node_options = ["--nodes", "2", "--sbatch=--nodelist=node[0-1]", "--"]
    jobs = [
        submit(slurm, logs, *node_options, "train", data, "--run", str(shared / f"run{i}"), "epochs=3", *FIELDS)
        for i in range(2)
    ]
    until(lambda: all(slurm.state(job) == "RUNNING" for job in jobs), 60, "both to run")
    texts = [ended(slurm, job, logs) for job in jobs]
    addresses = {re.search(r"Ray at ([\d.:]+)", text)[1] for text in texts}  # type: ignore[index]
    assert len(addresses) == 2
    assert all(len(history(shared / f"run{i}")) == 3 for i in range(2))
    assert orders(history(shared / "run0")) == orders(history(shared / "run1"))
    nothing_left(slurm, jobs[1])


def test_search_runs_its_trials_on_the_nodes(slurm: Rig, data: str, shared: Path) -> None:
    logs, out = shared / "logs", shared / "search"
    space = shared / "space.yaml"
    fields = [word.split("=") for word in FIELDS if "." not in word]
    lines = [f"{name}: {value}" for name, value in fields] + ["epochs: 2", "augment: {preset: none}"]
    lines += ["optimizer: {name: adamw, lr: {loguniform: [0.001, 0.1]}}", "validation: {every_epochs: 1, max_cases: 1}"]
    lines += ["tune: {trials: 3, cpus_per_trial: 1}"]
    space.write_text("\n".join(lines))
    job = submit(slurm, logs, "--nodes", "2", "--", "tune", str(space), data, "--run", str(out))
    ended(slurm, job, logs)
    search = json.loads((out / "tune.json").read_text())
    assert len(search["trials"]) == 3
    assert (out / "best.yaml").exists()
    assert "3 trials" in slurm.voxlane("slurm", "status", str(job)).stdout
    nothing_left(slurm, job)


def test_torchrun_trains_over_two_nodes_without_ray(
    slurm: Rig, data: str, shared: Path, undisturbed: list[dict[str, Any]]
) -> None:
    logs, run = shared / "logs", shared / "run"
    words = ["--launcher", "torchrun", "--nodes", "2", "--workers-per-node", "2", "--"]
    job = submit(slurm, logs, *words, "train", data, "--run", str(run), f"epochs={EPOCHS}", *FIELDS)
    ended(slurm, job, logs)
    assert history(run)[-1]["ranks"] == 4
    assert orders(history(run)) == orders(undisturbed)
    assert not list(logs.glob("*ray*"))
    nothing_left(slurm, job)


@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
def test_loading_is_measured_on_all_nodes(slurm: Rig, data: str, shared: Path, launcher: str) -> None:
    logs, out = shared / "logs", shared / "loading.json"
    words = ["--launcher", launcher, "--nodes", "2", "--workers-per-node", "2", "--", "bench", "loading", data]
    words += ["--steps", "4", "--batch", "1", "--step-time", "0.02", "--no-plot", "--out", str(out)]
    job = submit(slurm, logs, *words)
    log = ended(slurm, job, logs)
    assert "samples/s" in log
    result = json.loads(out.read_text())
    assert (result["setting"]["nodes"], result["setting"]["ranks"]) == (2, 2)
    assert len(result["epochs"]) == 2
    for epoch in result["epochs"]:
        assert epoch["samples"] == 4 * 2 * 2
        nodes = sorted((node["host"], node["ranks"], node["samples"]) for node in epoch["nodes"])
        assert nodes == [("node0", 2, 8), ("node1", 2, 8)]
    assert "bench loading" in slurm.voxlane("slurm", "status", str(job)).stdout
    nothing_left(slurm, job)


def test_stage_runs_on_nodes_by_srun(slurm: Rig, data: str) -> None:
    folder = str(slurm.local / "direct")
    done = slurm.voxlane("stage", data, folder, "--nodelist", "node[1-2]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"(node\d): \d+ objects, .* copied \d+", done.stdout)) == ["node1", "node2"]
    for node in ("node1", "node2"):
        assert slurm.on(node, "find", folder, "-name", "staged.json").strip()
    command = [slurm.python, "-m", "voxlane", "stage", data, folder, "--nodes"]
    inside = slurm.run("salloc", "--nodes=2", "--nodelist=node[1-2]", *command)
    assert sorted(re.findall(r"(node\d): .* all were there", inside)) == ["node1", "node2"]
    done = slurm.voxlane("stage", data, "/proc/none", "--nodes", "1")
    assert done.returncode == 1
    assert "cannot use the folder" in done.stderr
    assert "it failed on one node or more" in done.stderr


def test_staged_dataset_is_read_from_each_nodes_own_disk(slurm: Rig, data: str, shared: Path) -> None:
    logs, run = shared / "logs", shared / "run"
    words = ["--nodes", "2", "--stage", "--local-disk", str(slurm.local), "--launcher", "torchrun", "--"]
    job = submit(slurm, logs, *words, "train", data, "--run", str(run), "epochs=1", *FIELDS)
    text = ended(slurm, job, logs)
    for node in ("node0", "node1"):
        assert re.search(rf"{node}: \d+ objects, .* copied \d+", text)
        assert slurm.on(node, "find", str(slurm.local), "-name", "staged.json").strip()
    assert not slurm.on("node3", "find", str(slurm.local), "-name", "staged.json").strip()
    stall = json.loads((run / "stall.json").read_text())
    assert stall["bytes_read"] == 0
    assert json.loads((run / "run.json").read_text())["data"]["uri"] == data
    again = submit(slurm, logs, *words, "train", data, "--run", str(shared / "again"), "epochs=1", *FIELDS)
    assert ended(slurm, again, logs).count("all were there") == 2


def test_node_that_goes_down_costs_no_more_than_a_restart(
    slurm: Rig, data: str, shared: Path, undisturbed: list[dict[str, Any]]
) -> None:
    logs, run = shared / "logs", shared / "run"
    words = [
        "--nodes",
        "2",
        "--sbatch=--nodelist=node[2-3]",
        "--",
        "train",
        data,
        "--run",
        str(run),
        f"epochs={EPOCHS}",
    ]
    job = submit(slurm, logs, *words, *FIELDS)
    until(lambda: begun(run, 1), START_S, "an epoch")
    slurm.reboot("node3")
    ended(slurm, job, logs)
    assert orders(history(run)) == orders(undisturbed)
    nothing_left(slurm, job, without_power="node3")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_errors_name_the_problem_and_the_fix(slurm: Rig, data: str, shared: Path) -> None:
    def refused(*words: str) -> str:
        done = slurm.voxlane("slurm", *words)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    run = ["--", "train", data, "--run", str(shared / "run"), *FIELDS]
    out = ["--output", str(shared)]
    assert "partition 'fast' does not exist. Choose from: main, urgent" in refused(
        "submit", *out, "--partition", "fast", *run
    )
    # This SLURM takes jobs that can never start, as it does unless it is told otherwise.
    many = refused("submit", *out, "--nodes", "9", "--no-check", *run)
    assert "waiting forever: it requests more nodes, cores or time than partition main has" in many
    assert "Request less than 1 node with 64 CPUs each" in refused("submit", *out, "--cpus-per-node", "64", *run)
    assert "waiting forever" in refused("submit", *out, "--time", "9-0", *run)
    assert "no node has 2 GPUs" in refused("submit", *out, "--gpus-per-node", "2", *run)
    assert "no node has the feature 'fast'" in refused("submit", *out, "--constraint", "fast", *run)
    assert "sbatch does not know an option" in refused("submit", *out, "--sbatch=--bogus", *run)
    assert "4 patches do not divide evenly over 3 workers" in refused("submit", *out, "--nodes", "3", *run)
    assert "there is no prepared dataset at this URI" in refused(
        "submit", *out, "--", "train", "/nowhere", "--run", "/tmp/x"
    )
    assert "SLURM does not know this job" in refused("status", "999999")
    assert "SLURM does not know this job" in refused("logs", "999999")
    assert "SLURM does not know this job" in refused("cancel", "999999")
    assert not slurm.run("squeue", "-h")


def test_waiting_job_gives_its_reason(slurm: Rig, data: str, shared: Path) -> None:
    blocker = int(
        slurm.run("sbatch", "--parsable", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    )
    slurm.wait(blocker, "RUNNING")
    job = submit(slurm, shared, "--nodes", "2", "--", "train", data, "--run", str(shared / "run"), *FIELDS)
    until(lambda: slurm.fact(job, "Reason") != "None", 60, "a reason")
    status = slurm.voxlane("slurm", "status").stdout
    assert f"{job}  voxlane-train  PENDING" in status
    assert "waits: " in status
    assert "are not free" in status or "higher priority" in status
    assert str(blocker) not in [line.split()[0] for line in status.splitlines()]
    assert "has written no log yet" in slurm.voxlane("slurm", "logs", str(job)).stderr


def test_node_where_ray_cannot_start_is_named_at_once(slurm: Rig, data: str, shared: Path) -> None:
    broken = shared / "python"
    refuses = '[ "$(hostname)$2" != node1ray.scripts.scripts ] || { echo no Ray for you; exit 3; }'
    broken.write_text(f'#!/bin/bash\n{refuses}\nexec {slurm.python} "$@"\n')
    broken.chmod(0o755)
    words = ["--nodes", "2", "--python", str(broken), "--sbatch=--nodelist=node[0-1]", "--"]
    job = submit(slurm, shared, *words, "train", data, "--run", str(shared / "run"), *FIELDS)
    text = ended(slurm, job, shared, "FAILED")
    assert "node1: Ray could not start" in text
    assert "no Ray for you" in text
    nothing_left(slurm, job)


def test_mistake_of_the_command_is_the_status_of_the_job(slurm: Rig, data: str, shared: Path) -> None:
    words = [
        "--no-check",
        "--follow",
        "--output",
        str(shared),
        "--",
        "train",
        data,
        "--run",
        str(shared / "run"),
        "lr=1",
    ]
    done = slurm.voxlane("slurm", "submit", *JOB, *words)
    assert done.returncode == 1
    assert "lr: no such field" in done.stdout
    assert "FAILED" in done.stderr
