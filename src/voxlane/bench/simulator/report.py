"""Results of the simulator as tables, sentences and plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from voxlane.bench.report import Column, Row, format_rows, format_share, load_pyplot, save_figure

_COLOURS = {"patches": "#d1495b", "whole-object": "#30638e"}
_PUBLIC_COLOUR = "#8d99ae"
_GCS_FIRST_READS_PER_S = 5_000
"""Initial read rate of a new bucket according to Google; it grows with the load, doubling in about 20 minutes."""
_STALLED = 0.05


def format_report(result: Row) -> str:
    """Return the report of a result of any kind."""
    if result["kind"] == "plan":
        return "\n\n\n".join(_format_plan(result["setting"], row) for row in result["rows"])
    return _format_check(result) if result["kind"] == "check" else _format_scale(result)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# -- scenarios ---------------------------------------------------------------------------------------------------------

_PUBLIC: tuple[Column, ...] = (
    ("nodes", "{nodes:,}"),
    ("steps", "{steps}"),
    ("egress, epoch 1", "{gbps[0]:,.0f} Gbps"),
    ("epoch 2", "{gbps[1]:,.0f}"),
    ("simulated", "{simulated_gbps:,.0f}"),
    ("at worst", "{simulated_gbps_at_worst:,.0f}"),
    ("error, epoch 1", "{errors[0]:+.1%}"),
    ("epoch 2", "{errors[1]:+.1%}"),
    ("requests/s, epoch 1", "{requests_per_s[0]:,.0f}"),
    ("epoch 2", "{requests_per_s[1]:,.0f}"),
    ("simulated", "{simulated_requests_per_s:,.0f}"),
    ("step s", "{simulated_step_s:.1f}"),
)
_SCALE: tuple[Column, ...] = (
    ("mode", "{mode}"),
    ("nodes", "{nodes:,}"),
    ("steps", "{steps}"),
    ("epoch s", "{seconds:,.1f}"),
    ("samples/s", lambda row: "-" if row["samples_per_s"] is None else f"{row['samples_per_s']:,.0f}"),
    ("stall", lambda row: format_share(row["stall_share"])),
    ("later", lambda row: format_share((row["steady"] or {}).get("stall_share"))),
    ("mean Gbps", lambda row: f"{row['mean_gbps'] or 0:,.1f}"),
    ("max Gbps", "{max_gbps:,.1f}"),
    ("max requests/s", "{max_requests_per_s:,.0f}"),
    ("refused", lambda row: format_share(row["refused"] / row["requests"] if row["requests"] else None)),
    ("first batch s", "{first_batch_s:.1f}"),
    ("TB", lambda row: f"{row['bytes'] / 1e12:,.2f}"),
    ("cached", lambda row: format_share(row["hit_share"])),
    ("USD requests", "{requests_usd:,.2f}"),
    ("USD egress", "{egress_usd:,.2f}"),
)


def _format_scale(result: Row) -> str:
    """Return the public table beside the simulated one, and every scenario."""
    parts = []
    if public := result["public"]:
        parts += [format_rows(_PUBLIC, public["rows"]), "\n".join(_explain_public(public))]
    parts += [format_rows(_SCALE, result["rows"]), "\n".join(_explain_scale(result))]
    return "\n\n".join(part for part in parts if part)


def _explain_public(public: Row) -> list[str]:
    fitted, (least, most) = public["fitted"], public["observed_step_s"]
    return [
        f"source of the public table: {public['source']}",
        f"fitted to it: {fitted['stream_bytes_per_s'] / 1e6:.0f} MB/s per connection (first row) and "
        f"{fitted['bucket_bytes_per_s'] * 8e-12:.2f} Tbps of the bucket (from 256 nodes on); the rest is predicted",
        "simulated: the best minute; at worst: the best minute of a chart whose minutes begin at the worst moment",
        f"step s: seconds of the epoch per step; {least:g} to {most:g} were observed, more with more nodes",
    ]


def _explain_scale(result: Row) -> list[str]:
    """Return what the figures mean, a sentence each."""
    rows = [row for row in result["rows"] if row["epoch"] == 1]
    whole = {row["nodes"]: row for row in rows if row["mode"] == "whole-object"}
    patches = {row["nodes"]: row for row in rows if row["mode"] == "patches"}
    sentences = ["stall: fraction of the time in which no step ran; later: in the middle half of the steps"]
    if both := [nodes for nodes in patches if nodes in whole]:
        few, many = patches[both[-1]], whole[both[-1]]
        faster = few["samples_per_s"] / many["samples_per_s"]
        fewer = many["bytes"] / many["samples"] * few["samples"] / few["bytes"]
        sentences.append(
            f"at {both[-1]:,} nodes, patches: {faster:.0f}x the samples/s, {fewer:.0f}x fewer bytes per sample"
        )
    sentences += _explain_stalls(result["setting"], patches.values())
    most = max((row["max_requests_per_s"] for row in patches.values()), default=0.0)
    if most > _GCS_FIRST_READS_PER_S and result["setting"]["network"]["bucket_requests_per_s"] is None:
        sentences.append(
            f"patches need up to {most:,.0f} requests per second; no limit was simulated (--bucket-requests), but a "
            f"new bucket on Google starts at about {_GCS_FIRST_READS_PER_S:,}"
        )
    if thin := [row["nodes"] for row in rows if row["simulated"]["nodes"] < row["nodes"]]:
        sentences.append(f"from {min(thin):,} nodes on, only some were simulated, with their share of the bucket")
    return sentences


def _explain_stalls(settings: Row, rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if row["steady"] is not None and (row["steady"]["stall_share"] or 0.0) > _STALLED:
            rate = row["nodes"] * settings["ranks"] * settings["batch"] / settings["step_time_s"]
            tbps, requests = rate * settings["patch"]["bytes"] * 8e-12, rate * settings["patch"]["requests"] / 1e6
            yield (
                f"at {row['nodes']:,} nodes steps wait for patches: otherwise the bucket would deliver {tbps:,.2f} "
                f"Tbps and {requests:,.2f} million requests per second; --plan shows the cache that helps"
            )


# -- checks ------------------------------------------------------------------------------------------------------------

_CHECK: tuple[Column, ...] = (
    ("server", "{server}"),
    ("mode", "{mode}"),
    ("cache", "{cache}"),
    ("ranks", "{ranks}"),
    ("workers", "{workers}"),
    ("step s", "{step_time_s:g}"),
    ("measured/s", "{measured_samples_per_s:.2f}"),
    ("min to max", "{measured_least:.1f} to {measured_most:.1f}"),
    ("simulated/s", "{simulated_samples_per_s:.2f}"),
    ("error", "{error:+.1%}"),
    ("stall", lambda row: format_share(row["measured_stall"])),
    ("simulated", lambda row: format_share(row["simulated_stall"])),
    ("CPUs used", "{busy_share:.0%}"),
    ("file", "{file}"),
)


def _format_check(result: Row) -> str:
    """Return measured runs beside simulated ones."""
    conclusion = (
        f"{result['within']} of {len(result['rows'])} within {result['tolerance']:.0%} of the measured samples/s; "
        f"the error is {result['mean_error']:.1%} on average, {result['largest_error']:.1%} at most"
    )
    return f"{format_rows(_CHECK, result['rows'])}\n\n{conclusion}"


# -- plans -------------------------------------------------------------------------------------------------------------

_USES: tuple[Column, ...] = (
    ("so that no step waits", "{what}"),
    ("needed", lambda use: f"{_number(use['needed'])} {use['unit']}"),
    ("available", lambda use: f"{_number(use['limit'])} {use['unit']}"),
    ("used", lambda use: format_share(use["share"])),
)
_COSTS: tuple[Column, ...] = (
    ("in", "{span}"),
    ("hours", "{hours:,.2f}"),
    ("samples", "{samples:,.0f}"),
    ("requests", "{requests:,.0f}"),
    ("TB", lambda row: f"{row['bytes'] / 1e12:,.2f}"),
    ("USD requests", "{requests_usd:,.2f}"),
    ("USD egress", "{egress_usd:,.2f}"),
)


def _format_plan(settings: Row, row: Row) -> str:
    head = (
        f"{row['mode']}, {row['nodes']:,} nodes x {settings['ranks']} ranks, batch {settings['batch']}, steps of "
        f"{settings['step_time_s']:g} s"
    )
    uses = row["uses"]
    lines = _plan_lines(row)
    width = max(len(name) for name, _ in lines)
    lines_text = "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)
    prices = row["prices"]
    paid = (
        f"at {prices['usd_per_10k_requests']:g} USD per 10,000 requests, and {prices['usd_per_gb']:g} USD per GB that "
        "leaves the bucket's region; egress within it is free"
    )
    parts = [head, format_rows(_USES, uses) if uses else "", lines_text, format_rows(_COSTS, row["quantities"]), paid]
    return "\n\n".join(part for part in parts if part)


def _plan_lines(row: Row) -> list[tuple[str, str]]:
    settings = row["settings"]
    workers = f"{settings['workers']} worker processes per rank" if settings["workers"] else "no worker processes"
    cache = "not needed"
    if row["cache_bytes"]:
        cache = (
            f"{row['cache_bytes'] / 1e9:,.0f} GB; once it is full: stall {format_share(row['cached_stall_share'])}, "
            f"{row['cached_gbps']:,.1f} Gbps, {row['cached_requests_per_s']:,.0f} requests/s"
        )
    return [
        ("settings", f"{workers}, {settings['in_flight']} samples in flight in each process"),
        ("a sample takes", f"{row['sample_s'] * 1e3:,.0f} ms from its first request, without contention"),
        (
            "expected",
            f"{row['samples_per_s']:,.0f} samples/s, {row['gbps']:,.1f} Gbps, {row['requests_per_s']:,.0f} requests/s, "
            f"stall {format_share(row['stall_share'])}",
        ),
        ("first batch", f"{row['first_batch_s']:.1f} s"),
        ("cache per node", cache),
        ("bottleneck", row["binds"]),
        *(("to do", sentence) for sentence in row["advice"]),
    ]


# -- plots -------------------------------------------------------------------------------------------------------------


def draw(result: Row, path: Path) -> None:
    """Draw a result of any kind."""
    figure = {"scale": _draw_scale, "check": _draw_check, "plan": _draw_plans}[result["kind"]](load_pyplot(), result)
    save_figure(figure, path, result["hardware"] if result["kind"] == "check" else None)


def _draw_scale(plt: Any, result: Row) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    panels = (
        ("highest egress over a minute, Gbps", "max_gbps", "gbps", True),
        ("highest request rate over a minute, requests/s", "max_requests_per_s", "requests_per_s", True),
        ("samples/s", "samples_per_s", None, True),
        ("stall, fraction of the time without a step", "stall_share", None, False),
    )
    first = [row for row in result["rows"] if row["epoch"] == 1]
    counts = sorted({row["nodes"] for row in first})
    for panel, (title, name, published, logarithmic) in zip(axes.flat, panels, strict=True):
        for mode, colour in _COLOURS.items():
            rows = [row for row in first if row["mode"] == mode and row[name] is not None]
            panel.plot(
                [r["nodes"] for r in rows], [r[name] for r in rows], "o-", color=colour, label=f"{mode}, simulated"
            )
        if published and result["public"]:
            _draw_public(panel, result["public"]["rows"], published)
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, [f"{n:,}" for n in counts], rotation=45, fontsize=8)
        panel.minorticks_off()
        if logarithmic:
            panel.set_yscale("log")
        else:
            panel.set_ylim(-0.02, 1.02)
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
    for panel in axes[1]:
        panel.set_xlabel("nodes")
    axes[0][0].legend(fontsize=8)
    settings = result["setting"]
    figure.suptitle(
        f"simulated: batch {settings['batch']}, {settings['workers']} workers, steps of {settings['step_time_s']:g} s, "
        f"{settings['volumes']:,} volumes",
        fontsize=11,
    )
    return figure


def _draw_public(panel: Any, rows: list[Row], field: str) -> None:
    """Draw the public table, and for egress the range of the simulated values."""
    nodes = [row["nodes"] for row in rows]
    if field == "gbps":
        low = [row["simulated_gbps_at_worst"] for row in rows]
        high = [row["simulated_gbps"] for row in rows]
        panel.fill_between(nodes, low, high, color=_COLOURS["whole-object"], alpha=0.15)
    for epoch, marker in enumerate("^v"):
        values = [row[field][epoch] for row in rows]
        panel.plot(nodes, values, marker, color=_PUBLIC_COLOUR, markersize=8, label=f"public table, epoch {epoch + 1}")


def _draw_check(plt: Any, result: Row) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6))
    markers = {1: "o", 2: "s", 3: "^", 4: "D"}
    rows = result["rows"]
    for row in rows:
        style = {"color": _COLOURS[row["mode"]], "marker": markers.get(row["ranks"], "x"), "linestyle": "none"}
        axes[0].plot(row["measured_samples_per_s"], row["simulated_samples_per_s"], **style)
        if row["measured_stall"] is not None:
            axes[1].plot(row["measured_stall"], row["simulated_stall"], **style)
    low = 0.7 * min(min(r["measured_samples_per_s"], r["simulated_samples_per_s"]) for r in rows)
    high = 1.4 * max(max(r["measured_samples_per_s"], r["simulated_samples_per_s"]) for r in rows)
    more, less = 1 + result["tolerance"], 1 - result["tolerance"]
    axes[0].fill_between(
        [low, high], [low * less, high * less], [low * more, high * more], color=_PUBLIC_COLOUR, alpha=0.25
    )
    for panel, ends, title in ((axes[0], (low, high), "samples/s"), (axes[1], (0, 1), "stall, fraction of the time")):
        panel.plot(ends, ends, color="black", linewidth=0.8)
        panel.set_xlabel("measured")
        panel.set_ylabel("simulated")
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
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
    return figure


def _draw_plans(plt: Any, result: Row) -> Any:
    rows = result["rows"]
    figure, axes = plt.subplots(1, len(rows), figsize=(4.6 * len(rows), 4), squeeze=False)
    for panel, row in zip(axes[0], rows, strict=True):
        names = [use["what"] for use in row["uses"]] + ["stall"]
        values = [use["share"] for use in row["uses"]] + [row["stall_share"] or 0.0]
        bars = panel.barh(names, values, color=_COLOURS[row["mode"]])
        panel.bar_label(bars, [f"{value:.0%}" for value in values], padding=3, fontsize=8)
        panel.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
        panel.set_title(f"{row['mode']}, {row['nodes']:,} nodes: bottleneck is {row['binds']}", fontsize=9)
        panel.margins(x=0.2)
        panel.invert_yaxis()
    return figure
