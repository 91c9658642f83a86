"""Raw scans as whole objects: which objects of a listing make a case, and its arrays out of their bytes. Pure."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import LayoutError, ScanError
from voxlane.listing import Manifest
from voxlane.volume.layouts import LAYOUTS, recognise
from voxlane.volume.scan import NIFTI, image_of, label_of

NUMPY = ".npy"
_PAIRS = (
    (re.compile(r"(?P<folder>.*)(?:images|imagesTr)/(?P<name>[^/]+)\.npy$"), "images"),
    (re.compile(r"(?P<folder>.*)(?:labels|labelsTr)/(?P<name>[^/]+)\.npy$"), "labels"),
    (re.compile(r"(?P<folder>(?:.*/)?)(?P<name>[^/]+)_x\.npy$"), "images"),
    (re.compile(r"(?P<folder>(?:.*/)?)(?P<name>[^/]+)_y\.npy$"), "labels"),
)
"""How arrays are paired: folders `images` and `labels`, as in the public demo, or `_x` and `_y`, as in MLPerf."""


@dataclass(frozen=True)
class RawCase:
    """One scan with its label, as rows of the listing."""

    id: str
    images: tuple[int, ...]
    """One object a channel, or one that holds every channel."""
    label: int


@dataclass(frozen=True)
class RawSet:
    """The cases of a bucket's raw scans."""

    manifest: Manifest
    cases: tuple[RawCase, ...]
    """By id."""

    @property
    def sample_bytes(self) -> float:
        """Bytes of the objects of a case, the mean over cases."""
        sizes = self.manifest.sizes
        return float(np.mean([sizes[[*case.images, case.label]].sum() for case in self.cases]))

    @property
    def object_bytes(self) -> list[float]:
        """Bytes of each object of a case, images first and the label last, the mean over cases; empty where cases have
        unequally many."""
        objects = [self.manifest.sizes[[*case.images, case.label]] for case in self.cases]
        alike = len({len(sizes) for sizes in objects}) == 1
        return [float(size) for size in np.mean(objects, axis=0)] if alike else []


def raw_set(manifest: Manifest, document: Any) -> RawSet:
    """The cases of a listing: pairs of .npy arrays, or a layout that `voxlane prepare` takes. `document`: what the
    listing's dataset.json holds, if it has one. Cases without a label, or whose image is missing, are left out."""
    folder = len(manifest.folder)
    rows = {key[folder:]: row for row, key in enumerate(manifest.keys())}
    if pairs := _numpy_pairs(rows):
        return RawSet(manifest, tuple(sorted(pairs, key=lambda case: case.id)))
    names = [name for name in rows if not posixpath.basename(name).startswith(".")]
    draft = LAYOUTS[recognise(names, document, manifest.uri)](names, document, manifest.uri)
    cases = [
        RawCase(case.id, tuple(rows[image] for image in case.images), rows[case.label])
        for case in draft.cases
        if case.label in rows and all(image in rows for image in case.images)
    ]
    odd = [name for case in draft.cases for name in case.images if not name.lower().endswith(NIFTI)]
    if odd:
        raise LayoutError(
            f"{odd[0]} is not read as one whole object", uri=manifest.uri, fix=f"Give {', '.join((*NIFTI, NUMPY))}"
        )
    if not cases:
        raise LayoutError("no case has both an image and a label", uri=manifest.uri, fix="Give scans with labels")
    return RawSet(manifest, tuple(sorted(cases, key=lambda case: case.id)))


def _numpy_pairs(rows: Mapping[str, int]) -> list[RawCase]:
    found: dict[str, dict[str, int]] = {"images": {}, "labels": {}}
    for name, row in rows.items():
        if not name.endswith(NUMPY):
            continue
        for pattern, kind in _PAIRS:
            if match := pattern.match(name):
                found[kind][match["folder"] + match["name"]] = row
                break
    images, labels = found["images"], found["labels"]
    return [RawCase(name, (row,), labels[name]) for name, row in images.items() if name in labels]


def arrays(
    case: RawCase, keys: Sequence[str], bodies: Sequence[bytes]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """Image (C, Z, Y, X) and label (Z, Y, X) of a case. `keys`, `bodies`: of its images, then of its label."""
    image_bodies = list(zip(keys[:-1], bodies[:-1], strict=True))
    label_key, label_body = keys[-1], bodies[-1]
    if label_key.endswith(NUMPY):
        image = np.concatenate([_array(body, key, 4) for key, body in image_bodies])
        label = _array(label_body, label_key, 4)[0].astype(np.uint8, copy=False)
    else:
        parts = [image_of(body, key) for key, body in image_bodies]
        image = parts[0] if len(parts) == 1 else np.concatenate(parts)
        label = label_of(label_body, label_key)
    if image.shape[1:] != label.shape:
        raise ScanError(f"{case.id}: an image of {image.shape[1:]} voxels and a label of {label.shape}", uri=label_key)
    return image, label


def _array(body: bytes, key: str, axes: int) -> npt.NDArray[Any]:
    """A .npy file's array with `axes` axes, the first of length 1 where the file has one less; not copied."""
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        flat = np.frombuffer(body, dtype, int(np.prod(shape)), file.tell())
    except ValueError as error:
        raise ScanError(f"not a whole .npy file: {error}", uri=key, fix="Copy it again from its source") from None
    array = flat.reshape(shape, order="F" if fortran else "C")
    if array.ndim not in (axes - 1, axes):
        raise ScanError(f"an array of {array.ndim} axes", uri=key, fix="Give (Z, Y, X) or (C, Z, Y, X)")
    return array if array.ndim == axes else array[None]
