"""Report of the loading benchmark: a table, explanations, a result file and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from voxlane.bench.loading.measure import LoadingResult, RankEpoch
from voxlane.bench.loading.settings import LoadingSettings
from voxlane.bench.report import (
    Column,
    describe_run,
    find_error_bars,
    format_rows,
    format_share,
    load_pyplot,
    save_figure,
    summarize,
)

_LIBRARIES = ("voxlane", "torch", "numpy", "obstore", "pyarrow", "ray")
_COLOURS = {"patches": "#d1495b", "whole-object": "#30638e"}
_STALLED = 0.05
"""Fraction of an epoch without steps from which data is the bottleneck."""
_THROTTLED = 0.01
"""Fraction of refused requests from which refusals are the bottleneck."""
_BUSY = 0.85
"""Fraction of a machine's processors in use from which they are the bottleneck."""


def build_report(settings: LoadingSettings, result: LoadingResult | dict[str, Any]) -> dict[str, Any]:
    """Return the content of the result file, also for the result of --listing-only, which is a dict."""
    facts = describe_run("voxlane bench loading", _LIBRARIES)
    if isinstance(result, dict):
        return {**facts, "setting": settings.to_json(), "listing": result, "epochs": [], "summary": []}
    groups: dict[tuple[int, str, int], list[RankEpoch]] = {}
    for epoch in result.epochs:
        groups.setdefault((epoch.source, epoch.cache, epoch.epoch), []).append(epoch)
    epochs = [_summarize_epoch(settings, result, ranks) for ranks in groups.values()]
    summary = [
        _summarize_run([epoch for epoch in epochs if (epoch["mode"], epoch["cache"]) == run])
        for run in dict.fromkeys((epoch["mode"], epoch["cache"]) for epoch in epochs)
    ]
    for row in summary:
        row["bound"] = find_bottleneck(settings, row, cores=facts["hardware"]["cores"] or 1)
    return {
        **facts,
        "setting": {**settings.to_json(), "patch": list(result.patch), "samples": result.samples},
        "data": result.data,
        "server": result.server,
        "start": result.start,
        "epochs": epochs,
        "summary": summary,
        "comparison": _compare_modes(result, summary),
        "listing": None,
    }


def _summarize_epoch(settings: LoadingSettings, result: LoadingResult, ranks: Sequence[RankEpoch]) -> dict[str, Any]:
    """Summarize an epoch over all ranks, and over those of each node."""
    first = ranks[0]
    counters = next((rank.server for rank in ranks if rank.server is not None), {})
    nodes = sorted({rank.node for rank in ranks})
    row = {
        "mode": result.data[first.source]["mode"],
        "cache": first.cache,
        "epoch": first.epoch,
        **_rates(settings, ranks),
        "bucket_s": sum(rank.bucket_s for rank in ranks),
        "decode_s": sum(rank.decode_s for rank in ranks),
        **{f"server_{name}": counters.get(name) for name in ("bytes", "requests", "refused", "cpu_s")},
        "nodes": [
            {"node": node, "host": own[0].host, "ranks": len(own), **_rates(settings, own)}
            for node in nodes
            if (own := [rank for rank in ranks if rank.node == node])
        ],
    }
    row["memory_bytes"] = max(node["memory_bytes"] for node in row["nodes"])
    return row


def _rates(settings: LoadingSettings, ranks: Sequence[RankEpoch]) -> dict[str, Any]:
    seconds = max(rank.seconds for rank in ranks)
    samples, received = sum(rank.samples for rank in ranks), sum(rank.bytes for rank in ranks)
    requests = sum(rank.requests for rank in ranks)
    busy = statistics.mean(rank.steps * settings.step_time_s / rank.seconds for rank in ranks)
    return {
        "seconds": seconds,
        "samples": samples,
        "samples_per_s": samples / seconds,
        "bytes": received,
        "gbps": received * 8 / seconds / 1e9,
        "requests": requests,
        "requests_per_s": requests / seconds,
        "retries": sum(rank.retries for rank in ranks),
        "stall_share": max(0.0, 1 - busy) if settings.step_time_s else None,
        "first_batch_s": max(rank.first_batch_s for rank in ranks),
        "cpu_s": sum(rank.cpu_s for rank in ranks),
        "memory_bytes": sum(rank.memory_bytes for rank in ranks),
    }


def _summarize_run(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over epochs, with minimum and maximum."""
    row: dict[str, Any] = {"mode": epochs[0]["mode"], "cache": epochs[0]["cache"], "epochs": len(epochs)}
    for name in ("samples_per_s", "gbps", "requests_per_s", "stall_share", "first_batch_s", "memory_bytes"):
        values = [epoch[name] for epoch in epochs if epoch[name] is not None]
        row[name] = summarize(values) if values else None
    for name in ("bytes", "requests", "cpu_s", "bucket_s", "decode_s", "server_bytes"):
        values = [epoch[name] / epoch["samples"] for epoch in epochs if epoch[name] is not None]
        row[f"{name}_per_sample"] = summarize(values) if values else None
    row["seconds"] = summarize([epoch["seconds"] for epoch in epochs])
    row["retries"] = sum(epoch["retries"] for epoch in epochs)
    row["refused"] = sum(epoch["server_refused"] or 0 for epoch in epochs)
    row["requests"] = sum(epoch["requests"] for epoch in epochs)
    return row


def find_bottleneck(settings: LoadingSettings, row: dict[str, Any], *, cores: int) -> str:
    """Return what kept the loop from going faster: step, start (only the first batch was late), processors, bucket,
    disk (nothing came from the bucket) or decoding."""
    stall, first = row["stall_share"], row["first_batch_s"]["median"] / row["seconds"]["median"]
    if stall is not None and stall["median"] < _STALLED:
        return "step"
    if stall is not None and stall["median"] - first < _STALLED:
        return "start"
    used = row["cpu_s_per_sample"]["median"] * row["samples_per_s"]["median"]
    if settings.nodes == 1 and used > _BUSY * cores:
        return "processors"
    waited, decoded = row["bucket_s_per_sample"]["median"], row["decode_s_per_sample"]["median"]
    if waited < decoded:
        return "decoding"
    return "bucket" if row["bytes_per_sample"]["median"] else "disk"


def _compare_modes(result: LoadingResult, summary: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Compare whole objects with patches, both with the first kind of cache that was measured."""
    by_mode = {row["mode"]: row for row in reversed(summary) if row["cache"] == summary[0]["cache"]}
    if len(by_mode) < 2:
        return None
    whole, patches = by_mode["whole-object"], by_mode["patches"]
    counted = "server_bytes_per_sample" if whole["server_bytes_per_sample"] else "bytes_per_sample"
    whole_rate, patch_rate = whole["samples_per_s"], patches["samples_per_s"]
    patch_bytes = patches[counted]["median"]
    return {
        "cache": summary[0]["cache"],
        "counted_by": "server" if counted.startswith("server") else "client",
        "bytes_ratio": whole[counted]["median"] / patch_bytes if patch_bytes else None,
        "samples_per_s_ratio": patch_rate["median"] / whole_rate["median"],
        "samples_per_s_ratio_min": patch_rate["min"] / whole_rate["max"],
        "samples_per_s_ratio_max": patch_rate["max"] / whole_rate["min"],
        "same_samples": len({source["cases"] for source in result.data}) == 1 and len(set(result.samples)) == 1,
    }


_RATE_COLUMNS: tuple[Column, ...] = (
    ("seconds", "{seconds:.2f}"),
    ("samples/s", "{samples_per_s:.1f}"),
    ("Gbps", "{gbps:.3g}"),
    ("requests/s", "{requests_per_s:.0f}"),
    ("stall", lambda row: format_share(row["stall_share"])),
    ("first batch s", "{first_batch_s:.2f}"),
    ("memory MiB", lambda row: f"{row['memory_bytes'] / 2**20:,.0f}"),
    ("MB/sample", lambda row: f"{row['bytes'] / row['samples'] / 1e6:.2f}"),
)


def format_report(result: dict[str, Any]) -> str:
    """Return a table of every epoch, and of its nodes if there are several."""
    if listing := result["listing"]:
        return (
            f"{listing['keys']:,} objects ({listing['bytes'] / 1e9:,.1f} GB) listed in {listing['seconds']:.2f} s, "
            f"{listing['requests']:,} requests, {listing['keys_per_s']:,.0f} keys/s"
        )
    columns: list[Column] = [(name, f"{{{name}}}") for name in ("mode", "cache", "epoch", "node")]
    rows = []
    for epoch in result["epochs"]:
        labels = {name: epoch[name] for name in ("mode", "cache", "epoch")}
        server_mb = "-" if epoch["server_bytes"] is None else f"{epoch['server_bytes'] / 1e6:,.1f}"
        rows.append({**epoch, "node": "all", "server_mb": server_mb})
        nodes = epoch["nodes"] if len(epoch["nodes"]) > 1 else []
        rows += [{**labels, **node, "server_mb": ""} for node in nodes]
    return format_rows([*columns, *_RATE_COLUMNS, ("server MB", "{server_mb}")], rows)


def explain(result: dict[str, Any]) -> list[str]:
    """Return what the figures mean, a sentence each."""
    sentences: list[str] = []
    for row in result["summary"]:
        sentences += _explain_run(row, result["setting"])
    if not result["setting"]["step_time_s"] and result["summary"]:
        sentences.append("without a step (--step-time 0) there is no stall: this is the loader's top speed")
    if result["summary"] and result["server"] is None:
        sentences.append("this server has no counters: bytes are those that the client received")
    if compared := result.get("comparison"):
        samples = "the same cases in the same order" if compared["same_samples"] else "different samples"
        ratio = compared["bytes_ratio"]
        bytes_ratio = "no bytes"
        if ratio:
            bytes_ratio = f"{ratio:.1f}x fewer bytes" if ratio >= 1 else f"{1 / ratio:.1f}x more bytes"
        sentences.append(
            f"patches against whole-object, {samples}: {bytes_ratio} (counted by the {compared['counted_by']}), "
            f"{compared['samples_per_s_ratio']:.1f}x the samples/s ({compared['samples_per_s_ratio_min']:.1f} to "
            f"{compared['samples_per_s_ratio_max']:.1f})"
        )
    return sentences


def _explain_run(row: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the bottleneck of one mode and cache, and its refused requests."""
    name = f"{row['mode']}, cache {row['cache']}"
    stall = row["stall_share"]
    share = "" if stall is None else f" (no step ran in {stall['median']:.0%} of the time)"
    bottlenecks = {
        "step": f"keeps up with steps of {settings['step_time_s']:g} s{share}",
        "start": f"keeps up after its first batch, which took {row['first_batch_s']['median']:.2f} s{share}",
        "disk": f"the disk of the cache is the bottleneck{share}: raise --prefetch, or use a faster disk",
        "processors": f"the processors are the bottleneck{share}: use fewer ranks per machine, or more cores",
        "bucket": f"the bucket is the bottleneck{share}: raise --prefetch or --workers, use a cache or another server",
        "decoding": f"decoding is the bottleneck{share}: raise --workers",
    }
    refused = row["refused"] or row["retries"]
    if refused > _THROTTLED * row["requests"]:
        bottlenecks["bucket"] = (
            f"the bucket's request rate is the bottleneck{share}: raise --max-gap, use a cache or another bucket"
        )
    sentences = [f"{name}: {bottlenecks[row['bound']]}"]
    if refused:
        sentences.append(
            f"{name}: the bucket refused {refused:,} of {row['requests']:,} requests, which were sent again: "
            "these are the figures of a bucket that throttles or fails"
        )
    return sentences


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw samples per second, stall and bytes per sample of each mode and cache."""
    plt = load_pyplot()
    rows = result["summary"]
    panels = [("samples/s", "samples_per_s", 1.0), ("MB read per sample", "bytes_per_sample", 1e-6)]
    panels += [("stall, % of the time", "stall_share", 100.0)] if result["setting"]["step_time_s"] else []
    panels += [("memory per node, GiB", "memory_bytes", 2.0**-30)]
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 4), squeeze=False)
    names = {"none": "no\ncache", "cold": "cold\ncache", "warm": "warm\ncache"}
    positions = list(range(len(rows)))
    for panel, (title, name, unit) in zip(axes[0], panels, strict=True):
        medians, errors = find_error_bars(rows, name, unit)
        bars = panel.bar(positions, medians, yerr=errors, capsize=4, color=[_COLOURS[row["mode"]] for row in rows])
        panel.bar_label(bars, [f"{value:,.3g}" for value in medians], padding=3, fontsize=8)
        panel.set_title(title, fontsize=10)
        panel.set_xticks(positions, [names[row["cache"]] for row in rows], fontsize=8)
        panel.margins(y=0.18)
        panel.set_ylim(bottom=0)
    modes = dict.fromkeys(row["mode"] for row in rows)
    squares = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[mode]) for mode in modes]
    figure.legend(squares, list(modes), loc="upper right", fontsize=8)
    settings = result["setting"]
    steps = f"steps of {settings['step_time_s']:g} s" if settings["step_time_s"] else "no steps"
    patch = "x".join(map(str, settings["patch"]))
    ranks = settings["ranks"] * settings["nodes"]
    title = f"{ranks} rank{'s' * (ranks > 1)}, batch {settings['batch']}, {steps}, patches of {patch}"
    figure.suptitle(title, fontsize=11)
    faults = (result["server"] or {}).get("faults", {})
    latency = f", {faults['latency_s'] * 1e3:g} ms per request" if faults.get("latency_s") else ""
    save_figure(figure, path, result["hardware"], latency)
