"""What a benchmark of a training step found: tables, a result file and a plot."""

from __future__ import annotations

import datetime
import json
import math
import platform
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxlane import __version__
from voxlane.bench import report
from voxlane.bench.scaling_report import aligned, spread
from voxlane.bench.step_setting import WAYS
from voxlane.errors import ConfigError

if TYPE_CHECKING:
    from voxlane.bench.step import Measured, Outcome
    from voxlane.bench.step_setting import StepSetting

_LIBRARIES = ("torch", "triton", "dynamic-network-architectures", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_COLOURS = {
    "convolution": "#30638e",
    "norm+activation": "#d1495b",
    "layout copies": "#edae49",
    "concatenation": "#66a182",
    "loss": "#8d6a9f",
    "optimizer": "#00798c",
    "other": "#8d99ae",
    "between kernels": "#e5e5e5",
}
_IDLE = "between kernels"
_GIB = 2**30
_INVERSE = {"median": "median", "min": "max", "max": "min"}
"""Which time gives which rate."""


def document(setting: StepSetting, outcome: Outcome, *, commit: str | None = None) -> dict[str, Any]:
    """All that is known, as plain data."""
    return {
        "benchmark": "voxlane bench step",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or report.commit(),
        "command": " ".join(["voxlane bench step", *_words(sys.argv)]),
        "hardware": report.hardware(),
        "python": platform.python_version(),
        "versions": {"voxlane": __version__, **report.versions(_LIBRARIES), **_cuda()},
        "setting": {**setting.to_json(), "device": outcome.device, "patch": list(outcome.patch)},
        "left_out": outcome.left_out,
        "floor": _floor(outcome),
        "orders": outcome.orders,
        "summary": [_row(each, setting, outcome) for each in outcome.variants],
        "samples": [
            {"variant": each.name, "rounds_ms": each.rounds_ms, "first_losses": [*map(_plain, each.first_losses)]}
            for each in outcome.variants
        ],
    }


def _words(command: list[str]) -> list[str]:
    """The flags of the command line that this process was started by, if it was started by one, but for where the
    result goes, which is nobody else's matter."""
    words = command[3:] if command[1:3] == ["bench", "step"] else []
    words = command[1:] if Path(command[0]).name == "step.py" else words
    told = []
    while words:
        word, *words = words
        if word in ("--out", "--commit"):
            words = words[1:]
        elif not word.startswith(("--out=", "--commit=")):
            told.append(word)
    return told


def _cuda() -> dict[str, str]:
    import torch

    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    found = {"cuda": torch.version.cuda, "cudnn": cudnn}
    return {name: str(version) for name, version in found.items() if version}


def _floor(outcome: Outcome) -> dict[str, Any]:
    kinds = {
        kind: {
            "flops": work.flops,
            "moved_bytes": work.moved_bytes,
            "arithmetic_ms": work.flops / outcome.matrix_flops_per_s * 1000,
            "traffic_ms": work.moved_bytes / outcome.copy_bytes_per_s * 1000,
        }
        for kind, work in outcome.work.items()
    }
    rates = {"matrix_flops_per_s": outcome.matrix_flops_per_s, "copy_bytes_per_s": outcome.copy_bytes_per_s}
    return {**rates, "kinds": kinds}


def _row(found: Measured, setting: StepSetting, outcome: Outcome) -> dict[str, Any]:
    way = WAYS[found.name]
    row: dict[str, Any] = {"variant": found.name, "kind": way.kind, "about": way.about, "notes": found.notes}
    if found.error is not None:
        return {**row, "error": found.error}
    medians = [statistics.median(times) for times in found.rounds_ms]
    floor_ms = outcome.work[way.kind].flops / outcome.matrix_flops_per_s * 1000
    step_ms = spread(medians)
    rates = {name: setting.batch / step_ms[of] * 1000 for name, of in _INVERSE.items()}
    row |= {
        "step_ms": step_ms,
        "patches_per_s": rates,
        "steps": sum(map(len, found.rounds_ms)),
        "times_floor": step_ms["median"] / floor_ms,
        "first_s": found.first_s,
        "peak_bytes": found.peak_bytes,
        "held_bytes": found.held_bytes,
        "first_loss": _plain(found.first_losses[0]),
        "warm_loss": _plain(found.first_losses[-1]),
        "last_loss": _plain(found.last_loss),
        "finite": math.isfinite(found.last_loss),
        "profile": None,
    }
    if found.profile is not None:
        groups = found.profile.groups_ms
        row["profile"] = {
            "groups_ms": {**groups, _IDLE: max(0.0, step_ms["median"] - sum(groups.values()))},
            "launches": found.profile.launches,
            "kernels": found.profile.kernels,
        }
    return row


def _plain(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def text(result: dict[str, Any]) -> str:
    """The tables, and what was measured, in words."""
    parts = [_about(result), steps_table(result)]
    if any(row.get("profile") for row in result["summary"]):
        parts.append(profile_table(result))
    notes = [f"{row['variant']}: {note}" for row in result["summary"] for note in row["notes"]]
    notes += [f"{name}: left out, {why}" for name, why in result["left_out"].items()]
    notes += [f"{row['variant']}: failed, {row['error']}" for row in result["summary"] if "error" in row]
    notes += [f"{row['variant']}: the loss is not finite" for row in result["summary"] if not row.get("finite", True)]
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def _about(result: dict[str, Any]) -> str:
    setting, floor = result["setting"], result["floor"]
    patch = "x".join(map(str, setting["patch"]))
    lines = [
        f"{setting['device']}: a step of {setting['batch']} patches of {patch}, {setting['channels']} channels, "
        f"{setting['outputs']} outputs; medians of {setting['rounds']} rounds of {setting['steps']} steps, in turns",
        f"floor: {floor['matrix_flops_per_s'] / 1e12:,.3g} TFLOP/s of a matrix product, "
        f"{floor['copy_bytes_per_s'] / 1e12:,.3g} TB/s of a copy",
    ]
    for kind, work in floor["kinds"].items():
        lines.append(
            f"  {kind}: {work['flops'] / 1e12:,.3g} TFLOP of convolutions take {work['arithmetic_ms']:,.2f} ms, their "
            f"{work['moved_bytes'] / 1e9:,.3g} GB {work['traffic_ms']:,.2f} ms"
        )
    return "\n".join(lines)


def steps_table(result: dict[str, Any]) -> str:
    """One line a variant."""
    header = ["variant", "ms a step", "min to max", "faster by", "patches/s", "x floor", "start-up s", "peak GiB"]
    rows = [[*header, "held GiB", "first loss", "last loss"]]
    for row in result["summary"]:
        if "error" in row:
            rows.append([row["variant"], "failed", *["-"] * 9])
            continue
        ms = row["step_ms"]
        first = _first_of(result, row["kind"])
        cells = [row["variant"], f"{ms['median']:.2f}", f"{ms['min']:.2f} to {ms['max']:.2f}"]
        cells += ["-" if first is None else "" if first is row else f"{first['step_ms']['median'] / ms['median']:.2f}x"]
        cells += [f"{row['patches_per_s']['median']:.1f}", f"{row['times_floor']:.2f}", f"{row['first_s']:.1f}"]
        cells += ["-" if row[name] is None else f"{row[name] / _GIB:.2f}" for name in ("peak_bytes", "held_bytes")]
        cells += ["-" if row[name] is None else f"{row[name]:.4f}" for name in ("first_loss", "last_loss")]
        rows.append(cells)
    return aligned(rows)


def _first_of(result: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """What the others of a kind are compared with; None: it failed."""
    first: dict[str, Any] = next(row for row in result["summary"] if row["kind"] == kind)
    return None if "error" in first else first


def profile_table(result: dict[str, Any]) -> str:
    """Milliseconds of a step by group, with their share, one line a group."""
    told = [row for row in result["summary"] if row.get("profile")]
    rows = [["ms a step (share)", *(row["variant"] for row in told)]]
    for group in told[0]["profile"]["groups_ms"]:
        cells = []
        for row in told:
            groups = row["profile"]["groups_ms"]
            cells.append(f"{groups[group]:.2f} ({groups[group] / max(sum(groups.values()), 1e-9):4.0%})")
        rows.append([group, *cells])
    rows.append(["kernels a step", *(f"{row['profile']['launches']:,.0f}" for row in told)])
    return aligned(rows)


def draw_again(path: Path) -> Path:
    """The plot of a result file, beside it; returns where."""
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", uri=str(path)) from None
    except ValueError:
        result = None
    if not isinstance(result, dict) or result.get("benchmark") != "voxlane bench step":
        raise ConfigError("is no result file of voxlane bench step", uri=str(path))
    picture = path.with_suffix(".png")
    draw(result, picture)
    return picture


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars of milliseconds by part, one a variant; the floor as a line under each kind."""
    import matplotlib

    matplotlib.use("Agg")  # no display on servers
    import matplotlib.pyplot as plt

    rows = [row for row in result["summary"] if "error" not in row]
    setting = result["setting"]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.55 * max(len(rows), 1)))
    used: set[str] = set()
    for place, row in enumerate(rows):
        ms = row["step_ms"]["median"]
        groups = row["profile"]["groups_ms"] if row["profile"] else {"other": ms}
        # Profiling slows a step a little: parts are drawn to the length that was measured without it.
        scale, left = ms / max(sum(groups.values()), 1e-9), 0.0
        for group, part in groups.items():
            label = None if group in used or not row["profile"] else group
            used.add(group)
            axes.barh(place, part * scale, left=left, color=_COLOURS[group], label=label, height=0.7)
            left += part * scale
        floor = result["floor"]["kinds"][row["kind"]]["arithmetic_ms"]
        label = "convolutions at the matrix rate" if place == 0 else None
        axes.plot([floor, floor], [place - 0.42, place + 0.42], color="black", linewidth=2, label=label)
        axes.text(ms, place, f" {ms:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.margins(x=0.1)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    patch = "x".join(map(str, setting["patch"]))
    axes.set_title(f"a training step of {setting['batch']} patches of {patch}, {setting['device']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
