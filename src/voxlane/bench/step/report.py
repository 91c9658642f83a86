"""Report of the step benchmark: tables, a result file and a plot."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxlane import __version__
from voxlane.bench.report import describe_run, format_table, load_pyplot, save_figure, summarize
from voxlane.bench.step.settings import VARIANTS, StepSettings

if TYPE_CHECKING:
    from voxlane.bench.step.measure import StepResult, VariantTimes

BENCHMARK = "voxlane bench step"
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
"""Statistic of the time that gives each statistic of the rate."""


def build_report(settings: StepSettings, result: StepResult) -> dict[str, Any]:
    """Return the content of the result file."""
    facts = describe_run(BENCHMARK, _LIBRARIES, commit=settings.commit)
    facts["versions"] = {"voxlane": __version__, **facts["versions"], **_find_cuda_versions()}
    return {
        **facts,
        "command": " ".join([BENCHMARK, *_find_flags(sys.argv)]),
        "setting": {**settings.to_json(), "device": result.device, "patch": list(result.patch)},
        "left_out": result.left_out,
        "floor": _compute_floor(result),
        "orders": result.orders,
        "summary": [_summarize_variant(variant, settings, result) for variant in result.variants],
        "samples": [
            {
                "variant": variant.name,
                "rounds_ms": variant.rounds_ms,
                "first_losses": [*map(_finite_or_none, variant.first_losses)],
            }
            for variant in result.variants
        ],
    }


def _find_flags(command: list[str]) -> list[str]:
    """Return the flags of the command line of this process, if it ran this benchmark, without those that say where the
    result goes and which commit it is."""
    words = command[3:] if command[1:3] == ["bench", "step"] else []
    words = command[1:] if Path(command[0]).parts[-2:] == ("step", "__main__.py") else words
    flags = []
    while words:
        word, *words = words
        if word in ("--out", "--commit"):
            words = words[1:]
        elif not word.startswith(("--out=", "--commit=")):
            flags.append(word)
    return flags


def _find_cuda_versions() -> dict[str, str]:
    import torch

    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    versions = {"cuda": torch.version.cuda, "cudnn": cudnn}
    return {name: str(version) for name, version in versions.items() if version}


def _compute_floor(result: StepResult) -> dict[str, Any]:
    kinds = {
        kind: {
            "flops": work.flops,
            "moved_bytes": work.moved_bytes,
            "arithmetic_ms": work.flops / result.matrix_flops_per_s * 1000,
            "traffic_ms": work.moved_bytes / result.copy_bytes_per_s * 1000,
        }
        for kind, work in result.work.items()
    }
    rates = {"matrix_flops_per_s": result.matrix_flops_per_s, "copy_bytes_per_s": result.copy_bytes_per_s}
    return {**rates, "kinds": kinds}


def _summarize_variant(variant: VariantTimes, settings: StepSettings, result: StepResult) -> dict[str, Any]:
    spec = VARIANTS[variant.name]
    row: dict[str, Any] = {"variant": variant.name, "kind": spec.kind, "about": spec.about, "notes": variant.notes}
    if variant.error is not None:
        return {**row, "error": variant.error}
    medians = [statistics.median(times) for times in variant.rounds_ms]
    floor_ms = result.work[spec.kind].flops / result.matrix_flops_per_s * 1000
    step_ms = summarize(medians)
    rates = {name: settings.batch / step_ms[source] * 1000 for name, source in _INVERSE.items()}
    row |= {
        "step_ms": step_ms,
        "patches_per_s": rates,
        "steps": sum(map(len, variant.rounds_ms)),
        "times_floor": step_ms["median"] / floor_ms,
        "first_s": variant.first_s,
        "peak_bytes": variant.peak_bytes,
        "held_bytes": variant.held_bytes,
        "first_loss": _finite_or_none(variant.first_losses[0]),
        "warm_loss": _finite_or_none(variant.first_losses[-1]),
        "last_loss": _finite_or_none(variant.last_loss),
        "finite": math.isfinite(variant.last_loss),
        "profile": None,
    }
    if variant.profile is not None:
        groups = variant.profile.groups_ms
        row["profile"] = {
            "groups_ms": {**groups, _IDLE: max(0.0, step_ms["median"] - sum(groups.values()))},
            "launches": variant.profile.launches,
            "kernels": variant.profile.kernels,
        }
    return row


def _finite_or_none(value: float) -> float | None:
    """Return None in position of NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def format_report(result: dict[str, Any]) -> str:
    """Return a description of what was measured, the tables and notes."""
    parts = [_describe(result), format_steps(result)]
    if any(row.get("profile") for row in result["summary"]):
        parts.append(format_profiles(result))
    notes = [f"{row['variant']}: {note}" for row in result["summary"] for note in row["notes"]]
    notes += [f"{name}: left out, {reason}" for name, reason in result["left_out"].items()]
    notes += [f"{row['variant']}: failed, {row['error']}" for row in result["summary"] if "error" in row]
    notes += [f"{row['variant']}: the loss is not finite" for row in result["summary"] if not row.get("finite", True)]
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def _describe(result: dict[str, Any]) -> str:
    settings, floor = result["setting"], result["floor"]
    patch = "x".join(map(str, settings["patch"]))
    lines = [
        f"{settings['device']}: a step of {settings['batch']} patches of {patch}, {settings['channels']} channels, "
        f"{settings['outputs']} outputs; medians of {settings['rounds']} rounds of {settings['steps']} steps, in turns",
        f"floor: {floor['matrix_flops_per_s'] / 1e12:,.3g} TFLOP/s of a matrix product, "
        f"{floor['copy_bytes_per_s'] / 1e12:,.3g} TB/s of a copy",
    ]
    for kind, work in floor["kinds"].items():
        lines.append(
            f"  {kind}: {work['flops'] / 1e12:,.3g} TFLOP of convolutions take {work['arithmetic_ms']:,.2f} ms, their "
            f"{work['moved_bytes'] / 1e9:,.3g} GB {work['traffic_ms']:,.2f} ms"
        )
    return "\n".join(lines)


def format_steps(result: dict[str, Any]) -> str:
    """Return a table with one line per variant."""
    header = ["variant", "ms per step", "min to max", "faster by", "patches/s", "x floor", "start-up s", "peak GiB"]
    rows = [[*header, "held GiB", "first loss", "last loss"]]
    for row in result["summary"]:
        if "error" in row:
            rows.append([row["variant"], "failed", *["-"] * 9])
            continue
        ms = row["step_ms"]
        first = next(other for other in result["summary"] if other["kind"] == row["kind"])
        cells = [row["variant"], f"{ms['median']:.2f}", f"{ms['min']:.2f} to {ms['max']:.2f}"]
        cells += [
            "-" if "error" in first else "" if first is row else f"{first['step_ms']['median'] / ms['median']:.2f}x"
        ]
        cells += [f"{row['patches_per_s']['median']:.1f}", f"{row['times_floor']:.2f}", f"{row['first_s']:.1f}"]
        cells += ["-" if row[name] is None else f"{row[name] / _GIB:.2f}" for name in ("peak_bytes", "held_bytes")]
        cells += ["-" if row[name] is None else f"{row[name]:.4f}" for name in ("first_loss", "last_loss")]
        rows.append(cells)
    return format_table(rows)


def format_profiles(result: dict[str, Any]) -> str:
    """Return a table of milliseconds per step by group, with their share."""
    profiled = [row for row in result["summary"] if row.get("profile")]
    rows = [["ms per step (share)", *(row["variant"] for row in profiled)]]
    for group in profiled[0]["profile"]["groups_ms"]:
        cells = []
        for row in profiled:
            groups = row["profile"]["groups_ms"]
            cells.append(f"{groups[group]:.2f} ({groups[group] / max(sum(groups.values()), 1e-9):4.0%})")
        rows.append([group, *cells])
    rows.append(["kernels per step", *(f"{row['profile']['launches']:,.0f}" for row in profiled)])
    return format_table(rows)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a bar of milliseconds by group for each variant, with the floor as a line."""
    rows = [row for row in result["summary"] if "error" not in row]
    settings = result["setting"]
    figure, axes = load_pyplot().subplots(figsize=(9, 1.6 + 0.55 * max(len(rows), 1)))
    used: set[str] = set()
    for position, row in enumerate(rows):
        ms = row["step_ms"]["median"]
        groups = row["profile"]["groups_ms"] if row["profile"] else {"other": ms}
        # Profiling slows a step a little: groups are scaled to the time measured without it.
        scale, left = ms / max(sum(groups.values()), 1e-9), 0.0
        for group, part in groups.items():
            label = None if group in used or not row["profile"] else group
            used.add(group)
            axes.barh(position, part * scale, left=left, color=_COLOURS[group], label=label, height=0.7)
            left += part * scale
        floor = result["floor"]["kinds"][row["kind"]]["arithmetic_ms"]
        label = "convolutions at the matrix rate" if position == 0 else None
        axes.plot([floor, floor], [position - 0.42, position + 0.42], color="black", linewidth=2, label=label)
        axes.text(ms, position, f" {ms:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.margins(x=0.1)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    patch = "x".join(map(str, settings["patch"]))
    axes.set_title(f"a training step of {settings['batch']} patches of {patch}, {settings['device']}", fontsize=10)
    save_figure(figure, path)
