"""Submit, list and cancel jobs with SLURM's own commands.

Pure functions parse their output and translate their errors; `_run` is the one place that runs a command. Every
submitted job leaves a small record in the user's state folder, because SLURM without accounting forgets a job minutes
after its end. SLURM's commands give no error codes, only text: `explain_refusal` and `_WAIT_REASONS` interpret it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from voxlane.cluster.slurm.script import SlurmJob, parse_comment, render_script
from voxlane.errors import ClusterError, ConfigError

_SEPARATOR = "\x1f"
_SQUEUE_COLUMNS = ("%i", "%j", "%T", "%r", "%D", "%N", "%M", "%l", "%S", "%k", "%P")
_SACCT_COLUMNS = "JobID,JobName,State,Reason,NNodes,NodeList,Elapsed,Timelimit,Start,Comment,Partition"
"""Both lists of columns have the order of the fields of `JobStatus`."""
_NO_VALUE = ("None", "None assigned", "(null)", "N/A", "Unknown")
_TIMEOUT_S = 60.0
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"REVOKED", "TIMEOUT"}
)
"""Final states of a job."""


@dataclass(frozen=True)
class JobStatus:
    """Status of a job in SLURM's queue or accounts."""

    id: int
    name: str
    state: str
    reason: str = ""
    nodes: int = 0
    hosts: str = ""
    elapsed: str = ""
    """Time since its start, as SLURM formats it."""
    limit: str = ""
    start: str = ""
    """Actual or expected start time; empty if unknown."""
    comment: str = ""
    partition: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.state in ENDED

    @property
    def voxlane_command(self) -> tuple[str, str] | None:
        """Name of the voxlane command and URI of its run; None if voxlane did not submit the job."""
        return parse_comment(self.comment)


@dataclass(frozen=True)
class JobRecord:
    """Record of a submitted job in the user's state folder."""

    id: int
    name: str
    command: list[str]
    run: str
    log: str
    script: str
    """Text of the batch script."""
    submitted: float
    """Time of submission in Unix seconds."""


# -- commands ----------------------------------------------------------------------------------------------------------


def submit(job: SlurmJob) -> JobRecord:
    """Submit a job to SLURM; return its record."""
    try:
        os.makedirs(job.output, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the folder for logs: {error.strerror}", uri=job.output, fix="Give --output DIR"
        ) from None
    text = render_script(job)
    result = _run(["sbatch", "--parsable"], text)
    if result.returncode:
        partitions = _run(["sinfo", "--noheader", "--format=%R"]).stdout.split()
        raise explain_refusal(result.stderr, job, sorted(set(partitions)))
    number = int(result.stdout.strip().split(";")[0])
    for queued in list_jobs([number]):
        if queued.reason in _PERMANENT_REASONS:
            cancel(number)
            raise ClusterError(
                f"SLURM would keep the job waiting forever: {explain_wait(queued)}",
                fix=f"Request less than {_describe_request(job)}; `sinfo` lists what the cluster has",
            )
    record = JobRecord(number, job.job_name, list(job.command), job.run, job.log_path(number), text, time.time())
    _write_record(record)
    return record


def list_jobs(ids: Sequence[int] = ()) -> list[JobStatus]:
    """Return the jobs with these numbers, or all of this user's that SLURM remembers, including ended ones."""
    output_format = _SEPARATOR.join(_SQUEUE_COLUMNS)
    selection = [f"--jobs={','.join(map(str, ids))}"] if ids else ["--me"]
    result = _run(["squeue", "--noheader", "--states=all", f"--format={output_format}", *selection])
    if result.returncode and not _is_unknown_job(result):
        raise ClusterError(
            f"SLURM does not answer: {_last_message(result.stderr)}", fix="Check its controller with `scontrol ping`"
        )
    listed = parse_queue(result.stdout)
    missing = sorted(set(ids) - {job.id for job in listed})
    if not missing:
        return listed
    # The queue has forgotten them; a cluster that keeps accounts has not.
    options = [f"--delimiter={_SEPARATOR}", f"--format={_SACCT_COLUMNS}", "-j", ",".join(map(str, missing))]
    try:
        accounts = _run(["sacct", "-X", "-P", "-n", *options])
    except ClusterError:  # not installed: the cluster keeps no accounts
        return listed
    return listed if accounts.returncode else listed + parse_queue(accounts.stdout)


def find_log(number: int) -> str:
    """Return the path of a job's log."""
    if (record := read_record(number)) is not None:
        return record.log
    if (match := _search_details(number, r"^\s*StdOut=(.+)$")) is None:
        raise unknown_job_error(number)
    return match[1].strip()


def read_exit_status(number: int) -> int | None:
    """Return the exit status of a job; None if SLURM has forgotten it."""
    match = _search_details(number, r"ExitCode=(\d+):(\d+)")
    return (int(match[1]) or int(match[2])) if match else None


def _search_details(number: int, pattern: str) -> re.Match[str] | None:
    return re.search(pattern, _run(["scontrol", "show", "job", str(number)]).stdout, re.MULTILINE)


def cancel(number: int) -> None:
    """Cancel a job."""
    result = _run(["scancel", str(number)])
    if _is_unknown_job(result):
        raise unknown_job_error(number)
    if result.returncode or "error" in result.stderr:  # scancel reports some errors with status 0
        raise ClusterError(f"SLURM did not cancel it: {_last_message(result.stderr)}", uri=f"job {number}")


def _is_unknown_job(result: subprocess.CompletedProcess[str]) -> bool:
    return "Invalid job id" in result.stderr


# -- records -----------------------------------------------------------------------------------------------------------


def read_record(number: int) -> JobRecord | None:
    """Return the record of a job that was submitted from this machine; None if there is none."""
    try:
        return JobRecord(**json.loads(_record_path(number).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_record(record: JobRecord) -> None:
    path = _record_path(record.id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    except OSError as error:  # the job is queued; only the path of its log is lost once SLURM has forgotten the job
        raise ClusterError(
            f"job {record.id} was submitted, but its record could not be written: {error.strerror}",
            uri=str(path),
            fix=f"Its log is {record.log}",
        ) from None


def _record_path(number: int) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    # Job numbers are unique within a cluster only.
    match = re.search(r"^ClusterName\s*=\s*(\S+)", _run(["scontrol", "show", "config"]).stdout, re.MULTILINE)
    return Path(base).expanduser() / "voxlane" / "slurm" / (match[1] if match else "slurm") / f"{number}.json"


# -- output and messages of SLURM --------------------------------------------------------------------------------------


def parse_queue(text: str) -> list[JobStatus]:
    """Parse the lines that `squeue` and `sacct` print in the format of `list_jobs`."""
    listed = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(_SEPARATOR)]
        if len(cells) != len(_SQUEUE_COLUMNS) or not cells[0].isdigit():
            continue
        values: dict[str, Any] = dict(zip((field.name for field in fields(JobStatus)), cells, strict=True))
        values |= {name: "" for name in ("reason", "hosts", "start", "comment") if values[name] in _NO_VALUE}
        values["id"] = int(values["id"])
        values["state"] = values["state"].partition(" ")[0]  # sacct: CANCELLED by 1000
        values["nodes"] = int(values["nodes"]) if values["nodes"].isdigit() else 0
        listed.append(JobStatus(**values))
    return listed


_WAIT_REASONS = (
    ("Resources", "{nodes} nodes with the requested resources are not free"),
    ("Priority", "jobs with a higher priority are ahead of it in the queue"),
    ("Dependency", "a job that it depends on has not ended"),
    ("BeginTime", "its start time has not come yet; a requeued job waits about two minutes"),
    ("JobHeldUser", "you hold it; release it with `scontrol release {id}`"),
    ("JobHeldAdmin", "an administrator holds it"),
    ("JobHoldMaxRequeue", "SLURM holds it because it was requeued too often; release it with `scontrol release {id}`"),
    ("launch failed", "it could not start on its nodes, so SLURM holds it; release it with `scontrol release {id}`"),
    ("ReqNodeNotAvail", "a node that it needs is down, drained or reserved"),
    ("Nodes_required_for_job_are_DOWN", "nodes that it needs are down, drained or reserved"),
    ("NodeDown", "a node that it needs is down"),
    ("PartitionTimeLimit", "it requests more time than partition {partition} allows; give a smaller --time"),
    ("PartitionNodeLimit", "it requests more nodes than partition {partition} allows; give fewer --nodes"),
    ("PartitionDown", "partition {partition} is down"),
    ("PartitionInactive", "partition {partition} is inactive"),
    ("PartitionConfig", "it requests more nodes, cores or time than partition {partition} has"),
    ("BadConstraints", "no node satisfies --constraint and the other options"),
    ("InvalidAccount", "its account is not valid; give --account"),
    ("InvalidQOS", "its quality of service is not valid; give --qos"),
    ("Reservation", "its reservation has not started"),
    ("Licenses", "it waits for a license"),
    ("Cleaning", "it was requeued, and SLURM still cleans up after its previous start"),
    ("QOS", "it would exceed a limit of its quality of service ({reason})"),
    ("Assoc", "it would exceed a limit of your account ({reason})"),
    ("MaxCpuPerAccount", "it would exceed a limit of your account ({reason})"),
)
"""Prefixes of SLURM's reasons, and explanations."""


_PERMANENT_REASONS = frozenset(
    {"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "InvalidAccount", "InvalidQOS"}
)
"""Reasons that do not pass by themselves. SLURM accepts such jobs unless it is configured to reject them."""


def explain_wait(job: JobStatus) -> str:
    """Explain why a job is still in the queue."""
    if not job.reason:
        return "SLURM has not considered it yet"
    reason = job.reason.strip("()")
    for prefix, explanation in _WAIT_REASONS:
        if reason.startswith(prefix):
            return explanation.format_map({**asdict(job), "reason": reason})
    return job.reason


def explain_refusal(stderr: str, job: SlurmJob, partitions: Sequence[str]) -> ClusterError:
    """Return the error for a job that sbatch rejects."""
    message = _last_message(stderr)
    too_large = (f"no partition has {_describe_request(job)}", "Request less; `sinfo -Nl` lists what the cluster has")
    for pattern, explanation, fix in (
        (
            "nvalid partition",
            f"partition {job.partition!r} does not exist",
            f"Choose from: {', '.join(partitions)}" if partitions else "`sinfo` lists them",
        ),
        ("nvalid account", f"you may not use account {job.account!r}", "Give another --account"),
        ("nvalid qos", f"you may not use quality of service {job.qos!r}", "Give another --qos"),
        ("nvalid feature", f"no node has the feature {job.constraint!r}", "`sinfo -o '%N %f'` lists them"),
        ("node configuration is not available", *too_large),
        ("More processors requested", *too_large),
        ("Node count specification invalid", f"the cluster has fewer than {job.nodes} nodes", "Give fewer --nodes"),
        ("time limit", f"a time limit of {job.time} is not allowed", "Give a smaller --time"),
        (
            "Unable to contact|Connection refused",
            "its controller does not answer",
            "Try again; `scontrol ping` checks the controller",
        ),
        (
            "nvalid generic resource|gres",
            f"no node has {job.gpus_per_node} GPUs",
            "`sinfo -o '%N %G'` lists the GPUs of the nodes",
        ),
        ("[Uu]nrecognized option|invalid option", f"sbatch does not know an option: {message}", "Correct --sbatch"),
    ):
        if re.search(pattern, stderr):
            return ClusterError(f"SLURM rejects the job: {explanation}", fix=fix)
    return ClusterError(f"SLURM rejects the job: {message}")


def _describe_request(job: SlurmJob) -> str:
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    limits = [
        (job.cpus_per_node, f"{job.cpus_per_node} CPUs"),
        (job.gpus_per_node, f"{job.gpus_per_node} GPUs"),
        (job.mem, f"{job.mem} of memory"),
        (job.time, f"a time limit of {job.time}"),
    ]
    described = ", ".join(text for value, text in limits if value)
    return f"{nodes} with {described} each" if described else nodes


def unknown_job_error(number: int) -> ClusterError:
    """Return the error for a job number that SLURM does not know."""
    return ClusterError("SLURM does not know this job", uri=f"job {number}", fix="`voxlane slurm status` lists yours")


def _last_message(stderr: str) -> str:
    """Return SLURM's last line without the program's name."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()] or ["it gave no reason"]
    return re.sub(r"^\w+: (error: )?", "", lines[-1])


def _run(command: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise ClusterError(
            f"{command[0]} is not installed: this machine does not belong to a SLURM cluster",
            fix="Run this on a login node, or copy the script that `voxlane slurm render` prints there",
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"{command[0]} did not answer for {_TIMEOUT_S:.0f} s", fix="Check the controller with `scontrol ping`"
        ) from None
