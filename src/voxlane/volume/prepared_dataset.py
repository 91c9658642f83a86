"""A prepared dataset in a bucket: its header, cases and folds.

    DST/prepared.json               description, plan, fingerprint, source, split, name of the table of cases; written
                                    last
    DST/cases-<digest>.parquet      one row per case: id, patient, fold, size and checksum of each of its objects
    DST/cases/<id>.zarr/            Zarr v3: image (C, Z, Y, X), label (Z, Y, X), foreground (N, 4)
    DST/work/...                    results of `voxlane prepare` so far, from which it can resume

A dataset without a header is incomplete. Header and table are the dataset's index: they identify every other object
by its content, so a dataset may be copied to any bucket or disk (`volume.dataset_index`).
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import ConfigError, NotFoundError, PreparedError
from voxlane.store import Store, StoreConfig
from voxlane.store.content import checksum_content
from voxlane.store.listing.parquet import ParquetRows
from voxlane.volume.dataset_index import (
    StoredObject,
    compute_digest,
    decode_header,
    drop_etags,
    encode_header,
    read_objects,
    to_compact_json,
    upgrade_objects,
)
from voxlane.volume.description import Description
from voxlane.volume.plan import Plan, Triple, to_triple
from voxlane.volume.splits import Split, read_record

HEADER = "prepared.json"
_INDEX_COLUMNS = ("id", "patient", "fold")
"""Columns that are loaded with the dataset."""
_DETAIL_COLUMNS = ("source", "volume")
"""Columns that make up nearly all of the table's bytes; a process loads only the rows that it draws."""
_ROWS_PER_GROUP = 1024
"""Rows that are read together: about 2 MB and 1 ms."""
COPY_AGAIN = "Copy the dataset again (voxlane cp SRC DST), or run voxlane prepare again"
"""Fix for a dataset of which something is missing or damaged."""


@dataclass(frozen=True)
class PreparedCase:
    """One case of a prepared dataset."""

    id: str
    patient: str
    fold: int
    source: dict[str, Any]
    """URIs of the source files: `images` and `label`."""
    volume: dict[str, Any]
    """Location and encoding of the arrays; see `volume.case_writer`."""

    @property
    def shape(self) -> Triple:
        """Number of voxels (z, y, x)."""
        return to_triple(self.volume["label"]["shape"])


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared dataset: the content of its header and its table of cases. Holds no connection."""

    uri: str
    """URI of the dataset, without a slash at the end."""
    description: Description
    plan: Plan
    fingerprint: dict[str, Any]
    source: dict[str, Any]
    """`uri` and `layout` of the scans, and the `excluded` cases with their problems."""
    folds: int
    digest: str
    """SHA-256 (hexadecimal) of the content: plan, description, and the checksums of each case's objects. It does not
    depend on the split, and is the same wherever the dataset and its scans lie. Datasets of format 1 have another,
    shorter digest."""
    format: int
    """Format of the index. Datasets of format 1 have no checksums and cannot be moved."""
    index: tuple[StoredObject, ...] = field(repr=False, compare=False)
    """The header and the table of cases, with keys below the dataset."""
    split_record: dict[str, Any] | None = field(default=None, repr=False)
    """How the split was made, and what the table does not hold of it; None in datasets of earlier versions."""
    table: pa.Table = field(repr=False, compare=False)
    """Id, patient and fold of each case, sorted by id."""
    rows: ParquetRows = field(repr=False, compare=False)
    """The complete table of the same cases, read row by row."""
    config: StoreConfig | None = field(default=None, compare=False)

    @classmethod
    def load(cls, uri: str, config: StoreConfig | None = None) -> Prepared:
        """Read the header and the table of cases; raise PreparedError if there is no complete dataset."""
        parsed = uris.parse(uri)
        store, prefix = Store(uri, config), as_prefix(parsed.key)
        root = store.uri(prefix).rstrip("/")
        try:
            header_body = bytes(store.get(prefix + HEADER))
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise
            raise _explain_missing_header(store, prefix) from None
        damaged = PreparedError("the dataset's header is damaged", uri=f"{root}/{HEADER}", fix=COPY_AGAIN)
        header = decode_header(header_body, damaged.uri, damaged.fix)
        try:
            description, plan = settings.build(Description, header["description"]), settings.build(Plan, header["plan"])
            fields = {name: header[name] for name in ("fingerprint", "source", "folds", "digest")}
            if not uris.stays_below(header["cases"]):
                raise damaged
            body = bytes(store.get(prefix + header["cases"]))
        except NotFoundError:
            raise PreparedError("the dataset's table of cases is missing", uri=root, fix=COPY_AGAIN) from None
        except (KeyError, TypeError, AttributeError, ConfigError):
            raise damaged from None
        if _digest(body) not in header["cases"]:
            raise PreparedError("the dataset's table of cases is damaged", uri=root, fix=COPY_AGAIN)
        rows = ParquetRows(body)
        index = tuple(
            StoredObject(name, len(content), checksum_content(content), None, None)
            for name, content in ((HEADER, header_body), (header["cases"], body))
        )
        prepared = cls(
            uri=root,
            description=description,
            plan=plan,
            **fields,
            format=header["version"],
            index=index,
            split_record=header.get("split"),
            table=rows.table(_INDEX_COLUMNS),
            rows=rows,
            config=config,
        )
        try:
            _ = prepared.case_split
        except (TypeError, ValueError, LookupError, AttributeError):
            raise damaged from None
        return prepared

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def ids(self) -> list[str]:
        """Ids of all cases, sorted."""
        return list(self.table.column("id").to_pylist())

    def case(self, index: int) -> PreparedCase:
        """Return the case at a row of the table."""
        name, patient, fold = (self.table.column(column)[index].as_py() for column in _INDEX_COLUMNS)
        source, volume = self.rows.row(index, _DETAIL_COLUMNS)
        return PreparedCase(name, patient, fold, json.loads(source), self._upgrade(json.loads(volume)))

    def objects(self, lists: Sequence[str] = ("objects",)) -> Iterator[StoredObject]:
        """Yield the objects of all cases, without the index, with keys below the dataset: by default those that
        training reads."""
        columns = self.rows.table(("id", "volume"))
        for name, volume in zip(*(column.to_pylist() for column in columns.columns), strict=True):
            yield from read_objects(self._upgrade(json.loads(volume)), case_key("", name), lists)

    def _upgrade(self, volume: dict[str, Any]) -> dict[str, Any]:
        return upgrade_objects(volume) if self.format == 1 else volume

    @functools.cached_property
    def case_split(self) -> Split:
        """The dataset's folds."""
        numbers = dict(zip(self.ids, self.table.column("fold").to_pylist(), strict=True))
        return read_record(self.split_record, numbers, self.folds)

    def split(self, fold: int | None) -> tuple[list[int], list[int]]:
        """Return the rows for training and those for validation. Without a fold all cases are for training."""
        chosen = self.case_split.select(fold, self.uri)
        return self.find_rows(chosen.train), self.find_rows(chosen.held_out)

    def find_rows(self, cases: Iterable[str]) -> list[int]:
        """Return the rows of the table that hold these cases, in their order; raise KeyError for an unknown case."""
        rows = {case: row for row, case in enumerate(self.ids)}
        return [rows[case] for case in cases]


def publish_dataset(
    store: Store,
    prefix: str,
    *,
    description: Description,
    plan: Plan,
    fingerprint: dict[str, Any],
    source: dict[str, Any],
    folds: int,
    cases: Iterable[PreparedCase],
    split_record: dict[str, Any] | None = None,
) -> str:
    """Write the table of cases, then the header, unless they exist already; return the dataset's digest."""
    ordered = [replace(case, volume=drop_etags(case.volume)) for case in sorted(cases, key=lambda case: case.id)]
    columns: dict[str, list[Any]] = {name: [getattr(c, name) for c in ordered] for name in _INDEX_COLUMNS}
    columns |= {name: [to_compact_json(getattr(c, name)) for c in ordered] for name in _DETAIL_COLUMNS}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd", row_group_size=_ROWS_PER_GROUP)
    name = f"cases-{_digest(buffer.getvalue())}.parquet"
    content = {"plan": settings.to_plain(plan), "description": settings.to_plain(description)}
    # Without folds and the URIs of the scans, so that runs continue with their own split on a dataset that has another.
    digest = compute_digest({**content, "cases": [[c.id, c.patient, c.volume] for c in ordered]})
    header = {"digest": digest, "folds": folds, **content, "cases": name}
    header |= {"fingerprint": fingerprint, "source": source}
    header |= {} if split_record is None else {"split": split_record}
    for key, body in ((name, buffer.getvalue()), (HEADER, encode_header(header))):
        try:
            is_current = bytes(store.get(prefix + key)) == body
        except NotFoundError:
            is_current = False
        if not is_current:
            store.put(prefix + key, body)
    return digest


def as_prefix(key: str) -> str:
    """Return a key as a prefix of the keys below it."""
    return key.rstrip("/") + "/" if key.strip("/") else ""


def case_key(prefix: str, case: str) -> str:
    """Return the key of a case's volume in a dataset below `prefix`."""
    return f"{prefix}cases/{uris.quote(case)}.zarr"


def _explain_missing_header(store: Store, prefix: str) -> PreparedError:
    """Return the error for a folder without a header: nothing was prepared here, or not all of it has arrived yet."""

    def has(name: str) -> bool:
        return next(iter(store.list_pages(prefix + name)), None) is not None

    if has("work/"):
        message = "preparation is incomplete"
        fix = "Run the same voxlane prepare again; it will resume. If this is a copy, run the copy again"
    elif has("datasets/"):
        message = "the folder holds copies made by voxlane stage, and is no dataset itself"
        fix = "Name one of them, below datasets/ in this folder"
    elif has("cases"):
        message = "the dataset is incomplete: its header is missing, which a copy receives last"
        fix = "Run the copy again, such as voxlane cp SRC DST; it will resume"
    else:
        message, fix = "there is no prepared dataset at this URI", "Run: voxlane prepare SRC DST"
    return PreparedError(message, uri=store.uri(prefix).rstrip("/"), fix=fix)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
