"""The sections of docs/performance.md, each made from one result file: the text is here, the figures are from the
files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import training_report
from markdown_tables import SERVICE_NAMES, size_name, spread, table
from performance_claims import command_of, our_reader
from performance_results import (
    Document,
    Results,
    best,
    faster,
    first_row,
    link,
    missing,
    more,
    provenance,
    rows_of,
    sentence,
    times,
)

Section = Callable[[Results], str]
ALL_FIGURES = "All figures: [benchmarks/results](../benchmarks/results/README.md).\n"


def _section(title: str, name: str, body: Callable[[Results, Document], str]) -> Section:
    """Return a section that reports a missing result file."""

    def write(results: Results) -> str:
        document = results.get(name)
        if document is None:
            return f"## {title}\n\n{missing(command_of(name))}"
        head = results.picture(name, title) + provenance(name, command_of(name, document), document)
        return f"## {title}\n\n{head}\n{body(results, document)}"

    return write


# -- patches against whole objects -------------------------------------------------------------------------------------


def _segmentation(results: Results, document: Document) -> str:
    setting = document["setting"]
    cases = {leg["mode"]: leg for leg in document["data"]}
    whole = cases.get("whole-object", {}).get("sample_bytes")
    pause = f"a sleep of {setting['step_time_s']:g} s as the step" if setting["step_time_s"] else "no step at all"
    text = (
        f"`voxlane bench loading` runs the training loop with {pause}, to measure the loader. It loads batches "
        f"of {setting['batch']} crops of {' x '.join(map(str, setting['patch']))} with "
        f"{_count(setting['ranks'], 'rank')}, {_count(setting['workers'], 'loader process', 'loader processes')} and "
        f"{setting['prefetch']} batches prefetched, from {document['data'][0]['cases']:,} cases "
        f"({document.get('volume', 'as they are')}). A sample is read either as the complete objects of a case"
        f"{f' ({whole / 1e6:.0f} MB)' if whole else ''} or as the chunks that it needs. Server: "
        f"{describe_server(document['server'])}. The server counts the bytes that it sends. Figures are the median "
        f"(minimum to maximum) of {setting['epochs']} epochs.\n\n"
    )
    header = ["mode", "cache", "samples/s", "Gbps", "requests/s", "MB per sample", "requests per sample", "stall"]
    header += ["first batch, s", "memory, MiB", "bottleneck"]
    text += table(header, [_loading_epochs(row) for row in document["summary"]])
    if compared := document["comparison"]:
        same = "the same samples" if compared["same_samples"] else "**not** the same samples"
        text += (
            f"\nFor {same} and cache {compared['cache']}, patches transfer {compared['bytes_ratio']:.1f} times fewer "
            f"bytes, counted by the {compared['counted_by']}, and load {compared['samples_per_s_ratio']:.1f} times the "
            f"samples per second ({compared['samples_per_s_ratio_min']:.1f} to "
            f"{compared['samples_per_s_ratio_max']:.1f}). Part of the difference is compression; the rest is that a "
            "crop is smaller than a volume. Compressed raw volumes would transfer fewer bytes.\n"
        )
    runs = {name: results.documents[name] for name in results.documents if name.startswith("simulator/")}
    if runs:
        text += "\n### On several processes\n\n`python benchmarks/check_simulator.py` measured these runs on small "
        text += "volumes. The simulator is checked against them.\n\n"
        lines = [
            [str(run["setting"]["ranks"]), f"{run['setting']['step_time_s']:g}", describe_server(run["server"]), *cells]
            for run in runs.values()
            for cells in map(_loading_epochs, run["summary"])
        ]
        text += table(["ranks", "step, s", "server", *header], lines)
    return text


def _count(number: int, one_of: str, several: str = "") -> str:
    """`1 rank`, `2 ranks`, `no rank`."""
    return f"{number or 'no'} {one_of if number == 1 else several or one_of + 's'}"


def _loading_epochs(row: dict[str, Any]) -> list[str]:
    counted = row.get("server_bytes_per_sample") or row["bytes_per_sample"]
    stall = row["stall_share"]
    return [
        row["mode"],
        row["cache"],
        spread(row["samples_per_s"], 1),
        f"{row['gbps']['median']:.2f}",
        f"{row['requests_per_s']['median']:,.0f}",
        f"{counted['median'] / 1e6:.2f}",
        f"{row['requests_per_sample']['median']:.1f}",
        "" if stall is None else f"{stall['median']:.0%}",
        spread(row["first_batch_s"]),
        f"{row['memory_bytes']['median'] / 2**20:,.0f}",
        row.get("bound", ""),
    ]


def describe_server(server: Document | None) -> str:
    """Return the kind and the faults of a server in words."""
    if not server:
        return "one without counters"
    faults = server["faults"]
    parts = [f"{faults['latency_s'] * 1000:g} ms per request"] if faults.get("latency_s") else []
    parts += [f"up to {faults['jitter_s'] * 1000:g} ms more"] if faults.get("jitter_s") else []
    limits = {"bandwidth_bytes_per_s": "per connection", "total_bandwidth_bytes_per_s": "in all"}
    parts += [f"{faults[name] / 1e6:g} MB/s {scope}" for name, scope in limits.items() if faults.get(name)]
    parts += [f"{faults['requests_per_s']:g} requests/s"] if faults.get("requests_per_s") else []
    parts += [f"{faults['error_rate']:.0%} errors"] if faults.get("error_rate") else []
    return f"{server['kind']}, {', '.join(parts) or 'no faults'}"


# -- peers -------------------------------------------------------------------------------------------------------------


def peers(results: Results) -> str:
    """Return the section about other loaders, whose text is in medical_loader_report."""
    document = results.get("peers")
    if document is None:
        return f"## Peers: the same patches by other loaders\n\n{missing(command_of('peers'))}"
    from medical_loader_report import peers_section

    return peers_section(document).replace("](peers.png)", "](../benchmarks/results/peers.png)")


# -- first batch -------------------------------------------------------------------------------------------------------


def _first_batch(results: Results, document: Document) -> str:
    setting = document["settings"]
    table_mb, manifests = setting["table_bytes"] / 1e6, setting["manifest_bytes"]
    listed = f", the manifests {sentence([f'{b / 1e6:.1f} MB' for b in manifests.values()])}" if manifests else ""
    text = (
        f"The bucket has a dataset of {setting['volumes']:,} volumes of {' x '.join(map(str, setting['shape']))}, with "
        f"{setting['latency_s'] * 1000:.0f} ms added to every request. The table shows the seconds from just before "
        f"the process starts to its first batch of {setting['batch']} crops of {setting['patch'][0]} cubed, and how "
        f"they are spent. Each of {setting['rounds']} interleaved rounds uses a fresh process, with files in the page "
        f"cache. The table of cases takes {table_mb:.1f} MB in the bucket{listed}. `known` is the time from the last "
        "import until the cases are known from the table, the manifests or a listing of the bucket.\n\n"
    )
    header = [
        "method",
        "first batch, s",
        "interpreter",
        "torch",
        "voxlane",
        "known",
        "dataset built",
        "batch",
        "MB served",
    ]
    rows = []
    for row in document["summary"]:
        if "error" in row:
            rows.append([row["way"], f"failed: {row['error'][:120]}", *[""] * 7])
            continue
        steps = [f"{step['median']:.2f}" for step in row["steps_s"].values()]
        rows.append([row["way"], spread(row["first_batch_s"]), *steps, f"{row['server_bytes']['median'] / 1e6:.1f}"])
    return text + table(header, rows)


# -- loading whole objects ---------------------------------------------------------------------------------------------


def _loading(_: Results, document: Document) -> str:
    setting = document["settings"]
    text = (
        f"Every contender loads one epoch of whole objects with {setting['num_workers']} workers, with a latency of "
        f"{sentence([f'{s * 1000:.0f} ms' for s in setting['latencies_s']])} added to every request, in "
        f"{setting['rounds']} interleaved rounds. The last two columns show how many times longer the peers took.\n\n"
    )
    rows = []
    names = ("service", "latency_s", "style", "size_bytes")
    for cell in dict.fromkeys(tuple(row[name] for name in names) for row in document["summary"]):
        same_cell_rows = rows_of(document, **dict(zip(names, cell, strict=True)))
        our_row = next((r for r in same_cell_rows if r["contender"] == "voxlane"), None)
        others = sorted((r for r in same_cell_rows if r is not our_row), key=lambda r: float(r["total_s"]["median"]))
        if our_row is None or not others:
            continue
        service, latency_s, style, size_bytes = cell
        slower = [f"{r['contender']} {times(faster(our_row['total_s'], r['total_s']))}" for r in others]
        rate = f"{our_row['bytes_per_s']['median'] / 1e6:,.0f}"
        place = [SERVICE_NAMES[service], f"{latency_s * 1000:.0f} ms", style, size_name(size_bytes)]
        rows.append([*place, spread(our_row["total_s"]), rate, slower[0], "; ".join(slower[1:])])
    header = ("server", "latency", "style", "objects", "ours, s", "ours, MB/s", "the fastest peer", "others")
    return text + table(header, rows) + "\n" + ALL_FIGURES


def _listing(_: Results, document: Document) -> str:
    setting = document["settings"]
    rows = []
    for our_row in rows_of(document, contender="voxlane"):
        same_case_rows = rows_of(document, service=our_row["service"], keys=our_row["keys"])
        others = [r for r in same_case_rows if not r["contender"].startswith("voxlane")]
        parts = [
            f"{r['contender']} {spread(r['total_s'])}, {times(faster(our_row['total_s'], r['total_s']))}"
            for r in others
        ]
        sequential = [r for r in same_case_rows if r["contender"] == "voxlane sequential" and "error" not in r]
        place = [SERVICE_NAMES[our_row["service"]], f"{our_row['keys']:,}", spread(our_row["total_s"])]
        ratio = times(faster(our_row["total_s"], sequential[0]["total_s"])) if sequential else ""
        rows.append([*place, ratio, "; ".join(parts)])
    header = ("server", "keys", "ours, s", "sequentially", "peers, s, and how many times longer they took")
    return (
        f"Every contender reads all keys into memory, with {setting['latency_s'] * 1000:.0f} ms added to every "
        f"request. Ours has up to {setting['concurrency']} requests in flight; `sequentially` is how many times longer "
        "the same client takes with one request at a time.\n\n"
        + table(header, rows)
        + _distant_listing(document)
        + "\n"
        + ALL_FIGURES
    )


def _distant_listing(document: Document) -> str:
    ratios = [
        f"{row['keys']:,} keys in {spread(row['total_s'])} s, {row['of_sequential']:.1f} times as fast as sequentially"
        for row in document.get("distant_summary", [])
        if row["contender"] == "voxlane" and "of_sequential" in row
    ]
    if not ratios:
        return ""
    return f"\nWith {document['settings']['distant_latency_s'] * 1000:.0f} ms added: {'; '.join(ratios)}.\n"


def _compose(_: Results, document: Document) -> str:
    pays = [r for r in document["summary"] if "error" not in r and r["speedup"] > 1]
    text = (
        'This compares our composed download (`compose="on"`), which joins small objects on the server before reading '
        "them, with our plain concurrent reads. A ratio above 1 means that composed download was faster. It was faster "
        f"in {len(pays)} of {len(document['summary'])} settings, and in none where a join takes longer than a read, as "
        "on the real service. It is therefore off by default.\n\n"
    )
    if any("compose 150" in row["setting"] for row in pays):
        text = text.replace("and in none where", "including some where")
    sizes = sorted({r["size_bytes"] for r in document["summary"]})
    rows = []
    for setting in dict.fromkeys(r["setting"] for r in document["summary"]):
        for style in ("map", "iterable"):
            mine = {r["size_bytes"]: r for r in rows_of(document, setting=setting, style=style)}
            rows.append([setting, style, *(f"{mine[s]['speedup']:.2f}" if s in mine else "" for s in sizes)])
    header = ["added to every request", "style", *map(size_name, sizes)]
    return text + table(header, rows) + "\n" + ALL_FIGURES


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _checkpoints(_: Results, document: Document) -> str:
    rows = []
    for our_row in rows_of(document, contender="voxlane"):
        place = {n: our_row[n] for n in ("service", "latency_s", "operation", "size_bytes", "tensors")}
        others = [r for r in rows_of(document, **place) if r["contender"] not in ("voxlane", "ceiling")]
        fastest = best(others, "total_s", least=True)
        if fastest is None:
            continue
        memory = f"{our_row['extra_bytes']['max'] / 1e6:,.0f} / {fastest['extra_bytes']['max'] / 1e6:,.0f}"
        rows.append(
            [
                our_row["operation"],
                f"{our_row['size_bytes'] / 1e6:,.0f} MB{', small tensors' if our_row['tensors'] == 'small' else ''}",
                f"{SERVICE_NAMES[our_row['service']]}, {our_row['latency_s'] * 1000:.0f} ms",
                spread(our_row["total_s"]),
                f"{fastest['contender']} {spread(fastest['total_s'])}",
                times(faster(our_row["total_s"], fastest["total_s"])),
                f"{our_row['of_ceiling']:.0%}" if "of_ceiling" in our_row else "",
                memory,
            ]
        )
    rows.sort(key=lambda row: row[0] == "load")
    header = ("operation", "size", "server", "ours, s", "fastest peer, s", "ours is faster by", "of the ceiling")
    failed = sorted({r["contender"] for r in document["summary"] if "error" in r})
    text = (
        "One process saves or loads one file. Each row compares ours with the fastest peer. The ceiling is the rate at "
        "which the engine moves the same number of bytes from or to memory. Loaded values were compared with the saved "
        "ones. Extra memory excludes the state itself.\n\n"
    )
    text += table([*header, "extra memory, MB: ours / peer"], rows)
    if failed:
        text += f"\n{sentence(failed).capitalize()} failed to save; the error is in the result file.\n"
    return text + "\n" + ALL_FIGURES


# -- patch readers -----------------------------------------------------------------------------------------------------


def _patch_readers(_: Results, document: Document) -> str:
    setting = document["settings"]
    text = (
        f"One process reads {setting['patches']} patches of {setting['patch']} cubed with labels from two volumes of "
        f"{' x '.join(map(str, setting['shape']))} ({setting['volume']}), with {setting['in_flight']} in flight. All "
        "readers read the same Zarr objects, except the one that reads whole .nii.gz files. Peers with a cache are "
        f"compared with our reader with a cache. {_faster_readers(document)}\n\n"
    )
    rows = []
    for row in rows_of(document):
        our_row = our_reader(document, row)
        place = "disk" if row["place"] == "disk" else f"bucket, {row['latency_s'] * 1000:.0f} ms"
        ratio = "" if our_row is None else times(more(our_row["patches_per_s"], row["patches_per_s"]))
        counted = ["", ""]
        if "times_own_bytes" in row:
            counted = [f"{row['times_own_bytes']['median']:.2f}", f"{row['requests_per_patch']['median']:.1f}"]
        rows.append([place, row["contender"], spread(row["patches_per_s"], 1), ratio, *counted])
    header = ("from", "reader", "patches/s", "ours is faster by", "times the patch's own bytes", "requests per patch")
    return text + table(header, rows) + "\n" + ALL_FIGURES


def _faster_readers(document: Document) -> str:
    """Return a sentence about the readers that were faster than ours."""
    lost: dict[str, int] = {}
    for row in rows_of(document):
        our_row = our_reader(document, row)
        if our_row is not None and our_row["patches_per_s"]["median"] < row["patches_per_s"]["median"]:
            lost[row["contender"]] = lost.get(row["contender"], 0) + 1
    places = len({(row["place"], row["latency_s"]) for row in document["summary"]})
    parts = [f"{name} in {count} of {places} settings" for name, count in lost.items()]
    return f"Faster than ours: {sentence(parts)}." if parts else "None was faster than ours."


# -- staging, scaling --------------------------------------------------------------------------------------------------


def _staging(_: Results, document: Document) -> str:
    setting = document["settings"]
    rows = []
    for row in rows_of(document):
        read = first_row(document, link=row["link"], contender="plain read")
        ratio = "" if read is None or read is row else times(faster(row["total_s"], read["total_s"]))
        cpu = f"{row['client_cpu_s']['median']:.1f} / {row['server_cpu_s']['median']:.1f}"
        rows.append([row["link"], row["contender"], spread(row["total_s"]), ratio, cpu])
    return (
        f"This stages {setting['objects']:,} objects of {setting['object_bytes'] / 1e6:g} MB on each of "
        f"{setting['nodes']} nodes at once and compares that with a plain parallel read of the same bytes into memory. "
        "Staging also lists, checksums, writes and records the objects. The nodes are processes on one machine, which "
        "also runs the server.\n\n"
        + table(("link", "method", "seconds", "against the plain read", "CPU, s: client / server"), rows)
    )


def _scaling(_: Results, document: Document) -> str:
    setting = document["setting"]
    workers = [
        [
            f"{row['workers']}, {row['mode']}",
            spread(row["patches_per_s"]),
            spread(row["efficiency"], 3),
            f"{row['exposed_share']:.1%}",
            spread(row["start_s"], 1),
        ]
        for row in document["workers"]
    ]
    trials = [
        [str(row["concurrent"]), spread(row["makespan_s"], 1), f"{row['ideal_s']:g}", spread(row["efficiency"], 3)]
        for row in document["trials"]
    ]
    return (
        "Ranks are processes on one machine, started by Ray. The arithmetic of a step is replaced by a wait of "
        f"{setting['step_time_s']:g} s; everything else is real ([benchmarks/README.md](../benchmarks/README.md)). "
        "This shows the overhead of the framework, not how a GPU cluster scales. No peer was measured.\n\n"
        + table(("workers", "patches/s", "efficiency", "waiting for gradients", "start-up, s"), workers)
        + f"\n{setting['trials']} trials of {setting['trial_time_s']:g} s each:\n\n"
        + table(("concurrent trials", "makespan, s", "ideal, s", "efficiency"), trials)
    )


# -- a training step ---------------------------------------------------------------------------------------------------


def _step(_: Results, document: Document) -> str:
    setting, floor = document["setting"], document["floor"]
    patch = " x ".join(map(str, setting["patch"]))
    text = (
        f"This measures one training step (forward, loss, backward, optimizer) on one {setting['device']}, with "
        f"{setting['batch']} patches of {patch}, {setting['channels']} channel and {setting['outputs']} outputs. All "
        f"variants run in one process, in turns, for {setting['rounds']} rounds of {setting['steps']} steps, with "
        "patches already on the device. Figures are the median (minimum to maximum) of the medians of the rounds. The "
        "floor is the arithmetic of the convolutions at the rate of a large matrix product in the same run, "
        f"{floor['matrix_flops_per_s'] / 1e12:,.0f} TFLOP/s; a copy moved "
        f"{floor['copy_bytes_per_s'] / 1e12:.2f} TB/s. [step.md](step.md) describes the variants.\n\n"
    )
    first: dict[str, dict[str, Any]] = {}
    lines = []
    for row in document["summary"]:
        if "error" in row:
            lines.append([row["variant"], f"failed: {row['error'][:120]}", *[""] * 7])
            continue
        base = first.setdefault(row["kind"], row)
        ratio = "" if base is row else times(faster(row["step_ms"], base["step_ms"]))
        memory = ["" if row[n] is None else f"{row[n] / 2**30:.1f}" for n in ("peak_bytes", "held_bytes")]
        cells = [spread(row["step_ms"]), ratio, f"{row['patches_per_s']['median']:.1f}", f"{row['times_floor']:.2f}"]
        lines.append([row["variant"], *cells, f"{row['first_s']:.1f}", *memory, _loss(row)])
    header = [
        "variant",
        "ms per step",
        "faster than the first variant of the same network",
        "patches/s",
        "times the floor",
    ]
    text += table([*header, "start-up, s", "peak GiB", "held GiB", "loss: first, last"], lines)
    profiled = [row for row in rows_of(document) if row["profile"]]
    if profiled:
        groups = profiled[0]["profile"]["groups_ms"]
        parts = [[name, *(f"{row['profile']['groups_ms'][name]:.2f}" for row in profiled)] for name in groups]
        text += "\nMilliseconds by group of kernels:\n\n"
        text += table(["group", *(row["variant"] for row in profiled)], parts)
    notes = [f"{row['variant']}: {note}" for row in document["summary"] for note in row["notes"]]
    return text + (f"\n{'; '.join(notes)}.\n" if notes else "")


def _windows(_: Results, document: Document) -> str:
    setting = document["setting"]
    rows = [
        [
            {"ours": "our kernels", "plain": "PyTorch's operations"}[row["network"]],
            "8" if row["mirrored"] else "1",
            ", ".join(f"{seconds:.2f}" for seconds in row["seconds"]),
            f"{row['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in row else "",
        ]
        for row in document["summary"]
    ]
    return (
        f"This predicts a volume of {' x '.join(map(str, setting['shape']))} voxels (noise) in the machine's memory "
        "with MLPerf's U-Net3D in bfloat16 with initial weights. Windows of "
        f"{setting['patch']} cubed overlap by half, and {setting['batch']} are computed at once. The time runs from "
        "the call until the logits are in the machine's memory. The relative difference between the logits of both "
        f"networks is {document['relative_difference']:.1e}.\n\n"
        + table(("network", "mirrorings", "seconds", "peak GiB"), rows)
    )


def _async_save(_: Results, document: Document) -> str:
    sections = [("in turns", document["summary"])]
    if "alone" in document:
        sections.append(("alone", document["alone"]["summary"]))
    rows = [
        [f"{row['contender']}, {kind}", f"failed: {row['error']}", "", "", ""]
        if "error" in row
        else [
            f"{row['contender']}, {kind}",
            *(_milliseconds(row[name]) for name in ("call_s", "worst_step_s", "total_s")),
            f"{1e3 * row['first_worst_step_s']:,.0f}",
        ]
        for kind, summary in sections
        for row in summary
    ]
    setting = document["settings"]
    return (
        f"This saves {setting['state_bytes'] / 1e9:.2f} GB of weights and optimizer state from the GPU to a folder in "
        "memory while training goes on. The second column is the time until the call returns. The third is the longest "
        "delay of a single step, including the call; the fourth adds up the delays of all steps until the save is "
        "complete. The last column is the third one for the first save, which also allocates memory. Every checkpoint "
        "was loaded again and compared with the state at the time of the call. With overlapped staging, the optimizer "
        'waits for torch before it changes the weights. "In turns" means that the contenders took turns in one '
        'process; "alone" is a second run.\n\n'
        + table(("saved by", "call, ms", "longest delay of a step, ms", "delay in all, ms", "first save, ms"), rows)
    )


def _milliseconds(figures: dict[str, float]) -> str:
    return spread({name: 1e3 * value for name, value in figures.items()}, 1)


def _loss(row: dict[str, Any]) -> str:
    return (
        f"{row['first_loss']:.3f}, {row['last_loss']:.3f}"
        if row["finite"] and row["first_loss"] is not None
        else "**not finite**"
    )


# -- accuracy ----------------------------------------------------------------------------------------------------------


def accuracy(results: Results) -> str:
    """Return the section about the Dice of the stored runs."""
    rows = []
    for name in sorted({name.split("/")[1] for name in results.documents if name.startswith("hippocampus/")}):
        scores, run, stall = (results.get(f"hippocampus/{name}/{file}") for file in ("summary", "run", "stall"))
        if scores is None or run is None or stall is None:
            continue
        config, device = run["config"], run["environment"]["device"]
        targets = " / ".join(f"{t['dice']['mean']:.3f}" for t in scores["targets"].values())
        trained = f"{stall['steps']:,} steps, {stall['seconds']:.0f} s"
        place = link(f"hippocampus/{name}/summary")
        dice = f"{scores['mean_dice']:.3f}"
        rows.append([f"{device}, {config['preset']}", trained, dice, targets, str(scores["cases"]), place])
    text = "## Accuracy\n\n" + results.picture("hippocampus/hippocampus", "Accuracy")
    if not rows:
        return text + missing(command_of("hippocampus/h200/summary"))
    return (
        text
        + "Decathlon Task04, fold 0, scored in the scans' own grid. `benchmarks/hippocampus.py` lists the commands.\n\n"
        + table(("device, preset", "training", "mean Dice", "anterior / posterior", "cases held out", "file"), rows)
        + "\nThe peer, nnU-Net 2.8.1 as it ships, reached a mean Dice of 0.891 in 299 s on one H200, with all 217 "
        "cases for training and other cases held out. The cases differ and its result file was not stored, so the "
        "figures are only roughly comparable. The cases held out here also selected the weights of the H200 run.\n"
    )


def kills(results: Results) -> str:
    """Return the section about kill tests."""
    text = "## Kill tests\n\n"
    for name, killed_processes in (("kill", "Saving processes killed"), ("kill_training", "Runs on Ray killed")):
        document = results.get(name)
        if document is None:
            text += f"{killed_processes}: {missing(command_of(name))}\n"
            continue
        text += f"{killed_processes} at random moments (seed {document['seed']}): {document['summary']}.\n\n"
        text += provenance(name, command_of(name, document), document) + "\n"
    return text.rstrip("\n") + "\n"


SECTIONS: tuple[Section, ...] = (
    _section("Patches against whole objects", "segmentation_loading", _segmentation),
    peers,
    _section("First batch of 105,000 volumes", "first_batch", _first_batch),
    _section("Loading from a bucket", "loading", _loading),
    _section("Listing", "listing", _listing),
    _section("Composed download", "compose", _compose),
    _section("Checkpoints", "checkpoint", _checkpoints),
    _section("Saving in the background of training on a GPU", "async_save", _async_save),
    _section("Patch readers", "patch_readers", _patch_readers),
    _section("Staging", "staging", _staging),
    _section("Scaling", "scaling", _scaling),
    _section("A training step", "step", _step),
    _section("Sliding windows", "windows", _windows),
    accuracy,
    _section("Accuracy by the clock", "training_hippocampus", training_report.hippocampus),
    _section("The fast path against the plain one", "training_curves", training_report.curves),
    _section("Training from disk", "training_disk", training_report.disk),
    kills,
)
"""In the page's order; the simulator's goes after the first batch's."""
