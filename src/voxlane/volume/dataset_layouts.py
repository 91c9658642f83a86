"""Recognised dataset layouts, each parsed by a pure function from file names and dataset.json to cases.

Names are paths relative to the dataset's folder. If an image of a case is missing among the names, the case refers to
it nevertheless; a missing label is None. Checking the case then reports what is missing. To add a layout, write a
`parse_` function and add it to `LAYOUTS` and `detect_layout`.
"""

from __future__ import annotations

import collections
import posixpath
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from voxlane.errors import LayoutError
from voxlane.volume.formats.nifti import NIFTI_SUFFIXES
from voxlane.volume.scan import SCAN_SUFFIXES, strip_scan_suffix

REGIONS: dict[str, dict[str, list[int]]] = {
    "kits19": {"kidney+tumour": [1, 2], "tumour": [2]},
    "brats2018": {"WT": [1, 2, 4], "TC": [1, 4], "ET": [4]},
    "brats2023": {"WT": [1, 2, 3], "TC": [1, 3], "ET": [3]},
    "msd-brats": {"WT": [1, 2, 3], "TC": [2, 3], "ET": [3]},
}
"""Predefined regions. BraTS numbers the enhancing tumour 4 until 2021 and 3 since 2023. The Decathlon's brain tumour
task numbers edema 1 and the non-enhancing tumour 2, which is the reverse of BraTS."""

_KITS_PATTERN = re.compile(r"(?P<folder>(?:data/)?case_\d+)/(?:imaging|segmentation)\.nii(?:\.gz)?$")
_NPY_PATTERNS = (
    re.compile(r"(?P<folder>(?:.*/)?)(?P<kind>images)(?:Tr)?/(?P<case>[^/]+?)(?:_x)?\.npy$"),
    re.compile(r"(?P<folder>(?:.*/)?)(?P<kind>labels)(?:Tr)?/(?P<case>[^/]+?)(?:_y)?\.npy$"),
    re.compile(r"(?P<folder>(?:.*/)?)(?P<case>[^/]+)_(?P<kind>[xy])\.npy$"),
)
_BRATS = {
    "brats2018": ("_", ("t1", "t1ce", "t2", "flair"), {"background": 0, "NCR": 1, "ED": 2, "ET": 4}),
    "brats2023": ("-", ("t1n", "t1c", "t2w", "t2f"), {"background": 0, "NCR": 1, "ED": 2, "ET": 3}),
}
_BRATS_CHANNELS = ("T1", "T1ce", "T2", "FLAIR")


@dataclass(frozen=True)
class SourceCase:
    """Files of one case in the source."""

    id: str
    patient: str
    """Name of the patient; all cases of a patient are in the same fold."""
    images: tuple[str, ...]
    """URIs of the image files: one per channel, or one file with all channels."""
    label: str | None
    """URI of the label file, or None if it is missing."""


@dataclass(frozen=True)
class DatasetDraft:
    """Cases with relative paths instead of URIs, and the layout's part of the description."""

    layout: str
    description: dict[str, Any]
    cases: list[SourceCase]


def parse_kits19(names: Collection[str], document: Any, root: str) -> DatasetDraft:
    """Parse `case_XXXXX/imaging.nii.gz` and `segmentation.nii.gz`, in this folder or in `data` below it."""
    cases = []
    existing = set(names)
    for folder in sorted({match["folder"] for name in existing if (match := _KITS_PATTERN.match(name))}):
        case_id = posixpath.basename(folder)
        image, label = (
            next((n for suffix in NIFTI_SUFFIXES if (n := f"{folder}/{name}{suffix}") in existing), None)
            for name in ("imaging", "segmentation")
        )
        cases.append(SourceCase(case_id, case_id, (image or f"{folder}/imaging.nii.gz",), label))
    if not cases:
        raise LayoutError("no case_XXXXX/imaging.nii.gz or segmentation.nii.gz", uri=root, fix=_suggest_source(names))
    labels = {"background": 0, "kidney": 1, "tumour": 2}
    return DatasetDraft("kits19", {"name": "KiTS19", "channels": ["CT"], "labels": labels}, cases)


def parse_msd(names: Collection[str], document: Any, root: str) -> DatasetDraft:
    """Parse the Medical Segmentation Decathlon: a dataset.json with training, modality and labels. This includes raw
    data of the first nnU-Net, which lists `case.nii.gz` for files `case_0000.nii.gz`, ..."""
    document_uri = posixpath.join(root, "dataset.json")
    channels = _parse_channels(document, "modality", document_uri)
    existing = set(names)
    cases = []
    entries = document.get("training")
    if not isinstance(entries, list) or not entries:
        raise LayoutError("training: no cases are listed", uri=document_uri, fix="List an image and a label for each")
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("image"), str):
            raise LayoutError(
                f"training[{number}]: image is missing", uri=document_uri, fix='Write {"image": ..., "label": ...}'
            )
        if not isinstance(entry.get("label") or "", str):
            raise LayoutError(f"training[{number}]: label is not a path", uri=document_uri, fix="Use one file per case")
        image = _confine(entry["image"], f"training[{number}].image", document_uri, root)
        suffix = _scan_suffix(image)
        parts = tuple(f"{image.removesuffix(suffix)}_{i:04d}{suffix}" for i in range(len(channels)))
        label = entry.get("label")
        label = _confine(str(label), f"training[{number}].label", document_uri, root) if label else None
        case_id = strip_scan_suffix(image)
        images = parts if image not in existing and existing.intersection(parts) else (image,)
        cases.append(SourceCase(case_id, case_id, images, label if label in existing else None))
    labels, _ = _parse_labels(document, document_uri)
    description = {"name": document.get("name") or _folder_name(root), "channels": channels, "labels": labels}
    # The brain tumour task by the names of its labels, because its regions depend on their numbering.
    by_value = {value: name.lower().replace("_", "-") for name, value in labels.items()}
    starts = {1: "edema", 2: "non-enhancing", 3: "enhancing"}
    if len(labels) == 4 and all(by_value.get(value, "").startswith(start) for value, start in starts.items()):
        description["regions"] = REGIONS["msd-brats"]
    return DatasetDraft("msd", description, cases)


def parse_nnunet(names: Collection[str], document: Any, root: str) -> DatasetDraft:
    """Parse raw data of nnU-Net 2: a dataset.json with channel_names, labels and file_ending, and files
    `imagesTr/CASE_0000.nii.gz` and `labelsTr/CASE.nii.gz`."""
    document_uri = posixpath.join(root, "dataset.json")
    suffix = document.get("file_ending", ".nii.gz")
    if suffix not in SCAN_SUFFIXES:
        raise LayoutError(
            f"file_ending: {suffix!r} is not supported", uri=document_uri, fix=f"Convert to {', '.join(SCAN_SUFFIXES)}"
        )
    description = parse_nnunet_description(document, document_uri, _folder_name(root))
    existing = set(names)
    cases = []
    if isinstance(document.get("dataset"), Mapping):
        for case_id, entry in document["dataset"].items():
            if not isinstance(entry, Mapping) or not isinstance(entry.get("images"), list) or not entry["images"]:
                fix = 'Write {"images": [...], "label": ...}'
                raise LayoutError(f"dataset.{case_id}: images are missing", uri=document_uri, fix=fix)
            field = f"dataset.{case_id}"
            label = _confine(str(entry.get("label", "")), f"{field}.label", document_uri, root)
            images = tuple(_confine(str(name), f"{field}.images", document_uri, root) for name in entry["images"])
            cases.append(SourceCase(case_id, case_id, images, label if label in existing else None))
    else:
        pattern = re.compile(rf"(?:imagesTr/(.+)_\d{{4}}|labelsTr/(.+)){re.escape(suffix)}$")
        for case_id in sorted({match[1] or match[2] for name in existing if (match := pattern.match(name))}):
            images = tuple(f"imagesTr/{case_id}_{i:04d}{suffix}" for i in range(len(description["channels"])))
            label = f"labelsTr/{case_id}{suffix}"
            cases.append(SourceCase(case_id, case_id, images, label if label in existing else None))
    if not cases:
        raise LayoutError(
            f"dataset.json is nnU-Net's, but there is no imagesTr/*_0000{suffix}", uri=root, fix=_suggest_source(names)
        )
    return DatasetDraft("nnunet", description, cases)


def parse_nnunet_description(document: Any, document_uri: str, name: str) -> dict[str, Any]:
    """Return the fields of the description in nnU-Net's dataset.json; `name` is the dataset's if that has none."""
    channels = _parse_channels(document, "channel_names", document_uri)
    labels, regions = _parse_labels(document, document_uri)
    description: dict[str, Any] = {"name": document.get("name") or name, "channels": channels, "labels": labels}
    if regions:
        description["regions"] = regions
        if document.get("regions_class_order") is not None:
            description["region_values"] = document["regions_class_order"]
    return description


def _confine(path: str, field: str, document_uri: str, root: str) -> str:
    """Return a path of dataset.json relative to the dataset's folder `root`; raise LayoutError if it leaves it. The
    user may have made links inside a local folder, but what came with the dataset never chooses other files."""
    below = path
    if "://" not in path and path.startswith("/"):
        below = "file://" + posixpath.normpath(path)
    below = posixpath.normpath(below.removeprefix(root)) if "://" not in below or below.startswith(root) else below
    if "://" in below or "\0" in below or below.startswith(("/", "~")) or below.split("/", 1)[0] == "..":
        raise LayoutError(
            f"{field}: {path!r} is outside the dataset",
            uri=document_uri,
            fix="Write paths relative to the folder of dataset.json, or list the files in a list.json on this machine",
        )
    return below


def parse_brats(names: Collection[str], document: Any, root: str) -> DatasetDraft:
    """Parse folders of modalities: `*_t1`, `*_t1ce`, `*_t2`, `*_flair`, `*_seg` (2018 to 2021) or `*-t1n`, `*-t1c`,
    `*-t2w`, `*-t2f`, `*-seg` (since 2023). The naming determines the numbering of the labels."""
    groups_by_naming = {naming: groups for naming in _BRATS if (groups := _brats_groups(names, naming))}
    if not groups_by_naming:
        raise LayoutError("no folders with files named *_t1ce or *-t1c", uri=root, fix=_suggest_source(names))
    if len(groups_by_naming) > 1:
        raise LayoutError(
            "some files are named as in BraTS 2018 (*_t1ce) and some as in 2023 (*-t1c); their labels are numbered "
            "differently",
            uri=root,
            fix="Prepare them as two datasets",
        )
    naming, groups = next(iter(groups_by_naming.items()))
    separator, modalities, labels = _BRATS[naming]
    cases_per_folder = collections.Counter(posixpath.dirname(base) for base in groups)
    cases = []
    for base, files in sorted(groups.items()):
        folder = posixpath.dirname(base)
        case_id = posixpath.basename(folder if folder and cases_per_folder[folder] == 1 else base)
        suffix = _scan_suffix(next(iter(files.values())))
        images = tuple(files.get(modality, f"{base}{separator}{modality}{suffix}") for modality in modalities)
        # BraTS-GLI-00001-000 is time point 000 of patient BraTS-GLI-00001.
        patient = re.sub(r"^(BraTS-[A-Za-z]+-\d+)-\d+$", r"\1", case_id)
        cases.append(SourceCase(case_id, patient, images, files.get("seg")))
    description = {"name": "BraTS", "channels": list(_BRATS_CHANNELS), "labels": labels, "regions": REGIONS[naming]}
    return DatasetDraft("brats", description, cases)


def parse_npy(names: Collection[str], document: Any, root: str) -> DatasetDraft:
    """Parse pairs of arrays: `images/CASE_x.npy` and `labels/CASE_y.npy` as in the demos of Dataflux, the same without
    `_x` and `_y`, or both in one folder as in MLPerf. The arrays define neither channels nor labels."""
    images: dict[str, str] = {}
    labels: dict[str, str] = {}
    for name in sorted(names):
        if match := _match_npy(name):
            files = images if match["kind"] in ("images", "x") else labels
            base = match["folder"] + match["case"]
            if base in files:
                raise LayoutError(f"{files[base]} and {name} are the same case", uri=root, fix="Rename one of them")
            files[base] = name
    bases = sorted({*images, *labels})
    if not bases:
        raise LayoutError(
            "no images/*.npy and labels/*.npy, or *_x.npy and *_y.npy", uri=root, fix=_suggest_source(names)
        )
    by_name = collections.Counter(posixpath.basename(base) for base in bases)
    cases = []
    for base in bases:
        # Cases of the same name, such as those of train/images and val/images, are distinguished by their folders.
        case_id = posixpath.basename(base) if by_name[posixpath.basename(base)] == 1 else base.replace("/", "_")
        image = images.get(base) or _expected_image(labels[base])
        cases.append(SourceCase(case_id, case_id, (image,), labels.get(base)))
    return DatasetDraft("npy", {"name": _folder_name(root)}, cases)


def _match_npy(name: str) -> re.Match[str] | None:
    return next(filter(None, (pattern.match(name) for pattern in _NPY_PATTERNS)), None)


def _expected_image(label: str) -> str:
    """Return the name that the image of a label without one should have."""
    folder, name = posixpath.split(label)
    image_folder = re.sub(r"labels(Tr)?$", r"images\1", folder)
    return posixpath.join(image_folder, re.sub(r"_y(\.npy)$", r"_x\1", name))


LAYOUTS: dict[str, Callable[[Collection[str], Any, str], DatasetDraft]] = {
    "kits19": parse_kits19,
    "msd": parse_msd,
    "nnunet": parse_nnunet,
    "brats": parse_brats,
    "npy": parse_npy,
}


def detect_layout(names: Collection[str], document: Any, root: str) -> str:
    """Return the layout of a folder with files `names` and, if it has a dataset.json, its content `document`."""
    if isinstance(document, Mapping):
        if "channel_names" in document:
            return "nnunet"
        if "training" in document:
            return "msd"
        fields = ", ".join(sorted(map(str, document))[:6])
        raise LayoutError(
            f"dataset.json has neither training (Decathlon) nor channel_names (nnU-Net), only: {fields}",
            uri=root,
            fix="Add one of them, or give a JSON or CSV list of image and label pairs",
        )
    if any(_KITS_PATTERN.match(name) for name in names):
        return "kits19"
    if any(_brats_groups(names, naming) for naming in _BRATS):
        return "brats"
    if any(_match_npy(name) for name in names):
        return "npy"
    if not names:
        raise LayoutError("the folder is empty", uri=root, fix="Check the spelling of the bucket and the folder")
    raise LayoutError(
        "unknown dataset layout; expected dataset.json (Decathlon, nnU-Net), case_XXXXX/imaging.nii.gz (KiTS19), "
        "folders with files named *_t1ce or *-t1c (BraTS), or images/*.npy and labels/*.npy",
        uri=root,
        fix=_suggest_source(names),
    )


def _brats_groups(names: Collection[str], naming: str) -> dict[str, dict[str, str]]:
    """Group files by the path before their modality: {path: {modality: file}}. Returns no groups without any
    contrast-enhanced T1, because other datasets too have files named *_t1 and *_t2."""
    separator, modalities, _ = _BRATS[naming]
    pattern = re.compile(rf"(.+){separator}({'|'.join(modalities)}|seg)\.nii(?:\.gz)?$")
    groups: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        if match := pattern.match(name):
            groups.setdefault(match[1], {})[match[2]] = name
    if not any(modalities[1] in files for files in groups.values()):
        return {}
    return {base: files for base, files in groups.items() if len(files) > 1}


def _parse_channels(document: Mapping[str, Any], field: str, document_uri: str) -> list[str]:
    """Return the channel names in order, from {"0": "FLAIR", ...} or a list."""
    value = document.get(field)
    if isinstance(value, Mapping) and value and all(str(key).isdecimal() for key in value):
        named = [str(value[key]) for key in sorted(value, key=lambda key: int(key))]
    elif isinstance(value, list) and value:
        named = [str(name) for name in value]
    else:
        raise LayoutError(f"{field}: no channels are listed", uri=document_uri, fix=f'Write "{field}": {{"0": "CT"}}')
    return ["CT" if name.lower() == "ct" else name for name in named]


def _parse_labels(document: Mapping[str, Any], document_uri: str) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return name and value of each class, and the regions: names with several values. Accepts the Decathlon's {"1":
    "kidney"} and nnU-Net's {"kidney": 1, "both": [1, 2]}."""
    value = document.get("labels")
    fix = 'Write "labels": {"background": 0, "kidney": 1}'
    if not isinstance(value, Mapping) or not value:
        raise LayoutError("labels: no labels are listed", uri=document_uri, fix=fix)
    labels: dict[str, int] = {}
    regions: dict[str, list[int]] = {}
    try:
        for key, entry in value.items():
            if str(key).isdecimal() and isinstance(entry, str):
                name, number = entry, int(key)
                labels[name if name not in labels else f"{name} {number}"] = number
            elif isinstance(entry, list | tuple):
                regions[str(key)] = [int(v) for v in entry]
            else:
                labels[str(key)] = int(entry)
    except (TypeError, ValueError):
        raise LayoutError(f"labels.{key}: expected an integer, got {entry!r}", uri=document_uri, fix=fix) from None
    if "ignore" in labels:
        raise LayoutError(
            "labels.ignore: excluding voxels from the loss is not supported", uri=document_uri, fix="Remove it"
        )
    if regions:  # besides regions, a name with a single value is a region too
        order = [str(key) for key in value if labels.get(str(key)) != 0]
        regions = {key: regions.get(key) or [labels[key]] for key in order}
        labels = {"background": 0} | {f"label {v}": v for v in sorted({v for own in regions.values() for v in own})}
    if 0 not in labels.values():
        labels = {"background": 0} | labels
    return labels, regions


def _scan_suffix(name: str) -> str:
    return next((suffix for suffix in SCAN_SUFFIXES if name.lower().endswith(suffix)), "")


def _folder_name(root: str) -> str:
    return posixpath.basename(root.rstrip("/")) or "dataset"


def _suggest_source(names: Collection[str]) -> str:
    """Suggest what the user may have meant, given the files of the folder."""
    inner = sorted({posixpath.dirname(name) for name in names if posixpath.basename(name) == "dataset.json"})
    if inner and inner != [""]:
        return f"Use {', '.join(inner[:3])}, which has a dataset.json"
    shown = ", ".join(sorted(names)[:4])
    more = f" and {len(names) - 4:,} more" if len(names) > 4 else ""
    return f"It contains {shown}{more}. Use another folder, or a JSON or CSV list of image and label pairs"
