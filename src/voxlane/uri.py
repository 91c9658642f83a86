"""URIs of the form `scheme://bucket/key`, parsed and formatted without I/O.

A key is the complete path inside the bucket, without a leading slash. `file://` URIs and plain paths belong to one
bucket whose root is `/`, so the key of `file:///data/a.nii` is `data/a.nii`.
"""

from __future__ import annotations

import difflib
import os
import re
import urllib.parse
from dataclasses import dataclass

from voxlane.errors import ConfigError

StrPath = str | os.PathLike[str]
"""A URI or a local path."""
SCHEMES = ("gs", "s3", "az", "file", "memory")
_SCHEME_LIST = ", ".join(f"{scheme}://" for scheme in SCHEMES)
_ALIASES = {"gcs": "gs", "s3a": "s3", "azure": "az", "adl": "az"}


@dataclass(frozen=True)
class Uri:
    """A location in a bucket; `str()` returns the URI."""

    scheme: str
    bucket: str
    """Bucket, container or memory-store name; empty for `file`."""
    key: str
    """Path inside the bucket without a leading slash; may be empty or a prefix."""

    @property
    def root(self) -> str:
        """URI of the bucket itself, ending in a slash: `gs://bucket/`, `file:///`."""
        return f"{self.scheme}://{self.bucket}/"

    def __str__(self) -> str:
        return self.root + self.key


def parse(uri: StrPath) -> Uri:
    """Parse `uri`; a string without a scheme is a local path, relative to the working directory."""
    text = os.fspath(uri)
    if not text:
        raise ConfigError("the URI is empty", fix=f"Write one such as gs://bucket/prefix; schemes: {_SCHEME_LIST}")
    if "://" not in text:
        scheme, slash, rest = text.partition(":/")
        if slash and scheme.lower() in (*SCHEMES, *_ALIASES):
            fix = f"Write {scheme.lower()}://{rest}"
            raise ConfigError("the URI has one slash after its scheme", uri=text, fix=fix)
        return _parse_path(os.path.expanduser(text))
    scheme, rest = text.split("://", 1)
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if scheme not in SCHEMES:
        similar = difflib.get_close_matches(scheme, [*SCHEMES, *_ALIASES], n=1, cutoff=0.5)
        hint = f"Did you mean {similar[0]}://? " if similar else ""
        raise ConfigError(f"unknown scheme {scheme!r}", uri=text, fix=f"{hint}Known schemes: {_SCHEME_LIST}")
    if scheme == "file":
        if not rest.startswith("/"):
            raise ConfigError(
                "a file URI needs an absolute path", uri=text, fix=f"Write file:///{rest}, or the plain path {rest!r}"
            )
        return _parse_path(rest)
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise ConfigError("the URI names no bucket", uri=text, fix=f"Write {scheme}://BUCKET/{key}")
    return Uri(scheme, bucket, key)


def from_path(path: StrPath) -> str:
    """Return `path` as text; a URI that lost a slash in `pathlib` gets it back."""
    text = re.sub(r"^file:/+(?=[^/])", "file:///", os.fspath(path))
    return re.sub(r"^(gs|gcs|s3|s3a|az):/+(?=[^/])", r"\1://", text)


def _parse_path(path: str) -> Uri:
    absolute = os.path.abspath(path)
    trailing = "/" if path.endswith("/") and absolute != "/" else ""
    return Uri("file", "", absolute.lstrip("/") + trailing)


def stays_below(path: str) -> bool:
    """Return whether a relative path from a file that somebody else wrote names something inside its folder."""
    return bool(path) and not path.startswith("/") and "\0" not in path and ".." not in path.split("/")


def quote(key: str) -> str:
    """Return `key` percent-encoded for use as one path segment of an HTTP URL."""
    return urllib.parse.quote(key, safe="")
