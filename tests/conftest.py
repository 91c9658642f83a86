"""Buckets on real servers, one server a session, emptied before each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from botocore.config import Config
from xdist.scheduler import LoadScopeScheduling

from tests.ranks import Ranks
from tests.servers import azurite, has_azurite, seaweedfs
from voxlane import RetryConfig, Store, StoreConfig
from voxlane.testing import Access, Emulator
from voxlane.uri import parse

if not torch.cuda.is_available():
    # Triton's interpreter then runs the kernels, on the CPU. Triton asks when it is first imported, by whomever.
    os.environ["TRITON_INTERPRET"] = "1"

# Short pauses, so that tests of failures do not wait for real clouds' sake.
RETRY = RetryConfig(deadline_s=20.0, initial_delay_s=0.01, max_delay_s=0.2)
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's published account key, the same for everybody."""


_HERE = Path(__file__).parent
_TOGETHER = {"launch": "ray", "tune": "ray", "bench": "ray", "kube": "kube"}
"""Folders whose tests run one after another, in one process: their clusters would crowd each other out."""
_APART = ("tests/bench/test_step.py", "tests/bench/test_performance_page.py", "tests/bench/scale/")
"""In them, but without a cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on clusters are given time: a busy machine takes its own to start one."""
    for item in items:
        if item.path.relative_to(_HERE).parts[0] in _TOGETHER and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Which tests a process gets as one; `--dist loadgroup` of xdist 3.8 does not group on pytest 9.2."""
    return _Together(config, log)


class _Together(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_APART):
            return nodeid
        return _TOGETHER.get(nodeid.split("/")[1] if "/" in nodeid else "", nodeid)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """What runs in a test's own process may set their number, by which another test's sums would be rounded."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


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
        """`name` as a key of the bucket (folders have a path before it)."""
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
    """The emulator with nothing in it but the empty bucket `bkt`."""
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
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes to run as ranks."""
    pool = Ranks(str(tmp_path_factory.mktemp("ranks")))
    yield pool
    pool.close()


ALL = ["gcs", "s3", "s3_emulator", "azure", "folder", "memory"]
SHARED = ["gcs", "s3", "s3_emulator", "azure", "folder"]
"""Those that other processes can see."""


@pytest.fixture(params=ALL)
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """An empty bucket, once for every kind of store."""
    found: Bucket = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=SHARED)
def shared_bucket(request: pytest.FixtureRequest) -> Bucket:
    """An empty bucket, once for every kind of store that workers can reach."""
    found: Bucket = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def put() -> Callable[[Bucket, dict[str, bytes]], None]:
    """Write objects by name."""

    def write(bucket: Bucket, objects: dict[str, bytes]) -> None:
        store = bucket.store
        futures = [store.submit(store.put, bucket.key(name), body) for name, body in objects.items()]
        for future in futures:
            future.result()

    return write
