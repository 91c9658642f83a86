"""The batch script's text, run by bash beside a SLURM of shell functions where that shows more than reading it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from voxlane.cli.main import main
from voxlane.cli.slurm import absolute, lines, trained, tuned
from voxlane.errors import ConfigError
from voxlane.launch.parallel import launcher, restarted
from voxlane.launch.slurm import Known, parse_queue, refusal, why_waiting
from voxlane.launch.slurm_node import absent, endpoint
from voxlane.launch.slurm_script import Job, comment, placed, read_comment, script


def job(*command: str, **said: Any) -> Job:
    words = command or ("train", "/d", "--run", "/r")
    return Job(command=words, python="/env/bin/python", **said)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.parametrize("launcher", ["ray", "torchrun", "none"])
@pytest.mark.parametrize("stage", [None, 'gs://b/it\'s a "set" $HOME `x`'])
def test_every_form_of_the_script_is_bash(launcher: str, stage: str | None) -> None:
    disk = {"stage": stage, "local_disk": "$TMPDIR/a b"} if stage else {}
    text = script(job(launcher=launcher, setup=("module load cuda",), **disk))
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert checked.stderr == ""
    assert "\nmodule load cuda\n" in text
    assert "{{" not in text


def test_what_was_asked_for_becomes_directives() -> None:
    asked = {"nodes": 2, "cpus_per_node": 16, "gpus_per_node": 4, "mem": "64G", "time": "2-12", "partition": "gpu"}
    text = script(
        job(**asked, account="lab", qos="high", constraint="a100&ib", output="/logs", sbatch=("--exclusive",))
    )
    found = directives(text)
    for wanted in ("--nodes=2", "--cpus-per-task=16", "--gpus-per-node=4", "--mem=64G", "--time=2-12"):
        assert wanted in found
    for wanted in ("--partition=gpu", "--account=lab", "--qos=high", "--exclusive", "--requeue"):
        assert wanted in found
    assert '--constraint="a100&ib"' in found
    assert "--output=/logs/%x-%j.log" in found
    assert "--open-mode=append" in found
    assert "--signal=B:TERM@60" in found
    assert "--no-requeue" in directives(script(job(requeues=0)))
    assert text.index("#SBATCH") < text.index("python=")


def test_train_gets_a_worker_for_every_gpu_or_node_unless_told() -> None:
    def words(*command: str, **said: Any) -> str:
        return " ".join(placed(job(*command, **said), command))

    gpus = words("train", "d", "--run", "r", nodes=2, gpus_per_node=4)
    assert gpus.endswith(
        '--workers 8 --nodes 2 --cpus-per-worker "$worker_cpus" --gpus-per-worker 1 --address "$address"'
    )
    assert "--workers 3 " in words("train", "d", "--run", "r", nodes=3)
    assert "--gpus-per-worker 0.5" in words("train", "d", "--run", "r", gpus_per_node=1, workers_per_node=2)
    said = words("train", "d", "--run", "r", "--workers", "2", nodes=3)
    assert said == 'train d --run r --workers 2 --address "$address"'
    assert words("tune", "s", "d", "--run", "r", nodes=3) == 'tune s d --run r --address "$address"'
    assert words("train", "d", "--run", "r", launcher="torchrun", nodes=2) == "train d --run r"
    assert words("train", "d'$(x)", "--run", "r y", launcher="none") == """train 'd'"'"'$(x)' --run 'r y'"""


def test_loading_gets_a_rank_for_every_gpu_or_node_unless_told() -> None:
    def words(*command: str, **said: Any) -> str:
        return " ".join(placed(job("bench", "loading", *command, **said), ("bench", "loading", *command)))

    every = words("gs://b/d", nodes=2, workers_per_node=4)
    assert every == 'bench loading gs://b/d --launcher ray --nodes 2 --ranks 4 --address "$address"'
    assert words("d", "--ranks=3", nodes=2) == 'bench loading d --ranks=3 --launcher ray --nodes 2 --address "$address"'
    assert words("d", "--launcher", "local", "--ranks", "2") == "bench loading d --launcher local --ranks 2"
    assert words("d", nodes=2, launcher="torchrun") == "bench loading d"


def test_what_torchrun_starts_again_is_what_goes_on() -> None:
    assert "--max-restarts=2 " in script(job(launcher="torchrun"))
    assert "--max-restarts=0 " in script(job("bench", "loading", "d", launcher="torchrun"))


@pytest.mark.parametrize(
    ("command", "nodes", "wanted"),
    [
        ("train", 1, "ray"),
        ("tune", 2, "ray"),
        ("bench loading", 1, "ray"),
        ("bench scaling", 4, "ray"),
        ("bench checkpoint", 2, "torchrun"),
        ("bench checkpoint", 1, "none"),
        ("bench", 1, "none"),
        ("evaluate", 1, "none"),
    ],
)
def test_how_processes_come_to_be_unless_told(command: str, nodes: int, wanted: str) -> None:
    assert launcher([*command.split(), "d"], nodes) == wanted


def test_a_job_is_named_by_its_command() -> None:
    made = job("bench", "loading", "d")
    assert made.job_name == "voxlane-bench-loading"
    assert '--comment="voxlane:bench loading:"' in directives(script(made))
    assert job("evaluate", "r", launcher="none").job_name == "voxlane-evaluate"


def test_a_restarted_command_goes_on() -> None:
    assert restarted(["train", "d", "--run", "r"]) == ("train", "d", "--run", "r", "--auto-resume")
    assert restarted(["train", "d", "--resume", "--run", "r"]) == ("train", "d", "--run", "r", "--auto-resume")
    assert restarted(["evaluate", "r"]) == ("evaluate", "r")
    assert restarted(["bench", "loading", "d"]) == ("bench", "loading", "d")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"time": "soon"}, "time: 'soon' is no time"),
        ({"mem": "lots"}, "mem: 'lots' is no size"),
        ({"partition": "a b"}, "partition: 'a b' is no name"),
        ({"nodes": 0}, "nodes: "),
        ({"setup": ("a\nb",)}, "setup: it holds a line break"),
        ({"stage": "gs://b/d"}, "staging needs a disk of each node; give --local-disk"),
        ({"launcher": "none", "nodes": 2}, "runs on one node, not on 2"),
    ],
)
def test_what_cannot_be_asked_for_is_said(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        job(**said)


@pytest.mark.parametrize(
    ("command", "how", "said"),
    [
        ("tune s d", "torchrun", "`voxlane tune` takes no part as torchrun's ranks; it wants --launcher ray"),
        ("bench scaling", "torchrun", "`voxlane bench scaling` takes no part as torchrun's ranks"),
        ("bench checkpoint", "ray", "`voxlane bench checkpoint` knows no Ray; it wants --launcher torchrun"),
        ("evaluate r", "ray", "`voxlane evaluate` runs on one node, without ray; leave --launcher out"),
        ("evaluate r", "torchrun", "`voxlane evaluate` runs on one node, without torchrun"),
    ],
)
def test_a_command_knows_its_launchers(command: str, how: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        job(*command.split(), launcher=how)


FAKE = """
scontrol() {
  case "$1 $2" in "show hostnames") echo node0;; "show job") echo "$JOB";; requeue*) echo "requeued $2";; esac
}
squeue() { echo "$STATE"; }
scancel() { :; }
export -f scontrol squeue scancel
"""


def run_script(tmp_path: Path, driver: str, *, state: str = "RUNNING", told: bool = False, **environment: str) -> Any:
    """Run the script of a job without launcher, its command being `driver` (shell); `told` sends it SIGTERM when the
    driver says so."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{driver}\n")
    python.chmod(0o755)
    text = script(Job(command=("train", "d", "--run", "r"), launcher="none", python=str(python), output=str(tmp_path)))
    given = {
        "JOB": "   PreemptTime=None",
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "n",
        "SLURM_JOB_NODELIST": "node0",
    }
    with subprocess.Popen(
        ["bash", "-c", FAKE + text],
        env={**given, "STATE": state, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        out = ""
        if told:
            while "ready" not in out:
                out += process.stdout.readline()
            process.terminate()
        out += process.stdout.read()
    return process.returncode, out


WAITING = "trap 'exit 9' TERM; echo ready; while :; do read -rt 0.1 <> <(:); done"


def test_the_commands_status_is_the_jobs(tmp_path: Path) -> None:
    status, out = run_script(tmp_path, "echo $@; exit 5")
    assert status == 5
    assert "-m voxlane train d --run r\n" in out
    assert "ended with status 5" in out
    assert run_script(tmp_path, "exit 0")[0] == 0


def test_a_second_start_goes_on(tmp_path: Path) -> None:
    assert "train d --run r --auto-resume\n" in run_script(tmp_path, "echo $@", SLURM_RESTART_COUNT="1")[1]


def test_a_warning_stops_the_command_and_requeues_the_job(tmp_path: Path) -> None:
    status, out = run_script(tmp_path, WAITING, told=True)
    assert status == 0
    assert "told to stop (the job is RUNNING)" in out
    assert "requeued 7" in out


def test_a_preempted_job_that_was_told_nothing_is_requeued(tmp_path: Path) -> None:
    told = "   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=2026-01-01T00:00:00"
    status, out = run_script(tmp_path, "exit 4", JOB=told)
    assert status == 0
    assert "requeued 7" in out
    assert "requeued" not in run_script(tmp_path, "exit 0", JOB=told)[1]


def test_a_cancelled_job_is_not_requeued(tmp_path: Path) -> None:
    status, out = run_script(tmp_path, WAITING, state="COMPLETING", told=True)
    assert status == 9
    assert "requeued" not in out


def test_a_job_that_started_often_enough_is_not_requeued(tmp_path: Path) -> None:
    status, out = run_script(tmp_path, WAITING, told=True, SLURM_RESTART_COUNT="100")
    assert status == 9
    assert "requeued" not in out


def test_a_command_that_is_done_when_it_is_told_to_stop_is_done(tmp_path: Path) -> None:
    status, out = run_script(tmp_path, WAITING.replace("exit 9", "exit 0"), told=True)
    assert status == 0
    assert "requeued" not in out


# -- words -------------------------------------------------------------------------------------------------------------


def test_a_jobs_comment_is_read_back() -> None:
    assert read_comment(comment("train", "gs://b/run:1")) == ("train", "gs://b/run:1")
    assert read_comment("somebody else's") is None


def queue_line(**said: str) -> str:
    cells = {"i": "12", "j": "voxlane-train", "T": "PENDING", "r": "Resources", "D": "4", "N": "", "M": "0:00"}
    cells |= {"l": "20:00", "S": "2026-01-01T10:00:00", "k": "voxlane:train:/r", "P": "main", **said}
    return "\x1f".join(cells.values())


def test_the_queue_is_read() -> None:
    (found,) = parse_queue(queue_line() + "\nnonsense\n")
    assert found == Known(
        12,
        "voxlane-train",
        "PENDING",
        "Resources",
        4,
        "",
        "0:00",
        "20:00",
        "2026-01-01T10:00:00",
        "voxlane:train:/r",
        "main",
    )
    assert found.ours == ("train", "/r")
    cancelled = parse_queue(queue_line(T="CANCELLED by 1000", k="(null)", S="Unknown", r="None"))[0]
    assert cancelled.ended
    assert cancelled.ours is None
    assert (cancelled.start, cancelled.reason) == ("", "")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "no 4 nodes with what it asks for are free"),
        ("(Priority)", "jobs before it in the queue have a higher priority"),
        ("PartitionTimeLimit", "more time than partition main allows"),
        ("QOSMaxJobsPerUserLimit", "a limit of its quality of service is reached (QOSMaxJobsPerUserLimit)"),
        ("AssocGrpCPUMinutesLimit", "a limit of your account is reached"),
        ("JobHeldUser", "`scontrol release 12` lets it go"),
        ("SomethingNew", "SomethingNew"),
        ("None", "SLURM has not looked at it yet"),
    ],
)
def test_why_a_job_waits_is_said_in_plain_words(reason: str, words: str) -> None:
    assert words in why_waiting(parse_queue(queue_line(r=reason))[0])


def test_a_jobs_lines() -> None:
    assert lines(parse_queue(queue_line())[0], "not begun") == [
        "12  voxlane-train  PENDING  4 nodes  0:00 of 20:00",
        "    waits: no 4 nodes with what it asks for are free; expected to start 2026-01-01 10:00:00",
        "    train /r: not begun",
    ]
    failed = parse_queue(queue_line(T="FAILED", r="NonZeroExitCode", N="node[0-3]"))[0]
    assert "    because: NonZeroExitCode" in lines(failed, "")


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("Invalid partition name specified", "no partition 'x' is here. There are: cpu, gpu"),
        ("Requested node configuration is not available", "no partition has 2 nodes with 99 CPUs each"),
        ("Invalid account or account/partition combination specified", "account 'a' may not be used"),
        ("Unable to contact slurm controller (connect failure)", "its controller does not answer"),
        ("Something else", "SLURM refuses the job: Batch job submission failed: Something else"),
        ("", "it gave no reason"),
    ],
)
def test_refusals_are_translated(stderr: str, words: str) -> None:
    asked = job(partition="x", account="a", nodes=2, cpus_per_node=99)
    said = f"sbatch: error: Batch job submission failed: {stderr}\n" if stderr else ""
    assert words in str(refusal(said, asked, ["cpu", "gpu"]))


def test_how_far_a_run_is() -> None:
    entry = {"epoch": 2, "loss": 0.5, "mean_dice": None}
    assert trained(None, None) == "not begun"
    assert trained({"config": {"epochs": 9}}, []) == "epoch 0 of 9"
    assert (
        trained({"config": {"epochs": 9}}, [{**entry, "mean_dice": 0.7}, entry])
        == "epoch 3 of 9, loss 0.500, Dice 0.700"
    )
    assert tuned(None) == "not begun"
    search = {"trials": [{"state": "done", "dice": 0.5}, {"state": "running", "dice": None}]}
    assert tuned(search) == "2 trials (1 done, 1 running); best Dice 0.500"


def test_relative_paths_are_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "data", "--run=runs/a", "--config", "c.yaml", "epochs=1", "gs://b/x"]
    made = absolute(words, {"data", "runs/a", "c.yaml", "gs://b/x"})
    here = str(tmp_path)
    assert made == [
        "train",
        f"{here}/data",
        f"--run={here}/runs/a",
        "--config",
        f"{here}/c.yaml",
        "epochs=1",
        "gs://b/x",
    ]


def test_hosts_are_compared_without_their_domains() -> None:
    assert absent(["node0", "node1.lab"], ["node0.lab", "node1", "other"]) == []
    assert absent(["node0", "node1"], ["node0"]) == ["node1"]


def test_ports_that_are_taken_are_passed_over() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        address, ports = endpoint(port)
    assert port not in ports
    assert len(ports) == len(set(ports)) == 3
    assert re.match(r"^[\d.]+$", address)


# -- the command line, without a cluster -------------------------------------------------------------------------------


def test_render_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["slurm", "render", "--nodes", "2", "--", "train", "gs://b/d", "--run", "gs://b/r", "epochs=3"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "words=(train gs://b/d --run gs://b/r epochs=3 --workers 2 " in text
    assert f"python={sys.executable}" in text
    assert "--comment=voxlane:train:gs://b/r" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command was given"),
        (["--", "slurm", "status"], "`voxlane slurm` is no command for a job"),
        (["--nodes", "2", "--", "evaluate", "r"], "runs on one node"),
        (
            ["--stage", "--local-disk", "/x", "--", "evaluate", "r"],
            "--stage: `voxlane evaluate` has no prepared dataset",
        ),
        (["--stage", "--", "train", "d", "--run", "r"], "give --local-disk"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "render", *words]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_wrong_command_is_refused_before_it_is_queued(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["slurm", "submit", "--", "train", "d", "--run", "r", "--epochs", "3"])
    assert "unrecognized arguments: --epochs" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["status"], ["logs", "1"], ["cancel", "1"]])
def test_a_machine_without_slurm_says_so(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["slurm", *words]) == 1
    assert "is not here: this machine belongs to no SLURM cluster" in capsys.readouterr().err
