"""The result files as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SERVICE_NAMES = {"s3": "S3 (SeaweedFS)", "gcs": "GCS (emulator)"}


def readme(documents: dict[str, dict[str, Any]]) -> str:
    """The whole page; sections for the results there are."""
    sections = [
        "# Benchmark results\n\nWritten by `python benchmarks/plot.py` from the JSON files beside it; do not edit. "
        "Run again: `python benchmarks/run.py`. Ours beside the peers, with what is slower: "
        "[docs/performance.md](../../docs/performance.md).\n"
    ]
    for name, section in _SECTIONS.items():
        if name in documents:
            sections.append(section(documents[name]))
    return "\n".join(sections)


def hardware_line(document: dict[str, Any]) -> str:
    """One line that says what a result was measured on."""
    hardware = document["hardware"]
    quick = ", QUICK RUN: few objects, do not quote" if document["settings"]["quick"] else ""
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores shared by client and server, {hardware['memory_gib']} GiB; "
        f"Python {document['python']}; commit {document['commit']}; {document['date'][:10]}{quick}"
    )


def size_name(size_bytes: int) -> str:
    """`100 KiB`, `3 MiB`."""
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def _head(title: str, name: str, document: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in document["versions"].items())
    return (
        f"## {title}\n\n![{title}]({name}.png)\n\n`python benchmarks/{name}.py`, results in `{name}.json`. "
        f"{hardware_line(document)}.\n\n{versions}.\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def spread(value: dict[str, float], digits: int = 2) -> str:
    """`median (least to most)`."""
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f} to {value['max']:.{digits}f})"


def _loading(document: dict[str, Any]) -> str:
    settings = document["settings"]
    cases = ", ".join(
        f"{c['count']} x {size_name(c['size_bytes'])} in batches of {c['batch_size']}" for c in settings["cases"]
    )
    text = _head("Loading", "loading", document) + (
        f"\nOne epoch: {cases}; {settings['num_workers']} DataLoader workers for all; "
        f"{settings['latency_s'] * 1000:.0f} ms added to every request; median (least to most) of {settings['rounds']} "
        "rounds, interleaved, each epoch in a fresh process. Time runs from the start of iteration, so it includes "
        "starting the workers. Samples are uint8 tensors, stacked into batches. fsspec (s3fs, gcsfs) fetches each "
        "batch with one concurrent `cat`; boto3 and google-cloud-storage get one object per sample. Memory is the "
        "resident memory of the client's processes added up, so what they share counts more than once.\n"
    )
    for service in dict.fromkeys(r["service"] for r in document["summary"]):
        for style in ("map", "iterable"):
            rows = [r for r in document["summary"] if (r["service"], r["style"]) == (service, style)]
            ours = {r["size_bytes"]: r for r in rows if r["contender"] == "voxlane"}
            text += f"\n### {SERVICE_NAMES[service]}, {style}-style\n\n"
            header = ["size", "contender", "seconds", "objects/s", "MB/s", "ours is faster by", "first batch, s"]
            header += ["peak memory, MiB", "CPU, s: client / server", "requests"]
            text += table(header, [_loading_row(r, ours[r["size_bytes"]]) for r in rows])
    return text


def _loading_row(row: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    start = [size_name(row["size_bytes"]), _bold(row["contender"])]
    if "error" in row:
        return [*start, f"failed: {row['error'].splitlines()[0][:120]}", *[""] * 7]
    return [
        *start,
        spread(row["total_s"]),
        f"{row['objects_per_s']['median']:,.0f}",
        f"{row['bytes_per_s']['median'] / 1e6:,.0f}",
        _ratio(row, ours),
        f"{row['first_batch_s']['median']:.2f}",
        f"{row['peak_rss_bytes']['median'] / 2**20:,.0f}",
        f"{row['client_cpu_s']['median']:.2f} / {row['server_cpu_s']['median']:.2f}",
        f"{sum(row['server_requests'].values()):,}",
    ]


def _listing(document: dict[str, Any]) -> str:
    settings = document["settings"]
    text = _head("Listing", "listing", document) + (
        f"\nAll keys into memory; {settings['latency_s'] * 1000:.0f} ms added to every request; ours keeps up to "
        f"{settings['concurrency']} requests in flight, Dataflux runs {settings['dataflux_processes']} processes (its "
        "default, the number of cores). `voxlane dataset` is what a dataset does on first use.\n\n"
    )
    rows = document["summary"]
    ours = {(r["service"], r["keys"]): r for r in rows if r["contender"] == "voxlane"}
    header = ["server", "keys", "contender", "seconds", "ours is faster by", "requests", "peak memory, MiB"]
    header += ["CPU, s: client / server"]
    return text + table(header, [_listing_row(r, ours[r["service"], r["keys"]]) for r in rows])


def _listing_row(row: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    start = [SERVICE_NAMES[row["service"]], f"{row['keys']:,}", _bold(row["contender"])]
    if "error" in row:
        return [*start, f"failed: {row['error'].splitlines()[0][:120]}", *[""] * 4]
    return [
        *start,
        spread(row["total_s"]),
        _ratio(row, ours),
        f"{row['requests']['median']:,.0f}",
        f"{row['peak_rss_bytes']['median'] / 2**20:,.0f}",
        f"{row['client_cpu_s']['median']:.2f} / {row['server_cpu_s']['median']:.2f}",
    ]


def _compose(document: dict[str, Any]) -> str:
    settings = document["settings"]
    text = _head("Composed download", "compose", document) + (
        f'\n`compose="on"` against `compose="off"`, {settings["num_workers"]} workers, batches of '
        f"{settings['batch_size']}; median (least to most) of {settings['rounds']} rounds. "
        "Above 1, composing is faster.\n\n"
    )
    rows = []
    for row in document["summary"]:
        start = [row["setting"], row["style"], size_name(row["size_bytes"])]
        if "error" in row:
            rows.append([*start, f"failed: {row['error'].splitlines()[0][:120]}", "", "", ""])
            continue
        requests = [str(sum(row[mode]["server_requests"].values())) for mode in ("off", "on")]
        times = [spread(row[mode]["total_s"]) for mode in ("off", "on")]
        rows.append([*start, *times, f"{row['speedup']:.2f}", " / ".join(requests)])
    header = ("added latency", "style", "size", "off, s", "on, s", "speed-up", "requests off / on")
    return text + table(header, rows)


def _checkpoint(document: dict[str, Any]) -> str:
    text = _head("Checkpoints", "checkpoint", document) + (
        "\nOne file, one process; tensors of 16 MiB, and small ones (some hundred KB) where it says so; median (least "
        "to most), interleaved, each call in a fresh process; what was loaded was compared with what was saved. Client "
        "and server share the cores, so the server's processor time is part of every figure. The ceiling is the "
        "engine moving as many bytes from memory, or into new memory, at the best of five settings. Extra "
        "memory is what the process needed at its highest beyond the state itself.\n"
    )
    rows = document["summary"]
    for service, latency_s in dict.fromkeys((r["service"], r["latency_s"]) for r in rows):
        text += f"\n### {SERVICE_NAMES[service]}, {latency_s * 1000:.0f} ms added to every request\n\n"
        header = ["operation", "size", "contender", "seconds", "MB/s", "of the ceiling", "against fsspec"]
        header += ["extra memory, MB", "CPU, s: client / server"]
        mine = [r for r in rows if (r["service"], r["latency_s"]) == (service, latency_s)]
        mine.sort(key=lambda r: (r["operation"] == "load", r["size_bytes"], r["tensors"]))
        text += table(header, [_checkpoint_row(row) for row in mine])
    if sharded := document["sharded_summary"]:
        text += "\n### Sharded over ranks (FSDP2, torch.distributed.checkpoint), S3 (SeaweedFS), no latency\n\n"
        header = ["ranks", "operation", "contender", "seconds", "MB/s", "against fsspec", "extra memory a rank, MB"]
        text += table(header, [_sharded_row(row) for row in sharded])
    if samples := [s for s in document["async"] if not s["first"]]:
        blocked, copied = (sorted(s[n] for s in samples)[len(samples) // 2] for n in ("blocked_s", "copy_s"))
        text += (
            f"\nAn asynchronous save of {samples[0]['size_bytes'] / 1e6:,.0f} MB returns after {blocked:.3f} s; "
            f"copying the state takes {copied:.3f} s (medians, memory reused).\n"
        )
    return text


def _checkpoint_row(row: dict[str, Any]) -> list[str]:
    small = ", small tensors" if row["tensors"] == "small" else ""
    start = [row["operation"], f"{row['size_bytes'] / 1e6:,.0f} MB{small}", _bold(row["contender"])]
    if "error" in row:
        return [*start, f"failed: {row['error'].splitlines()[0][:120]}", *[""] * 5]
    return [
        *start,
        spread(row["total_s"]),
        f"{row['bytes_per_s']['median'] / 1e6:,.0f}",
        f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else "",
        f"{row['of_fsspec']:.1f}x" if "of_fsspec" in row else "",
        f"{row['extra_bytes']['max'] / 1e6:,.0f}",
        f"{row['client_cpu_s']['median']:.2f} / {row['server_cpu_s']['median']:.2f}",
    ]


def _sharded_row(row: dict[str, Any]) -> list[str]:
    start = [str(row["num_ranks"]), row["operation"], _bold(row["contender"])]
    if "error" in row:
        return [*start, f"failed: {row['error'].splitlines()[0][:120]}", *[""] * 3]
    return [
        *start,
        spread(row["total_s"]),
        f"{row['bytes_per_s']['median'] / 1e6:,.0f}",
        f"{row['of_fsspec']:.1f}x" if "of_fsspec" in row else "",
        f"{row['extra_bytes']['max'] / 1e6:,.0f}",
    ]


def _patch_readers(document: dict[str, Any]) -> str:
    settings = document["settings"]
    fewer = ", ".join(f"{name} {count}" for name, count in settings["fewer_patches"].items())
    text = _head("Training patches", "patch_readers", document) + (
        f"\n{settings['patches']} patches of {settings['patch']} cubed ({fewer}), image and label, at random places of "
        f"two volumes of {' x '.join(map(str, settings['shape']))} ({settings['volume']}; {settings['label']}), "
        f"{settings['in_flight']} in flight; median (least to most) of {settings['rounds']} rounds, interleaved, each "
        f"in a fresh process; load of the machine before: {document['load_before']}. The patch's own bytes are "
        f"what it takes alone in our format, {settings['own_bytes'] / 1e6:.2f} MB on average; bytes and requests are "
        "counted by the server, opening the arrays included. Two volumes are few: in a real dataset a cache of this "
        "size seldom holds what the next patch needs.\n"
    )
    names = {"disk": "Files on disk", "bucket": "Bucket (emulator)"}
    for place, latency_s in dict.fromkeys((r["place"], r["latency_s"]) for r in document["summary"]):
        added = f", {latency_s * 1000:.0f} ms added to every request" if place == "bucket" else ""
        text += f"\n### {names[place]}{added}\n\n"
        rows = [r for r in document["summary"] if (r["place"], r["latency_s"]) == (place, latency_s)]
        header = ["contender", "patches/s", "CPU a patch, ms", "MB a patch", "times its own bytes", "requests a patch"]
        text += table([*header, "peak memory, MiB"], [_patch_row(r) for r in rows])
    if document["sweep"]:
        text += (
            "\n### Chunk size and codec\n\nOur reader, 20 ms added to every request. Encoding and decoding in MB of "
            "voxels per second of processor time. By plan: image chunks along a Hilbert curve, gaps of 32 KiB "
            "bridged; the worst is the worst patch of the run.\n\n"
        )
        header = ["chunk", "codec", "image, MB", "encode", "decode", "patches/s", "CPU a patch, ms", "times own bytes"]
        header += ["requests", "worst by plan", "by plan in row order: times own bytes, requests"]
        text += table(header, [_layout_row(r) for r in document["sweep"]])
    return text


def _patch_row(row: dict[str, Any]) -> list[str]:
    start = [_bold(row["contender"])]
    if "error" in row:
        return [*start, f"failed: {row['error'].splitlines()[0][:120]}", *[""] * 5]
    counted = ["", "", ""]
    if "bytes_per_patch" in row:
        counted = [f"{row['bytes_per_patch']['median'] / 1e6:.2f}", f"{row['times_own_bytes']['median']:.2f}"]
        counted.append(f"{row['requests_per_patch']['median']:.1f}")
    return [
        *start,
        spread(row["patches_per_s"], 1),
        f"{row['client_cpu_s_per_patch']['median'] * 1000:.0f}",
        *counted,
        f"{row['peak_rss_bytes']['median'] / 2**20:,.0f}",
    ]


def _layout_row(row: dict[str, Any]) -> list[str]:
    plans = {(p["order"], p["gap_bytes"]): p for p in row["by_plan"]}
    ours, plain = plans["hilbert", 32 * 1024], plans["row", 32 * 1024]
    return [
        str(row["chunk"]),
        row["codec"],
        f"{row['object_bytes']['image/c/0/0/0/0'] / 1e6:.1f}",
        f"{row['encode_mb_per_cpu_s']:.0f}",
        f"{row['decode_mb_per_cpu_s']:.0f}",
        spread(row["patches_per_s"], 1),
        f"{row['client_cpu_s_per_patch']['median'] * 1000:.0f}",
        f"{row['times_own_bytes']:.2f}",
        f"{row['requests_per_patch']:.1f}",
        f"{ours['worst_times_own_bytes']:.2f}",
        f"{plain['times_own_bytes']:.2f}, {plain['requests']:.1f}",
    ]


def _staging(document: dict[str, Any]) -> str:
    settings = document["settings"]
    text = _head("Staging", "staging", document) + (
        f"\n{settings['objects']:,} objects of {settings['object_bytes'] / 1e6:g} MB onto each of {settings['nodes']} "
        f"nodes' folders at once, {settings['concurrency']} requests in flight a node, "
        f"{settings['latency_s'] * 1000:.0f} ms added to every request; median (least to most) of "
        f"{settings['rounds']} rounds, interleaved. The nodes are processes of the machine that also serves: without a "
        "limit on their links its processors are the limit, and a plain read into memory has no writing to do. "
        "`read, then write` is that read and a file an object, without checksums or records; `voxlane "
        "again` is a second run.\n\n"
    )
    rows = []
    for row in document["summary"]:
        if "error" in row:
            rows.append(
                [row["link"], _bold(row["contender"]), f"failed: {row['error'].splitlines()[0][:120]}", "", "", ""]
            )
            continue
        again = row["contender"] == "voxlane again"
        rows.append(
            [
                row["link"],
                _bold(row["contender"]),
                spread(row["total_s"]),
                "" if again else f"{row['megabytes_per_s']:,.0f}",
                "" if again else f"{row['of_plain_read']:.0%}",
                f"{row['client_cpu_s']['median']:.1f} / {row['server_cpu_s']['median']:.1f}",
            ]
        )
    header = ("link", "contender", "seconds", "MB/s", "of the plain read", "CPU, s: client / server")
    return text + table(header, rows)


def _first_batch(document: dict[str, Any]) -> str:
    settings = document["settings"]
    text = _head("First batch", "first_batch", document) + (
        f"\nFrom before a process is started to its first batch of {settings['batch']}, of {settings['volumes']:,} "
        f"volumes; {settings['latency_s'] * 1000:.0f} ms added to every request; seconds of each step are medians. "
        "Requests and bytes are those the server answered until the process ended, what was read ahead included.\n\n"
    )
    steps = next((list(r["steps_s"]) for r in document["summary"] if "error" not in r), [])
    rows = []
    for row in document["summary"]:
        if "error" in row:
            rows.append([row["way"], f"failed: {row['error'].splitlines()[0][:120]}", *[""] * (len(steps) + 3)])
            continue
        counted = f"{row['server_requests']['median']:,.0f}", f"{row['server_bytes']['median'] / 1e6:.1f}"
        times = [spread(row["first_batch_s"]), spread(row["after_imports_s"])]
        rows.append([row["way"], *times, *(f"{s['median']:.2f}" for s in row["steps_s"].values()), *counted])
    return text + table(["way", "first batch, s", "without imports", *steps, "requests", "MB"], rows)


def _peers(document: dict[str, Any]) -> str:
    from peers_report import peers_section

    return peers_section(document)


_SECTIONS = {"loading": _loading, "listing": _listing, "compose": _compose, "checkpoint": _checkpoint}
_SECTIONS["patch_readers"] = _patch_readers
_SECTIONS["staging"] = _staging
_SECTIONS["first_batch"] = _first_batch
_SECTIONS["peers"] = _peers


def _ratio(row: dict[str, Any], ours: dict[str, Any]) -> str:
    if row is ours or "error" in ours:
        return ""
    return f"{row['total_s']['median'] / ours['total_s']['median']:.2f}x"


def _bold(contender: str) -> str:
    return f"**{contender}**" if contender == "voxlane" else contender
