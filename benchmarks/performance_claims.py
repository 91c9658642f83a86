"""The first table of docs/performance.md: what the product claims, ours beside the peer, and what is behind it; and the
list of everything in which a peer was faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from markdown_tables import SERVICE_NAMES, size_name, spread, table
from performance_results import Document, Results, Spread, best, faster, first_row, link, more, rows_of, settings, times

KIB, MIB = 1 << 10, 1 << 20
COMMANDS = {
    "loading": "python benchmarks/compare_loading.py",
    "segmentation_loading": "python benchmarks/compare_whole_objects.py",
    "peers": "python benchmarks/compare_medical_loaders.py",
    "first_batch": "python benchmarks/compare_first_batch.py",
    "scale": "voxlane bench simulate",
    "simulator": "python benchmarks/check_simulator.py",
    "listing": "python benchmarks/compare_listing.py",
    "compose": "python benchmarks/compare_composed_download.py",
    "checkpoint": "python benchmarks/compare_checkpoint.py",
    "async_save": "python benchmarks/compare_async_save.py",
    "patch_readers": "python benchmarks/compare_patch_readers.py --ct SCAN --label LABEL",
    "staging": "python benchmarks/compare_staging.py",
    "scaling": "voxlane bench scaling",
    "step": "voxlane bench step --out benchmarks/results/step.json",
    "hippocampus/h200/summary": "voxlane prepare, train epochs=80, evaluate; python benchmarks/hippocampus.py",
    "training_hippocampus": "python benchmarks/compare_training.py hippocampus Task04_Hippocampus",
    "training_curves": "python benchmarks/compare_training.py curves Task04_Hippocampus",
    "training_disk": "python benchmarks/compare_training.py disk --ct SCAN --label LABEL",
    "windows": "python benchmarks/compare_windows.py",
    "kill": "make kill-test",
    "kill_training": "make kill-train",
}
"""What writes each result file."""


_FLAGS = ("workers", "mode", "step_time", "steps", "warmup", "repeat", "trials", "trial_time", "concurrent")
"""Flags of `voxlane bench scaling` that its result file tells."""


def command_of(name: str, document: Document | None = None) -> str:
    """The command behind a result file, with its settings where the file tells them."""
    words = [COMMANDS[name]]
    recorded_settings = {} if document is None else settings(document)
    for flag in _FLAGS if name == "scaling" else ():
        value = next((recorded_settings[n] for n in (flag, f"{flag}_s", f"{flag}s") if n in recorded_settings), None)
        if value is not None:
            value_text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"--{flag.replace('_', '-')} {value_text}")
    if document is not None and name == "staging":
        words += [f'--only "{contender}"' for contender in dict.fromkeys(r["contender"] for r in document["summary"])]
    if name.startswith("scal"):
        words.append(f"--out benchmarks/results/{name}.json")
    return " ".join(words)


@dataclass(frozen=True)
class Figures:
    """One line's figures, as text."""

    voxlane: str
    peer: str
    ratio: str


@dataclass(frozen=True)
class Claim:
    """One line of the table."""

    title: str
    file: str
    find: Callable[[Document], Figures | None]
    """None when the file has no such figure."""


def _rate(
    document: Document, figure: str, contender: str, peer: str, unit: str, digits: int = 1, **place: object
) -> Figures | None:
    our_row, peer_row = first_row(document, contender=contender, **place), first_row(document, contender=peer, **place)
    if our_row is None or peer_row is None:
        return None
    return Figures(
        f"{spread(our_row[figure], digits)} {unit}",
        f"{peer}: {spread(peer_row[figure], digits)}",
        times(more(our_row[figure], peer_row[figure])),
    )


def _seconds(document: Document, peer: str = "", **place: object) -> Figures | None:
    """Against the peer that is named, else against the fastest of all."""
    our_row = first_row(document, contender="voxlane", **place)
    others = [r for r in rows_of(document, **place) if r["contender"] not in ("voxlane", "ceiling", "voxlane dataset")]
    others = [r for r in others if r["contender"] == peer] if peer else others
    peer_row = best([r for r in others if not r["contender"].startswith("voxlane")], "total_s", least=True)
    if our_row is None or peer_row is None:
        return None
    ratio = times(faster(our_row["total_s"], peer_row["total_s"]))
    return Figures(f"{spread(our_row['total_s'])} s", f"{peer_row['contender']}: {spread(peer_row['total_s'])}", ratio)


def _patch_bytes(document: Document) -> Figures | None:
    our_row, peer_row = (
        first_row(document, place="bucket", latency_s=0.02, contender=name) for name in ("voxlane", "whole .nii.gz")
    )
    if our_row is None or peer_row is None:
        return None
    our_ratio, peer_ratio = our_row["times_own_bytes"], peer_row["times_own_bytes"]
    return Figures(
        f"{our_ratio['median']:.2f}", f"whole .nii.gz: {peer_ratio['median']:.1f}", times(faster(our_ratio, peer_ratio))
    )


def _fewer_bytes(document: Document) -> Figures | None:
    comparison = document.get("comparison")
    by_mode = {row["mode"]: row for row in reversed(document["summary"])}
    if not comparison or set(by_mode) != {"patches", "whole-object"}:
        return None
    counted = "server_bytes_per_sample" if by_mode["patches"]["server_bytes_per_sample"] else "bytes_per_sample"
    patches_mb, whole_mb = (by_mode[mode][counted]["median"] / 1e6 for mode in ("patches", "whole-object"))
    return Figures(
        f"{patches_mb:.2f} MB per sample", f"whole objects: {whole_mb:.2f}", f"{comparison['bytes_ratio']:.1f}x fewer"
    )


def _more_samples(document: Document) -> Figures | None:
    comparison = document.get("comparison")
    by_mode = {row["mode"]: row for row in reversed(document["summary"])}
    if not comparison or set(by_mode) != {"patches", "whole-object"}:
        return None
    patches_rate, whole_rate = (by_mode[mode]["samples_per_s"] for mode in ("patches", "whole-object"))
    return Figures(
        f"{spread(patches_rate, 1)} samples/s",
        f"whole objects: {spread(whole_rate, 1)}",
        times(more(patches_rate, whole_rate)),
    )


def _first_batch(mode: str) -> Callable[[Document], Figures | None]:
    def find(document: Document) -> Figures | None:
        row = first_row(document, mode=mode, workers=0)
        if row is None:
            return None
        imports = row["first_batch_s"]["median"] - row["after_imports_s"]["median"]
        return Figures(f"{spread(row['first_batch_s'])} s, including {imports:.2f} s of imports", "aim: 3 s", "")

    return find


def _peer_bucket(document: Document) -> Figures | None:
    latency_s = max((row["latency_s"] for row in rows_of(document, place="bucket")), default=0.0)
    return _best_of_peers(document, place="bucket", latency_s=latency_s, our_contender="voxlane patches")


def _peer_disk(document: Document) -> Figures | None:
    return _best_of_peers(document, place="disk", our_contender="voxlane patches from disk")


def _best_of_peers(document: Document, *, our_contender: str, **place: object) -> Figures | None:
    our_row = first_row(document, contender=our_contender, **place)
    others = [row for row in rows_of(document, **place) if not row["contender"].startswith("voxlane")]
    peer_row = best(others, "samples_per_s", least=False)
    if our_row is None or peer_row is None:
        return None
    ratio = times(more(our_row["samples_per_s"], peer_row["samples_per_s"]))
    rates = spread(our_row["samples_per_s"], 1), spread(peer_row["samples_per_s"], 1)
    return Figures(f"{rates[0]} patches/s", f"the fastest, {peer_row['contender']}: {rates[1]}", ratio)


def _staged(link_name: str) -> Callable[[Document], Figures | None]:
    def find(document: Document) -> Figures | None:
        our_row, peer_row = (first_row(document, link=link_name, contender=name) for name in ("voxlane", "plain read"))
        if our_row is None or peer_row is None:
            return None
        ratio = times(faster(our_row["total_s"], peer_row["total_s"]))
        return Figures(
            f"{spread(our_row['total_s'])} s", f"plain read into memory: {spread(peer_row['total_s'])}", ratio
        )

    return find


def _scaling(document: Document) -> Figures | None:
    row = max(document["workers"], key=lambda row: int(row["workers"]), default=None)
    if row is None:
        return None
    return Figures(f"{spread(row['efficiency'], 3)} on {row['workers']} workers", "ideal: 1", "")


def _step(our_variant: str, peer: str) -> Callable[[Document], Figures | None]:
    def find(document: Document) -> Figures | None:
        our_row, peer_row = (first_row(document, variant=name) for name in (our_variant, peer))
        if our_row is None or peer_row is None:
            return None
        ratio = times(faster(our_row["step_ms"], peer_row["step_ms"]))
        return Figures(f"{spread(our_row['step_ms'], 1)} ms", f"{peer}: {spread(peer_row['step_ms'], 1)}", ratio)

    return find


def _from_disk(document: Document) -> Figures | None:
    row = next((row for row in document["summary"] if "error" not in row), None)
    if row is None:
        return None
    busy = "" if row["gpu"] is None else f", the GPU {row['gpu']['busy_share']:.0%} busy"
    return Figures(f"{row['patches_per_s']:.0f} patches/s{busy}", "", "")


def _windows(document: Document) -> Figures | None:
    our_row, plain_row = (first_row(document, network=name, mirrored=False) for name in ("ours", "plain"))
    if our_row is None or plain_row is None:
        return None
    ratio = plain_row["median_s"] / our_row["median_s"]
    return Figures(
        f"{our_row['median_s']:.1f} s", f"PyTorch's operations: {plain_row['median_s']:.1f} s", f"{ratio:.1f}x"
    )


def _async_save(document: Document) -> Figures | None:
    our_row = first_row(document, contender="voxlane AsyncSaver")
    peers = [row for row in document["summary"] if row is not our_row and "error" not in row]
    if our_row is None or "error" in our_row or not peers:
        return None
    peer = min(peers, key=lambda row: row["worst_step_s"]["median"])
    ratio = peer["worst_step_s"]["median"] / our_row["worst_step_s"]["median"]
    return Figures(
        f"{1e3 * our_row['worst_step_s']['median']:.1f} ms",
        f"{peer['contender']}: {1e3 * peer['worst_step_s']['median']:,.0f} ms",
        f"{ratio:,.0f}x",
    )


def _dice(document: Document) -> Figures:
    return Figures(f"{document['mean_dice']:.3f} on {document['cases']} cases", "nnU-Net: see [below](#accuracy)", "")


def _kills(document: Document) -> Figures:
    bad = sum(bool(kill["problems"]) for kill in document["kills"])
    return Figures(f"{len(document['kills']) - bad} of {len(document['kills'])} survived", "", "")


def _simulated(document: Document) -> Figures | None:
    rows = [row for row in (document["public"] or {}).get("rows", []) if row["nodes"] <= PLATEAU_NODES]
    if not rows:
        return None
    worst = max(abs(row["errors"][0]) for row in rows)
    nodes = f"{rows[0]['nodes']} to {rows[-1]['nodes']} nodes"
    return Figures(f"egress off by at most {worst:.0%} at {nodes}", "the public table, first epochs", "")


PLATEAU_NODES = 128
"""From more nodes on the public table is flat, and the simulator was fitted to it."""
SMALL = {"service": "s3", "latency_s": 0.02, "style": "map", "size_bytes": 100 * KIB}
LARGE = {"service": "s3", "latency_s": 0.02, "style": "map", "size_bytes": 150 * MIB}
CHECKPOINT = {"service": "s3", "size_bytes": 300_000_000, "latency_s": 0.02, "tensors": "large"}
MILLION = {"service": "gcs", "keys": 1_000_000}
AT_20_MS = {"place": "bucket", "latency_s": 0.02}
CLAIMS = (
    Claim("bytes transferred per training sample, patches against whole objects", "segmentation_loading", _fewer_bytes),
    Claim("the same in samples per second, one machine", "segmentation_loading", _more_samples),
    Claim("128-cubed patches from a bucket, 2 workers, against other loaders", "peers", _peer_bucket),
    Claim("the same from local disk", "peers", _peer_disk),
    Claim(
        "128-cubed patches at 20 ms, one process, against whole .nii.gz files",
        "patch_readers",
        lambda d: _rate(d, "patches_per_s", "voxlane", "whole .nii.gz", "patches/s", **AT_20_MS),
    ),
    Claim("bytes read for such a patch, relative to its own compressed bytes", "patch_readers", _patch_bytes),
    Claim(
        "the same patches, against another reader of the same objects",
        "patch_readers",
        lambda d: _rate(d, "patches_per_s", "voxlane", "tensorstore", "patches/s", **AT_20_MS),
    ),
    Claim(
        "first batch of 105,000 volumes, from the start of the process: patches", "first_batch", _first_batch("patches")
    ),
    Claim("the same, whole objects listed in a saved manifest", "first_batch", _first_batch("whole-object")),
    Claim("an epoch of 100 KiB objects, S3, 20 ms, 2 workers", "loading", lambda d: _seconds(d, **SMALL)),
    Claim(
        "the same on GCS, against Dataflux",
        "loading",
        lambda d: _seconds(d, "dataflux", **{**SMALL, "service": "gcs"}),
    ),
    Claim("an epoch of 150 MiB objects, S3, 20 ms, 2 workers", "loading", lambda d: _seconds(d, **LARGE)),
    Claim("listing a million keys, GCS, 20 ms", "listing", lambda d: _seconds(d, **MILLION)),
    Claim("saving a 300 MB checkpoint, S3, 20 ms", "checkpoint", lambda d: _seconds(d, operation="save", **CHECKPOINT)),
    Claim("loading that checkpoint", "checkpoint", lambda d: _seconds(d, operation="load", **CHECKPOINT)),
    Claim("staging 1 GB on each of 3 nodes, links of 1 Gbit/s", "staging", _staged("1 Gbit/s a node")),
    Claim("the same, links without a limit", "staging", _staged("none")),
    Claim("efficiency of training on many workers, 1 s steps", "scaling", _scaling),
    Claim("a training step of MLPerf's U-Net3D, against its reference", "step", _step("ours", "reference")),
    Claim("the same, against torch.compile", "step", _step("ours", "compile")),
    Claim("a training step of nnU-Net's network, against nnU-Net as it ships", "step", _step("nnunet-ours", "nnunet")),
    Claim("training from volumes on disk, 2 patches of 128 cubed per step, one H200", "training_disk", _from_disk),
    Claim("longest delay of a training step by a background save of 8 GB, one H200", "async_save", _async_save),
    Claim("sliding windows over 400 x 512 x 512 voxels, one H200", "windows", _windows),
    Claim("mean Dice on Hippocampus, one H200", "hippocampus/h200/summary", _dice),
    Claim("checkpoints after kills at random moments", "kill", _kills),
    Claim("training runs on Ray after kills", "kill_training", _kills),
    Claim("the simulator against the public table", "scale", _simulated),
)


def claims_table(results: Results) -> str:
    """All claims, those without a result told so."""
    header = ("claim", "ours", "peer", "ours is better by", "command", "file")
    lines = []
    for claim in CLAIMS:
        document = results.get(claim.file)
        claim_figures = None if document is None else claim.find(document)
        if document is None or claim_figures is None:
            figures = ["not measured yet", "", ""]
        else:
            quick = " (quick run: do not quote)" if settings(document).get("quick") else ""
            figures = [claim_figures.voxlane + quick, claim_figures.peer, claim_figures.ratio]
        file = link(claim.file) if document is not None else f"{claim.file}.json"
        lines.append([claim.title, *figures, f"`{COMMANDS[claim.file]}`", file])
    return table(header, lines)


# -- where we are slower -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defeat:
    """A measurement in which a peer's median was better."""

    measurement: str
    peer: str
    ratio: Spread
    """Ours against theirs, below 1."""
    file: str


def defeats(results: Results) -> list[Defeat]:
    """All of them, the worst first."""
    comparisons = [*_loading(results), *_listing(results), *_checkpoints(results), *_readers(results), *_peers(results)]
    comparisons += [*_copies(results), *_steps(results)]
    return sorted((d for d in comparisons if d.ratio["median"] < 1), key=lambda d: d.ratio["median"])


def defeats_table(results: Results) -> str:
    """The list as a table."""
    rows = [[d.measurement, d.peer, times(d.ratio), link(d.file)] for d in defeats(results)]
    return table(("measurement", "peer", "ours relative to the peer", "file"), rows)


def _against(
    document: Document, file: str, keys: tuple[str, ...], describe_row: Callable[[Document], str]
) -> Iterator[Defeat]:
    """Seconds of every contender that is not ours against ours at the same place."""
    for row in rows_of(document):
        if row["contender"].startswith("voxlane") or row["contender"] == "ceiling":
            continue
        mine = first_row(document, contender="voxlane", **{key: row[key] for key in keys})
        if mine is not None:
            yield Defeat(describe_row(row), row["contender"], faster(mine["total_s"], row["total_s"]), file)


def _loading(results: Results) -> Iterator[Defeat]:
    if (document := results.get("loading")) is not None:
        yield from _against(
            document,
            "loading",
            ("service", "latency_s", "style", "size_bytes"),
            lambda r: (
                f"an epoch of {size_name(r['size_bytes'])} objects, {SERVICE_NAMES[r['service']]}, "
                f"{r['latency_s'] * 1000:.0f} ms, {r['style']}-style"
            ),
        )


def _listing(results: Results) -> Iterator[Defeat]:
    if (document := results.get("listing")) is not None:
        yield from _against(
            document,
            "listing",
            ("service", "keys"),
            lambda r: f"listing {r['keys']:,} keys, {SERVICE_NAMES[r['service']]}",
        )


def _checkpoints(results: Results) -> Iterator[Defeat]:
    document = results.get("checkpoint")
    if document is None:
        return
    yield from _against(
        document,
        "checkpoint",
        ("service", "size_bytes", "tensors", "latency_s", "operation"),
        lambda r: (
            f"{r['operation']} of {r['size_bytes'] / 1e6:,.0f} MB in {r['tensors']} tensors, "
            f"{SERVICE_NAMES[r['service']]}, {r['latency_s'] * 1000:.0f} ms"
        ),
    )
    sharded: Document = {"summary": document["sharded_summary"]}
    yield from _against(
        sharded,
        "checkpoint",
        ("num_ranks", "operation"),
        lambda r: f"{r['operation']} of a model sharded over {r['num_ranks']} ranks",
    )


def _readers(results: Results) -> Iterator[Defeat]:
    document = results.get("patch_readers")
    if document is None:
        return
    for row in rows_of(document):
        mine = our_reader(document, row)
        if mine is not None:
            place = "disk" if row["place"] == "disk" else f"a bucket at {row['latency_s'] * 1000:.0f} ms"
            ratio = more(mine["patches_per_s"], row["patches_per_s"])
            yield Defeat(f"128-cubed patches from {place}, one process", row["contender"], ratio, "patch_readers")


def our_reader(document: Document, row: dict[str, Any]) -> dict[str, Any] | None:
    """Ours at the place of a peer's row of patch_readers.json, with a cache if that has one."""
    if row["contender"].startswith("voxlane"):
        return None
    alike = "voxlane, 256 MB cache" if "cache" in row["contender"] else "voxlane"
    return first_row(document, contender=alike, place=row["place"], latency_s=row["latency_s"])


def _peers(results: Results) -> Iterator[Defeat]:
    document = results.get("peers")
    if document is None:
        return
    for row in rows_of(document):
        if row["contender"].startswith("voxlane"):
            continue
        same_place = {"place": row["place"], "latency_s": row["latency_s"]}
        disk = row["place"] == "disk"
        mine = first_row(document, contender="voxlane patches from disk" if disk else "voxlane patches", **same_place)
        if mine is None:
            continue
        place = "disk" if disk else f"a bucket at {row['latency_s'] * 1000:.0f} ms"
        rate = more(mine["samples_per_s"], row["samples_per_s"])
        yield Defeat(f"128-cubed patches from {place}, 2 workers", row["contender"], rate, "peers")
        start = faster(mine["first_batch_s"], row["first_batch_s"])
        yield Defeat(f"time to the first batch from {place}", row["contender"], start, "peers")
        memory = faster(mine["peak_memory_bytes"], row["peak_memory_bytes"])
        yield Defeat(f"memory while loading from {place}", row["contender"], memory, "peers")


def _copies(results: Results) -> Iterator[Defeat]:
    document = results.get("staging")
    if document is None:
        return
    for row in rows_of(document):
        mine = first_row(document, contender="voxlane", link=row["link"])
        if mine is not None and not row["contender"].startswith("voxlane"):
            limit = "without a limit" if row["link"] == "none" else f"of {row['link']}"
            ratio = faster(mine["total_s"], row["total_s"])
            yield Defeat(f"staging on 3 nodes, links {limit}", row["contender"], ratio, "staging")


def _steps(results: Results) -> Iterator[Defeat]:
    document = results.get("step")
    if document is None:
        return
    for row in rows_of(document):
        mine = first_row(document, variant="ours" if row["kind"] == "mlperf" else "nnunet-ours")
        if mine is None or mine is row:
            continue
        step_name = f"a training step of {'MLPerf' if row['kind'] == 'mlperf' else 'nnU-Net'}'s network"
        yield Defeat(step_name, row["variant"], faster(mine["step_ms"], row["step_ms"]), "step")
        for name, words in (("peak_bytes", "peak memory"), ("held_bytes", "memory held")):
            if mine[name] and row[name]:
                ratio = row[name] / mine[name]
                yield Defeat(
                    f"{words}, {step_name}", row["variant"], dict.fromkeys(("median", "min", "max"), ratio), "step"
                )
