"""Figures and tables from the result files.

`python benchmarks/plot.py [--results FOLDER]` draws a figure beside each JSON file that it knows, and writes README.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on servers
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

import markdown_tables
from markdown_tables import SERVICE_NAMES, hardware_line, size_name
from performance_results import RESULTS

OURS = "#d1495b"
PEERS = ("#30638e", "#6a9fb5", "#8d99ae", "#b8b8a8")
COLOURS = {
    "voxlane": OURS,
    "voxlane sequential": "#e8a0a8",
    "voxlane dataset": "#a02c3c",
    "ceiling": "#e8e4d9",
    "boto3": PEERS[0],
    "google-cloud-storage": PEERS[0],
    "s3torchconnector": PEERS[1],
    "dataflux": PEERS[1],
    "s3fs": PEERS[2],
    "gcsfs": PEERS[2],
    "voxlane, 256 MB cache": "#e8a0a8",
    "zarr-python + obstore": PEERS[0],
    "zarrs": PEERS[1],
    "tensorstore": PEERS[2],
    "tensorstore, 256 MB cache": "#c5ccd6",
    "whole .nii.gz": PEERS[3],
}


def main() -> None:
    """Draw what there are results for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder: Path = parser.parse_args().results
    drawings: dict[str, Callable[[dict[str, Any]], Figure]] = {
        "loading": draw_loading,
        "listing": draw_listing,
        "compose": draw_compose,
        "checkpoint": draw_checkpoint,
        "patch_readers": draw_patch_readers,
        "staging": draw_staging,
        "first_batch": draw_first_batch,
    }
    documents = {n: json.loads((folder / f"{n}.json").read_text()) for n in drawings if (folder / f"{n}.json").exists()}
    for name, document in documents.items():
        figure = drawings[name](document)
        figure.text(0.5, 0.005, hardware_line(document), ha="center", fontsize=8, color="#555555")
        figure.savefig(folder / f"{name}.png", dpi=120)
        plt.close(figure)
        print(f"wrote {name}.png")
    for name, draw in _elsewhere().items():
        if (folder / f"{name}.json").exists():
            documents[name] = json.loads((folder / f"{name}.json").read_text())
            draw(documents[name], folder / f"{name}.png")
            print(f"wrote {name}.png")
    (folder / "README.md").write_text(markdown_tables.readme(documents))
    print("wrote README.md")


def _elsewhere() -> dict[str, Callable[[dict[str, Any], Path], None]]:
    """Figures that are drawn by the code that makes the results."""
    import training_report
    from voxlane.bench.loading import report as loading_report
    from voxlane.bench.scaling import report as scaling_report
    from voxlane.bench.simulator import report as simulator_report
    from voxlane.bench.step import report as step_report

    def peers(document: dict[str, Any], path: Path) -> None:
        from medical_loader_report import draw_peers

        draw_peers(document, path)

    return {
        "peers": peers,
        "scaling": scaling_report.draw,
        "step": step_report.draw,
        "segmentation_loading": loading_report.draw,
        "scale": simulator_report.draw,
        "simulator": simulator_report.draw,
        "training_hippocampus": training_report.draw_hippocampus,
        "training_curves": training_report.draw_curves,
        "training_disk": training_report.draw_disk,
    }


def draw_loading(document: dict[str, Any]) -> Figure:
    """Bytes per second by object size, a panel for each service, latency and style."""
    rows = [r for r in document["summary"] if "error" not in r]
    places = list(dict.fromkeys((r["service"], r["latency_s"]) for r in rows))
    figure, panels = plt.subplots(
        len(places), 2, figsize=(12, 4.2 * len(places) + 0.6), sharey=True, squeeze=False, layout="constrained"
    )
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
    for line, (service, latency_s) in zip(panels, places, strict=True):
        for axes, style in zip(line, ("map", "iterable"), strict=True):
            cell = (service, latency_s, style)
            _bars(axes, [r for r in rows if (r["service"], r["latency_s"], r["style"]) == cell])
            axes.set_title(f"{SERVICE_NAMES[service]}, {latency_s * 1000:.0f} ms per request, {style}-style")
    for line in panels:
        line[0].set_ylabel("MB/s (log scale)")
        line[0].legend(fontsize=8, loc="upper left")
    settings = document["settings"]
    figure.suptitle(
        f"One epoch, {settings['num_workers']} workers (median of {settings['rounds']}, bars: minimum to maximum)"
    )
    return figure


def _bars(axes: Axes, rows: list[dict[str, Any]]) -> None:
    contenders = list(dict.fromkeys(r["contender"] for r in rows))
    sizes = sorted({r["size_bytes"] for r in rows})
    width = 0.8 / max(1, len(contenders))
    for place, contender in enumerate(contenders):
        mine = {r["size_bytes"]: r["bytes_per_s"] for r in rows if r["contender"] == contender}
        at = [sizes.index(size) + (place - (len(contenders) - 1) / 2) * width for size in mine]
        medians = [v["median"] / 1e6 for v in mine.values()]
        low = [(v["median"] - v["min"]) / 1e6 for v in mine.values()]
        high = [(v["max"] - v["median"]) / 1e6 for v in mine.values()]
        error = {"elinewidth": 1, "ecolor": "#333333"}
        axes.bar(
            at, medians, width, yerr=[low, high], label=contender, color=COLOURS[contender], capsize=2, error_kw=error
        )
        for x, value in zip(at, medians, strict=True):
            axes.annotate(f"{value:.0f}", (x, value), (0, 8), textcoords="offset points", ha="center", fontsize=7)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(sizes)), [size_name(s) for s in sizes])
    axes.set_xlabel("object size")
    axes.grid(axis="y", alpha=0.3)


def draw_listing(document: dict[str, Any]) -> Figure:
    """Seconds against keys."""
    figure, axes = plt.subplots(figsize=(8, 5.6), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))
    rows = [r for r in document["summary"] if "error" not in r]
    for service, marker, line in (("gcs", "o", "-"), ("s3", "s", "")):
        for contender in dict.fromkeys(r["contender"] for r in rows if r["service"] == service):
            mine = [r for r in rows if (r["service"], r["contender"]) == (service, contender)]
            times = [r["total_s"] for r in mine]
            axes.errorbar(
                [r["keys"] for r in mine],
                [t["median"] for t in times],
                yerr=[[t["median"] - t["min"] for t in times], [t["max"] - t["median"] for t in times]],
                marker=marker,
                linestyle=line,
                capsize=3,
                linewidth=2.5 if contender == "voxlane" else 1.3,
                color=COLOURS[contender],
                label=f"{contender} ({SERVICE_NAMES[service]})",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("keys")
    axes.set_ylabel("seconds")
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=8)
    latency_ms = document["settings"]["latency_s"] * 1000
    axes.set_title(f"Listing, {latency_ms:.0f} ms added to every request (median, minimum to maximum)")
    return figure


def draw_compose(document: dict[str, Any]) -> Figure:
    """How much faster composed download is than plain GETs, by object size."""
    rows = [r for r in document["summary"] if "error" not in r]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    for axes, style in zip(panels, ("map", "iterable"), strict=True):
        for index, setting in enumerate(dict.fromkeys(r["setting"] for r in rows)):
            mine = [r for r in rows if (r["setting"], r["style"]) == (setting, style)]
            kib = [r["size_bytes"] / 1024 for r in mine]
            axes.plot(kib, [r["speedup"] for r in mine], marker="o", label=setting, color=(*PEERS[:2], OURS)[index])
            low = [r["off"]["total_s"]["min"] / r["on"]["total_s"]["max"] for r in mine]
            high = [r["off"]["total_s"]["max"] / r["on"]["total_s"]["min"] for r in mine]
            axes.fill_between(kib, low, high, alpha=0.12, color=(*PEERS[:2], OURS)[index])
        axes.axhline(1.0, color="#333333", linewidth=1, linestyle="--")
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("object size (KiB)")
        axes.set_title(f"{style}-style")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("time without composing / time with")
    panels[0].legend(title="added to every request", fontsize=8)
    figure.suptitle("Composed download on GCS: above 1 it is faster than plain concurrent GETs")
    return figure


def draw_checkpoint(document: dict[str, Any]) -> Figure:
    """Bytes per second by size of checkpoint: a row for each service and latency, saves left, loads right."""
    rows = [r for r in document["summary"] if "error" not in r and r["tensors"] == "large"]
    places = list(dict.fromkeys((r["service"], r["latency_s"]) for r in rows))
    figure, panels = plt.subplots(
        len(places), 2, figsize=(12, 3.6 * len(places) + 0.6), squeeze=False, layout="constrained"
    )
    figure.get_layout_engine().set(rect=(0, 0.02, 1, 0.98))
    for line, (service, latency_s) in zip(panels, places, strict=True):
        for axes, operation in zip(line, ("save", "load"), strict=True):
            _bars(
                axes,
                [r for r in rows if (r["service"], r["latency_s"], r["operation"]) == (service, latency_s, operation)],
            )
            _linear(
                axes, sorted({r["size_bytes"] for r in rows if (r["service"], r["latency_s"]) == (service, latency_s)})
            )
            added = f", {latency_s * 1000:.0f} ms added to every request" if latency_s else ""
            axes.set_title(f"{operation}, {SERVICE_NAMES[service]}{added}")
        line[0].set_ylabel("MB/s")
        line[0].legend(fontsize=8, loc="upper left", ncols=3)
    figure.suptitle("Single-file checkpoints (median, bars: minimum to maximum); client and server share the cores")
    return figure


def draw_patch_readers(document: dict[str, Any]) -> Figure:
    """Patches a second by contender, and bytes against the patch's own, a panel for each place."""
    rows = [r for r in document["summary"] if "error" not in r]
    places = list(dict.fromkeys((r["place"], r["latency_s"]) for r in rows))
    figure, panels = plt.subplots(1, len(places) + 1, figsize=(16, 4.8), sharey=True, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    for axes, (place, latency_s) in zip(panels, places, strict=False):
        mine = [r for r in rows if (r["place"], r["latency_s"]) == (place, latency_s)]
        _contender_bars(axes, mine, "patches_per_s")
        axes.set_title("files on disk" if place == "disk" else f"bucket, {latency_s * 1000:.0f} ms a request")
        axes.set_xlabel("patches/s (log scale)")
        axes.set_xscale("log")
    bucket = [r for r in rows if (r["place"], r["latency_s"]) == places[-1] and "times_own_bytes" in r]
    _contender_bars(panels[-1], bucket, "times_own_bytes")
    panels[-1].axvline(3.0, color="#333333", linewidth=1, linestyle="--")
    panels[-1].set_title("bytes / the patch's own bytes, 20 ms")
    panels[-1].set_xlabel("times (dashed: 3)")
    figure.suptitle("Patches of 128 cubed from 512 x 512 x 300 (median, bars: minimum to maximum)")
    return figure


def _contender_bars(axes: Axes, rows: list[dict[str, Any]], figure_name: str) -> None:
    from_below = rows[::-1]
    values = [r[figure_name] for r in from_below]
    medians = [v["median"] for v in values]
    spread = [[v["median"] - v["min"] for v in values], [v["max"] - v["median"] for v in values]]
    names = [r["contender"] for r in from_below]
    axes.barh(names, medians, xerr=spread, color=[COLOURS[n] for n in names], capsize=2)
    for place, value in enumerate(medians):
        axes.annotate(f"{value:.1f}", (value, place), (4, 5), textcoords="offset points", fontsize=8)
    axes.margins(x=0.18)
    axes.grid(axis="x", alpha=0.3)


def draw_staging(document: dict[str, Any]) -> Figure:
    """Speed of copies beside that of a plain read, for each limit of the nodes' links."""
    links = list(dict.fromkeys(row["link"] for row in document["summary"]))
    figure, panels = plt.subplots(1, len(links), figsize=(11, 3.6), layout="constrained", squeeze=False)
    figure.get_layout_engine().set(rect=(0, 0.06, 1, 0.94))
    for axes, link in zip(panels[0], links, strict=True):
        rows = [r for r in document["summary"] if r["link"] == link and "error" not in r]
        rows = [r for r in rows if r["contender"] != "voxlane again"][::-1]
        colours = [OURS if r["contender"] == "voxlane" else PEERS[0] for r in rows]
        bars = axes.barh([r["contender"] for r in rows], [r["megabytes_per_s"] for r in rows], color=colours)
        axes.bar_label(bars, [f"{r['of_plain_read']:.0%}" for r in rows], padding=3)
        axes.set_title("links without a limit" if link == "none" else f"links of {link}")
        axes.set_xlabel("MB/s, three nodes together")
        axes.margins(x=0.15)
    return figure


def draw_first_batch(document: dict[str, Any]) -> Figure:
    """Where the seconds to the first batch go."""
    rows = [r for r in document["summary"] if "error" not in r][::-1]
    steps = list(rows[0]["steps_s"]) if rows else []
    figure, axes = plt.subplots(figsize=(11, 1.8 + 0.55 * len(rows)), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.06, 1, 0.94))
    names, left = [r["way"] for r in rows], [0.0] * len(rows)
    words = {"listing": "knowing what there is", "dataset": "building the dataset", "first batch": "the batch"}
    colours = ("#c9c9c9", "#a6a6a6", "#8d99ae", "#6a9fb5", "#30638e", OURS)
    for step, colour in zip(steps, colours, strict=True):
        seconds = [r["steps_s"][step]["median"] for r in rows]
        axes.barh(names, seconds, left=left, color=colour, label=words.get(step, step))
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    for place, row in enumerate(rows):
        total = row["first_batch_s"]
        label = f"{total['median']:.2f} s ({total['min']:.2f} to {total['max']:.2f})"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(label, (left[place], place), (5, -3), textcoords="offset points", fontsize=8, bbox=box)
    axes.axvline(3.0, color="#333333", linewidth=1, linestyle="--", zorder=0)
    axes.margins(x=0.2)
    axes.set_xlabel("seconds since before the process was started (medians of steps; dashed: 3 s)")
    axes.legend(fontsize=8, ncols=len(steps), loc="lower center", bbox_to_anchor=(0.42, 1.0), frameon=False)
    setting = document["settings"]
    latency_ms = setting["latency_s"] * 1000
    axes.set_title(f"First batch of {setting['volumes']:,} volumes, {latency_ms:.0f} ms added to every request", pad=28)
    return figure


def _linear(axes: Axes, sizes: list[int]) -> None:
    """From zero, with room for the legend, and sizes as users of checkpoints name them."""
    axes.set_yscale("linear")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.2)
    axes.set_xticks(range(len(sizes)), [f"{size / 1e6:,.0f} MB" for size in sizes])
    axes.set_xlabel("checkpoint size")


if __name__ == "__main__":
    main()
