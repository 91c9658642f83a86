"""Conditional replacement of local files, which the byte engine lacks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from voxlane.errors import ChangedError, UnsupportedError


def not_expected_version(uri: str) -> ChangedError:
    """Return the error for an object that is not the version that a conditional write expects."""
    return ChangedError("the object is not the expected version", uri=uri, fix="Read it again")


@contextlib.contextmanager
def lock_current_version(path: str, uri: str) -> Iterator[None]:
    """Hold the file that is at `path` now locked.

    Writes replace a file by another one, so the lock is on one version of it: a process that waited for the lock while
    the file was replaced raises ChangedError. Raises UnsupportedError where files cannot be locked.
    """
    try:
        file = open(path, "r+b")  # noqa: SIM115 - closed below; NFS locks only files that are open for writing
    except FileNotFoundError:
        raise not_expected_version(uri) from None
    except OSError as error:
        raise UnsupportedError(f"the file cannot be locked ({error.strerror})", uri=uri) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UnsupportedError(f"the file cannot be locked ({error.strerror})", uri=uri) from None
        try:
            is_current = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        except FileNotFoundError:
            is_current = False
        if not is_current:
            raise not_expected_version(uri)
        yield
