"""Children end with their parent, whatever ends it, and what killed processes left is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from voxlane import temporary
from voxlane.processes import ProcessId, read_scope

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are found in /proc")

START_SPAWNED = """
import threading, time
from voxlane.processes import SupervisedContext

def main():
    SupervisedContext().Process(target=time.sleep, args=(600,)).start()
    print("started", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    {call}
"""
START_LOADER = """
import time
import torch
from voxlane.dataset.loader import DataLoader
from voxlane.dataset import MapDataset

def main():
    loader = DataLoader(MapDataset({folder!r}), num_workers=2, persistent_workers=True, collate_fn=list)
    batches = iter(loader)
    next(batches)
    print("started", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    main()
"""
START_PROGRAM = """
import subprocess, time
from voxlane.processes import make_death_hook

subprocess.Popen(["sleep", "600"], preexec_fn=make_death_hook())
print("started", flush=True)
time.sleep(600)
"""


END_SPAWNED = """
import atexit, sys
from voxlane.processes import SupervisedContext

class Last:
    def __del__(self):
        print("dismantled", flush=True)

def work():
    sys.last = Last()
    atexit.register(print, "exit function")
    raise SystemExit(3)

if __name__ == "__main__":
    process = SupervisedContext().Process(target=work)
    process.start()
    process.join()
    print(process.exitcode)
"""


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def list_descendants(pid: int) -> list[int]:
    descendants: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            descendants += [child, *list_descendants(child)]
    return descendants


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    "code",
    [
        START_SPAWNED.format(call="main()"),
        START_SPAWNED.format(call="threading.Thread(target=main).start()"),
        START_LOADER,
        START_PROGRAM,
    ],
    ids=["spawned", "spawned from a thread", "loader", "program"],
)
def test_children_end_with_a_killed_parent(code: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(8):
        (tmp_path / "data" / str(i)).write_bytes(b"x")
    script = tmp_path / "script.py"
    script.write_text(code.replace("{folder!r}", repr(str(tmp_path / "data"))))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        children = list_descendants(parent.pid)
        assert children
        parent.kill()
        parent.wait()
        wait_for(lambda: not any(map(is_running, children)))


def test_loader_workers_ignore_a_sigterm_that_is_not_of_their_parent(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    code = f"""
import os, signal
from voxlane import DataLoader, MapDataset
loader = DataLoader(MapDataset({str(tmp_path)!r}), num_workers=1, persistent_workers=True, collate_fn=list)
list(loader)
worker = loader._iterator._workers[0].pid
assert os.system(f"kill -TERM {{worker}}") == 0  # sent by a process that is not the parent
print(len(list(loader)), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "1\n", done.stderr


def test_only_what_ended_processes_left_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as ended:
        identity = ProcessId(ended.pid, int(Path(f"/proc/{ended.pid}/stat").read_text().split()[21]), read_scope())
        ended.kill()
    assert identity.has_ended()
    for owner in (str(identity), str(ProcessId.current()), f"{ended.pid}-1-elsewhere", "notes"):
        folder = tmp_path / f"voxlane-board-{owner}-abcdefgh"
        folder.mkdir()
        (folder / "events").write_bytes(b"x")
    (tmp_path / f"voxlane-short-{identity}-ijklmnop").mkdir()
    (tmp_path / "voxlane-ijklmnop").mkdir()
    (tmp_path / "voxlane-0").mkdir()
    (tmp_path / f"voxlane-link-{identity}-abcdefgh").symlink_to(tmp_path / "voxlane-0")
    semaphore = Path("/dev/shm", f"sem.voxlane-{identity}-abcdefgh")
    semaphore.write_bytes(b"")
    temporary.remove_abandoned(str(tmp_path))
    assert not semaphore.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [
            f"voxlane-board-{ProcessId.current()}-abcdefgh",
            f"voxlane-board-{ended.pid}-1-elsewhere-abcdefgh",
            "voxlane-board-notes-abcdefgh",
            "voxlane-0",
            f"voxlane-link-{identity}-abcdefgh",
        ]
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_folders_of_other_users_remain(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    folder = tmp_path / f"voxlane-board-{ended.pid}-1-{read_scope()}-abcdefgh"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    assert temporary.remove_abandoned(str(tmp_path)) == []
    os.chown(folder, 0, 0)
    assert temporary.remove_abandoned(str(tmp_path)) == [str(folder)]


def test_short_folder_and_its_mark_are_removed(tmp_path: Path) -> None:
    folder = temporary.make_short_folder(str(tmp_path))
    assert len(folder) <= len(str(tmp_path)) + 17
    assert len(list(tmp_path.iterdir())) == 2
    temporary.remove_short_folder(folder)
    assert list(tmp_path.iterdir()) == []


def test_sigterm_ends_a_command_with_143(tmp_path: Path) -> None:
    code = "import sys; from voxlane.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["emulator", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (0, 143)


def test_children_end_after_their_exit_functions_without_dismantling_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(END_SPAWNED)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=True)
    assert (done.stdout.split("\n"), done.stderr) == (["exit function", "3", ""], "")
