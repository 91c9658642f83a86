"""Splits: which cases each fold trains on and which it holds out. Pure.

A dataset's split is made when it is prepared (`assign_folds`) or comes from a file (`split_files`); a run may use a
file of its own. All cases of a patient, and of a group such as a site, are on one side.

The table of a prepared dataset stores the fold that holds each case out, and its header stores the rest
(`Split.to_record`). Datasets of earlier versions have no such record: `read_record` is where they get theirs.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from voxlane.errors import ConfigError
from voxlane.sizes import format_plural

BALANCED, HASH, FILE = "balanced", "hash", "file"
"""Methods. balanced: equal numbers of patients in every fold. hash: a hash of the patient's name. file: as listed."""
NEVER_HELD_OUT = -1
"""Number in the table's column `fold` of a case that no fold holds out."""
_MAX_SHOWN = 5
"""Largest number of cases that a message lists."""


@dataclass(frozen=True)
class Fold:
    """The cases of one fold, sorted by id."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """The folds of a dataset or of a run."""

    method: str
    """balanced, hash or file."""
    cases: tuple[str, ...]
    """Every case of the dataset, sorted."""
    folds: tuple[Fold, ...]
    source: str = ""
    """URI of the file, if the split comes from one."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Group of each case, if groups were given."""
    excluded: tuple[str, ...] = ()
    """Cases that the file names and that were excluded when the dataset was prepared."""

    @property
    def usable(self) -> list[int]:
        """Folds that hold out a case and train on another."""
        return [number for number, fold in enumerate(self.folds) if fold.train and fold.held_out]

    def select(self, fold: int | None, uri: str = "") -> Fold:
        """Return the cases of a fold; without a fold, all cases are for training. Raises ConfigError about the dataset
        `uri` if there is no such fold."""
        if fold is None:
            return Fold(self.cases, ())
        usable = self.usable
        fix = f"Choose one of {usable}, or fold=null to train on all" if usable else "Train on all cases with fold=null"
        if not 0 <= fold < len(self.folds):
            raise ConfigError(f"fold: expected 0 to {len(self.folds) - 1}, got {fold}", uri=uri, fix=fix)
        chosen = self.folds[fold]
        if not chosen.train or not chosen.held_out:
            counts = f"has {len(chosen.held_out)} of {len(self.cases)} cases"
            raise ConfigError(f"fold: fold {fold} {counts}", uri=uri, fix=fix)
        return chosen

    def describe(self) -> str:
        """Say how many folds there are, and how many cases each of them holds out."""
        if not self.usable:
            return "no folds: all cases belong together, so none can be held out; train with fold=null"
        sizes = sorted({len(self.folds[number].held_out) for number in self.usable})
        held_out = f"{sizes[0]} to {sizes[-1]} cases" if len(sizes) > 1 else format_plural(sizes[0], "case")
        numbers = ", ".join(map(str, self.usable))
        method = self.source.rpartition("/")[2] if self.method == FILE else self.method
        text = f"fold{'s' * (len(self.usable) > 1)} {numbers} ({method}): {held_out} held out"
        unused = set(self.cases).difference(*(fold.train + fold.held_out for fold in self.folds))
        if unused:
            text += f"; {format_plural(len(unused), 'case')} in no list: {shorten_names(unused)}"
        if self.excluded:
            text += f"; {format_plural(len(self.excluded), 'listed case')} excluded: {shorten_names(self.excluded)}"
        return text

    @property
    def numbers(self) -> dict[str, int]:
        """Number of the first fold that holds each case out."""
        numbers = dict.fromkeys(self.cases, NEVER_HELD_OUT)
        for number, fold in reversed(list(enumerate(self.folds))):
            numbers |= dict.fromkeys(fold.held_out, number)
        return numbers

    def to_record(self) -> dict[str, Any]:
        """Return what the header of a dataset stores besides `numbers`: the lists only if the numbers do not give
        them."""
        record: dict[str, Any] = {"method": self.method}
        record |= {"source": self.source} if self.source else {}
        record |= {"groups": dict(self.groups)} if self.groups else {}
        record |= {"excluded": list(self.excluded)} if self.excluded else {}
        if make_folds(self.numbers, len(self.folds)) != self.folds:
            record["lists"] = [{"train": list(fold.train), "val": list(fold.held_out)} for fold in self.folds]
        return record


def read_record(record: Any, numbers: Mapping[str, int], count: int) -> Split:
    """Return the split of a dataset with `count` folds from its table's numbers and its header's record, which is None
    in datasets of earlier versions: their folds were a hash of the patient's name, and stay as they are. Raises
    ValueError, TypeError or LookupError if the record does not have the content that `Split.to_record` writes."""
    record = {"method": HASH} if record is None else record
    method, cases = record["method"], tuple(sorted(numbers))
    folds = make_folds(numbers, count)
    if "lists" in record:
        folds = tuple(Fold(tuple(entry["train"]), tuple(entry["val"])) for entry in record["lists"])
        if len(folds) != count or not all(set(cases).issuperset(fold.train + fold.held_out) for fold in folds):
            raise ValueError("the lists do not fit the table of cases")
    groups, excluded = dict(record.get("groups", {})), tuple(record.get("excluded", ()))
    return Split(method, cases, folds, record.get("source", ""), groups, excluded)


def make_folds(numbers: Mapping[str, int], count: int) -> tuple[Fold, ...]:
    """Return `count` folds in which each case is held out by the fold of its number and trained on by all others."""
    cases = sorted(numbers)
    return tuple(
        Fold(tuple(c for c in cases if numbers[c] != number), tuple(c for c in cases if numbers[c] == number))
        for number in range(count)
    )


# -- folds made here ---------------------------------------------------------------------------------------------------


def fold_for_patient(patient: str, folds: int) -> int:
    """Return the fold of a patient, which depends only on the patient's name."""
    return int.from_bytes(hashlib.sha256(patient.encode()).digest()[:8], "big") % folds


@dataclass(frozen=True)
class _Unit:
    """Cases that must be in one fold."""

    name: str
    cases: list[str]
    patients: int
    classes: frozenset[int]


def assign_folds(
    patients: Mapping[str, str],
    folds: int,
    *,
    method: str = BALANCED,
    groups: Mapping[str, str] | None = None,
    classes: Mapping[str, Iterable[int]] | None = None,
    test_cases: Collection[str] = (),
) -> Split:
    """Return at most `folds` folds of the cases with these `patients`, fewer if there are fewer patients or groups.

    balanced: numbers of patients differ by at most one, and each of the `classes` of the cases occurs equally often in
    every fold as far as that allows, the rarest first. With `groups`, the largest groups come first, each in the fold
    with the fewest patients. `test_cases` are fold 0, and the other cases the other folds.
    """
    cases = tuple(sorted(patients))
    fixed = [case for case in cases if case in test_cases]
    rest = {case: patient for case, patient in patients.items() if case not in test_cases}
    start, count = (1, folds - 1) if test_cases else (0, folds)
    if method == HASH:
        numbers = {case: start + fold_for_patient(patient, count) for case, patient in rest.items()}
    else:
        units = _make_units(rest, groups or {}, classes or {})
        count = max(1, min(count, len(units)))
        numbers = {case: start + number for case, number in _balance(units, count).items()}
    numbers |= dict.fromkeys(fixed, 0)
    return Split(method, cases, make_folds(numbers, start + count), groups=groups or {})


def _make_units(
    patients: Mapping[str, str], groups: Mapping[str, str], classes: Mapping[str, Iterable[int]]
) -> list[_Unit]:
    """Return the cases that share a patient or a group, directly or through others."""
    parents: dict[tuple[str, str], tuple[str, str]] = {}

    def find_root(key: tuple[str, str]) -> tuple[str, str]:
        while parents.setdefault(key, key) != key:
            key = parents[key]
        return key

    for case, patient in sorted(patients.items()):
        if case in groups:
            first, second = sorted((find_root(("group", groups[case])), find_root(("patient", patient))))
            parents[second] = first
    members = collections.defaultdict(list)
    for case, patient in sorted(patients.items()):
        members[find_root(("patient", patient))].append(case)
    return [
        _Unit(
            name="/".join(root),
            cases=own,
            patients=len({patients[case] for case in own}),
            classes=frozenset(value for case in own for value in classes.get(case, ())),
        )
        for root, own in members.items()
    ]


def _balance(units: Sequence[_Unit], count: int) -> dict[str, int]:
    """Return the fold of each case, so that numbers of patients, and of those with each class, are about equal."""
    frequency = collections.Counter(value for unit in units for value in unit.classes)
    is_even = all(unit.patients == 1 for unit in units)
    capacity = [len(units) // count + (number < len(units) % count) for number in range(count)]
    load, num_cases = [0] * count, [0] * count
    with_class = [collections.Counter[int]() for _ in range(count)]
    numbers: dict[str, int] = {}

    def rank_classes(unit: _Unit) -> list[int]:
        return sorted(unit.classes, key=lambda value: (frequency[value], value))

    def order(unit: _Unit) -> tuple[int, tuple[int, ...], bytes]:
        rarest = tuple(frequency[value] for value in rank_classes(unit)[:1]) or (len(units) + 1,)
        return -unit.patients, rarest, hashlib.sha256(unit.name.encode()).digest()

    for unit in sorted(units, key=order):
        free = [number for number in range(count) if not is_even or load[number] < capacity[number]]

        def cost(number: int, unit: _Unit = unit) -> tuple[int, ...]:
            first = () if is_even else (load[number],)
            common = (with_class[number][value] for value in rank_classes(unit))
            return (*first, *common, load[number] - capacity[number], num_cases[number], number)

        chosen = min(free, key=cost)
        load[chosen] += unit.patients
        num_cases[chosen] += len(unit.cases)
        with_class[chosen].update(unit.classes)
        numbers |= dict.fromkeys(unit.cases, chosen)
    return numbers


def shorten_names(names: Iterable[str]) -> str:
    """Return the first names, and how many there are besides."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_SHOWN:,} more" if len(ordered) > _MAX_SHOWN else ""
    return ", ".join(ordered[:_MAX_SHOWN]) + more
