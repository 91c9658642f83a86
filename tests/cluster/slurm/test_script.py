"""Tests of the batch script, some by running it in bash with shell functions in place of SLURM."""

from __future__ import annotations

import getpass
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from voxlane.cli.main import main
from voxlane.cli.slurm import (
    SlurmRenderCommand,
    describe_search,
    describe_training,
    format_job,
    make_absolute,
    make_override_absolute,
    store_of,
)
from voxlane.cluster.commands import default_launcher, restart_arguments
from voxlane.cluster.slurm.jobs import JobStatus, explain_refusal, explain_wait, parse_queue
from voxlane.cluster.slurm.node import find_endpoint, find_missing_hosts
from voxlane.cluster.slurm.script import SlurmJob, format_comment, parse_comment, render_command, render_script
from voxlane.errors import ConfigError


def make_job(*command: str, **options: Any) -> SlurmJob:
    arguments = command or ("train", "/d", "--run", "/r")
    return SlurmJob(command=arguments, python="/env/bin/python", **options)


def parse_directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.parametrize("launcher", ["ray", "torchrun", "none"])
@pytest.mark.parametrize("stage", [None, 'gs://b/it\'s a "set" $HOME `x`'])
def test_every_form_of_the_script_is_valid_bash(launcher: str, stage: str | None) -> None:
    disk = {"stage": stage, "local_disk": "$TMPDIR/a b"} if stage else {}
    text = render_script(make_job(launcher=launcher, setup=("module load cuda",), **disk))
    syntax_check = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert syntax_check.stderr == ""
    assert "\nmodule load cuda\n" in text
    assert "{{" not in text


def test_resources_become_directives() -> None:
    resources = {"nodes": 2, "cpus_per_node": 16, "gpus_per_node": 4, "mem": "64G", "time": "2-12", "partition": "gpu"}
    text = render_script(
        make_job(**resources, account="lab", qos="high", constraint="a100&ib", output="/logs", sbatch=("--exclusive",))
    )
    directives = parse_directives(text)
    for expected in ("--nodes=2", "--cpus-per-task=16", "--gpus-per-node=4", "--mem=64G", "--time=2-12"):
        assert expected in directives
    for expected in ("--partition=gpu", "--account=lab", "--qos=high", "--exclusive", "--requeue"):
        assert expected in directives
    assert '--constraint="a100&ib"' in directives
    assert "--output=/logs/voxlane-train-%j.log" in directives
    assert "--open-mode=append" in directives
    assert "--signal=B:USR1@60" in directives
    assert "--no-requeue" in parse_directives(render_script(make_job(requeues=0)))
    assert text.index("#SBATCH") < text.index("python=")


def test_train_gets_a_worker_per_gpu_or_node_by_default() -> None:
    def render(*command: str, **options: Any) -> str:
        return " ".join(render_command(make_job(*command, **options), command))

    with_gpus = render("train", "d", "--run", "r", nodes=2, gpus_per_node=4)
    assert with_gpus.endswith(
        '--workers 8 --nodes 2 --cpus-per-worker "$worker_cpus" --gpus-per-worker 1 --address "$address"'
    )
    assert "--workers 3 " in render("train", "d", "--run", "r", nodes=3)
    assert "--gpus-per-worker 0.5" in render("train", "d", "--run", "r", gpus_per_node=1, workers_per_node=2)
    with_workers = render("train", "d", "--run", "r", "--workers", "2", nodes=3)
    assert with_workers == 'train d --run r --workers 2 --address "$address"'
    assert render("tune", "s", "d", "--run", "r", nodes=3) == 'tune s d --run r --address "$address"'
    assert render("train", "d", "--run", "r", launcher="torchrun", nodes=2) == "train d --run r"
    assert render("train", "d'$(x)", "--run", "r y", launcher="none") == """train 'd'"'"'$(x)' --run 'r y'"""


def test_bench_loading_gets_a_rank_per_gpu_or_node_by_default() -> None:
    def render(*command: str, **options: Any) -> str:
        arguments = ("bench", "loading", *command)
        return " ".join(render_command(make_job(*arguments, **options), arguments))

    default = render("gs://b/d", nodes=2, workers_per_node=4)
    assert default == 'bench loading gs://b/d --launcher ray --nodes 2 --ranks 4 --address "$address"'
    assert (
        render("d", "--ranks=3", nodes=2) == 'bench loading d --ranks=3 --launcher ray --nodes 2 --address "$address"'
    )
    assert render("d", "--launcher", "local", "--ranks", "2") == "bench loading d --launcher local --ranks 2"
    assert render("d", nodes=2, launcher="torchrun") == "bench loading d"


def test_torchrun_restarts_only_commands_that_resume() -> None:
    assert "--max-restarts=2 " in render_script(make_job(launcher="torchrun"))
    assert "--max-restarts=0 " in render_script(make_job("bench", "loading", "d", launcher="torchrun"))


@pytest.mark.parametrize(
    ("command", "nodes", "expected"),
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
def test_default_launchers(command: str, nodes: int, expected: str) -> None:
    assert default_launcher([*command.split(), "d"], nodes) == expected


def test_job_is_named_after_its_command() -> None:
    bench_job = make_job("bench", "loading", "d")
    assert bench_job.job_name == "voxlane-bench-loading"
    assert '--comment="voxlane:bench loading:"' in parse_directives(render_script(bench_job))
    assert make_job("evaluate", "r", launcher="none").job_name == "voxlane-evaluate"


def test_restarted_command_resumes() -> None:
    assert restart_arguments(["train", "d", "--run", "r"]) == ("train", "d", "--run", "r", "--auto-resume")
    assert restart_arguments(["train", "d", "--resume", "--run", "r"]) == ("train", "d", "--run", "r", "--auto-resume")
    assert restart_arguments(["evaluate", "r"]) == ("evaluate", "r")
    assert restart_arguments(["bench", "loading", "d"]) == ("bench", "loading", "d")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "soon"}, "time: 'soon' is not a time"),
        ({"mem": "lots"}, "mem: 'lots' is not a size"),
        ({"partition": "a b"}, "partition: 'a b' is not a valid SLURM name"),
        ({"nodes": 0}, "nodes: "),
        ({"setup": ("a\nb",)}, "setup.0: 'a\\nb' contains a line break"),
        ({"run": "r\ntouch /tmp/x"}, "run: 'r\\ntouch /tmp/x' contains a line break"),
        ({"run": "r\x1b[2J"}, "run: 'r\\x1b[2J' contains the control character '\\x1b'"),
        ({"account": "a\n"}, "account: 'a\\n' is not a valid SLURM name"),
        ({"time": "5\n"}, "time: '5\\n' is not a time"),
        ({"name": "a/b"}, "name: 'a/b' is not a valid name of a job and its log: remove slashes"),
        ({"output": "/a\rb"}, "output: '/a\\rb' contains the control character '\\r'"),
        ({"output": "/a\\b"}, "output: '/a\\\\b' contains a backslash"),
        ({"sbatch": ("--a=b\n#SBATCH --c",)}, "sbatch.0: '--a=b\\n#SBATCH --c' contains a line break"),
        ({"sbatch": ("exclusive",)}, "sbatch.0: 'exclusive' is not an option"),
        ({"sbatch": ("--nice 5",)}, "sbatch.0: '--nice 5' must be one word; write it as --sbatch=--NAME=VALUE"),
        ({"sbatch": ("--signal=TERM@9",)}, "sbatch.0: set the time of SLURM's warning with --grace"),
        ({"stage": "gs://b/d"}, "staging needs a disk on each node; give --local-disk"),
        ({"launcher": "none", "nodes": 2}, "runs on one node, not on 2"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_job(**options)


def test_zero_byte_in_a_command_is_rejected() -> None:
    with pytest.raises(ConfigError, match=re.escape("command.1: 'd\\x00' contains a zero byte")):
        make_job("train", "d\0")


@pytest.mark.parametrize(
    ("command", "launcher", "message"),
    [
        ("tune s d", "torchrun", "`voxlane tune` does not support torchrun; use --launcher ray"),
        ("bench scaling", "torchrun", "`voxlane bench scaling` does not support torchrun"),
        ("bench checkpoint", "ray", "`voxlane bench checkpoint` does not support Ray; use --launcher torchrun"),
        ("evaluate r", "ray", "`voxlane evaluate` runs on one node, without ray; leave --launcher out"),
        ("evaluate r", "torchrun", "`voxlane evaluate` runs on one node, without torchrun"),
    ],
)
def test_unsupported_launchers_are_rejected(command: str, launcher: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_job(*command.split(), launcher=launcher)


FAKE_SLURM = """
scontrol() {
  case "$1 $2" in
    "show hostnames") echo node0; return;;
  esac
  if [ -e "$AWAY" ]; then rm "$AWAY"; echo "Unable to contact slurm controller" >&2; return 1; fi
  case "$1 $2" in
    "show job") echo "   JobState=${STATE% *} Reason=${STATE#* } Dependency=(null)"; echo "$JOB"
      [ ! -e "$REQUEUED" ] || echo "   Requeue=1 Restarts=1 BatchFlag=1";;
    requeue*) echo "$2" >> "$REQUEUED"; [ -z "$KILLED" ] || return 143;;
  esac
}
scancel() { :; }
export -f scontrol scancel
"""
"""Stand-ins for SLURM's commands. They print $STATE and $JOB. While the file $AWAY exists, the controller is away; a
question removes the file."""
WAITING = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.05; done"
"""A command that stops when it is asked to, as training does."""


def run_script(
    tmp_path: Path,
    driver: str,
    *,
    state: str = "RUNNING None",
    signals: Sequence[signal.Signals] = (),
    away: bool = False,
    **environment: str,
) -> tuple[int, str, bool]:
    """Run the script of a job without launcher whose command is `driver` (shell); return its status, its output and
    whether it was requeued.

    `signals`: signals that the script gets once the driver prints "ready". `away`: the controller does not answer the
    first question.
    """
    python, requeued, absent = tmp_path / "python", tmp_path / "requeued", tmp_path / "away"
    python.write_text(f"#!/bin/bash\n{driver}\n")
    python.chmod(0o755)
    requeued.unlink(missing_ok=True)
    if away:
        absent.touch()
    text = render_script(
        SlurmJob(
            command=("train", "d", "--run", "r"),
            launcher="none",
            python=str(python),
            output=str(tmp_path),
            grace_s=10,
        )
    )
    variables = {
        "JOB": "   PreemptTime=None",
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "n",
        "SLURM_JOB_NODELIST": "node0",
        "REQUEUED": str(requeued),
        "AWAY": str(absent),
        "KILLED": "",
    }
    with subprocess.Popen(
        ["bash", "-c", FAKE_SLURM + text],
        env={**variables, "STATE": state, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        out = ""
        if signals:
            while "ready" not in out:
                out += process.stdout.readline()
        for number in signals:
            process.send_signal(number)
            out += process.stdout.readline()
        out += process.stdout.read()
    return process.returncode, out, requeued.exists()


def test_job_ends_with_the_status_of_the_command(tmp_path: Path) -> None:
    status, out, _ = run_script(tmp_path, "echo $@; exit 5")
    assert status == 5
    assert "-m voxlane train d --run r\n" in out
    assert "ended with status 5" in out
    assert run_script(tmp_path, "exit 0")[0] == 0


def test_second_start_resumes(tmp_path: Path) -> None:
    assert "train d --run r --auto-resume\n" in run_script(tmp_path, "echo $@", SLURM_RESTART_COUNT="1")[1]


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("state", ["RUNNING None", "SIGNALING None", "CONFIGURING None", "COMPLETING TimeLimit"])
def test_time_limit_requeues_the_job_whatever_its_state(tmp_path: Path, state: str, away: bool) -> None:
    status, out, requeued = run_script(tmp_path, WAITING, state=state, signals=[signal.SIGUSR1], away=away)
    assert (status, requeued) == (0, True)
    assert "asked to stop: the time limit is near" in out
    assert "returns to the queue" in out


def test_requeue_that_kills_its_own_process_is_recognised(tmp_path: Path) -> None:
    status, out, _ = run_script(tmp_path, WAITING, signals=[signal.SIGUSR1], KILLED="yes")
    assert status == 0
    assert "returns to the queue" in out
    assert (tmp_path / "requeued").read_text() == "7\n"


def test_job_whose_warning_was_lost_is_requeued_at_the_limit(tmp_path: Path) -> None:
    status, _, requeued = run_script(tmp_path, WAITING, state="COMPLETING TimeLimit", signals=[signal.SIGTERM])
    assert (status, requeued) == (0, True)


def test_command_that_does_not_stop_is_killed_and_requeued(tmp_path: Path) -> None:
    deaf = WAITING.replace("exit 143", ":")
    status, _, requeued = run_script(tmp_path, deaf, signals=[signal.SIGUSR1])
    assert (status, requeued) == (0, True)


def test_job_that_is_preempted_without_a_signal_is_requeued(tmp_path: Path) -> None:
    preempted = "   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=2026-01-01T00:00:00"
    status, _, requeued = run_script(tmp_path, "exit 4", JOB=preempted)
    assert (status, requeued) == (0, True)
    assert run_script(tmp_path, "exit 0", JOB=preempted)[2] is False


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGUSR1], [signal.SIGUSR1, signal.SIGTERM]])
def test_cancelled_job_is_not_requeued(tmp_path: Path, signals: list[signal.Signals], away: bool) -> None:
    driver = WAITING.replace("exit 143", "sleep 0.3; exit 143")
    status, _, requeued = run_script(tmp_path, driver, state="COMPLETING None", signals=signals, away=away)
    assert (status, requeued) == (143, False)


def test_failure_is_not_requeued_even_near_the_time_limit(tmp_path: Path) -> None:
    failing = WAITING.replace("exit 143", "exit 1")
    status, out, requeued = run_script(tmp_path, failing, signals=[signal.SIGUSR1])
    assert (status, requeued) == (1, False)
    assert "ended with status 1" in out


def test_script_alone_asked_to_stop_is_not_requeued(tmp_path: Path) -> None:
    status, _, requeued = run_script(tmp_path, WAITING, signals=[signal.SIGTERM])
    assert (status, requeued) == (143, False)


def test_job_with_no_requeues_left_is_not_requeued(tmp_path: Path) -> None:
    status, _, requeued = run_script(tmp_path, WAITING, signals=[signal.SIGUSR1], SLURM_RESTART_COUNT="100")
    assert (status, requeued) == (143, False)


def test_command_that_finishes_when_asked_to_stop_is_done(tmp_path: Path) -> None:
    finishing = WAITING.replace("exit 143", "exit 0")
    status, _, requeued = run_script(tmp_path, finishing, signals=[signal.SIGUSR1])
    assert (status, requeued) == (0, False)


# -- quoting -----------------------------------------------------------------------------------------------------------

HOSTILE = """it's a "set" $HOME `id` $(id) ; & | > \\ \\" ${x:-$(id)} * ~ #SBATCH {per_node} %j !\ttab é"""
STAND_IN = """#!/bin/bash
case "$3" in
  endpoint) echo 127.0.0.1 1 2 3;;
  *) printf '%s\\0' "$@" >> "$ARGUMENTS";;
esac
"""
"""Stand-in for Python that appends its arguments to a file."""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def collect_arguments(folder: Path, job: SlurmJob) -> list[str]:
    """Run the script of a job with stand-ins for SLURM; return the arguments of every process that it starts."""
    for name, text in (("python", STAND_IN), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    arguments = folder / "arguments"
    arguments.write_bytes(b"")
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "ARGUMENTS": str(arguments), "STATE": "RUNNING None", "JOB": ""}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "n", "SLURM_JOB_NODELIST": "node0", "SLURM_NODEID": "0"}
    environment |= {"SLURM_JOB_NUM_NODES": "1", "AWAY": "", "REQUEUED": "", "DISK": "/local disk"}
    command = ["bash", "-c", FAKE_SLURM + render_script(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return arguments.read_bytes().decode().split("\0")


def read_directives(text: str) -> list[str]:
    """Return the options that sbatch reads in a script, as its own parser does (`_get_argument` of sbatch)."""
    options = []
    for line in text.split("\n")[1:]:
        if not line.startswith("#"):
            break
        if not line.startswith("#SBATCH"):
            continue
        quote, option, characters = "", "", iter(line.removeprefix("#SBATCH").strip())
        for character in characters:
            if character == "\\":
                option += next(characters)
            elif quote and character == quote:
                quote = ""
            elif not quote and character in "'\"":
                quote = character
            else:
                assert quote or not (character.isspace() or character == "#"), line
                option += character
        options.append(option)
    return options


def test_torchrun_that_was_asked_to_stop_counts_as_stopped(tmp_path: Path) -> None:
    """torchrun itself ends with status 1 when its ranks stop."""
    programs = {
        "python": '#!/bin/bash\nif [ "$3" = endpoint ]; then echo 127.0.0.1 1 2 3; exit; fi\n'
        "trap 'exit 1' TERM; echo ready; while :; do sleep 0.05; done\n",
        "srun": SRUN.replace("exec", 'echo $$ > "$STEP"; exec'),
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    # As SLURM does, the signal goes to every process of the step.
    scancel = 'scancel() { read -r pid < "$STEP"; pkill -TERM -P "$pid"; kill -TERM "$pid"; }\n'
    job = SlurmJob(
        command=("train", "d", "--run", "r"),
        launcher="torchrun",
        python=str(tmp_path / "python"),
        output=str(tmp_path),
    )
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STEP": str(tmp_path / "step"), "STATE": "SIGNALING None"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "n", "SLURM_JOB_NODELIST": "node0", "SLURM_NODEID": "0"}
    environment |= {"SLURM_JOB_NUM_NODES": "1", "AWAY": "", "JOB": "", "KILLED": "", "REQUEUED": str(tmp_path / "q")}
    with subprocess.Popen(
        ["bash", "-c", FAKE_SLURM + scancel + render_script(job)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "ready" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGUSR1)
        out = process.stdout.read()
    assert process.returncode == 0, out
    assert (tmp_path / "q").exists()


@pytest.mark.parametrize("launcher", ["none", "torchrun", "ray"])
def test_hostile_words_arrive_unchanged(tmp_path: Path, launcher: str) -> None:
    words = ("train", HOSTILE, "--run", HOSTILE, f"description={HOSTILE}\ntouch /tmp/x\n#SBATCH --a")
    job = SlurmJob(
        command=words,
        launcher=launcher,
        run=HOSTILE,
        stage=HOSTILE,
        local_disk="$DISK/`id`$(id)${x:-$(id)}",
        python=str(tmp_path / "python"),
        output=str(tmp_path),
    )
    arguments = collect_arguments(tmp_path, job)
    start = arguments.index("train")
    assert tuple(arguments[start : start + len(words)]) == words
    disk = f"/local disk/`id`$(id)${{x:-$(id)}}/voxlane-{getpass.getuser()}"
    stage = arguments.index("stage")
    assert arguments[stage + 1 : stage + 3] == [HOSTILE, disk]
    assert f"loader.staged={disk}" in arguments


_WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
_LINES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]) | st.just("\t"), max_size=20)
_NAMES = _LINES.map(lambda text: re.sub(r"[\s'\"/\\]", "", text)).filter(bool)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(_WORDS, min_size=1, max_size=4), setting=_LINES)
def test_every_word_of_a_command_arrives_as_data(tmp_path: Path, words: list[str], setting: str) -> None:
    words = ["predict", *words]
    job = SlurmJob(
        command=words,
        launcher="none",
        run=setting,
        python=str(tmp_path / "python"),
        output=str(tmp_path),
        setup=["printf '%s\\0' " + shlex.quote(setting) + ' >> "$ARGUMENTS"'],
    )
    assert collect_arguments(tmp_path, job) == [setting, "-m", "voxlane", *words, ""]


@given(run=_LINES, name=_NAMES, account=_NAMES, partition=_NAMES, constraint=_NAMES, output=_LINES, extra=_LINES)
def test_directives_hold_values_as_data(
    run: str, name: str, account: str, partition: str, constraint: str, output: str, extra: str
) -> None:
    output = "/" + output.replace("\\", "")
    options = {"run": run, "name": name, "account": account, "partition": partition, "constraint": constraint}
    text = render_script(make_job(**options, output=output, sbatch=(f"--mail-user={extra}",)))
    expected = {
        f"--job-name={name}",
        f"--comment=voxlane:train:{run}",
        f"--account={account}",
        f"--partition={partition}",
        f"--constraint={constraint}",
        f"--output={output.rstrip('/')}/{name}-".replace("%", "%%") + "%j.log",
        f"--mail-user={extra}",
    }
    directives = read_directives(text)
    assert expected <= set(directives)
    assert len(directives) == len(parse_directives(render_script(make_job()))) + 4


@pytest.mark.parametrize("action", ["render", "submit"])
def test_line_break_in_the_run_is_refused(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", action, "--", "train", "gs://b/d", "--run", "gs://b/r\ntouch /tmp/x"]) == 1
    error = capsys.readouterr().err
    assert "run: 'gs://b/r\\ntouch /tmp/x' contains a line break" in error
    assert len(error.splitlines()) == 1


# -- messages ----------------------------------------------------------------------------------------------------------


def test_comment_of_a_job_round_trips() -> None:
    assert parse_comment(format_comment("train", "gs://b/run:1")) == ("train", "gs://b/run:1")
    assert parse_comment("somebody else's") is None


def queue_line(**changes: str) -> str:
    cells = {"i": "12", "j": "voxlane-train", "T": "PENDING", "r": "Resources", "D": "4", "N": "", "M": "0:00"}
    cells |= {"l": "20:00", "S": "2026-01-01T10:00:00", "k": "voxlane:train:/r", "P": "main", **changes}
    return "\x1f".join(cells.values())


def test_parse_queue() -> None:
    (status,) = parse_queue(queue_line() + "\nnonsense\n")
    assert status == JobStatus(
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
    assert status.voxlane_command == ("train", "/r")
    cancelled = parse_queue(queue_line(T="CANCELLED by 1000", k="(null)", S="Unknown", r="None"))[0]
    assert cancelled.has_ended
    assert cancelled.voxlane_command is None
    assert (cancelled.start, cancelled.reason) == ("", "")


@pytest.mark.parametrize(
    ("reason", "explanation"),
    [
        ("Resources", "4 nodes with the requested resources are not free"),
        ("(Priority)", "jobs with a higher priority are ahead of it in the queue"),
        ("PartitionTimeLimit", "more time than partition main allows"),
        ("QOSMaxJobsPerUserLimit", "it would exceed a limit of its quality of service (QOSMaxJobsPerUserLimit)"),
        ("AssocGrpCPUMinutesLimit", "it would exceed a limit of your account"),
        ("JobHeldUser", "release it with `scontrol release 12`"),
        ("SomethingNew", "SomethingNew"),
        ("None", "SLURM has not considered it yet"),
    ],
)
def test_reasons_for_waiting_are_explained(reason: str, explanation: str) -> None:
    assert explanation in explain_wait(parse_queue(queue_line(r=reason))[0])


def test_status_lines_of_a_job() -> None:
    assert format_job(parse_queue(queue_line())[0], "not begun") == [
        "12  voxlane-train  PENDING  4 nodes  0:00 of 20:00",
        "    waits: 4 nodes with the requested resources are not free; expected to start 2026-01-01 10:00:00",
        "    train /r: not begun",
    ]
    failed = parse_queue(queue_line(T="FAILED", r="NonZeroExitCode", N="node[0-3]"))[0]
    assert "    because: NonZeroExitCode" in format_job(failed, "")


@pytest.mark.parametrize(
    ("stderr", "explanation"),
    [
        ("Invalid partition name specified", "partition 'x' does not exist. Choose from: cpu, gpu"),
        ("Requested node configuration is not available", "no partition has 2 nodes with 99 CPUs each"),
        ("Invalid account or account/partition combination specified", "you may not use account 'a'"),
        ("Unable to contact slurm controller (connect failure)", "its controller does not answer"),
        ("Something else", "SLURM rejects the job: Batch job submission failed: Something else"),
        ("", "it gave no reason"),
    ],
)
def test_rejections_are_explained(stderr: str, explanation: str) -> None:
    job = make_job(partition="x", account="a", nodes=2, cpus_per_node=99)
    output = f"sbatch: error: Batch job submission failed: {stderr}\n" if stderr else ""
    assert explanation in str(explain_refusal(output, job, ["cpu", "gpu"]))


@pytest.mark.parametrize(
    "command",
    [
        ["train", "data", "--run", "run", "store.endpoint=http://host:1"],
        ["train", "data", "--run", "run", "--endpoint", "http://host:1"],
        ["bench", "scaling", "--run", "run", "--endpoint", "http://host:1"],
    ],
)
def test_status_reaches_the_bucket_as_the_command_does(command: list[str]) -> None:
    assert store_of(command).endpoint == "http://host:1"


def test_progress_of_a_run() -> None:
    entry = {"epoch": 2, "loss": 0.5, "mean_dice": None}
    assert describe_training(None, None) == "not begun"
    assert describe_training({"config": {"epochs": 9}}, []) == "epoch 0 of 9"
    assert (
        describe_training({"config": {"epochs": 9}}, [{**entry, "mean_dice": 0.7}, entry])
        == "epoch 3 of 9, loss 0.500, Dice 0.700"
    )
    assert describe_search(None) == "not begun"
    search = {"trials": [{"state": "done", "dice": 0.5}, {"state": "running", "dice": None}]}
    assert describe_search(search) == "2 trials (1 done, 1 running); best Dice 0.500"


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "data", "--run=runs/a", "--config", "c.yaml", "epochs=1", "gs://b/x"]
    absolute = make_absolute(words, {"data", "runs/a", "c.yaml", "gs://b/x"})
    folder = str(tmp_path)
    assert absolute == [
        "train",
        f"{folder}/data",
        f"--run={folder}/runs/a",
        "--config",
        f"{folder}/c.yaml",
        "epochs=1",
        "gs://b/x",
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("init_from=runs/a", "init_from={folder}/runs/a"),
        ("init_from=null", "init_from=null"),
        ("init_from=gs://b/r", "init_from=gs://b/r"),
        ("init_from.choice=[null, runs/a]", "init_from.choice=[null,{folder}/runs/a]"),
        ("loader.staged=/scratch", "loader.staged=/scratch"),
    ],
)
def test_relative_paths_in_fields_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_override_absolute(word) == expected.format(folder=tmp_path)
    job, _ = SlurmRenderCommand(command=("train", "data", "--run", "r", word))._make_job()
    assert job.command[-1] == expected.format(folder=tmp_path)


def test_hosts_are_compared_without_their_domains() -> None:
    assert find_missing_hosts(["node0", "node1.lab"], ["node0.lab", "node1", "other"]) == []
    assert find_missing_hosts(["node0", "node1"], ["node0"]) == ["node1"]


def test_ports_in_use_are_skipped() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
        address, ports = find_endpoint(port)
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
    ("arguments", "message"),
    [
        (["--", "slurm", "status"], "`voxlane slurm` cannot run as a job"),
        (["--nodes", "2", "--", "evaluate", "r"], "runs on one node"),
        (
            ["--stage", "--local-disk", "/x", "--", "evaluate", "r"],
            "--stage: `voxlane evaluate` has no prepared dataset",
        ),
        (["--stage", "--", "train", "d", "--run", "r"], "give --local-disk"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "render", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_wrong_command_is_rejected_before_it_is_queued(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "submit", "--", "train", "d", "--run", "r", "--epochs", "3"]) == 2
    assert "voxlane train: unknown option --epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train d --run r optimizer.learning_rate=1", "`voxlane train` has no such field. Did you mean optimizer.lr?"),
        ("train d --run r store.endpont=x", "Did you mean store.endpoint?"),
        ("tune s d --run r tune.trails=3", "tune.trails: `voxlane tune` has no such field. Did you mean tune.trials?"),
        ("tune s d --run r epoch={int:[1,2]}", "Did you mean epochs?"),
        ("evaluate r predict.miror=true", "Did you mean predict.mirror?"),
        ("prepare s d bad_case=exclude", "Did you mean bad_cases?"),
        ("predict r scan zzz=1 -o masks", "`voxlane predict --fields` lists them"),
    ],
)
def test_misspelt_field_is_rejected_with_a_suggestion(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in (["render"], ["submit", "--no-check"]):
        assert main(["slurm", *action, "--", *command.split()]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        "train d --run lrr=1 optimizer.lr=0.1 optimizer={lr:0.1} preset=small store.endpoint=x store.retry={}",
        "tune s d --run r tune.trials=3 optimizer.lr.uniform=[0,1] augment.choice=[{strength:1}] tune={trials:3}",
        "prepare s d description.regions.WT=[1,2]",
        "evaluate r predict.mirror=true",
        "ls name=value",
        "bench step",
    ],
)
def test_correct_fields_are_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "render", "--", *command.split()]) == 0
    assert "words=(" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["render", "submit"])
def test_help_does_not_show_the_path_of_the_interpreter(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", action, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Python interpreter on the job's nodes (default: the one that runs this command)." in text
    assert sys.executable not in text


@pytest.mark.parametrize("arguments", [["status"], ["logs", "1"], ["cancel", "1"]])
def test_machine_without_slurm(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["slurm", *arguments]) == 1
    assert "is not installed: this machine does not belong to a SLURM cluster" in capsys.readouterr().err
