"""Fixtures with buckets on real servers: each server runs for the session, and buckets are empty before each test."""

from __future__ import annotations

import locale
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import hypothesis
import pytest
import torch
from botocore.config import Config
from xdist.scheduler import LoadScopeScheduling

from tests.ranks import RankPool
from tests.servers import azurite, has_azurite, seaweedfs
from voxlane import RetryConfig, Store, StoreConfig
from voxlane.testing import Access, Emulator
from voxlane.uri import parse

# The duration of an example depends on the load of the machine.
hypothesis.settings.register_profile("voxlane", deadline=None)
hypothesis.settings.load_profile("voxlane")

# A shell starts background jobs with SIGINT ignored. Programs that the tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Triton's interpreter then runs the kernels on the CPU. Triton reads this when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Short pauses, so that tests of failures are fast.
RETRY = RetryConfig(deadline_s=20.0, initial_delay_s=0.01, max_delay_s=0.2)
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's published account key, which is the same for all installations."""


_CLUSTER_FOLDERS = {
    "tests/cluster/ray/": "ray",
    "tests/tune/": "ray",
    "tests/bench/": "ray",
    "tests/cluster/kubernetes/": "kubernetes",
}
"""Folders whose tests start a cluster. Those of one kind run one after another in one process, because two clusters
at once would starve each other."""
_CLUSTER_FREE = ("tests/bench/test_step.py", "tests/bench/test_performance_page.py", "tests/bench/simulator/")
"""Tests in those folders that start no cluster."""


def _cluster_kind(nodeid: str) -> str | None:
    """Return the kind of cluster that a test's folder uses, or None."""
    if nodeid.startswith(_CLUSTER_FREE):
        return None
    return next((kind for folder, kind in _CLUSTER_FOLDERS.items() if nodeid.startswith(folder)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give cluster tests more time: a busy machine needs longer to start a cluster."""
    for item in items:
        marked = item.get_closest_marker("cluster") is not None
        if (marked or _cluster_kind(item.nodeid)) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Do not blame a test for Ray's own processes, which Ray kills without waiting for their end."""
    if _cluster_kind(item.nodeid) == "ray":
        from ray._private.services import ConsolePopen

        def delete(process: Any) -> None:
            if process.stdin is not None:
                with suppress(OSError):  # the process may have ended
                    process.stdin.close()
            subprocess.Popen.__del__(process, _warn=lambda *_, **__: None)

        ConsolePopen.__del__ = delete


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Decide which tests share a process; `--dist loadgroup` of xdist 3.8 does not group on pytest 9.2."""
    return _ClusterScheduling(config, log)


class _ClusterScheduling(LoadScopeScheduling):
    """Schedule tests one by one, but all tests of one kind of cluster as one unit."""

    def _split_scope(self, nodeid: str) -> str:
        return _cluster_kind(nodeid) or nodeid


@pytest.fixture(autouse=True)
def _restore_num_threads() -> Iterator[None]:
    """Restore torch's number of threads, which a test may change and on which the rounding of sums depends."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _restore_locale() -> Iterator[None]:
    """Restore the locale, which GDCM sets to C in tests that write DICOM files: output of programs would then be read
    as ASCII."""
    before = locale.setlocale(locale.LC_ALL)
    yield
    locale.setlocale(locale.LC_ALL, before)


@dataclass(frozen=True)
class Bucket:
    """An empty bucket on a running server."""

    kind: str
    uri: str
    """The bucket's URI, without a trailing slash."""
    config: StoreConfig

    @property
    def store(self) -> Store:
        return Store(self.uri, self.config)

    def key(self, name: str) -> str:
        """Return the key of `name` in the bucket; in a folder the key begins with the folder's path."""
        prefix = parse(self.uri).key
        return f"{prefix}/{name}" if prefix else name

    def with_config(self, **changes: Any) -> Bucket:
        return replace(self, config=replace(self.config, **changes))


@pytest.fixture(scope="session")
def running_emulator() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


@pytest.fixture
def emulator(running_emulator: Emulator) -> Emulator:
    """Return the emulator with only the empty bucket `bkt` in it."""
    running_emulator.clear_faults()
    running_emulator.set_access(Access())
    running_emulator.wipe()
    running_emulator.create_bucket("bkt")
    running_emulator.reset_counters()
    return running_emulator


@pytest.fixture
def gcs(emulator: Emulator) -> Bucket:
    return Bucket("gs", "gs://bkt", StoreConfig(endpoint=emulator.url, retry=RETRY))


@pytest.fixture(scope="session")
def seaweedfs_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs"), "test", "testtest") as url:
        client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="testtest",
            config=Config(retries={"total_max_attempts": 20}),
        )
        client.create_bucket(Bucket="bkt")
        client.close()
        yield url


@pytest.fixture
def s3(seaweedfs_url: str) -> Bucket:
    config = StoreConfig(endpoint=seaweedfs_url, access_key_id="test", secret_access_key="testtest", retry=RETRY)
    bucket = Bucket("s3", "s3://bkt", config)
    bucket.store.delete_prefix("")
    return bucket


@pytest.fixture(scope="session")
def azurite_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not has_azurite():
        pytest.skip("Azurite is not installed (make install needs npm for it)")
    with azurite(tmp_path_factory.mktemp("azurite")) as url:
        from azure.storage.blob import ContainerClient

        endpoint = f"{url}/{AZURITE_ACCOUNT}"
        with ContainerClient(endpoint, "bkt", credential=AZURITE_KEY) as container:
            container.create_container()
        yield endpoint


@pytest.fixture
def azure(azurite_url: str) -> Bucket:
    config = StoreConfig(endpoint=azurite_url, account=AZURITE_ACCOUNT, account_key=AZURITE_KEY, retry=RETRY)
    bucket = Bucket("az", "az://bkt", config)
    bucket.store.delete_prefix("")
    return bucket


@pytest.fixture
def folder(tmp_path: Path) -> Bucket:
    (tmp_path / "bkt").mkdir()
    return Bucket("file", f"file://{tmp_path}/bkt", StoreConfig(retry=RETRY))


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Bucket:
    return Bucket("memory", f"memory://{request.node.name}".replace("[", "-").replace("]", ""), StoreConfig())


@pytest.fixture
def s3_emulator(emulator: Emulator) -> Bucket:
    config = StoreConfig(endpoint=emulator.url, access_key_id="k", secret_access_key="s", retry=RETRY)
    return Bucket("s3-emulator", "s3://bkt", config)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Return a pool of processes to run as ranks."""
    pool = RankPool(str(tmp_path_factory.mktemp("ranks")))
    yield pool
    pool.close()


ALL = ["gcs", "s3", "s3_emulator", "azure", "folder", "memory"]
SHARED = ["gcs", "s3", "s3_emulator", "azure", "folder"]
"""Stores that other processes can reach."""


@pytest.fixture(params=ALL)
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """Return an empty bucket, once for every kind of store."""
    empty: Bucket = request.getfixturevalue(request.param)
    return empty


@pytest.fixture(params=SHARED)
def shared_bucket(request: pytest.FixtureRequest) -> Bucket:
    """Return an empty bucket, once for every kind of store that other processes can reach."""
    empty: Bucket = request.getfixturevalue(request.param)
    return empty


@pytest.fixture
def put() -> Callable[[Bucket, dict[str, bytes]], None]:
    """Return a function that writes objects by name."""

    def write(bucket: Bucket, objects: dict[str, bytes]) -> None:
        store = bucket.store
        futures = [store.submit(store.put, bucket.key(name), body) for name, body in objects.items()]
        for future in futures:
            future.result()

    return write
