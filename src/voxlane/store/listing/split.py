"""Where to split a range of keys in two, without I/O.

Keys are ordered by code point. That is the byte order of their UTF-8, in which S3 and GCS list.
"""

from __future__ import annotations

import os.path
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile

_DIGITS_PER_TRY = (4, 8, 16, 48)


def midpoint(low: str, high: str | None, prefix: str, alphabet: Sequence[str]) -> str | None:
    """Return a string strictly between `low` and `high`, near the middle of the possible keys between them.

    `high` None means the end of the keys with `prefix`. `alphabet` is sorted and holds the characters that keys are
    expected to use; a wrong guess leads to an uneven split, never to a wrong one. Returns None if there is no usable
    split point; the range may still contain keys.
    """
    if not alphabet:
        return None
    shared = len(prefix) if high is None else _common_length(low, high)
    base = len(alphabet) + 1  # digit 0 is the end of the string
    for digits in _DIGITS_PER_TRY:
        first = _to_number(low[shared:], digits, alphabet)
        last = base**digits if high is None else _to_number(high[shared:], digits, alphabet)
        cut = usable(low[:shared] + _spell((first + last) // 2, digits, alphabet))
        if cut is not None and low < cut and (high is None or cut < high):
            return cut
    return None


def usable(key: str) -> str | None:
    """Return the longest start of `key` from which the engine can list, or None. The engine rejects empty, `.` and `..`
    segments and control characters, and drops a trailing slash."""
    key = re.split(r"[\x00-\x1f\x7f]", key, maxsplit=1)[0]
    return "/".join(takewhile(lambda segment: segment not in ("", ".", ".."), key.split("/"))) or None


def share_left(first: str, cursor: str, high: str, alphabet: Sequence[str]) -> float:
    """Return the size of the key space from `cursor` to `high`, relative to that from `first` to `cursor`."""
    shared = _common_length(first, high)
    start, current, end = (_to_number(key[shared:], 10, alphabet) for key in (first, cursor, high))
    return (end - current) / max(1, current - start)


def disputed(key: str, other: str) -> bool:
    """Return whether servers that sort by folder and servers that sort by byte disagree on the order of two keys: at
    the first difference one has a slash and the other a character below it."""
    index = _common_length(key, other)
    ends = key[index : index + 1], other[index : index + 1]
    return "/" in ends and any("" < end < "/" for end in ends)


def just_before(prefix: str) -> str | None:
    """Return a key to list from that comes before every key starting with `prefix` (itself included) and skips most
    keys before them; None if there is none that is safe."""
    if not prefix or prefix.endswith("/"):
        return None
    previous = chr(ord(prefix[-1]) - 1)
    if previous in "./" or previous <= " " or not previous.isprintable() or 0xD800 <= ord(previous) <= 0xDFFF:
        return None
    return usable(prefix[:-1] + previous)


def _to_number(text: str, digits: int, alphabet: Sequence[str]) -> int:
    """Return the first characters of `text` as a number; a character outside the alphabet counts as the next one."""
    base = len(alphabet) + 1
    value = 0
    for index in range(digits):
        is_past_end = index >= len(text)
        digit = 0 if is_past_end else min(bisect_left(alphabet, text[index]), len(alphabet) - 1) + 1
        value = value * base + digit
    return value


def _spell(value: int, digits: int, alphabet: Sequence[str]) -> str:
    base = len(alphabet) + 1
    spelled: list[int] = []
    for _ in range(digits):
        value, digit = divmod(value, base)
        spelled.append(digit)
    return "".join(alphabet[digit - 1] for digit in takewhile(bool, reversed(spelled)))


def _common_length(first: str, second: str) -> int:
    return len(os.path.commonprefix([first, second]))  # noqa: RUF071 - the longest common string, not path
