"""Report of the checkpoint benchmark: a table, a result file and a plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxlane.bench.checkpoint.settings import CheckpointSettings
from voxlane.bench.report import Column, describe_run, format_rows, load_pyplot, save_figure

if TYPE_CHECKING:
    from voxlane.bench.checkpoint.measure import CheckpointResult

_LIBRARIES = ("voxlane", "torch", "obstore", "fsspec", "s3fs", "gcsfs", "adlfs")
_COLOURS = {"voxlane": "#d1495b", "fsspec": "#30638e", "filesystem": "#8d99ae"}


def build_report(settings: CheckpointSettings, result: CheckpointResult) -> dict[str, Any]:
    """Return the content of the result file."""
    return {
        **describe_run("voxlane bench checkpoint", _LIBRARIES),
        "setting": {**settings.to_json(), "device": result.device},
        "checkpoint_bytes": result.checkpoint_bytes,
        "summary": _summarize_calls(result),
        "calls": [vars(call) for call in result.calls],
    }


def format_report(report: dict[str, Any]) -> str:
    """Return the summary as an aligned table."""
    checkpoint_mb = f"{report['checkpoint_bytes'] / 1e6:,.1f}"
    columns: list[Column] = [
        ("strategy", "{strategy}"),
        ("operation", "{operation}"),
        ("calls", "{calls}"),
        ("mean s", "{mean_s:.3f}"),
        ("stdev", "{stdev_s:.3f}"),
        ("min to max s", "{min_s:.3f} to {max_s:.3f}"),
        ("MB/s", lambda row: f"{row['bytes_per_s'] / 1e6:,.1f}"),
        ("checkpoint MB", checkpoint_mb),
        ("peak extra MB/rank", lambda row: "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:,.0f}"),
    ]
    return format_rows(columns, report["summary"], text_columns=2)


def _summarize_calls(result: CheckpointResult) -> list[dict[str, Any]]:
    rows = []
    for strategy, operation in dict.fromkeys((call.strategy, call.operation) for call in result.calls):
        calls = [call for call in result.calls if (call.strategy, call.operation) == (strategy, operation)]
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
                "bytes_per_s": result.checkpoint_bytes / statistics.mean(times),
                "extra_bytes": max(extra, default=None),
            }
        )
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the speed of each strategy: a bar for the mean and a line for each call."""
    settings = report["setting"]
    operations = list(dict.fromkeys(row["operation"] for row in report["summary"]))
    figure, panels = load_pyplot().subplots(1, len(operations), figsize=(4.5 * len(operations), 4), squeeze=False)
    for axes, operation in zip(panels[0], operations, strict=True):
        rows = [row for row in report["summary"] if row["operation"] == operation]
        names = [row["strategy"] for row in rows]
        speeds = [row["bytes_per_s"] / 1e6 for row in rows]
        bars = axes.bar(names, speeds, color=[_COLOURS[name] for name in names])
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], label_type="center", color="white")
        for index, name in enumerate(names):
            calls = [c for c in report["calls"] if (c["strategy"], c["operation"]) == (name, operation)]
            call_speeds = [report["checkpoint_bytes"] / call["seconds"] / 1e6 for call in calls]
            axes.plot([index] * len(call_speeds), call_speeds, "k_", markersize=14)
        axes.set_title(operation)
        axes.set_ylabel("MB/s (bar: mean, lines: each call)")
        axes.margins(y=0.15)
    megabytes = report["checkpoint_bytes"] / 1e6
    figure.suptitle(f"{settings['format']} checkpoint, {megabytes:,.0f} MB, {settings['num_ranks']} ranks")
    save_figure(figure, path, report["hardware"])
