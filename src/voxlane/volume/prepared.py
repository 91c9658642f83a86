"""A prepared dataset in a bucket: its header, its cases, its folds.

    DST/prepared.json               description, plan, fingerprint, source, which file lists the cases; written last
    DST/cases-<digest>.parquet      one row a case: id, patient, fold, where its arrays are and which version
    DST/cases/<id>.zarr/            Zarr v3: image (C, Z, Y, X), label (Z, Y, X), foreground (N, 4)
    DST/work/...                    what an unfinished `voxlane prepare` has done; it resumes from there

A dataset without a header is unfinished; one with a header is whole.
"""

from __future__ import annotations

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
from voxlane.listing.parquet import ParquetRows
from voxlane.store import Store, StoreConfig
from voxlane.volume.description import Description
from voxlane.volume.plan import Plan

HEADER = "prepared.json"
VERSION = 1
_AT_ONCE = ("id", "patient", "fold")
_BY_ROW = ("source", "volume")
"""Columns that are nearly all of the table's bytes, and of which a process needs the rows that it draws."""
_ROWS_A_GROUP = 1024
"""Rows that are read together: about 2 MB and 1 ms."""


@dataclass(frozen=True)
class PreparedCase:
    """One case of a prepared dataset."""

    id: str
    patient: str
    fold: int
    source: dict[str, Any]
    """`images` and `label`: the URIs it was made from."""
    volume: dict[str, Any]
    """Where its arrays are and how they are stored; see `volume.case_writer`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels (z, y, x)."""
        z, y, x = self.volume["label"]["shape"]
        return z, y, x


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared dataset: what its header and its table of cases say. Holds no connection."""

    uri: str
    """Where it lies, without a slash at the end."""
    description: Description
    plan: Plan
    fingerprint: dict[str, Any]
    source: dict[str, Any]
    """`uri` and `layout` of the scans, and the cases that were left out with the reason."""
    folds: int
    digest: str
    """Names the content: plan, cases and the versions of their volumes."""
    table: pa.Table = field(repr=False, compare=False)
    """A row a case, by id: id, patient and fold."""
    rows: ParquetRows = field(repr=False, compare=False)
    """The same cases with all that is known of them."""
    config: StoreConfig | None = field(default=None, compare=False)

    @classmethod
    def load(cls, uri: str, config: StoreConfig | None = None) -> Prepared:
        """Read the header and the cases."""
        parsed = uris.parse(uri)
        store, prefix = Store(uri, config), folder(parsed.key)
        where = store.uri(prefix).rstrip("/")
        damaged = PreparedError("its header is damaged", uri=f"{where}/{HEADER}", fix="Run voxlane prepare again")
        try:
            header = json.loads(bytes(store.get(prefix + HEADER)))
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise
            unfinished = next(iter(store.list_pages(prefix + "work/")), None) is not None
            what = "its preparation has not finished" if unfinished else "no prepared dataset is here"
            fix = "Run the same voxlane prepare again: it goes on" if unfinished else "Run: voxlane prepare SRC DST"
            raise PreparedError(what, uri=where, fix=fix) from None
        except ValueError:
            raise damaged from None
        if not isinstance(header, dict) or "version" not in header:
            raise damaged
        if header["version"] != VERSION:
            raise PreparedError(
                f"prepared by another voxlane (format {header['version']}, this one reads {VERSION})",
                uri=where,
                fix="Run voxlane prepare again, or use the voxlane that prepared it",
            )
        try:
            description, plan = settings.build(Description, header["description"]), settings.build(Plan, header["plan"])
            told = {name: header[name] for name in ("fingerprint", "source", "folds", "digest")}
            body = bytes(store.get(prefix + header["cases"]))
        except NotFoundError:
            raise PreparedError("its table of cases is gone", uri=where, fix="Run voxlane prepare again") from None
        except (KeyError, TypeError, ConfigError):
            raise damaged from None
        if _digest(body) not in header["cases"]:
            raise PreparedError("its table of cases is damaged", uri=where, fix="Run voxlane prepare again")
        rows = ParquetRows(body)
        table = rows.table(_AT_ONCE)
        return cls(uri=where, description=description, plan=plan, **told, table=table, rows=rows, config=config)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def ids(self) -> list[str]:
        """Every case, sorted."""
        return list(self.table.column("id").to_pylist())

    def case(self, index: int) -> PreparedCase:
        """The case at a row of the table."""
        name, patient, fold = (self.table.column(column)[index].as_py() for column in _AT_ONCE)
        source, volume = self.rows.row(index, _BY_ROW)
        return PreparedCase(name, patient, fold, json.loads(source), json.loads(volume))

    def split(self, fold: int | None) -> tuple[list[int], list[int]]:
        """Rows to train on and rows to validate on. Without a fold every case is trained on, and none held out."""
        numbers = self.table.column("fold").to_pylist()
        if fold is None:
            return list(range(len(numbers))), []
        if not 0 <= fold < self.folds:
            raise ConfigError(f"fold: {fold} of a dataset with folds 0 to {self.folds - 1}", uri=self.uri)
        held = [i for i, f in enumerate(numbers) if f == fold]
        rest = [i for i, f in enumerate(numbers) if f != fold]
        if not held or not rest:
            raise ConfigError(
                f"fold: fold {fold} holds {len(held)} of {len(numbers)} cases",
                uri=self.uri,
                fix=f"Choose one of {sorted(set(numbers))}, or fold=null to train on all",
            )
        return rest, held


def fold_of(patient: str, folds: int) -> int:
    """The fold of a patient: fixed by the patient's name, whatever other cases there are."""
    return int.from_bytes(hashlib.sha256(patient.encode()).digest()[:8], "big") % folds


def publish(
    store: Store,
    prefix: str,
    *,
    description: Description,
    plan: Plan,
    fingerprint: dict[str, Any],
    source: dict[str, Any],
    folds: int,
    cases: Iterable[PreparedCase],
) -> str:
    """Write the table of cases, then the header, unless they are there already; returns the digest."""
    ordered = sorted(cases, key=lambda case: case.id)
    columns: dict[str, Sequence[Any]] = {
        "id": [c.id for c in ordered],
        "patient": [c.patient for c in ordered],
        "fold": [c.fold for c in ordered],
        "source": [_compact(c.source) for c in ordered],
        "volume": [_compact(c.volume) for c in ordered],
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd", row_group_size=_ROWS_A_GROUP)
    name = f"cases-{_digest(buffer.getvalue())}.parquet"
    content = {"plan": settings.plain(plan), "description": settings.plain(description), "cases": name}
    digest = _digest(_compact(content).encode())
    header = {"version": VERSION, "digest": digest, "folds": folds, **content}
    header |= {"fingerprint": fingerprint, "source": source}
    for key, body in ((name, buffer.getvalue()), (HEADER, json.dumps(header, indent=1).encode())):
        if not _holds(store, prefix + key, body):
            store.put(prefix + key, body)
    return digest


def folder(key: str) -> str:
    """A key as the prefix of what lies below it."""
    return key.rstrip("/") + "/" if key.strip("/") else ""


def case_key(prefix: str, case: str) -> str:
    """Where the volume of a case is, in a dataset below `prefix`."""
    return f"{prefix}cases/{uris.quote(case)}.zarr"


def _holds(store: Store, key: str, body: bytes) -> bool:
    try:
        return bytes(store.get(key)) == body
    except NotFoundError:
        return False


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
