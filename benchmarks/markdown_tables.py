"""The result files as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from performance_results import SCRIPTS

SERVICE_NAMES = {"s3": "S3 (SeaweedFS)", "gcs": "GCS (emulator)"}


def readme(documents: dict[str, dict[str, Any]]) -> str:
    """The whole page; sections for the results there are."""
    sections = [
        "# Benchmark results\n\n`python benchmarks/plot.py` writes this page from the JSON files in this folder; do "
        "not edit it. `python benchmarks/run.py` measures again. [docs/performance.md](../../docs/performance.md) "
        "summarizes the figures and lists the cases where we are slower.\n"
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
        f"## {title}\n\n![{title}]({name}.png)\n\n`python benchmarks/{SCRIPTS[name]}`, results in `{name}.json`. "
        f"{hardware_line(document)}.\n\n{versions}.\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def spread(value: dict[str, float], digits: int = 2) -> str:
    """`median (minimum to maximum)`."""
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f} to {value['max']:.{digits}f})"


def _loading(document: dict[str, Any]) -> str:
    settings = document["settings"]
    cases = ", ".join(
        f"{c['count']} x {size_name(c['size_bytes'])} in batches of {c['batch_size']}" for c in settings["cases"]
    )
    text = _head("Loading", "loading", document) + (
        f"\nAn epoch is {cases}. Every contender uses {settings['num_workers']} DataLoader workers. Figures are the "
        f"median (minimum to maximum) of {settings['rounds']} interleaved rounds, each epoch in a fresh process; "
        f"much slower contenders run {settings['rounds_when_slow']['rounds']} rounds. "
        "Time runs from the start of iteration, so it includes "
        "starting the workers. Samples are uint8 tensors, stacked into batches. fsspec "
        "(s3fs, gcsfs) fetches each batch with one concurrent `cat`; boto3 and google-cloud-storage get one object per "
        "sample. Memory is the sum of the resident memory of the client's processes, so shared memory counts more than "
        "once.\n"
    )
    places: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for row in document["summary"]:
        places.setdefault((row["service"], row["latency_s"], row["style"]), []).append(row)
    for (service, latency_s, style), rows in places.items():
        our_rows = {r["size_bytes"]: r for r in rows if r["contender"] == "voxlane"}
        text += f"\n### {SERVICE_NAMES[service]}, {latency_s * 1000:.0f} ms added to every request, {style}-style\n\n"
        header = ["size", "contender", "seconds", "objects/s", "MB/s", "ours is faster by", "first batch, s"]
        header += ["peak memory, MiB", "CPU, s: client / server", "requests"]
        text += table(header, [_loading_row(r, our_rows[r["size_bytes"]]) for r in rows])
    return text


def _loading_row(row: dict[str, Any], our_row: dict[str, Any]) -> list[str]:
    start = [size_name(row["size_bytes"]), _bold(row["contender"])]
    if "error" in row:
        return [*start, f"failed: {row['error'].splitlines()[0][:120]}", *[""] * 7]
    return [
        *start,
        spread(row["total_s"]),
        f"{row['objects_per_s']['median']:,.0f}",
        f"{row['bytes_per_s']['median'] / 1e6:,.0f}",
        _ratio(row, our_row),
        f"{row['first_batch_s']['median']:.2f}",
        f"{row['peak_rss_bytes']['median'] / 2**20:,.0f}",
        f"{row['client_cpu_s']['median']:.2f} / {row['server_cpu_s']['median']:.2f}",
        f"{sum(row['server_requests'].values()):,}",
    ]


def _listing(document: dict[str, Any]) -> str:
    settings = document["settings"]
    text = _head("Listing", "listing", document) + (
        f"\nEvery contender reads all keys into memory, with {settings['latency_s'] * 1000:.0f} ms added to every "
        f"request. Ours keeps up to {settings['concurrency']} requests in flight; Dataflux runs "
        f"{settings['dataflux_processes']} processes (its default, the number of cores). `voxlane dataset` is the "
        "listing of a dataset on first use.\n\n"
    )
    rows = document["summary"]
    our_rows = {(r["service"], r["keys"]): r for r in rows if r["contender"] == "voxlane"}
    header = ["server", "keys", "contender", "seconds", "ours is faster by", "requests", "peak memory, MiB"]
    header += ["CPU, s: client / server"]
    text += table(header, [_listing_row(r, our_rows[r["service"], r["keys"]]) for r in rows])
    distant = document.get("distant_summary", [])
    if our_row := next((r for r in distant if r["contender"] == "voxlane"), None):
        text += f"\nWith {settings['distant_latency_s'] * 1000:.0f} ms added to every request:\n\n"
        text += table(header, [_listing_row(r, our_row) for r in distant])
    return text


def _listing_row(row: dict[str, Any], our_row: dict[str, Any]) -> list[str]:
    start = [SERVICE_NAMES[row["service"]], f"{row['keys']:,}", _bold(row["contender"])]
    if "error" in row:
        return [*start, f"failed: {row['error'].splitlines()[0][:120]}", *[""] * 4]
    return [
        *start,
        spread(row["total_s"]),
        _ratio(row, our_row),
        f"{row['requests']['median']:,.0f}",
        f"{row['peak_rss_bytes']['median'] / 2**20:,.0f}",
        f"{row['client_cpu_s']['median']:.2f} / {row['server_cpu_s']['median']:.2f}",
    ]


def _compose(document: dict[str, Any]) -> str:
    settings = document["settings"]
    text = _head("Composed download", "compose", document) + (
        f'\n`compose="on"` against `compose="off"`, {settings["num_workers"]} workers, batches of '
        f"{settings['batch_size']}; median (minimum to maximum) of {settings['rounds']} rounds. "
        "A speed-up above 1 means that composing is faster.\n\n"
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
        "\nOne process saves or loads one file. Tensors have 16 MiB, or some hundred KB in the rows of small tensors. "
        "Figures are the median (minimum to maximum) of interleaved calls, each in a fresh process. The loaded state "
        "was compared with the saved one. Client and server share the cores, so the server's processor time is part of "
        "every figure. The ceiling is the rate at which the engine moves the same number of bytes from memory, or into "
        "new memory, with the best of five settings. Extra memory is the peak memory of the process beyond the state "
        "itself.\n"
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
        header = ["ranks", "operation", "contender", "seconds", "MB/s", "against fsspec", "extra memory per rank, MB"]
        text += table(header, [_sharded_row(row) for row in sharded])
    if samples := [s for s in document["async"] if not s["first"]]:
        blocked, copied = (sorted(s[n] for s in samples)[len(samples) // 2] for n in ("blocked_s", "copy_s"))
        text += (
            f"\nAn async save of {samples[0]['size_bytes'] / 1e6:,.0f} MB returns after {blocked:.3f} s; "
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
        f"\nA reader reads {settings['patches']} patches of {settings['patch']} cubed ({fewer}), image and label, at "
        f"random positions in two volumes of {' x '.join(map(str, settings['shape']))} ({settings['volume']}; "
        f"{settings['label']}), with {settings['in_flight']} in flight. Figures are the median (minimum to maximum) of "
        f"{settings['rounds']} interleaved rounds, each in a fresh process. The load average before the benchmark was "
        f"{document['load_before']}. A patch's own bytes are its size when stored alone in our format, "
        f"{settings['own_bytes'] / 1e6:.2f} MB on average. The server counts bytes and requests, including those that "
        "open the arrays. Two volumes favour caches: in a real dataset, a cache of this size seldom holds the chunks "
        "of the next patch.\n"
    )
    names = {"disk": "Files on disk", "bucket": "Bucket (emulator)"}
    for place, latency_s in dict.fromkeys((r["place"], r["latency_s"]) for r in document["summary"]):
        added = f", {latency_s * 1000:.0f} ms added to every request" if place == "bucket" else ""
        text += f"\n### {names[place]}{added}\n\n"
        rows = [r for r in document["summary"] if (r["place"], r["latency_s"]) == (place, latency_s)]
        header = ["contender", "patches/s", "CPU per patch, ms", "MB per patch", "times its own bytes"]
        header += ["requests per patch"]
        text += table([*header, "peak memory, MiB"], [_patch_row(r) for r in rows])
    if document["sweep"]:
        text += (
            "\n### Chunk size and codec\n\nThese rows use our reader with 20 ms added to every request. `encode` and "
            "`decode` are MB of voxels per second of processor time. The last two columns are computed from the read "
            "plan of the image, in which gaps of up to 32 KiB are read through: the worst patch of the run with chunks "
            "along a Hilbert curve, and the mean with chunks in row order.\n\n"
        )
        header = [
            "chunk",
            "codec",
            "image, MB",
            "encode",
            "decode",
            "patches/s",
            "CPU per patch, ms",
            "times own bytes",
        ]
        header += ["requests", "worst, times own bytes", "row order: times own bytes, requests"]
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
    hilbert_plan, row_order_plan = plans["hilbert", 32 * 1024], plans["row", 32 * 1024]
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
        f"{hilbert_plan['worst_times_own_bytes']:.2f}",
        f"{row_order_plan['times_own_bytes']:.2f}, {row_order_plan['requests']:.1f}",
    ]


def _staging(document: dict[str, Any]) -> str:
    settings = document["settings"]
    text = _head("Staging", "staging", document) + (
        f"\nThis stages {settings['objects']:,} objects of {settings['object_bytes'] / 1e6:g} MB on each of "
        f"{settings['nodes']} nodes at once, with {settings['concurrency']} requests in flight per node and "
        f"{settings['latency_s'] * 1000:.0f} ms added to every request. Figures are the median (minimum to maximum) of "
        f"{settings['rounds']} interleaved rounds. The nodes are processes on the machine that also runs the server. "
        "Without a limit on their links, its processors are the limit, and a plain read into memory has the advantage "
        "that it writes nothing. `read, then write` is that read plus one file per object, without checksums or "
        "records. `voxlane again` is a second run.\n\n"
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
    header = ("link", "contender", "seconds", "MB/s", "speed relative to the plain read", "CPU, s: client / server")
    return text + table(header, rows)


def _first_batch(document: dict[str, Any]) -> str:
    settings = document["settings"]
    text = _head("First batch", "first_batch", document) + (
        f"\nThe time runs from just before a process starts to its first batch of {settings['batch']}, with a dataset "
        f"of {settings['volumes']:,} volumes and {settings['latency_s'] * 1000:.0f} ms added to every request. The "
        "seconds of each phase are medians. Requests and bytes are those that the server answered until the process "
        "ended, including prefetched data.\n\n"
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
    return text + table(["method", "first batch, s", "without imports", *steps, "requests", "MB"], rows)


def _peers(document: dict[str, Any]) -> str:
    from medical_loader_report import peers_section

    return peers_section(document)


_SECTIONS = {"loading": _loading, "listing": _listing, "compose": _compose, "checkpoint": _checkpoint}
_SECTIONS["patch_readers"] = _patch_readers
_SECTIONS["staging"] = _staging
_SECTIONS["first_batch"] = _first_batch
_SECTIONS["peers"] = _peers


def _ratio(row: dict[str, Any], our_row: dict[str, Any]) -> str:
    if row is our_row or "error" in our_row:
        return ""
    return f"{row['total_s']['median'] / our_row['total_s']['median']:.2f}x"


def _bold(contender: str) -> str:
    return f"**{contender}**" if contender == "voxlane" else contender
