"""Figures of `compare_training.py`'s results, and what docs/performance.md says of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loss_curves import smoothed
from markdown_tables import table
from performance_results import Document, Results

OURS, PLAIN, GREY = "#d1495b", "#30638e", "#8d99ae"
_SMOOTH = 4
"""Windows that a drawn point of a loss curve is the mean of."""
WANTED_PATCHES_PER_S, WANTED_BUSY = 75, 0.9


def _gpu(document: Document) -> str:
    return ", ".join(document["hardware"].get("gpus", [])) or "no GPU"


# -- accuracy by the clock ---------------------------------------------------------------------------------------------


def hippocampus(results: Results, document: Document) -> str:
    """Dice by the clock."""
    summary, scores, split = document["summary"], document["scores"], document["split"]
    rows = []
    for name, words in (("mirrored", "with mirroring"), ("plain", "without")):
        if name not in scores:
            continue
        score = scores[name]
        if "error" in score:
            rows.append([f"voxlane, {words}", "", f"failed: {score['error']}", "", ""])
            continue
        error = score["standard_error"]
        dice = f"{score['mean_dice']:.3f}" + (f" ± {error:.3f}" if error is not None else "")
        targets = " / ".join(f"{value:.3f}" for value in score["targets"].values())
        rows.append(
            [f"voxlane, {words}", f"{summary['training_s']:.0f}", dice, targets, f"{len(split['held_out'])} held out"]
        )
    peer = document["peer"]
    rows.append(
        [
            "nnU-Net 2.8.1 as it ships",
            f"{peer['training_s']:.0f}",
            f"{peer['mean_dice']:.3f}",
            "0.896 / 0.885",
            "other cases",
        ]
    )
    late = "" if summary["within_budget"] else f" **This exceeds the limit of {summary['budget_s']:.0f} s.**"
    field_text = " ".join(document["settings"]["fields"])
    fields = f" Fields that differ from the defaults: `{field_text}`." if field_text else ""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary["seconds"].items())
    step_ms = (
        "" if summary["step_ms"] is None else f" ({summary['step_ms']:.1f} ms each, including the time between steps)"
    )
    return (
        f"Decathlon Task04 on {_gpu(document)}: {summary['steps']:,} steps{step_ms}, {summary['patches']:,} patches. "
        "The time runs from just before the process starts until it has ended, and includes compiling the kernels. The "
        "number of steps was fixed in advance, so the learning rate ends at zero. The last weights are scored; the "
        f"curve selected nothing. {split['trained_on']} cases were used for training. Held out: {split['rule']}. "
        "nnU-Net trained on all 217 cases and was scored on other cases, which are not in this dataset, so its Dice "
        "and ours are for different scans. Its result file was not stored. ± is the standard error over cases.\n\n"
        + table(("", "training, s", "mean Dice", "anterior / posterior", "scored on"), rows)
        + f"\nSeconds: {parts}. These exclude preparing the dataset and scoring."
        f"{late}{fields}\n"
    )


def draw_hippocampus(document: Document, path: Path) -> None:
    """Validation Dice against the clock."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    curve = [point for point in document["curve"] if point["mean_dice"] is not None]
    cases = document["settings"]["curve_cases"]
    axes.plot(
        [p["at_s"] for p in curve],
        [p["mean_dice"] for p in curve],
        "o-",
        color=OURS,
        label=f"while training, {cases} held-out cases",
    )
    scored = document["scores"]["mirrored"]
    if "error" not in scored:
        count = len(document["split"]["held_out"])
        axes.errorbar(
            document["summary"]["training_s"],
            scored["mean_dice"],
            scored["standard_error"],
            fmt="D",
            color="#a02c3c",
            capsize=3,
            label=f"at the end, all {count}, mirrored: {scored['mean_dice']:.3f}",
        )
    peer = document["peer"]
    peer_label = f"nnU-Net as it ships, other cases: {peer['mean_dice']:.3f}"
    axes.plot(peer["training_s"], peer["mean_dice"], "s", color=PLAIN, label=peer_label)
    axes.axvline(document["summary"]["budget_s"], color=GREY, linestyle=":")
    axes.set(xlabel="seconds since before the process was started", ylabel="mean Dice", xlim=(0, None))
    axes.set_title(f"Hippocampus on {_gpu(document)}")
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -- the fast path against the plain one -------------------------------------------------------------------------------


def curves(results: Results, document: Document) -> str:
    """Loss curves and Dice of both paths."""
    settings, summary = document["settings"], document["summary"]
    rows = []
    for run in document["runs"]:
        if "error" in run:
            rows.append([run["path"], str(run["seed"]), f"failed: {run['error']}", ""])
            continue
        last = smoothed(run["losses"], _SMOOTH)[-1]
        rows.append([run["path"], str(run["seed"]), f"{last:.4f}", f"{run['scores']['mean_dice']:.4f}"])
    text = (
        f"Hippocampus on {_gpu(document)}, fold 0, with a schedule of {settings['steps']:,} steps. With the same seed, "
        "both paths start from the same weights and see the same patches and augmentation. The plain path is "
        f"`{settings['plain']}`. Losses are means over {settings['window']} steps, smoothed by a running mean over "
        f"{_SMOOTH} of them. Dice is that of the last weights on the held-out cases"
        f"{', with mirroring' * settings['mirror']}.\n\n" + table(("path", "seed", "last loss", "mean Dice"), rows)
    )
    if summary is None:
        return text + "\nA run is missing, so the paths cannot be compared.\n"
    again = summary["loss_apart"]["again"]
    repeated = f" Two runs of the fast path with the same seed differ by {_both(again[0])}." if again else ""
    verdict = "within" if summary["loss_agrees"] else "**not within**"
    near = "within" if summary["dice_within_0_005"] else "**not within**"
    seeds = ", ".join(f"{gap:.4f}" for gap in summary["dice_apart"]["seeds"])
    return (
        text
        + "\nMean differences of the losses over the whole curve and over its second half: with the same seed, the two "
        f"paths differ by at most {_both(summary['loss_paths'])}; on the same path, two seeds differ by at least "
        f"{_both(summary['loss_seeds'])}.{repeated} The difference between paths is {verdict} the difference between "
        f"seeds. The mean Dice over seeds differs by {summary['dice_difference']:+.4f} (fast minus plain), {near} "
        f"0.005; two seeds of one path differ by {seeds}.\n"
    )


def _both(apart: dict[str, float]) -> str:
    return f"{apart['mean']:.4f} and {apart['late']:.4f}"


def draw_curves(document: Document, path: Path) -> None:
    """Losses of every run, and how far paths and seeds lie apart."""
    plt = _pyplot()
    figure, (losses, apart) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    window = document["settings"]["window"]
    runs = {(run["path"], run["seed"]): smoothed(run["losses"], _SMOOTH) for run in document["runs"] if "losses" in run}
    seeds = sorted({seed for _, seed in runs})
    styles = dict(zip(seeds, itertools.cycle(("-", "--", ":", "-.")), strict=False))
    for (name, seed), curve in runs.items():
        colour = {"fast": OURS, "plain": PLAIN}.get(name, GREY)
        losses.plot(
            _steps(curve, window), curve, styles[seed], color=colour, linewidth=1.2, label=f"{name}, seed {seed}"
        )
    losses.set(xlabel="step", ylabel=f"loss, running mean over {window * _SMOOTH} steps")
    losses.legend(fontsize=8)
    for seed in seeds:
        _gap(apart, runs, ("fast", seed), ("plain", seed), window, OURS, f"fast and plain, seed {seed}")
    for name, first, second in itertools.product(("fast", "plain"), seeds, seeds):
        if first < second:
            _gap(apart, runs, (name, first), (name, second), window, GREY, f"seeds {first} and {second}, {name}")
    if seeds:
        _gap(apart, runs, ("fast", seeds[0]), ("fast, again", seeds[0]), window, "#e8a0a8", "fast, run twice")
    apart.set(xlabel="step", ylabel="absolute difference of losses")
    if apart.lines:
        apart.set_yscale("log")
        apart.legend(fontsize=8)
    figure.suptitle(f"Hippocampus, fixed seeds, {_gpu(document)}", fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _gap(
    axes: Any,
    runs: dict[tuple[str, int], list[float]],
    first: tuple[str, int],
    second: tuple[str, int],
    window: int,
    colour: str,
    label: str,
) -> None:
    if first in runs and second in runs:
        gaps = [abs(a - b) for a, b in zip(runs[first], runs[second], strict=True)]
        axes.plot(_steps(gaps, window), gaps, color=colour, linewidth=1.0, label=label)


def _steps(curve: Sequence[float], window: int) -> list[int]:
    return [window * (place + _SMOOTH) for place in range(len(curve))]


# -- from disk ---------------------------------------------------------------------------------------------------------


def disk(results: Results, document: Document) -> str:
    """Patches a second from disk."""
    settings = document["settings"]
    rows = []
    for row in document["summary"]:
        if "error" in row:
            rows.append([row["variant"], f"failed: {row['error']}", "", "", "", "", ""])
            continue
        profile = row.get("profile")
        rows.append(
            [
                row["variant"],
                f"{row['patches_per_s']:.1f}",
                f"{row['step_ms']:.1f}",
                "" if row["gpu"] is None else f"{row['gpu']['busy_share']:.0%}",
                "" if not profile else f"{profile['busy_share']:.0%}",
                f"{row['waited_share']:.1%}",
                f"{row['memory_bytes'] / 1e9:.1f}",
            ]
        )
    header = ("augmentation", "patches/s", "ms per step", "GPU busy (driver)", "GPU busy (profile)", "waited for data")
    field_text = " ".join(settings["fields"])
    fields = f" Additional fields: `{field_text}`." if field_text else ""
    volume = "a real CT, repeated, with noise" if settings["real_ct"] else "synthetic"
    profiled = "was not measured in these runs"
    if settings["profile_steps"]:
        profiled = (
            f"is the union of all kernels and copies over {settings['profile_steps']} steps of another run, from the "
            "first to the last"
        )
    return (
        f"`voxlane train preset=mlperf` on {_gpu(document)}: MLPerf's U-Net3D, batches of two patches of 128 cubed "
        f"from {settings['volumes']} volumes of {settings['side']} cubed ({volume}), prepared by `voxlane prepare` "
        f"({document['prepared_bytes'] / 1e6:,.0f} MB) on the machine's disk. The loader's memory cache is off, but "
        "the page cache may hold the files. The time runs from the end of the second epoch to the end of the last one, "
        'including the time between epochs. "GPU busy (driver)" is the mean of the driver\'s own counter, sampled '
        f'twice per second. "GPU busy (profile)" {profiled}. The targets are {WANTED_PATCHES_PER_S} patches/s and more '
        f"than {WANTED_BUSY:.0%} busy.{fields}\n\n"
        + table((*header, "peak memory, GB"), rows)
        + "".join(f"\n{row['variant']}: {_bottleneck(row)}\n" for row in document["summary"] if "stall" in row)
    )


def _bottleneck(row: Document) -> str:
    """Return the sentence of a run's stall report, in today's words if the result file is older."""
    return str(row["stall"]["sentence"]).replace("it was waited for", "training waited for it")


def draw_disk(document: Document, path: Path) -> None:
    """Patches a second of every epoch."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    steps = document["settings"]["epoch_steps"]
    for row, colour in zip(document["summary"], (OURS, PLAIN, GREY), strict=False):
        if "error" not in row:
            rates = row["within_epochs_patches_per_s"]
            run_label = f"{row['variant']}: {row['patches_per_s']:.1f} patches/s"
            axes.plot([steps * (n + 1) for n in range(len(rates))], rates, "o-", color=colour, label=run_label)
    axes.axhline(WANTED_PATCHES_PER_S, color=GREY, linestyle=":", label=f"wanted: {WANTED_PATCHES_PER_S}")
    axes.set(xlabel="step", ylabel="patches per second, by epoch", ylim=(0, None))
    axes.set_title(f"Training from disk, 128 cubed, {_gpu(document)}")
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display on servers
    import matplotlib.pyplot as plt

    return plt
