"""`voxlane bench`: its flags. What they start is imported when it runs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from voxlane.bench.setting import ACCELERATORS, FORMATS, STRATEGIES

if TYPE_CHECKING:
    from voxlane.store import StoreConfig

_DESCRIPTION = """\
Save and load the state of a demo transformer, by one or several strategies in turn, and report times and MB/s.

strategies:
  voxlane      this package
  fsspec       torch's FsspecWriter and FsspecReader (distributed), torch.save to an fsspec file (single)
  filesystem   torch's own, on a folder: a local one, or where a bucket is mounted (--mount)

What was loaded is compared with what was saved, outside the measured time; a difference fails the run.
"""

_EPILOG = """\
model size: 10 layers 79 MB, 100 layers 311 MB, 1000 layers 2.6 GB, 10000 layers 26 GB.

environment: CKPT_DIR_PATH, CKPT_RESTORE_PATH, NUM_LAYERS, NUM_SAVE_CALLS, NUM_LOAD_CALLS, NUM_NODES and NUM_DEVICES
(ranks are their product) and ACCELERATOR count where the flag is not given. Under torchrun, and wherever RANK,
WORLD_SIZE and MASTER_ADDR are set, the process takes part as that rank, and WORLD_SIZE is the number of ranks.

examples:
  voxlane bench checkpoint --dir gs://bucket/bench --ranks 2 --layers 100
  voxlane bench checkpoint --dir s3://bucket/bench --strategy voxlane --strategy fsspec --format single
  voxlane bench checkpoint --dir gs://bucket/bench --strategy filesystem --mount /mnt/bucket
  voxlane bench checkpoint --save-only --dir gs://bucket/bench --saves 1      prints the checkpoint's URI, for:
  voxlane bench checkpoint --load-only --restore gs://bucket/bench/voxlane-bench/voxlane-distributed/ckpt-0
  torchrun --nnodes 4 --nproc-per-node 8 -m voxlane.cli.main bench checkpoint --dir gs://bucket/bench --accelerator cuda
"""


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_store_options: Callable[[argparse.ArgumentParser], None],
    store_config: Callable[[argparse.Namespace], StoreConfig],
) -> None:
    """Add `bench`. The two callables are the command line's own: the flags that say how to reach a bucket, and what
    they come to."""
    bench = commands.add_parser("bench", help="measure on your own machines and buckets")
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    parser = kinds.add_parser(
        "checkpoint",
        help="save and load checkpoints of a demo model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", metavar="URI", help="where to save: a bucket with a prefix, or a folder")
    parser.add_argument("--restore", metavar="URI", help="load this checkpoint instead of those that were saved")
    parser.add_argument(
        "--mount", metavar="DIR", help="folder for 'filesystem' when --dir is a bucket: its mount point"
    )
    parser.add_argument(
        "--strategy", action="append", choices=STRATEGIES, help="repeatable; they take turns (default voxlane)"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="distributed",
        help="distributed: sharded (FSDP2), every rank writes and reads its part. single: one torch.save file, written "
        "by the first rank and read by all (default distributed)",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--save-only", action="store_true", help="do not load; checkpoints are kept")
    only.add_argument("--load-only", action="store_true", help="do not save; needs --restore")
    parser.add_argument("--layers", type=int, metavar="N", help="size of the model (default 10)")
    parser.add_argument("--saves", type=int, metavar="N", help="save calls of each strategy (default 3)")
    parser.add_argument("--loads", type=int, metavar="N", help="load calls of each strategy (default 3)")
    parser.add_argument("--ranks", type=int, metavar="N", help="local processes to start (default 1)")
    parser.add_argument("--accelerator", metavar="KIND", help=f"{', '.join(ACCELERATORS)} (default cpu)")
    parser.add_argument("--keep", action="store_true", help="do not remove the saved checkpoints at the end")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("checkpoint-bench.json"),
        help="result file; the plot lies beside it as .png (default checkpoint-bench.json)",
    )
    parser.add_argument("--no-plot", action="store_true", help="no plot (needs no matplotlib)")
    add_store_options(parser)
    parser.set_defaults(run=lambda options: _run(options, store_config(options)))


def _run(options: argparse.Namespace, store: StoreConfig) -> int:
    from voxlane.bench import report
    from voxlane.bench.setting import from_options

    setting = from_options(options, store)
    plot = not options.no_plot
    report.check_writable(options.out, plot=plot)

    from voxlane.bench.checkpoint import measure  # imports torch, after the user's mistakes are told

    outcome = measure(setting)
    if outcome is None:  # another rank reports
        return 0
    result = report.document(setting, outcome)
    print(report.table(result))
    if setting.format == "single" and setting.num_load_calls:
        print("peak extra memory of a single-file load includes the loaded state itself")
    for uri in outcome.kept:
        print(f"kept {uri}")
    for path in report.save(result, options.out, plot=plot):
        print(f"wrote {path}", file=sys.stderr)
    return 0
