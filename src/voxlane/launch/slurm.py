"""SLURM's own commands: submit a job, see what became of it, cancel it.

Text is parsed and refusals are translated by pure functions; `_call` is the one place that runs a command. Every job
that is submitted leaves a small record in the user's state folder, because SLURM forgets jobs minutes after their end
where it keeps no accounts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from voxlane.errors import ClusterError, ConfigError
from voxlane.launch.slurm_script import Job, read_comment, script

_SEPARATOR = "\x1f"
_FIELDS = ("%i", "%j", "%T", "%r", "%D", "%N", "%M", "%l", "%S", "%k", "%P")
_TIMEOUT_S = 60.0
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"REVOKED", "TIMEOUT"}
)
"""States that no job leaves by itself."""


@dataclass(frozen=True)
class Known:
    """What SLURM says of a job."""

    id: int
    name: str
    state: str
    reason: str = ""
    nodes: int = 0
    hosts: str = ""
    used: str = ""
    """Time since its start, as SLURM writes it."""
    limit: str = ""
    start: str = ""
    """When it started, or is expected to; empty: not known."""
    comment: str = ""
    partition: str = ""

    @property
    def ended(self) -> bool:
        """Whether it will do nothing more."""
        return self.state in ENDED

    @property
    def ours(self) -> tuple[str, str] | None:
        """Command and run, if we submitted it."""
        return read_comment(self.comment)


@dataclass(frozen=True)
class Record:
    """What is kept of a submitted job."""

    id: int
    name: str
    command: list[str]
    run: str
    log: str
    script: str
    """The batch script's text."""
    submitted: float
    """Unix seconds."""


# -- commands ----------------------------------------------------------------------------------------------------------


def submit(job: Job) -> Record:
    """Hand a job to SLURM; returns its record."""
    try:
        os.makedirs(job.output, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write logs here: {error.strerror}", uri=job.output, fix="Give --output DIR"
        ) from None
    text = script(job)
    done = _run(["sbatch", "--parsable"], text)
    if done.returncode:
        raise refusal(done.stderr, job, _partitions())
    number = int(done.stdout.strip().split(";")[0])
    for queued in jobs([number]):
        if queued.reason in _NEVER:
            cancel(number)
            raise ClusterError(
                f"SLURM would keep the job waiting for ever: {why_waiting(queued)}",
                fix=f"Ask for less than {_asked(job)}; `sinfo` lists what there is",
            )
    log = job.log.replace("%x", job.job_name).replace("%j", str(number))
    record = Record(number, job.job_name, list(job.command), job.run, log, text, time.time())
    _keep(record)
    return record


def jobs(ids: Sequence[int] = ()) -> list[Known]:
    """The jobs with these numbers, or all of this user's that SLURM remembers; ended ones too."""
    form = _SEPARATOR.join(_FIELDS)
    which = [f"--jobs={','.join(map(str, ids))}"] if ids else ["--me"]
    done = _run(["squeue", "--noheader", "--states=all", f"--format={form}", *which])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise _unreachable(done.stderr)
    found = parse_queue(done.stdout)
    missing = sorted(set(ids) - {job.id for job in found})
    return found + (_accounted(missing) if missing else [])


def _accounted(ids: Sequence[int]) -> list[Known]:
    """What the accounts say of jobs that the queue has forgotten, where there are accounts."""
    form = "JobID,JobName,State,Reason,NNodes,NodeList,Elapsed,Timelimit,Start,Comment,Partition"
    numbers = ",".join(map(str, ids))
    try:
        done = _run(["sacct", "-X", "-P", "-n", f"--delimiter={_SEPARATOR}", f"--format={form}", "-j", numbers])
    except ClusterError:  # not installed: a cluster without accounts
        return []
    return [] if done.returncode else parse_queue(done.stdout)


def log_of(number: int) -> str:
    """Where a job's output goes."""
    if (kept := record(number)) is not None:
        return kept.log
    shown = _run(["scontrol", "show", "job", str(number)]).stdout
    found = re.search(r"^\s*StdOut=(.+)$", shown, re.MULTILINE)
    if not found:
        raise unknown(number)
    return found[1].strip()


def exit_status(number: int) -> int | None:
    """The status that a job ended with; None where SLURM does not know it any more."""
    shown = _run(["scontrol", "show", "job", str(number)]).stdout
    found = re.search(r"ExitCode=(\d+):(\d+)", shown)
    return (int(found[1]) or int(found[2])) if found else None


def cancel(number: int) -> None:
    """Cancel a job."""
    done = _run(["scancel", str(number)])
    if done.returncode or "error" in done.stderr:
        if "Invalid job id" in done.stderr:
            raise unknown(number)
        raise ClusterError(f"SLURM would not cancel it: {_said(done.stderr)}", uri=f"job {number}")


# -- records -----------------------------------------------------------------------------------------------------------


def record(number: int) -> Record | None:
    """What was kept when a job was submitted from here."""
    try:
        return Record(**json.loads(_record_file(number).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _keep(kept: Record) -> None:
    path = _record_file(kept.id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps(asdict(kept), indent=1), encoding="utf-8")
    except OSError as error:  # the job is in the queue: what is lost is its log's place once SLURM has forgotten it
        raise ClusterError(
            f"job {kept.id} was submitted, but what to remember of it could not be written: {error.strerror}",
            uri=str(path),
            fix=f"Its log is {kept.log}",
        ) from None


def _record_file(number: int) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "voxlane" / "slurm" / _cluster_name() / f"{number}.json"


def _cluster_name() -> str:
    """Numbers are unique in one cluster only."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", _run(["scontrol", "show", "config"]).stdout, re.MULTILINE)
    return found[1] if found else "slurm"


# -- words -------------------------------------------------------------------------------------------------------------


def parse_queue(text: str) -> list[Known]:
    """Jobs from the lines that `squeue` and `sacct` print in our format."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(_SEPARATOR)]
        if len(cells) != len(_FIELDS) or not cells[0].isdigit():
            continue
        number, name, state, reason, nodes, hosts, used, limit, start, comment, partition = cells
        found.append(
            Known(
                int(number),
                name,
                state.split()[0] if state else "",  # sacct: CANCELLED by 1000
                "" if reason == "None" else reason,
                int(nodes) if nodes.isdigit() else 0,
                "" if hosts in ("None assigned", "(null)") else hosts,
                used,
                limit,
                "" if start in ("N/A", "Unknown", "None") else start,
                "" if comment == "(null)" else comment,
                partition,
            )
        )
    return found


_WAITS = (
    ("Resources", "no {nodes} nodes with what it asks for are free"),
    ("Priority", "jobs before it in the queue have a higher priority"),
    ("Dependency", "a job that it depends on has not ended"),
    ("BeginTime", "its start time has not come; a requeued job waits about two minutes"),
    ("JobHeldUser", "it is held; `scontrol release {id}` lets it go"),
    ("JobHeldAdmin", "an administrator holds it"),
    ("JobHoldMaxRequeue", "SLURM holds it because it was requeued too often; `scontrol release {id}` lets it go"),
    ("launch failed", "it could not be started on its nodes and SLURM holds it; `scontrol release {id}` lets it go"),
    ("ReqNodeNotAvail", "a node that it needs is down, drained or reserved"),
    ("Nodes_required_for_job_are_DOWN", "nodes that it needs are down, drained or reserved"),
    ("NodeDown", "a node that it needs is down"),
    ("PartitionTimeLimit", "it asks for more time than partition {partition} allows; give a smaller --time"),
    ("PartitionNodeLimit", "it asks for more nodes than partition {partition} allows; give fewer --nodes"),
    ("PartitionDown", "partition {partition} is down"),
    ("PartitionInactive", "partition {partition} is inactive"),
    ("PartitionConfig", "it asks for more nodes, cores or time than partition {partition} has"),
    ("BadConstraints", "no node has what --constraint and the other options ask for"),
    ("InvalidAccount", "its account is not valid; give --account"),
    ("InvalidQOS", "its quality of service is not valid; give --qos"),
    ("Reservation", "its reservation has not begun"),
    ("Licenses", "it waits for a licence"),
    ("Cleaning", "it was requeued, and its first start is still being cleaned up"),
    ("QOS", "a limit of its quality of service is reached ({reason})"),
    ("Assoc", "a limit of your account is reached ({reason})"),
    ("MaxCpuPerAccount", "a limit of your account is reached ({reason})"),
)
"""SLURM's reasons, by how they begin, in plain words."""


_NEVER = (
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
)
"""Reasons that do not pass by themselves. SLURM takes such jobs unless it was told to refuse them."""


def why_waiting(job: Known) -> str:
    """Why a job is still in the queue."""
    if not job.reason:
        return "SLURM has not looked at it yet"
    for start, words in _WAITS:
        if job.reason.strip("()").startswith(start):
            return words.format(nodes=job.nodes, id=job.id, partition=job.partition, reason=job.reason.strip("()"))
    return job.reason


def refusal(stderr: str, job: Job, partitions: Sequence[str]) -> ClusterError:
    """What to raise when sbatch refuses a job."""
    said = _said(stderr)
    known = f"There are: {', '.join(partitions)}" if partitions else "`sinfo` lists them"
    for pattern, words, fix in (
        ("nvalid partition", f"no partition {job.partition!r} is here", known),
        ("nvalid account", f"account {job.account!r} may not be used here", "Give another --account"),
        ("nvalid qos", f"no quality of service {job.qos!r} for you here", "Give another --qos"),
        ("nvalid feature", f"no node has the feature {job.constraint!r}", "`sinfo -o '%N %f'` lists them"),
        (
            "node configuration is not available",
            f"no partition has {_asked(job)}",
            "Ask for less; `sinfo -Nl` lists it",
        ),
        ("More processors requested", f"no partition has {_asked(job)}", "Ask for less; `sinfo -Nl` lists it"),
        ("Node count specification invalid", f"{job.nodes} nodes are more than there are", "Give fewer --nodes"),
        ("time limit", f"a time limit of {job.time} is not allowed here", "Give a smaller --time"),
        (
            "Unable to contact|Connection refused",
            "its controller does not answer",
            "Try again; `scontrol ping` asks it",
        ),
        (
            "nvalid generic resource|gres",
            f"{job.gpus_per_node} GPUs a node are not offered here",
            "See `sinfo -o '%N %G'`",
        ),
        ("[Uu]nrecognized option|invalid option", f"sbatch does not know an option: {said}", "See --sbatch"),
    ):
        if re.search(pattern, stderr):
            return ClusterError(f"SLURM refuses the job: {words}", fix=fix)
    return ClusterError(f"SLURM refuses the job: {said}")


def _asked(job: Job) -> str:
    parts = [f"{job.nodes} node{'s' * (job.nodes > 1)}"]
    parts += [f"{job.cpus_per_node} CPUs"] * bool(job.cpus_per_node) + [f"{job.gpus_per_node} GPUs"] * bool(
        job.gpus_per_node
    )
    parts += [f"{job.mem} of memory"] * bool(job.mem) + [f"a time limit of {job.time}"] * bool(job.time)
    return parts[0] if len(parts) == 1 else f"{parts[0]} with {', '.join(parts[1:])} each"


def unknown(number: int) -> ClusterError:
    """What to raise for a number that SLURM does not know."""
    return ClusterError("SLURM knows no such job", uri=f"job {number}", fix="`voxlane slurm status` lists yours")


def _said(stderr: str) -> str:
    """SLURM's last words without the program's name."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()] or ["it gave no reason"]
    return re.sub(r"^\w+: (error: )?", "", lines[-1])


def _unreachable(stderr: str) -> ClusterError:
    return ClusterError(f"SLURM does not answer: {_said(stderr)}", fix="`scontrol ping` asks its controller")


def _partitions() -> list[str]:
    return sorted(set(_run(["sinfo", "--noheader", "--format=%R"]).stdout.split()))


def _run(command: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        raise ClusterError(
            f"{command[0]} is not here: this machine belongs to no SLURM cluster",
            fix="Run it on a login node; `voxlane slurm render` prints the script to take there",
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{command[0]} gave no answer for {_TIMEOUT_S:.0f} s", fix="`scontrol ping`") from None
