"""Clients, their operations, and the operations that a server is known not to support."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

Api = Literal["gcs", "s3"]

EMULATOR, FAKE_GCS_SERVER, SEAWEEDFS = "emulator", "fake-gcs-server", "SeaweedFS"
SERVERS: dict[Api, tuple[str, ...]] = {"gcs": (EMULATOR, FAKE_GCS_SERVER), "s3": (EMULATOR, SEAWEEDFS)}
"""Servers of each API by name, the emulator first."""


@dataclass(frozen=True)
class Server:
    """A running server with an empty bucket."""

    name: str
    url: str
    bucket: str
    access_key_id: str = "key"
    secret_access_key: str = "secret"


@dataclass(frozen=True)
class Client:
    """A client library."""

    name: str
    api: Api
    connect: Callable[[Server], AbstractContextManager[Any]]
    """Function that yields the handle which operations get: a client, a bucket or a file system."""


@dataclass(frozen=True)
class Operation:
    """Something that a client does with a server; it raises an exception if the server does not do it right."""

    client: Client
    name: str
    run: Callable[[Any], None]


OPERATIONS: list[Operation] = []


def operation(name: str, *clients: Client) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register the decorated function as the operation `name` of `clients`."""

    def register(run: Callable[[Any], None]) -> Callable[[Any], None]:
        OPERATIONS.extend(Operation(client, name, run) for client in clients)
        return run

    return register
