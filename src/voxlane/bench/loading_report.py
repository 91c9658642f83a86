"""What a loading benchmark found: a table, words, a result file and a plot."""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxlane.bench import report
from voxlane.bench.loading_ranks import Found, RankEpoch
from voxlane.bench.loading_setting import LoadingSetting
from voxlane.bench.scaling_report import aligned, spread

_LIBRARIES = ("voxlane", "torch", "numpy", "obstore", "pyarrow", "ray")
_COLOURS = {"patches": "#d1495b", "whole-object": "#30638e"}
_STALLED = 0.05
"""From this share of an epoch on, somebody waits for data."""
_THROTTLED = 0.01
"""From this share of requests on, refusals are what is waited for."""
_BUSY = 0.85
"""From this share of a machine's processors on, they are what is short."""


def listing_document(setting: LoadingSetting, found: dict[str, Any]) -> dict[str, Any]:
    """All that is known of a listing, as plain data."""
    return {**_facts(), "setting": setting.to_json(), "listing": found, "epochs": [], "summary": []}


def document(setting: LoadingSetting, found: Found) -> dict[str, Any]:
    """All that is known, as plain data."""
    groups: dict[tuple[int, str, int], list[RankEpoch]] = {}
    for each in found.epochs:
        groups.setdefault((each.leg, each.cache, each.epoch), []).append(each)
    epochs = [_epoch(setting, found, ranks) for ranks in groups.values()]
    summary = [
        _summary([e for e in epochs if (e["mode"], e["cache"]) == place])
        for place in dict.fromkeys((e["mode"], e["cache"]) for e in epochs)
    ]
    facts = _facts()
    for row in summary:
        row["bound"] = bound(setting, row, cores=facts["hardware"]["cores"] or 1)
    return {
        **facts,
        "setting": {**setting.to_json(), "patch": list(found.patch), "samples": found.samples},
        "data": found.data,
        "server": found.server,
        "start": found.start,
        "epochs": epochs,
        "summary": summary,
        "comparison": _comparison(found, summary),
        "listing": None,
    }


def _facts() -> dict[str, Any]:
    return {
        "benchmark": "voxlane bench loading",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": report.commit(),
        "hardware": report.hardware(),
        "python": platform.python_version(),
        "versions": report.versions(_LIBRARIES),
    }


def _epoch(setting: LoadingSetting, found: Found, ranks: Sequence[RankEpoch]) -> dict[str, Any]:
    """One epoch over all ranks, and over those of each node."""
    first = ranks[0]
    served = next((rank.server for rank in ranks if rank.server is not None), None)
    nodes = sorted({rank.node for rank in ranks})
    row = {
        "mode": found.data[first.leg]["mode"],
        "cache": first.cache,
        "epoch": first.epoch,
        **_rates(setting, ranks),
        "bucket_s": sum(rank.bucket_s for rank in ranks),
        "decode_s": sum(rank.decode_s for rank in ranks),
        "server_bytes": None if served is None else served["bytes"],
        "server_requests": None if served is None else served["requests"],
        "server_refused": None if served is None else served["refused"],
        "server_cpu_s": None if served is None else served["cpu_s"],
        "nodes": [
            {"node": node, "host": own[0].host, "ranks": len(own), **_rates(setting, own)}
            for node in nodes
            if (own := [rank for rank in ranks if rank.node == node])
        ],
    }
    row["memory_bytes"] = max(node["memory_bytes"] for node in row["nodes"])
    return row


def _rates(setting: LoadingSetting, ranks: Sequence[RankEpoch]) -> dict[str, Any]:
    seconds = max(rank.seconds for rank in ranks)
    samples, received = sum(rank.samples for rank in ranks), sum(rank.bytes for rank in ranks)
    requests = sum(rank.requests for rank in ranks)
    busy = statistics.mean(rank.steps * setting.step_time_s / rank.seconds for rank in ranks)
    return {
        "seconds": seconds,
        "samples": samples,
        "samples_per_s": samples / seconds,
        "bytes": received,
        "gbps": received * 8 / seconds / 1e9,
        "requests": requests,
        "requests_per_s": requests / seconds,
        "retries": sum(rank.retries for rank in ranks),
        "stall_share": max(0.0, 1 - busy) if setting.step_time_s else None,
        "first_batch_s": max(rank.first_batch_s for rank in ranks),
        "cpu_s": sum(rank.cpu_s for rank in ranks),
        "memory_bytes": sum(rank.memory_bytes for rank in ranks),
    }


def _summary(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over epochs, with least and most."""
    row: dict[str, Any] = {"mode": epochs[0]["mode"], "cache": epochs[0]["cache"], "epochs": len(epochs)}
    for name in ("samples_per_s", "gbps", "requests_per_s", "stall_share", "first_batch_s", "memory_bytes"):
        values = [epoch[name] for epoch in epochs if epoch[name] is not None]
        row[name] = spread(values) if values else None
    each = {"bytes": "bytes", "requests": "requests", "cpu_s": "cpu_s", "bucket_s": "bucket_s", "decode_s": "decode_s"}
    for name, source in {**each, "server_bytes": "server_bytes"}.items():
        values = [epoch[source] / epoch["samples"] for epoch in epochs if epoch[source] is not None]
        row[f"{name}_per_sample"] = spread(values) if values else None
    row["seconds"] = spread([epoch["seconds"] for epoch in epochs])
    row["retries"] = sum(epoch["retries"] for epoch in epochs)
    row["refused"] = sum(epoch["server_refused"] or 0 for epoch in epochs)
    row["requests"] = sum(epoch["requests"] for epoch in epochs)
    return row


def bound(setting: LoadingSetting, row: dict[str, Any], *, cores: int) -> str:
    """What kept the loop from going faster: step, start (only the first batch was waited for), processors, bucket, disk
    (nothing came from the bucket) or decoding."""
    stall, first = row["stall_share"], row["first_batch_s"]["median"] / row["seconds"]["median"]
    if stall is not None and stall["median"] < _STALLED:
        return "step"
    if stall is not None and stall["median"] - first < _STALLED:
        return "start"
    used = row["cpu_s_per_sample"]["median"] * row["samples_per_s"]["median"]
    if setting.nodes == 1 and used > _BUSY * cores:
        return "processors"
    waited, decoded = row["bucket_s_per_sample"]["median"], row["decode_s_per_sample"]["median"]
    if waited < decoded:
        return "decoding"
    return "bucket" if row["bytes_per_sample"]["median"] else "disk"


def _comparison(found: Found, summary: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Whole objects against patches, both without a cache, or both with the first kind that was measured."""
    by_mode = {row["mode"]: row for row in reversed(summary) if row["cache"] == summary[0]["cache"]}
    if len(by_mode) < 2:
        return None
    whole, ours = by_mode["whole-object"], by_mode["patches"]
    counted = "server_bytes_per_sample" if whole["server_bytes_per_sample"] else "bytes_per_sample"
    least = whole["samples_per_s"]["min"], ours["samples_per_s"]["min"]
    most = whole["samples_per_s"]["max"], ours["samples_per_s"]["max"]
    few = ours[counted]["median"]
    return {
        "cache": summary[0]["cache"],
        "counted_by": "server" if counted.startswith("server") else "client",
        "bytes_ratio": whole[counted]["median"] / few if few else None,
        "samples_per_s_ratio": ours["samples_per_s"]["median"] / whole["samples_per_s"]["median"],
        "samples_per_s_ratio_min": least[1] / most[0],
        "samples_per_s_ratio_max": most[1] / least[0],
        "same_samples": len({leg["cases"] for leg in found.data}) == 1 and len(set(found.samples)) == 1,
    }


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[dict[str, Any]], str]


_COLUMNS = (
    _Column("seconds", lambda row: f"{row['seconds']:.2f}"),
    _Column("samples/s", lambda row: f"{row['samples_per_s']:.1f}"),
    _Column("Gbps", lambda row: f"{row['gbps']:.3g}"),
    _Column("requests/s", lambda row: f"{row['requests_per_s']:.0f}"),
    _Column("stall", lambda row: "-" if row["stall_share"] is None else f"{row['stall_share']:.1%}"),
    _Column("first batch s", lambda row: f"{row['first_batch_s']:.2f}"),
    _Column("memory MiB", lambda row: f"{row['memory_bytes'] / 2**20:,.0f}"),
    _Column("MB/sample", lambda row: f"{row['bytes'] / row['samples'] / 1e6:.2f}"),
)


def table(result: dict[str, Any]) -> str:
    """Every epoch, and its nodes where there are several, as aligned text."""
    if listing := result["listing"]:
        return (
            f"{listing['keys']:,} objects ({listing['bytes'] / 1e9:,.1f} GB) listed in {listing['seconds']:.2f} s, "
            f"{listing['requests']:,} requests, {listing['keys_per_s']:,.0f} keys/s"
        )
    rows = [["mode", "cache", "epoch", "node", *(column.title for column in _COLUMNS), "server MB"]]
    for epoch in result["epochs"]:
        place = [epoch["mode"], epoch["cache"], str(epoch["epoch"])]
        served = "-" if epoch["server_bytes"] is None else f"{epoch['server_bytes'] / 1e6:,.1f}"
        rows.append([*place, "all", *(column.cell(epoch) for column in _COLUMNS), served])
        nodes = epoch["nodes"] if len(epoch["nodes"]) > 1 else []
        rows += [[*place, str(node["node"]), *(column.cell(node) for column in _COLUMNS), ""] for node in nodes]
    return aligned(rows)


def words(result: dict[str, Any]) -> list[str]:
    """What the figures mean, a sentence each."""
    said = []
    setting = result["setting"]
    for row in result["summary"]:
        place = f"{row['mode']}, cache {row['cache']}"
        stall = row["stall_share"]
        share = "" if stall is None else f" ({stall['median']:.0%} of the time no step ran)"
        limits = {
            "step": f"keeps up with steps of {setting['step_time_s']:g} s{share}",
            "start": f"keeps up after its first batch, which took {row['first_batch_s']['median']:.2f} s{share}",
            "disk": f"the disk of the cache is the limit{share}: more --prefetch, or a faster disk",
            "processors": f"the processors are the limit{share}: fewer ranks a machine, or more cores",
            "bucket": f"the bucket is the limit{share}: more --prefetch, more --workers, a cache, or another server",
            "decoding": f"decoding is the limit{share}: more --workers",
        }
        refused = row["refused"] or row["retries"]
        if refused > _THROTTLED * row["requests"]:
            limits["bucket"] = (
                f"the bucket's requests are the limit{share}: a larger --max-gap, a cache, or another bucket"
            )
        said.append(f"{place}: {limits[row['bound']]}")
        if refused:
            said.append(
                f"{place}: the bucket refused {refused:,} of {row['requests']:,} requests and they were sent again: "
                "these are the figures of a bucket that throttles or fails"
            )
    if not setting["step_time_s"] and result["summary"]:
        said.append("without a step (--step-time 0) there is no stall to speak of: this is the loader's top speed")
    if result["summary"] and result["server"] is None:
        said.append("this server does not tell what it sent: bytes are those that the client received")
    if compared := result.get("comparison"):
        what = "the same cases in the same order" if compared["same_samples"] else "other samples"
        bytes_ratio = "no bytes" if compared["bytes_ratio"] is None else f"{compared['bytes_ratio']:.1f}x fewer bytes"
        said.append(
            f"patches against whole-object, {what}: {bytes_ratio} (counted by the {compared['counted_by']}), "
            f"{compared['samples_per_s_ratio']:.1f}x the samples/s ({compared['samples_per_s_ratio_min']:.1f} to "
            f"{compared['samples_per_s_ratio_max']:.1f})"
        )
    return said


def draw(result: dict[str, Any], path: Path) -> None:
    """Samples a second, stall and bytes a sample of each mode and cache."""
    import matplotlib

    matplotlib.use("Agg")  # no display on servers
    import matplotlib.pyplot as plt

    rows = result["summary"]
    panels = [("samples/s", "samples_per_s", 1.0), ("MB read a sample", "bytes_per_sample", 1e-6)]
    panels += [("stall, % of the time", "stall_share", 100.0)] if result["setting"]["step_time_s"] else []
    panels += [("memory of a node, GiB", "memory_bytes", 2.0**-30)]
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 4), squeeze=False)
    names = {"none": "no\ncache", "cold": "cold\ncache", "warm": "warm\ncache"}
    at = list(range(len(rows)))
    for place, (title, name, unit) in zip(axes[0], panels, strict=True):
        middle = [row[name]["median"] * unit for row in rows]
        errors = [
            [(row[name]["median"] - row[name]["min"]) * unit for row in rows],
            [(row[name]["max"] - row[name]["median"]) * unit for row in rows],
        ]
        bars = place.bar(at, middle, yerr=errors, capsize=4, color=[_COLOURS[row["mode"]] for row in rows])
        place.bar_label(bars, [f"{value:,.3g}" for value in middle], padding=3, fontsize=8)
        place.set_title(title, fontsize=10)
        place.set_xticks(at, [names[row["cache"]] for row in rows], fontsize=8)
        place.margins(y=0.18)
        place.set_ylim(bottom=0)
    modes = dict.fromkeys(row["mode"] for row in rows)
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[mode]) for mode in modes],
        list(modes),
        loc="upper right",
        fontsize=8,
    )
    setting, machine = result["setting"], result["hardware"]
    steps = f"steps of {setting['step_time_s']:g} s" if setting["step_time_s"] else "no steps"
    patch = "x".join(map(str, setting["patch"]))
    ranks = setting["ranks"] * setting["nodes"]
    figure.suptitle(
        f"{ranks} rank{'s' * (ranks > 1)}, batch {setting['batch']}, {steps}, patches of {patch}",
        fontsize=11,
    )
    faults = (result["server"] or {}).get("faults", {})
    latency = f", {faults['latency_s'] * 1e3:g} ms a request" if faults.get("latency_s") else ""
    figure.text(0.5, 0.01, f"{machine['cpu']}, {machine['cores']} cores{latency}", ha="center", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
