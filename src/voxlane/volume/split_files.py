"""Splits from files that somebody published, such as nnU-Net's splits_final.json, and groups of cases from files."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from voxlane import uri as uris
from voxlane.errors import ConfigError
from voxlane.sizes import format_plural
from voxlane.store import StoreConfig
from voxlane.volume.dataset_discovery import read_document
from voxlane.volume.prepared_dataset import Prepared
from voxlane.volume.scan import strip_scan_suffix
from voxlane.volume.splits import FILE, Fold, Split, shorten_names

_SUFFIXES = (".json", ".csv")
_HELD_OUT_KEYS = ("val", "validation", "test")
_FORMAT = 'Write [{"train": ["case_1", ...], "val": ["case_2", ...]}, ...] as nnU-Net does, one entry per fold'


def choose_split(prepared: Prepared, uri: str | None, config: StoreConfig | None = None) -> Split:
    """Return the split of the file at `uri`, or without one the dataset's own."""
    if uri is None:
        return prepared.case_split
    patients = dict(zip(prepared.ids, prepared.table.column("patient").to_pylist(), strict=True))
    excluded = {str(problem.get("case")) for problem in prepared.source.get("excluded", ())}
    return load_split(uri, patients, excluded=excluded, groups=prepared.case_split.groups, config=config)


def load_split(
    uri: str,
    patients: Mapping[str, str],
    *,
    excluded: Collection[str] = (),
    groups: Mapping[str, str] | None = None,
    config: StoreConfig | None = None,
) -> Split:
    """Read and check the split in the .json or .csv file at `uri`; see `parse_split`."""
    if not uri.lower().endswith(_SUFFIXES):
        raise ConfigError(
            f"split: {uri!r} is no .json or .csv file",
            fix="Give one, such as nnU-Net's splits_final.json; prepare also takes balanced and hash",
        )
    absolute = str(uris.parse(uri))
    return parse_split(read_document(absolute, config), absolute, patients, excluded=excluded, groups=groups)


def load_groups(uri: str, cases: Collection[str], config: StoreConfig | None = None) -> dict[str, str]:
    """Return the group of each of the `cases` from the file at `uri`: a JSON object {"case": "group"}, or a CSV table
    with the columns `case` and `group`. Cases besides these are ignored; every one of these must have a group."""
    fix = 'Write {"case_1": "site A", ...}, or a table with the columns case,group'
    if not uri.lower().endswith(_SUFFIXES):
        raise ConfigError(f"groups: {uri!r} is no .json or .csv file", fix=fix)
    absolute = str(uris.parse(uri))
    document = read_document(absolute, config)
    if isinstance(document, list) and all(isinstance(row, Mapping) and row.get("case") for row in document):
        repeated = [case for case, n in collections.Counter(str(row["case"]) for row in document).items() if n > 1]
        if repeated:
            raise ConfigError(f"{shorten_names(repeated)}: listed twice", uri=absolute, fix="List each case once")
        document = {str(row["case"]): row.get("group") for row in document}
    if not isinstance(document, Mapping) or not all(isinstance(group, str | int) for group in document.values()):
        raise ConfigError("the file does not name a group for each case", uri=absolute, fix=fix)
    by_id = {strip_scan_suffix(str(case)): group for case, group in document.items()} | dict(document)
    missing = [case for case in cases if str(by_id.get(case, "")).strip() == ""]
    if missing:
        raise ConfigError(
            f"{format_plural(len(missing), 'case')} of the dataset without a group: {shorten_names(missing)}",
            uri=absolute,
            fix="Give each case a group, its own if it belongs to none",
        )
    return {case: str(by_id[case]) for case in sorted(cases)}


def parse_split(
    document: Any,
    uri: str,
    patients: Mapping[str, str],
    *,
    excluded: Collection[str] = (),
    groups: Mapping[str, str] | None = None,
) -> Split:
    """Return the split that a parsed JSON or CSV file at `uri` lists, for the cases with these `patients`.

    JSON: nnU-Net's list of {"train": [...], "val": [...]}, or one such object; "test" may stand for "val". CSV: the
    columns `case` and `fold` (a number), or `case` and `split` (train, val or test). Cases may be written as file
    names. Cases in `excluded` are left out; cases in neither list of a fold are not used by it. Raises ConfigError
    unless every case is known, listed once per fold, and on the side of its patient and group.
    """
    entries = _read_entries(document, uri)
    left_out: set[str] = set()
    folds = []
    for number, entry in enumerate(entries):
        field_name = f"fold {number}: " if len(entries) > 1 else ""
        lists = {}
        for key, names in entry.items():
            resolved, skipped = _resolve_names(names, f"{field_name}{key}", uri, patients, excluded)
            left_out |= skipped
            lists[key] = resolved
        held_out_key = next(key for key in lists if key != "train")
        _check_sides(lists["train"], lists[held_out_key], field_name, uri, patients, groups or {})
        folds.append(Fold(tuple(sorted(lists["train"])), tuple(sorted(lists[held_out_key]))))
    return Split(FILE, tuple(sorted(patients)), tuple(folds), uri, groups or {}, tuple(sorted(left_out)))


def _read_entries(document: Any, uri: str) -> list[dict[str, list[Any]]]:
    """Return `train` and the list that is held out of each fold."""
    if isinstance(document, list) and document and all(isinstance(row, Mapping) and "case" in row for row in document):
        return _read_rows(document, uri)
    entries = [document] if isinstance(document, Mapping) else document
    if not isinstance(entries, list) or not entries:
        _fail("the split is not a list of folds", uri)
    return [_read_entry(entry, number, uri) for number, entry in enumerate(entries)]


def _read_entry(entry: Any, number: int, uri: str) -> dict[str, list[Any]]:
    keys = [key for key in _HELD_OUT_KEYS if key in entry] if isinstance(entry, Mapping) else []
    if not keys or "train" not in entry:
        _fail(f"fold {number} has no train and val", uri)
    if len(keys) > 1:
        raise ConfigError(
            f"fold {number} has {keys[0]} and {keys[1]}, but a fold holds out one list",
            uri=uri,
            fix="Keep one of them; cases in neither list are not used",
        )
    for key in ("train", *keys):
        if not isinstance(entry[key], list) or not all(isinstance(name, str) for name in entry[key]):
            _fail(f"fold {number}: {key} is not a list of case names", uri)
    return {key: list(entry[key]) for key in ("train", *keys)}


def _read_rows(rows: Sequence[Mapping[str, Any]], uri: str) -> list[dict[str, list[Any]]]:
    """Return the lists of a table with the columns `case` and `fold` or `split`."""
    fix = "Write the columns case,fold (a number from 0) or case,split (train, val or test)"
    if all(str(row.get("fold", "")).isdecimal() for row in rows):
        numbers = [int(row["fold"]) for row in rows]
        if max(numbers) >= len(rows):
            raise ConfigError(f"fold {max(numbers)}: there are only {len(rows)} cases", uri=uri, fix=fix)
        names = [str(row["case"]) for row in rows]
        sides = [[number == fold for number in numbers] for fold in range(max(numbers) + 1)]
        return [
            {
                "train": [name for name, is_held_out in zip(names, side, strict=True) if not is_held_out],
                "val": [name for name, is_held_out in zip(names, side, strict=True) if is_held_out],
            }
            for side in sides
        ]
    lists: dict[str, list[Any]] = {"train": []}
    for number, row in enumerate(rows, 1):
        side = str(row.get("split", "")).strip().lower()
        if side not in ("train", *_HELD_OUT_KEYS):
            raise ConfigError(f"row {number} has neither a fold nor a split", uri=uri, fix=fix)
        lists.setdefault(side, []).append(str(row["case"]))
    if len(lists) != 2:
        raise ConfigError("the table does not name train and one of val and test", uri=uri, fix=fix)
    return [lists]


def _resolve_names(
    names: Sequence[str], title: str, uri: str, patients: Mapping[str, str], excluded: Collection[str]
) -> tuple[list[str], set[str]]:
    """Return the ids of the listed cases, and those that were excluded from the dataset."""
    ids = [name if name in patients or name in excluded else strip_scan_suffix(name) for name in names]
    unknown = [name for name, case in zip(names, ids, strict=True) if case not in patients and case not in excluded]
    if unknown:
        raise ConfigError(
            f"{title} names {format_plural(len(unknown), 'unknown case')}: {shorten_names(unknown)}",
            uri=uri,
            fix=f"Use the dataset's ids, such as {next(iter(sorted(patients)), '(none)')}",
        )
    if repeated := [case for case, count in collections.Counter(ids).items() if count > 1]:
        raise ConfigError(f"{title} lists cases twice: {shorten_names(repeated)}", uri=uri, fix="List each case once")
    usable = [case for case in ids if case in patients]
    if not usable:
        reason = "every case in it was excluded from the dataset" if ids else "the list is empty"
        raise ConfigError(f"{title}: {reason}", uri=uri, fix="Put at least one usable case on each side")
    return usable, set(ids).difference(usable)


def _check_sides(
    train: Sequence[str],
    held_out: Sequence[str],
    prefix: str,
    uri: str,
    patients: Mapping[str, str],
    groups: Mapping[str, str],
) -> None:
    """Raise if a case, patient or group is on both sides."""
    for kind, names in (("case", {case: case for case in patients}), ("patient", patients), ("group", groups)):
        trained = {names[case]: case for case in train if case in names}
        for case in held_out:
            if names.get(case) in trained:
                other = trained[names[case]]
                cases = "" if kind == "case" else f" ({other} in train, {case} held out)"
                raise ConfigError(
                    f"{prefix}{kind} {names[case]} is on both sides{cases}",
                    uri=uri,
                    fix=f"Keep each {kind} on one side",
                )


def _fail(message: str, uri: str) -> NoReturn:
    raise ConfigError(message, uri=uri, fix=_FORMAT)
