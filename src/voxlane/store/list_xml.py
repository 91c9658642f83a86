"""Pages of a listing from the XML that S3, GCS and Azure answer with, as Arrow batches with the exact keys.

The engine parses keys as paths: it drops a slash at either end and rejects empty and dot segments and control
characters. Here a page is cut by Arrow, without Python code for each key, and so without the interpreter's lock.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_REFERENCE = re.compile(r"&(?:#x([0-9a-fA-F]+)|#([0-9]+)|(amp|lt|gt|quot|apos));")
_NAMED = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_BETWEEN_KEYS = b"\xff"
"""Separates the keys of a page while they are decoded together; it is no part of UTF-8."""


class _Format(NamedTuple):
    """Elements of one service's listing."""

    row: str
    key: str
    etag: str
    size: str
    modified: str
    modified_format: str
    """Format of times; empty for ISO 8601."""
    token: str


_S3 = _Format("Contents", "Key", "ETag", "Size", "LastModified", "", "NextContinuationToken")
_AZURE = _Format("Blob", "Name", "Etag", "Content-Length", "Last-Modified", "%a, %d %b %Y %H:%M:%S GMT", "NextMarker")


class ListPage(NamedTuple):
    """One page of a listing."""

    batch: Any
    """Arrow batch with the columns path, last_modified, size, e_tag and version, as the engine's listings have."""
    token: str | None
    """Token of the next page; None on the last one."""


def parse_s3_page(body: bytes) -> ListPage:
    """Parse a page of S3's ListObjectsV2 or of GCS's XML API, requested with `encoding-type=url`."""
    return _parse(body, _S3, is_encoded=b"<EncodingType>url</EncodingType>" in body)


def parse_azure_page(body: bytes) -> ListPage:
    """Parse a page of Azure's List Blobs."""
    return _parse(body, _AZURE, is_encoded=False)


def _parse(body: bytes, form: _Format, *, is_encoded: bool) -> ListPage:
    keys, etags, sizes, modified = _cut_rows(body, form) or _search_rows(body, form)
    if is_encoded:
        keys = _decode_urls(keys)
    elif b'Encoded="true"' in body:  # how Azure marks a name that XML cannot hold
        rows = _split(body, f"<{form.row}>").slice(1)
        marked = pc.match_substring(rows, f'<{form.key} Encoded="true">')
        keys = pc.if_else(marked, _decode_urls(keys, plus=False), _unescape(keys))
    else:
        keys = _unescape(keys)
    if form.modified_format:
        modified = pc.strptime(modified, format=form.modified_format, unit="us")
    columns = [
        keys.cast(pa.large_string()),
        modified.cast(pa.timestamp("us", "UTC")),
        sizes.cast(pa.int64()),
        _unescape(etags).cast(pa.large_string()),
        pa.nulls(len(keys), pa.large_string()),
    ]
    batch = pa.RecordBatch.from_arrays(columns, names=["path", "last_modified", "size", "e_tag", "version"])
    match = re.search(f"<{form.token}>([^<]+)<".encode(), body)  # no key holds a tag: they are escaped
    return ListPage(batch, _replace_references(match[1].decode()) if match else None)


def _cut_rows(body: bytes, form: _Format) -> list[Any] | None:
    """Return the columns of a page whose rows all have the same elements in the same order, so that a column lies
    between every n-th tag and the next. None if the rows differ or an element is missing."""
    row_tag = f"<{form.row}>".encode()
    start, stop = body.find(row_tag), body.rfind(f"</{form.row}>".encode())
    if start < 0:
        return None
    second_row = body.find(row_tag, start + 1)
    content = np.frombuffer(body, np.uint8)
    tags = start + np.flatnonzero(content[start : stop + 1] == ord("<"))
    width = len(tags) if second_row < 0 else int(np.searchsorted(tags, second_row))
    num_rows, rest = divmod(len(tags), width)
    columns = []
    for element in (form.row, form.key, form.etag, form.size, form.modified):
        tag = f"<{element}>".encode()
        index = next((i for i, position in enumerate(tags[:width]) if body.startswith(tag, position)), None)
        if rest or index is None:
            return None
        starts, ends = tags[index::width], tags[index + 1 :: width]
        if not (content[starts[:, None] + np.arange(len(tag))] == np.frombuffer(tag, np.uint8)).all():
            return None
        # An array over the whole body in which every second item is a value; take copies the values.
        offsets = np.stack([starts + len(tag), ends], axis=1).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(body)]
        pieces = pa.Array.from_buffers(pa.binary(), 2 * num_rows - 1, buffers)
        # pa.array would import pandas, as in list_json.py.
        positions = pa.Array.from_buffers(pa.int64(), num_rows, [None, pa.py_buffer(np.arange(0, 2 * num_rows, 2))])
        columns.append(pieces.take(positions).cast(pa.string()))
    return columns[1:]


def _search_rows(body: bytes, form: _Format) -> list[Any]:
    """Return the columns of any page, found by searching each row; null where an element is missing."""
    rows = _split(body, f"<{form.row}>").slice(1)
    patterns = (
        f"<{element}(?: [^>]*)?>(?P<text>[^<]*)</" for element in (form.key, form.etag, form.size, form.modified)
    )
    return [pc.struct_field(pc.extract_regex(rows, pattern), [0]) for pattern in patterns]


def _split(body: bytes, mark: str) -> Any:
    return pc.list_flatten(pc.split_pattern(pa.array([body], pa.binary()).cast(pa.string()), mark))


def _decode_urls(keys: Any, *, plus: bool = True) -> Any:
    """Return the keys without percent-encoding, decoded together, because a call for each key would take longer than
    all the rest. `plus`: a plus sign is a space."""
    if not any(pc.any(pc.match_substring(keys, mark)).as_py() for mark in ("%", "+")[: 1 + plus]):
        return keys
    joined = _BETWEEN_KEYS.join(keys.cast(pa.binary()).to_pylist())
    decoded = urllib.parse.unquote_to_bytes(joined.replace(b"+", b" ") if plus else joined)
    return pa.array(decoded.split(_BETWEEN_KEYS), pa.binary()).cast(pa.string())


def _unescape(texts: Any) -> Any:
    """Return the texts without XML's references."""
    if not pc.any(pc.match_substring(texts, "&")).as_py():
        return texts
    texts = pc.replace_substring(texts, "&quot;", '"')  # around every etag of Amazon's S3
    if not pc.any(pc.match_substring(texts, "&")).as_py():
        return texts
    return pa.array([text and _replace_references(text) for text in texts.to_pylist()], pa.string())


def _replace_references(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        hexadecimal, decimal, name = match.groups()
        return _NAMED[name] if name else chr(int(hexadecimal, 16) if hexadecimal else int(decimal))

    return _REFERENCE.sub(replace, text)
