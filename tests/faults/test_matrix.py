"""Commands x faults x stores: every cell ends with the right bytes or one clear error, and in time."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import AZURITE_ACCOUNT, AZURITE_KEY
from tests.faults.commands import HEAVY, LIGHT, Bench, fill, fill_training
from tests.faults.proxy import Fault, FaultKind, FaultProxy
from voxlane import RetryConfig, StoreConfig
from voxlane.errors import VoxlaneError
from voxlane.store import direct, gcs_json
from voxlane.testing import Emulator

STORES = ("gs", "s3", "az")
DEADLINE_S = 10.0
SLACK_S = 30.0
"""What a cell may take beyond the deadline, as promised."""
_WORK_S = 30.0
"""What the work of a cell takes on a busy machine without faults."""
PASSING: tuple[FaultKind, ...] = (
    "reset", "lost", "truncated", "corrupted", "short", "429", "500", "503", "html", "trickle", "hang", "stall",
    "repeated page",
)  # fmt: skip
"""Faults that are healed: they meet a few requests."""
JUDGED: tuple[FaultKind, ...] = ("404", "403", "418", "redirect")
"""Answers of a service that are believed, so that the command may fail."""
LASTING: tuple[FaultKind, ...] = ("503", "html", "corrupted", "short", "reset")
"""Faults that meet every request."""
TRAINING: tuple[FaultKind, ...] = ("reset", "lost", "corrupted", "503", "html", "stall", "404")


class _Site:
    """A bucket of one kind behind a proxy."""

    def __init__(self, proxy: FaultProxy, bench: Bench) -> None:
        self.proxy = proxy
        self.bench = bench
        self.expected: dict[str, Any] = {}
        self.is_trained = False

    def run(self, command: str) -> Any:
        """Run a command of the matrix."""
        return (LIGHT | HEAVY)[command](self.bench)

    def reference(self, command: str) -> Any:
        """Return what a command returns without faults."""
        if command in HEAVY and not self.is_trained:
            fill_training(self.bench)
            self.is_trained = True
        if command not in self.expected:
            self.expected[command] = self.run(command)
        return self.expected[command]


@pytest.fixture(scope="session")
def sites(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, _Site]]:
    """Return the sites that were used so far, by kind of store."""
    with ExitStack() as stack:
        yield _Sites(request, tmp_path_factory, stack)


class _Sites(dict[str, _Site]):
    """Makes a site when it is first needed."""

    def __init__(self, request: Any, folders: Any, stack: ExitStack) -> None:
        super().__init__()
        self._request, self._folders, self._stack = request, folders, stack

    def __missing__(self, store: str) -> _Site:
        if store == "gs":
            # Not the emulator of other tests, which is wiped before each of them.
            emulator = self._stack.enter_context(Emulator())
            emulator.create_bucket("faults")
            direct_config = StoreConfig(endpoint=emulator.url)
        elif store == "s3":
            url = self._request.getfixturevalue("seaweedfs_url")
            direct_config = StoreConfig(endpoint=url, access_key_id="test", secret_access_key="testtest")
            import boto3

            client = boto3.client(
                "s3",
                endpoint_url=url,
                region_name="us-east-1",
                aws_access_key_id="test",
                aws_secret_access_key="testtest",
            )
            client.create_bucket(Bucket="faults")
            client.close()
        else:
            url = self._request.getfixturevalue("azurite_url")
            direct_config = StoreConfig(endpoint=url, account=AZURITE_ACCOUNT, account_key=AZURITE_KEY)
            from azure.storage.blob import ContainerClient

            with ContainerClient(url, "faults", credential=AZURITE_KEY) as container:
                container.create_container()
        proxy = self._stack.enter_context(FaultProxy(direct_config.endpoint or ""))
        direct_config = replace(direct_config, part_bytes=5 << 20)
        faulty = replace(
            direct_config,
            endpoint=proxy.url,
            connect_timeout_s=1.0,
            read_timeout_s=2.0,
            retry=RetryConfig(deadline_s=DEADLINE_S, initial_delay_s=0.01, max_delay_s=0.2),
        )
        bench = Bench(f"{store}://faults", faulty, direct_config, self._folders.mktemp(f"faults-{store}"))
        fill(bench)
        self[store] = _Site(proxy, bench)
        return self[store]


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """List in pages of five keys, so that listings have several."""
    for module in (direct, gcs_json):
        monkeypatch.setattr(module, "LIST_PAGE_KEYS", 5)


def _run_cell(site: _Site, command: str, fault: Fault, *, must_heal: bool) -> None:
    expected = site.reference(command)
    limit_s = DEADLINE_S + SLACK_S + _WORK_S
    faulthandler.dump_traceback_later(limit_s, file=sys.__stderr__)
    start, failure, result = time.monotonic(), "", None
    try:
        with site.proxy.inject(fault):
            result = site.run(command)
    except VoxlaneError as error:
        failure = f"{type(error).__name__}: {error}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert time.monotonic() - start < limit_s
    if not failure:
        assert result == expected, f"wrong result after {fault.met} faults"
        return
    assert not must_heal, f"not healed after {fault.met} faults: {failure}"
    assert site.bench.uri in failure or "http" in failure, f"the error names nothing: {failure}"
    assert "\n" not in failure or command == "prepare", f"the error has several lines: {failure}"


def _cells(commands: Any, faults: Any, stores: Any = STORES) -> list[tuple[str, FaultKind, str]]:
    return [(command, fault, store) for store in stores for command in commands for fault in faults]


@pytest.mark.faults
@pytest.mark.parametrize(("command", "kind", "store"), _cells(LIGHT, PASSING))
def test_passing_faults_are_healed(sites: dict[str, _Site], command: str, kind: FaultKind, store: str) -> None:
    _run_cell(sites[store], command, Fault(kind), must_heal=True)


@pytest.mark.faults
@pytest.mark.parametrize(("command", "kind", "store"), _cells(LIGHT, JUDGED))
def test_answers_end_in_an_error_or_the_right_bytes(
    sites: dict[str, _Site], command: str, kind: FaultKind, store: str
) -> None:
    _run_cell(sites[store], command, Fault(kind, times=1), must_heal=False)


@pytest.mark.faults
@pytest.mark.parametrize(("command", "kind", "store"), _cells(LIGHT, LASTING))
def test_lasting_faults_end_in_an_error(
    sites: dict[str, _Site], monkeypatch: pytest.MonkeyPatch, command: str, kind: FaultKind, store: str
) -> None:
    bench = sites[store].bench
    sites[store].reference(command)
    brief = replace(bench.faulty.retry, deadline_s=2.0)
    monkeypatch.setattr(sites[store], "bench", replace(bench, faulty=replace(bench.faulty, retry=brief)))
    _run_cell(sites[store], command, Fault(kind, times=10**9), must_heal=False)


@pytest.mark.faults
@pytest.mark.parametrize(("command", "kind", "store"), _cells(HEAVY, TRAINING))
def test_training_commands(sites: dict[str, _Site], command: str, kind: FaultKind, store: str) -> None:
    _run_cell(sites[store], command, Fault(kind), must_heal=kind != "404")


@pytest.mark.faults
@pytest.mark.parametrize(("command", "store"), [(command, store) for store in STORES for command in LIGHT])
def test_store_that_refuses_connections_for_a_while(sites: dict[str, _Site], command: str, store: str) -> None:
    site = sites[store]
    site.reference(command)
    outage = site.proxy.refuse_for(2.0)
    try:
        _run_cell(site, command, Fault("reset", times=0), must_heal=True)
    finally:
        outage.join()


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ls", "html"), ("ls", "repeated page"), ("ls", "truncated"), ("ls", "trickle"),
        ("map", "corrupted"), ("map", "short"), ("map", "stall"),
        ("iterable", "corrupted"), ("save", "lost"), ("save", "reset"), ("load", "corrupted"), ("stage", "corrupted"),
    ],
)  # fmt: skip
def test_representative_cells(sites: dict[str, _Site], command: str, kind: FaultKind) -> None:
    _run_cell(sites["gs"], command, Fault(kind), must_heal=True)
