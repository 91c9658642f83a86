"""What all benchmarks share: the result file and its plot, facts about the run, and aligned tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxlane.errors import ConfigError, MissingExtraError
from voxlane.redaction import redact
from voxlane.temporary import temporary_folder

if TYPE_CHECKING:
    from voxlane.store import Store, StoreConfig

Row = dict[str, Any]
Draw = Callable[[Row, Path], None]
"""Draws the plot of a result into a file."""
Column = tuple[str, str | Callable[[Row], str]]
"""Title of a column and its cell: a format of a row's fields, such as `{seconds[median]:.2f}`, or a function of the
row."""


def in_job() -> bool:
    """Return whether a launcher (torchrun or a compatible one) started this process as one rank of a job."""
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def print_progress(text: str) -> None:
    """Print one line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


# -- result file -------------------------------------------------------------------------------------------------------


class ResultFile:
    """A path or URI ending in .json, with its plot beside it. Whether both can be written is checked here, before the
    measurements."""

    def __init__(self, out: str, config: StoreConfig | None = None, *, plot: bool) -> None:
        self._out = out
        self._plot = plot
        self._store: Store | None = None
        if plot:
            check_matplotlib()
        if "://" in out:
            from voxlane.store import Store

            if not out.endswith(".json"):
                fix = "Give --out URI.json; the plot is put beside it"
                raise ConfigError("the result file is JSON", uri=out, fix=fix)
            self._store = Store(out, config)
        if in_job():  # one of the job's ranks writes, and the others may not have the folder
            return
        if self._store is None:
            _check_writable(Path(out), plot=plot)
        else:
            probe = f"{_key_of(out)}.probe"
            self._store.put(probe, b"")
            self._store.delete([probe])

    def save(self, result: dict[str, Any], draw: Draw) -> None:
        """Write the result and, if asked for, the plot beside it; print the name of each file."""
        self._write(self._out, (json.dumps(redact(result), indent=1) + "\n").encode())
        if self._plot:
            with temporary_folder("bench") as folder:
                picture = Path(folder, "plot.png")
                draw(result, picture)
                base, _ = os.path.splitext(self._out)
                self._write(f"{base}.png", picture.read_bytes())

    def _write(self, name: str, body: bytes) -> None:
        if self._store is None:
            Path(name).write_bytes(body)
        else:
            self._store.put(_key_of(name), body)
        print_progress(f"wrote {name}")


def _key_of(uri: str) -> str:
    from voxlane import uri as uris

    return uris.parse(uri).key


def load_result(path: Path, benchmark: str) -> dict[str, Any]:
    """Return the content of a result file of a benchmark, such as `voxlane bench step`."""
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the result file: {error.strerror}", uri=str(path)) from None
    except ValueError:
        raise ConfigError("the result file is not JSON", uri=str(path)) from None
    if not isinstance(result, dict) or result.get("benchmark") != benchmark:
        fix = f"Give a file that {benchmark} wrote (--out)"
        raise ConfigError(f"not a result of {benchmark}", uri=str(path), fix=fix)
    return result


def _check_writable(out: Path, *, plot: bool) -> None:
    existed = out.exists()
    try:
        with open(out, "ab"):
            pass
        if not existed:
            out.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write the result file: {error.strerror}", uri=str(out), fix="Give --out FILE in a writable folder"
        ) from None
    if plot and out.suffix == ".png":
        raise ConfigError(
            "the result file is JSON", uri=str(out), fix="Give --out FILE.json; the plot is saved beside it"
        )


def check_matplotlib() -> None:
    """Raise MissingExtraError if no plot can be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError.of("bench", "the plot (leave it out with --no-plot)")


# -- facts about the run -----------------------------------------------------------------------------------------------


def describe_run(benchmark: str, libraries: Sequence[str], *, commit: str | None = None) -> dict[str, Any]:
    """Return the fields that begin every result file: benchmark, date, commit, hardware and versions."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or find_commit(),
        "hardware": describe_hardware(),
        "python": platform.python_version(),
        "versions": find_versions(libraries),
    }


def describe_hardware() -> dict[str, Any]:
    """Return processor, cores, memory and GPUs of this machine."""
    import torch

    facts: dict[str, Any] = {"cpu": find_cpu_model(), "cores": os.cpu_count()}
    if hasattr(os, "sysconf"):
        facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def find_cpu_model() -> str:
    """Return the processor's model, or the machine's architecture where Linux does not name it."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return match[1] if match else platform.machine()


def find_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def find_commit() -> str | None:
    """Return the commit of the source tree that this runs from; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if "site-packages" not in __file__ else None


# -- figures and tables ------------------------------------------------------------------------------------------------


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def median_or_none(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None, or None without any."""
    known_values = [value for value in values if value is not None]
    return statistics.median(known_values) if known_values else None


def compute_percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median and the 10th and 90th percentiles, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    shares = {"p10": 0.1, "median": 0.5, "p90": 0.9}
    return {name: ordered[round(share * (len(ordered) - 1))] for name, share in shares.items()}


def format_table(rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """Return rows as columns of equal width: the first `text_columns` to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def format_rows(columns: Sequence[Column], rows: Sequence[Row], *, text_columns: int = 1) -> str:
    """Return a table with a title line and a line per row."""
    cells = [[cell.format(**row) if isinstance(cell, str) else cell(row) for _, cell in columns] for row in rows]
    return format_table([[title for title, _ in columns], *cells], text_columns=text_columns)


def format_share(value: float | None) -> str:
    """Return a percentage, or a dash for None."""
    return "-" if value is None else f"{value:.1%}"


def find_error_bars(rows: Sequence[Row], field: str, unit: float = 1.0) -> tuple[list[float], list[list[float]]]:
    """Return the medians of a summarized field, and their distances to the minima and to the maxima."""
    medians = [row[field]["median"] * unit for row in rows]
    below = [(row[field]["median"] - row[field]["min"]) * unit for row in rows]
    above = [(row[field]["max"] - row[field]["median"]) * unit for row in rows]
    return medians, [below, above]


def load_pyplot() -> Any:
    """Import matplotlib's pyplot without a display, which servers lack."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path, hardware: dict[str, Any] | None = None, note: str = "") -> None:
    """Write a figure with the machine's name, and a note, below it."""
    if hardware is not None:
        text = f"{hardware['cpu']}, {hardware['cores']} cores{note}"
        figure.text(0.5, 0.01, text, ha="center", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)
    load_pyplot().close(figure)
