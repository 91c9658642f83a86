"""A program that ends all processes of a Ray cluster on this machine once its standard input is closed, which happens
when the process that started the cluster ends, whatever ends it.

Ray's own agents notice the end of their parent only after seconds, and then report it to servers that are gone. The
argument is the cluster's folder; its processes are those whose TMPDIR is that folder, or who have files in it open.
Runs without the package, so that it starts at once.
"""

import contextlib
import os
import signal
import sys
import time

_DEADLINE_S = 10.0


def find_processes(folder: str) -> list[int]:
    """Return the processes that belong to the folder, but not the one that started the cluster, which has logs open."""
    processes = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getppid()]
    return [int(name) for name in processes if _belongs(name, folder)]


def _belongs(process: str, folder: str) -> bool:
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            if f"TMPDIR={folder}".encode() in file.read().split(b"\0"):
                return True
        # Ray writes the names of its processes over their environment.
        files = os.listdir(f"/proc/{process}/fd")
    except OSError:  # it has ended, or is another user's
        return False
    return any(_read_link(f"/proc/{process}/fd/{name}").startswith(f"{folder}/") for name in files)


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # it was closed
        return ""


def main() -> None:
    """Wait for the end of the input, then end the processes."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _DEADLINE_S
    while (processes := find_processes(sys.argv[1])) and time.monotonic() < deadline:
        for pid in processes:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
