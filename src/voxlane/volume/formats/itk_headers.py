"""Text headers of .nrrd and .mha files, checked before SimpleITK reads them: it replaces an invalid spacing by 1 mm and
follows a header to any other file."""

from __future__ import annotations

import math
import re

from voxlane.errors import ScanError
from voxlane.volume.formats import Remark

_MAX_HEADER_BYTES = 1 << 16
_CORRECT_SPACING = "Correct the spacing in its header"
_NUMBER = re.compile(r"[^\s,()]+")


def check_header(path: str, uri: str) -> list[Remark]:
    """Raise ScanError if the header of a .nrrd or .mha file declares an impossible spacing or keeps the voxels in
    another file; return what is suspicious about it. A file of another format is left to its reader."""
    with open(path, "rb") as file:
        start = file.read(_MAX_HEADER_BYTES)
    if not start:
        raise ScanError("the file is empty", uri=uri, fix="Copy it again from its source")
    text = start.decode("latin-1").replace("\r\n", "\n")
    if text.startswith("NRRD"):
        return _check_nrrd(_parse_fields(text.partition("\n\n")[0], ":"), uri)
    if "elementdatafile" in text.lower():
        header = re.split(r"(?im)(?<=elementdatafile)([^\n]*)\n", text, maxsplit=1)
        return _check_mha(_parse_fields("".join(header[:2]), "="), uri)
    return []


def _parse_fields(header: str, separator: str) -> dict[str, str]:
    """Return the fields of a header by their names in lower case without spaces."""
    fields = {}
    for line in header.splitlines():
        name, found_separator, value = line.partition(separator)
        if found_separator and not line.startswith("#"):
            fields[name.replace(" ", "").lower()] = value.lstrip("= ").strip()
    return fields


def _check_nrrd(fields: dict[str, str], uri: str) -> list[Remark]:
    if "datafile" in fields:
        raise _other_file(fields["datafile"], uri)
    remarks = []
    if directions := fields.get("spacedirections"):
        for vector in re.findall(r"\(([^)]*)\)", directions):
            if not 0 < math.hypot(*map(_to_float, _NUMBER.findall(vector))) < math.inf:
                raise ScanError(f"space directions: ({vector}) is no axis", uri=uri, fix=_CORRECT_SPACING)
    elif "spacings" in fields:
        # NaN stands for an axis without spacing, such as that of channels.
        numbers = [number for number in _NUMBER.findall(fields["spacings"]) if number.lower() != "nan"]
        _check_spacing(numbers, uri)
        if len(numbers) < 3:
            remarks.append(_no_spacing())
    else:
        remarks.append(_no_spacing())
    if "spacedirections" not in fields or not ("space" in fields or "spacedimension" in fields):
        remarks.append(_no_directions())
    return remarks


def _check_mha(fields: dict[str, str], uri: str) -> list[Remark]:
    if fields.get("elementdatafile", "").upper() != "LOCAL":
        raise _other_file(fields.get("elementdatafile", ""), uri)
    remarks = []
    spacing = fields.get("elementspacing") or fields.get("elementsize")
    if spacing:
        _check_spacing(_NUMBER.findall(spacing), uri)
    else:
        remarks.append(_no_spacing())
    if not fields.keys() & {"transformmatrix", "orientation", "rotation"}:
        remarks.append(_no_directions())
    return remarks


def _check_spacing(numbers: list[str], uri: str) -> None:
    if not all(0 < abs(_to_float(number)) < math.inf for number in numbers):
        raise ScanError(f"the spacing is {' x '.join(numbers)} mm", uri=uri, fix=_CORRECT_SPACING)


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _other_file(name: str, uri: str) -> ScanError:
    return ScanError(
        f"its voxels are in another file ({name[:80]})", uri=uri, fix="Convert it to one file, such as .nii.gz"
    )


def _no_spacing() -> Remark:
    return Remark("geometry", "the header has no spacing; 1 mm is assumed")


def _no_directions() -> Remark:
    return Remark("geometry", "the header has no directions of the axes; those of LPS are assumed")
