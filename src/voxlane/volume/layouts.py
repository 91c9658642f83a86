"""The dataset layouts that are understood, each a pure function from names and a parsed dataset.json to cases.

Names are paths relative to the dataset's folder. A file that a case should have and that is not among the names is
still named by the case when it is an image, and left out when it is a label: checking the case then says what is
missing.
"""

from __future__ import annotations

import collections
import posixpath
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from voxlane.errors import LayoutError
from voxlane.volume.scan import NIFTI, SUFFIXES, stem

REGIONS: dict[str, dict[str, list[int]]] = {
    "kits19": {"kidney+tumour": [1, 2], "tumour": [2]},
    "brats2018": {"WT": [1, 2, 4], "TC": [1, 4], "ET": [4]},
    "brats2023": {"WT": [1, 2, 3], "TC": [1, 3], "ET": [3]},
    "msd-brats": {"WT": [1, 2, 3], "TC": [2, 3], "ET": [3]},
}
"""Regions by name. BraTS 2018 to 2021 number the enhancing tumour 4, since 2023 it is 3; the Decathlon's brain tumour
task numbers edema 1 and the non-enhancing tumour 2, the other way round than BraTS."""

_KITS = re.compile(r"(?P<folder>(?:data/)?case_\d+)/(?:imaging|segmentation)\.nii(?:\.gz)?$")
_BRATS = {
    "brats2018": ("_", ("t1", "t1ce", "t2", "flair"), {"background": 0, "NCR": 1, "ED": 2, "ET": 4}),
    "brats2023": ("-", ("t1n", "t1c", "t2w", "t2f"), {"background": 0, "NCR": 1, "ED": 2, "ET": 3}),
}
_BRATS_CHANNELS = ("T1", "T1ce", "T2", "FLAIR")


@dataclass(frozen=True)
class SourceCase:
    """One case where it was found."""

    id: str
    patient: str
    """Cases of one patient go into the same fold."""
    images: tuple[str, ...]
    """URIs, one a channel, or one file that holds every channel."""
    label: str | None
    """URI, or None when there is none."""


@dataclass(frozen=True)
class Draft:
    """Cases with relative paths in place of URIs, and what the layout knows of the description."""

    layout: str
    description: dict[str, Any]
    cases: list[SourceCase]


def kits19(names: Collection[str], document: Any, root: str) -> Draft:
    """`case_XXXXX/imaging.nii.gz` and `segmentation.nii.gz`, in this folder or in its `data`."""
    cases = []
    known = set(names)
    for folder in sorted({match["folder"] for name in known if (match := _KITS.match(name))}):
        case_id = posixpath.basename(folder)
        image = next((n for e in NIFTI if (n := f"{folder}/imaging{e}") in known), f"{folder}/imaging.nii.gz")
        label = next((n for e in NIFTI if (n := f"{folder}/segmentation{e}") in known), None)
        cases.append(SourceCase(case_id, case_id, (image,), label))
    if not cases:
        raise LayoutError("no case_XXXXX/imaging.nii.gz or segmentation.nii.gz", uri=root, fix=_seen(names))
    labels = {"background": 0, "kidney": 1, "tumour": 2}
    return Draft("kits19", {"name": "KiTS19", "channels": ["CT"], "labels": labels}, cases)


def msd(names: Collection[str], document: Any, root: str) -> Draft:
    """Medical Segmentation Decathlon: a dataset.json with training, modality and labels. Also raw data of the first
    nnU-Net, whose list names `case.nii.gz` for files `case_0000.nii.gz`, `case_0001.nii.gz`, ..."""
    where = posixpath.join(root, "dataset.json")
    channels = _channels(document, "modality", where)
    known = set(names)
    cases = []
    for number, entry in enumerate(_listed(document, "training", where)):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("image"), str):
            raise LayoutError(f"training[{number}]: no image", uri=where, fix='Write {"image": ..., "label": ...}')
        image = posixpath.normpath(entry["image"])
        ending = _ending(image)
        parts = tuple(f"{image.removesuffix(ending)}_{i:04d}{ending}" for i in range(len(channels)))
        label = posixpath.normpath(entry["label"]) if entry.get("label") else None
        case_id = stem(image)
        images = parts if image not in known and known.intersection(parts) else (image,)
        cases.append(SourceCase(case_id, case_id, images, label if label in known else None))
    labels, _ = _labels(document, where)
    description = {"name": document.get("name") or _folder_name(root), "channels": channels, "labels": labels}
    if _is_msd_brain_tumour(labels):
        description["regions"] = REGIONS["msd-brats"]
    return Draft("msd", description, cases)


def nnunet(names: Collection[str], document: Any, root: str) -> Draft:
    """Raw data of nnU-Net 2: a dataset.json with channel_names, labels and file_ending; `imagesTr/CASE_0000.nii.gz`
    and `labelsTr/CASE.nii.gz`."""
    where = posixpath.join(root, "dataset.json")
    channels = _channels(document, "channel_names", where)
    ending = document.get("file_ending", ".nii.gz")
    if ending not in SUFFIXES:
        raise LayoutError(f"file_ending: {ending!r} is not read", uri=where, fix=f"Convert to {', '.join(SUFFIXES)}")
    labels, regions = _labels(document, where)
    description: dict[str, Any] = {"name": document.get("name") or _folder_name(root), "channels": channels}
    description["labels"] = labels
    if regions:
        description["regions"] = regions
        if document.get("regions_class_order") is not None:
            description["region_values"] = document["regions_class_order"]
    known = set(names)
    cases = []
    if isinstance(document.get("dataset"), Mapping):
        for case_id, entry in document["dataset"].items():
            if not isinstance(entry, Mapping) or not isinstance(entry.get("images"), list) or not entry["images"]:
                fix = 'Write {"images": [...], "label": ...}'
                raise LayoutError(f"dataset.{case_id}: no images", uri=where, fix=fix)
            label = posixpath.normpath(str(entry.get("label", "")))
            images = tuple(posixpath.normpath(str(name)) for name in entry["images"])
            cases.append(SourceCase(case_id, case_id, images, label if label in known or label[0] == "/" else None))
    else:
        pattern = re.compile(rf"(?:imagesTr/(.+)_\d{{4}}|labelsTr/(.+)){re.escape(ending)}$")
        ids = sorted({match[1] or match[2] for name in known if (match := pattern.match(name))})
        for case_id in ids:
            images = tuple(f"imagesTr/{case_id}_{i:04d}{ending}" for i in range(len(channels)))
            label = f"labelsTr/{case_id}{ending}"
            cases.append(SourceCase(case_id, case_id, images, label if label in known else None))
    if not cases:
        raise LayoutError(f"a dataset.json of nnU-Net, and no imagesTr/*_0000{ending}", uri=root, fix=_seen(names))
    return Draft("nnunet", description, cases)


def brats(names: Collection[str], document: Any, root: str) -> Draft:
    """Folders of modalities: `*_t1`, `*_t1ce`, `*_t2`, `*_flair`, `*_seg` (2018 to 2021) or `*-t1n`, `*-t1c`, `*-t2w`,
    `*-t2f`, `*-seg` (since 2023). The naming tells the numbering of the labels."""
    found = {naming: groups for naming in _BRATS if (groups := _brats_groups(names, naming))}
    if not found:
        raise LayoutError("no folders with files named *_t1ce or *-t1c", uri=root, fix=_seen(names))
    if len(found) > 1:
        raise LayoutError(
            "files named as in BraTS 2018 (*_t1ce) and as in 2023 (*-t1c), which number labels differently",
            uri=root,
            fix="Prepare them as two datasets",
        )
    naming, groups = next(iter(found.items()))
    separator, modalities, labels = _BRATS[naming]
    alone = collections.Counter(posixpath.dirname(base) for base in groups)
    cases = []
    for base, files in sorted(groups.items()):
        folder = posixpath.dirname(base)
        case_id = posixpath.basename(folder if folder and alone[folder] == 1 else base)
        ending = _ending(next(iter(files.values())))
        images = tuple(files.get(modality, f"{base}{separator}{modality}{ending}") for modality in modalities)
        cases.append(SourceCase(case_id, _brats_patient(case_id), images, files.get("seg")))
    description = {"name": "BraTS", "channels": list(_BRATS_CHANNELS), "labels": labels, "regions": REGIONS[naming]}
    return Draft("brats", description, cases)


LAYOUTS: dict[str, Callable[[Collection[str], Any, str], Draft]] = {
    "kits19": kits19,
    "msd": msd,
    "nnunet": nnunet,
    "brats": brats,
}


def recognise(names: Collection[str], document: Any, root: str) -> str:
    """The layout of a folder that holds `names`, and `document` in its dataset.json if it has one."""
    if isinstance(document, Mapping):
        if "channel_names" in document:
            return "nnunet"
        if "training" in document:
            return "msd"
        fields = ", ".join(sorted(map(str, document))[:6])
        raise LayoutError(
            f"dataset.json has neither training (Decathlon) nor channel_names (nnU-Net) but: {fields}",
            uri=root,
            fix="Add one of them, or give a JSON or CSV list of image and label pairs",
        )
    if any(_KITS.match(name) for name in names):
        return "kits19"
    if any(_brats_groups(names, naming) for naming in _BRATS):
        return "brats"
    if not names:
        raise LayoutError("nothing is here", uri=root, fix="Check the spelling of the bucket and the folder")
    raise LayoutError(
        "no dataset layout that we know. Looked for dataset.json (Decathlon, nnU-Net), case_XXXXX/imaging.nii.gz "
        "(KiTS19), and folders with files named *_t1ce or *-t1c (BraTS)",
        uri=root,
        fix=_seen(names),
    )


def _brats_groups(names: Collection[str], naming: str) -> dict[str, dict[str, str]]:
    """What stands before the modality in a path, to modality, to file; none unless a contrast-enhanced T1 is there,
    because files named *_t1 and *_t2 are found elsewhere too."""
    separator, modalities, _ = _BRATS[naming]
    pattern = re.compile(rf"(.+){separator}({'|'.join(modalities)}|seg)\.nii(?:\.gz)?$")
    groups: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        if match := pattern.match(name):
            groups.setdefault(match[1], {})[match[2]] = name
    if not any(modalities[1] in files for files in groups.values()):
        return {}
    return {base: files for base, files in groups.items() if len(files) > 1}


def _brats_patient(case_id: str) -> str:
    """BraTS-GLI-00001-000 is time point 000 of patient BraTS-GLI-00001."""
    match = re.fullmatch(r"(BraTS-[A-Za-z]+-\d+)-\d+", case_id)
    return match[1] if match else case_id


def _is_msd_brain_tumour(labels: Mapping[str, int]) -> bool:
    """By the labels' own names, because the numbering is what the regions depend on."""
    by_value = {value: name.lower().replace("_", "-") for name, value in labels.items()}
    starts = {1: "edema", 2: "non-enhancing", 3: "enhancing"}
    return len(labels) == 4 and all(by_value.get(value, "").startswith(start) for value, start in starts.items())


def _channels(document: Mapping[str, Any], field: str, where: str) -> list[str]:
    """Channel names in order, from {"0": "FLAIR", ...} or a list."""
    value = document.get(field)
    if isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
        named = [str(value[key]) for key in sorted(value, key=lambda key: int(key))]
    elif isinstance(value, list) and value:
        named = [str(name) for name in value]
    else:
        raise LayoutError(f"{field}: no channels", uri=where, fix=f'Write "{field}": {{"0": "CT"}}')
    return ["CT" if name.lower() == "ct" else name for name in named]


def _labels(document: Mapping[str, Any], where: str) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Name to value of each class, and regions where a name stands for several values. Takes the Decathlon's
    {"1": "kidney"} and nnU-Net's {"kidney": 1, "both": [1, 2]}."""
    value = document.get("labels")
    fix = 'Write "labels": {"background": 0, "kidney": 1}'
    if not isinstance(value, Mapping) or not value:
        raise LayoutError("labels: none are named", uri=where, fix=fix)
    labels: dict[str, int] = {}
    regions: dict[str, list[int]] = {}
    try:
        for key, entry in value.items():
            if str(key).isdigit() and isinstance(entry, str):
                name, number = entry, int(key)
                labels[name if name not in labels else f"{name} {number}"] = number
            elif isinstance(entry, list | tuple):
                regions[str(key)] = [int(v) for v in entry]
            else:
                labels[str(key)] = int(entry)
    except (TypeError, ValueError):
        raise LayoutError(f"labels.{key}: {entry!r} is no class number", uri=where, fix=fix) from None
    if "ignore" in labels:
        raise LayoutError(
            "labels.ignore: voxels to leave out of the loss are not supported", uri=where, fix="Remove it"
        )
    if regions:  # a name with one value among regions is a region as well
        order = [str(key) for key in value if labels.get(str(key)) != 0]
        regions = {key: regions.get(key) or [labels[key]] for key in order}
        labels = {"background": 0} | {f"label {v}": v for v in sorted({v for own in regions.values() for v in own})}
    if 0 not in labels.values():
        labels = {"background": 0} | labels
    return labels, regions


def _listed(document: Mapping[str, Any], field: str, where: str) -> list[Any]:
    value = document.get(field)
    if not isinstance(value, list) or not value:
        raise LayoutError(f"{field}: no cases are listed", uri=where, fix="List an image and a label for each")
    return value


def _ending(name: str) -> str:
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


def _folder_name(root: str) -> str:
    return posixpath.basename(root.rstrip("/")) or "dataset"


def _seen(names: Collection[str]) -> str:
    """What is there instead, and where the user may have meant."""
    inner = sorted({posixpath.dirname(name) for name in names if posixpath.basename(name) == "dataset.json"})
    if inner and inner != [""]:
        return f"A dataset.json is in {', '.join(inner[:3])}: give that folder"
    some = ", ".join(sorted(names)[:4])
    more = f" and {len(names) - 4:,} more" if len(names) > 4 else ""
    return f"Here are: {some}{more}. Give another folder, or a JSON or CSV list of image and label pairs"
