"""Every operation of every client against every server of its API (tests/testing/conformance)."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from .conformance.boto3_client import connect_boto3
from .conformance.exceptions import EXCEPTIONS
from .conformance.registry import EMULATOR, FAKE_GCS_SERVER, OPERATIONS, SERVERS, Operation, Server
from .conformance.table import PAGE, replace_tables

# Clients leave connections and sessions to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning",
    "ignore:Unclosed:ResourceWarning",
    "ignore:Sending a large body directly:ResourceWarning",
)

_NUMBERS = itertools.count()


def _build_cases() -> Iterator[Any]:
    for case in OPERATIONS:
        for server in SERVERS[case.client.api]:
            reason = EXCEPTIONS.get((server, case.client.name, case.name))
            marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]
            yield pytest.param(
                case, server, id=f"{server}-{case.client.api}-{case.client.name}-{case.name}", marks=marks
            )


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Return the server of a case with an empty bucket."""
    name = request.param
    if name == EMULATOR:
        yield Server(name, request.getfixturevalue("emulator").url, "bkt")
    elif name == FAKE_GCS_SERVER:
        url, bucket = request.getfixturevalue("fake_gcs_url"), f"bkt-{next(_NUMBERS)}"
        requests.post(f"{url}/storage/v1/b", json={"name": bucket}, timeout=60).raise_for_status()
        yield Server(name, url, bucket)
    else:
        # A bucket of its own: SeaweedFS lists the folders of deleted objects as common prefixes.
        weed = Server(name, request.getfixturevalue("seaweedfs_url"), f"bkt-{next(_NUMBERS)}", "test", "testtest")
        client = connect_boto3(weed)
        client.create_bucket(Bucket=weed.bucket)
        yield weed
        client.delete_bucket(Bucket=weed.bucket)  # SeaweedFS does so although it is not empty
        client.close()


@pytest.mark.parametrize(("case", "server"), list(_build_cases()), indirect=["server"])
def test_operation(case: Operation, server: Server) -> None:
    try:
        with case.client.connect(server) as handle:
            case.run(handle)
    finally:
        with warnings.catch_warnings():
            # Here rather than in a later test, which would be blamed.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def test_exceptions_name_operations() -> None:
    cells = {(server, case.client.name, case.name) for case in OPERATIONS for server in SERVERS[case.client.api]}
    assert EXCEPTIONS.keys() <= cells


def test_emulator_has_no_exceptions() -> None:
    assert [cell for cell in EXCEPTIONS if cell[0] == EMULATOR] == []


def test_table_in_the_documentation_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert replace_tables(page) == page, "run: python -m tests.testing.conformance.table"
