"""Draw a segmentation: ground truth, scan and prediction side by side, as arrays and as PNG.

Without a plotting library, because pictures are drawn at every validation. Slices are axial (y to the front, x to the
right) and shown as radiologists see them: the patient's front up, the patient's right on the left.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.volume.description import Description

Array = npt.NDArray[Any]
Window = tuple[float, float]

PALETTE = ("#ff6f5e", "#4aa8ff", "#ffd24a", "#4fd6a0", "#c792ff", "#ff8ecb", "#a3d64f", "#5fe0e6")
"""Colours of label values 1, 2, ...; larger values start over."""
ABDOMEN: Window = (-160.0, 240.0)
"""Hounsfield units from black to white of the usual abdominal CT window."""
HEIGHT_PX = 288
"""Default height of a row."""
GAP_PX = 6
"""Width of the black gap between the pictures of a row."""
_AIR_BELOW_HU = -500.0
_FILL = 0.38
"""Opacity of the colour of segmented pixels."""


def draw_row(
    image_zyx: Array,
    truth: Array | None,
    predicted: Array | None,
    spacing: Sequence[float],
    window: Window | None = None,
    *,
    height_px: int = HEIGHT_PX,
) -> npt.NDArray[np.uint8]:
    """Return one row of pictures (height, width, 3): ground truth, scan, prediction, of the slice with most foreground.

    `image_zyx` and the label arrays, which may be None, have the same shape. `spacing` is in millimetres (z, y, x) and
    sets the proportions of the pixels. `window` are the intensities shown as black and white, by default those of
    `choose_window`. A white line on the prediction is the outline of the truth.
    """
    upright = np.s_[choose_slice(truth, predicted, len(image_zyx)), ::-1, ::-1]
    plane = image_zyx[upright].astype(np.float32)
    masks = [None if mask is None else mask[upright] for mask in (truth, predicted)]
    low, high = window or choose_window(plane)
    grey = np.clip((np.nan_to_num(plane, nan=low) - low) / max(high - low, 1e-6), 0, 1)
    box = _find_visible_box(grey, [mask for mask in masks if mask is not None])
    truth_plane, predicted_plane = (None if mask is None else mask[box] for mask in masks)
    grey = grey[box]
    ratio = (grey.shape[1] * spacing[2]) / (grey.shape[0] * spacing[1])
    shape = height_px, max(1, min(round(height_px * ratio), 4 * height_px))
    scan = np.repeat(resize(grey, shape)[..., None], 3, axis=2)
    pictures = [scan]
    if truth_plane is not None:
        pictures.insert(0, paint(scan, truth_plane))
    if predicted_plane is not None:
        pictures.append(paint(scan, predicted_plane, outline=truth_plane))
    gap = np.zeros((shape[0], GAP_PX, 3), np.float32)
    parts = [part for picture in pictures for part in (picture, gap)][:-1]
    return np.asarray(np.round(np.concatenate(parts, axis=1) * 255), np.uint8)


def legend(description: Description) -> list[tuple[str, str]]:
    """Return name and colour (#rrggbb) of a mask's classes; regions have the colour of their mask value."""
    if description.regions:
        return [(n, colour(v)) for n, v in zip(description.targets, description.mask_values, strict=True)]
    return [(name, colour(value)) for name, value in description.foreground]


def colour(value: int) -> str:
    """Return the colour of a label value above 0, as #rrggbb."""
    return PALETTE[(value - 1) % len(PALETTE)]


def choose_window(plane: Array) -> Window:
    """Return the intensities to show as black and white. Hounsfield units, recognised by their air, get an abdominal
    window, anything else its 1st and 99.5th percentiles."""
    finite = plane[np.isfinite(plane)]
    if finite.size == 0:
        return 0.0, 1.0
    if finite.min() < _AIR_BELOW_HU:
        return ABDOMEN
    low, high = np.percentile(finite, [1, 99.5])
    return float(low), float(high)


def choose_slice(truth: Array | None, predicted: Array | None, slices: int) -> int:
    """Return the slice with most true foreground, else with most predicted foreground, else the middle one. Each class
    counts as a share of all its voxels, so that small classes are seen."""
    for mask in (truth, predicted):
        if mask is not None and mask.any():
            shares = [(counts := (mask == v).sum((1, 2))) / counts.sum() for v in np.unique(mask) if v]
            return int(np.sum(shares, axis=0).argmax())
    return slices // 2


def paint(picture: Array, mask: Array, outline: Array | None = None) -> Array:
    """Return `picture` (height, width, 3; 0 to 1) with every class of `mask`, a smaller plane, in its colour. Classes
    are translucent and outlined. The classes of the mask `outline` are drawn over them as white lines."""
    shape = (picture.shape[0], picture.shape[1])
    painted = picture.copy()
    for value, inside in _upscale_classes(mask, shape):
        rgb = np.array([int(colour(value)[i : i + 2], 16) for i in (1, 3, 5)], np.float32) / 255
        painted[inside] = (1 - _FILL) * painted[inside] + _FILL * rgb
        painted[_find_edge(inside)] = rgb
    if outline is not None:
        for _, inside in _upscale_classes(outline, shape):
            painted[_find_edge(inside)] = 1.0
    return painted


def resize(plane: Array, shape: tuple[int, int]) -> Array:
    """Return `plane` at another size, linearly interpolated between pixel centres."""
    for axis, size in enumerate(shape):
        old = plane.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
        low = np.floor(at).astype(int)
        part = (at - low).astype(np.float32).reshape((-1, 1) if axis == 0 else (1, -1))
        high = np.minimum(low + 1, old - 1)
        plane = plane.take(low, axis) * (1 - part) + plane.take(high, axis) * part
    return plane


def encode_png(picture: npt.NDArray[np.uint8]) -> bytes:
    """Return a picture (height, width, 3) as the bytes of a PNG file; equal pictures give equal bytes."""
    from PIL import Image

    body = io.BytesIO()
    Image.fromarray(picture).save(body, "png")
    return body.getvalue()


def _find_visible_box(grey: Array, masks: Sequence[Array]) -> tuple[slice, slice]:
    """Return the rectangle outside which the picture is black and nothing is segmented."""
    bright = grey > 0.08
    for mask in masks:
        bright = bright | (mask > 0)
    spans = []
    for axis in (1, 0):
        # A line counts once a fiftieth of it is bright, so that the noise of empty air does not.
        lines = np.flatnonzero((bright.mean(axis) > 0.02) | np.any([(m > 0).any(axis) for m in masks], axis=0))
        full = (0, bright.shape[1 - axis])
        first, last = (int(lines[0]) - 1, int(lines[-1]) + 2) if len(lines) else full
        spans.append(slice(max(first, 0), min(last, full[1])))
    return spans[0], spans[1]


def _upscale_classes(mask: Array, shape: tuple[int, int]) -> list[tuple[int, Array]]:
    """Return each class of `mask` with its pixels in a larger picture; the largest share wins, for smooth edges."""
    values = [int(v) for v in np.unique(mask)]
    if len(values) == 1:
        return [(v, np.ones(shape, bool)) for v in values if v]
    shares = np.stack([resize((mask == v).astype(np.float32), shape) for v in values])
    winner = shares.argmax(0)
    return [(v, winner == i) for i, v in enumerate(values) if v]


def _find_edge(inside: Array) -> Array:
    """Return the pixels of `inside` with a neighbour outside it; the picture's border does not count."""
    from scipy.ndimage import binary_erosion

    edge: Array = inside & ~binary_erosion(inside, border_value=1)
    return edge
