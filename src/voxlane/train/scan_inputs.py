"""The scans that the words of a command line mean: files, folders, bucket prefixes and patterns, with their channels.

Files in a folder whose names end in four digits are named as nnU-Net names them: `CASE_0000.nii.gz` is the first
channel of CASE, `CASE_0001.nii.gz` the second. A model with several channels combines them; for a model with one
channel, the ending is dropped if all files have `_0000`.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from voxlane import uri as uris
from voxlane.errors import ConfigError, NotFoundError
from voxlane.sizes import format_plural
from voxlane.store import Store, StoreConfig
from voxlane.volume.prepared_dataset import as_prefix
from voxlane.volume.scan import SCAN_SUFFIXES, strip_scan_suffix

_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")
"""File name without its suffix, as nnU-Net names the files of a case."""
_NOT_DICOM = (".txt", ".json", ".xml", ".csv", ".md")
"""Suffixes of files that are no part of a DICOM series."""


@dataclass(frozen=True)
class ScanInput:
    """One scan."""

    scan: str
    """The scan as messages name it."""
    files: tuple[str, ...]
    """Files of the scan: one per channel, or one with all channels, or the folder of a DICOM series."""
    name: str
    """Name of the scan's mask, without its suffix, relative to the folder of the masks."""


@dataclass
class FoundScans:
    """The scans that all words mean."""

    scans: list[ScanInput] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was listed, and what was left out."""


def parse_scan(word: str) -> ScanInput:
    """Return the scan that a word names: one file or folder, or the files of all channels joined by commas."""
    parts = [part.strip() for part in word.split(",")]
    if not all(parts) or not uris.parse(parts[0]).key.strip("/"):
        raise ConfigError(f"{word!r} does not name a scan", fix="Give a file or folder, or one file per channel: a,b,c")
    files = tuple(str(uris.parse(part)) for part in parts)
    return ScanInput(word, files, strip_scan_suffix(files[0]))


def find_scans(words: Sequence[str], num_channels: int, out: str, config: StoreConfig | None = None) -> FoundScans:
    """Return the scans that `words` mean for a model with this many channels.

    A word is a file, files joined by commas, a pattern with * or ?, which match slashes too, or a folder or prefix. All
    scans in or below a folder are taken, except for what lies below `out`; if it has none, it is a DICOM series, or
    holds one in each of several folders.
    """
    listing = FoundScans()
    for word in words:
        if _names_scan(word):
            listing.scans.append(parse_scan(word))
        else:
            _add_listed(listing, word, num_channels, out, config)
    return listing


def _names_scan(word: str) -> bool:
    """Return whether a word names one scan by the names of its files."""
    if "," in word:
        return True
    local = f"/{uris.parse(word).key}" if uris.parse(word).scheme == "file" else ""
    if local and os.path.exists(local):
        return not os.path.isdir(local)
    return not _is_pattern(word) and word.lower().endswith(SCAN_SUFFIXES)


def _is_pattern(word: str) -> bool:
    return "*" in word or "?" in word


def _add_listed(listing: FoundScans, word: str, num_channels: int, out: str, config: StoreConfig | None) -> None:
    """Add the scans of a folder, prefix or pattern."""
    folder_uri, names = _list_names(word, out, config)
    scans = sorted(filter(_is_scan, names))
    if scans:
        listed, others = _group_channels(scans, folder_uri, num_channels), sorted(set(names) - set(scans))
    else:
        listed = [ScanInput(folder_uri + name, (folder_uri + name,), name) for name in _find_series(names)]
        others = []
    if not listed:  # a single DICOM series, or nothing at all, which its reader says
        if _is_pattern(word):
            fix = f"Scans are {', '.join(SCAN_SUFFIXES)} files"
            raise NotFoundError("no scan matches this pattern", uri=word, fix=fix)
        listing.scans.append(parse_scan(word))
        return
    left_out = f"; left out {format_plural(len(others), 'other file')}, such as {others[0]}" if others else ""
    listing.notes.append(f"{word}: {format_plural(len(listed), 'scan')}{left_out}")
    listing.scans += listed


def _list_names(word: str, out: str, config: StoreConfig | None) -> tuple[str, list[str]]:
    """Return the URI of the folder that a word lists, with a slash, and the files below it, except for those below
    `out`."""
    store, key = Store.locate(word, config)
    wildcard = re.search(r"[*?]", key) if not (store.scheme == "file" and os.path.exists(f"/{key}")) else None
    folder = as_prefix(key if wildcard is None else key[: wildcard.start()].rpartition("/")[0])
    keys = [key for page in store.list_pages(folder) for key in page.column("path").to_pylist()]
    if wildcard is not None:
        matches = re.compile(fnmatch.translate(key.replace("[", "[[]"))).match
        keys = [key for key in keys if matches(key)]
    below_out = _prefix_in(store, out)
    if below_out is not None:
        if folder.startswith(below_out) and any(map(_is_scan, keys)):
            raise ConfigError(
                "the masks would be written among these scans", uri=word, fix="Choose another folder (-o)"
            )
        keys = [key for key in keys if not key.startswith(below_out)]
    return store.uri(folder), [key.removeprefix(folder) for key in keys]


def _prefix_in(store: Store, out: str) -> str | None:
    """Return the key prefix of the masks' folder if it is in this store."""
    parsed = uris.parse(out)
    return as_prefix(parsed.key) if parsed.root == store.root else None


def _is_scan(name: str) -> bool:
    base = posixpath.basename(name)
    return base.lower().endswith(SCAN_SUFFIXES) and not base.startswith(".")


def _find_series(names: Iterable[str]) -> list[str]:
    """Return the folders that hold a DICOM series each, if there are several."""
    files = [name for name in names if not name.lower().endswith(_NOT_DICOM)]
    folders = {posixpath.dirname(name) for name in files if not posixpath.basename(name).startswith(".")}
    return sorted(folders - {""}) if len(folders) > 1 else []


def _group_channels(names: Sequence[str], folder_uri: str, num_channels: int) -> list[ScanInput]:
    """Return the scans in a folder, combining the channels of each case. A channel that is missing is named with the
    suffix of the others, so that reading it says so."""
    channels: dict[str, dict[int, str]] = {}
    single: list[str] = []
    for name in names:
        match = _CHANNEL.fullmatch(_strip_suffix(name))
        if match is None or int(match["channel"]) >= num_channels:
            single.append(name)
        else:
            channels.setdefault(match["case"], {})[int(match["channel"])] = name
    if num_channels == 1 and single:
        single, channels = list(names), {}
    scans = [ScanInput(folder_uri + name, (folder_uri + name,), _strip_suffix(name)) for name in single]
    for case, by_channel in channels.items():
        first = next(iter(by_channel.values()))
        suffix = first.removeprefix(_strip_suffix(first))
        files = [by_channel.get(number, f"{case}_{number:04d}{suffix}") for number in range(num_channels)]
        scans.append(ScanInput(f"{folder_uri}{case}", tuple(folder_uri + name for name in files), case))
    return sorted(scans, key=lambda scan: scan.name)


def _strip_suffix(name: str) -> str:
    """Return a path without the suffix of a scan."""
    return posixpath.join(posixpath.dirname(name), strip_scan_suffix(name))
