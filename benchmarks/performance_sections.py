"""The sections of docs/performance.md, each made from one result file: prose is here, figures are from the files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import step_training_report
from performance_claims import command_of, our_reader
from performance_results import (
    Document,
    Results,
    best,
    faster,
    link,
    missing,
    more,
    one,
    provenance,
    rows_of,
    sentence,
    times,
)
from tables import SERVICE_NAMES, size_name, spread, table

Section = Callable[[Results], str]
ALL_FIGURES = "All figures: [benchmarks/results](../benchmarks/results/README.md).\n"


def _section(title: str, name: str, body: Callable[[Results, Document], str]) -> Section:
    """A section that says so where its file is not there."""

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
    pause = f"a sleep of {setting['step_time_s']:g} s for a step" if setting["step_time_s"] else "no step at all"
    text = (
        f"`voxlane bench loading`, the training loop with {pause}, so that it is the loader that is measured: batches "
        f"of {setting['batch']} crops of {' x '.join(map(str, setting['patch']))}, {_count(setting['ranks'], 'rank')}, "
        f"{_count(setting['workers'], 'loader process', 'loader processes')} beside it, {setting['prefetch']} batches "
        f"on their way, {document['data'][0]['cases']:,} cases ({document.get('volume', 'as they are')}), a sample "
        f"either as the objects of a case{f' ({whole / 1e6:.0f} MB)' if whole else ''} or as the chunks it needs. "
        f"Server: {server_words(document['server'])}. Bytes are what the server sent. Median (least to most) of "
        f"{setting['epochs']} epochs.\n\n"
    )
    header = ["mode", "cache", "samples/s", "Gbps", "requests/s", "MB a sample", "requests a sample", "stall"]
    header += ["first batch, s", "memory, MiB", "what binds"]
    text += table(header, [_loading_epochs(row) for row in document["summary"]])
    if found := document["comparison"]:
        same = "the same samples" if found["same_samples"] else "**not** the same samples"
        text += (
            f"\nWith cache {found['cache']}, patches move {found['bytes_ratio']:.1f} times fewer bytes, as the "
            f"{found['counted_by']} counted, and give {found['samples_per_s_ratio']:.1f} times the samples a second "
            f"({found['samples_per_s_ratio_min']:.1f} to {found['samples_per_s_ratio_max']:.1f}), for {same}. Of the "
            "bytes, a part is compression, and a part is that a crop is less than a volume; raw volumes that were "
            "compressed would move fewer.\n"
        )
    runs = {name: results.documents[name] for name in results.documents if name.startswith("simulator/")}
    if runs:
        text += "\n### On several processes\n\n`python benchmarks/simulator.py` wrote these, over small volumes; the "
        text += "simulator is checked against them.\n\n"
        lines = [
            [str(run["setting"]["ranks"]), f"{run['setting']['step_time_s']:g}", server_words(run["server"]), *cells]
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


def server_words(server: Document | None) -> str:
    """What a server was made to do."""
    if not server:
        return "one that does not count"
    faults = server["faults"]
    told = [f"{faults['latency_s'] * 1000:g} ms a request"] if faults.get("latency_s") else []
    told += [f"up to {faults['jitter_s'] * 1000:g} ms more"] if faults.get("jitter_s") else []
    limits = {"bandwidth_bytes_per_s": "a connection", "total_bandwidth_bytes_per_s": "in all"}
    told += [f"{faults[name] / 1e6:g} MB/s {what}" for name, what in limits.items() if faults.get(name)]
    told += [f"{faults['requests_per_s']:g} requests/s"] if faults.get("requests_per_s") else []
    told += [f"{faults['error_rate']:.0%} errors"] if faults.get("error_rate") else []
    return f"{server['kind']}, {', '.join(told) or 'nothing in the way'}"


# -- peers -------------------------------------------------------------------------------------------------------------


def peers(results: Results) -> str:
    """Other loaders; the text is made beside the benchmark."""
    document = results.get("peers")
    if document is None:
        return f"## Peers: the same patches by other loaders\n\n{missing(command_of('peers'))}"
    from peers_report import peers_section

    return peers_section(document).replace("](peers.png)", "](../benchmarks/results/peers.png)")


# -- first batch -------------------------------------------------------------------------------------------------------


def _first_batch(results: Results, document: Document) -> str:
    setting = document["settings"]
    table_mb, manifests = setting["table_bytes"] / 1e6, setting["manifest_bytes"]
    listed = f", the manifests {sentence([f'{b / 1e6:.1f} MB' for b in manifests.values()])}" if manifests else ""
    text = (
        f"A dataset of {setting['volumes']:,} volumes of {' x '.join(map(str, setting['shape']))} in the bucket, "
        f"{setting['latency_s'] * 1000:.0f} ms added to every request. Seconds from before the process is started to "
        f"its first batch of {setting['batch']} crops of {setting['patch'][0]} cubed, and where they go; a fresh "
        f"process each time, {setting['rounds']} rounds, interleaved, files in the page cache. The table of cases "
        f"takes {table_mb:.1f} MB in the bucket{listed}. `known` is from having imported all to knowing what there is: "
        "the table, the manifests, or a listing of the bucket.\n\n"
    )
    header = [
        "way",
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
        f"One epoch of whole objects, {setting['num_workers']} workers each, {setting['latency_s'] * 1000:.0f} ms "
        f"added to every request, {setting['rounds']} rounds, interleaved. Against the fastest peer and against the "
        "others: how many times longer they took.\n\n"
    )
    rows = []
    for service in dict.fromkeys(r["service"] for r in document["summary"]):
        for style in ("map", "iterable"):
            for size in sorted({r["size_bytes"] for r in document["summary"]}):
                mine = rows_of(document, service=service, style=style, size_bytes=size)
                ours = next((r for r in mine if r["contender"] == "voxlane"), None)
                others = sorted((r for r in mine if r is not ours), key=lambda r: float(r["total_s"]["median"]))
                if ours is None or not others:
                    continue
                slower = [f"{r['contender']} {times(faster(ours['total_s'], r['total_s']))}" for r in others]
                rate = f"{ours['bytes_per_s']['median'] / 1e6:,.0f}"
                place = [SERVICE_NAMES[service], style, size_name(size), spread(ours["total_s"]), rate]
                rows.append([*place, slower[0], "; ".join(slower[1:])])
    header = ("server", "style", "objects", "ours, s", "ours, MB/s", "the fastest peer", "others")
    return text + table(header, rows) + "\n" + ALL_FIGURES


def _listing(_: Results, document: Document) -> str:
    setting = document["settings"]
    rows = []
    for ours in rows_of(document, contender="voxlane"):
        mine = rows_of(document, service=ours["service"], keys=ours["keys"])
        others = [r for r in mine if not r["contender"].startswith("voxlane")]
        told = [
            f"{r['contender']} {spread(r['total_s'])}, {times(faster(ours['total_s'], r['total_s']))}" for r in others
        ]
        rows.append([SERVICE_NAMES[ours["service"]], f"{ours['keys']:,}", spread(ours["total_s"]), "; ".join(told)])
    return (
        f"All keys into memory, {setting['latency_s'] * 1000:.0f} ms added to every request, ours with up to "
        f"{setting['concurrency']} requests in flight.\n\n"
        + table(("server", "keys", "ours, s", "peers, s, and how many times longer"), rows)
        + "\n"
        + ALL_FIGURES
    )


def _compose(_: Results, document: Document) -> str:
    pays = [r for r in document["summary"] if "error" not in r and r["speedup"] > 1]
    text = (
        'Joining small objects on the server before reading them (`compose="on"`) against plain concurrent reads, ours '
        f"both times; above 1 joining is faster. It was in {len(pays)} of {len(document['summary'])} settings, and in "
        "none where a join takes longer than a read, as on the real service; so it is off unless asked for.\n\n"
    )
    if any("compose 150" in row["setting"] for row in pays):
        text = text.replace("and in none where", "also in some where")
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
    for ours in rows_of(document, contender="voxlane"):
        place = {n: ours[n] for n in ("service", "latency_s", "operation", "size_bytes", "tensors")}
        others = [r for r in rows_of(document, **place) if r["contender"] not in ("voxlane", "ceiling")]
        fastest = best(others, "total_s", least=True)
        if fastest is None:
            continue
        memory = f"{ours['extra_bytes']['max'] / 1e6:,.0f} / {fastest['extra_bytes']['max'] / 1e6:,.0f}"
        rows.append(
            [
                ours["operation"],
                f"{ours['size_bytes'] / 1e6:,.0f} MB{', small tensors' if ours['tensors'] == 'small' else ''}",
                f"{SERVICE_NAMES[ours['service']]}, {ours['latency_s'] * 1000:.0f} ms",
                spread(ours["total_s"]),
                f"{fastest['contender']} {spread(fastest['total_s'])}",
                times(faster(ours["total_s"], fastest["total_s"])),
                f"{ours['of_ceiling']:.0%}" if "of_ceiling" in ours else "",
                memory,
            ]
        )
    rows.sort(key=lambda row: row[0] == "load")
    header = ("operation", "size", "server", "ours, s", "fastest peer, s", "ours is faster by", "of the ceiling")
    failed = sorted({r["contender"] for r in document["summary"] if "error" in r})
    text = (
        "One file, one process, against the fastest peer of each line. The ceiling is the engine moving as many bytes "
        "from or to memory. What was loaded was compared with what was saved. Extra memory is beyond the state "
        "itself.\n\n"
    )
    text += table([*header, "extra memory, MB: ours / theirs"], rows)
    if failed:
        text += f"\n{sentence(failed).capitalize()} failed to save; the error is in the result file.\n"
    return text + "\n" + ALL_FIGURES


# -- patch readers -----------------------------------------------------------------------------------------------------


def _patch_readers(_: Results, document: Document) -> str:
    setting = document["settings"]
    text = (
        f"{setting['patches']} patches of {setting['patch']} cubed with labels from two volumes of "
        f"{' x '.join(map(str, setting['shape']))} ({setting['volume']}), {setting['in_flight']} in flight, one "
        "process. The others read the same Zarr objects, but for whole .nii.gz files. Readers with a cache are "
        f"compared with ours with one. {_faster_readers(document)}\n\n"
    )
    rows = []
    for row in rows_of(document):
        ours = our_reader(document, row)
        where = "disk" if row["place"] == "disk" else f"bucket, {row['latency_s'] * 1000:.0f} ms"
        ratio = "" if ours is None else times(more(ours["patches_per_s"], row["patches_per_s"]))
        counted = ["", ""]
        if "times_own_bytes" in row:
            counted = [f"{row['times_own_bytes']['median']:.2f}", f"{row['requests_per_patch']['median']:.1f}"]
        rows.append([where, row["contender"], spread(row["patches_per_s"], 1), ratio, *counted])
    header = ("from", "reader", "patches/s", "ours is faster by", "times the patch's own bytes", "requests a patch")
    return text + table(header, rows) + "\n" + ALL_FIGURES


def _faster_readers(document: Document) -> str:
    """A sentence about those that beat ours."""
    lost: dict[str, int] = {}
    for row in rows_of(document):
        ours = our_reader(document, row)
        if ours is not None and ours["patches_per_s"]["median"] < row["patches_per_s"]["median"]:
            lost[row["contender"]] = lost.get(row["contender"], 0) + 1
    places = len({(row["place"], row["latency_s"]) for row in document["summary"]})
    told = [f"{name} at {count} of {places} places" for name, count in lost.items()]
    return f"Faster than ours: {sentence(told)}." if told else "None was faster than ours."


# -- staging, scaling --------------------------------------------------------------------------------------------------


def _staging(_: Results, document: Document) -> str:
    setting = document["settings"]
    rows = []
    for row in rows_of(document):
        read = one(document, link=row["link"], contender="plain read")
        ratio = "" if read is None or read is row else times(faster(row["total_s"], read["total_s"]))
        cpu = f"{row['client_cpu_s']['median']:.1f} / {row['server_cpu_s']['median']:.1f}"
        rows.append([row["link"], row["contender"], spread(row["total_s"]), ratio, cpu])
    return (
        f"{setting['objects']:,} objects of {setting['object_bytes'] / 1e6:g} MB onto the folders of "
        f"{setting['nodes']} nodes at once, beside a plain parallel read of the same bytes into memory. A copy is "
        "listed, checksummed, "
        "written and recorded. The nodes are processes of one machine, which also serves.\n\n"
        + table(("link", "what", "seconds", "against the plain read", "CPU, s: client / server"), rows)
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
        f"Ranks are processes of one machine on Ray; the arithmetic of a step is a wait of {setting['step_time_s']:g} "
        "s, all else is real (what exactly: [benchmarks/README.md](../benchmarks/README.md)). It shows what the "
        "framework costs, not how a GPU cluster scales; no peer was measured.\n\n"
        + table(("workers", "patches/s", "efficiency", "gradients waited for", "start-up, s"), workers)
        + f"\n{setting['trials']} trials of {setting['trial_time_s']:g} s each:\n\n"
        + table(("at once", "makespan, s", "ideal, s", "efficiency"), trials)
    )


# -- a training step ---------------------------------------------------------------------------------------------------


def _step(_: Results, document: Document) -> str:
    setting, floor = document["setting"], document["floor"]
    patch = " x ".join(map(str, setting["patch"]))
    text = (
        f"One training step (forward, loss, backward, optimizer) of {setting['batch']} patches of {patch}, "
        f"{setting['channels']} channel, {setting['outputs']} outputs, on one {setting['device']}: all variants in one "
        f"process, in turns, {setting['rounds']} rounds of {setting['steps']} steps, patches on the device. The median "
        "(least to most) is of the rounds' medians. The floor is the convolutions' arithmetic at the rate of a large "
        f"matrix product in the same run, {floor['matrix_flops_per_s'] / 1e12:,.0f} TFLOP/s; a copy moved "
        f"{floor['copy_bytes_per_s'] / 1e12:.2f} TB/s. What each variant is: [step.md](step.md).\n\n"
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
    header = ["variant", "ms a step", "faster than the first of its kind", "patches/s", "times the floor"]
    text += table([*header, "start-up, s", "peak GiB", "held GiB", "loss: first, last"], lines)
    told = [row for row in rows_of(document) if row["profile"]]
    if told:
        groups = told[0]["profile"]["groups_ms"]
        parts = [[name, *(f"{row['profile']['groups_ms'][name]:.2f}" for row in told)] for name in groups]
        text += "\nWhere the milliseconds go, by the kernels' names:\n\n"
        text += table(["part", *(row["variant"] for row in told)], parts)
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
        f"A volume of {' x '.join(map(str, setting['shape']))} voxels (noise) in the machine's memory, MLPerf's "
        f"U-Net3D in bfloat16 with weights as they begin, windows of {setting['patch']} cubed, "
        f"{setting['batch']} at once, overlapping by half, from the call to the logits in the machine's memory. The "
        f"logits of both networks are apart by {document['relative_difference']:.1e} of their length.\n\n"
        + table(("network", "mirrorings", "seconds", "peak GiB"), rows)
    )


def _loss(row: dict[str, Any]) -> str:
    return (
        f"{row['first_loss']:.3f}, {row['last_loss']:.3f}"
        if row["finite"] and row["first_loss"] is not None
        else "**not finite**"
    )


# -- accuracy ----------------------------------------------------------------------------------------------------------


def accuracy(results: Results) -> str:
    """Dice of the runs that were kept."""
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
        + "Decathlon Task04, fold 0, scored in the scans' own grid; commands in `benchmarks/hippocampus.py`.\n\n"
        + table(("device, preset", "training", "mean Dice", "anterior / posterior", "cases held out", "file"), rows)
        + "\nThe peer, nnU-Net 2.8.1 as it ships, reached a mean Dice of 0.891 in 299 s on one H200, with all 217 "
        "cases trained on and other cases held out: not the same cases, and no result file of it was kept, so the two "
        "are near each other and no more can be said. The cases held out here also chose the weights of the H200 run.\n"
    )


def kills(results: Results) -> str:
    """What was survived."""
    text = "## Kill tests\n\n"
    for name, what in (("kill", "Saving processes killed"), ("kill_training", "Runs on Ray killed")):
        document = results.get(name)
        if document is None:
            text += f"{what}: {missing(command_of(name))}\n"
            continue
        text += f"{what} at random moments, seed {document['seed']}: {document['summary']}.\n\n"
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
    _section("Patch readers", "patch_readers", _patch_readers),
    _section("Staging", "staging", _staging),
    _section("Scaling", "scaling", _scaling),
    _section("A training step", "step", _step),
    _section("Sliding windows", "windows", _windows),
    accuracy,
    _section("Accuracy by the clock", "training_hippocampus", step_training_report.hippocampus),
    _section("The fast path against the plain one", "training_curves", step_training_report.curves),
    _section("Training from disk", "training_disk", step_training_report.disk),
    kills,
)
"""In the page's order; the simulator's goes after the first batch's."""
