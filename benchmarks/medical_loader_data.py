"""Write the same CT-like volumes in the format of each loader, and find the position of a patch in them.

The folder `source` holds each volume in Hounsfield units (int16) with its label (uint8). Every format is made from
them without resampling, so all loaders yield the same voxels, normalised as MLPerf's U-Net3D does, on which the public
segmentation demo trains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LOWER_HU, UPPER_HU, MEAN_HU, STD_HU = -79, 304, 101.0, 76.9
"""MLPerf's constants for KiTS19: clipped, then (x - mean) / std."""
NOISE_HU = 5.0
CLASSES = (1, 2)
_PROBE = 16
Scan = npt.NDArray[np.int16]
Label = npt.NDArray[np.uint8]


# -- the volumes -------------------------------------------------------------------------------------------------------


def make_source(folder: str, number: int, side: int, ct: str, label: str) -> None:
    """Write volume `number` of `side` cubed voxels: a real CT and label if paths are given, otherwise synthetic shapes.

    Both are repeated to that size and shifted differently in each volume. Noise of 5 HU keeps compressors from
    exploiting the repetition and makes patches unique.
    """
    random = np.random.default_rng([0, number])
    scan = _nifti(ct).astype(np.float32).transpose(2, 1, 0) if ct else _body(min(side, 128))
    shape, shift = (side,) * 3, tuple(int(n) for n in random.integers(0, 64, 3))
    image = np.roll(_repeated(scan, shape), shift, (0, 1, 2))
    image = image + NOISE_HU * random.standard_normal(shape, np.float32)
    target = Path(folder, "source")
    target.mkdir(parents=True, exist_ok=True)
    np.save(target / f"{name(number)}-image.npy", np.clip(np.rint(image), LOWER_HU, UPPER_HU).astype(np.int16))
    marks = _around_foreground(_nifti(label).astype(np.uint8), side) if label else _organs(side)
    np.save(target / f"{name(number)}-label.npy", np.roll(_repeated(marks, shape), shift, (0, 1, 2)))


def name(number: int) -> str:
    """Return the name of a volume."""
    return f"case_{number:05d}"


def open_verified(folder: str, number: int) -> tuple[Scan, Label]:
    """Return a volume (Z, Y, X) in Hounsfield units and its label, mapped from disk."""
    base = Path(folder, "source", name(number))
    return np.load(f"{base}-image.npy", mmap_mode="r"), np.load(f"{base}-label.npy", mmap_mode="r")


def normalised(image: Scan) -> npt.NDArray[np.float32]:
    """Return the image as the network receives it."""
    result: npt.NDArray[np.float32] = (image.astype(np.float32) - np.float32(MEAN_HU)) / np.float32(STD_HU)
    return result


def _nifti(path: str) -> npt.NDArray[Any]:
    import nibabel

    return np.asanyarray(nibabel.load(path).dataobj)


def _body(side: int) -> npt.NDArray[np.float32]:
    middle = side / 2
    grid = np.ogrid[:side, :side, :side]
    scan = np.full((side,) * 3, -1000, np.float32)
    for value, radius in ((-90, 0.9), (50, 0.8), (20, 0.5), (120, 0.3), (300, 0.1)):
        scan[sum((g - middle) ** 2 for g in grid[1:]) + 0 * grid[0] < (radius * middle) ** 2] = value
    return scan


def _organs(side: int) -> Label:
    label = np.zeros((side,) * 3, np.uint8)
    grid = np.ogrid[:side, :side, :side]
    for value, centre, radius in ((1, (0.4, 0.5, 0.3), 0.1), (1, (0.4, 0.5, 0.7), 0.1), (2, (0.4, 0.48, 0.32), 0.04)):
        label[sum((g - c * side) ** 2 for g, c in zip(grid, centre, strict=True)) < (radius * side) ** 2] = value
    return label


def _around_foreground(label: Label, side: int) -> Label:
    """Crop the label to at most `side` voxels along each axis, with the foreground in the middle."""
    middle = [int(np.median(places)) for places in np.nonzero(label)]
    first = [max(0, min(m - side // 2, n - side)) for m, n in zip(middle, label.shape, strict=True)]
    return label[tuple(slice(a, a + side) for a in first)]


def _repeated(array: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    inside = array[tuple(map(slice, shape))]
    return np.pad(inside, [(0, n - m) for n, m in zip(shape, inside.shape, strict=True)], mode="wrap")


# -- formats -----------------------------------------------------------------------------------------------------------


def write_raw(folder: str, number: int) -> None:
    """Write a float32 image and a uint8 label as .npy, as in the public demo: `raw/images` and `raw/labels`."""
    image, label = open_verified(folder, number)
    for kind, array in (("images", normalised(image)), ("labels", label)):
        target = Path(folder, "raw", kind)
        target.mkdir(parents=True, exist_ok=True)
        np.save(target / f"{name(number)}.npy", array)


def write_prepared(folder: str, number: int, root: str, endpoint: str, side: int) -> dict[str, Any]:
    """Write one volume of our prepared dataset, as `voxlane prepare` does; return its entry for the table of cases."""
    from voxlane import Store
    from voxlane.uri import parse
    from voxlane.volume import normalise
    from voxlane.volume.case_writer import write_case
    from voxlane.volume.prepare import foreground_voxels
    from voxlane.volume.prepared_dataset import as_prefix, case_key

    image, label = open_verified(folder, number)
    codes, scale, offset = normalise.encode(normalised(image)[None], _plan(side).normalisation)
    written = write_case(
        Store(root, store_config(endpoint)),
        case_key(as_prefix(parse(root).key), name(number)),
        image=codes,
        label=np.array(label),
        foreground=foreground_voxels(np.array(label), name(number)),
        attributes={},
        patch=(side,) * 3,
    )
    return {**written, "scale_factor": list(scale), "add_offset": list(offset)}


def publish_prepared(root: str, endpoint: str, side: int, volumes: Sequence[dict[str, Any]]) -> None:
    """Write the table and the header of the prepared dataset."""
    from voxlane import Store
    from voxlane.uri import parse
    from voxlane.volume.description import Description
    from voxlane.volume.prepared_dataset import PreparedCase, as_prefix, publish_dataset

    publish_dataset(
        Store(root, store_config(endpoint)),
        as_prefix(parse(root).key),
        description=Description(
            name="peers", channels=("CT",), labels={"background": 0, "organ": CLASSES[0], "lesion": CLASSES[1]}
        ),
        plan=_plan(side),
        fingerprint={},
        source={"uri": "", "layout": "list", "excluded": []},
        folds=2,
        cases=[PreparedCase(name(i), name(i), i % 2, {}, volume) for i, volume in enumerate(volumes)],
    )


def _plan(side: int) -> Any:
    from voxlane.volume.plan import Network, Normalisation, Plan

    ct = Normalisation(scheme="ct", lower=LOWER_HU, upper=UPPER_HU, mean=MEAN_HU, std=STD_HU)
    return Plan(spacing=(1, 1, 1), normalisation=(ct,), patch=(side,) * 3, batch=2, network=Network())


def store_config(endpoint: str) -> Any:
    """Return the settings of our client; without an endpoint, those of a local folder."""
    from voxlane import StoreConfig

    return StoreConfig(endpoint=endpoint or None, access_key_id="k", secret_access_key="s")


def write_nnunet(folder: str, number: int, side: int) -> None:
    """Write to nnU-Net's preprocessed folder `nnunet` with its own functions: blocks and chunks for the patch size, its
    choice of filter, and the voxels of each class around which it draws foreground patches."""
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
    from nnunetv2.training.dataloading.nnunet_dataset import comp_blosc2_params, nnUNetDatasetBlosc2

    image, label = open_verified(folder, number)
    data, seg = normalised(image)[None], np.asarray(label, np.int16)[None]
    blocks, chunks = comp_blosc2_params(data.shape, (side,) * 3, data.itemsize)
    blocks_seg, chunks_seg = comp_blosc2_params(seg.shape, (side,) * 3, seg.itemsize)
    places = DefaultPreprocessor._sample_foreground_locations(seg, list(CLASSES))
    Path(folder, "nnunet").mkdir(exist_ok=True)
    nnUNetDatasetBlosc2.save_case(
        data,
        seg,
        {"class_locations": places, "spacing": [1.0, 1.0, 1.0]},
        str(Path(folder, "nnunet", name(number))),
        chunks=chunks,
        blocks=blocks,
        chunks_seg=chunks_seg,
        blocks_seg=blocks_seg,
    )


def write_litdata(folder: str, numbers: Sequence[int], form: str, compression: str | None) -> None:
    """Write litdata's chunks to the folder `form` with its own `optimize`.

    An item is a volume (int16) and its label, because crops are random. Chunks have 64 MB, as litdata recommends,
    and so hold one item each. `numbers` may contain duplicates.
    """
    import litdata

    litdata.optimize(
        fn=_LitdataItem(folder),
        inputs=list(numbers),
        output_dir=str(Path(folder, form)),
        chunk_bytes="64MB",
        compression=compression,
        num_workers=1,
        verbose=False,
        mode="overwrite",
    )
    index = json.loads(Path(folder, form, "index.json").read_text())
    if sum(chunk["chunk_size"] for chunk in index["chunks"]) != len(numbers):
        raise AssertionError(f"litdata wrote {index['chunks']} for {len(numbers)} items")


class _LitdataItem:
    """Reads the volume of a number; a class, because optimize sends it to its workers."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __call__(self, number: int) -> dict[str, Any]:
        image, label = open_verified(self._folder, number)
        return {"image": np.array(image), "label": np.array(label)}


# -- position of a patch -----------------------------------------------------------------------------------------------


def locate(
    sources: Sequence[tuple[Scan, Label]], image: npt.NDArray[np.float32], label: npt.NDArray[Any]
) -> tuple[int, tuple[int, int, int]]:
    """Return (volume, first voxel) of a loaded patch (Z, Y, X); ValueError if it is not in any volume.

    nnU-Net's patches may reach beyond the far faces of a volume. The part inside must be equal and at least an eighth
    of the patch, because the centre of a patch is inside.
    """
    exact = image.astype(np.float64) * STD_HU + MEAN_HU
    patch = np.rint(exact).astype(np.int16)
    if np.abs(exact - patch).max() > 0.01:
        raise ValueError("the intensities of the patch do not occur in the volumes")
    z, y, x = _rich_line(patch)
    line = patch[z, y, x : x + _PROBE]
    for number, (volume, marks) in enumerate(sources):
        flat = volume.reshape(-1)
        starts = np.flatnonzero(flat[: flat.size - _PROBE] == line[0])
        for step in range(1, _PROBE):
            starts = starts[flat[starts + step] == line[step]]
        for place in starts:
            at = np.unravel_index(int(place), volume.shape)
            start = (int(at[0]) - z, int(at[1]) - y, int(at[2]) - x)
            if min(start) >= 0 and _same(volume, patch, start) and _same(marks, label, start):
                return number, start
    raise ValueError("the patch is not in any volume")


def _rich_line(patch: Scan) -> tuple[int, int, int]:
    """Return the start of the line of voxels along x with the most distinct values; clipped regions are uniform."""
    best, most = (0, 0, 0), -1
    step = max(1, patch.shape[0] // 16)
    for z in range(0, patch.shape[0], step):
        for y in range(0, patch.shape[1], step):
            for x in range(0, patch.shape[2] - _PROBE + 1, _PROBE):
                distinct = len(set(patch[z, y, x : x + _PROBE].tolist()))
                if distinct > most:
                    best, most = (z, y, x), distinct
    return best


def _same(volume: npt.NDArray[Any], patch: npt.NDArray[Any], start: tuple[int, int, int]) -> bool:
    inside = volume[tuple(slice(a, a + n) for a, n in zip(start, patch.shape, strict=True))]
    return 8 * inside.size >= patch.size and np.array_equal(inside, patch[tuple(map(slice, inside.shape))])
