"""Where to cut a range of keys in two: pure, no I/O.

Keys are ordered by code point, which is the byte order of their UTF-8, which is the order S3 and GCS list in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_DIGITS_PER_TRY = (4, 8, 16, 48)


def midpoint(low: str, high: str | None, prefix: str, alphabet: Sequence[str]) -> str | None:
    """A string strictly between `low` and `high`, near the middle of the keys one can spell between them.

    `high` None means the end of `prefix`'s keys. `alphabet` is sorted and holds the characters that keys are
    thought to use; a wrong guess costs a poor cut, never a wrong one. None when no usable cut was found: the range
    may still hold keys.
    """
    if not alphabet:
        return None
    shared = len(prefix) if high is None else _common_length(low, high)
    base = len(alphabet) + 1  # digit 0 is the end of the string
    for digits in _DIGITS_PER_TRY:
        first = _number(low[shared:], digits, alphabet)
        last = base**digits if high is None else _number(high[shared:], digits, alphabet)
        cut = usable(low[:shared] + _spell((first + last) // 2, digits, alphabet))
        if cut is not None and low < cut and (high is None or cut < high):
            return cut
    return None


def usable(key: str) -> str | None:
    """The longest start of `key` that the engine takes as a place to list from; it refuses empty, `.` and `..`
    segments and control characters, and drops a trailing slash."""
    for index, character in enumerate(key):
        if character < " " or character == "\x7f":
            key = key[:index]
            break
    segments = key.split("/")
    for index, segment in enumerate(segments):
        if segment in ("", ".", ".."):
            segments = segments[:index]
            break
    return "/".join(segments) or None


def share_left(first: str, cursor: str, high: str, alphabet: Sequence[str]) -> float:
    """How much of the key space from `first` to `high` lies beyond `cursor`, relative to what lies before it."""
    shared = _common_length(first, high)
    start, here, end = (_number(key[shared:], 10, alphabet) for key in (first, cursor, high))
    return (end - here) / max(1, here - start)


def disputed(key: str, other: str) -> bool:
    """Whether servers that sort by folder and servers that sort by byte disagree on the order of two keys: at the
    first difference one has a slash and the other a character below it."""
    index = _common_length(key, other)
    ends = key[index : index + 1], other[index : index + 1]
    return "/" in ends and any("" < end < "/" for end in ends)


def just_before(prefix: str) -> str | None:
    """A place to list from that comes before every key starting with `prefix` (itself included) and skips most of
    what precedes them; None when there is none that is safe."""
    if not prefix or prefix.endswith("/"):
        return None
    previous = chr(ord(prefix[-1]) - 1)
    if previous in "./" or previous <= " " or not previous.isprintable() or 0xD800 <= ord(previous) <= 0xDFFF:
        return None
    return usable(prefix[:-1] + previous)


def _number(text: str, digits: int, alphabet: Sequence[str]) -> int:
    """The first characters of `text` as a number; a character outside the alphabet counts as its next neighbour."""
    base = len(alphabet) + 1
    value = 0
    for index in range(digits):
        digit = 0
        if index < len(text):
            digit = min(bisect_left(alphabet, text[index]), len(alphabet) - 1) + 1
        value = value * base + digit
    return value


def _spell(value: int, digits: int, alphabet: Sequence[str]) -> str:
    base = len(alphabet) + 1
    spelled: list[int] = []
    for _ in range(digits):
        value, digit = divmod(value, base)
        spelled.append(digit)
    characters: list[str] = []
    for digit in reversed(spelled):
        if digit == 0:
            break
        characters.append(alphabet[digit - 1])
    return "".join(characters)


def _common_length(one: str, other: str) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
