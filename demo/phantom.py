"""Phantom abdomens: synthetic contrast-enhanced CT with kidneys and tumours, in the layout of KiTS19.

Organs are painted back to front as warped ellipsoids and tubes, in millimetres, on a grid finer than the scan's;
averaging it down gives the partial volume of a scanner's slices, and filtered noise its grain. Nothing comes from a
patient: anatomy, contrast phase, spacing and noise are drawn from a seed.

Frame of the painting: x to the patient's left, y to the back, z down to the feet, from the middle of the body.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from scipy import ndimage
from scipy.interpolate import CubicSpline

from voxlane import Store, StoreConfig
from voxlane.uri import parse

Array = npt.NDArray[Any]
Box = tuple[slice, slice, slice]
Point = Sequence[float] | Array

KIDNEY, TUMOUR = 1, 2
AIR, FAT, MUSCLE = -1000.0, -104.0, 56.0
"""Hounsfield units of tissues without contrast; enhancing tissues are drawn for each case."""
LONG = 1e5
"""A radius along z that makes an ellipsoid a cylinder (mm)."""
_TRUNK = 2.3
"""Exponent of the trunk's outline; 2 is an ellipse, larger values are more square."""
CAVITY_FAT = (-160.0, -60.0)
"""Range of intensities that count as free space for a loop of bowel (HU)."""


@dataclass(frozen=True)
class Phantom:
    """One case, in the array order of KiTS19: slices from head to feet, rows from front to back, columns from the
    patient's right to the left."""

    image: Array
    """int16 (slices, rows, columns), Hounsfield units."""
    label: Array
    """uint8 (slices, rows, columns): 1 kidney, 2 tumour. Cysts have no label of their own."""
    spacing: tuple[float, float, float]
    """Millimetres between voxels (slices, rows, columns)."""

    @property
    def affine(self) -> Array:
        """Voxel index to RAS millimetres, as the files of KiTS19 have it."""
        z, y, x = self.spacing
        return np.array([[0, 0, -x, 0], [0, -y, 0, 0], [-z, 0, 0, 0], [0, 0, 0, 1]], float)


def make(
    case: int,
    *,
    seed: int = 0,
    size: int = 96,
    slice_mm: tuple[float, float] = (4.0, 6.5),
    coverage_mm: tuple[float, float] = (165.0, 195.0),
) -> Phantom:
    """The phantom number `case` of `seed`: `size` x `size` pixels over the whole body, and slices of a thickness
    drawn from `slice_mm` over a length drawn from `coverage_mm` (defaults: 26 to 48 slices)."""
    rng = np.random.default_rng([seed, case])
    body = Body.draw(rng)
    slice_thickness = round(rng.uniform(*slice_mm) * 4) / 4
    slices = round(rng.uniform(*coverage_mm) / slice_thickness)
    pixel_mm = float(np.round(2 * (body.width + 12) * rng.uniform(1.0, 1.07) / size, 4))
    fine = (max(1, round(slice_thickness / 2)), *(2 if size <= 256 else 1,) * 2)
    canvas = Canvas((slices, size, size), (slice_thickness, pixel_mm, pixel_mm), fine, rng)
    paint_body(canvas, body, rng)
    paint_bones_and_muscles(canvas, body, rng)
    paint_organs(canvas, body, rng)
    paint_bowel(canvas, body, rng)
    paint_vessels(canvas, body, rng)
    paint_kidneys(canvas, body, rng)
    paint_spine(canvas, body, rng)
    image, label = canvas.scan(rng, noise_hu=rng.uniform(9, 19))
    return Phantom(image, label, (slice_thickness, pixel_mm, pixel_mm))


def write(
    uri: str, cases: int, config: StoreConfig | None = None, *, seed: int = 0, workers: int = 2, **options: Any
) -> Iterator[str]:
    """Write `cases` phantoms below `uri` as `case_XXXXX/imaging.nii.gz` and `segmentation.nii.gz`, and yield each
    case's id once both files exist. `options` are those of `make`."""
    place = parse(uri)
    store = Store(str(place), config)
    prefix = place.key.rstrip("/") + "/" if place.key else ""

    def write_case(case: int) -> str:
        phantom = make(case, seed=seed, **options)
        name = f"case_{case:05d}"
        store.put(f"{prefix}{name}/imaging.nii.gz", to_nifti(phantom.image, phantom.affine))
        store.put(f"{prefix}{name}/segmentation.nii.gz", to_nifti(phantom.label, phantom.affine))
        return name

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(write_case, range(cases))


def to_nifti(volume: Array, affine: Array) -> bytes:
    """Encode a volume as a .nii.gz file; equal volumes give equal bytes."""
    return gzip.compress(nib.Nifti1Image(volume, affine).to_bytes(), 3, mtime=0)


# -- the canvas --------------------------------------------------------------------------------------------------


class Canvas:
    """A fine grid to paint on. All positions and lengths are millimetres (x, y, z)."""

    def __init__(
        self, shape: tuple[int, int, int], spacing: tuple[float, ...], fine: tuple[int, ...], rng: np.random.Generator
    ) -> None:
        self.fine = fine
        self.axes = [
            ((np.arange(n * f) + 0.5) / f - n / 2).astype(np.float32) * np.float32(mm)
            for n, f, mm in zip(shape, fine, spacing, strict=True)
        ]
        """z, y and x of the fine voxels' centres."""
        self.hu = np.full([len(axis) for axis in self.axes], AIR, np.float32)
        self.label = np.zeros(self.hu.shape, np.uint8)
        self.warp = [self.field(rng, 45.0) * 3.5 for _ in range(3)]
        """Displacement (x, y, z) of every point before a shape is evaluated, because no organ is an ellipsoid."""
        self.texture = self.field(rng, 9.0)
        """Texture of tissue, about standard normal."""
        x, y, _ = self.local((slice(None),) * 3, (0, 0, 0), 0.5)
        self.trunk = np.abs(x) ** _TRUNK, np.abs(y) ** _TRUNK
        """x and y to the power of the trunk's outline, which many shapes need."""

    def field(self, rng: np.random.Generator, cell_mm: float) -> Array:
        """Return a smooth random field, about standard normal, with features about `cell_mm` wide."""
        counts = [max(4, int(np.ptp(axis) / cell_mm) + 3) for axis in self.axes]
        field = rng.normal(0, 1.3, counts).astype(np.float32)
        for axis, count in zip(self.axes, counts, strict=True):
            at = np.linspace(0, count - 1, len(axis))
            weights = CubicSpline(np.arange(count), np.eye(count))(at).astype(np.float32)
            field = np.tensordot(field, weights, axes=(0, 1))  # the axis in front goes to the back: three turns
        return field

    def box(self, centre: Point, reach: Point | float) -> Box:
        """Return the part of the grid within `reach` of `centre` along each axis."""
        half = np.broadcast_to(reach, 3) + 12.0  # the warp may move a point this far
        spans = []
        for axis, middle, extent in zip(self.axes, reversed(list(centre)), reversed(half), strict=True):
            spans.append(slice(*np.searchsorted(axis, [middle - extent, middle + extent])))
        return spans[0], spans[1], spans[2]

    def local(self, box: Box, centre: Point, warp: float = 1.0) -> tuple[Array, Array, Array]:
        """Return the warped coordinates x, y, z of every point in `box` relative to `centre`."""
        z, y, x = (axis[span] for axis, span in zip(self.axes, box, strict=True))
        wx, wy, wz = (warp * w[box] for w in self.warp)
        return x - centre[0] + wx, (y - centre[1])[:, None] + wy, (z - centre[2])[:, None, None] + wz

    def ellipsoid(self, centre: Point, radii: Point, power: float = 2.0, warp: float = 1.0) -> tuple[Box, Array]:
        """Return a box and a field in it that is 0 at the centre and 1 on the surface of the ellipsoid."""
        box = self.box(centre, radii)
        point = list(zip(self.local(box, centre, warp), radii, strict=True))
        if radii[2] == LONG:
            point.pop()
        if power == 2.0:
            return box, np.sqrt(sum(np.square(p / r) for p, r in point))
        return box, sum(np.abs(p / r) ** power for p, r in point) ** (1 / power)

    def trunk_radius(self, box: Box, half_width: float, half_depth: float) -> Array:
        """Return a field below 1 inside an outline of the trunk and above 1 outside; it is not a distance."""
        radius: Array = self.trunk[0][box] / half_width**_TRUNK + self.trunk[1][box] / half_depth**_TRUNK
        return radius

    def tube(self, start: Point, end: Point, radius: float) -> tuple[Box, Array]:
        """Return a box and a field in it that is 0 on the line from `start` to `end` and 1 at `radius` from it."""
        a, b = np.asarray(start, float), np.asarray(end, float)
        box = self.box((a + b) / 2, np.abs(b - a) / 2 + radius)
        point = self.local(box, a, 0.6)
        along = sum(p * d for p, d in zip(point, b - a, strict=True)) / max(float((b - a) @ (b - a)), 1e-6)
        along = np.clip(along, 0, 1)
        return box, np.sqrt(sum((p - along * d) ** 2 for p, d in zip(point, b - a, strict=True))) / radius

    def paint(self, box: Box, mask: Array, hu: float | Array, grain: float = 4.0, label: int | None = None) -> None:
        """Paint the voxels of `mask` in `box` as tissue of `hu` with a texture of `grain` HU."""
        value = hu + grain * self.texture[box]
        np.copyto(self.hu[box], value, where=mask)
        if label is not None:
            self.label[box][mask] = label

    def free(self, box: Box) -> Array:
        """Return the voxels that are still fat."""
        return (self.hu[box] > CAVITY_FAT[0]) & (self.hu[box] < CAVITY_FAT[1])

    def scan(self, rng: np.random.Generator, noise_hu: float) -> tuple[Array, Array]:
        """Simulate a scanner: means over voxels, a soft kernel and filtered noise; also return the majority label of
        each voxel."""
        image = self._mean(self.hu)
        noise = ndimage.gaussian_filter(rng.normal(size=image.shape).astype(np.float32), (0, 0.6, 0.6))
        depth = ndimage.gaussian_filter((image > -300).astype(np.float32), (0, 8, 8))
        # Fewer photons get through the middle of the body, so it is noisier there.
        image = ndimage.gaussian_filter(image, (0, 0.45, 0.45)) + noise / noise.std() * noise_hu * (0.5 + 0.6 * depth)
        organ, tumour = (self._mean((self.label >= k).astype(np.float32)) for k in (KIDNEY, TUMOUR))
        label = (organ >= 0.5).astype(np.uint8) + ((organ >= 0.5) & (tumour >= organ / 2))
        return np.clip(np.round(image), -1024, 3071).astype(np.int16), label.astype(np.uint8)

    def _mean(self, volume: Array) -> Array:
        z, y, x = (n // f for n, f in zip(volume.shape, self.fine, strict=True))
        mean: Array = volume.reshape(z, self.fine[0], y, self.fine[1], x, self.fine[2]).mean((1, 3, 5))
        return mean


# -- anatomy -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Body:
    """One patient's build and contrast phase."""

    width: float
    """Half the body's width (mm)."""
    depth: float
    """Half its depth, front to back (mm)."""
    fat: float
    """Thickness of the fat under the skin at the sides (mm)."""
    wall: float
    """Thickness of the muscular wall (mm)."""
    top: float
    """z of the dome of liver and spleen (mm)."""
    spine: float
    """y of the vertebral bodies' centres (mm)."""
    artery: float
    """HU of the aorta."""
    cortex: float
    """HU of renal cortex."""
    medulla: float
    """HU of renal medulla; as bright as the cortex in a late phase."""
    organ: float
    """HU of the liver; the spleen is somewhat brighter."""

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Body:
        """Draw a patient."""
        build = rng.uniform(0, 1)
        width = 148 + 38 * build + rng.normal(0, 5)
        depth = width * rng.uniform(0.69, 0.78)
        fat = 9 + 24 * build + rng.uniform(0, 6)
        phase = rng.uniform(0, 1)  # from late arterial to nephrographic
        cortex = 225 - 35 * phase + rng.normal(0, 12)
        return cls(
            width=width,
            depth=depth,
            fat=fat,
            wall=rng.uniform(9, 13),
            top=-75 + rng.normal(0, 10),
            spine=depth - 0.7 * fat - 62,
            artery=300 - 130 * phase + rng.normal(0, 15),
            cortex=cortex,
            medulla=cortex - (1 - phase) * rng.uniform(70, 110) - 8,
            organ=88 + 24 * phase + rng.normal(0, 6),
        )

    @property
    def muscle(self) -> tuple[float, float]:
        """Half width and half depth of the muscular wall's outside (mm)."""
        return self.width - self.fat, self.depth - 0.7 * self.fat

    @property
    def cavity(self) -> tuple[float, float]:
        """Half width and half depth of the wall's inside (mm)."""
        return self.muscle[0] - self.wall, self.muscle[1] - self.wall


def inside_cavity(canvas: Canvas, body: Body, box: Box, margin: float = 2.0) -> Array:
    """Return the part of `box` at least `margin` inside the muscular wall."""
    return canvas.trunk_radius(box, body.cavity[0] - margin, body.cavity[1] - margin) < 1


def paint_body(canvas: Canvas, body: Body, rng: np.random.Generator) -> None:
    """Paint skin, fat, the muscular wall, the fat of the cavity, and the table under the patient."""
    everything = (slice(None),) * 3
    x, y, _ = canvas.local(everything, (0, 0, 0), 0.0)
    curve = y - (body.depth + 7) + 0.0006 * x**2
    canvas.paint(everything, (np.abs(curve) < 2.5) & (np.abs(x) < 0.9 * body.width), -180.0, 0.0)
    for outline, hu, grain in (
        ((body.width, body.depth), 10.0, 5.0),
        ((body.width - 2.5, body.depth - 2.5), FAT, 5.0),
        (body.muscle, MUSCLE, 7.0),
        (body.cavity, FAT + 4, 7.0),
    ):
        canvas.paint(everything, canvas.trunk_radius(everything, *outline) < 1, hu, grain)


def paint_bones_and_muscles(canvas: Canvas, body: Body, rng: np.random.Generator) -> None:
    """Paint ribs in the wall, slanting down to the front, and the muscles of the back."""
    everything = (slice(None),) * 3
    x, y, z = canvas.local(everything, (0, 0, 0), 0.5)
    half_width, half_depth = (body.muscle[0] + body.cavity[0]) / 2, (body.muscle[1] + body.cavity[1]) / 2
    # Near the outline the radius to that power grows _TRUNK times as fast as the distance does.
    across = (canvas.trunk_radius(everything, half_width, half_depth) - 1) * (half_width / _TRUNK / (body.wall * 0.42))
    slant = z + 0.42 * y - rng.uniform(0, 30)
    along = ((slant + 15) % 30 - 15) / 5.5
    rib = across**2 + along**2
    end = body.top + 95 + rng.normal(0, 10)  # the lowest ribs stop about here, and in front they are cartilage
    place = (z - 0.5 * y < end) & (y > -0.72 * half_depth) & (np.abs(x) > 50)
    canvas.paint(everything, (rib < 1) & place, 330.0, 40.0)
    canvas.paint(everything, (rib < 0.36) & place, 140.0, 30.0)
    growth = 0.055
    for side in (-1, 1):
        for dx, dy, rx, ry, grow in ((30, 31, 25, 19, 0.0), (54, 14, 15, 9, 0.0), (31, 3, 11, 15, growth)):
            box, q = canvas.ellipsoid((side * dx, body.spine + dy, 0), (rx, ry, LONG), 2.2)
            size = 1 + grow * canvas.axes[0][box[0], None, None] / 10
            canvas.paint(box, q < np.maximum(size, 0.4), MUSCLE + 4, 9.0)
    # The linea alba and the recti are what the front of the wall shows: a gap of fat between two bellies.
    for side in (-1, 1):
        box, q = canvas.ellipsoid((side * 33, -body.muscle[1] + 9, 0), (30, 6, LONG), 2.4, 0.5)
        canvas.paint(box, q < 1, MUSCLE, 7.0)


def paint_organs(canvas: Canvas, body: Body, rng: np.random.Generator) -> None:
    """Paint liver with vessels and gallbladder, spleen, stomach and pancreas."""
    cx, cy = body.cavity
    top = body.top

    def organ(parts: list[tuple[Point, Point]], hu: float, grain: float = 5.0, over: bool = True) -> None:
        for centre, radii in parts:
            box, q = canvas.ellipsoid(centre, radii, 2.3, 1.6)
            mask = (q < 1) & inside_cavity(canvas, body, box)
            canvas.paint(box, mask if over else mask & canvas.free(box), hu, grain)

    stomach = (0.42 * cx, -0.42 * cy, top + rng.uniform(-10, 15))
    radii = (rng.uniform(34, 50), rng.uniform(24, 34), rng.uniform(40, 60))
    organ([(stomach, radii)], 75.0)
    box, q = canvas.ellipsoid(stomach, np.array(radii) - 4, 2.3, 1.6)
    mask = (q < 1) & inside_cavity(canvas, body, box, 5)
    canvas.paint(box, mask, rng.uniform(5, 45), 14.0)
    _, y, _ = canvas.local(box, stomach, 0.0)
    canvas.paint(box, mask & (y < -radii[1] * rng.uniform(0.1, 0.7)), -920.0, 0.0)

    organ([((0.1 * cx, 0.02 * cy, top + 45), (0.4 * cx, 11, 17))], body.organ - 8, 12.0, over=False)
    organ([((0.74 * cx, 0.36 * cy, top + 5), (27, 0.42 * cy, rng.uniform(42, 62)))], body.organ + rng.uniform(12, 26))
    length = rng.uniform(85, 120)
    lobes = [
        ((-0.5 * cx, -0.05 * cy, top), (0.6 * cx, 0.85 * cy, length)),
        ((-0.02 * cx, -0.55 * cy, top), (0.52 * cx, 0.36 * cy, 0.5 * length)),
    ]
    organ([*lobes], body.organ)
    for _ in range(14):
        start = np.array([-0.42 * cx, -0.05 * cy, top + 5]) + rng.normal(0, (10, 8, 12))
        end = start + rng.normal(0, 1, 3) * (0.3 * cx, 0.3 * cy, 35)
        box, q = canvas.tube(start, end, rng.uniform(2.0, 4.5))
        liver = np.abs(canvas.hu[box] - body.organ) < 30
        canvas.paint(box, (q < 1) & liver, body.organ + 45, 4.0)
    bladder = (-0.36 * cx, -0.45 * cy, top + rng.uniform(45, 70))
    box, q = canvas.ellipsoid(bladder, (rng.uniform(11, 17), rng.uniform(12, 19), rng.uniform(20, 30)))
    canvas.paint(box, q < 1, rng.uniform(2, 16), 2.0)


def paint_bowel(canvas: Canvas, body: Body, rng: np.random.Generator) -> None:
    """Paint the colon at the sides and loops of small bowel in the remaining space."""
    cx, cy = body.cavity
    for side in (-1, 1):
        x, y = side * 0.79 * cx, 0.22 * cy
        box, q = canvas.ellipsoid((x, y, body.top + 150), (rng.uniform(15, 22), rng.uniform(15, 24), 95), 2.0, 2.0)
        mask = (q < 1) & inside_cavity(canvas, body, box, 3) & canvas.free(box)
        canvas.paint(box, mask, 45.0, 8.0)
        stool = canvas.texture[box]
        inner = mask & (q < 0.8)
        canvas.paint(box, inner, np.where(stool > 0.9, -700.0, np.where(stool > 0.2, -60.0, 40.0)), 10.0)
    for _ in range(int(rng.integers(48, 72))):
        z = rng.uniform(body.top + 35, body.top + 190)
        start = np.array([rng.uniform(-0.75, 0.75) * cx, rng.uniform(-0.85, 0.2) * cy, z])
        end = start + rng.normal(0, 1, 3) * (28, 12, 10)
        radius = rng.uniform(8, 14)
        box, q = canvas.tube(start, end, radius)
        mask = (q < 1) & inside_cavity(canvas, body, box, 4) & canvas.free(box)
        filling = float(rng.choice([15.0, 30.0, 45.0, -40.0], p=[0.35, 0.35, 0.2, 0.1]))
        canvas.paint(box, mask, rng.uniform(75, 115), 6.0)
        canvas.paint(box, mask & (q < 1 - 2.6 / radius), filling, 8.0)
        if rng.uniform() < 0.2:
            _, y, _ = canvas.local(box, (start + end) / 2, 0.0)
            canvas.paint(box, mask & (q < 1 - 2.6 / radius) & (y < -1), -850.0, 0.0)
    # Vessels of the mesentery: small bright dots in the fat.
    for _ in range(60):
        start = rng.uniform((-0.7 * cx, -0.7 * cy, body.top), (0.7 * cx, 0.1 * cy, body.top + 190))
        box, q = canvas.tube(start, start + rng.normal(0, 1, 3) * (14, 10, 14), rng.uniform(1.2, 2.4))
        canvas.paint(box, (q < 1) & canvas.free(box), 130.0, 5.0)


def paint_vessels(canvas: Canvas, body: Body, rng: np.random.Generator) -> None:
    """Paint the aorta before the spine on the left and the inferior vena cava on the right."""
    front = body.spine - 31
    lean = rng.normal(0, 4)
    box, q = canvas.tube((9 + lean, front, -200), (4 - lean, front + 3, 200), rng.uniform(9, 12.5))
    canvas.paint(box, q < 1, body.artery, 4.0)
    if rng.uniform() < 0.5:
        x, y, _ = canvas.local(box, (9, front, 0), 0.6)
        plaque = (np.abs(q - 0.95) < 0.14) & (canvas.texture[box] > 1.2) & (x + y > -2)
        canvas.paint(box, plaque, 520.0, 30.0)
    box, q = canvas.ellipsoid((-19 + lean, front + 6, 0), (rng.uniform(10, 14), rng.uniform(7, 11), LONG))
    canvas.paint(box, q < 1, 0.45 * body.artery + 45, 6.0)


def paint_spine(canvas: Canvas, body: Body, rng: np.random.Generator) -> None:
    """Paint vertebral bodies with discs between them, the canal, and the processes behind."""
    offset, density = rng.uniform(0, 36), rng.uniform(110, 190)

    def bone(centre: Point, radii: Point, hu: float, shell: float = 2.2, power: float = 2.4) -> None:
        box, q = canvas.ellipsoid(centre, radii, power, 0.7)
        level = (canvas.axes[0][box[0], None, None] + offset) % 36
        disc = (level < 8) & np.full(q.shape, True)
        vertebra = (q < 1) & ~disc
        canvas.paint(box, vertebra, 380.0, 40.0, 0)
        rim = 1 - shell / min(radii)
        canvas.paint(box, vertebra & (q < rim) & (level > 10) & (level < 34), hu, 28.0)
        if radii[0] > 20:
            canvas.paint(box, (q < 1) & disc, 85.0, 8.0, 0)

    for side in (-1, 1):
        bone((side * 16, body.spine + 22, 0), (5.5, 13, LONG), density + 60)
        bone((side * 27, body.spine + 22, 0), (16, 4.5, LONG), density + 60)
    bone((0, body.spine + 45, 0), (4.5, 17, LONG), density + 80)
    bone((0, body.spine + 31, 0), (17, 4.5, LONG), density + 80)
    bone((0, body.spine, 0), (24, 18, LONG), density)
    box, q = canvas.ellipsoid((0, body.spine + 23, 0), (11, 8.5, LONG), 2.0, 0.7)
    canvas.paint(box, q < 1, 25.0, 4.0, 0)


# -- kidneys -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kidney:
    """Position and shape of a kidney."""

    side: int
    """Side of the body: -1 for right, 1 for left."""
    centre: Array
    radii: Array
    """Lateral, front to back, and long half axes (mm)."""
    turn: Array
    """Rows: the kidney's lateral, backward and downward directions in the body."""

    @classmethod
    def draw(cls, body: Body, side: int, rng: np.random.Generator) -> Kidney:
        """Draw a kidney beside the psoas; the right kidney is lower."""
        scale = rng.uniform(0.86, 1.14)
        radii = np.array([27, 24, 53]) * scale * rng.uniform(0.94, 1.06, 3)
        height = body.top + 72 + (9 if side < 0 else 0) + rng.normal(0, 9)
        centre = np.array([side * rng.uniform(0.44, 0.54) * body.cavity[0], body.spine - 2 + rng.normal(0, 5), height])
        roll = np.deg2rad(rng.uniform(20, 45))  # the hilum looks forward as well as inward
        tilt = np.deg2rad(rng.uniform(6, 18))  # the upper pole lies nearer to the spine
        in_plane = np.array([[np.cos(roll), np.sin(roll), 0], [-np.sin(roll), np.cos(roll), 0], [0, 0, 1]])
        lean = np.array([[np.cos(tilt), 0, -np.sin(tilt)], [0, 1, 0], [np.sin(tilt), 0, np.cos(tilt)]])
        return cls(side, centre, radii, in_plane @ lean @ np.diag([side, 1, 1]))

    def local(self, canvas: Canvas, box: Box) -> tuple[Array, Array, Array]:
        """Return lateral, backward and downward coordinates of `box` in units of the kidney's radii."""
        x, y, z = canvas.local(box, self.centre, 0.9)
        u, v, w = (row[0] * x + row[1] * y + row[2] * z for row in self.turn)
        w = w / self.radii[2]
        return u / self.radii[0] + 0.32 * w**2 - 0.1, v / self.radii[1], w  # bent round its hilum, as a bean is

    def point(self, direction: Array, reach: float) -> Array:
        """Return the point `reach` radii from the centre in the kidney's own `direction` (mm)."""
        place: Array = self.centre + self.turn.T @ (self.radii * direction / np.linalg.norm(direction) * reach)
        return place


def paint_kidneys(canvas: Canvas, body: Body, rng: np.random.Generator) -> None:
    """Paint two kidneys, rarely one, with tumours and cysts."""
    kidneys = [Kidney.draw(body, side, rng) for side in (-1, 1)]
    if rng.uniform() < 0.05:
        kidneys.pop(int(rng.integers(2)))
    for kidney in kidneys:
        paint_kidney(canvas, body, kidney, rng)
    for _ in range(int(rng.choice([0, 1, 2, 3], p=[0.08, 0.62, 0.2, 0.1]))):
        paint_tumour(canvas, body, kidneys[int(rng.integers(len(kidneys)))], rng)
    for _ in range(int(rng.choice([0, 1, 2], p=[0.5, 0.35, 0.15]))):
        paint_cyst(canvas, kidneys[int(rng.integers(len(kidneys)))], rng)


def paint_kidney(canvas: Canvas, body: Body, kidney: Kidney, rng: np.random.Generator) -> None:
    """Paint surrounding fat, cortex, pyramids of medulla, and the sinus with pelvis and vessels."""
    box = canvas.box(kidney.centre, float(kidney.radii[2]) + 20)
    u, v, w = kidney.local(canvas, box)
    q = np.sqrt(u**2 + v**2 + w**2)
    inside = inside_cavity(canvas, body, box, 1)
    canvas.paint(box, (q < 1 + rng.uniform(0.18, 0.5)) & inside, FAT, 6.0)
    sinus = np.sqrt(((u + 0.72) / 0.72) ** 2 + ((v + 0.05) / 0.42) ** 2 + (w / 0.5) ** 2)
    parenchyma = (q < 1) & (sinus > 1)
    angle = np.arctan2(v, u)
    pyramids = np.cos(4.5 * angle + 2.5 * np.sin(6 * w)) + 0.8 * np.cos(2 * np.pi * w / 0.42)
    medulla = (q < 0.78) & (pyramids > -0.35)
    canvas.paint(box, parenchyma, body.cortex, 6.0, KIDNEY)
    canvas.paint(box, parenchyma & medulla, body.medulla, 6.0)
    within = (q < 1.02) & (sinus <= 1)
    canvas.paint(box, within, -70.0, 25.0)
    canvas.paint(box, within & (sinus < rng.uniform(0.35, 0.65)) & (u > -0.9), rng.uniform(8, 40), 6.0)
    hilum = kidney.point(np.array([-1.0, -0.1, 0.0]), 0.45)
    front = body.spine - 29
    for end, radius, hu in (
        ((6, front, hilum[2] - 12), 2.8, body.artery),
        ((-17 if kidney.side < 0 else -12, front + 5, hilum[2] - 16), 4.6, 0.4 * body.artery + 75),
    ):
        shift = (0.0, -5.0 if radius > 4 else 3.0, 0.0)
        tube_box, near = canvas.tube(hilum + shift, np.array(end), radius)
        canvas.paint(tube_box, (near < 1) & (canvas.label[tube_box] == 0) & (canvas.hu[tube_box] < 100), hu, 4.0)


def paint_tumour(canvas: Canvas, body: Body, kidney: Kidney, rng: np.random.Generator) -> None:
    """Paint a solid mass, from a small bulge to one that replaces much of the kidney; large masses are necrotic."""
    radius = float(np.clip(rng.lognormal(np.log(17), 0.5), 7, 42))
    direction = rng.normal(0, (1, 1, 0.8))
    direction[0] = abs(direction[0]) * (1 if rng.uniform() < 0.8 else -1)
    centre = kidney.point(direction, rng.uniform(0.55, 1.05))
    box, q = canvas.ellipsoid(centre, radius * rng.uniform(0.85, 1.15, 3), 2.0, 0.9)
    hu = rng.uniform(48, 108)
    aorta = (canvas.hu[box] > body.artery - 25) & (canvas.label[box] == 0)
    mass = (q + 0.05 * canvas.texture[box] < 1) & inside_cavity(canvas, body, box) & ~aorta
    canvas.paint(box, mass, hu, rng.uniform(7, 16), TUMOUR)
    if radius > 18:
        core = mass & (q + 0.22 * canvas.texture[box] < rng.uniform(0.4, 0.75))
        canvas.paint(box, core, hu * rng.uniform(0.25, 0.5), 9.0)


def paint_cyst(canvas: Canvas, kidney: Kidney, rng: np.random.Generator) -> None:
    """Paint a round, thin-walled cyst of water; its part in the kidney remains labelled as kidney."""
    radius = float(np.clip(rng.lognormal(np.log(9), 0.45), 4, 26))
    direction = rng.normal(0, 1, 3)
    direction[0] = abs(direction[0])
    box, q = canvas.ellipsoid(kidney.point(direction, rng.uniform(0.75, 1.1)), (radius,) * 3, 2.0, 0.2)
    canvas.paint(box, (q < 1) & (canvas.label[box] != TUMOUR), rng.uniform(2, 16), 2.0)


__all__ = ["Phantom", "make", "write"]
