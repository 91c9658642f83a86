"""What a scaling benchmark found: tables, a result file and a plot."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxlane.bench import report

if TYPE_CHECKING:
    from voxlane.bench.scaling import Measured, Outcome
    from voxlane.bench.scaling_setting import Mode, ScalingSetting
    from voxlane.bench.scaling_trials import Searched

_LIBRARIES = ("voxlane", "torch", "lightning", "ray", "optuna", "obstore")
_COLOURS = {"weak": "#d1495b", "strong": "#30638e"}


def document(setting: ScalingSetting, outcome: Outcome) -> dict[str, Any]:
    """All that is known, as plain data."""
    return {
        "benchmark": "voxlane bench scaling",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": report.commit(),
        "hardware": report.hardware(),
        "python": platform.python_version(),
        "versions": report.versions(_LIBRARIES),
        "setting": setting.to_json(),
        "facts": outcome.facts,
        "workers": [row for mode in setting.modes for row in summary(setting, mode, outcome.measured)],
        "trials": trials_summary(outcome.searches),
        "measured": [vars(each) for each in outcome.measured],
        "searches": [vars(each) for each in outcome.searches],
    }


def summary(setting: ScalingSetting, mode: Mode, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One row a number of workers: medians over repetitions, with least and most. Each repetition is compared with the
    fewest workers of the same repetition, so that a drift of the machine falls out."""
    rows: list[dict[str, Any]] = []
    by_point: dict[tuple[int, int], dict[int, Measured]] = {}
    for each in measured:
        by_point.setdefault((each.workers, each.batch), {})[each.repetition] = each
    if not setting.workers:
        return rows
    fewest = setting.workers[0]
    base = by_point[fewest, setting.batch_of(mode, fewest)]
    for workers in setting.workers:
        batch = setting.batch_of(mode, workers)
        found = by_point[workers, batch]
        speed_up = [fewest * m.patches_per_s / base[r].patches_per_s for r, m in found.items()]
        steps = [seconds for m in found.values() for seconds in m.steps_s]
        row: dict[str, Any] = {
            "mode": mode,
            "workers": workers,
            "batch": batch,
            "repetitions": len(found),
            "patches_per_s": spread([m.patches_per_s for m in found.values()]),
            "speed_up": spread(speed_up),
            "efficiency": spread([value / workers for value in speed_up]),
            "step_s": percentiles(steps),
            "wait_share": statistics.median(m.wait_s / m.steady_s for m in found.values()),
            "start_s": spread([m.launch_s + m.setup_s for m in found.values()]),
            "launch_s": spread([m.launch_s for m in found.values()]),
            "first_s": spread([m.first_s for m in found.values()]),
            "total_s": spread([m.total_s for m in found.values()]),
            "load_1m": max(m.load_1m for m in found.values()),
        }
        late = [m.exposed_s / m.steady_s for m in found.values() if m.exposed_s is not None]
        row["exposed_share"] = statistics.median(late) if late else None
        used = [m.cpu_s / m.steady_s for m in found.values() if m.cpu_s is not None]
        row["processors_used"] = statistics.median(used) if used else None
        if setting.target_dice is not None:
            times = [m.seconds_to(setting.target_dice) for m in found.values()]
            reached = [seconds for seconds in times if seconds is not None]
            row["to_dice_s"] = spread(reached) if len(reached) == len(times) else None
            row["reached"] = len(reached)
        if setting.real:
            row["best_dice"] = max((dice for m in found.values() for _, dice in m.dice), default=None)
        rows.append(row)
    return rows


def trials_summary(searches: Sequence[Searched]) -> list[dict[str, Any]]:
    """One row a number of trials at once: medians over repetitions, with least and most."""
    rows = []
    for concurrent in sorted({each.concurrent for each in searches}):
        found = [each for each in searches if each.concurrent == concurrent]
        first = found[0]
        rows.append(
            {
                "concurrent": concurrent,
                "trials": first.trials,
                "repetitions": len(found),
                "trial_s": first.trial_s,
                "ideal_s": math.ceil(first.trials / concurrent) * first.trial_s,
                "makespan_s": spread([each.makespan_s for each in found]),
                "efficiency": spread([each.efficiency for each in found]),
                "overhead_s": spread([each.overhead_s for each in found]),
                "first_s": spread([each.first_s for each in found]),
                "total_s": spread([each.total_s for each in found]),
            }
        )
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and the 10th and 90th percentile; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = {"p10": 0.1, "median": 0.5, "p90": 0.9}
    return {name: ordered[round(share * (len(ordered) - 1))] for name, share in at.items()}


def tables(result: dict[str, Any]) -> str:
    """The summaries as aligned text, and what was measured, in words."""
    parts = []
    if result["workers"]:
        parts += [_about(result), _workers_table(result)]
    if result["trials"]:
        parts.append(_trials_table(result))
    return "\n\n".join(parts)


def _about(result: dict[str, Any]) -> str:
    facts, setting = result["facts"], result["setting"]
    patch = "x".join(map(str, facts["patch"]))
    gradients = f"{facts['gradient_bytes'] / 1e6:.1f} MB of gradients"
    if setting["real"]:
        return f"real training: patches of {patch}, {gradients}, {facts['data']}"
    return (
        f"simulated accelerator: {setting['step_time_s']:g} s a step of {setting['batch']} patches; real patches of "
        f"{patch}, {gradients} averaged by gloo in buckets of {facts['bucket_mb']:g} MB"
    )


def _workers_table(result: dict[str, Any]) -> str:
    real, target = result["setting"]["real"], result["setting"]["target_dice"]
    header = ["mode", "workers", "batch/worker", "patches/s", "min to max", "speed-up", "efficiency", "min to max"]
    header += ["start-up s", "patches waited for"]
    header += [] if real else ["gradients", "step ms", "p10 to p90", "CPUs used"]
    header += [f"s to Dice {target:g}"] if target is not None else []
    header += ["best Dice"] if real else []
    rows = [header]
    for row in result["workers"]:
        rate, share, step = row["patches_per_s"], row["efficiency"], row["step_s"]
        cells = [row["mode"], str(row["workers"]), str(row["batch"]), f"{rate['median']:.1f}"]
        cells += [f"{rate['min']:.1f} to {rate['max']:.1f}", f"{row['speed_up']['median']:.2f}"]
        cells += [f"{share['median']:.3f}", f"{share['min']:.3f} to {share['max']:.3f}"]
        cells += [f"{row['start_s']['median']:.1f}", f"{row['wait_share']:.1%}"]
        if not real:
            cells += [f"{row['exposed_share']:.1%}"]
            cells += [f"{step['median'] * 1e3:.0f}", f"{step['p10'] * 1e3:.0f} to {step['p90'] * 1e3:.0f}"]
            cells += [f"{row['processors_used']:.2f}"]
        if target is not None:
            cells += [f"{row['to_dice_s']['median']:.0f}" if row["to_dice_s"] else "never"]
        if real:
            cells += ["-" if row["best_dice"] is None else f"{row['best_dice']:.3f}"]
        rows.append(cells)
    return aligned(rows)


def _trials_table(result: dict[str, Any]) -> str:
    header = ["trials", "at once", "makespan s", "ideal s", "efficiency", "min to max", "overhead s/trial"]
    rows = [header]
    for row in result["trials"]:
        share = row["efficiency"]
        rows.append(
            [
                *(str(row["trials"]), str(row["concurrent"]), f"{row['makespan_s']['median']:.1f}"),
                *(f"{row['ideal_s']:.1f}", f"{share['median']:.3f}", f"{share['min']:.3f} to {share['max']:.3f}"),
                f"{row['overhead_s']['median']:.2f}",
            ]
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first is words, the others numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def save(result: dict[str, Any], out: Path, *, plot: bool) -> list[Path]:
    """Write the result file and, beside it, the plot; returns what was written."""
    return report.save(result, out, plot=plot, draw=draw)


def draw(result: dict[str, Any], path: Path) -> None:
    """The figure of a result."""
    import matplotlib

    matplotlib.use("Agg")  # no display on servers
    import matplotlib.pyplot as plt

    setting = result["setting"]
    panels: list[Any] = []
    if result["workers"]:
        panels += [_draw_speed, _draw_efficiency]
    if any(row.get("to_dice_s") for row in result["workers"]):
        panels.append(_draw_dice)
    if result["trials"]:
        panels.append(_draw_trials)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 4), squeeze=False)
    for panel, place in zip(panels, axes[0], strict=True):
        panel(place, result)
    what = "real training" if setting["real"] else f"simulated accelerator, {setting['step_time_s']:g} s a step"
    figure.suptitle(what if result["workers"] else "trials of a search")
    machine = result["hardware"]
    figure.text(0.5, 0.01, f"{machine['cpu']}, {machine['cores']} cores", ha="center", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _by_mode(result: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    modes = dict.fromkeys(row["mode"] for row in result["workers"])
    return [(mode, [row for row in result["workers"] if row["mode"] == mode]) for mode in modes]


def _line(axes: Any, rows: Sequence[dict[str, Any]], field: str, mode: str) -> None:
    at = [row["workers"] for row in rows]
    middle = [row[field]["median"] for row in rows]
    errors = [
        [m - row[field]["min"] for m, row in zip(middle, rows, strict=True)],
        [row[field]["max"] - m for m, row in zip(middle, rows, strict=True)],
    ]
    axes.errorbar(at, middle, yerr=errors, marker="o", capsize=3, color=_COLOURS[mode], label=mode)


def _counted(axes: Any, counts: Sequence[int], title: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(counts), [str(n) for n in counts])
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_title(title)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_speed(axes: Any, result: dict[str, Any]) -> None:
    counts = sorted({row["workers"] for row in result["workers"]})
    for mode, rows in _by_mode(result):
        _line(axes, rows, "patches_per_s", mode)
        first = rows[0]["patches_per_s"]["median"] / rows[0]["workers"]
        axes.plot(counts, [first * n for n in counts], "--", color=_COLOURS[mode], alpha=0.5, label=f"{mode}, ideal")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _counted(axes, counts, "speed", "patches/s")


def _draw_efficiency(axes: Any, result: dict[str, Any]) -> None:
    counts = sorted({row["workers"] for row in result["workers"]})
    for mode, rows in _by_mode(result):
        _line(axes, rows, "efficiency", mode)
    axes.axhline(1.0, linestyle="--", color="black", alpha=0.4)
    axes.set_ylim(0, 1.1)
    _counted(axes, counts, "efficiency", "speed-up / workers")


def _draw_dice(axes: Any, result: dict[str, Any]) -> None:
    counts = sorted({row["workers"] for row in result["workers"]})
    for mode, rows in _by_mode(result):
        reached = [row for row in rows if row["to_dice_s"]]
        if reached:
            _line(axes, reached, "to_dice_s", mode)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    _counted(axes, counts, f"time to Dice {result['setting']['target_dice']:g}", "seconds of training")


def _draw_trials(axes: Any, result: dict[str, Any]) -> None:
    rows = result["trials"]
    places = range(len(rows))
    middle = [row["makespan_s"]["median"] for row in rows]
    bars = axes.bar(places, middle, 0.6, color=_COLOURS["weak"], label="measured")
    axes.bar_label(bars, [f"efficiency {row['efficiency']['median']:.2f}" for row in rows], padding=2, fontsize=8)
    for place, row in zip(places, rows, strict=True):
        label = "ideal" if place == 0 else None
        axes.plot([place - 0.3, place + 0.3], [row["ideal_s"]] * 2, "--", color="black", label=label)
    axes.set_xticks(list(places), [str(row["concurrent"]) for row in rows])
    axes.set_xlabel("trials at once")
    axes.set_ylabel("makespan, s")
    axes.set_title(f"{rows[0]['trials']} trials of {rows[0]['trial_s']:g} s")
    axes.margins(y=0.15)
    axes.legend(fontsize=8, loc="upper right")
