"""Finding the cases of a dataset: one listing of a folder or prefix, or a JSON or CSV list of pairs."""

from __future__ import annotations

import collections
import csv
import io
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from voxlane import uri as uris
from voxlane.errors import ConfigError, LayoutError, NotFoundError
from voxlane.listing import list_objects
from voxlane.settings import build
from voxlane.store import ObjectInfo, StoreConfig
from voxlane.volume.description import Description
from voxlane.volume.layouts import LAYOUTS, REGIONS, Draft, SourceCase, recognise
from voxlane.volume.scan import open_store, stem

__all__ = ["SourceCase", "SourceDataset", "discover"]


@dataclass(frozen=True)
class SourceDataset:
    """A dataset where it was found, before anything of it is read."""

    layout: str
    """kits19, msd, nnunet, brats or list."""
    root: str
    """URI of its folder, or of the list."""
    description: Description
    cases: tuple[SourceCase, ...]
    """By id."""
    etags: Mapping[str, str]
    """URI to "etag:size" of each file of the cases that is there; another value later means that it has changed."""


def discover(
    src_uri: str,
    config: StoreConfig | None = None,
    *,
    layout: str | None = None,
    describe: Mapping[str, Any] | None = None,
) -> SourceDataset:
    """Find the cases below `src_uri`, a folder or prefix in a layout we know, or in the .json or .csv list there.

    layout: kits19, msd, nnunet, brats or list; recognised by the names when left out.
    describe: fields of the description that replace the layout's own; `regions` may be one of the names in
        `layouts.REGIONS`.

    LayoutError when no known dataset is there. A case may lack files; checking it says so.
    """
    if layout is not None and layout not in (*LAYOUTS, "list"):
        raise ConfigError(f"layout: no such one as {layout!r}", fix=f"There are: {', '.join([*LAYOUTS, 'list'])}")
    uri = str(uris.parse(src_uri))
    document: Any = None
    if uri.lower().endswith((".json", ".csv")):
        document = _parse(uri, config)
        if layout == "list" or not _is_dataset_json(document):
            return _from_list(uri, document, config, describe)
        uri = posixpath.dirname(uri)
    elif layout == "list":
        raise LayoutError("a list of cases is a .json or .csv file", uri=uri, fix="Give the list's own URI")
    return _from_folder(uri.rstrip("/") + "/", config, layout, describe)


def _from_folder(
    root: str, config: StoreConfig | None, layout: str | None, describe: Mapping[str, Any] | None
) -> SourceDataset:
    listed = list_objects(root, config=config)
    folder = uris.parse(root).key
    objects = {entry.key.removeprefix(folder): entry for entry in listed}
    # macOS leaves ._name beside each name in archives; they look like scans.
    names = [name for name in objects if not posixpath.basename(name).startswith(".")]
    document = _parse(root + "dataset.json", config) if "dataset.json" in objects else None
    chosen = layout or recognise(names, document, root)
    if chosen in ("msd", "nnunet") and not isinstance(document, Mapping):
        raise LayoutError(f"the {chosen} layout has a dataset.json", uri=root, fix="Give the folder that has it")
    draft = LAYOUTS[chosen](names, document, root)
    etags = {listed.root + entry.key: _tag(entry.etag, entry.size) for entry in objects.values()}
    return _finish(root, draft, root, describe, etags)


def _from_list(
    uri: str, document: Any, config: StoreConfig | None, describe: Mapping[str, Any] | None
) -> SourceDataset:
    draft = _listed_cases(uri, document)
    missing = [field for field in ("channels", "labels") if field not in {**draft.description, **(describe or {})}]
    if missing:
        raise LayoutError(
            f"the list does not say its {' and '.join(missing)}",
            uri=uri,
            fix="Say them: description.channels=[CT] 'description.labels={background: 0, kidney: 1}'",
        )
    dataset = _finish(uri, draft, posixpath.dirname(uri) + "/", describe, {})
    return replace(dataset, etags=_asked(dataset.cases, config))


def _listed_cases(uri: str, document: Any) -> Draft:
    """The cases of a parsed JSON or CSV list."""
    description: dict[str, Any] = {"name": posixpath.splitext(posixpath.basename(uri))[0]}
    if isinstance(document, Mapping):
        if not isinstance(document.get("description", {}), Mapping):
            raise LayoutError("description: not named fields", uri=uri, fix='Write "description": {"labels": ...}')
        description |= document.get("description", {})
        document = document.get("cases")
    if not isinstance(document, list) or not document:
        raise LayoutError(
            "no list of cases", uri=uri, fix='Write [{"image": ..., "label": ...}, ...], or {"cases": [...]} around it'
        )
    rows = [_row(row, number, uri) for number, row in enumerate(document, 1)]
    short = [stem(images[0]) for images, _, _, _ in rows]
    # Files that are all named alike, such as imaging.nii.gz, are told apart by their folders.
    unique = len(set(short)) == len(short)
    cases = []
    for (images, label, case_id, patient), name in zip(rows, short, strict=True):
        folder = posixpath.basename(posixpath.dirname(images[0]))
        case_id = case_id or (name if unique else f"{folder}_{name}")
        cases.append(SourceCase(case_id, patient or case_id, images, label))
    return Draft("list", description, cases)


def _row(row: Any, number: int, uri: str) -> tuple[tuple[str, ...], str | None, str, str]:
    """Images, label, id and patient of one entry; the last three may be empty."""
    if not isinstance(row, Mapping):
        raise LayoutError(f"case {number} is not named fields", uri=uri, fix='Write {"image": ..., "label": ...}')
    image = row.get("image")
    if not image:
        numbered = sorted((key for key in row if re.fullmatch(r"image_\d+", str(key))), key=lambda k: int(k[6:]))
        image = [row[key] for key in numbered]
    images = [image] if isinstance(image, str) else image
    if not isinstance(images, list) or not images or not all(isinstance(one, str) and one for one in images):
        has = ", ".join(str(key) for key, value in row.items() if value) or "nothing"
        raise LayoutError(
            f"case {number} has no image; it has {has}", uri=uri, fix="Name it image, or image_0, image_1, ... in order"
        )
    label = row.get("label")
    if label is not None and not isinstance(label, str):
        raise LayoutError(f"case {number}: its label is not one path", uri=uri, fix="Give one label file a case")
    return tuple(images), label or None, str(row.get("id") or ""), str(row.get("patient") or "")


def _finish(
    root: str, draft: Draft, base: str, describe: Mapping[str, Any] | None, etags: Mapping[str, str]
) -> SourceDataset:
    """Check the draft as a whole, with URIs in place of paths relative to `base`."""
    _check_ids([case.id for case in draft.cases], root)
    cases = [
        replace(
            case,
            images=tuple(_join(base, image) for image in case.images),
            label=None if case.label is None else _join(base, case.label),
        )
        for case in draft.cases
    ]
    used = {uri for case in cases for uri in (*case.images, case.label)}
    return SourceDataset(
        draft.layout,
        root,
        _describe(draft.description, describe, root),
        tuple(sorted(cases, key=lambda case: case.id)),
        {uri: tag for uri, tag in etags.items() if uri in used},
    )


def _describe(own: Mapping[str, Any], describe: Mapping[str, Any] | None, root: str) -> Description:
    """The layout's description with the user's fields over it."""
    given = dict(describe or {})
    values = dict(own)
    if "labels" in given or "regions" in given:  # regions of the layout's own labels say nothing of others
        values.pop("regions", None)
        values.pop("region_values", None)
    values |= given
    if isinstance(regions := values.get("regions"), str):
        if regions not in REGIONS:
            raise ConfigError(
                f"regions: no such ones as {regions!r}", uri=root, fix=f"There are: {', '.join(REGIONS)}, or a mapping"
            )
        values["regions"] = REGIONS[regions]
    if values.get("regions", {}) is None:
        values["regions"] = {}
    return build(Description, values, origin=root)


def _check_ids(ids: Sequence[str], root: str) -> None:
    twice = [case_id for case_id, count in collections.Counter(ids).items() if count > 1]
    if twice:
        raise LayoutError(
            f"{len(twice)} ids name several cases: {', '.join(sorted(twice)[:5])}", uri=root, fix="Give each its own id"
        )
    for case_id in ids:
        if not re.fullmatch(r"[^/\\\s.][^/\\\n]*", case_id):
            raise LayoutError(
                f"{case_id!r} cannot be a case's id", uri=root, fix="Use letters, digits, '-', '_' and '.', not first"
            )


def _asked(cases: Sequence[SourceCase], config: StoreConfig | None) -> dict[str, str]:
    """Version and size of every file of the cases that is there, all asked for at once. A folder of DICOM files has
    none."""
    asking: dict[str, Future[ObjectInfo]] = {}
    for uri in dict.fromkeys(uri for case in cases for uri in (*case.images, case.label) if uri is not None):
        place = uris.parse(uri)
        store = open_store(place.root, config)
        asking[uri] = store.submit(store.head, place.key)
    found = {}
    for uri, future in asking.items():
        try:
            info = future.result()
        except NotFoundError:
            continue
        found[uri] = _tag(info.etag, info.size)
    return found


def _parse(uri: str, config: StoreConfig | None) -> Any:
    """The content of a .json or .csv object."""
    place = uris.parse(uri)
    try:
        text = bytes(open_store(place.root, config).get(place.key)).decode("utf-8-sig")
        if uri.lower().endswith(".csv"):
            return list(csv.DictReader(io.StringIO(text), skipinitialspace=True))
        return json.loads(text)
    except UnicodeDecodeError:
        raise LayoutError("not text in UTF-8", uri=uri, fix="Save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise LayoutError(f"not JSON: {error.msg}, line {error.lineno}", uri=uri, fix="Correct it there") from None
    except csv.Error as error:
        raise LayoutError(f"not CSV: {error}", uri=uri, fix="Write a header line and a line a case") from None


def _is_dataset_json(document: Any) -> bool:
    return isinstance(document, Mapping) and ("training" in document or "channel_names" in document)


def _join(base: str, path: str) -> str:
    """`path` as a URI, taken relative to the folder `base` unless it is one already."""
    if "://" in path or path.startswith(("/", "~")):
        return str(uris.parse(path))
    place = uris.parse(base)
    trailing = "/" if path.endswith("/") else ""
    return place.root + posixpath.normpath(posixpath.join(place.key, path)) + trailing


def _tag(etag: str | None, size: int) -> str:
    return f"{(etag or '').strip(chr(34))}:{size}"
