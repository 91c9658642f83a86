"""A real SLURM of several nodes on one machine: its own munged, slurmctld and one slurmd a node.

A node is a set of namespaces: its own network (a veth on a bridge), hostname, processes, /tmp and local disk; so that
what must hold between machines (addresses, ports, temporary folders, leftovers) can be seen to. Files elsewhere are
shared, as a cluster's home is. Needs root, and Debian's slurm-wlm and munge (`make test-slurm` installs them).

    python -m tests.cluster.slurm.rig          starts one and a shell in it; leaving the shell stops it
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter", "unshare")
DEADLINE_S = 90.0
_SUBNETS = range(10, 250)
_CONF = """\
ClusterName=voxlane
SlurmctldHost={host}({subnet}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
MpiDefault=none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed.txt
SlurmdTimeout=15
KillWait=40
MinJobAge=600
InactiveLimit=0
Waittime=0
{nodes}
PartitionName=main Nodes=node[0-{last}] Default=YES MaxTime=60 DefaultTime=20 PriorityTier=1 GraceTime=60 State=UP
PartitionName=urgent Nodes=node[0-{last}] MaxTime=60 PriorityTier=10 PreemptMode=off State=UP
"""


@dataclass(frozen=True)
class Rig:
    """A running cluster."""

    folder: Path
    """Its state and logs."""
    local: Path
    """Each node's local disk: one path, another content on every node."""
    nodes: list[str]
    environment: dict[str, str]
    """What the commands of SLURM need."""
    _start: Callable[[str], int]
    """Starts a node."""
    _inits: dict[str, int] = field(default_factory=dict)
    """Node to the pid (outside) of its first process."""

    def run(self, *command: str, check: bool = True) -> str:
        """Output of a command on the login node."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def voxlane(self, *words: str, within_s: float = 400.0) -> subprocess.CompletedProcess[str]:
        """`voxlane` on the login node."""
        command = [sys.executable, "-m", "voxlane", *words]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=within_s
        )

    def on(self, node: str, *command: str) -> str:
        """Output of a command in a node's namespaces, past SLURM."""
        inside = ["nsenter", f"--target={self._inits[node]}", "--net", "--uts", "--mount", "--pid", *command]
        return subprocess.run(inside, env=self.environment, capture_output=True, text=True, check=True).stdout

    def processes(self, node: str) -> list[str]:
        """Command lines of what runs on a node beside SLURM's own daemons."""
        lines = self.on(node, "ps", "-eo", "pid=,args=").splitlines()
        own = ("slurmd -D", "slurmstepd", "ps -eo", "sh /", "nsenter ", "sleep infinity")
        stripped = [line.strip() for line in lines]
        return [line for line in stripped if not line.split(None, 1)[-1].startswith(own) and "<defunct>" not in line]

    def state(self, job: int) -> str:
        """A job's state, such as RUNNING; of a job that is gone the last one it had."""
        return self.fact(job, "JobState")

    def fact(self, job: int, name: str) -> str:
        """One field of `scontrol show job`."""
        shown = self.run("scontrol", "show", "job", "-o", str(job))
        return next(word.split("=", 1)[1] for word in shown.split() if word.startswith(f"{name}="))

    def wait(self, job: int, *states: str, within_s: float = 300.0) -> str:
        """Wait until a job has one of these states; returns it."""
        until(lambda: self.state(job) in states, within_s, lambda: f"job {job} to be {states}: {self.state(job)}")
        return self.state(job)

    @property
    def python(self) -> str:
        """The interpreter."""
        return sys.executable

    def reboot(self, node: str) -> None:
        """End a node with everything on it, as a power cut does, and start it again."""
        os.kill(self._inits[node], signal.SIGKILL)
        self._inits[node] = self._start(node)


def until(true: Callable[[], bool], within_s: float, expectation: str | Callable[[], str]) -> None:
    """Wait until `true`; AssertionError with `what` after `within_s`."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            description = expectation if isinstance(expectation, str) else expectation()
            raise AssertionError(f"waited {within_s:.0f} s for {description}")
        time.sleep(0.1)


def missing() -> str:
    """Why no cluster can be started here; empty: it can."""
    if os.geteuid() != 0:
        return "a SLURM of several nodes needs root (namespaces): run `make test-slurm` as root"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"{', '.join(lacking)} not installed: run `make test-slurm`" if lacking else ""


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@contextmanager
def cluster(nodes: int = 4, cpus: int = 4) -> Iterator[Rig]:
    """A cluster of `nodes` nodes that say they have `cpus` CPUs each; it ends with the block, with every process."""
    name = f"vx{secrets.token_hex(2)}"
    folder = Path(tempfile.mkdtemp(prefix="voxlane-slurm-"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        subnet = _network(name, nodes)
        environment = _configure(folder, subnet, nodes, cpus)
        _munge(folder, started)
        _spawn(started, folder / "slurmctld.out", environment, "slurmctld", "-D", "-c", "-f", f"{folder}/slurm.conf")
        names = [f"node{i}" for i in range(nodes)]

        def start(node: str) -> int:
            return _node(started, folder, environment, name, names.index(node))

        rig = Rig(folder, folder / "local", names, environment, start, {node: start(node) for node in names})
        up = f"{nodes} idle"
        until(
            lambda: rig.run("sinfo", "-h", "-p", "main", "-o", "%D %t", check=False).strip() == up,
            DEADLINE_S,
            lambda: f"{nodes} nodes: {rig.run('sinfo', check=False)}\n{_tails(folder)}",
        )
        yield rig
    finally:
        for process in reversed(started):
            process.kill()
        for process in started:
            process.wait()
        _unnetwork(name, nodes)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, subnet: str, nodes: int, cpus: int) -> dict[str, str]:
    (folder / "state").mkdir()
    (folder / "local").mkdir()
    hosts = [f"{subnet}.{10 + i} node{i}" for i in range(nodes)]
    host = os.uname().nodename.split(".")[0]
    for i in range(nodes):
        (folder / f"spool/node{i}").mkdir(parents=True)
        (folder / f"hosts.node{i}").write_text("\n".join(["127.0.0.1 localhost", f"{subnet}.1 {host}", *hosts, ""]))
    lines = "\n".join(
        f"NodeName=node{i} NodeHostname=node{i} NodeAddr={subnet}.{10 + i} Port=6818 CPUs={cpus} RealMemory=4000"
        for i in range(nodes)
    )
    text = _CONF.format(
        host=os.uname().nodename,
        subnet=subnet,
        port=_free_port(),
        folder=folder,
        last=nodes - 1,
        cpus=cpus,
        nodes=lines,
    )
    (folder / "slurm.conf").write_text(text)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    own = {"SLURM_CONF": f"{folder}/slurm.conf", "XDG_STATE_HOME": f"{folder}/home", "PATH": _path()}
    return {**environment, **own}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _munge(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{end}" for option, end in names.items()]
    command = ["munged", "--foreground", "--force", f"--key-file={key}", *options]
    _spawn(started, folder / "munge.out", {**os.environ, "PATH": _path()}, *command)
    until((folder / "munge.socket").exists, DEADLINE_S, lambda: f"munged: {(folder / 'munge.out').read_text()}")


_NODE = """\
hostname node{i}
mkdir -p {own}/tmp {own}/local
mount -t tmpfs -o size=1g none {folder}/local
for keep in {keep}; do mkdir -p {own}$keep; mount --rbind $keep {own}$keep; done
mount --bind {folder}/hosts.node{i} /etc/hosts
mount --rbind {own}/tmp /tmp
exec slurmd -D -N node{i} -f {folder}/slurm.conf
"""


def _node(started: list[subprocess.Popen[bytes]], folder: Path, environment: dict[str, str], name: str, i: int) -> int:
    """Start a node; returns the pid of its first process."""
    # A private /tmp hides what lies below it: what all nodes share is mounted there again.
    shared = {str(folder), str(Path.cwd()), sys.prefix, os.environ.get("VOXLANE_SLURM_SHARED", "")}
    keep = " ".join(sorted(path for path in shared if path.startswith("/tmp/")))
    script = _NODE.format(i=i, own=f"{folder}/node{i}", folder=folder, keep=keep or "''")
    into = ["nsenter", f"--net=/var/run/netns/{name}n{i}", "unshare", "-u", "-p", "-m", "-f", "--kill-child"]
    process = _spawn(
        started, folder / f"node{i}.out", environment, *into, "--mount-proc", "bash", "-ec", script, own_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: bool(children.read_text().split()), DEADLINE_S, f"node{i} to start")
    return int(children.read_text().split()[0])


def _spawn(
    started: list[subprocess.Popen[bytes]],
    log: Path,
    environment: dict[str, str],
    *command: str,
    own_session: bool = False,
) -> subprocess.Popen[bytes]:
    with open(log, "wb") as out:
        # They end with this process, however it ends.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=environment,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=own_session,
        )
    started.append(process)
    return process


def _network(name: str, nodes: int) -> str:
    """A bridge and one network namespace a node; returns the first three numbers of its addresses."""
    taken = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    subnet = next(f"10.199.{n}" for n in _SUBNETS if f" 10.199.{n}." not in taken)
    _ip(f"link add {name} type bridge", f"addr add {subnet}.1/24 dev {name}", f"link set {name} up")
    for i in range(nodes):
        space = f"{name}n{i}"
        _ip(
            f"netns add {space}",
            f"link add {name}h{i} type veth peer name eth0 netns {space}",
            f"link set {name}h{i} master {name} up",
            f"-n {space} link set lo up",
            f"-n {space} addr add {subnet}.{10 + i}/24 dev eth0",
            f"-n {space} link set eth0 up",
            f"-n {space} route add default via {subnet}.1",
        )
    return subnet


def _unnetwork(name: str, nodes: int) -> None:
    for words in [*(f"netns del {name}n{i}" for i in range(nodes)), f"link del {name}"]:
        subprocess.run(["ip", *words.split()], capture_output=True, check=False)


def _ip(*commands: str) -> None:
    for words in commands:
        subprocess.run(["ip", *words.split()], check=True)


def _tails(folder: Path) -> str:
    logs = sorted([*folder.glob("*.log"), *folder.glob("*.out")])
    return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-8:]) for log in logs)


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    with cluster() as running:
        print(f"{len(running.nodes)} nodes; SLURM_CONF={running.folder}/slurm.conf", flush=True)
        subprocess.run(os.environ.get("SHELL", "bash"), env=running.environment, check=False)
