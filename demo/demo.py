"""The demo: a bucket of scans becomes a segmentation model with its scores and pictures, on this machine alone.

It starts the local object store, fills it with phantom abdomens in the layout of KiTS19, and runs voxlane's commands on
it as on a cloud bucket: prepare, train, evaluate, report, predict. Everything is written to the bucket; the results are
then downloaded.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import phantom
from tqdm import tqdm

from voxlane import Store, list_objects
from voxlane.cli.main import main as command_line
from voxlane.sizes import format_bytes
from voxlane.testing import Emulator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from voxlane.testing import Counters

RAW, PREPARED, RUN = "gs://demo/kits19", "gs://demo/prepared", "gs://demo/runs/first"
NEW_CASE = 1009
"""Number of a phantom that is not in the dataset and has a tumour of typical size."""
PATCH = "[32,64,64]"
"""Patch size: small, so that two cores train on enough patches in two minutes."""
TRAINING = (
    "preset=small",
    "fold=3",
    "epochs=8",
    "steps_per_epoch=50",
    "optimizer.lr=0.004",
    "foreground_share=0.6",
    "augment.strength=0.5",
    "channels_last=true",
    "validation.every_epochs=2",
    "validation.overlap=0.25",
)
"""Fold 3 holds 5 of the 24 cases. There is no time limit: a busy machine gets the same scores, only later."""


def main() -> None:
    """Run the demo and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the report and the pictures")
    parser.add_argument("--cases", type=int, default=24, help="phantoms to make (default 24)")
    parser.add_argument("--size", type=int, default=96, help="pixels of a slice's side (default 96)")
    parser.add_argument("overrides", metavar="field=value", nargs="*", help="fields of the training to change")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    started_at = time.monotonic()
    with Emulator() as server:
        server.create_bucket("demo")
        os.environ["STORAGE_EMULATOR_HOST"] = server.url  # as `voxlane emulator` tells its user to
        run(server, options.out, options.cases, options.size, options.overrides)
    print(f"\nin all {time.monotonic() - started_at:.0f} s")


def run(server: Emulator, out: Path, cases: int, size: int, overrides: Sequence[str]) -> None:
    """Run every step of the job and print its results."""
    print_heading(
        "a bucket of scans: phantoms of contrast-enhanced CT with kidneys and tumours, in a local object store"
    )
    print(f"$ export STORAGE_EMULATOR_HOST={server.url}")
    for _ in tqdm(phantom.write(RAW, cases, size=size), "making scans", cases, unit="case", disable=None):
        pass
    voxlane("ls", RAW + "/", "--total")

    print_heading("check, plan and write the scans as chunked volumes")
    voxlane("prepare", RAW, PREPARED, f"plan.patch={PATCH}")

    print_heading("train on patches streamed from the bucket")
    print("about 3 minutes on two idle cores, longer on a busy machine: the progress shows how long is left")
    server.reset_counters()
    voxlane("train", PREPARED, "--run", RUN, *TRAINING, *overrides)
    trained = server.counters()

    print_heading("score the cases that were held out")
    voxlane(
        "evaluate", RUN, "predict.checkpoint=last"
    )  # these cases selected the best weights, so the last ones are scored
    voxlane("report", RUN)

    print_heading("segment a new scan")
    segment_new_scan(out, size)

    print_heading("results")
    download(out)
    print(dice_table())
    print(f"\n{traffic_table(trained)}")
    print(f"\nreport    {(out / 'report.html').resolve().as_uri()}")
    print(f"pictures  {out / 'overlays'}, {out / 'new_scan.png'}\nmasks     {out / 'masks'}")


def print_heading(title: str) -> None:
    """Print the heading of a step."""
    print(f"\n── {title}", flush=True)


def voxlane(*words: str) -> None:
    """Run a command of voxlane, in this process to save the time to load torch again."""
    print(f"$ {shlex.join(['voxlane', *words])}", flush=True)
    with argv("voxlane", *words):
        status = command_line(words)
    if status:
        sys.exit(status)


@contextmanager
def argv(*words: str) -> Iterator[None]:
    """Set sys.argv for the block, because a run records its command line."""
    before, sys.argv = sys.argv, list(words)
    try:
        yield
    finally:
        sys.argv = before


def segment_new_scan(out: Path, size: int) -> None:
    """Write a raw scan to disk, predict it, and draw the mask beside the true labels."""
    from voxlane.train.pictures import draw_row, encode_png
    from voxlane.volume.scan import read_label, read_scan

    new = phantom.make(NEW_CASE, size=size)
    scan, truth, mask = out / "new_scan.nii.gz", out / "new_scan_truth.nii.gz", out / "masks" / "new_scan.nii.gz"
    scan.write_bytes(phantom.to_nifti(new.image, new.affine))
    truth.write_bytes(phantom.to_nifti(new.label, new.affine))
    voxlane("predict", RUN, str(scan), "-o", str(mask.parent), "checkpoint=last")
    read, (predicted, geometry), (true, _) = read_scan(str(scan)), read_label(str(mask)), read_label(str(truth))
    assert geometry == read.geometry, "a mask lies on its scan's own grid"
    millilitres = new.spacing[0] * new.spacing[1] * new.spacing[2] / 1000
    kidney, tumour = ((new.label == value).sum() * millilitres for value in (phantom.KIDNEY, phantom.TUMOUR))
    print(f"in truth: kidney {kidney:.1f} ml, tumour {tumour:.1f} ml")
    shape = " x ".join(map(str, geometry.shape))
    print(f"the mask has the scan's own grid: {shape} voxels of {spacing_text(geometry.spacing)} mm, and its affine")
    picture = draw_row(read.image[0].astype("float32"), true, predicted, geometry.spacing)
    (out / "new_scan.png").write_bytes(encode_png(picture))


def spacing_text(spacing: Sequence[float]) -> str:
    """Format a spacing, such as 5.25 x 3.9 x 3.9."""
    return " x ".join(f"{mm:.3g}" for mm in spacing)


def download(out: Path) -> None:
    """Fetch the report, the overlays and one held-out case's mask."""
    store = Store(RUN)
    folder = "runs/first/evaluation/validation/"
    keys = [entry.key for entry in list_objects(f"gs://demo/{folder}")]
    overlays = [key for key in keys if key.startswith(f"{folder}overlays/")]
    first_mask = min(key for key in keys if key.startswith(f"{folder}masks/"))
    downloads = {key: out / key.removeprefix(folder) for key in [*overlays, first_mask]}
    for key, path in {"runs/first/report.html": out / "report.html", **downloads}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(store.get(key)))


def dice_table() -> str:
    """Return the scores of the held-out cases, as `voxlane evaluate` wrote them."""
    from voxlane.train.evaluate import EvaluationResult, format_table
    from voxlane.train.run import Run, TrainedRun

    run = Run(RUN)
    summary = run.read_json("evaluation/validation/summary.json")
    return format_table(EvaluationResult(summary, [], run.folder_uri), TrainedRun.load(run).description)


def traffic_table(trained: Counters) -> str:
    """Return a table of what training read from the bucket by the server's count, and what whole objects would need."""
    from voxlane.train.run import Run

    patches = Run(RUN).read_json("stall.json")["patches"]
    objects = list_objects(RAW + "/")
    rows = [
        ("a whole scan and label for every patch", patches * objects.total_bytes // (len(objects) // 2), 2 * patches),
        ("every scan and label once, kept in memory", objects.total_bytes, len(objects)),
        ("voxlane, as the server counted it", trained.get.bytes_out, trained.get.requests),
    ]
    lines = [f"{f'read from the bucket for {patches:,} patches':<44}{'bytes':>11}{'requests':>10}"]
    lines += [f"{name:<44}{format_bytes(size):>11}{requests:>10,}" for name, size, requests in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
