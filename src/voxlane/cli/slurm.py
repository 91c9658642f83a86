"""`voxlane slurm`: commands as jobs of a SLURM cluster."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from voxlane.errors import ClusterError, ConfigError, VoxlaneError

if TYPE_CHECKING:
    from voxlane.launch.slurm import Known
    from voxlane.launch.slurm_script import Job
    from voxlane.store import StoreConfig

Commands = argparse._SubParsersAction
_POLL_S = 1.0

_SLURM = """\
Run voxlane commands as SLURM jobs. A job of several nodes gets a Ray cluster of its own (or torchrun), which ends with
it; when it is preempted, loses a node or comes to its time limit, it goes back to the queue and goes on from its last
checkpoint."""

_SUBMIT = """\
Submit a voxlane command as a job. What stands after -- is the command, without `voxlane`.

Under Ray, train gets a worker for every GPU (or node) unless --workers says otherwise, tune runs its trials on all
nodes, and bench loading loads by a rank for every GPU (or node). Paths must be on disks that the nodes share; buckets
need nothing."""

_RENDER = _SUBMIT.replace("Submit a voxlane command as a job.", "Print the batch script of a voxlane command's job.")

_EXAMPLES = """\
examples:
  voxlane slurm submit --nodes 2 --gpus-per-node 4 --cpus-per-node 32 --time 12:00:00 -- \\
      train gs://work/kits19 --run gs://work/runs/a epochs=500
  voxlane slurm submit --nodes 4 --gpus-per-node 8 --partition gpu -- tune space.yaml gs://work/kits19 --run gs://work/search
  voxlane slurm submit --launcher torchrun --nodes 2 --gpus-per-node 4 -- train prepared --run runs/a
  voxlane slurm submit --nodes 2 --stage --local-disk '$TMPDIR' -- train /shared/kits19 --run /shared/runs/a
  voxlane slurm submit --nodes 8 --workers-per-node 4 -- bench loading gs://work/kits19 --out gs://work/bench/loading.json
  voxlane slurm render --nodes 2 -- train prepared --run runs/a > job.sh"""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "slurm", help="run commands as SLURM jobs", description=_SLURM, epilog=_EXAMPLES, formatter_class=raw
    )

    def show(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=show)
    inner = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, run, words in (("submit", _submit, "submit a job"), ("render", _render, "print a job's batch script")):
        described = _SUBMIT if name == "submit" else _RENDER
        one = inner.add_parser(name, help=words, description=described, epilog=_EXAMPLES, formatter_class=raw)
        _add_job(one)
        if name == "submit":
            one.add_argument("--follow", action="store_true", help="then print its log until it ends, and its status")
            one.add_argument("--no-check", action="store_true", help="do not look at dataset and config before")
        one.set_defaults(run=run)
    status = inner.add_parser("status", help="your jobs: state, why they wait, how far they are")
    status.add_argument("jobs", metavar="JOB", nargs="*", type=_number, help="job numbers (default: all of yours)")
    status.set_defaults(run=_status)
    logs = inner.add_parser("logs", help="print a job's log")
    logs.add_argument("job", metavar="JOB", type=_number, help="job number")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    logs.set_defaults(run=_logs)
    cancel = inner.add_parser("cancel", help="cancel jobs; what they saved is kept")
    cancel.add_argument("jobs", metavar="JOB", nargs="+", type=_number, help="job numbers")
    cancel.set_defaults(run=_cancel)


def _number(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is no job number")
    return int(text)


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", metavar="N", type=int, default=1, help="machines (default 1)")
    add("--cpus-per-node", metavar="N", type=int, help="cores on each")
    add("--gpus-per-node", metavar="N", type=int, default=0, help="GPUs on each (default 0)")
    add("--workers-per-node", metavar="N", type=int, help="ranks on each (default: one a GPU, or one)")
    add("--mem", metavar="SIZE", help="memory of each node, such as 64G")
    add(
        "--time", metavar="LIMIT", help="time limit: minutes, 12:00:00, 2-12; the job goes on after it in another start"
    )
    add("--partition", metavar="NAME", help="the cluster's partition")
    add("--account", metavar="NAME", help="account to charge")
    add("--qos", metavar="NAME", help="quality of service")
    add("--constraint", metavar="FEATURES", help="features that nodes must have")
    add("--name", metavar="NAME", help="the job's name (default voxlane-train and such)")
    add("--output", metavar="DIR", default=".", help="folder for logs, on a shared disk (default: here)")
    add("--launcher", choices=("ray", "torchrun"), help="how ranks of several nodes come to be (default ray)")
    add("--stage", action="store_true", help="copy the command's dataset to each node's own disk first")
    add("--local-disk", metavar="DIR", help="where that is; may name variables of the job, such as '$TMPDIR'")
    add("--setup", metavar="LINE", action="append", default=[], help="shell before it all, such as 'module load cuda'")
    add("--sbatch", metavar="OPTION", action="append", default=[], help="one more option for sbatch, as --sbatch=--X=Y")
    add("--requeues", metavar="N", type=int, default=100, help="starts after the first, at most (default 100; 0: none)")
    add("--grace", metavar="SECONDS", type=int, default=60, help="warning before the time limit (default 60)")
    add("--start-timeout", metavar="SECONDS", type=int, default=300, help="for the nodes to join (default 300)")
    add("--python", metavar="PATH", default=sys.executable, help="interpreter on the nodes (default: this one)")
    add("command", metavar="-- COMMAND ...", nargs=argparse.REMAINDER, help="a voxlane command")


# -- submit, render ----------------------------------------------------------------------------------------------------


def _job(options: argparse.Namespace) -> tuple[Job, argparse.Namespace]:
    """The job that the options ask for, and the command's own options."""
    from voxlane import settings
    from voxlane.launch import parallel
    from voxlane.launch.slurm_script import Job

    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        raise ConfigError("no command was given", fix="Write it after --, such as: -- train DATA --run RUN")
    if words[0] == "voxlane":
        words = words[1:]
    if words[0] in ("slurm", "emulator"):
        raise ConfigError(f"`voxlane {words[0]}` is no command for a job")
    inner = _parsed(words)
    launcher = options.launcher or parallel.launcher(words, options.nodes)
    data = _data(inner)
    if options.stage and not data:
        raise ConfigError(f"--stage: `voxlane {parallel.title(words)}` has no prepared dataset to copy")
    asked = {
        name: getattr(options, name)
        for name in Job.__dataclass_fields__
        if hasattr(options, name) and name not in ("command", "launcher", "output", "run", "stage")
    }
    job = settings.build(
        Job,
        {
            **asked,
            "command": absolute(words, _paths(inner)),
            "launcher": launcher,
            "output": os.path.abspath(options.output),
            "run": _absolute(getattr(inner, "run_uri", None) or ""),
            "stage": _absolute(data) if options.stage else None,
            "grace_s": options.grace,
            "start_s": options.start_timeout,
        },
    )
    return job, inner


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options of a voxlane command; a wrong one ends here, with that command's usage, and not hours later."""
    from voxlane.cli.main import parse

    return parse(words)


def _data(inner: argparse.Namespace) -> str:
    """The prepared dataset of train and tune; it is the last word that is no field=value."""
    from voxlane.cli.segmentation import _words

    if not hasattr(inner, "data") or not hasattr(inner, "overrides"):
        return ""
    first = [inner.space] if hasattr(inner, "space") else []
    names = ["SPACE", "DATA"] if first else ["DATA"]
    return _words([*first, inner.data, *inner.overrides], *names)[0][-1]


def _paths(inner: argparse.Namespace) -> set[str]:
    """The words of the command that may be relative paths."""
    names = ["data", "run_uri", "config", "space", "src", "dst", "out", "uri"]
    names += ["manifest", "cache_dir", "dir", "restore", "mount"]  # of bench
    words = [getattr(inner, name, None) for name in names]
    words += [word for name in ("overrides", "words") for word in getattr(inner, name, [])]
    return {word for word in words if isinstance(word, str) and not re.match(r"^[A-Za-z_][\w.]*=", word)}


def absolute(words: Sequence[str], paths: set[str]) -> list[str]:
    """The command with its relative paths made whole, because not all that runs it has this working folder."""
    made = []
    for word in words:
        option, equals, value = word.partition("=")
        if word in paths:
            made.append(_absolute(word))
        elif option.startswith("--") and equals and value in paths:
            made.append(f"{option}={_absolute(value)}")
        else:
            made.append(word)
    return made


def _absolute(path: str) -> str:
    return path if not path or "://" in path else os.path.abspath(path)


def _render(options: argparse.Namespace) -> int:
    from voxlane.launch.slurm_script import script

    job, _ = _job(options)
    sys.stdout.write(script(job))
    return 0


def _submit(options: argparse.Namespace) -> int:
    from voxlane.launch import slurm

    job, inner = _job(options)
    if not options.no_check:
        _check(job, inner)
    record = slurm.submit(job)
    print(f"job {record.id}: {record.name}, {job.nodes} node{'s' * (job.nodes > 1)}, log {record.log}")
    if options.follow:
        return _follow(record.id)
    print(
        f"next: voxlane slurm status {record.id}; voxlane slurm logs -f {record.id}; voxlane slurm cancel {record.id}"
    )
    return 0


def _check(job: Job, inner: argparse.Namespace) -> None:
    """Raise now for what the job would raise after its time in the queue."""
    if job.command[0] != "train":
        return
    from voxlane.cli.segmentation import _OVERRIDE, _said
    from voxlane.errors import RunError
    from voxlane.train.fit import checked
    from voxlane.train.run import Run
    from voxlane.volume.prepared import Prepared

    said, store = _said(inner, [word for word in [inner.data, *inner.overrides] if _OVERRIDE.match(word)])
    begun = inner.folds is None and Run(inner.run_uri, store).begun
    if begun and not (inner.resume or inner.auto_resume):
        raise RunError(
            "a run is here already", uri=inner.run_uri, fix="Go on with it (--resume), or choose another --run"
        )
    if not begun:
        checked(Prepared.load(_data(inner), store), said, getattr(inner, "workers", None) or job.nodes * job.per_node)


# -- status, logs, cancel ----------------------------------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    from voxlane.launch import slurm

    found = slurm.jobs(options.jobs)
    if not options.jobs:
        found = [job for job in found if job.ours is not None]
        if not found:
            print("no jobs of yours that voxlane submitted are known to SLURM")
            return 0
    by_id = {job.id: job for job in found}
    for number in options.jobs or [job.id for job in found]:
        if number in by_id:
            print("\n".join(lines(by_id[number], _progress(by_id[number]))))
        elif (kept := slurm.record(number)) is not None:
            print(f"{number}  {kept.name}  ended; SLURM has forgotten it\n    log: {kept.log}")
        else:
            raise slurm.unknown(number)
    return 0


def lines(job: Known, progress: str) -> list[str]:
    """What is said of a job."""
    from voxlane.launch.slurm import why_waiting

    where = job.hosts or f"{job.nodes} node{'s' * (job.nodes != 1)}"
    said = [f"{job.id}  {job.name}  {job.state}  {where}  {job.used} of {job.limit}"]
    if job.state == "PENDING":
        start = f"; expected to start {job.start.replace('T', ' ')}" if job.start else ""
        said.append(f"    waits: {why_waiting(job)}{start}")
    elif job.state not in ("RUNNING", "COMPLETED") and job.reason:
        said.append(f"    because: {job.reason}")
    if job.ours is not None:
        said.append(f"    {job.ours[0]} {job.ours[1]}".rstrip() + (f": {progress}" if progress else ""))
    return said


def _progress(job: Known) -> str:
    """How far a job's run is, as the run's folder says."""
    from voxlane.launch import slurm

    kept, ours = slurm.record(job.id), job.ours
    if ours is None or not ours[1]:
        return ""
    from voxlane.train.run import Run

    try:
        run = Run(ours[1], _store(kept.command) if kept is not None else None)
        if ours[0] == "tune":
            return tuned(run.read_json("tune.json"))
        return trained(run.read_json("run.json"), run.read_json("history.json"))
    except VoxlaneError as error:
        return str(error)


def _store(command: Sequence[str]) -> StoreConfig:
    """How a command reaches its buckets."""
    from voxlane.cli.segmentation import _said

    inner = _parsed(command)
    return _said(inner, [word for word in getattr(inner, inner.rest) if word.startswith("store.")])[1]


def trained(facts: Any, history: Any) -> str:
    """How far a training run is, from its files' content; None: not there."""
    if not isinstance(facts, dict):
        return "not begun"
    epochs = facts.get("config", {}).get("epochs")
    if not history:
        return f"epoch 0 of {epochs}"
    last = history[-1]
    dice = next((e["mean_dice"] for e in reversed(history) if e.get("mean_dice") is not None), None)
    scored = f", Dice {dice:.3f}" if dice is not None else ""
    return f"epoch {last['epoch'] + 1} of {epochs}, loss {last['loss']:.3f}{scored}"


def tuned(search: Any) -> str:
    """How far a search is, from its file's content; None: not there."""
    if not isinstance(search, dict):
        return "not begun"
    states = [trial.get("state") for trial in search.get("trials", [])]
    scores = [trial["dice"] for trial in search.get("trials", []) if trial.get("dice") is not None]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    best = f"; best Dice {max(scores):.3f}" if scores else ""
    return f"{len(states)} trials ({counts}){best}" if states else "no trials yet"


def _logs(options: argparse.Namespace) -> int:
    from voxlane.launch import slurm

    if options.follow:
        return _follow(options.job)
    path = slurm.log_of(options.job)
    if not os.path.exists(path):
        raise ClusterError(f"job {options.job} has written no log yet", uri=path, fix="--follow waits for it")
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            sys.stdout.write(line)
    return 0


def _follow(number: int) -> int:
    """Print a job's log as it grows, until the job has ended; returns the job's status."""
    from voxlane.launch import slurm

    path = slurm.log_of(number)
    for text in _growing(path, lambda: _state_line(number)):
        sys.stdout.write(text)
        sys.stdout.flush()
    found = slurm.jobs([number])
    if found and found[0].state not in ("COMPLETED", "COMPLETING"):
        print(f"voxlane: job {number} ended: {found[0].state}", file=sys.stderr)
        return slurm.exit_status(number) or 1
    return 0


def _state_line(number: int) -> tuple[bool, str]:
    """Whether a job has ended, and what to say while it waits."""
    from voxlane.launch import slurm

    found = slurm.jobs([number])
    if not found:
        return True, ""
    job = found[0]
    waits = f"job {number} waits: {slurm.why_waiting(job)}" if job.state == "PENDING" else ""
    return job.ended, waits


def _growing(path: str, state: Any) -> Iterator[str]:
    """What is in a file and what is added to it until the job has ended; a line whenever why it waits changes."""
    place, told = 0, ""
    while True:
        ended, waits = state()
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                file.seek(place)
                text = file.read()
                place = file.tell()
            if text:
                yield text
        if waits and waits != told:
            yield f"{waits}\n"
        told = waits
        if ended:
            return
        time.sleep(_POLL_S)


def _cancel(options: argparse.Namespace) -> int:
    from voxlane.launch import slurm

    before = {job.id: job for job in slurm.jobs(options.jobs)}
    for number in options.jobs:
        if number not in before:
            raise slurm.unknown(number)
        if before[number].ended:
            print(f"job {number} had ended: {before[number].state}")
            continue
        slurm.cancel(number)
        print(f"job {number}: cancelled; what it saved is kept, and submitting it again with --resume goes on")
    return 0
