"""Helper of the batch script on a job's nodes: it finds free ports and waits for the Ray cluster.

python -m voxlane.cluster.slurm.node endpoint FIRST_PORT [OTHER_HOST]      prints: address port port port
python -m voxlane.cluster.slurm.node wait ADDRESS SECONDS PID,... HOST...  status 0 when every host has joined
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import time
from collections.abc import Sequence

_POLL_S = 0.5
_PORTS = 3
"""Number of ports that must be known beforehand: of Ray's head, its dashboard and its client server."""
_TRIED_PORTS = 1000


def find_endpoint(first_port: int, other_host: str | None = None) -> tuple[str, list[int]]:
    """Return the address by which `other_host` reaches this machine, and free ports from `first_port` on."""
    address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # This sends nothing: it only asks the routing table for the address that leads there.
        probe.connect((other_host or socket.gethostname(), 9))
        address = str(probe.getsockname()[0])
    free_ports = filter(_is_free, range(first_port, first_port + _TRIED_PORTS))
    return address, list(itertools.islice(free_ports, _PORTS))


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def find_missing_hosts(expected: Sequence[str], joined: Sequence[str]) -> list[str]:
    """Return the hosts that have not joined. Names are compared without their domains."""
    joined_names = {name.split(".")[0] for name in joined}
    return [host for host in expected if host.split(".")[0] not in joined_names]


def wait_for_hosts(address: str, timeout_s: float, steps: Sequence[int], hosts: Sequence[str]) -> int:
    """Wait until a Ray node of every host has joined at `address`; return the exit status.

    Gives up, naming the missing hosts, when the time is up or one of `steps` (process ids, one per host) has ended.
    """
    started_at = time.monotonic()
    while True:
        missing = find_missing_hosts(hosts, list_joined_hosts(address))
        if not missing:
            _say(f"Ray at {address}: {', '.join(hosts)} joined after {time.monotonic() - started_at:.0f} s")
            return 0
        if not all(_is_running(pid) for pid in steps):
            _say(f"{', '.join(missing)}: Ray could not start; its output follows")
            return 1
        if time.monotonic() - started_at > timeout_s:
            _say(f"{', '.join(missing)}: did not join within {timeout_s:.0f} s; the output of Ray follows")
            return 1
        time.sleep(_POLL_S)


def list_joined_hosts(address: str) -> list[str]:
    """Return the hosts of the live Ray nodes; none while the head is not up."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    host, _, port = address.rpartition(":")
    try:
        # Ray's own client waits 40 s for a missing head, and logs many lines about it.
        socket.create_connection((host, int(port)), timeout=5).close()
        nodes = GcsClient(address=address).get_all_node_info(timeout=5).values()
    except Exception:  # noqa: BLE001 - it does not answer yet, for which Ray raises many types; we ask again
        return []
    return [node.node_manager_hostname for node in nodes if node.state == 0]


def _is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _say(text: str) -> None:
    print(f"{time.strftime('%F %T')} voxlane: {text}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run one of the two commands."""
    command, first, *rest = arguments
    if command == "endpoint":
        address, ports = find_endpoint(int(first), rest[0] if rest else None)
        print(address, *ports)
        return 0 if len(ports) == _PORTS else 1
    return wait_for_hosts(first, float(rest[0]), [int(pid) for pid in rest[1].split(",")], rest[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
