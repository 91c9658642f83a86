"""Render a `SlurmJob` as the text of a batch script, in readable bash.

The script starts one Ray cluster for the job (head on its first node, `ray start --block` in a step on each), waits
until every node has joined, runs the command on the first node, and always ends everything that it started.
With `launcher="torchrun"` it starts torchrun on every node instead.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from itertools import cycle
from typing import Annotated

import pydantic

from voxlane.cluster import commands as parallel
from voxlane.cluster.commands import Launcher, RayPlacement, restart_arguments
from voxlane.settings import Flag, record

OBJECT_STORE_BYTES = 200_000_000
"""Object store of each node's Ray. It is small, because data comes from the bucket and gradients go by gloo or NCCL."""
FIRST_PORT, PORTS = 20_000, 10_000
"""Range in which a job looks for ports: below those that Linux gives to outgoing connections (from 32768)."""
_REQUEUE_S = 300
"""Seconds within which a job tries again to return to the queue while SLURM's controller does not answer."""
_TAG = "voxlane"
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters other than tabs that end a line somewhere, or that a terminal obeys."""


def _require(pattern: str, message: str) -> pydantic.AfterValidator:
    """Return the check that a text matches `pattern`; `message` completes the error about one that does not."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} {message}")
        return text

    return pydantic.AfterValidator(check)


def _check_line(text: str) -> str:
    """Reject text that would end its line in the script, or change what a terminal shows of it."""
    if match := _CONTROL_CHARACTERS.search(text):
        if match[0] == "\n":
            raise ValueError(f"{text!r} contains a line break; give one line at a time")
        raise ValueError(f"{text!r} contains the control character {match[0]!r}; remove it")
    return text


def _check_word(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"{text!r} contains a zero byte, which no command line can hold; remove it")
    return text


def _check_sbatch_option(text: str) -> str:
    if not re.match(r"--?[A-Za-z]", text):
        raise ValueError(f"{text!r} is not an option; give one such as --sbatch=--exclusive")
    if re.match(r"--[\w-]*\s", text):
        raise ValueError(f"{text!r} must be one word; write it as --sbatch=--NAME=VALUE")
    if re.match(r"--signal\b", text):
        raise ValueError("set the time of SLURM's warning with --grace; the job relies on the signal")
    return text


_LINE = pydantic.AfterValidator(_check_line)
Line = Annotated[str, _LINE]
LogFolder = Annotated[
    Line, _require(r"[^\\]*", "contains a backslash, which SLURM does not allow in the path of a log")
]
Word = Annotated[str, pydantic.AfterValidator(_check_word)]
TimeLimit = Annotated[
    str,
    _require(
        r"[0-9]+|[0-9]+(:[0-9]{2}){1,2}|[0-9]+-[0-9]+(:[0-9]{2}){0,2}|infinite|UNLIMITED",
        "is not a time; give minutes, 12:00:00 or 2-12",
    ),
]
MemorySize = Annotated[str, _require(r"[0-9]+[KMGTkmgt]?", "is not a size; give it as 64G or 64000M")]
SlurmName = Annotated[str, _require(r"[^\s'\"]+", "is not a valid SLURM name: remove spaces and quotes"), _LINE]
JobName = Annotated[SlurmName, _require(r"[^/]+", "is not a valid name of a job and its log: remove slashes")]
SbatchOption = Annotated[str, _LINE, pydantic.AfterValidator(_check_sbatch_option)]


@record
class JobOptions:
    """Resources of a job: the flags of `voxlane slurm submit`."""

    nodes: Annotated[int, pydantic.Field(ge=1)] = 1
    """Number of machines."""
    cpus_per_node: Annotated[int | None, pydantic.Field(ge=1)] = None
    """Cores of each machine (default: one per rank, or the cluster's default)."""
    gpus_per_node: Annotated[int, pydantic.Field(ge=0)] = 0
    """GPUs of each machine."""
    workers_per_node: Annotated[int | None, pydantic.Field(ge=1)] = None
    """Ranks on each machine (default: one per GPU, or one)."""
    mem: Annotated[MemorySize | None, Flag(metavar="SIZE")] = None
    """Memory of each machine, such as 64G."""
    time: Annotated[TimeLimit | None, Flag(metavar="LIMIT")] = None
    """Time limit, in minutes, as 12:00:00, or as 2-12 (days-hours). The job then returns to the queue and continues."""
    partition: Annotated[SlurmName | None, Flag(metavar="NAME")] = None
    """Partition of the cluster."""
    account: Annotated[SlurmName | None, Flag(metavar="NAME")] = None
    """Account to charge."""
    qos: Annotated[SlurmName | None, Flag(metavar="NAME")] = None
    """Quality of service."""
    constraint: Annotated[SlurmName | None, Flag(metavar="FEATURES")] = None
    """Features that the nodes must have."""
    name: JobName | None = None
    """Name of the job (default: voxlane-train and such)."""
    output: Annotated[LogFolder, Flag(metavar="DIR")] = "."
    """Folder for logs, on a disk that the login node and the job's nodes share."""
    local_disk: Annotated[Line | None, Flag(metavar="DIR")] = None
    """Folder on every node's own disk for staged data; may name variables of the job, such as '$TMPDIR'. The data stays
    for the next job unless the cluster removes it."""
    setup: Annotated[tuple[Line, ...], Flag(metavar="LINE")] = ()
    """Shell line to run before everything else, such as 'module load cuda' (repeatable)."""
    sbatch: Annotated[tuple[SbatchOption, ...], Flag(metavar="OPTION")] = ()
    """Other option for sbatch, such as --sbatch=--exclusive (repeatable)."""
    requeues: Annotated[int, pydantic.Field(ge=0)] = 100
    """Largest number of restarts after a preemption, a lost node or the time limit."""
    grace_s: Annotated[int, pydantic.Field(ge=10), Flag(long="--grace", metavar="SECONDS")] = 60
    """Seconds before the time limit at which the command is told to stop."""
    start_s: Annotated[int, pydantic.Field(ge=10), Flag(long="--start-timeout", metavar="SECONDS")] = 300
    """Seconds within which every node must have joined."""
    python: Annotated[Line | None, Flag(metavar="PATH")] = None
    """Python interpreter on the job's nodes (default: the one that runs this command)."""


@record
class SlurmJob(JobOptions):
    """One SLURM job: its resources, and the voxlane command that runs on them."""

    command: tuple[Word, ...] = pydantic.Field(min_length=1)
    """Arguments after `voxlane`, such as train DATA --run RUN."""
    launcher: Launcher = "ray"
    """Launcher of the ranks. ray: a Ray cluster over the job's nodes. torchrun: one torchrun per node. none: only the
    command, on one node."""
    run: Line = ""
    """URI of the run, which the job's comment carries for `voxlane slurm status`."""
    stage: Line | None = None
    """Prepared dataset to copy to every node's own disk first."""

    @pydantic.model_validator(mode="after")
    def _validate_consistency(self) -> SlurmJob:
        command, name = parallel.find_command(self.command), f"`voxlane {self.command_name}`"
        if self.launcher == "none" and self.nodes > 1:
            raise ValueError(f"{name} runs on one node, not on {self.nodes}; leave --nodes out")
        if command is None and self.launcher != "none":
            raise ValueError(f"{name} runs on one node, without {self.launcher}; leave --launcher out")
        if command is not None and self.launcher == "torchrun" and not command.supports_torchrun:
            raise ValueError(f"{name} does not support torchrun; use --launcher ray")
        if command is not None and self.launcher == "ray" and command.ray_options is None:
            raise ValueError(f"{name} does not support Ray; use --launcher torchrun")
        if self.stage and not self.local_disk:
            raise ValueError("staging needs a disk on each node; give --local-disk, such as '$TMPDIR' or /scratch")
        return self

    @property
    def command_name(self) -> str:
        """Name of the command without its options, such as train or bench loading."""
        return parallel.command_name(self.command)

    @property
    def per_node(self) -> int:
        """Number of ranks on each node."""
        return self.workers_per_node or self.gpus_per_node or 1

    @property
    def job_name(self) -> str:
        """Name of the job in `squeue`."""
        return self.name or "-".join([_TAG, *self.command_name.split()])

    def log_path(self, number: int | str) -> str:
        """Return the path of the log of the job with this number."""
        return f"{self.output.rstrip('/')}/{self.job_name}-{number}.log"


def format_comment(command: str, run: str) -> str:
    """Return the comment that marks a job as voxlane's."""
    return f"{_TAG}:{command}:{run}"


def parse_comment(text: str) -> tuple[str, str] | None:
    """Return the command and run of a job that `format_comment` marked; None for other jobs."""
    parts = text.split(":", 2)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == _TAG else None


def render_command(job: SlurmJob, command: Sequence[str]) -> list[str]:
    """Return the command as bash words, with the cluster's address and size added.

    Unless the user gives it, the number of ranks is one per GPU, or one per node without GPUs.
    """
    words = [shlex.quote(word) for word in command]
    if job.stage:
        words.append('"${staged[@]}"')
    if job.launcher != "ray":
        return words
    placement = RayPlacement(
        nodes=job.nodes,
        per_node=job.per_node,
        cpus='"$worker_cpus"',
        gpus=job.gpus_per_node / job.per_node,
        address='"$address"',
    )
    return [*words, *parallel.ray_arguments(command, placement)]


def directives(job: SlurmJob) -> list[str]:
    """Return the options of the #SBATCH lines."""
    options = {
        "job-name": job.job_name,
        "comment": format_comment(job.command_name, job.run),
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.cpus_per_node or (job.per_node if job.per_node > 1 else None),
        "gpus-per-node": job.gpus_per_node or None,
        "mem": job.mem,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "output": "%j".join(part.replace("%", "%%") for part in job.log_path("\0").split("\0")),
        "open-mode": "append",
        "signal": f"B:USR1@{job.grace_s}",
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    words += ["--requeue" if job.requeues else "--no-requeue", *job.sbatch]
    return [_quote_directive(word) for word in words]


def render_script(job: SlurmJob) -> str:
    """Return the batch script of a job."""
    launcher = {"ray": _RAY, "torchrun": _TORCHRUN, "none": ""}[job.launcher]
    folder = _quote_expanding(job.local_disk or "")
    command = parallel.find_command(job.command)
    # torchrun never restarts the ranks of a command that would start from scratch.
    retries = 2 if command is not None and command.resumes else 0
    parts = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in directives(job)),
        "# Generated by `voxlane slurm` for sbatch. It needs nothing but the interpreter below on every node.",
        "",
        "warned= stopping=; trap 'warned=yes' USR1  # SLURM's warning before the time limit",
        f"python={shlex.quote(job.python or sys.executable)}",
        f"requeues={job.requeues}",
        f"start_s={job.start_s}",
        f"patience_s={job.grace_s * 2 // 3}",
        f"requeue_s={_REQUEUE_S}",
        # Jobs with nearby numbers look for ports in ranges far apart.
        f"first_port=$(({FIRST_PORT} + SLURM_JOB_ID * 16 % {PORTS}))",
        f"logs={shlex.quote(job.output.rstrip('/') or '/')}/$SLURM_JOB_NAME-$SLURM_JOB_ID",
        f'worker_cpus=$((${{SLURM_CPUS_ON_NODE:-1}} / {job.per_node})); [ "$worker_cpus" -ge 1 ] || worker_cpus=1',
        *job.setup,
        _COMMON,
        *([_STAGE.format(data=shlex.quote(job.stage), folder=folder)] if job.stage else []),
        *([_ENDPOINT] if job.launcher != "none" else []),
        launcher.format(per_node=job.per_node, object_store=OBJECT_STORE_BYTES, retries=retries),
        "words=(" + " ".join(render_command(job, job.command)) + ")",
        '[ "$restarts" -eq 0 ] || words=(' + " ".join(render_command(job, restart_arguments(job.command))) + ")",
        _RUN,
    ]
    return "\n".join(parts)


def _quote_directive(word: str) -> str:
    """Quote an option for a #SBATCH line. Within double quotes, sbatch replaces nothing but escapes."""
    if re.fullmatch(r"[\w@%+=:,./-]*", word):
        return word
    name, equals, value = word.partition("=") if re.match(r"--[\w-]+=", word) else ("", "", word)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def _quote_expanding(text: str) -> str:
    """Quote text as one shell word in which $NAME and ${NAME} expand; nothing else does, and no command runs."""
    parts = re.split(r"(\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\})", text, flags=re.ASCII)
    words = [
        f'"{part}"' if is_variable else shlex.quote(part) for part, is_variable in zip(parts, cycle((False, True)))
    ]
    return "".join(word for word in words if word != "''") or "''"


_COMMON = r"""
set -uo pipefail
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
restarts=${SLURM_RESTART_COUNT:-0}
hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
step=(srun --overlap --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
background=()    # process ids of the sruns that run beside the command
driver=          # process id of the process that the script waits for
in_steps=        # set if that process is an srun
watch=
requeued=

say() { printf '%s voxlane: %s\n' "$(date '+%F %T')" "$*"; }
node() { exec "$python" -m voxlane.cluster.slurm.node "$@"; }
run() { exec "$python" -m voxlane "$@"; }
# Waits for a child, even if a signal arrives meanwhile; its exit status is then in $status.
await() {
  while wait "$1" 2> /dev/null; status=$?; kill -0 "$1" 2> /dev/null; do :; done
  wait "$1" 2> /dev/null; local last=$?; [ "$last" -eq 127 ] || status=$last
}

# An srun that gets SIGTERM kills its tasks; this lets them stop by themselves. It does not signal this script.
end_steps() {
  for _ in 1 2 3; do scancel --quiet --signal=TERM "$SLURM_JOB_ID" 2> /dev/null && return 0; sleep 1; done
}

# Prints what SLURM does with the job. While a job ends, its state is COMPLETING for every cause; the reason tells them
# apart. Every other state, such as SIGNALING, says only that SLURM does not end it.
cause() {
  local details
  details=$(scontrol show job "$SLURM_JOB_ID" 2> /dev/null) || return 1
  case "$details " in
    *" Restarts=$((restarts + 1)) "*) echo requeued;;
    *' JobState=TIMEOUT '*|*' Reason=TimeLimit '*) echo limit;;
    *' PreemptTime='[0-9]*) echo preempted;;
    *' JobState='COMPLETING*|*' JobState='CANCELLED*|*' JobState='*FAIL*|*' JobState='DEADLINE*) echo ended;;
    *) echo alive;;
  esac
}

# Returns the job to the queue for one of these causes; tries again while the controller is away. In what traps call,
# `return` has a status: without one, bash returns that of the interrupted command.
requeue_if() {  # CAUSE...
  local found answer deadline=$((SECONDS + requeue_s))
  [ "$restarts" -lt "$requeues" ] && [ -z "$requeued" ] || return 0
  while :; do
    if found=$(cause); then
      case " requeued $* " in *" $found "*) ;; *) return 0;; esac
      # SLURM may kill scontrol as a process of the job that it requeues; the next answer is then `requeued`.
      if [ "$found" = requeued ] || answer=$(scontrol requeue "$SLURM_JOB_ID" 2>&1); then requeued=yes; return 0; fi
      case $answer in *disabled*|*'Invalid job'*|*ermission*) break;; esac
    fi
    [ "$SECONDS" -lt "$deadline" ] || break
    sleep 1
  done
  say "could not return to the queue: ${answer:-SLURM does not answer}"
}

stop() {
  [ -z "$stopping" ] || return 0
  stopping=yes
  say "asked to stop: $1"
  [ -z "$driver" ] || end_driver
}
end_driver() {
  [ -z "$watch" ] || return 0
  if [ -n "$in_steps" ]; then end_steps; else kill -TERM "$driver" 2> /dev/null; fi
  # Kill a process that does not stop in time; otherwise SLURM would kill this script too.
  # Its status is 0 only if it got that far; `finish` may not end it between the kill and its exit.
  { read -rt "$patience_s" <> <(:); trap '' TERM; kill -KILL "$driver" 2> /dev/null; exit 0; } &
  watch=$!
}
# SLURM sends SIGUSR1, to this shell alone, before the time limit. SIGTERM comes with the end of the job: at the time
# limit, if it did not stop or the warning was lost, and when somebody cancels it.
trap 'warned=yes; stop "the time limit is near"' USR1
trap 'stop SIGTERM; requeue_if limit' TERM INT
[ -z "$warned" ] || stop 'the time limit is near'

# Ends everything that was started beside the command, on every node, and then the job with this status.
finish() {
  local result=$1 pid killed=
  if [ -n "$watch" ]; then
    kill "$watch" 2> /dev/null
    await "$watch"
    [ "$status" -ne 0 ] || killed=yes  # it did not stop in time
  fi
  if [ "${#background[@]}" -gt 0 ]; then
    end_steps
    # The srun of a node that is down never ends.
    { read -rt 20 <> <(:); kill -KILL "${background[@]}" 2> /dev/null; } &
    watch=$!
    for pid in "${background[@]}"; do await "$pid"; done
    kill "$watch" 2> /dev/null
  fi
  if [ "$result" -ne 0 ]; then
    # A preemption with a grace time ends the steps, and with them the command, without a signal to this script.
    if [ -n "$warned" ] && { [ "$result" -eq 143 ] || [ -n "$killed" ]; }; then
      requeue_if alive limit preempted
    else
      requeue_if preempted
    fi
  fi
  if [ -n "$requeued" ]; then
    say "returns to the queue, to continue from the last checkpoint"
    exit 0
  fi
  say "ended with status $result after $SECONDS s"
  exit "$result"
}

say "job $SLURM_JOB_ID, start $((restarts + 1)), on ${hosts[*]}"
"""

_ENDPOINT = r"""
read -r head_ip port port_2 port_3 <<< "$(node endpoint "$first_port" "${hosts[@]:1:1}")"
[ -n "${port_3:-}" ] || { say "no free ports from $first_port on"; finish 1; }
"""

_STAGE = r"""
# Copy the dataset to every node's own disk. A node without enough space says so, and reads the original.
disk={folder}/voxlane-$(id -un)
staged=("loader.staged=$disk")
"${{step[@]}}" --nodes="$SLURM_JOB_NUM_NODES" "$python" -m voxlane stage {data} "$disk" --if-room &
driver=$! in_steps=yes
await "$driver"
in_steps=
[ "$status" -eq 0 ] || staged=()
[ -z "$stopping" ] || finish 143
"""

_RAY = r"""
# A Ray cluster for this job alone: its own ports, folders and token, which is in no file, log or command line.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
unset RAY_ADDRESS RAY_AUTH_TOKEN_PATH
address=$head_ip:$port
export python restarts start_s

ray_node() {{
  local temp=/tmp/vl-$SLURM_JOB_ID-$restarts ray stopped= attempt
  # Ray has nothing to save, and takes half a minute to end by itself.
  trap 'stopped=yes; kill -KILL $ray 2> /dev/null' TERM INT
  for attempt in 1 2 3; do  # Ray gives a node 30 s to start, which a busy node may miss
    rm -rf "/tmp/vl-$SLURM_JOB_ID-"* && mkdir -m 700 "$temp" || exit 1
    TMPDIR=$temp "$python" -m ray.scripts.scripts start "$@" --block --temp-dir="$temp" --disable-usage-stats \
      --num-cpus="${{SLURM_CPUS_ON_NODE:-1}}" --num-gpus="${{SLURM_GPUS_ON_NODE:-0}}" \
      --object-store-memory={object_store} --log-style=record --log-color=false &
    ray=$!
    wait "$ray"; wait "$ray" 2> /dev/null
    pkill -KILL -u "$(id -u)" -f "$temp/"
    for _ in {{1..25}}; do rm -rf "$temp" 2> /dev/null && break; read -rt 0.2 <> <(:); done
    [ -z "$stopped" ] && [ "$SECONDS" -lt "$start_s" ] || break
  done
}}
export -f ray_node

start_ray() {{  # HOST ARGUMENT...: the output goes to a log of its own
  local host=$1; shift
  "${{step[@]}}" --nodes=1 --ntasks=1 --nodelist="$host" bash -c 'ray_node "$@"' ray "$@" &> "$logs-ray-$host.log" &
  background+=($!)
}}
wait_for_ray() {{  # HOST...
  node wait "$address" "$start_s" "$(IFS=,; echo "${{background[*]}}")" "$@" &
  driver=$!
  await "$driver"
  [ "$status" -ne 0 ] || return
  [ -z "$stopping" ] || finish 143
  tail -n 15 "$logs"-ray-*.log
  finish 1
}}

start_ray "${{hosts[0]}}" --head --node-ip-address="$head_ip" --port="$port" --dashboard-port="$port_2" \
  --ray-client-server-port="$port_3"
wait_for_ray "${{hosts[0]}}"
for host in "${{hosts[@]:1}}"; do start_ray "$host" --address="$address"; done
[ "${{#hosts[@]}}" -eq 1 ] || wait_for_ray "${{hosts[@]}}"
"""

_TORCHRUN = r"""
export python endpoint=$head_ip:$port TORCH_CPP_LOG_LEVEL=ERROR
torchrun_node() {{
  local hosting=False status stopped=
  [ "$SLURM_NODEID" -ne 0 ] || hosting=True
  # torchrun does not pass on that its ranks stopped because they were asked to.
  trap 'stopped=yes' TERM
  "$python" -m voxlane.cluster.torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={per_node} \
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID" --rdzv-conf="is_host=$hosting" \
    --max-restarts={retries} --shutdown-timeout=15 -m -- voxlane "$@" &
  wait "$!"; status=$?
  while kill -0 "$!" 2> /dev/null; do wait "$!"; status=$?; done
  if [ -n "$stopped" ] && [ "$status" -ne 0 ]; then exit 143; fi
  exit "$status"
}}
export -f torchrun_node
in_steps=yes
run() {{
  exec "${{step[@]}}" --nodes="$SLURM_JOB_NUM_NODES" --kill-on-bad-exit=1 bash -c 'torchrun_node "$@"' torchrun "$@"
}}
"""

_RUN = r"""driver=
[ -z "$stopping" ] || finish 143
run "${words[@]}" &
driver=$!
[ -z "$stopping" ] || end_driver  # asked to stop before the line above
await "$driver"
finish "$status"
"""
