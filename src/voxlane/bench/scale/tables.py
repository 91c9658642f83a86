"""What a simulation found, as aligned text and sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from voxlane.bench.scaling_report import aligned

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
_GCS_FIRST_READS_PER_S = 5_000
"""What Google says a new bucket takes; it grows with the load, doubling in about 20 minutes."""
_STALLED = 0.05


def text(result: Row) -> str:
    """Of whatever kind the result is."""
    return {"scale": scale, "check": check, "plan": plan}[result["kind"]](result)


def share(value: float | None) -> str:
    """As a percentage; a dash where there is none."""
    return "-" if value is None else f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    return aligned([[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)])


# -- scenarios ---------------------------------------------------------------------------------------------------------

_PUBLIC: tuple[Column, ...] = (
    ("nodes", lambda row: f"{row['nodes']:,}"),
    ("steps", lambda row: str(row["steps"])),
    ("egress, epoch 1", lambda row: f"{row['gbps'][0]:,.0f} Gbps"),
    ("epoch 2", lambda row: f"{row['gbps'][1]:,.0f}"),
    ("simulated", lambda row: f"{row['simulated_gbps']:,.0f}"),
    ("at worst", lambda row: f"{row['simulated_gbps_at_worst']:,.0f}"),
    ("error, epoch 1", lambda row: f"{row['errors'][0]:+.1%}"),
    ("epoch 2", lambda row: f"{row['errors'][1]:+.1%}"),
    ("requests/s, epoch 1", lambda row: f"{row['requests_per_s'][0]:,.0f}"),
    ("epoch 2", lambda row: f"{row['requests_per_s'][1]:,.0f}"),
    ("simulated", lambda row: f"{row['simulated_requests_per_s']:,.0f}"),
    ("step s", lambda row: f"{row['simulated_step_s']:.1f}"),
)
_SCALE: tuple[Column, ...] = (
    ("mode", lambda row: str(row["mode"])),
    ("nodes", lambda row: f"{row['nodes']:,}"),
    ("steps", lambda row: str(row["steps"])),
    ("epoch s", lambda row: f"{row['seconds']:,.1f}"),
    ("samples/s", lambda row: "-" if row["samples_per_s"] is None else f"{row['samples_per_s']:,.0f}"),
    ("stall", lambda row: share(row["stall_share"])),
    ("later", lambda row: share((row["steady"] or {}).get("stall_share"))),
    ("mean Gbps", lambda row: f"{row['mean_gbps'] or 0:,.1f}"),
    ("max Gbps", lambda row: f"{row['max_gbps']:,.1f}"),
    ("max requests/s", lambda row: f"{row['max_requests_per_s']:,.0f}"),
    ("refused", lambda row: share(row["refused"] / row["requests"] if row["requests"] else None)),
    ("first batch s", lambda row: f"{row['first_batch_s']:.1f}"),
    ("TB", lambda row: f"{row['bytes'] / 1e12:,.2f}"),
    ("cached", lambda row: share(row["hit_share"])),
    ("USD requests", lambda row: f"{row['requests_usd']:,.2f}"),
    ("USD egress", lambda row: f"{row['egress_usd']:,.2f}"),
)


def scale(result: Row) -> str:
    """The public table beside ours, and every scenario."""
    parts = []
    if found := result["public"]:
        parts += [_table(_PUBLIC, found["rows"]), "\n".join(_public_words(found))]
    parts += [_table(_SCALE, result["rows"]), "\n".join(_scale_words(result))]
    return "\n\n".join(part for part in parts if part)


def _public_words(found: Row) -> list[str]:
    fitted, (least, most) = found["fitted"], found["observed_step_s"]
    return [
        f"the public table is of {found['source']}",
        f"fitted to it: {fitted['stream_bytes_per_s'] / 1e6:.0f} MB/s a connection (the first row), and of the bucket "
        f"{fitted['bucket_bytes_per_s'] * 8e-12:.2f} Tbps (the rows from 256 nodes on); the rest is predicted",
        "simulated: the best minute; at worst: of minutes that begin at the worst moment, as those of a chart may",
        f"step s: the epoch's seconds by its steps; observed were {least:g} to {most:g}, longer with more nodes",
    ]


def _scale_words(result: Row) -> list[str]:
    """What the figures mean, a sentence each."""
    rows = [row for row in result["rows"] if row["epoch"] == 1]
    whole = {row["nodes"]: row for row in rows if row["mode"] == "whole-object"}
    patches = {row["nodes"]: row for row in rows if row["mode"] == "patches"}
    said = ["stall: share of the time that no step ran; later: in the middle half of the steps"]
    if both := [nodes for nodes in patches if nodes in whole]:
        few, many = patches[both[-1]], whole[both[-1]]
        faster = few["samples_per_s"] / many["samples_per_s"]
        fewer = many["bytes"] / many["samples"] * few["samples"] / few["bytes"]
        said.append(f"at {both[-1]:,} nodes, patches: {faster:.0f}x the samples/s, {fewer:.0f}x fewer bytes a sample")
    said += [_needs(result["setting"], row) for row in patches.values() if _stalls(row)]
    most = max((row["max_requests_per_s"] for row in patches.values()), default=0.0)
    if most > _GCS_FIRST_READS_PER_S and result["setting"]["network"]["bucket_requests_per_s"] is None:
        said.append(
            f"patches ask for up to {most:,.0f} requests a second; no limit was simulated (--bucket-requests), and a "
            f"new bucket on Google begins at about {_GCS_FIRST_READS_PER_S:,}"
        )
    if thin := [row["nodes"] for row in rows if row["simulated"]["nodes"] < row["nodes"]]:
        said.append(f"from {min(thin):,} nodes on, fewer were simulated, with their share of the bucket")
    return said


def _stalls(row: Row) -> bool:
    return row["steady"] is not None and (row["steady"]["stall_share"] or 0.0) > _STALLED


def _needs(setting: Row, row: Row) -> str:
    rate = row["nodes"] * setting["ranks"] * setting["batch"] / setting["step_time_s"]
    tbps, requests = rate * setting["patch"]["bytes"] * 8e-12, rate * setting["patch"]["requests"] / 1e6
    return (
        f"at {row['nodes']:,} nodes patches are waited for: steps without a wait need {tbps:,.2f} Tbps and "
        f"{requests:,.2f} million requests a second of the bucket; --plan says what cache takes that off it"
    )


# -- checks ------------------------------------------------------------------------------------------------------------

_CHECK: tuple[Column, ...] = (
    ("server", lambda row: str(row["server"])),
    ("mode", lambda row: str(row["mode"])),
    ("cache", lambda row: str(row["cache"])),
    ("ranks", lambda row: str(row["ranks"])),
    ("workers", lambda row: str(row["workers"])),
    ("step s", lambda row: f"{row['step_time_s']:g}"),
    ("measured/s", lambda row: f"{row['measured_samples_per_s']:.2f}"),
    ("min to max", lambda row: f"{row['measured_least']:.1f} to {row['measured_most']:.1f}"),
    ("simulated/s", lambda row: f"{row['simulated_samples_per_s']:.2f}"),
    ("error", lambda row: f"{row['error']:+.1%}"),
    ("stall", lambda row: share(row["measured_stall"])),
    ("simulated", lambda row: share(row["simulated_stall"])),
    ("CPUs used", lambda row: f"{row['busy_share']:.0%}"),
    ("file", lambda row: str(row["file"])),
)


def check(result: Row) -> str:
    """Measured beside simulated."""
    said = (
        f"{result['within']} of {len(result['rows'])} within {result['tolerance']:.0%} of the measured samples/s; "
        f"off by {result['mean_error']:.1%} on average, {result['largest_error']:.1%} at most"
    )
    return f"{_table(_CHECK, result['rows'])}\n\n{said}"


# -- plans -------------------------------------------------------------------------------------------------------------

_USES: tuple[Column, ...] = (
    ("for steps without a wait", lambda use: str(use["what"])),
    ("needed", lambda use: f"{_number(use['needed'])} {use['unit']}"),
    ("there is", lambda use: f"{_number(use['limit'])} {use['unit']}"),
    ("used", lambda use: share(use["share"])),
)
_COSTS: tuple[Column, ...] = (
    ("in", lambda row: str(row["span"])),
    ("hours", lambda row: f"{row['hours']:,.2f}"),
    ("samples", lambda row: f"{row['samples']:,.0f}"),
    ("requests", lambda row: f"{row['requests']:,.0f}"),
    ("TB", lambda row: f"{row['bytes'] / 1e12:,.2f}"),
    ("USD requests", lambda row: f"{row['requests_usd']:,.2f}"),
    ("USD egress", lambda row: f"{row['egress_usd']:,.2f}"),
)


def plan(result: Row) -> str:
    """Each plan as a block."""
    return "\n\n\n".join(_plan(result["setting"], row) for row in result["rows"])


def _plan(setting: Row, row: Row) -> str:
    head = (
        f"{row['mode']}, {row['nodes']:,} nodes x {setting['ranks']} ranks, batch {setting['batch']}, steps of "
        f"{setting['step_time_s']:g} s"
    )
    uses = row["uses"]
    lines = _plan_lines(row)
    width = max(len(name) for name, _ in lines)
    found = "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)
    prices = row["prices"]
    paid = (
        f"at {prices['usd_per_10k_requests']:g} USD per 10,000 requests, and {prices['usd_per_gb']:g} USD a GB that "
        "leaves the bucket's region; within it, egress is free"
    )
    parts = [head, _table(_USES, uses) if uses else "", found, _table(_COSTS, row["quantities"]), paid]
    return "\n\n".join(part for part in parts if part)


def _plan_lines(row: Row) -> list[tuple[str, str]]:
    settings = row["settings"]
    workers = f"{settings['workers']} worker processes a rank" if settings["workers"] else "no worker processes"
    lines = [
        ("settings", f"{workers}, {settings['in_flight']} samples in flight in each process"),
        ("a sample takes", f"{row['sample_s'] * 1e3:,.0f} ms from its first request, where nothing is full"),
        (
            "expected",
            f"{row['samples_per_s']:,.0f} samples/s, {row['gbps']:,.1f} Gbps, {row['requests_per_s']:,.0f} requests/s, "
            f"stall {share(row['stall_share'])}",
        ),
        ("first batch", f"{row['first_batch_s']:.1f} s"),
        ("cache a node", "not needed"),
        ("binds", row["binds"]),
        *(("to do", sentence) for sentence in row["advice"]),
    ]
    if row["cache_bytes"]:
        lines[4] = (
            "cache a node",
            f"{row['cache_bytes'] / 1e9:,.0f} GB; once it is full: stall {share(row['cached_stall_share'])}, "
            f"{row['cached_gbps']:,.1f} Gbps, {row['cached_requests_per_s']:,.0f} requests/s",
        )
    return lines
