"""`voxlane slurm`: commands as jobs of a SLURM cluster."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from voxlane.cli.config_options import StoreFileOptions, StoreOptions, check_no_secrets
from voxlane.cli.segmentation import TrainCommand
from voxlane.cluster import commands as parallel
from voxlane.cluster.slurm import jobs as slurm
from voxlane.cluster.slurm.jobs import JobStatus
from voxlane.cluster.slurm.script import JobOptions, SlurmJob, render_script
from voxlane.errors import ClusterError, ConfigError, VoxlaneError
from voxlane.settings import (
    REMAINDER,
    Flag,
    build,
    format_value,
    iterate_fields,
    make_paths_absolute,
    record,
    set_dotted,
    suggest_field,
)

if TYPE_CHECKING:
    from voxlane.store import StoreConfig

_POLL_S = 1.0

_EXAMPLES = """\
Examples:
  voxlane slurm submit --nodes 2 --gpus-per-node 4 --cpus-per-node 32 --time 12:00:00 -- \\
      train gs://work/kits19 --run gs://work/runs/a epochs=500
  voxlane slurm submit --nodes 4 --gpus-per-node 8 --partition gpu -- tune space.yaml gs://work/kits19 --run gs://work/search
  voxlane slurm submit --launcher torchrun --nodes 2 --gpus-per-node 4 -- train prepared --run runs/a
  voxlane slurm submit --nodes 2 --stage --local-disk '$TMPDIR' -- train /shared/kits19 --run /shared/runs/a
  voxlane slurm submit --nodes 8 --workers-per-node 4 -- bench loading gs://work/kits19 --out gs://work/bench/loading.json
  voxlane slurm render --nodes 2 -- train prepared --run runs/a > job.sh
"""

HELP = f"""\
Run voxlane commands as SLURM jobs. A job of several nodes starts its own Ray cluster, or torchrun. A job that is
preempted, loses a node or reaches its time limit returns to the queue and continues from its last checkpoint.

{_EXAMPLES}"""

_DETAILS = f"""
The words after -- are the command, without `voxlane`.

With Ray, train gets one worker per GPU (or per node without GPUs) unless --workers is given, bench loading gets one
rank per GPU (or node), and tune runs its trials on all nodes. Local paths must be on disks that the nodes share.

{_EXAMPLES}"""


# -- submit, render ----------------------------------------------------------------------------------------------------


@record
class SlurmRenderCommand(JobOptions):
    """Print the batch script of a voxlane command's job."""

    launcher: Literal["ray", "torchrun"] | None = None
    """Launcher of the ranks on several nodes (default: ray)."""
    stage: bool = False
    """Copy the command's dataset to each node's own disk first."""
    command: Annotated[tuple[str, ...], REMAINDER]
    """The voxlane command to run."""

    def _run(self) -> int:
        sys.stdout.write(render_script(self._make_job()[0]))
        return 0

    def _make_job(self) -> tuple[SlurmJob, Any]:
        """Return the job that the options describe, and the command that it runs."""
        from voxlane.cli.flags import paths_of
        from voxlane.cli.main import parse

        words = list(self.command)
        if words[:1] == ["voxlane"]:
            words = words[1:]
        if words[:1] in (["slurm"], ["emulator"]):
            raise ConfigError(f"`voxlane {words[0]}` cannot run as a job")
        check_no_secrets([*words, *self.setup, *self.sbatch], "a batch script, which SLURM stores and shows,")
        command = parse(words)  # a mistake ends the command now, and not hours later in the job
        name = parallel.command_name(words)
        _check_field_names(name, command)
        if self.stage and name not in ("train", "tune"):
            raise ConfigError(f"--stage: `voxlane {name}` has no prepared dataset to copy")
        overrides = getattr(command, "overrides", ())
        words = [make_override_absolute(word) if word in overrides else word for word in words]
        job_values = {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(JobOptions)},
            "command": make_absolute(words, paths_of(command)),
            "launcher": self.launcher or parallel.default_launcher(words, self.nodes),
            "output": os.path.abspath(self.output),
            "run": _absolute_path(getattr(command, "run", None) or ""),
            "stage": _absolute_path(command.data) if self.stage else None,
        }
        return build(SlurmJob, job_values), command


@record
class SlurmSubmitCommand(SlurmRenderCommand):
    """Submit a voxlane command as a job."""

    follow: bool = False
    """Print the job's log until it ends, and exit with its status."""
    no_check: bool = False
    """Do not check the dataset and config before submitting."""

    def _run(self) -> int:
        job, command = self._make_job()
        if not self.no_check and isinstance(command, TrainCommand):
            _check_training(job, command)
        submitted = slurm.submit(job)
        number = submitted.id
        print(f"job {number}: {submitted.name}, {job.nodes} node{'s' * (job.nodes > 1)}, log {submitted.log}")
        if self.follow:
            return _follow_log(number)
        print(f"next: voxlane slurm status {number}; voxlane slurm logs -f {number}; voxlane slurm cancel {number}")
        return 0


SlurmRenderCommand.__doc__ = f"{SlurmRenderCommand.__doc__}\n{_DETAILS}"
SlurmSubmitCommand.__doc__ = f"{SlurmSubmitCommand.__doc__}\n{_DETAILS}"


def _check_field_names(command_name: str, command: Any) -> None:
    """Raise ConfigError for a field=value whose field the command does not have."""
    overrides = getattr(command, "overrides", None)
    if not overrides:
        return
    from voxlane.store import StoreConfig
    from voxlane.train.config import TrainConfig

    shared = iterate_fields(StoreConfig, "store.")
    if command_name == "tune":  # SPACE holds the fields of train, and perhaps a record of them as a distribution
        shared = iterate_fields(TrainConfig)
        overrides = [re.sub(r"\.(choice|grid)=", "=", override) for override in overrides]
    own = iterate_fields(resolve_name(command.config_class))
    fields = [name for name, _, _ in itertools.chain(own, shared)]
    for name in (override.partition("=")[0] for override in overrides):
        if not any(f"{field}.".startswith(f"{name}.") or name.startswith(f"{field}.") for field in fields):
            nearest = suggest_field(name, fields)
            fix = f"Did you mean {nearest}?" if nearest else f"`voxlane {command_name} --fields` lists them"
            raise ConfigError(f"{name}: `voxlane {command_name}` has no such field", fix=fix)


def make_absolute(words: Sequence[str], paths: Collection[str]) -> list[str]:
    """Return the command with its local paths made absolute, because the job may have another working folder."""

    def make_word_absolute(word: str) -> str:
        option, _, value = word.partition("=")
        if word not in paths and option.startswith("--") and value in paths:
            return f"{option}={_absolute_path(value)}"
        return _absolute_path(word) if word in paths else word

    return list(map(make_word_absolute, words))


def make_override_absolute(word: str) -> str:
    """Return a `field=value` with the local paths in it made absolute, such as those of init_from."""
    from voxlane.train.config import TrainConfig

    values: dict[str, Any] = {}
    set_dotted(values, word)
    absolute: Any = make_paths_absolute(TrainConfig, values)
    if absolute == values:
        return word
    name = word.partition("=")[0]
    for part in name.strip().split("."):
        absolute = absolute[part]
    return f"{name}={format_value(tuple(absolute) if isinstance(absolute, list) else absolute)}"


def _absolute_path(path: str) -> str:
    return path if not path or "://" in path else os.path.abspath(path)


def _check_training(job: SlurmJob, command: TrainCommand) -> None:
    """Raise the errors of a training now that its job would raise after its time in the queue."""
    from voxlane.train.run import Run
    from voxlane.train.run_setup import check_config
    from voxlane.volume.prepared_dataset import Prepared

    values, store = command.load(command.overrides)
    run = Run(command.run, store)
    exists = command.folds is None and run.exists
    if exists and not (command.resume or command.auto_resume):
        raise run.already_exists_error()
    data = command.dataset
    if not exists and data is not None:
        check_config(Prepared.load(data, store), values, command.workers or job.nodes * job.per_node)


# -- status, logs, cancel ----------------------------------------------------------------------------------------------

JobNumber = Annotated[int, pydantic.Field(gt=0, lt=1 << 32)]


@record
class SlurmStatusCommand:
    """Show your jobs: state, reason for waiting, progress."""

    jobs: Annotated[tuple[JobNumber, ...], Flag(positional=True, metavar="JOB")] = ()
    """Number of a job (default: all your jobs)."""

    def _run(self) -> None:
        listed = slurm.list_jobs(self.jobs)
        if not self.jobs:
            listed = [job for job in listed if job.voxlane_command is not None]
            if not listed:
                print("SLURM knows no jobs of yours that voxlane submitted")
                return
        by_id = {job.id: job for job in listed}
        for number in self.jobs or [job.id for job in listed]:
            if number in by_id:
                print("\n".join(format_job(by_id[number], _read_progress(by_id[number]))))
            elif (submitted := slurm.read_record(number)) is not None:
                print(f"{number}  {submitted.name}  ended; SLURM has forgotten it\n    log: {submitted.log}")
            else:
                raise slurm.unknown_job_error(number)


def format_job(job: JobStatus, progress: str) -> list[str]:
    """Return the lines of `voxlane slurm status` about a job."""
    hosts = job.hosts or f"{job.nodes} node{'s' * (job.nodes != 1)}"
    lines = [f"{job.id}  {job.name}  {job.state}  {hosts}  {job.elapsed} of {job.limit}"]
    if job.state == "PENDING":
        start = f"; expected to start {job.start.replace('T', ' ')}" if job.start else ""
        lines.append(f"    waits: {slurm.explain_wait(job)}{start}")
    elif job.state not in ("RUNNING", "COMPLETED") and job.reason:
        lines.append(f"    because: {job.reason}")
    if job.voxlane_command is not None:
        lines.append(f"    {' '.join(job.voxlane_command)}".rstrip() + (f": {progress}" if progress else ""))
    return lines


def _read_progress(job: JobStatus) -> str:
    """Return the progress of a job's run, from the files of the run."""
    command, uri = job.voxlane_command or ("", "")
    if not uri:
        return ""
    from voxlane.train.run import Run

    submitted = slurm.read_record(job.id)
    try:
        run = Run(uri, store_of(submitted.command) if submitted is not None else None)
        if command == "tune":
            return describe_search(run.read_json("tune.json"))
        return describe_training(run.read_json("run.json"), run.read_json("history.json"))
    except VoxlaneError as error:
        return str(error)


def store_of(command: Sequence[str]) -> StoreConfig:
    """Return how a command reaches its buckets."""
    from voxlane.cli.main import parse

    options: StoreOptions = parse(command)
    if not isinstance(options, StoreFileOptions):  # a benchmark: no overrides of its store
        return options.store_config()
    return options.load([word for word in getattr(options, "overrides", ()) if word.startswith("store.")])[1]


def describe_training(facts: Any, history: Any) -> str:
    """Return the progress of a training run from the content of its files, None where a file does not exist."""
    if not isinstance(facts, dict):
        return "not begun"
    epochs = facts.get("config", {}).get("epochs")
    if not history:
        return f"epoch 0 of {epochs}"
    last = history[-1]
    dice = next((epoch["mean_dice"] for epoch in reversed(history) if epoch.get("mean_dice") is not None), None)
    score = f", Dice {dice:.3f}" if dice is not None else ""
    return f"epoch {last['epoch'] + 1} of {epochs}, loss {last['loss']:.3f}{score}"


def describe_search(search: Any) -> str:
    """Return the progress of a search from the content of its file, None where it does not exist."""
    if not isinstance(search, dict):
        return "not begun"
    states = [trial.get("state") for trial in search.get("trials", [])]
    scores = [trial["dice"] for trial in search.get("trials", []) if trial.get("dice") is not None]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    best = f"; best Dice {max(scores):.3f}" if scores else ""
    return f"{len(states)} trials ({counts}){best}" if states else "no trials yet"


@record
class SlurmLogsCommand:
    """Print the log of a job."""

    job: Annotated[JobNumber, Flag(positional=True)]
    """Number of the job."""
    follow: Annotated[bool, Flag("-f")] = False
    """Print new lines until the job ends."""

    def _run(self) -> int:
        if self.follow:
            return _follow_log(self.job)
        path = slurm.find_log(self.job)
        if not os.path.exists(path):
            raise ClusterError(f"job {self.job} has written no log yet", uri=path, fix="--follow waits for it")
        with open(path, encoding="utf-8", errors="replace") as file:
            shutil.copyfileobj(file, sys.stdout)
        return 0


def _follow_log(number: int) -> int:
    """Print a job's log as it grows and each new reason for waiting, until the job has ended; return its status."""
    path, offset, last_reason = slurm.find_log(number), 0, ""
    while True:
        job = next(iter(slurm.list_jobs([number])), None)
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                file.seek(offset)
                sys.stdout.write(file.read())
                offset = file.tell()
        reason = slurm.explain_wait(job) if job is not None and job.state == "PENDING" else ""
        if reason and reason != last_reason:
            print(f"job {number} waits: {reason}")
        last_reason = reason
        sys.stdout.flush()
        if job is None or job.state == "COMPLETED":
            return 0
        if job.has_ended:
            print(f"voxlane: job {number} ended: {job.state}", file=sys.stderr)
            return slurm.read_exit_status(number) or 1
        time.sleep(_POLL_S)


@record
class SlurmCancelCommand:
    """Cancel jobs; their checkpoints and results stay."""

    jobs: Annotated[tuple[JobNumber, ...], Flag(positional=True, metavar="JOB")]
    """Numbers of the jobs."""

    def _run(self) -> None:
        by_id = {job.id: job for job in slurm.list_jobs(self.jobs)}
        for number in self.jobs:
            if number not in by_id:
                raise slurm.unknown_job_error(number)
            if by_id[number].has_ended:
                print(f"job {number} had ended: {by_id[number].state}")
                continue
            slurm.cancel(number)
            print(f"job {number}: cancelled; its results stay, and submitting it again with --resume continues it")
