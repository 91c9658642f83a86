"""Report of the scaling benchmark: tables, a result file and a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxlane.bench.report import (
    Column,
    compute_percentiles,
    describe_run,
    find_error_bars,
    format_rows,
    load_pyplot,
    median_or_none,
    save_figure,
    summarize,
)

if TYPE_CHECKING:
    from voxlane.bench.scaling.measure import PointTimes, SearchTimes
    from voxlane.bench.scaling.settings import Mode, ScalingSettings

_LIBRARIES = ("voxlane", "torch", "lightning", "ray", "optuna", "obstore")
_COLOURS = {"weak": "#d1495b", "strong": "#30638e"}
_EFFICIENCY: tuple[Column, ...] = (
    ("efficiency", "{efficiency[median]:.3f}"),
    ("min to max", "{efficiency[min]:.3f} to {efficiency[max]:.3f}"),
)


def build_report(
    settings: ScalingSettings, points: Sequence[PointTimes], searches: Sequence[SearchTimes], facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of the result file."""
    return {
        **describe_run("voxlane bench scaling", _LIBRARIES),
        "setting": settings.to_json(),
        "facts": facts,
        "workers": [row for mode in settings.modes for row in summarize_workers(settings, mode, points)],
        "trials": summarize_searches(searches),
        "measured": [vars(times) for times in points],
        "searches": [vars(times) for times in searches],
    }


def summarize_workers(settings: ScalingSettings, mode: Mode, points: Sequence[PointTimes]) -> list[dict[str, Any]]:
    """Return a row per number of workers: medians over repetitions, with minimum and maximum. Each repetition is
    compared with the fewest workers of the same repetition, which cancels a drift of the machine."""
    by_point: dict[tuple[int, int], dict[int, PointTimes]] = {}
    for times in points:
        by_point.setdefault((times.workers, times.batch), {})[times.repetition] = times
    if not settings.workers:
        return []
    fewest = settings.workers[0]
    base = by_point[fewest, settings.batch_per_worker(mode, fewest)]
    rows = []
    for workers in settings.workers:
        repetitions = by_point[workers, settings.batch_per_worker(mode, workers)]
        speed_up = [fewest * m.patches_per_s / base[r].patches_per_s for r, m in repetitions.items()]
        rows.append({"mode": mode, **_summarize_point(settings, list(repetitions.values()), speed_up)})
    return rows


def _summarize_point(
    settings: ScalingSettings, repetitions: Sequence[PointTimes], speed_up: Sequence[float]
) -> dict[str, Any]:
    first = repetitions[0]
    row: dict[str, Any] = {
        "workers": first.workers,
        "batch": first.batch,
        "repetitions": len(repetitions),
        **_summarize_fields(repetitions, ("patches_per_s",)),
        "speed_up": summarize(speed_up),
        "efficiency": summarize([value / first.workers for value in speed_up]),
        "step_s": compute_percentiles([seconds for times in repetitions for seconds in times.steps_s]),
        "wait_share": median_or_none(times.wait_s / times.steady_s for times in repetitions),
        "start_s": summarize([times.launch_s + times.setup_s for times in repetitions]),
        **_summarize_fields(repetitions, ("launch_s", "first_s", "total_s")),
        "load_1m": max(times.load_1m for times in repetitions),
        "exposed_share": median_or_none(t.exposed_s and t.exposed_s / t.steady_s for t in repetitions),
        "processors_used": median_or_none(t.cpu_s and t.cpu_s / t.steady_s for t in repetitions),
    }
    if settings.target_dice is not None:
        reached_s = [s for times in repetitions if (s := times.seconds_to(settings.target_dice)) is not None]
        row["to_dice_s"] = summarize(reached_s) if len(reached_s) == len(repetitions) else None
        row["reached"] = len(reached_s)
    if settings.real:
        row["best_dice"] = max((dice for times in repetitions for _, dice in times.dice), default=None)
    return row


def _summarize_fields(repetitions: Sequence[PointTimes | SearchTimes], names: Sequence[str]) -> dict[str, Any]:
    return {name: summarize([getattr(times, name) for times in repetitions]) for name in names}


def summarize_searches(searches: Sequence[SearchTimes]) -> list[dict[str, Any]]:
    """Return a row per number of trials at once: medians over repetitions, with minimum and maximum."""
    rows = []
    for concurrent in sorted({search.concurrent for search in searches}):
        repetitions = [search for search in searches if search.concurrent == concurrent]
        first = repetitions[0]
        rows.append(
            {
                "concurrent": concurrent,
                "trials": first.trials,
                "repetitions": len(repetitions),
                "trial_s": first.trial_s,
                "ideal_s": math.ceil(first.trials / concurrent) * first.trial_s,
                **_summarize_fields(repetitions, ("makespan_s", "efficiency", "overhead_s", "first_s", "total_s")),
            }
        )
    return rows


def format_report(result: dict[str, Any]) -> str:
    """Return a description of what was measured, and the summaries as tables."""
    parts = []
    if result["workers"]:
        parts += [_describe(result), _format_workers(result)]
    if result["trials"]:
        parts.append(_format_searches(result))
    return "\n\n".join(parts)


def _describe(result: dict[str, Any]) -> str:
    facts, settings = result["facts"], result["setting"]
    patch = "x".join(map(str, facts["patch"]))
    gradients = f"{facts['gradient_bytes'] / 1e6:.1f} MB of gradients"
    if settings["real"]:
        return f"real training: patches of {patch}, {gradients}, {facts['data']}"
    return (
        f"simulated accelerator: {settings['step_time_s']:g} s per step of {settings['batch']} patches; real "
        f"patches of {patch}, {gradients} averaged by gloo in buckets of {facts['bucket_mb']:g} MB"
    )


def _format_workers(result: dict[str, Any]) -> str:
    real, target = result["setting"]["real"], result["setting"]["target_dice"]
    columns: list[Column] = [
        ("mode", "{mode}"),
        ("workers", "{workers}"),
        ("batch/worker", "{batch}"),
        ("patches/s", "{patches_per_s[median]:.1f}"),
        ("min to max", "{patches_per_s[min]:.1f} to {patches_per_s[max]:.1f}"),
        ("speed-up", "{speed_up[median]:.2f}"),
        *_EFFICIENCY,
        ("start-up s", "{start_s[median]:.1f}"),
        ("waiting for patches", "{wait_share:.1%}"),
    ]
    if not real:
        columns += [
            ("gradients", "{exposed_share:.1%}"),
            ("step ms", lambda row: f"{row['step_s']['median'] * 1e3:.0f}"),
            ("p10 to p90", lambda row: f"{row['step_s']['p10'] * 1e3:.0f} to {row['step_s']['p90'] * 1e3:.0f}"),
            ("CPUs used", "{processors_used:.2f}"),
        ]
    if target is not None:
        title = f"s to Dice {target:g}"
        columns.append((title, lambda row: f"{row['to_dice_s']['median']:.0f}" if row["to_dice_s"] else "never"))
    if real:
        columns.append(("best Dice", lambda row: "-" if row["best_dice"] is None else f"{row['best_dice']:.3f}"))
    return format_rows(columns, result["workers"])


def _format_searches(result: dict[str, Any]) -> str:
    columns: list[Column] = [
        ("trials", "{trials}"),
        ("at once", "{concurrent}"),
        ("makespan s", "{makespan_s[median]:.1f}"),
        ("ideal s", "{ideal_s:.1f}"),
        *_EFFICIENCY,
        ("overhead s/trial", "{overhead_s[median]:.2f}"),
    ]
    return format_rows(columns, result["trials"])


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw speed, efficiency, time to Dice and makespans, as far as they were measured."""
    settings = result["setting"]
    panels: list[Callable[[Any], None]] = []
    if result["workers"]:
        panels.append(lambda axes: _draw_lines(axes, result, "patches_per_s", "speed", "patches/s"))
        panels.append(lambda axes: _draw_lines(axes, result, "efficiency", "efficiency", "speed-up / workers"))
    if any(row.get("to_dice_s") for row in result["workers"]):
        dice_title = f"time to Dice {settings['target_dice']:g}"
        panels.append(lambda axes: _draw_lines(axes, result, "to_dice_s", dice_title, "seconds of training"))
    if result["trials"]:
        panels.append(lambda axes: _draw_trials(axes, result["trials"]))
    figure, axes = load_pyplot().subplots(1, len(panels), figsize=(4.6 * len(panels), 4), squeeze=False)
    for draw_panel, panel in zip(panels, axes[0], strict=True):
        draw_panel(panel)
    title = "real training" if settings["real"] else f"simulated accelerator, {settings['step_time_s']:g} s per step"
    figure.suptitle(title if result["workers"] else "trials of a search")
    save_figure(figure, path, result["hardware"])


def _draw_lines(axes: Any, result: dict[str, Any], field: str, title: str, label: str) -> None:
    """Draw a field by the number of workers, a line per mode."""
    counts = sorted({row["workers"] for row in result["workers"]})
    for mode in dict.fromkeys(row["mode"] for row in result["workers"]):
        colour = _COLOURS[mode]
        rows = [row for row in result["workers"] if row["mode"] == mode and row[field]]
        medians, errors = find_error_bars(rows, field)
        workers = [row["workers"] for row in rows]
        if rows:
            axes.errorbar(workers, medians, yerr=errors, marker="o", capsize=3, color=colour, label=mode)
        if field == "patches_per_s":
            ideal = [medians[0] / workers[0] * count for count in counts]
            axes.plot(counts, ideal, "--", color=colour, alpha=0.5, label=f"{mode}, ideal")
    if field == "patches_per_s":
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    elif field == "efficiency":
        axes.axhline(1.0, linestyle="--", color="black", alpha=0.4)
        axes.set_ylim(0, 1.1)
    else:
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_title(title)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_trials(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    positions = range(len(rows))
    medians = [row["makespan_s"]["median"] for row in rows]
    bars = axes.bar(positions, medians, 0.6, color=_COLOURS["weak"], label="measured")
    axes.bar_label(bars, [f"efficiency {row['efficiency']['median']:.2f}" for row in rows], padding=2, fontsize=8)
    for position, row in zip(positions, rows, strict=True):
        label = "ideal" if position == 0 else None
        axes.plot([position - 0.3, position + 0.3], [row["ideal_s"]] * 2, "--", color="black", label=label)
    axes.set_xticks(list(positions), [str(row["concurrent"]) for row in rows])
    axes.set_xlabel("trials at once")
    axes.set_ylabel("makespan, s")
    axes.set_title(f"{rows[0]['trials']} trials of {rows[0]['trial_s']:g} s")
    axes.margins(y=0.15)
    axes.legend(fontsize=8, loc="upper right")
