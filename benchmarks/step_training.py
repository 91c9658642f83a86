"""Real training on one GPU: accuracy by the clock, the fast path against the plain one, and training from disk.

    python benchmarks/step_training.py hippocampus Task04_Hippocampus     100 s of training, then the held-out Dice
    python benchmarks/step_training.py curves Task04_Hippocampus          losses and Dice of both paths, two seeds each
    python benchmarks/step_training.py disk [--ct SCAN --label LABEL]     patches a second from prepared volumes

Each writes results/training_NAME.json. All runs are `voxlane train` in a process of its own, watched from outside, so
that the clock starts before Python does. `field=value` words go to every one of them.
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

import step_runs
from loss_curves import comparison, mean
from performance_results import RESULTS
from step_runs import Gpu, Watched, read, watch

NNUNET = {"mean_dice": 0.891, "training_s": 299.0, "iterations": 13000}
"""nnU-Net 2.8.1 as it ships on one H200: all 217 cases trained on, other ones of the Decathlon's held out."""
PATHS = {"fast": "", "plain": "fused=false compile=false"}
"""What `curves` compares: fields of each path."""
QUIET = ("validation.images=0", "checkpoint_every_epochs=1000")
"""Pictures are drawn and checkpoints written between epochs; the last epoch's checkpoint is always written."""


def main() -> None:
    """Run what is asked for."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="voxlane-bench-", dir=arguments.work) as folder:
        document = arguments.measure(arguments, Path(folder))
    if document is not None:
        step_runs.save(arguments.out or RESULTS / f"training_{arguments.name}.json", document)


def _prepared(arguments: argparse.Namespace, folder: Path) -> tuple[Path, float]:
    """The prepared dataset of DATA, and the seconds that preparing took; DATA itself where it is one."""
    source: Path = arguments.data
    if (source / "prepared.json").exists():
        return source, 0.0
    done = watch("prepare", str(source), str(folder / "prepared"), "--no-progress")
    return folder / "prepared", done.seconds


def _train(data: Path, run: Path, fields: Sequence[str], *, echo: bool = True, caches: Path | None = None) -> Watched:
    return watch("train", str(data), "--run", str(run), *fields, echo=echo, caches=caches)


def _evaluate(run: Path, fields: Sequence[str], *, echo: bool = True) -> dict[str, Any]:
    """Scores of the run's last weights on the held-out cases, each scan in its own grid."""
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
    """The cases of a run, of which none that is scored was trained on."""
    facts = read(run, "run.json")
    trained, held_out = facts["cases"]["train"], facts["cases"]["validation"]
    assert not set(trained) & set(held_out)
    rule = "fold 0 of five: a hash of the case's name, fixed when the dataset is prepared"
    return {"trained_on": len(trained), "held_out": held_out, "rule": rule}


# -- accuracy by the clock ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pace:
    """What a short run took, from which the length of the long one is planned."""

    start_s: float
    """From before the process was started to its first step, without that step's epoch."""
    epoch_s: float
    """An epoch, without validation."""
    validation_s: float
    end_s: float
    """From the last epoch's line to the process's end."""

    @classmethod
    def of(cls, done: Watched, validate_s: float) -> Pace:
        """From a run of at least three epochs, of which only the last was validated. The first epoch has what is done
        once in it (compiling, recording), so it is counted as start-up but for a later epoch's length."""
        at = done.epochs()
        epoch_s = statistics.median(b - a for a, b in itertools.pairwise(at[:-1]))
        return cls(at[0] - epoch_s, epoch_s, validate_s, done.seconds - at[-1])

    def epochs_within(self, budget_s: float, validations: int, margin: float) -> int:
        """Epochs that fit, with a share of the time left over for what was slower than in the short run."""
        left = budget_s * (1 - margin) - self.start_s - self.end_s - validations * self.validation_s
        return max(1, int(left / self.epoch_s))


def hippocampus(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train for a given time by the clock, start-up included, and score the held-out cases.

    The schedule is a number of steps that is fixed before the run, from the pace of a short one, so that the learning
    rate has come down to zero when the time is up. The weights that are scored are the last. Validations along the way
    are for the curve: nothing is chosen by them. Each run compiles its kernels anew.
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
    # A failure of these is part of the result: the training took minutes and its curve is there.
    scores = {}
    ways = {"mirrored": ["predict.mirror=true"], "plain": ["predict.mirror=false"]}
    for name, fields in itertools.islice(ways.items(), 2 if arguments.score_both else 1):
        try:
            scores[name] = _evaluate(run, fields)
        except step_runs.FailedError as error:
            print(error, file=sys.stderr)
            scores[name] = {"error": error.short}
    for name, found in scores.items():
        print(f"{name}: {found.get('mean_dice')} {found.get('targets')}", flush=True)
    print(json.dumps(summary, indent=1), flush=True)
    facts = read(run, "run.json")
    return {
        **step_runs.facts("step_training.py hippocampus", _settings(arguments)),
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
    """Losses of each path and seed, step by step in windows, and the held-out Dice at the end of a whole schedule.

    Paths are compared at equal seeds, that is at equal first weights, patches and augmentation; what one seed differs
    from another by is the scale that the difference is held against. Runs share the machine: nothing is timed.
    """
    data, _ = _prepared(arguments, folder)
    window = arguments.window
    jobs = [(name, fields, seed) for seed in arguments.seeds for name, fields in _paths(arguments).items()]
    jobs += [("fast, again", _paths(arguments)["fast"], arguments.seeds[0])] * arguments.again

    def one(job: tuple[str, str, int]) -> dict[str, Any]:
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
        except step_runs.FailedError as error:  # the others still say something
            print(error, file=sys.stderr, flush=True)
            row["error"] = error.short
        dice = row.get("scores", {}).get("mean_dice")
        print(f"{name}, seed {seed}: {row.get('training_s', 0):.0f} s, Dice {dice}", flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
        rows = list(pool.map(one, jobs))
    split = next((row["split"] for row in rows if "split" in row), None)
    for row in rows:
        row.pop("split", None)
    found = comparison([row for row in rows if "scores" in row])
    print(json.dumps(found, indent=1), flush=True)
    return {
        **step_runs.facts("step_training.py curves", _settings(arguments)),
        "split": split,
        "summary": found,
        "runs": rows,
    }


def _paths(arguments: argparse.Namespace) -> dict[str, str]:
    return {**PATHS, "plain": arguments.plain}


# -- from disk ---------------------------------------------------------------------------------------------------------

DISK_VARIANTS = {"MLPerf's augmentation": (), "nnU-Net's augmentation": ("augment.preset=nnunet",)}


def disk(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Patches a second of MLPerf's U-Net3D from prepared volumes on this machine's disk, the loader's memory cache off.

    Steady state: from the end of the second epoch to the end of the last, so what is done once is left out and what is
    done every epoch is not.
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
        except step_runs.FailedError as error:
            print(error, file=sys.stderr, flush=True)
            row["error"] = error.short
        try:
            row["profile"] = _profiled(data, folder / f"profiled-{number}", fields, arguments)
        except step_runs.FailedError as error:
            print(error, file=sys.stderr, flush=True)
            row["profile"] = None
        print(json.dumps({k: v for k, v in row.items() if k != "epochs"}, indent=1), flush=True)
        rows.append(row)
    return {
        **step_runs.facts("step_training.py disk", _settings(arguments)),
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
    """A short run with torch's profiler over one of its epochs, in a process of its own."""
    import torch

    if not torch.cuda.is_available() or not arguments.profile_steps:
        return None
    out = run.with_suffix(".json")
    words = ["profile", str(data), "--run", str(run), "--out", str(out), "--steps", str(arguments.profile_steps)]
    step_runs.watch_command([sys.executable, __file__, *words, *fields])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def profile(arguments: argparse.Namespace, folder: Path) -> None:
    """Of `disk`: the share of an epoch in which the GPU ran something, and what took longest."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    from voxlane import settings
    from voxlane.train.fit import begin, fit

    said: dict[str, Any] = {}
    for field in [*arguments.fields, f"steps_per_epoch={arguments.steps}", "epochs=5"]:
        settings.set_dotted(said, field)
    on_gpu = torch.cuda.is_available()
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])

    def at_epoch(entry: dict[str, Any]) -> bool:
        if on_gpu:
            torch.cuda.synchronize()
        if entry["epoch"] == 2:  # the first two have what is done once
            profiler.start()
        elif entry["epoch"] == 3:
            profiler.stop()
        return False

    begin(str(arguments.data), str(arguments.run), said, here=True)
    fit(str(arguments.run), progress=False, watch=at_epoch)
    history = read(arguments.run, "history.json")
    wall_s = history[3]["seconds"] - history[2]["seconds"]
    spans, by_name = [], dict[str, float]()
    for event in profiler.events() or []:
        # An annotation's span on the device (an optimizer's step, say) covers the gaps between its kernels too.
        if event.device_type == device_type and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name] = by_name.get(event.name, 0.0) + event.time_range.elapsed_us()
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:15]
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    found = {
        "steps": arguments.steps,
        "epoch_s": wall_s,
        "kernels": len(spans),
        "busy_s": covered(spans) / 1e6,
        "busy_share": covered(spans) / (last - first),
        "step_ms_busy": covered(spans) / 1e3 / arguments.steps,
        "longest_ms_a_step": {name[:100]: us / 1e3 / arguments.steps for name, us in longest},
    }
    arguments.out.write_text(json.dumps(found))
    print(f"a kernel ran in {found['busy_share']:.1%} of the time from the first to the last", flush=True)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of spans (start, end)."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _volumes(arguments: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, float]]:
    """Scans of KiTS19's size on MLPerf's grid, prepared by `voxlane prepare`; and the seconds that both took."""
    if arguments.data is not None:
        return arguments.data, {}
    began = time.perf_counter()
    paths = [str(path.resolve()) if path else "" for path in (arguments.ct, arguments.label)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(os.cpu_count() or 1, 12), mp_context=context) as pool:
        for made in [pool.submit(_scan, str(folder), n, arguments.side, *paths) for n in range(arguments.volumes)]:
            made.result()
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
    """One scan with its label, uncompressed: making gzip of it takes longer than all the rest."""
    import nibabel
    import numpy as np

    import peer_data

    peer_data.make_source(folder, number, side, ct, label)
    affine = np.diag([1.2, 1.2, 1.6, 1.0])
    for kind, volume in zip(("image", "label"), peer_data.open_source(folder, number), strict=True):
        nibabel.Nifti1Image(volume.transpose(2, 1, 0), affine).to_filename(f"{folder}/{kind}-{number}.nii")


# -- the command line --------------------------------------------------------------------------------------------------


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without this machine's paths."""
    left_out = ("measure", "out", "work", "name", "run")
    values = {k: v for k, v in vars(arguments).items() if k not in left_out}
    real = {name: bool(values.pop(name)) for name in ("ct", "label") if name in values}
    values.pop("data", None)
    return {**values, **{f"real_{name}": given for name, given in real.items()}, "quick": arguments.quick}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="name", required=True, metavar="WHAT")

    def add(name: str, measure: Any, data: str = "", **words: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, description=measure.__doc__, **words)
        if data:
            command.add_argument("data", type=Path, help=data)
        command.add_argument("fields", nargs="*", metavar="field=value", help="config fields of every run")
        command.add_argument("--out", type=Path, help="the result file")
        command.add_argument("--work", type=Path, help="a folder for data and runs (default: the temporary one)")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--commit", help="what the result file names, where the tree has no history")
        command.add_argument("--quick", action="store_true", help="mark the result as one not to quote")
        command.set_defaults(measure=measure)
        return command

    task = "the Decathlon's Task04_Hippocampus, or it prepared"
    one = add("hippocampus", hippocampus, task, help="Dice by the clock")
    one.add_argument("--minutes", type=float, default=100 / 60, help="training, start-up included (default 1.67)")
    one.add_argument("--epochs", type=int, help="so many, instead of what fits by the pace of a short run")
    one.add_argument("--epoch-steps", type=int, default=250)
    one.add_argument("--pace-epochs", type=int, default=4)
    one.add_argument("--margin", type=float, default=0.05, help="share of the time that is left over (default 0.05)")
    one.add_argument(
        "--score-both",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="score without mirroring too (default: yes)",
    )
    one.add_argument("--validations", type=int, default=8, help="points of the curve (default 8)")
    one.add_argument("--curve-cases", type=int, default=8, help="held-out cases of each (default 8)")

    two = add("curves", curves, task, help="the fast path against the plain one")
    two.add_argument("--steps", type=int, default=1500)
    two.add_argument("--window", type=int, default=25, help="steps that a point of a curve is the mean of")
    two.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1])
    two.add_argument("--plain", default=PATHS["plain"], help=f"fields of the plain path (default: {PATHS['plain']})")
    two.add_argument("--again", action="store_true", help="the fast path's first seed once more")
    two.add_argument("--mirror", action=argparse.BooleanOptionalAction, default=True, help="for the Dice at the end")
    two.add_argument("--at-once", type=int, default=4, help="runs that share the GPU")

    three = add("disk", disk, help="patches a second from disk")
    three.add_argument("--data", type=Path, help="a dataset prepared with recipe=mlperf-kits19, instead of made ones")
    three.add_argument("--ct", type=Path, help="a CT scan (NIfTI) to make the volumes of")
    three.add_argument("--label", type=Path, help="a label (NIfTI, slices first) to make the labels of")
    three.add_argument("--volumes", type=int, default=12)
    three.add_argument("--side", type=int, default=300, help="voxels of a volume along each axis (default 300)")
    three.add_argument("--steps", type=int, default=1000)
    three.add_argument("--epoch-steps", type=int, default=250)
    three.add_argument("--profile-steps", type=int, default=50, help="0: no profile")
    three.add_argument("--only", action="append", choices=list(DISK_VARIANTS))

    four = add("profile", profile, "a prepared dataset", help="what disk runs for its profile")
    four.add_argument("--run", type=Path, required=True)
    four.add_argument("--steps", type=int, default=50)

    arguments, rest = parser.parse_known_args()
    wrong = [word for word in rest if not re.match(r"^[A-Za-z_][\w.]*=", word)]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    arguments.fields = [*arguments.fields, *rest]
    return arguments


if __name__ == "__main__":
    main()
