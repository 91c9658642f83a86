"""A dataset that nnU-Net v2 preprocessed as a prepared dataset, without the scans.

FOLDER/dataset.json, FOLDER/nnUNetPlans.json and FOLDER/nnUNetPlans_3d_fullres/CASE.b2nd, CASE_seg.b2nd, CASE.pkl (or
CASE.npz, CASE.pkl), and if they exist FOLDER/splits_final.json and FOLDER/gt_segmentations, whose labels `voxlane
evaluate` scores against.

Volumes are not resampled again. nnU-Net keeps the axes of each file; here they are turned to the anatomical axes.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from voxlane import settings
from voxlane.errors import ConfigError, ImportedModelError, MissingExtraError, PreparedError, UnsafeError
from voxlane.store import Store, StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.train.imports.nnunet_plans import NnunetConfiguration, read_configuration
from voxlane.volume import normalise
from voxlane.volume.case_writer import write_case
from voxlane.volume.dataset_layouts import parse_nnunet_description
from voxlane.volume.description import Description
from voxlane.volume.fingerprint import Fingerprint, Intensity
from voxlane.volume.geometry import Geometry
from voxlane.volume.grid import Grid, compute_grid_affine
from voxlane.volume.plan import Plan, to_triple
from voxlane.volume.prepare import foreground_voxels
from voxlane.volume.prepared_dataset import (
    HEADER,
    Prepared,
    PreparedCase,
    as_prefix,
    case_key,
    publish_dataset,
)
from voxlane.volume.splits import FILE, fold_for_patient

Array = npt.NDArray[Any]
_SAFE_NAMES = {("numpy", "ndarray"), ("numpy", "dtype")} | {
    (f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("scalar", "_reconstruct")
}
_DEFAULT_FOLDS = 5


class _PropertiesUnpickler(pickle.Unpickler):
    """Reads plain values and arrays of numpy, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _SAFE_NAMES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


@dataclass(frozen=True)
class PreprocessedFolder:
    """A folder of `nnUNet_preprocessed`."""

    uri: str
    """URI of the folder, without a trailing slash."""
    plans_name: str = "nnUNetPlans"
    configuration_name: str = "3d_fullres"
    store_config: StoreConfig | None = None

    @cached_property
    def _store(self) -> tuple[Store, str]:
        store, key = Store.locate(self.uri, self.store_config)
        return store, as_prefix(key)

    @cached_property
    def names(self) -> list[str]:
        """Files below the folder, with their paths."""
        store, prefix = self._store
        pages = store.list_pages(prefix)
        return [key.removeprefix(prefix) for page in pages for key in page.column("path").to_pylist()]

    @property
    def is_dataset(self) -> bool:
        """Whether this is a dataset with plans, and not a results folder."""
        at_top = {name for name in self.names if "/" not in name}
        has_plans = any(name.endswith(".json") and "Plans" in name for name in at_top)
        return "dataset.json" in at_top and has_plans and "plans.json" not in at_top

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        store, prefix = self._store
        with ignore_missing_object():
            return store.get_bytes(prefix + name)
        return None

    def read_json(self, name: str, *, optional: bool = False) -> Any:
        """Return the content of a JSON file; if it does not exist and is `optional`, None."""
        body = self.read(name)
        if body is None and optional:
            return None
        try:
            return json.loads(body or b"")
        except ValueError:
            problem = f"{name} is not JSON" if body else f"the folder has no {name}"
            plans = sorted(other.removesuffix(".json") for other in self.names if other.endswith("Plans.json"))
            fix = (
                f"Give --plans {' or '.join(plans)}"
                if plans and name == f"{self.plans_name}.json"
                else "Preprocess it again"
            )
            raise ImportedModelError(problem, uri=self.uri, fix=fix) from None

    @cached_property
    def configuration(self) -> NnunetConfiguration:
        """The configuration that the volumes were preprocessed for."""
        name = f"{self.plans_name}.json"
        return read_configuration(self.read_json(name), self.configuration_name, f"{self.uri}/{name}")

    @property
    def data_folder(self) -> str:
        """Folder of the volumes, relative to the dataset's."""
        return f"{self.plans_name}_{self.configuration_name}"

    def case_ids(self) -> list[str]:
        """Return the names of all cases."""
        prefix = f"{self.data_folder}/"
        ids = [name.removeprefix(prefix)[:-4] for name in self.names if name.startswith(prefix) and name[-4:] == ".pkl"]
        if not ids:
            raise ImportedModelError(
                f"the folder has no cases in {self.data_folder}",
                uri=self.uri,
                fix="Run nnUNetv2_preprocess for this configuration, or give another --plans or --configuration",
            )
        return sorted(ids)

    def read_case(self, case: str) -> tuple[Array, Array, dict[str, Any]]:
        """Return a case's image (C, Z, Y, X), label (Z, Y, X) and properties, along the axes of nnU-Net's network."""
        base = f"{self.data_folder}/{case}"
        properties = self._read_properties(f"{base}.pkl")
        if f"{base}.b2nd" in self.names:
            image, label = (self._read_blosc(f"{base}{suffix}") for suffix in (".b2nd", "_seg.b2nd"))
        else:
            with np.load(io.BytesIO(self._require(f"{base}.npz")), allow_pickle=False) as arrays:
                image, label = arrays["data"], arrays["seg"]
        return image, label[0], properties

    def _require(self, name: str) -> bytes:
        body = self.read(name)
        if body is None:
            raise ImportedModelError(f"the folder has no {name}", uri=self.uri, fix="Preprocess the dataset again")
        return body

    def _read_properties(self, name: str) -> dict[str, Any]:
        try:
            properties: dict[str, Any] = _PropertiesUnpickler(io.BytesIO(self._require(name))).load()
        except pickle.UnpicklingError as error:
            raise UnsafeError(
                f"it holds {error}, and reading it can run code",
                uri=f"{self.uri}/{name}",
                fix="Preprocess the dataset again, or copy it from a source that you trust",
            ) from None
        return properties

    def _read_blosc(self, name: str) -> Array:
        try:
            import blosc2
        except ImportError:
            raise MissingExtraError(
                ".b2nd files need blosc2", uri=f"{self.uri}/{name}", fix="Run: pip install blosc2"
            ) from None
        array: Array = blosc2.ndarray_from_cframe(self._require(name))[:]
        return array


def import_preprocessed(
    folder: PreprocessedFolder, dst: str, config: StoreConfig | None = None, *, progress: bool | None = None
) -> Prepared:
    """Write a preprocessed dataset as a prepared one to `dst`, and return it."""
    store, key = Store.locate(dst, config)
    prefix = as_prefix(key)
    if store.exists(prefix + HEADER):
        raise PreparedError("DST already holds a prepared dataset", uri=dst, fix="Choose another DST, or delete it")
    plan = _anatomical_plan(folder.configuration.plan, folder.uri)
    document = folder.read_json("dataset.json")
    name = folder.uri.rpartition("/")[2]
    origin = f"{folder.uri}/dataset.json"
    description = settings.build(Description, parse_nnunet_description(document, origin, name), origin=origin)
    ids = folder.case_ids()
    folds = dict(_read_folds(folder))
    count = 1 + max(folds.values(), default=_DEFAULT_FOLDS - 1)
    cases = []
    for case in tqdm(ids, desc="importing", unit="case", disable=None if progress is None else not progress):
        volume = _write_case(folder, case, plan, store, prefix)
        fold = folds.get(case, fold_for_patient(case, count))
        label = f"gt_segmentations/{case}{document.get('file_ending', '.nii.gz')}"
        source = {"images": [f"{folder.uri}/{folder.data_folder}/{case}.pkl"], "label": f"{folder.uri}/{label}"}
        cases.append(PreparedCase(case, case, fold, source, volume))
    publish_dataset(
        store,
        prefix,
        description=description,
        plan=plan,
        fingerprint=_read_fingerprint(folder),
        source={"uri": folder.uri, "layout": "nnunet-preprocessed", "excluded": []},
        folds=count,
        cases=cases,
        split_record={"method": FILE, "source": f"{folder.uri}/splits_final.json"} if folds else None,
    )
    return Prepared.load(dst, config)


def _anatomical_plan(plan: Plan, uri: str) -> Plan:
    """Return the plan of the prepared dataset, whose volumes are along the anatomical axes."""
    if plan.axes != "stored":
        raise ImportedModelError(
            "nnU-Net reoriented the scans, and its volumes do not say how they lie in their files",
            uri=uri,
            fix="Prepare the raw dataset instead: voxlane prepare",
        )
    values = settings.to_plain(plan) | {"axes": "anatomical", "recipe": "auto"}
    return settings.build(Plan, values)


def _read_folds(folder: PreprocessedFolder) -> Iterator[tuple[str, int]]:
    """Yield the case and index of the fold that holds it out, for every case in splits_final.json."""
    splits = folder.read_json("splits_final.json", optional=True) or []
    held_out: set[str] = set()
    for fold, split in enumerate(splits):
        for case in split["val"]:
            if case in held_out:
                raise ConfigError(
                    f"splits_final.json holds out {case} in two folds", uri=folder.uri, fix="Hold each case out once"
                )
            held_out.add(case)
            yield case, fold


def _read_fingerprint(folder: PreprocessedFolder) -> dict[str, Any]:
    """Return nnU-Net's fingerprint of the dataset as that of a prepared one; empty if there is none."""
    values = folder.read_json("dataset_fingerprint.json", optional=True)
    if not values or "shapes_after_crop" not in values:
        return {}
    channels = values["foreground_intensity_properties_per_channel"]
    names = {"mean": "mean", "std": "std", "median": "median", "low": "min", "high": "max"}
    names |= {name: name for name in ("percentile_00_5", "percentile_99_5")}
    fingerprint = Fingerprint(
        shapes=tuple(to_triple(shape) for shape in values["shapes_after_crop"]),
        spacings=tuple((float(z), float(y), float(x)) for z, y, x in values["spacings"]),
        relative_size=float(values["median_relative_size_after_cropping"]),
        intensities=tuple(
            Intensity(**{field: float(channels[key][name]) for field, name in names.items()})
            for key in sorted(channels, key=int)
        ),
    )
    plain: dict[str, Any] = settings.to_plain(fingerprint)
    return plain


def _write_case(folder: PreprocessedFolder, case: str, plan: Plan, store: Store, prefix: str) -> dict[str, Any]:
    """Write the volume of a case and return its metadata, as `voxlane prepare` does."""
    image, label, properties = folder.read_case(case)
    order = folder.configuration.axis_order
    geometry, grid = _read_grid(properties, order, image.shape[1:], plan, f"{folder.uri}/{folder.data_folder}/{case}")
    image = geometry.from_stored(image.transpose(0, *(1 + axis for axis in order)))
    label = geometry.from_stored(label.transpose(order))
    codes, scale, offset = normalise.encode(np.ascontiguousarray(image, np.float32), plan.normalisation)
    values = np.ascontiguousarray(np.maximum(label, 0).astype(np.uint8))  # -1: outside of the nonzero region
    attributes = {
        "case": case,
        "grid": asdict(grid),
        "geometry": asdict(geometry),
        "affine": compute_grid_affine(grid, geometry.canonical_affine, plan),
        "spacing": list(grid.spacing),
        "scale_factor": list(scale),
        "add_offset": list(offset),
    }
    metadata = write_case(
        store,
        case_key(prefix, case),
        image=codes,
        label=values,
        foreground=foreground_voxels(values, case),
        attributes=attributes,
        patch=plan.patch,
    )
    return {**metadata, **attributes}


def _read_grid(
    properties: Mapping[str, Any], order: tuple[int, ...], shape: tuple[int, ...], plan: Plan, uri: str
) -> tuple[Geometry, Grid]:
    """Return the geometry of a case's file, and its grid along the anatomical axes."""
    sizes = [int(properties["shape_before_cropping"][axis]) for axis in order]
    box = [properties["bbox_used_for_cropping"][axis] for axis in order]
    geometry = Geometry.of((sizes[2], sizes[1], sizes[0]), _read_affine(properties))
    axes, flips = geometry.anatomical_axes
    if axes != (0, 1, 2):
        raise ImportedModelError(
            "the file stores its axes in another order than x, y, z, which volumes of nnU-Net keep",
            uri=uri,
            fix="Prepare the raw dataset instead: voxlane prepare",
        )
    start, stop = [int(low) for low, _ in box], [int(high) for _, high in box]
    for axis, flip in enumerate(flips[::-1]):
        if flip:
            start[axis], stop[axis] = sizes[axis] - stop[axis], sizes[axis] - start[axis]
    new = to_triple(shape[axis] for axis in order)
    grid = Grid(
        scan_shape=to_triple(sizes),
        scan_spacing=geometry.spacing,
        crop_start=to_triple(start),
        crop_stop=to_triple(stop),
        shape=new,
        spacing=plan.spacing,
        pad=(0, 0, 0),
        padded_shape=new,
    )
    return geometry, grid


def _read_affine(properties: Mapping[str, Any]) -> Array:
    """Return the 4x4 matrix from voxels (x, y, z) of the file to millimetres in RAS."""
    if "nibabel_stuff" in properties:
        return np.asarray(properties["nibabel_stuff"]["original_affine"], np.float64)
    own = properties["sitk_stuff"]
    affine = np.eye(4)
    affine[:3, :3] = np.asarray(own["direction"], np.float64).reshape(3, 3) * np.asarray(own["spacing"], np.float64)
    affine[:3, 3] = own["origin"]
    affine[:2] *= -1  # SimpleITK's axes run to the left and posterior
    return affine
