"""Plan one page of a listing over a sorted list of keys.

Keys are compared as Python strings, by code point, which is the order of their UTF-8 bytes.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from voxlane.testing import errors


class Page(NamedTuple):
    """Keys and common prefixes of one page, each in ascending order."""

    keys: Sequence[str]
    prefixes: Sequence[str]
    resume: str | None
    """Inclusive start of the next page; None on the last page."""
    last: str
    """Last key or prefix of this page, for V1 listings; empty on an empty page."""


def successor(key: str) -> str:
    """Return the smallest string greater than ``key``."""
    return key + "\0"


def end_of_prefix(prefix: str) -> str | None:
    """Return the smallest string greater than all strings that start with ``prefix``; None if there is none."""
    while prefix:
        if prefix[-1] != "\U0010ffff":
            return prefix[:-1] + chr(ord(prefix[-1]) + 1)
        prefix = prefix[:-1]
    return None


def plan_page(keys: Sequence[str], *, prefix: str, delimiter: str, start: str, end: str | None, limit: int) -> Page:
    """Return the page of at most ``limit`` keys and common prefixes in ``[start, end)`` that begin with ``prefix``."""
    low = bisect_left(keys, max(start, prefix))
    bounds = [bound for bound in (end_of_prefix(prefix), end) if bound is not None]
    high = bisect_left(keys, min(bounds)) if bounds else len(keys)
    if limit <= 0 or low >= high:
        return Page((), (), None, "")
    if delimiter:
        return _plan_delimited_page(keys, low, high, len(prefix), delimiter, limit)
    page_keys = keys[low : min(high, low + limit)]
    return Page(page_keys, (), successor(page_keys[-1]) if low + limit < high else None, page_keys[-1])


def _plan_delimited_page(keys: Sequence[str], low: int, high: int, skip: int, delimiter: str, limit: int) -> Page:
    page_keys: list[str] = []
    prefixes: list[str] = []
    last, resume = "", ""
    while low < high:
        if len(page_keys) + len(prefixes) == limit:
            return Page(page_keys, prefixes, resume, last)
        key = keys[low]
        index = key.find(delimiter, skip)
        if index < 0:
            page_keys.append(key)
            last, resume = key, successor(key)
            low += 1
            continue
        last = key[: index + len(delimiter)]
        prefixes.append(last)
        end = end_of_prefix(last)
        if end is None:
            break
        resume = end
        # Skip all keys below the prefix at once: a folder may hold a million.
        low = bisect_left(keys, end, low, high)
    return Page(page_keys, prefixes, None, last)


def encode_token(start: str) -> str:
    """Return an opaque token for a page that begins at ``start``."""
    return base64.urlsafe_b64encode(start.encode("utf-8", "surrogatepass")).decode()


def decode_token(token: str) -> str:
    """Return the start in a page token; raise 400 for an invalid token."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode("utf-8", "surrogatepass")
    except ValueError:
        raise errors.invalid(f"The continuation token provided is incorrect: {token}") from None
