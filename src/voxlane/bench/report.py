"""What a checkpoint benchmark found: a table, a result file and a plot; and what every benchmark says of itself."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxlane.bench.setting import Setting
from voxlane.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from voxlane.bench.checkpoint import Outcome

_LIBRARIES = ("voxlane", "torch", "obstore", "fsspec", "s3fs", "gcsfs", "adlfs")
_COLOURS = {"voxlane": "#d1495b", "fsspec": "#30638e", "filesystem": "#8d99ae"}


def check_writable(out: Path, *, plot: bool) -> None:
    """Raise now, not after the measurements, if the results could not be written."""
    existed = out.exists()
    try:
        with open(out, "ab"):
            pass
        if not existed:
            out.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write the result file here: {error.strerror}",
            uri=str(out),
            fix="Give --out FILE in a folder of yours",
        ) from None
    if plot and out.suffix == ".png":
        raise ConfigError("the result file is JSON", uri=str(out), fix="Give --out FILE.json; the plot lies beside it")
    check_plot(plot=plot)


def check_plot(*, plot: bool) -> None:
    """Raise now if a plot is wanted and cannot be drawn."""
    if plot and find_spec("matplotlib") is None:
        raise MissingExtraError.of("bench", "the plot (leave it out with --no-plot)")


def document(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    """All that is known, as plain data."""
    return {
        "benchmark": "voxlane bench checkpoint",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "python": platform.python_version(),
        "versions": versions(_LIBRARIES),
        "setting": {**setting.to_json(), "device": outcome.device},
        "checkpoint_bytes": outcome.checkpoint_bytes,
        "summary": _summary(outcome),
        "calls": [vars(call) for call in outcome.calls],
    }


def table(result: dict[str, Any]) -> str:
    """The summary as aligned text."""
    header = ["strategy", "operation", "calls", "mean s", "stdev", "min to max s", "MB/s", "checkpoint MB"]
    header += ["peak extra MB/rank"]
    rows = [header]
    for row in result["summary"]:
        extra = "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:,.0f}"
        cells = [row["strategy"], row["operation"], str(row["calls"]), f"{row['mean_s']:.3f}", f"{row['stdev_s']:.3f}"]
        cells += [f"{row['min_s']:.3f} to {row['max_s']:.3f}", f"{row['bytes_per_s'] / 1e6:,.1f}"]
        rows.append([*cells, f"{result['checkpoint_bytes'] / 1e6:,.1f}", extra])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return "\n".join(_line(row, widths) for row in rows)


def save(
    result: dict[str, Any], out: Path, *, plot: bool, draw: Callable[[dict[str, Any], Path], None] | None = None
) -> list[Path]:
    """Write the result file and, beside it, the plot that `draw` makes; returns what was written."""
    out.write_text(json.dumps(result, indent=1) + "\n")
    if not plot:
        return [out]
    picture = out.with_suffix(".png")
    (draw or _draw)(result, picture)
    return [out, picture]


def _summary(outcome: Outcome) -> list[dict[str, Any]]:
    rows = []
    for strategy, operation in dict.fromkeys((call.strategy, call.operation) for call in outcome.calls):
        calls = [call for call in outcome.calls if (call.strategy, call.operation) == (strategy, operation)]
        times = [call.seconds for call in calls]
        extra = [call.extra_bytes for call in calls if call.extra_bytes is not None]
        rows.append(
            {
                "strategy": strategy,
                "operation": operation,
                "calls": len(calls),
                "mean_s": statistics.mean(times),
                "stdev_s": statistics.stdev(times) if len(times) > 1 else 0.0,
                "min_s": min(times),
                "max_s": max(times),
                "bytes_per_s": outcome.checkpoint_bytes / statistics.mean(times),
                "extra_bytes": max(extra, default=None),
            }
        )
    return rows


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    names = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    return "  ".join([*names, *padded[2:]])


def _draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display on servers
    import matplotlib.pyplot as plt

    setting = result["setting"]
    operations = list(dict.fromkeys(row["operation"] for row in result["summary"]))
    figure, panels = plt.subplots(1, len(operations), figsize=(4.5 * len(operations), 4), squeeze=False)
    for axes, operation in zip(panels[0], operations, strict=True):
        rows = [row for row in result["summary"] if row["operation"] == operation]
        names = [row["strategy"] for row in rows]
        speeds = [row["bytes_per_s"] / 1e6 for row in rows]
        bars = axes.bar(names, speeds, color=[_COLOURS[name] for name in names])
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], label_type="center", color="white")
        for place, name in enumerate(names):
            calls = [c for c in result["calls"] if (c["strategy"], c["operation"]) == (name, operation)]
            each = [result["checkpoint_bytes"] / call["seconds"] / 1e6 for call in calls]
            axes.plot([place] * len(each), each, "k_", markersize=14)
        axes.set_title(operation)
        axes.set_ylabel("MB/s (bar: mean, lines: each call)")
        axes.margins(y=0.15)
    megabytes = result["checkpoint_bytes"] / 1e6
    figure.suptitle(f"{setting['format']} checkpoint, {megabytes:,.0f} MB, {setting['num_ranks']} ranks")
    machine = result["hardware"]
    figure.text(0.5, 0.01, f"{machine['cpu']}, {machine['cores']} cores", ha="center", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def hardware() -> dict[str, Any]:
    """The machine this runs on."""
    import torch

    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    facts: dict[str, Any] = {"cpu": found[1] if found else platform.machine(), "cores": os.cpu_count()}
    if hasattr(os, "sysconf"):
        facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def versions(names: Sequence[str]) -> dict[str, str]:
    """Of those packages that are installed."""
    return {name: version for name in names if (version := _version(name))}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the source tree this runs from; None when it was installed."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if "site-packages" not in __file__ else None
