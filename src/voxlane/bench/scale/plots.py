"""What a simulation found, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = {"patches": "#d1495b", "whole-object": "#30638e"}
_PUBLIC = "#8d99ae"


def draw(result: dict[str, Any], path: Path) -> None:
    """Of whatever kind the result is."""
    import matplotlib

    matplotlib.use("Agg")  # no display on servers
    import matplotlib.pyplot as plt

    figure = {"scale": _scale, "check": _check, "plan": _plan}[result["kind"]](plt, result)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _scale(plt: Any, result: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    panels = (
        ("highest egress over a minute, Gbps", "max_gbps", "gbps", True),
        ("highest request rate over a minute, requests/s", "max_requests_per_s", "requests_per_s", True),
        ("samples/s", "samples_per_s", None, True),
        ("stall, share of the time that no step ran", "stall_share", None, False),
    )
    first = [row for row in result["rows"] if row["epoch"] == 1]
    counts = sorted({row["nodes"] for row in first})
    for place, (title, name, published, logarithmic) in zip(axes.flat, panels, strict=True):
        for mode, colour in _COLOURS.items():
            rows = [row for row in first if row["mode"] == mode and row[name] is not None]
            place.plot(
                [r["nodes"] for r in rows], [r[name] for r in rows], "o-", color=colour, label=f"{mode}, simulated"
            )
        if published and result["public"]:
            rows = result["public"]["rows"]
            if name == "max_gbps":
                low = [row["simulated_gbps_at_worst"] for row in rows]
                high = [row["simulated_gbps"] for row in rows]
                place.fill_between([r["nodes"] for r in rows], low, high, color=_COLOURS["whole-object"], alpha=0.15)
            for epoch, marker in enumerate("^v"):
                values = [row[published][epoch] for row in rows]
                label = f"public table, epoch {epoch + 1}"
                place.plot([row["nodes"] for row in rows], values, marker, color=_PUBLIC, markersize=8, label=label)
        place.set_xscale("log", base=2)
        place.set_xticks(counts, [f"{n:,}" for n in counts], rotation=45, fontsize=8)
        place.minorticks_off()
        if logarithmic:
            place.set_yscale("log")
        else:
            place.set_ylim(-0.02, 1.02)
        place.set_title(title, fontsize=10)
        place.grid(alpha=0.3)
    for place in axes[1]:
        place.set_xlabel("nodes")
    axes[0][0].legend(fontsize=8)
    setting = result["setting"]
    figure.suptitle(
        f"simulated: batch {setting['batch']}, {setting['workers']} workers, steps of {setting['step_time_s']:g} s, "
        f"{setting['volumes']:,} volumes",
        fontsize=11,
    )
    return figure


def _check(plt: Any, result: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6))
    markers = {1: "o", 2: "s", 3: "^", 4: "D"}
    rows = result["rows"]
    for row in rows:
        where = {"color": _COLOURS[row["mode"]], "marker": markers.get(row["ranks"], "x"), "linestyle": "none"}
        axes[0].plot(row["measured_samples_per_s"], row["simulated_samples_per_s"], **where)
        if row["measured_stall"] is not None:
            axes[1].plot(row["measured_stall"], row["simulated_stall"], **where)
    low = 0.7 * min(min(r["measured_samples_per_s"], r["simulated_samples_per_s"]) for r in rows)
    high = 1.4 * max(max(r["measured_samples_per_s"], r["simulated_samples_per_s"]) for r in rows)
    more, less = 1 + result["tolerance"], 1 - result["tolerance"]
    axes[0].fill_between([low, high], [low * less, high * less], [low * more, high * more], color=_PUBLIC, alpha=0.25)
    for place, ends, title in ((axes[0], (low, high), "samples/s"), (axes[1], (0, 1), "stall, share of the time")):
        place.plot(ends, ends, color="black", linewidth=0.8)
        place.set_xlabel("measured")
        place.set_ylabel("simulated")
        place.set_title(title, fontsize=10)
        place.grid(alpha=0.3)
    axes[0].set_xscale("log")
    axes[0].set_yscale("log")
    names = [*_COLOURS.items()]
    handles = [plt.Line2D([], [], color=colour, marker="o", linestyle="none", label=mode) for mode, colour in names]
    handles += [
        plt.Line2D(
            [], [], color="black", marker=markers.get(n, "x"), linestyle="none", label=f"{n} process{'es' * (n > 1)}"
        )
        for n in sorted({row["ranks"] for row in rows})
    ]
    axes[0].legend(handles=handles, fontsize=8)
    figure.suptitle(f"measured and simulated; the band is {result['tolerance']:.0%}", fontsize=11)
    machine = result["hardware"]
    figure.text(0.5, 0.01, f"{machine['cpu']}, {machine['cores']} cores", ha="center", fontsize=7)
    return figure


def _plan(plt: Any, result: dict[str, Any]) -> Any:
    rows = result["rows"]
    figure, axes = plt.subplots(1, len(rows), figsize=(4.6 * len(rows), 4), squeeze=False)
    for place, row in zip(axes[0], rows, strict=True):
        names = [use["what"] for use in row["uses"]] + ["stall"]
        values = [use["share"] for use in row["uses"]] + [row["stall_share"] or 0.0]
        bars = place.barh(names, values, color=_COLOURS[row["mode"]])
        place.bar_label(bars, [f"{value:.0%}" for value in values], padding=3, fontsize=8)
        place.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
        place.set_title(f"{row['mode']}, {row['nodes']:,} nodes: {row['binds']} binds", fontsize=9)
        place.margins(x=0.2)
        place.invert_yaxis()
    return figure
