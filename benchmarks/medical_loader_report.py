"""Format the result of `compare_medical_loaders.py` as Markdown and as a figure, from the result file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown_tables import hardware_line

OURS = {"bucket": "voxlane patches", "disk": "voxlane patches from disk"}
"""Our contender at each place, with which the others are compared."""
NOTES = {
    "voxlane patches": "ranged reads of the chunks a patch touches; its memory cache is off",
    "voxlane whole objects": "our client; image and label read whole, then cropped",
    "dataflux": "as in its segmentation demo: image and label read whole, then cropped; labels composed",
    "s3torchconnector": "map-style, sequential reader; image and label read whole, then cropped",
    "litdata, empty cache": "StreamingDataset, a volume per item (int16); downloads to disk, crops; timed from start",
    "litdata, zstd, empty cache": "the same, compressed",
    "litdata, windows": "its read_window reads the slices that a crop spans by range, then crops; nothing cached",
    "litdata, full cache": "the same uncompressed volumes, already complete in its cache folder on disk, mapped",
    "voxlane patches from disk": "the same prepared dataset as files; its memory cache is off",
    "nnU-Net blosc2": "nnUNetDataLoader in its multi-process augmenter, without transforms; files mapped",
    "MONAI CacheDataset": "all volumes in memory, crop positions precomputed, no copy; each batch from one volume",
    "MONAI PersistentDataset": "files written in advance, crop positions precomputed; each batch from one volume",
}
_COLOURS = {"ours": "#d1495b", "ours too": "#e8a0a8", "peer": "#30638e"}


def peers_section(result: dict[str, Any]) -> str:
    """Return the section: a heading, a description, and tables for the bucket and the disk."""
    settings = result["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    side, volume_bytes = settings["volume_side"], settings["form_bytes_per_volume"].get("raw", 0)
    text = (
        "## Peers: the same patches by other loaders\n\n![Peers](peers.png)\n\n"
        "`python benchmarks/compare_medical_loaders.py`, results in `peers.json`. "
        f"{hardware_line(result)}.\n\n{versions}.\n\n"
        f"Every loader uses {settings['workers']} worker processes to load batches of {settings['batch']} patches of "
        f"{settings['patch']} cubed with labels from {settings['volumes']} volumes of {side} cubed "
        f"({volume_bytes / 1e6:.0f} MB each with its label as .npy; {settings['volume']}; {settings['label']}), "
        f"without a step between batches and without augmentation. A measurement loads {settings['patches']} patches "
        f"({settings['whole_patches']} for loaders that read whole volumes, {settings['litdata_items']} for litdata). "
        f"Figures are the median (minimum to maximum) of {_count_rounds(settings['rounds'])}, each in a fresh process. "
        "The first batch of every measurement was compared with the volumes, voxel by voxel.\n\n"
        "- First batch: time from building the dataset to its first batch, without imports.\n"
        "- MB per patch: from a bucket, counted by the server; from disk, the bytes that the processes requested from "
        "the kernel, although the page cache held all files.\n"
        "- Memory: anonymous and shared memory of all processes; shared memory counts once, mapped files do not "
        "count.\n"
    )
    for place, title in (("bucket", "From a bucket"), ("disk", "From local disk")):
        rows = [row for row in result["summary"] if row["place"] == place]
        if not rows:
            continue
        our_row = next((r for r in reversed(rows) if r["contender"] == OURS[place] and "error" not in r), None)
        header = ["loader", *(["added, ms"] if place == "bucket" else []), "patches/s", "ours is faster by"]
        header += ["MB per patch", "times our bytes", "requests per patch"] if place == "bucket" else ["MB per patch"]
        header += ["first batch, s", "CPU per patch, ms", "peak memory, MiB", "method"]
        lines = [" | ".join(header), " | ".join(["---"] * len(header))]
        lines += [" | ".join(_row(row, our_row, place, len(header))) for row in rows]
        text += f"\n### {title}\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n"
    sizes = ", ".join(f"{form} {size / 1e6:.0f} MB" for form, size in settings["form_bytes_per_volume"].items())
    return text + (
        f"\nSize of a volume with its label in each format: {sizes}. Loaders that hold volumes in memory or on the "
        "node's disk must first copy them there. For CacheDataset this is part of the first batch; all other "
        "conversions and copies are in no figure. The memory of CacheDataset grows with the dataset; that of the "
        "others does not.\n"
    )


def _count_rounds(rounds: int) -> str:
    return "1 round" if rounds == 1 else f"{rounds} interleaved rounds"


def _row(row: dict[str, Any], our_row: dict[str, Any] | None, place: str, columns: int) -> list[str]:
    name = row["contender"]
    cells = [f"**{name}**" if name.startswith("voxlane") else name]
    if place == "bucket":
        cells.append(f"{row['latency_s'] * 1000:.0f}")
    if "error" in row:
        cells.append("failed: " + row["error"].splitlines()[0][:160].replace("|", "/"))
        return [*cells, *[""] * (columns - len(cells))]
    rate, read = row["samples_per_s"], _read_bytes(row)
    cells += [_spread(rate, 1), _times(our_row, row)]
    cells.append(f"{read / 1e6:.2f}")
    if place == "bucket":
        own = _read_bytes(our_row) if our_row else 0.0
        served = row["bucket_bytes_per_sample"]["median"]
        cells += [f"{served / own:.1f}" if own else "", f"{row['requests_per_sample']['median']:.1f}"]
    return [
        *cells,
        _spread(row["first_batch_s"], 2),
        f"{row['client_cpu_s_per_sample']['median'] * 1000:.0f}",
        f"{row['peak_memory_bytes']['median'] / 2**20:,.0f}",
        NOTES.get(name, ""),
    ]


def _read_bytes(row: dict[str, Any]) -> float:
    """Return the bytes per patch that were read from the bucket or the disk."""
    kind = "disk_bytes_per_sample" if row["place"] == "disk" else "bucket_bytes_per_sample"
    return float(row[kind]["median"])


def _spread(value: dict[str, float], digits: int) -> str:
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f} to {value['max']:.{digits}f})"


def _times(our_row: dict[str, Any] | None, row: dict[str, Any]) -> str:
    """Return our rate divided by the peer's, with the smallest and largest ratio that the spreads allow."""
    if our_row is None or row["contender"] == our_row["contender"]:
        return ""
    our_rate, peer_rate = our_row["samples_per_s"], row["samples_per_s"]
    low, high = our_rate["min"] / peer_rate["max"], our_rate["max"] / peer_rate["min"]
    return f"{our_rate['median'] / peer_rate['median']:.2f} ({low:.2f} to {high:.2f})"


def draw_peers(result: dict[str, Any], path: Path) -> None:
    """Plot rate, bytes per patch, first batch and memory by loader, with a row for the bucket and one for the disk."""
    import matplotlib

    matplotlib.use("Agg")  # no display on servers
    import matplotlib.pyplot as plt

    good = [row for row in result["summary"] if "error" not in row]
    places = [place for place in ("bucket", "disk") if any(row["place"] == place for row in good)]
    heights = [max(1, sum(row["place"] == place for row in good)) for place in places]
    figure, panels = plt.subplots(
        len(places),
        4,
        figsize=(17, 0.48 * sum(heights) + 2.6),
        sharey="row",
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    for line, place in zip(panels, places, strict=True):
        rows = [row for row in good if row["place"] == place][::-1]
        names = [_label(row) for row in rows]
        colours = [_COLOURS[_kind(row)] for row in rows]
        read = "disk_bytes_per_sample" if place == "disk" else "bucket_bytes_per_sample"
        counted_by = "requested from the disk" if place == "disk" else "sent by the server"
        columns = (
            ("samples_per_s", 1.0, "patches/s"),
            (read, 1e-6, f"MB per patch, {counted_by}"),
            ("first_batch_s", 1.0, "first batch, s"),
            ("peak_memory_bytes", 2**-20, "peak memory, MiB"),
        )
        for axes, (key, unit, title) in zip(line, columns, strict=True):
            _bars(axes, names, [{k: v * unit for k, v in row[key].items()} for row in rows], colours)
            axes.set_xlabel(title)
    settings = result["settings"]
    figure.suptitle(
        f"Batches of {settings['batch']} patches of {settings['patch']} cubed, {settings['workers']} workers: "
        f"bucket with added latency (above), local disk (below); median of {settings['rounds']}, bars: minimum to "
        f"maximum"
    )
    figure.text(0.5, 0.005, hardware_line(result), ha="center", fontsize=8, color="#555555")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axes: Any, names: list[str], values: list[dict[str, float]], colours: list[str]) -> None:
    medians = [v["median"] for v in values]
    low = [v["median"] - v["min"] for v in values]
    high = [v["max"] - v["median"] for v in values]
    axes.barh(names, medians, xerr=[low, high], color=colours, capsize=2, error_kw={"elinewidth": 1})
    for place, value in enumerate(medians):
        axes.annotate(
            f"{value:,.3g}" if value < 1000 else f"{value:,.0f}",
            (value, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.margins(x=0.2)


def _label(row: dict[str, Any]) -> str:
    added = f", {row['latency_s'] * 1000:.0f} ms" if row["place"] == "bucket" else ""
    return f"{row['contender']}{added}"


def _kind(row: dict[str, Any]) -> str:
    if not row["contender"].startswith("voxlane"):
        return "peer"
    return "ours" if row["contender"] in OURS.values() else "ours too"
