"""Train on one GPU: accuracy in a fixed time, the fast path against the plain one, and training from disk.

    python benchmarks/compare_training.py hippocampus Task04_Hippocampus   100 s of training, then the held-out Dice
    python benchmarks/compare_training.py curves Task04_Hippocampus        losses and Dice of both paths, two seeds each
    python benchmarks/compare_training.py disk [--ct SCAN --label LABEL]   patches/s from prepared volumes

Each command writes results/training_NAME.json. Every run is a `voxlane train` process that is timed from outside, so
that the clock starts before Python does. `field=value` arguments are passed to every run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import training_processes
from loss_curves import comparison, mean
from performance_results import RESULTS
from training_processes import Gpu, Watched, read, watch

NNUNET = {"mean_dice": 0.891, "training_s": 299.0, "iterations": 13000}
"""Result of nnU-Net 2.8.1 with its defaults on one H200: trained on all 217 cases, other Decathlon cases held out."""
PATHS = {"fast": "", "plain": "fused=false compile=false"}
"""Config fields of each path that `curves` compares."""
QUIET = ("validation.images=0", "checkpoint_every_epochs=1000")
"""Turns off pictures and checkpoints between epochs; the checkpoint of the last epoch is always written."""


def main() -> None:
    """Run the chosen command and write its result file."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="voxlane-bench-", dir=arguments.work) as folder:
        document = arguments.measure(arguments, Path(folder))
    if document is not None:
        training_processes.save(arguments.out or RESULTS / f"training_{arguments.name}.json", document)


def _prepared(arguments: argparse.Namespace, folder: Path) -> tuple[Path, float]:
    """Return the prepared dataset of DATA and the seconds that preparing took; DATA itself if it is prepared."""
    source: Path = arguments.data
    if (source / "prepared.json").exists():
        return source, 0.0
    done = watch("prepare", str(source), str(folder / "prepared"), "split=hash", "--no-progress")
    return folder / "prepared", done.seconds


def _train(data: Path, run: Path, fields: Sequence[str], *, echo: bool = True, caches: Path | None = None) -> Watched:
    return watch("train", str(data), "--run", str(run), *fields, echo=echo, caches=caches)


def _evaluate(run: Path, fields: Sequence[str], *, echo: bool = True) -> dict[str, Any]:
    """Return the scores of the run's last weights on the held-out cases, each on the grid of its scan."""
    done = watch("evaluate", str(run), "masks=false", "--no-progress", *fields, echo=echo)
    summary = read(run, "evaluation/validation/summary.json")
    cases = read(run, "evaluation/validation/cases.json")
    targets = list(summary["targets"])
    return {
        "seconds": done.seconds,
        "mean_dice": summary["mean_dice"],
        "targets": {name: summary["targets"][name]["dice"]["mean"] for name in targets},
        "cases": {case["case"]: [case[name]["dice"] for name in targets] for case in cases},
        "standard_error": _standard_error([mean([case[name]["dice"] for name in targets]) for case in cases]),
        "weights": "last",
    }


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _split(run: Path) -> dict[str, Any]:
    """Return the cases of a run; no scored case was trained on."""
    facts = read(run, "run.json")
    trained, held_out = facts["cases"]["train"], facts["cases"]["validation"]
    assert not set(trained) & set(held_out)
    rule = "fold 0 of five: a hash of the case's name, fixed when the dataset is prepared"
    return {"trained_on": len(trained), "held_out": held_out, "rule": rule}


# -- accuracy by the clock ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pace:
    """Times of a short run, from which the length of the long one is planned."""

    start_s: float
    """Seconds from before the process starts to its first step."""
    epoch_s: float
    """Seconds of an epoch without validation."""
    validation_s: float
    end_s: float
    """Seconds from the last epoch's line to the end of the process."""

    @classmethod
    def of(cls, done: Watched, validate_s: float) -> Pace:
        """Compute the pace of a run of at least three epochs of which only the last was validated.

        The first epoch includes work that is done once (compiling, recording), so its time beyond a later epoch's
        length counts as start-up.
        """
        at = done.epochs()
        epoch_s = statistics.median(b - a for a, b in itertools.pairwise(at[:-1]))
        return cls(at[0] - epoch_s, epoch_s, validate_s, done.seconds - at[-1])

    def epochs_within(self, budget_s: float, validations: int, margin: float) -> int:
        """Return the number of epochs that fit; the fraction `margin` of the time is left for slower steps."""
        left = budget_s * (1 - margin) - self.start_s - self.end_s - validations * self.validation_s
        return max(1, int(left / self.epoch_s))


def hippocampus(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train for a given wall-clock time, start-up included, and score the held-out cases.

    The number of steps is fixed before the run, from the pace of a short one, so that the learning rate reaches zero
    when the time is up. The last weights are scored. Validations during training only draw the curve; they select
    nothing. Each run compiles its kernels anew.
    """
    data, prepare_s = _prepared(arguments, folder)
    common = [f"seed={arguments.seed}", f"steps_per_epoch={arguments.epoch_steps}", *QUIET]
    common += [f"validation.max_cases={arguments.curve_cases}", *arguments.fields]
    epochs, pace = arguments.epochs, None
    if epochs is None:
        print(f"pace: {arguments.pace_epochs} epochs", flush=True)
        every = ["validation.every_epochs=1000", f"epochs={arguments.pace_epochs}"]
        short = _train(data, folder / "pace", [*common, *every], caches=folder / "pace-caches")
        pace = Pace.of(short, read(folder / "pace", "stall.json")["shares"]["validate"])
        epochs = pace.epochs_within(60 * arguments.minutes, arguments.validations + 1, arguments.margin)
    rhythm = max(1, epochs // arguments.validations)
    print(f"training: {epochs} epochs of {arguments.epoch_steps} steps", flush=True)
    run = folder / "run"
    with Gpu() as gpu:
        fields = [*common, f"epochs={epochs}", f"validation.every_epochs={rhythm}"]
        done = _train(data, run, fields, caches=folder / "caches")
    history, stall = read(run, "history.json"), read(run, "stall.json")
    at = done.epochs()
    start_s = at[0] - history[0]["seconds"]
    summary = {
        "training_s": done.seconds,
        "budget_s": 60 * arguments.minutes,
        "within_budget": done.seconds <= 60 * arguments.minutes,
        "steps": stall["steps"],
        "patches": stall["patches"],
        "step_ms": 1000 * statistics.median(b - a for a, b in itertools.pairwise(at)) / arguments.epoch_steps
        if len(at) > 1
        else None,
        "seconds": {"start": start_s, **stall["shares"], "end": done.seconds - at[-1]},
        "prepare_s": prepare_s,
        "gpu": gpu.between(at[0], at[-1]),
        "memory_bytes": history[-1]["memory_bytes"],
    }
    print("evaluating the held-out cases", flush=True)
    # If scoring fails, the error becomes part of the result, because the training curve is still useful.
    scores = {}
    ways = {"mirrored": ["predict.mirror=true"], "plain": ["predict.mirror=false"]}
    for name, fields in itertools.islice(ways.items(), 2 if arguments.score_both else 1):
        try:
            scores[name] = _evaluate(run, fields)
        except training_processes.FailedError as error:
            print(error, file=sys.stderr)
            scores[name] = {"error": error.short}
    for name, score in scores.items():
        print(f"{name}: {score.get('mean_dice')} {score.get('targets')}", flush=True)
    print(json.dumps(summary, indent=1), flush=True)
    facts = read(run, "run.json")
    return {
        **training_processes.facts("step_training.py hippocampus", _settings(arguments)),
        "split": _split(run),
        "pace": None if pace is None else dataclasses.asdict(pace),
        "config": facts["config"],
        "network": facts["network"],
        "peer": NNUNET,
        "summary": summary,
        "scores": scores,
        "stall": stall["sentence"],
        "curve": [
            {"at_s": when, "step": e["step"], "loss": e["loss"], "mean_dice": e["mean_dice"], "lr": e["lr"]}
            for when, e in zip(at, history, strict=True)
        ],
    }


# -- the fast path against the plain one -------------------------------------------------------------------------------


def curves(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure losses of each path and seed in windows of steps, and the held-out Dice at the end of the schedule.

    Paths are compared at equal seeds, that is with equal initial weights, patches and augmentation. The difference
    between seeds is the scale for the difference between paths. Runs share the machine, so nothing is timed.
    """
    data, _ = _prepared(arguments, folder)
    window = arguments.window
    jobs = [(name, fields, seed) for seed in arguments.seeds for name, fields in _paths(arguments).items()]
    jobs += [("fast, again", _paths(arguments)["fast"], arguments.seeds[0])] * arguments.again

    def train_and_score(job: tuple[str, str, int]) -> dict[str, Any]:
        name, fields, seed = job
        run = folder / f"{name}-{seed}".replace(", ", "-")
        every = [f"seed={seed}", f"steps_per_epoch={window}", f"epochs={arguments.steps // window}"]
        every += ["validation.every_epochs=1000", "validation.max_cases=1", *QUIET, *arguments.fields, *fields.split()]
        row: dict[str, Any] = {"path": name, "seed": seed, "fields": fields}
        try:
            done = _train(data, run, every, echo=False)
            row["losses"] = [entry["loss"] for entry in read(run, "history.json")]
            row["training_s"] = done.seconds
            row["split"] = _split(run)
            row["scores"] = _evaluate(run, [f"predict.mirror={str(arguments.mirror).lower()}"], echo=False)
        except training_processes.FailedError as error:  # the other runs are still useful
            print(error, file=sys.stderr, flush=True)
            row["error"] = error.short
        dice = row.get("scores", {}).get("mean_dice")
        print(f"{name}, seed {seed}: {row.get('training_s', 0):.0f} s, Dice {dice}", flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
        rows = list(pool.map(train_and_score, jobs))
    split = next((row["split"] for row in rows if "split" in row), None)
    for row in rows:
        row.pop("split", None)
    summary = comparison([row for row in rows if "scores" in row])
    print(json.dumps(summary, indent=1), flush=True)
    return {
        **training_processes.facts("step_training.py curves", _settings(arguments)),
        "split": split,
        "summary": summary,
        "runs": rows,
    }


def _paths(arguments: argparse.Namespace) -> dict[str, str]:
    return {**PATHS, "plain": arguments.plain}


# -- from disk ---------------------------------------------------------------------------------------------------------

DISK_VARIANTS = {"MLPerf's augmentation": (), "nnU-Net's augmentation": ("augment.preset=nnunet",)}


def disk(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure patches per second of MLPerf's U-Net3D from prepared volumes on disk, without the loader's memory cache.

    The steady state runs from the end of the second epoch to the end of the last. It excludes work that is done once
    and includes work that is done every epoch.
    """
    data, making_s = _volumes(arguments, folder)
    rows = []
    for number, (name, more) in enumerate(DISK_VARIANTS.items()):
        if arguments.only and name not in arguments.only:
            continue
        print(name, flush=True)
        fields = [*_disk_fields(arguments), *more, *arguments.fields]
        row: dict[str, Any] = {"variant": name, "fields": fields}
        try:
            row |= _disk_run(data, folder / f"run-{number}", fields, arguments)
        except training_processes.FailedError as error:
            print(error, file=sys.stderr, flush=True)
            row["error"] = error.short
        try:
            row["profile"] = _profiled(data, folder / f"profiled-{number}", fields, arguments)
        except training_processes.FailedError as error:
            print(error, file=sys.stderr, flush=True)
            row["profile"] = None
        print(json.dumps({k: v for k, v in row.items() if k != "epochs"}, indent=1), flush=True)
        rows.append(row)
    return {
        **training_processes.facts("step_training.py disk", _settings(arguments)),
        "making_s": making_s,
        "prepared_bytes": sum(path.stat().st_size for path in data.rglob("*") if path.is_file()),
        "summary": rows,
    }


def _disk_fields(arguments: argparse.Namespace) -> list[str]:
    fields = ["preset=mlperf", "fold=null", "loader.ram_cache_bytes=0", f"seed={arguments.seed}"]
    return [*fields, f"steps_per_epoch={arguments.epoch_steps}", *QUIET]


def _disk_run(data: Path, run: Path, fields: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    epochs = max(3, arguments.steps // arguments.epoch_steps)
    with Gpu() as gpu:
        done = _train(data, run, [*fields, f"epochs={epochs}"])
    history, stall = read(run, "history.json"), read(run, "stall.json")
    at = done.epochs()
    steady_s = history[-1]["seconds"] - history[1]["seconds"]
    patches = sum(entry["patches"] for entry in history[2:])
    return {
        "patches_per_s": patches / steady_s,
        "step_ms": 1000 * steady_s / (arguments.epoch_steps * (epochs - 2)),
        "steady_s": steady_s,
        "steps": stall["steps"],
        "within_epochs_patches_per_s": [entry["patches_per_s"] for entry in history],
        "waited_share": mean([entry["wait_share"] for entry in history[2:]]),
        "gpu": gpu.between(at[1], at[-1]),
        "start_s": at[0] - history[0]["seconds"],
        "total_s": done.seconds,
        "memory_bytes": history[-1]["memory_bytes"],
        "loss": [entry["loss"] for entry in history],
        "stall": {name: stall[name] for name in ("shares", "sentence", "decode_ms_a_patch", "bytes_read", "requests")},
    }


def _profiled(data: Path, run: Path, fields: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Profile one epoch of a short run with torch's profiler, in a separate process."""
    import torch

    if not torch.cuda.is_available() or not arguments.profile_steps:
        return None
    out = run.with_suffix(".json")
    words = ["profile", str(data), "--run", str(run), "--out", str(out), "--steps", str(arguments.profile_steps)]
    training_processes.watch_command([sys.executable, __file__, *words, *fields])
    profile_result: dict[str, Any] = json.loads(out.read_text())
    return profile_result


def profile(arguments: argparse.Namespace, folder: Path) -> None:
    """Profile for `disk`: the fraction of an epoch in which the GPU was busy, and the longest kernels."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    from voxlane import settings
    from voxlane.train.fit import fit
    from voxlane.train.run_setup import prepare_run

    config_values: dict[str, Any] = {}
    for field in [*arguments.fields, f"steps_per_epoch={arguments.steps}", "epochs=5"]:
        settings.set_dotted(config_values, field)
    on_gpu = torch.cuda.is_available()
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])

    def at_epoch(entry: dict[str, Any]) -> bool:
        if on_gpu:
            torch.cuda.synchronize()
        if entry["epoch"] == 2:  # the first two epochs include work that is done once
            profiler.start()
        elif entry["epoch"] == 3:
            profiler.stop()
        return False

    prepare_run(str(arguments.data), str(arguments.run), config_values, check_local_devices=True)
    fit(str(arguments.run), progress=False, on_epoch=at_epoch)
    history = read(arguments.run, "history.json")
    wall_s = history[3]["seconds"] - history[2]["seconds"]
    spans, by_name = [], dict[str, float]()
    for event in profiler.events() or []:
        # The span of an annotation, such as an optimizer's step, also covers the gaps between its kernels.
        if event.device_type == device_type and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name] = by_name.get(event.name, 0.0) + event.time_range.elapsed_us()
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:15]
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    result = {
        "steps": arguments.steps,
        "epoch_s": wall_s,
        "kernels": len(spans),
        "busy_s": covered(spans) / 1e6,
        "busy_share": covered(spans) / (last - first),
        "step_ms_busy": covered(spans) / 1e3 / arguments.steps,
        "longest_ms_a_step": {name[:100]: us / 1e3 / arguments.steps for name, us in longest},
    }
    arguments.out.write_text(json.dumps(result))
    print(f"a kernel ran in {result['busy_share']:.1%} of the time from the first to the last", flush=True)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans (start, end)."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _volumes(arguments: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, float]]:
    """Return scans of KiTS19's size, prepared on MLPerf's grid, and the seconds that making and preparing took."""
    if arguments.data is not None:
        return arguments.data, {}
    began = time.perf_counter()
    paths = [str(path.resolve()) if path else "" for path in (arguments.ct, arguments.label)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(os.cpu_count() or 1, 12), mp_context=context) as pool:
        for pending in [pool.submit(_scan, str(folder), n, arguments.side, *paths) for n in range(arguments.volumes)]:
            pending.result()
    description = {"name": "scans", "channels": ["CT"], "labels": {"background": 0, "kidney": 1, "tumour": 2}}
    cases = [
        {"id": f"case_{n:05d}", "image": f"image-{n}.nii", "label": f"label-{n}.nii"} for n in range(arguments.volumes)
    ]
    listed = folder / "scans.json"
    listed.write_text(json.dumps({"description": description, "cases": cases}))
    scans_s = time.perf_counter() - began
    done = watch("prepare", str(listed), str(folder / "prepared"), "recipe=mlperf-kits19", "--no-progress")
    return folder / "prepared", {"scans": scans_s, "prepare": done.seconds}


def _scan(folder: str, number: int, side: int, ct: str, label: str) -> None:
    """Write one scan with its label, uncompressed, because compressing takes longer than everything else."""
    import nibabel
    import numpy as np

    import medical_loader_data

    medical_loader_data.make_source(folder, number, side, ct, label)
    affine = np.diag([1.2, 1.2, 1.6, 1.0])
    for kind, volume in zip(("image", "label"), medical_loader_data.open_verified(folder, number), strict=True):
        nibabel.Nifti1Image(volume.transpose(2, 1, 0), affine).to_filename(f"{folder}/{kind}-{number}.nii")


# -- the command line --------------------------------------------------------------------------------------------------


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the run, without the paths of this machine."""
    left_out = ("measure", "out", "work", "name", "run")
    values = {k: v for k, v in vars(arguments).items() if k not in left_out}
    real = {name: bool(values.pop(name)) for name in ("ct", "label") if name in values}
    values.pop("data", None)
    return {**values, **{f"real_{name}": is_given for name, is_given in real.items()}, "quick": arguments.quick}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="name", required=True, metavar="WHAT")

    def add(name: str, measure: Any, data: str = "", **words: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, description=measure.__doc__, **words)
        if data:
            command.add_argument("data", type=Path, help=data)
        command.add_argument("fields", nargs="*", metavar="field=value", help="config field of every run")
        command.add_argument("--out", type=Path, help="result file")
        command.add_argument("--work", type=Path, help="folder for data and runs (default: the temporary folder)")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--commit", help="commit to record in the result file if the folder has no Git history")
        command.add_argument(
            "--quick", action="store_true", help="mark the result as a quick run that must not be quoted"
        )
        command.set_defaults(measure=measure)
        return command

    task = "the Decathlon's Task04_Hippocampus, raw or prepared"
    clock = add("hippocampus", hippocampus, task, help="measure Dice in a fixed training time")
    clock.add_argument(
        "--minutes", type=float, default=100 / 60, help="training time, start-up included (default 1.67)"
    )
    clock.add_argument(
        "--epochs", type=int, help="number of epochs (default: as many as fit by the pace of a short run)"
    )
    clock.add_argument("--epoch-steps", type=int, default=250)
    clock.add_argument("--pace-epochs", type=int, default=4)
    clock.add_argument("--margin", type=float, default=0.05, help="fraction of the time to leave unused (default 0.05)")
    clock.add_argument(
        "--score-both",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also score without mirroring (default: yes)",
    )
    clock.add_argument("--validations", type=int, default=8, help="number of points of the curve (default 8)")
    clock.add_argument("--curve-cases", type=int, default=8, help="held-out cases per point (default 8)")

    paths = add("curves", curves, task, help="compare the fast path with the plain one")
    paths.add_argument("--steps", type=int, default=1500)
    paths.add_argument("--window", type=int, default=25, help="number of steps that a point of a curve averages")
    paths.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1])
    paths.add_argument("--plain", default=PATHS["plain"], help=f"fields of the plain path (default: {PATHS['plain']})")
    paths.add_argument("--again", action="store_true", help="repeat the first seed of the fast path")
    paths.add_argument(
        "--mirror", action=argparse.BooleanOptionalAction, default=True, help="mirror when scoring at the end"
    )
    paths.add_argument("--at-once", type=int, default=4, help="number of concurrent runs on the GPU")

    from_disk = add("disk", disk, help="measure patches per second from disk")
    from_disk.add_argument("--data", type=Path, help="dataset prepared with recipe=mlperf-kits19 (default: make one)")
    from_disk.add_argument("--ct", type=Path, help="CT scan (NIfTI) to build the volumes from")
    from_disk.add_argument("--label", type=Path, help="label (NIfTI, slices first) to build the labels from")
    from_disk.add_argument("--volumes", type=int, default=12)
    from_disk.add_argument("--side", type=int, default=300, help="voxels of a volume along each axis (default 300)")
    from_disk.add_argument("--steps", type=int, default=1000)
    from_disk.add_argument("--epoch-steps", type=int, default=250)
    from_disk.add_argument(
        "--profile-steps", type=int, default=50, help="number of steps to profile (0: do not profile)"
    )
    from_disk.add_argument("--only", action="append", choices=list(DISK_VARIANTS))

    profiled = add("profile", profile, "prepared dataset", help="profile one epoch; used by disk")
    profiled.add_argument("--run", type=Path, required=True)
    profiled.add_argument("--steps", type=int, default=50)

    arguments, rest = parser.parse_known_args()
    wrong = [word for word in rest if not re.match(r"^[A-Za-z_][\w.]*=", word)]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    arguments.fields = [*arguments.fields, *rest]
    return arguments


if __name__ == "__main__":
    main()
