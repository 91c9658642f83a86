"""Pairing of the files of two folders by name: scans or predicted masks, and their labels.

    CASE.nii.gz         with CASE.nii.gz                      Decathlon, nnU-Net, masks that a tool wrote
    CASE_0000.nii.gz    with CASE.nii.gz                      nnU-Net, one file per channel
    CASE_x.npy          with CASE_y.npy                       arrays
    CASE/imaging.nii    with CASE/segmentation.nii            KiTS19: one file per folder on both sides

Folders in a layout that `prepare` reads, and lists, need no pairing: `dataset_discovery.discover` reads them.
"""

from __future__ import annotations

import collections
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from voxlane import uri as uris
from voxlane.errors import LayoutError
from voxlane.store import StoreConfig
from voxlane.store.listing import list_objects
from voxlane.volume.dataset_layouts import SourceCase
from voxlane.volume.scan import SCAN_SUFFIXES, strip_scan_suffix

_CHANNEL = re.compile(r"(.+)_(\d{4})")


@dataclass(frozen=True)
class Pairing:
    """The files of two folders, by case."""

    cases: tuple[SourceCase, ...]
    """Cases with both, sorted by id."""
    without_label: tuple[str, ...]
    """Cases of the first folder that have no label."""
    without_image: tuple[str, ...]
    """Cases of the folder of labels that have no file in the first folder."""


def pair_files(images: str, labels: str, config: StoreConfig | None = None) -> Pairing:
    """Return the cases of the folder or file `images` with their labels in the folder or file `labels`. Raises
    LayoutError if a folder has no scans, or two files of a folder have the same name."""
    first, second = _list_scans(images, config), _list_scans(labels, config)
    if _is_file(images) and _is_file(labels):
        case = strip_scan_suffix(labels)
        return Pairing((SourceCase(case, case, tuple(first), next(iter(second))),), (), ())
    best: Pairing | None = None
    for make_key in (_name_by_file, _name_by_folder, _name_by_path):
        pairing = _pair_by(make_key, first, second)
        if pairing is not None and (best is None or len(pairing.cases) > len(best.cases)):
            best = pairing
    if best is None:
        repeated = _find_repeated(second) or _find_repeated(first)
        raise LayoutError(
            f"two files are named {repeated}", uri=labels, fix="Give a list of pairs instead (.json or .csv)"
        )
    return best


def _pair_by(make_key: Callable[[str], str], images: Mapping[str, str], labels: Mapping[str, str]) -> Pairing | None:
    """Pair files whose keys are equal, apart from a channel's number; None if two labels have the same key."""
    label_by_key = {make_key(name): uri for uri, name in labels.items()}
    if len(label_by_key) < len(labels):
        return None
    files: dict[str, list[str]] = collections.defaultdict(list)
    for uri, name in sorted(images.items(), key=lambda item: item[1]):
        key = make_key(name)
        channel = _CHANNEL.fullmatch(key)
        is_channel = channel is not None and key not in label_by_key
        files[channel[1] if channel is not None and is_channel else key].append(uri)
    if any(len(own) > 1 and not all(_CHANNEL.fullmatch(make_key(images[u])) for u in own) for own in files.values()):
        return None
    both = sorted(files.keys() & label_by_key.keys())
    return Pairing(
        tuple(SourceCase(key, key, tuple(files[key]), label_by_key[key]) for key in both),
        tuple(sorted(files.keys() - label_by_key.keys())),
        tuple(sorted(label_by_key.keys() - files.keys())),
    )


def _name_by_file(name: str) -> str:
    stem = strip_scan_suffix(name)
    return re.sub(r"_[xy]$", "", stem) if name.lower().endswith(".npy") else stem


def _name_by_folder(name: str) -> str:
    """Return a case's name where each file has a folder of its own; files beside the folders keep their names."""
    return posixpath.dirname(name).replace("/", "_") or _name_by_file(name)


def _name_by_path(name: str) -> str:
    folder = posixpath.dirname(name)
    return posixpath.join(folder, _name_by_file(name)).replace("/", "_")


def _is_file(uri: str) -> bool:
    return uri.lower().endswith(SCAN_SUFFIXES)


def _list_scans(uri: str, config: StoreConfig | None) -> dict[str, str]:
    """Return the URI of each scan in a folder, or of the one file, with its name relative to the folder."""
    absolute = str(uris.parse(uri))
    if _is_file(uri):
        return {absolute: posixpath.basename(absolute)}
    root = absolute.rstrip("/") + "/"
    listed = list_objects(root, config=config, progress=False)
    names = [entry.key.removeprefix(uris.parse(root).key) for entry in listed]
    scans = {root + n: n for n in names if _is_file(n) and not posixpath.basename(n).startswith(".")}
    if not scans:
        shown = f"it contains {', '.join(sorted(names)[:3])}" if names else "it is empty"
        raise LayoutError(
            f"no scans here: {shown}", uri=root, fix=f"Use a folder of files ending in {', '.join(SCAN_SUFFIXES)}"
        )
    return scans


def _find_repeated(names: Mapping[str, str]) -> str:
    counts = collections.Counter(map(_name_by_path, names.values()))
    return next((name for name, count in counts.items() if count > 1), "")


def describe_unpaired(names: Iterable[str], kind: str) -> list[tuple[str, str]]:
    """Return each unpaired case with what it lacks."""
    return [(name, f"no {kind}") for name in names]
