"""A prepared dataset in a bucket: its header, cases and folds.

    DST/prepared.json               description, plan, fingerprint, source, split, name of the table of cases; written
                                    last
    DST/cases-<digest>.parquet      one row per case: id, patient, fold, location and version of its arrays
    DST/cases/<id>.zarr/            Zarr v3: image (C, Z, Y, X), label (Z, Y, X), foreground (N, 4)
    DST/work/...                    results of `voxlane prepare` so far, from which it can resume

A dataset without a header is incomplete.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from voxlane import settings
from voxlane import uri as uris
from voxlane.errors import ConfigError, NotFoundError, PreparedError
from voxlane.store import Store, StoreConfig
from voxlane.store.listing.parquet import ParquetRows
from voxlane.volume.description import Description
from voxlane.volume.plan import Plan, Triple, to_triple
from voxlane.volume.splits import Split, read_record

HEADER = "prepared.json"
VERSION = 1
_INDEX_COLUMNS = ("id", "patient", "fold")
"""Columns that are loaded with the dataset."""
_DETAIL_COLUMNS = ("source", "volume")
"""Columns that make up nearly all of the table's bytes; a process loads only the rows that it draws."""
_ROWS_PER_GROUP = 1024
"""Rows that are read together: about 2 MB and 1 ms."""
_PREPARE_AGAIN = "Run voxlane prepare again"


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
    """Digest of the content: plan, cases and the versions of their volumes. It does not depend on the split."""
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
        damaged = PreparedError("the dataset's header is damaged", uri=f"{root}/{HEADER}", fix=_PREPARE_AGAIN)
        try:
            header = json.loads(bytes(store.get(prefix + HEADER)))
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise
            unfinished = next(iter(store.list_pages(prefix + "work/")), None) is not None
            message = "preparation is incomplete" if unfinished else "there is no prepared dataset at this URI"
            fix = "Run the same voxlane prepare again; it will resume" if unfinished else "Run: voxlane prepare SRC DST"
            raise PreparedError(message, uri=root, fix=fix) from None
        except ValueError:
            raise damaged from None
        if not isinstance(header, dict) or "version" not in header:
            raise damaged
        if header["version"] != VERSION:
            raise PreparedError(
                f"prepared by another version of voxlane (format {header['version']}, this version reads {VERSION})",
                uri=root,
                fix="Run voxlane prepare again, or use the version that prepared it",
            )
        try:
            description, plan = settings.build(Description, header["description"]), settings.build(Plan, header["plan"])
            fields = {name: header[name] for name in ("fingerprint", "source", "folds", "digest")}
            if not uris.stays_below(header["cases"]):
                raise damaged
            body = bytes(store.get(prefix + header["cases"]))
        except NotFoundError:
            raise PreparedError("the dataset's table of cases is missing", uri=root, fix=_PREPARE_AGAIN) from None
        except (KeyError, TypeError, AttributeError, ConfigError):
            raise damaged from None
        if _digest(body) not in header["cases"]:
            raise PreparedError("the dataset's table of cases is damaged", uri=root, fix=_PREPARE_AGAIN)
        rows = ParquetRows(body)
        record, table = header.get("split"), rows.table(_INDEX_COLUMNS)
        prepared = cls(
            uri=root,
            description=description,
            plan=plan,
            **fields,
            split_record=record,
            table=table,
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
        return PreparedCase(name, patient, fold, json.loads(source), json.loads(volume))

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
    existing: Prepared | None = None,
) -> str:
    """Write the table of cases, then the header, unless they exist already; return the dataset's digest. Where only the
    split differs from the `existing` dataset, its digest stays, so that its runs continue with their own split."""
    ordered = sorted(cases, key=lambda case: case.id)
    columns: dict[str, list[Any]] = {name: [getattr(c, name) for c in ordered] for name in _INDEX_COLUMNS}
    columns |= {name: [_compact(getattr(c, name)) for c in ordered] for name in _DETAIL_COLUMNS}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd", row_group_size=_ROWS_PER_GROUP)
    name = f"cases-{_digest(buffer.getvalue())}.parquet"
    content = {"plan": settings.to_plain(plan), "description": settings.to_plain(description), "cases": name}
    if existing is not None and _differs_only_in_split(existing, description, plan, ordered):
        digest = existing.digest
    else:
        # Of everything but the split: the table's name would change with it.
        digest = _digest(_compact({**content, "cases": [_describe_content(case) for case in ordered]}).encode())
    header = {"version": VERSION, "digest": digest, "folds": folds, **content}
    header |= {"fingerprint": fingerprint, "source": source}
    header |= {} if split_record is None else {"split": split_record}
    for key, body in ((name, buffer.getvalue()), (HEADER, json.dumps(header, indent=1).encode())):
        try:
            is_current = bytes(store.get(prefix + key)) == body
        except NotFoundError:
            is_current = False
        if not is_current:
            store.put(prefix + key, body)
    return digest


def _differs_only_in_split(
    existing: Prepared, description: Description, plan: Plan, cases: Sequence[PreparedCase]
) -> bool:
    stored = (_describe_content(existing.case(row)) for row in range(len(existing)))
    return (existing.description, existing.plan) == (description, plan) and list(stored) == [
        _describe_content(case) for case in cases
    ]


def _describe_content(case: PreparedCase) -> list[Any]:
    """Return everything about a case but its fold, as JSON gives it back."""
    return [case.id, case.patient, _compact(case.source), _compact(case.volume)]


def as_prefix(key: str) -> str:
    """Return a key as a prefix of the keys below it."""
    return key.rstrip("/") + "/" if key.strip("/") else ""


def case_key(prefix: str, case: str) -> str:
    """Return the key of a case's volume in a dataset below `prefix`."""
    return f"{prefix}cases/{uris.quote(case)}.zarr"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
