"""`voxlane app entry`, the first process of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Bucket
from tests.servers import free_ports
from voxlane.cluster.kubernetes.app import log_archive
from voxlane.store import StoreConfig

SHOW = "import sys; print('out'); print('err', file=sys.stderr)"


def start(command: list[str], *options: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "voxlane", "app", "entry", *options, "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "POD_NAME": "pod-0", **environment},
    )


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out.decode(), err.decode()


def python(code: str) -> list[str]:
    return [sys.executable, "-uc", code]


def logs_options(bucket: Bucket, run: str = "run") -> list[str]:
    assert bucket.config.endpoint
    return ["--logs", f"{bucket.uri}/{run}/logs", "--endpoint", bucket.config.endpoint]


def read_texts(bucket: Bucket, run: str = "run", **options: Any) -> list[str]:
    return [line.text for line in log_archive.read_archive(f"{bucket.uri}/{run}", bucket.config, **options)]


def test_output_is_unchanged_and_archived_with_times(gcs: Bucket) -> None:
    began = datetime.now(UTC)
    status, out, err = finish(start(python(SHOW), *logs_options(gcs)))
    assert (status, out, err) == (0, "out\n", "err\n")
    lines = list(log_archive.read_archive(f"{gcs.uri}/run", gcs.config))
    assert sorted(line.text for line in lines) == ["err", "out"]
    assert {line.pod for line in lines} == {"pod-0"}
    assert all(began <= datetime.fromisoformat(line.time) <= datetime.now(UTC) for line in lines)
    assert log_archive.list_archived_pods(f"{gcs.uri}/run", gcs.config) == ["pod-0"]


def test_output_is_not_delayed() -> None:
    process = start(python("import time; print('first', end=''); time.sleep(60)"))
    assert process.stdout is not None
    began = time.monotonic()
    assert process.stdout.read(5) == b"first"
    assert time.monotonic() - began < 40
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["no-such-program"], 127),
        (["/"], 126),
    ],
)
def test_exit_status_is_that_of_the_command(command: list[str], status: int, tmp_path: Path) -> None:
    lines_found, _, err = finish(start(command, "--logs", str(tmp_path / "run/logs")))
    assert lines_found == status
    output = [line.text for line in log_archive.read_archive(str(tmp_path / "run"))]
    if status in (126, 127):
        assert err.startswith(f"voxlane: {command[0]}: cannot be run: ")
        assert output == [err.strip()]
    else:
        command_line = " (SIGKILL, perhaps for lack of memory)" if status == 137 else ""
        assert output == [f"voxlane: the command ended with status {status}{command_line}"]
        assert err == ""


def test_missing_command_is_reported() -> None:
    status, _, err = finish(start([]))
    assert status == 2
    assert err == "voxlane app entry: missing COMMAND after --. See: voxlane app entry --help\n"


SAVES = """
import signal, sys, time
times = []
def stop(number, frame):
    times.append(number)
    print('saving', flush=True)
    time.sleep(0.3)
    print(f'saved after {len(times)}', end='', flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)
print('ready', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_the_command_once_and_its_last_output_is_archived(gcs: Bucket, number: int) -> None:
    process = start(python(SAVES), *logs_options(gcs))
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    status, out, _ = finish(process)
    assert (status, out) == (5, "saving\nsaved after 1")
    after = f"after {signal.Signals(number).name}"
    assert read_texts(gcs) == ["ready", "saving", "saved after 1", f"voxlane: the command ended with status 5 {after}"]


def test_output_before_sigterm_is_archived_even_if_the_container_is_killed(gcs: Bucket) -> None:
    """A container that takes longer than its grace period to end is killed."""
    process = start(
        python("import signal, time; signal.signal(15, signal.SIG_IGN); print('ready'); time.sleep(60)"),
        *logs_options(gcs),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    deadline = time.monotonic() + 300
    while not read_texts(gcs) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert read_texts(gcs) == ["ready"]


def test_secrets_are_redacted_from_both_streams_and_the_archive(gcs: Bucket) -> None:
    code = (
        "import os, sys, time\n"
        "print('key', os.environ['AWS_SECRET_ACCESS_KEY'])\n"
        "for half in ('open-', 'sesame'): sys.stderr.write(half); sys.stderr.flush(); time.sleep(0.1)\n"
    )
    hidden = {"AWS_SECRET_ACCESS_KEY": "hunter2hunter2", "OTHER": "open-sesame"}
    status, out, err = finish(start(python(code), *logs_options(gcs), "--hide", "OTHER", **hidden))
    assert (status, out, err) == (0, "key ***\n", "***")
    assert read_texts(gcs) == ["key ***", "***"]


def test_unwritable_bucket_is_reported_once_and_changes_nothing_else(gcs: Bucket) -> None:
    status, out, err = finish(
        start(python(SHOW + "; sys.exit(4)"), "--logs", "gs://nowhere/run/logs", *logs_options(gcs)[2:])
    )
    assert (status, out) == (4, "out\n")
    first, output, lost = err.splitlines()
    assert first == "err"
    assert output.startswith("voxlane: the log cannot be archived at the moment; voxlane tries again: gs://nowhere")
    assert lost.startswith("voxlane: 3 lines of the log could not be archived in gs://nowhere/run/logs/pod-0/")


def test_bucket_that_is_unavailable_for_a_while_gets_everything(gcs: Bucket) -> None:
    away = StoreConfig(endpoint=f"http://127.0.0.1:{free_ports(1)[0]}", anonymous=True)
    output: list[str] = []
    archiver = log_archive.LogArchiver(f"{gcs.uri}/run/logs", "p", away, interval_s=0.1, report=output.append)
    archiver.start()
    archiver.add(1, b"one\n")
    while not output:
        time.sleep(0.05)
    archiver._store = log_archive.Store(gcs.uri, gcs.config)  # the bucket is available again
    archiver.add(1, b"two\n")
    assert archiver.close()
    assert read_texts(gcs) == ["one", "two"]
    assert len(output) == 1


def test_orphans_are_reaped_and_do_not_delay_the_end() -> None:
    code = (
        "import os, subprocess, time\n"
        # Two processes whose parent ends first: one ends soon, the other keeps running.
        "subprocess.run(['sh', '-c', 'sleep 0.1 & sleep 60 &'])\n"
        "time.sleep(0.6)\n"
        "parent = os.getppid()\n"
        "states = [open(f'/proc/{p}/stat').read().rpartition(')')[2].split()[:2] for p in os.listdir('/proc')"
        " if p.isdigit() and os.path.exists(f'/proc/{p}/stat')]\n"
        "print(sorted(state for state, of in states if of == str(parent)))\n"
    )
    began = time.monotonic()
    process = start(python(code))
    status, out, _ = finish(process)
    assert status == 0
    assert out == "['R', 'S']\n"  # the command itself and the sleeping orphan, but no zombie
    assert time.monotonic() - began < 40


def test_command_ends_if_its_parent_is_killed(tmp_path: Path) -> None:
    process = start(python("import os, time; print(os.getpid()); time.sleep(60)"))
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    finish(process)
    deadline = time.monotonic() + 300
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


def test_large_output_is_split_into_objects(gcs: Bucket) -> None:
    code = "for i in range(40_000): print(i, 'x' * 60)"
    process = start([sys.executable, "-c", code], *logs_options(gcs))
    status, out, _ = finish(process)
    assert status == 0
    assert read_texts(gcs) == out.splitlines()
    sizes = [size for page in gcs.store.list_pages("run/logs/") for size in page.column("size").to_pylist()]
    assert len(sizes) > 2
    assert max(sizes) < 1.2 * (1 << 20)


# -- lines -------------------------------------------------------------------------------------------------------------


def strip_times(lines: list[bytes]) -> list[bytes]:
    return [line.partition(b" ")[2] for line in lines]


def test_lines_have_the_time_of_their_end() -> None:
    lines = log_archive.LineSplitter()
    assert lines.add(b"a", 1.0) == []
    assert lines.add(b"b\nc", 86_400.25) == [b"1970-01-02T00:00:00.250000Z ab\n"]
    assert lines.finish(86_401.0) == [b"1970-01-02T00:00:01.000000Z c\n"]
    assert lines.finish(86_402.0) == []


def test_progress_bar_is_sampled() -> None:
    lines = log_archive.LineSplitter()
    assert lines.add(b"\r10%\r20%", 0) == []
    assert strip_times(lines.sample(0)) == [b"20%\n"]
    assert lines.sample(0) == []
    assert lines.add(b"\r30%\r", 0) == []
    assert strip_times(lines.sample(0)) == [b"30%\n"]
    assert strip_times(lines.add(b"\r100%\nend\r\n\n", 0)) == [b"100%\n", b"end\n", b"\n"]
    assert lines.sample(0) == []


def test_very_long_line_is_split() -> None:
    lines = log_archive.LineSplitter()
    lines_found = lines.add(b"x" * 300_000, 0)
    assert strip_times(lines_found) == [b"x" * 300_000 + b"\n"]


# -- reading -----------------------------------------------------------------------------------------------------------


def stamp(second: int, text: str) -> bytes:
    return f"2026-03-02T09:00:{second:02d}.000000Z {text}\n".encode()


def test_pods_are_merged_by_time(shared_bucket: Bucket, put: Callable[[Bucket, dict[str, bytes]], None]) -> None:
    bucket = shared_bucket
    put(
        bucket,
        {
            "run/logs/a/20260302T090000.000Z-000000.log": stamp(1, "a1") + stamp(4, "a4"),
            "run/logs/a/20260302T090000.000Z-000001.log": stamp(5, "a5") + b"odd\n",
            "run/logs/a/20260302T090010.000Z-000000.log": stamp(10, "a again"),
            "run/logs/b/20260302T090000.000Z-000000.log": stamp(2, "b2 \xff".encode("latin1").decode("latin1")),
            "run/logs/b/20260302T090000.000Z-000001.log": stamp(11, "") + stamp(9, "clock set back"),
            "run/logs-of-another/c/x.log": stamp(3, "no"),
            "run/logs/readme.txt": b"no\n",
        },
    )
    uri = f"{bucket.uri}/run"
    lines = [(line.pod, line.text) for line in log_archive.read_archive(uri, bucket.config)]
    assert [text for _, text in lines] == ["a1", "b2 ÿ", "a4", "a5", "odd", "a again", "", "clock set back"]
    since = datetime(2026, 3, 2, 9, 0, 5, tzinfo=UTC)
    assert [line.text for line in log_archive.read_archive(uri, bucket.config, since=since)][:2] == ["a5", "odd"]
    assert [line.text for line in log_archive.read_archive(uri, bucket.config, pods=["a"])] == [
        "a1",
        "a4",
        "a5",
        "odd",
        "a again",
    ]
    assert list(log_archive.read_archive(uri, bucket.config, since=datetime.now(UTC) + timedelta(hours=1))) == []
    assert list(log_archive.read_archive(f"{bucket.uri}/other", bucket.config)) == []
