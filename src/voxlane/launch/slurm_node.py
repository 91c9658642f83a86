"""What the batch script asks of Python on a job's nodes: free ports, and whether the Ray cluster stands.

python -m voxlane.launch.slurm_node endpoint FIRST_PORT [OTHER_HOST]      prints: address port port port
python -m voxlane.launch.slurm_node wait ADDRESS SECONDS PID,... HOST...  status 0 when every host has joined
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Sequence

_POLL_S = 0.5
_PORTS = 3
"""Those that Ray cannot choose for itself: of its head, its dashboard, its client."""
_TRIED_PORTS = 1000


def endpoint(first_port: int, other_host: str | None = None, ports: int = _PORTS) -> tuple[str, list[int]]:
    """This machine's address, the one by which `other_host` sees it, and free ports from `first_port` on."""
    address = _address(other_host)
    found: list[int] = []
    for port in range(first_port, first_port + _TRIED_PORTS):
        if _is_free(port):
            found.append(port)
        if len(found) == ports:
            break
    return address, found


def _address(other_host: str | None) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Sends nothing: asks the routing table which of this machine's addresses leads there.
        probe.connect((other_host or socket.gethostname(), 9))
        own: str = probe.getsockname()[0]
        return own
    return "127.0.0.1"


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def absent(wanted: Sequence[str], joined: Sequence[str]) -> list[str]:
    """The hosts of a job that have not joined, by what each node calls itself (with or without its domain)."""
    here = {name.split(".")[0] for name in joined}
    return [host for host in wanted if host.split(".")[0] not in here]


def wait(address: str, within_s: float, steps: Sequence[int], hosts: Sequence[str]) -> int:
    """Wait until a Ray node of every host has joined at `address`. Gives up, naming those that have not, when time is
    up or one of `steps` (process ids, one a started host) has ended."""
    begin = time.monotonic()
    while True:
        missing = absent(hosts, joined(address))
        if not missing:
            _say(f"Ray at {address}: {', '.join(hosts)} joined after {time.monotonic() - begin:.0f} s")
            return 0
        if not all(_runs(pid) for pid in steps):
            _say(f"{', '.join(missing)}: Ray could not be started; what it said follows")
            return 1
        if time.monotonic() - begin > within_s:
            _say(f"{', '.join(missing)}: did not join within {within_s:.0f} s; what Ray said follows")
            return 1
        time.sleep(_POLL_S)


def joined(address: str) -> list[str]:
    """Hosts of the Ray nodes that are alive; none while the head is not up."""
    host, _, port = address.rpartition(":")
    # Ray's own client waits 40 s for a head that is not there, and says so many times.
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), timeout=5).close()
        return _alive(address)
    return []


def _alive(address: str) -> list[str]:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        nodes = GcsClient(address=address).get_all_node_info(timeout=5).values()
    except Exception:  # noqa: BLE001  it listens but does not answer yet, in any of Ray's ways to say so; asked again
        return []
    return [node.node_manager_hostname for node in nodes if node.state == 0]


def _runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _say(text: str) -> None:
    print(f"{time.strftime('%F %T')} voxlane: {text}", flush=True)


def main(words: Sequence[str]) -> int:
    """Do what the script asks."""
    what, first, *rest = words
    if what == "endpoint":
        address, ports = endpoint(int(first), rest[0] if rest else None)
        print(address, *ports)
        return 0 if len(ports) == _PORTS else 1
    return wait(first, float(rest[0]), [int(pid) for pid in rest[1].split(",")], rest[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
