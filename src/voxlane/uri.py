"""URIs: `scheme://bucket/key`, split and joined without I/O.

A key is the whole path inside the bucket, without a leading slash. `file://` URIs and plain paths are one bucket
whose root is `/`, so the key of `file:///data/a.nii` is `data/a.nii`.
"""

from __future__ import annotations

import difflib
import os.path
import re
import urllib.parse
from dataclasses import dataclass

from voxlane.errors import ConfigError

SCHEMES = ("gs", "s3", "az", "file", "memory")
_ALIASES = {"gcs": "gs", "s3a": "s3", "azure": "az", "adl": "az"}


@dataclass(frozen=True)
class Uri:
    """One place in one bucket; `str()` gives the URI back."""

    scheme: str
    bucket: str
    """Bucket, container or memory-store name; empty for `file`."""
    key: str
    """Path inside the bucket, no leading slash; may be empty or a prefix."""

    @property
    def root(self) -> str:
        """The bucket itself, ending in a slash: `gs://bucket/`, `file:///`."""
        return f"{self.scheme}://{self.bucket}/"

    def __str__(self) -> str:
        return self.root + self.key


def parse(uri: str | os.PathLike[str]) -> Uri:
    """Split `uri`; a string without a scheme is a local path, taken relative to the working directory."""
    text = os.fspath(uri)
    if not text:
        raise ConfigError("an empty URI", fix=f"Give one such as gs://bucket/prefix; schemes: {_known()}")
    if match := re.match(r"(\w+):/+(?!/)", text):
        scheme = match[1].lower()
        if "://" not in text and (scheme in SCHEMES or scheme in _ALIASES):
            rest = text[match.end() :]
            raise ConfigError("a URI with one slash", uri=text, fix=f"Write {scheme}://{rest}")
    if "://" not in text:
        return _local(os.path.expanduser(text))
    scheme, rest = text.split("://", 1)
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if scheme not in SCHEMES:
        near = difflib.get_close_matches(scheme, [*SCHEMES, *_ALIASES], n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}://? " if near else ""
        raise ConfigError(f"unknown scheme {scheme!r}", uri=text, fix=f"{hint}Known schemes: {_known()}")
    if scheme == "file":
        if not rest.startswith("/"):
            raise ConfigError(
                "a file URI names an absolute path", uri=text, fix=f"Write file:///{rest}, or the plain path {rest!r}"
            )
        return _local(rest)
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise ConfigError("the URI names no bucket", uri=text, fix=f"Write {scheme}://BUCKET/{key}")
    return Uri(scheme, bucket, key)


def from_path(path: str | os.PathLike[str]) -> str:
    """`path` as text; a URI that went through `pathlib`, and lost a slash there, gets it back."""
    return re.sub(r"^(gs|gcs|s3|s3a|az|file):/+(?=[^/])", _slashes, os.fspath(path))


def _slashes(match: re.Match[str]) -> str:
    return "file:///" if match[1] == "file" else f"{match[1]}://"


def _local(path: str) -> Uri:
    absolute = os.path.abspath(path)
    trailing = "/" if path.endswith("/") and absolute != "/" else ""
    return Uri("file", "", absolute.lstrip("/") + trailing)


def _known() -> str:
    return ", ".join(f"{s}://" for s in SCHEMES)


def quote(key: str) -> str:
    """`key` percent-encoded for use as one path segment of an HTTP URL."""
    return urllib.parse.quote(key, safe="")
