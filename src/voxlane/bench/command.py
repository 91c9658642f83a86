"""`voxlane bench`: its flags. What they start is imported when it runs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from voxlane.bench import loading_command, step_command
from voxlane.bench.scale import command as scale_command
from voxlane.bench.scaling_setting import LAUNCHERS, MODES
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

_SCALING = """\
Train on 1, 2, 4, ... workers in turn and report patches/s and efficiency: speed-up over the fewest workers, divided by
how many times more there are. Start-up is told apart from steady state. Repetitions take turns over the numbers of
workers, so that a drift of the machine falls on all alike.

  weak     a worker's batch is --batch, whatever their number: the global batch grows with them
  strong   the global batch is --global-batch, whatever their number: a worker's share shrinks

By default the accelerator is simulated: a step takes --step-time, but the patches come through the real loader, and
gradients of the real network's sizes are averaged over real ranks while the rest of the step goes on. So workers can
outnumber processors, and what is measured is everything but arithmetic. --real trains.

--trials measures a search: trials of known length, some at once; efficiency is the sum of their lengths divided by
(trials at once x makespan).
"""

_SCALING_EPILOG = """\
examples:
  voxlane bench scaling                                               1, 2, 4, 8 workers on made data, no files needed
  voxlane bench scaling gs://bucket/prepared --workers 1,2,4 patch=[96,96,96] base_features=16
  voxlane bench scaling gs://bucket/prepared --real --workers 1,2 --mode strong --target-dice 0.8 epochs=10
  voxlane bench scaling --address auto --workers 8,16,32 --mode weak      on a Ray cluster that is there
  voxlane bench scaling --trials 8 --concurrent 1,2                   only trials
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
    _add_checkpoint(kinds, add_store_options, store_config)
    _add_scaling(kinds, add_store_options, store_config)
    loading_command.add(kinds, add_store_options, store_config)
    scale_command.add(kinds, add_store_options, store_config)
    step_command.add(kinds, add_store_options, store_config)


def _add_checkpoint(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
    add_store_options: Callable[[argparse.ArgumentParser], None],
    store_config: Callable[[argparse.Namespace], StoreConfig],
) -> None:
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
    parser.set_defaults(run=lambda options: _checkpoint(options, store_config(options)))


def _checkpoint(options: argparse.Namespace, store: StoreConfig) -> int:
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


def _add_scaling(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
    add_store_options: Callable[[argparse.ArgumentParser], None],
    store_config: Callable[[argparse.Namespace], StoreConfig],
) -> None:
    parser = kinds.add_parser(
        "scaling",
        help="train on more and more workers, or search with more and more trials at once",
        description=_SCALING,
        epilog=_SCALING_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        metavar="DATA field=value",
        nargs="*",
        default=[],
        help="a prepared dataset (one is made if none is given), and training config fields (default preset=small)",
    )
    parser.add_argument("--workers", metavar="N,N,...", help="numbers of workers (default 1,2,4,8; with --trials none)")
    parser.add_argument("--mode", choices=MODES, default="both", help="(default both)")
    parser.add_argument("--batch", type=int, metavar="N", default=2, help="weak: patches a worker (default 2)")
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="strong: patches over all workers (default: --batch times the most workers)",
    )
    parser.add_argument(
        "--step-time",
        type=float,
        metavar="S",
        default=0.2,
        help="what the simulated accelerator takes for --batch patches, others in proportion (default 0.2)",
    )
    parser.add_argument("--steps", type=int, metavar="N", default=40, help="steps measured (default 40)")
    parser.add_argument("--warmup", type=int, metavar="N", default=5, help="steps before those (default 5)")
    parser.add_argument("--repeat", type=int, metavar="N", default=3, help="repetitions (default 3)")
    parser.add_argument("--real", action="store_true", help="train, by the config's epochs and steps_per_epoch")
    parser.add_argument("--target-dice", type=float, metavar="D", help="--real: time to this mean Dice")
    parser.add_argument("--run", metavar="URI", dest="run_folder", help="--real: keep the runs there")
    parser.add_argument("--trials", type=int, metavar="M", default=0, help="trials of a search (default none)")
    parser.add_argument("--concurrent", metavar="N,N,...", help="--trials: so many at once (default 1,2)")
    parser.add_argument(
        "--trial-time", type=float, metavar="S", default=10.0, help="--trials: length of each (default 10)"
    )
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="ray",
        help="ray: as voxlane train --workers. local: processes of this machine, without Ray (default ray)",
    )
    parser.add_argument("--address", metavar="A", help="a Ray cluster that is there: host:port, or auto")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("scaling-bench.json"),
        help="result file; the plot lies beside it as .png (default scaling-bench.json)",
    )
    parser.add_argument("--no-plot", action="store_true", help="no plot (needs no matplotlib)")
    add_store_options(parser)
    parser.set_defaults(run=lambda options: _scaling(options, store_config(options)), rest="words")


def _scaling(options: argparse.Namespace, store: StoreConfig) -> int:
    from voxlane.bench import report, scaling_report
    from voxlane.bench.scaling_setting import from_options

    setting = from_options(options, store)
    plot = not options.no_plot
    report.check_writable(options.out, plot=plot)

    from voxlane.bench.scaling import measure  # imports torch, after the user's mistakes are told

    result = scaling_report.document(setting, measure(setting))
    print(scaling_report.tables(result))
    for path in scaling_report.save(result, options.out, plot=plot):
        print(f"wrote {path}", file=sys.stderr)
    return 0
