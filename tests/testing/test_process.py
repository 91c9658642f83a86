"""The emulator as a process: start, stop, death with its parent, command line, and what importing needs."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import select
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
import requests

from voxlane.testing import Access, Emulator, EmulatorError, Faults

from .conftest import BUCKET


def test_start_and_stop() -> None:
    emulator = Emulator(latency_s=0.001, access=Access(bearer_token="t"))
    with pytest.raises(EmulatorError, match="not running"):
        _ = emulator.url
    with emulator:
        url = emulator.url
        assert requests.get(f"{url}/storage/v1/b", timeout=60).status_code == 401
        with pytest.raises(EmulatorError, match="already started"):
            emulator.start()
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=60)
    with pytest.raises(EmulatorError, match="not running"):
        emulator.keys("b")
    emulator.stop()
    with emulator:
        emulator.create_bucket("again")


def test_server_exits_with_its_parent() -> None:
    program = (
        "import os\n"
        "from voxlane.testing import Emulator\n"
        "emulator = Emulator().start()\n"
        "print(emulator.pid, flush=True)\n"
        "os._exit(0)\n"  # no clean-up of any kind
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    try:
        server = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([server], [], [], 120)
    finally:
        os.close(server)
    assert ended


def test_port_in_use_is_reported(emulator: Emulator) -> None:
    port = int(emulator.url.rpartition(":")[2])
    with pytest.raises(EmulatorError, match="did not start"):
        Emulator(port=port).start()


def test_command_line() -> None:
    command = [
        sys.executable,
        "-m",
        "voxlane.testing",
        "--bucket",
        "demo",
        "--bucket",
        "more",
        "--latency-ms",
        "1",
        "--jitter-ms=2",
        "--bandwidth=2MiB",
        "--total-bandwidth=100MB",
        "--requests-per-s=5e3",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(3)]
        url = lines[0]
        buckets = requests.get(f"{url}/storage/v1/b", timeout=60).json()["items"]
        faults = requests.get(f"{url}/_emulator/faults", timeout=60).json()
        process.terminate()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
    assert lines[1:] == [f"export STORAGE_EMULATOR_HOST={url}", f"export AWS_ENDPOINT_URL={url}"]
    assert [bucket["name"] for bucket in buckets] == ["demo", "more"]
    assert Faults(**faults) == Faults(
        latency_s=0.001,
        jitter_s=0.002,
        bandwidth_bytes_per_s=2 << 20,
        total_bandwidth_bytes_per_s=100e6,
        requests_per_s=5000,
    )


@pytest.mark.parametrize(
    ("argument", "message"), [("--bandwidth=fast", "100MB"), ("--requests-per-s=-1", "Faults.requests_per_s")]
)
def test_errors_name_invalid_arguments(argument: str, message: str) -> None:
    for command in (["voxlane.testing"], ["voxlane", "emulator"]):
        done = subprocess.run([sys.executable, "-m", *command, argument], capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr
        assert " ".join(command) in done.stderr


def test_importing_needs_no_aiohttp() -> None:
    program = "import sys, voxlane.testing\nassert not {'aiohttp', 'uvloop', 'google_crc32c'} & set(sys.modules)\n"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_missing_aiohttp_is_reported_with_the_install_command() -> None:
    program = (
        "import importlib.util\n"
        "from voxlane.testing import Emulator, EmulatorError\n"
        "find_spec = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'aiohttp' else find_spec(name)\n"
        "try:\n"
        "    Emulator().start()\n"
        "except EmulatorError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'voxlane[testing]'" in done.stdout


def test_content_can_be_managed_through_the_emulator_class(emulator: Emulator) -> None:
    emulator.put_many(BUCKET, {"b/ü": b"2", "a": b"1", "b/": b""})
    assert emulator.keys(BUCKET) == ["a", "b/", "b/ü"]
    assert emulator.keys(BUCKET, prefix="b/") == ["b/", "b/ü"]
    assert emulator.get(BUCKET, "b/ü") == b"2"
    emulator.delete(BUCKET, "a")
    with pytest.raises(KeyError):
        emulator.get(BUCKET, "a")
    with pytest.raises(KeyError):
        emulator.delete(BUCKET, "a")
    with pytest.raises(KeyError):
        emulator.put("none", "k", b"")
    emulator.wipe()
    with pytest.raises(KeyError):
        emulator.keys(BUCKET)
    assert emulator.counters().requests == 0


def test_put_many_beyond_one_request(emulator: Emulator) -> None:
    contents = {str(i): bytes([i]) * (30 << 20) for i in range(3)}
    emulator.put_many(BUCKET, contents)
    assert all(emulator.get(BUCKET, key) == data for key, data in contents.items())


def test_fill_is_cheap(emulator: Emulator) -> None:
    assert emulator.fill(BUCKET, 200_000, key="img-{:08d}.bin", size_bytes=1 << 30) == 200_000
    assert emulator.fill(BUCKET, 2, key="more-{}", first=5) == 2
    assert emulator.keys(BUCKET, prefix="more") == ["more-5", "more-6"]
    first = requests.get(
        f"{emulator.url}/{BUCKET}/img-00000000.bin", headers={"Range": "bytes=1073741814-"}, timeout=60
    )
    assert len(first.content) == 10


def test_filled_objects_can_share_the_content_of_another(emulator: Emulator) -> None:
    content = bytes(range(256)) * 4000
    emulator.put(BUCKET, "first", content)
    before = resident_bytes(emulator)
    assert emulator.fill(BUCKET, 100_000, key="case-{:06d}", like="first") == 100_000
    # A copy of the content for each object would take 100 GB; a key takes a few bytes.
    assert resident_bytes(emulator) - before < 200 << 20
    emulator.delete(BUCKET, "first")
    url = f"{emulator.url}/{BUCKET}/case-000007"
    response = requests.get(url, headers={"Authorization": "Bearer t"}, timeout=60)
    assert response.content == content
    assert response.headers["ETag"] == f'"{hashlib.md5(content).hexdigest()}"'
    assert requests.get(url, headers={"Range": "bytes=256-258"}, timeout=60).content == bytes([0, 1, 2])
    listed = requests.get(f"{emulator.url}/storage/v1/b/{BUCKET}/o?prefix=case-00000", timeout=60).json()["items"]
    assert [(item["name"], item["size"]) for item in listed] == [
        (f"case-00000{i}", str(len(content))) for i in range(10)
    ]
    assert base64.b64decode(listed[0]["md5Hash"]) == hashlib.md5(content).digest()
    assert f"crc32c={listed[0]['crc32c']}" in response.headers["x-goog-hash"]
    rows = requests.get(f"{emulator.url}/{BUCKET}?prefix=case-00000", timeout=60).text
    assert rows.count(hashlib.md5(content).hexdigest()) == 10


def test_filled_objects_need_an_existing_content(emulator: Emulator) -> None:
    with pytest.raises(KeyError):
        emulator.fill(BUCKET, 1, key="k{}", like="none")
    emulator.put(BUCKET, "k", b"1")
    with pytest.raises(EmulatorError, match="either size_bytes or like"):
        emulator.fill(BUCKET, 1, key="k{}", like="k", size_bytes=7)


def resident_bytes(emulator: Emulator) -> int:
    pages = Path(f"/proc/{emulator.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_invalid_administrative_requests_are_refused(emulator: Emulator) -> None:
    connection = HTTPConnection("127.0.0.1", int(emulator.url.rpartition(":")[2]), timeout=60)
    connection.request("PUT", "/_emulator/faults", b'{"error_rate": 7}')
    response = connection.getresponse()
    assert response.status == 400
    assert b"error_rate" in response.read()
    connection.close()


def test_counters(emulator: Emulator) -> None:
    url = f"{emulator.url}/{BUCKET}/k"
    requests.put(url, data=b"12345", timeout=60)
    requests.get(url, timeout=60)
    requests.get(url, headers={"Range": "bytes=0-1"}, timeout=60)
    requests.head(url, timeout=60)
    requests.get(url + "-none", timeout=60)
    requests.delete(url, timeout=60)
    counters = emulator.counters()
    assert (counters.put.requests, counters.put.bytes_in, counters.put.statuses) == (1, 5, {200: 1})
    assert (counters.get.requests, counters.get.statuses) == (3, {200: 1, 206: 1, 404: 1})
    assert counters.get.bytes_out > 7
    assert (counters.head.requests, counters.head.bytes_out) == (1, 0)
    assert (counters.delete.requests, counters.requests) == (1, 6)
    assert counters.max_concurrent >= 1
    assert counters.statuses == {200: 3, 206: 1, 404: 1, 204: 1}
    assert counters.cpu_s > 0
    emulator.reset_counters()
    assert emulator.counters().requests == 0


def test_faults_do_not_affect_administrative_requests(emulator: Emulator) -> None:
    emulator.set_faults(Faults(error_rate=1.0))
    emulator.put(BUCKET, "k", b"1")
    assert emulator.get(BUCKET, "k") == b"1"
