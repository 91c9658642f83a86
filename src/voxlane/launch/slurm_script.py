"""The batch script of a SLURM job, as text: what a `Job` asks for, in bash that a person can read.

The script starts one Ray cluster for the job (head on its first node, `ray start --block` in a step on each), waits
until every node has joined, runs the command on the first node, and ends everything that it started whatever happens.
With `launcher="torchrun"` it starts torchrun on every node instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import pydantic

from voxlane.launch import parallel
from voxlane.launch.parallel import Launcher, Place, restarted
from voxlane.settings import record

_TIME = re.compile(r"^(\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}|infinite|UNLIMITED)$")
_MEMORY = re.compile(r"^\d+[KMGT]?$", re.IGNORECASE)
_PLAIN = re.compile(r"^[^\s'\"]+$")
OBJECT_STORE_BYTES = 200_000_000
"""Of each node's Ray: nothing large passes through it, because data comes from the bucket and gradients by gloo or
NCCL."""
FIRST_PORT, PORTS = 20_000, 10_000
"""Where a job looks for its ports: below those that Linux gives to outgoing connections (from 32768)."""
_TAG = "voxlane"


@record
class Job:
    """One job: resources, and the voxlane command that runs on them."""

    command: tuple[str, ...] = pydantic.Field(min_length=1)
    """The words after `voxlane`, such as train DATA --run RUN."""
    launcher: Launcher = "ray"
    """ray: a Ray cluster over the job's nodes. torchrun: one torchrun a node, without Ray. none: the command alone, on
    one node."""
    nodes: int = pydantic.Field(default=1, ge=1)
    """Machines."""
    cpus_per_node: int | None = pydantic.Field(default=None, ge=1)
    """Cores on each; null: one a rank, or what the cluster gives by default."""
    gpus_per_node: int = pydantic.Field(default=0, ge=0)
    """GPUs on each."""
    workers_per_node: int | None = pydantic.Field(default=None, ge=1)
    """Ranks on each; null: one a GPU, or one."""
    mem: str | None = None
    """Memory of each node, such as 64G."""
    time: str | None = None
    """Limit: minutes, hours:minutes:seconds or days-hours."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    name: str | None = None
    """The job's name; null: voxlane-train and such."""
    output: str = "."
    """Folder of the logs, which the login node and the job's nodes share."""
    run: str = ""
    """The run's URI, which the job's comment carries for `voxlane slurm status`."""
    stage: str | None = None
    """A prepared dataset to copy to every node's own disk first."""
    local_disk: str | None = None
    """A folder on every node's own disk, for what is staged; may name the job's variables, such as $TMPDIR. What is
    there stays for the next job, unless the cluster removes it."""
    setup: tuple[str, ...] = ()
    """Lines of shell before anything else, such as `module load cuda`."""
    sbatch: tuple[str, ...] = ()
    """More options for sbatch."""
    requeues: int = pydantic.Field(default=100, ge=0)
    """How often the job may start again after a preemption, a lost node or the time limit; 0: never."""
    grace_s: int = pydantic.Field(default=60, ge=10)
    """Seconds before the time limit at which the command is told to stop."""
    start_s: int = pydantic.Field(default=300, ge=10)
    """Seconds in which every node must have joined."""
    python: str
    """The interpreter on the job's nodes."""

    @pydantic.field_validator("time")
    @classmethod
    def _is_time(cls, value: str | None) -> str | None:
        if value is not None and not _TIME.match(value):
            raise ValueError(f"{value!r} is no time; give minutes, 12:00:00 or 2-12")
        return value

    @pydantic.field_validator("mem")
    @classmethod
    def _is_memory(cls, value: str | None) -> str | None:
        if value is not None and not _MEMORY.match(value):
            raise ValueError(f"{value!r} is no size; give it as 64G or 64000M")
        return value

    @pydantic.field_validator("partition", "account", "qos", "constraint", "name")
    @classmethod
    def _is_word(cls, value: str | None) -> str | None:
        if value is not None and not _PLAIN.match(value):
            raise ValueError(f"{value!r} is no name that SLURM takes: no spaces, no quotes")
        return value

    @pydantic.field_validator("setup", "sbatch")
    @classmethod
    def _are_lines(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any("\n" in line for line in value):
            raise ValueError("it holds a line break; give one line at a time")
        return value

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Job:
        known, words = parallel.found(self.command), f"`voxlane {self.title}`"
        if self.launcher == "none" and self.nodes > 1:
            raise ValueError(f"{words} runs on one node, not on {self.nodes}; leave --nodes out")
        if known is None and self.launcher != "none":
            raise ValueError(f"{words} runs on one node, without {self.launcher}; leave --launcher out")
        if known is not None and self.launcher == "torchrun" and not known.torchrun:
            raise ValueError(f"{words} takes no part as torchrun's ranks; it wants --launcher ray")
        if known is not None and self.launcher == "ray" and known.ray is None:
            raise ValueError(f"{words} knows no Ray; it wants --launcher torchrun")
        if self.stage and not self.local_disk:
            raise ValueError("staging needs a disk of each node; give --local-disk, such as '$TMPDIR' or /scratch")
        return self

    @property
    def title(self) -> str:
        """The command without its options, such as train or bench loading."""
        return parallel.title(self.command)

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.workers_per_node or self.gpus_per_node or 1

    @property
    def job_name(self) -> str:
        """What `squeue` shows."""
        return self.name or "-".join([_TAG, *self.title.split()])

    @property
    def log(self) -> str:
        """Where the job's output goes; %x and %j are SLURM's marks for name and number."""
        return f"{self.output.rstrip('/')}/%x-%j.log"


def comment(command: str, run: str) -> str:
    """What a job carries so that it is found again as ours."""
    return f"{_TAG}:{command}:{run}"


def read_comment(text: str) -> tuple[str, str] | None:
    """Command and run of a job that `comment` marked; None for others'."""
    parts = text.split(":", 2)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == _TAG else None


def placed(job: Job, command: Sequence[str]) -> list[str]:
    """The command as words of bash, with where it runs added: the cluster's address, and, unless the user said it, how
    many ranks there are: one for every GPU, or for every node."""
    words = [shlex.quote(word) for word in command]
    if job.stage:
        words.append('"${staged[@]}"')
    if job.launcher != "ray":
        return words
    place = Place(
        nodes=job.nodes,
        per_node=job.per_node,
        cpus='"$worker_cpus"',
        gpus=job.gpus_per_node / job.per_node,
        address='"$address"',
    )
    return [*words, *parallel.ray_words(command, place)]


def directives(job: Job) -> list[str]:
    """The #SBATCH lines' options."""
    asked = {
        "job-name": job.job_name,
        "comment": comment(job.title, job.run),
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
        "output": job.log,
        "open-mode": "append",
        "signal": f"B:TERM@{job.grace_s}",
    }
    lines = [f"--{name}={_quoted(str(value))}" for name, value in asked.items() if value is not None]
    return [*lines, "--requeue" if job.requeues else "--no-requeue", *job.sbatch]


def script(job: Job) -> str:
    """The whole script."""
    head = [f"#SBATCH {line}" for line in directives(job)]
    values = [
        f"python={shlex.quote(job.python)}",
        f"requeues={job.requeues}",
        f"start_s={job.start_s}",
        f"patience_s={job.grace_s * 2 // 3}",
        # Jobs that are near one another in time look for ports in places far apart.
        f"first_port=$(({FIRST_PORT} + SLURM_JOB_ID * 16 % {PORTS}))",
        f"logs={shlex.quote(job.output.rstrip('/') or '/')}/$SLURM_JOB_NAME-$SLURM_JOB_ID",
        f'worker_cpus=$((${{SLURM_CPUS_ON_NODE:-1}} / {job.per_node})); [ "$worker_cpus" -ge 1 ] || worker_cpus=1',
    ]
    parts = [
        "#!/bin/bash",
        *head,
        "# Made by `voxlane slurm`; one file, for sbatch, that needs nothing but the interpreter below on every node.",
        "",
        *values,
        *job.setup,
        _COMMON,
        *([_STAGE.format(data=shlex.quote(job.stage), folder=_expanding(job.local_disk or ""))] if job.stage else []),
        *([_ENDPOINT] if job.launcher != "none" else []),
        {"ray": _RAY, "torchrun": _TORCHRUN, "none": _NONE}[job.launcher].format(
            per_node=job.per_node, object_store=OBJECT_STORE_BYTES, retries=_retries(job)
        ),
        "words=(" + " ".join(placed(job, job.command)) + ")",
        '[ "$restarts" -eq 0 ] || words=(' + " ".join(placed(job, restarted(job.command))) + ")",
        _RUN,
    ]
    return "\n".join(parts)


def _retries(job: Job) -> int:
    """How often torchrun starts ranks again by itself: not those of a command that would begin anew."""
    known = parallel.found(job.command)
    return 2 if known is not None and known.resumes else 0


def _quoted(text: str) -> str:
    """For a #SBATCH line, which knows double quotes and no escapes."""
    return text if re.match(r"^[\w@%+=:,./-]*$", text) else '"' + text.replace('"', "") + '"'


def _expanding(text: str) -> str:
    """In double quotes: variables are the node's, commands are not run."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`").replace("$(", "\\$(")
    return f'"{escaped}"'


_COMMON = r"""
set -uo pipefail
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
restarts=${SLURM_RESTART_COUNT:-0}
hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
step=(srun --overlap --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
beside=()        # process ids of the srun's that run beside the command
driver=          # process id of what the script waits for
in_steps=        # set where that is an srun
watch=
stopping=        # the job's state when it was told to stop

say() { printf '%s voxlane: %s\n' "$(date '+%F %T')" "$*"; }
node() { exec "$python" -m voxlane.launch.slurm_node "$@"; }
# Waits for a child also where a signal comes between; its exit status is then in $status.
await() {
  while wait "$1" 2> /dev/null; status=$?; kill -0 "$1" 2> /dev/null; do :; done
  wait "$1" 2> /dev/null; local last=$?; [ "$last" -eq 127 ] || status=$last
}

# An srun that is told to stop kills its tasks; this lets them stop by themselves. It leaves this script alone.
end_steps() { scancel --quiet --signal=TERM "$SLURM_JOB_ID" 2> /dev/null; }

preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; }

# SLURM's warning before the time limit reaches this shell alone; scancel reaches everything.
told_to_stop() {
  [ -z "$stopping" ] || return
  stopping=$(squeue -h -j "$SLURM_JOB_ID" -o %T 2> /dev/null)
  say "told to stop (the job is ${stopping:=GONE})"
  [ -z "$driver" ] || end_driver
}
end_driver() {
  [ -z "$watch" ] || return
  if [ -n "$in_steps" ]; then end_steps; else kill -TERM "$driver" 2> /dev/null; fi
  # What does not stop in time is ended, because SLURM would end this script as well, and nobody would requeue.
  { read -rt "$patience_s" <> <(:); kill -KILL "$driver" 2> /dev/null; } &
  watch=$!
}
trap told_to_stop TERM INT

# Ends what was started beside the command, on every node, and then the job with this status.
finish() {
  local result=$1 pid
  [ -z "$watch" ] || kill "$watch" 2> /dev/null
  if [ "${#beside[@]}" -gt 0 ]; then
    end_steps
    # The srun of a node that is down never ends.
    { read -rt 20 <> <(:); kill -KILL "${beside[@]}" 2> /dev/null; } &
    watch=$!
    for pid in "${beside[@]}"; do await "$pid"; done
    kill "$watch" 2> /dev/null
  fi
  # A preemption with a time of grace ends the steps, and with them the command, and does not tell this script.
  [ -n "$stopping" ] || ! preempted || stopping=RUNNING
  if [ "$result" -ne 0 ] && [ "$stopping" = RUNNING ] && [ "$restarts" -lt "$requeues" ]; then
    say "goes back to the queue, to go on from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
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
# The dataset onto every node's own disk. A node without room says so, and reads from where the dataset is.
disk={folder}/voxlane-$(id -un)
staged=("loader.staged=$disk")
"${{step[@]}}" --nodes="$SLURM_JOB_NUM_NODES" "$python" -m voxlane stage {data} "$disk" --if-room &
driver=$! in_steps=yes
await "$driver"
in_steps=
[ "$status" -eq 0 ] || staged=()
[ -z "$stopping" ] || finish 1
"""

_RAY = r"""
# One Ray for this job alone: its own token, which is in no file, log or command line; its own ports and folders.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
unset RAY_ADDRESS RAY_AUTH_TOKEN_PATH
address=$head_ip:$port
export python restarts start_s

ray_node() {{
  local temp=/tmp/vl-$SLURM_JOB_ID-$restarts ray told= attempt
  # Nothing of Ray is worth saving, and it takes half a minute to end by itself.
  trap 'told=yes; kill -KILL $ray 2> /dev/null' TERM INT
  for attempt in 1 2 3; do  # Ray gives a node 30 s to start, which a busy one may miss
    rm -rf "/tmp/vl-$SLURM_JOB_ID-"* && mkdir -m 700 "$temp" || exit 1
    TMPDIR=$temp "$python" -m ray.scripts.scripts start "$@" --block --temp-dir="$temp" --disable-usage-stats \
      --num-cpus="${{SLURM_CPUS_ON_NODE:-1}}" --num-gpus="${{SLURM_GPUS_ON_NODE:-0}}" \
      --object-store-memory={object_store} --log-style=record --log-color=false &
    ray=$!
    wait "$ray"; wait "$ray" 2> /dev/null
    pkill -KILL -u "$(id -u)" -f "$temp/"
    for _ in {{1..25}}; do rm -rf "$temp" 2> /dev/null && break; read -rt 0.2 <> <(:); done
    [ -z "$told" ] && [ "$SECONDS" -lt "$start_s" ] || break
  done
}}
export -f ray_node

start_ray() {{  # HOST WORD...: its words go to a log of its own
  local host=$1; shift
  "${{step[@]}}" --nodes=1 --ntasks=1 --nodelist="$host" bash -c 'ray_node "$@"' ray "$@" &> "$logs-ray-$host.log" &
  beside+=($!)
}}
wait_for_ray() {{  # HOST...
  node wait "$address" "$start_s" "$(IFS=,; echo "${{beside[*]}}")" "$@" &
  driver=$!
  await "$driver"
  [ "$status" -ne 0 ] || return
  [ -n "$stopping" ] || tail -n 15 "$logs"-ray-*.log
  finish 1
}}

start_ray "${{hosts[0]}}" --head --node-ip-address="$head_ip" --port="$port" --dashboard-port="$port_2" \
  --ray-client-server-port="$port_3"
wait_for_ray "${{hosts[0]}}"
for host in "${{hosts[@]:1}}"; do start_ray "$host" --address="$address"; done
[ "${{#hosts[@]}}" -eq 1 ] || wait_for_ray "${{hosts[@]}}"
run() {{ exec "$python" -m voxlane "$@"; }}
"""

_TORCHRUN = r"""
export python endpoint=$head_ip:$port TORCH_CPP_LOG_LEVEL=ERROR
torchrun_node() {{
  local hosting=False; [ "$SLURM_NODEID" -ne 0 ] || hosting=True
  exec "$python" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={per_node} \
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID" --rdzv-conf="is_host=$hosting" \
    --max-restarts={retries} --shutdown-timeout=15 -m -- voxlane "$@"
}}
export -f torchrun_node
in_steps=yes
run() {{
  exec "${{step[@]}}" --nodes="$SLURM_JOB_NUM_NODES" --kill-on-bad-exit=1 bash -c 'torchrun_node "$@"' torchrun "$@"
}}
"""

_NONE = r"""
run() {{ exec "$python" -m voxlane "$@"; }}
"""

_RUN = r"""driver=
[ -z "$stopping" ] || finish 1
run "${words[@]}" &
driver=$!
[ -z "$stopping" ] || end_driver  # told to stop before the line above
await "$driver"
finish "$status"
"""
