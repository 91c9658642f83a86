"""Discovery of a dataset's cases, by one listing of a folder or prefix or from a JSON or CSV list of pairs."""

from __future__ import annotations

import collections
import contextlib
import csv
import functools
import io
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from voxlane import uri as uris
from voxlane.errors import ConfigError, LayoutError, NotFoundError
from voxlane.settings import build
from voxlane.sizes import format_bytes
from voxlane.store import ObjectInfo, StoreConfig
from voxlane.store.listing import list_objects
from voxlane.store.staging.sources import strip_quotes
from voxlane.volume.dataset_layouts import LAYOUTS, REGIONS, DatasetDraft, SourceCase, detect_layout
from voxlane.volume.description import Description
from voxlane.volume.formats import check_regular_file, open_store
from voxlane.volume.scan import strip_scan_suffix

__all__ = ["SourceCase", "SourceDataset", "discover", "read_document"]


_MAX_DOCUMENT_BYTES = 1 << 28
"""Largest size of a dataset.json or a list of cases: about a million cases."""


@dataclass(frozen=True)
class SourceDataset:
    """A dataset at its source, before any scan is read."""

    layout: str
    """Name of the layout: kits19, msd, nnunet, brats, npy or list."""
    root: str
    """URI of the folder, or of the list."""
    description: Description
    cases: tuple[SourceCase, ...]
    """Cases sorted by id."""
    etags: Mapping[str, str]
    """Version, "etag:size", of each existing file of the cases by URI; a different value later means that the file
    changed."""


def discover(
    src_uri: str,
    config: StoreConfig | None = None,
    *,
    layout: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> SourceDataset:
    """Find the cases below `src_uri`, a folder or prefix in a known layout, or in the .json or .csv list at `src_uri`.

    layout: kits19, msd, nnunet, brats, npy or list; by default detected from the file names.
    overrides: fields that replace those of the layout's description; `regions` may be a name in
        `dataset_layouts.REGIONS`.
    defaults: fields for what the source does not define.

    Raises LayoutError if there is no known dataset. Files of a case may be missing; checking the case reports that.
    """
    if layout not in (None, *LAYOUTS, "list"):
        raise ConfigError(f"layout: unknown layout {layout!r}", fix=f"Use one of {', '.join([*LAYOUTS, 'list'])}")
    uri = str(uris.parse(src_uri))
    fields = dict(overrides or {})
    is_file = uri.lower().endswith((".json", ".csv"))
    document = read_document(uri, config) if is_file else None
    is_dataset_json = isinstance(document, Mapping) and bool({"training", "channel_names"} & document.keys())
    listed_etags: dict[str, str] | None = None
    resolve: Callable[[str], str]
    if is_file and (layout == "list" or not is_dataset_json):
        root, base = uri, posixpath.dirname(uri) + "/"
        draft = _parse_list(uri, document)
        resolve = functools.partial(_resolve_uri, base, uri)
    elif layout == "list":
        raise LayoutError(
            "expected a .json or .csv file for layout list", uri=uri, fix="Use the URI of the list itself"
        )
    else:
        root = (posixpath.dirname(uri) if is_file else uri).rstrip("/") + "/"
        draft, listed_etags = _parse_folder(root, config, layout)
        resolve = root.__add__
    _check_ids([case.id for case in draft.cases], root)
    description = _merge_description(draft.description, fields, root, defaults)
    cases = [
        replace(
            case,
            images=tuple(resolve(image) for image in case.images),
            label=None if case.label is None else resolve(case.label),
        )
        for case in sorted(draft.cases, key=lambda case: case.id)
    ]
    files = dict.fromkeys(file for case in cases for file in (*case.images, case.label) if file is not None)
    etags = _fetch_etags(files, config) if listed_etags is None else listed_etags
    used_etags = {file: etags[file] for file in files if file in etags}
    return SourceDataset(draft.layout, root, description, tuple(cases), used_etags)


def _parse_folder(root: str, config: StoreConfig | None, layout: str | None) -> tuple[DatasetDraft, dict[str, str]]:
    """Parse the cases below a folder; also return the version of each file by URI."""
    listed = list_objects(root, config=config)
    folder = uris.parse(root).key
    objects = {entry.key.removeprefix(folder): entry for entry in listed}
    # macOS adds a file ._name for each name in an archive; those look like scans.
    names = [name for name in objects if not posixpath.basename(name).startswith(".")]
    document = read_document(root + "dataset.json", config) if "dataset.json" in objects else None
    layout_name = layout or detect_layout(names, document, root)
    if layout_name in ("msd", "nnunet") and not isinstance(document, Mapping):
        raise LayoutError(
            f"the {layout_name} layout needs a dataset.json", uri=root, fix="Use the folder that contains it"
        )
    etags = {listed.root + entry.key: _version_tag(entry.etag, entry.size) for entry in objects.values()}
    return LAYOUTS[layout_name](names, document, root), etags


def _parse_list(uri: str, document: Any) -> DatasetDraft:
    """Parse the cases of a JSON or CSV list."""
    description: dict[str, Any] = {"name": posixpath.splitext(posixpath.basename(uri))[0]}
    if isinstance(document, Mapping):
        if not isinstance(document.get("description", {}), Mapping):
            raise LayoutError("description: expected an object", uri=uri, fix='Write "description": {"labels": ...}')
        description |= document.get("description", {})
        document = document.get("cases")
    if not isinstance(document, list) or not document:
        raise LayoutError(
            "no list of cases", uri=uri, fix='Write [{"image": ..., "label": ...}, ...], or {"cases": [...]} around it'
        )
    rows = [_parse_row(row, number, uri) for number, row in enumerate(document, 1)]
    names = [strip_scan_suffix(images[0]) for images, _, _, _ in rows]
    # Files with the same name, such as imaging.nii.gz, are distinguished by their folders.
    unique = len(set(names)) == len(names)
    cases = []
    for (images, label, case_id, patient), name in zip(rows, names, strict=True):
        folder = posixpath.basename(posixpath.dirname(images[0]))
        case_id = case_id or (name if unique else f"{folder}_{name}")
        cases.append(SourceCase(case_id, patient or case_id, images, label))
    return DatasetDraft("list", description, cases)


def _parse_row(row: Any, number: int, uri: str) -> tuple[tuple[str, ...], str | None, str, str]:
    """Return images, label, id and patient of an entry; the last three may be empty."""
    if not isinstance(row, Mapping):
        raise LayoutError(f"case {number}: expected an object", uri=uri, fix='Write {"image": ..., "label": ...}')
    image = row.get("image")
    if not image:
        numbered = sorted((key for key in row if re.fullmatch(r"image_\d+", str(key))), key=lambda k: int(k[6:]))
        image = [row[key] for key in numbered]
    images = [image] if isinstance(image, str) else image
    if not isinstance(images, list) or not images or not all(isinstance(path, str) and path for path in images):
        fields = ", ".join(str(key) for key, value in row.items() if value) or "nothing"
        raise LayoutError(
            f"case {number} has no image, only {fields}",
            uri=uri,
            fix="Name it image, or image_0, image_1, ... in order",
        )
    label = row.get("label")
    if label is not None and not isinstance(label, str):
        raise LayoutError(f"case {number}: label is not a path", uri=uri, fix="Use one label file per case")
    return tuple(images), label or None, str(row.get("id") or ""), str(row.get("patient") or "")


def _merge_description(
    layout_fields: Mapping[str, Any], overrides: Mapping[str, Any], root: str, defaults: Mapping[str, Any] | None
) -> Description:
    """Build the layout's description with the user's fields replacing its own."""
    values = {**(defaults or {}), **layout_fields}
    if missing := [name for name in ("channels", "labels") if name not in {**values, **overrides}]:
        raise LayoutError(
            f"the source does not define {' and '.join(missing)}",
            uri=root,
            fix="Set them: description.channels=[CT] 'description.labels={background: 0, kidney: 1}'",
        )
    if "labels" in overrides or "regions" in overrides:  # the layout's regions refer to the layout's own labels
        values.pop("regions", None)
        values.pop("region_values", None)
    values |= overrides
    if isinstance(regions := values.get("regions"), str):
        if regions not in REGIONS:
            raise ConfigError(
                f"regions: unknown name {regions!r}", uri=root, fix=f"Use one of {', '.join(REGIONS)}, or a mapping"
            )
        values["regions"] = REGIONS[regions]
    if values.get("regions", {}) is None:
        values["regions"] = {}
    return build(Description, values, origin=root)


def _check_ids(ids: Sequence[str], root: str) -> None:
    repeated = [case_id for case_id, count in collections.Counter(ids).items() if count > 1]
    if repeated:
        raise LayoutError(
            f"{len(repeated)} ids are used by several cases: {', '.join(sorted(repeated)[:5])}",
            uri=root,
            fix="Use a unique id for each case",
        )
    for case_id in ids:
        if not re.fullmatch(r"[^/\\\s.][^/\\\n]*", case_id):
            raise LayoutError(
                f"{case_id!r} is not a valid case id",
                uri=root,
                fix="Use letters, digits, '-', '_' and '.', and do not begin with '.'",
            )


def _fetch_etags(files: Iterable[str], config: StoreConfig | None) -> dict[str, str]:
    """Fetch version and size of every existing file, concurrently. Folders of DICOM files have none."""
    futures: dict[str, Future[ObjectInfo]] = {}
    for uri in files:
        parsed = uris.parse(uri)
        path = f"/{parsed.key}"
        if parsed.scheme == "file" and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            continue  # the engine would open a pipe, and wait for its writer; the check of the case reports it
        store = open_store(parsed.root, config)
        futures[uri] = store.submit(store.head, parsed.key)
    etags = {}
    for uri, future in futures.items():
        with contextlib.suppress(NotFoundError):
            etags[uri] = _version_tag(future.result().etag, future.result().size)
    return etags


def read_document(uri: str, config: StoreConfig | None) -> Any:
    """Read and parse a .json or .csv object."""
    parsed = uris.parse(uri)
    try:
        if parsed.scheme == "file":
            check_regular_file(f"/{parsed.key}", uri)
        store = open_store(parsed.root, config)
        if (size := store.head(parsed.key).size) > _MAX_DOCUMENT_BYTES:
            text = f"{format_bytes(size)} are too many for a description of a dataset"
            raise LayoutError(text, uri=uri, fix="Check that this is the intended file")
        text = bytes(store.get(parsed.key)).decode("utf-8-sig")
        if uri.lower().endswith(".csv"):
            if "\0" in text:  # the csv module accepts it since Python 3.11.4
                raise csv.Error("line contains NUL")
            return list(csv.DictReader(io.StringIO(text), skipinitialspace=True))
        return json.loads(text)
    except UnicodeDecodeError:
        raise LayoutError("the file is not UTF-8 text", uri=uri, fix="Save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise LayoutError(f"invalid JSON: {error.msg}, line {error.lineno}", uri=uri, fix="Correct that line") from None
    except csv.Error as error:
        raise LayoutError(f"invalid CSV: {error}", uri=uri, fix="Write a header line and one line per case") from None
    except RecursionError:
        raise LayoutError("invalid JSON: nested too deeply", uri=uri, fix="Write it again from its source") from None
    except ValueError as error:  # such as an integer of thousands of digits
        raise LayoutError(f"invalid JSON: {error}", uri=uri, fix="Write it again from its source") from None


def _resolve_uri(base: str, list_uri: str, path: str) -> str:
    """Return a path of a list as a URI, relative to the folder `base` unless it is absolute.

    A list on this machine may name any file. A list in a bucket may name only objects of that bucket, because whoever
    wrote it must not choose which of the reader's files become part of a dataset.
    """
    parsed = uris.parse(base)
    if "://" in path or path.startswith(("/", "~")):
        resolved = str(uris.parse(path))
    else:
        trailing = "/" if path.endswith("/") else ""
        resolved = parsed.root + posixpath.normpath(posixpath.join(parsed.key, path)) + trailing
    is_outside = not resolved.startswith(parsed.root) or resolved.startswith(f"{parsed.root}../")
    if parsed.scheme != "file" and is_outside:
        raise LayoutError(
            f"the list names {path!r}, which is not in its bucket",
            uri=list_uri,
            fix=f"Name objects of {parsed.root}, or copy the list to this machine if you trust it",
        )
    return resolved


def _version_tag(etag: str | None, size: int) -> str:
    return f"{strip_quotes(etag) or ''}:{size}"
