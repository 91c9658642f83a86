"""`voxlane bench loading`: its flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from voxlane.bench.loading_setting import CACHES, LAUNCHERS, MODES

if TYPE_CHECKING:
    from voxlane.store import StoreConfig

_DESCRIPTION = """\
Load data as training does, with a sleep in place of the step, and report per epoch and node: time, samples/s, Gbps,
requests/s, the share of time that no step ran (stall), memory, and the bytes that the server itself counted where it
tells (our emulator does).

modes, by what DATA is:
  patches        DATA is a prepared dataset: ranged reads of the chunks that a patch touches
  whole-object   DATA is raw scans (.npy pairs, or the folders that voxlane prepare takes, in NIfTI): every patch
                 downloads and decodes a whole scan and its label, as the public segmentation demo does

Give both, raw scans and the dataset prepared from them, and they are measured in turns, over the same cases in the
same order, and compared.

caches (on each node's disk; patches also in memory, as training does):
  none   nothing is kept from one sample to the next
  cold   empty at the start of every epoch
  warm   as the epoch before left it, which is what a training finds from its second epoch on
"""

_EPILOG = """\
examples:
  voxlane bench loading gs://bucket/prepared --batch 2 --step-time 0.2
  voxlane bench loading gs://bucket/raw gs://bucket/prepared --steps 20 --cache none --cache warm
  voxlane bench loading s3://bucket/raw --listing-only
  voxlane ls gs://bucket/raw/ --save raw.parquet; voxlane bench loading gs://bucket/raw --manifest raw.parquet
  voxlane bench loading gs://bucket/prepared --ranks 4                    four processes of this machine
  voxlane bench loading gs://bucket/prepared --launcher ray --address auto --nodes 8 --ranks 4
  torchrun --nnodes 8 --nproc-per-node 4 -m voxlane bench loading gs://bucket/prepared --out gs://bucket/bench.json
  voxlane slurm submit --nodes 8 -- bench loading gs://bucket/prepared --out /shared/bench.json
"""


def add(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
    add_store_options: Callable[[argparse.ArgumentParser], None],
    store_config: Callable[[argparse.Namespace], StoreConfig],
) -> None:
    """Add `loading` to the benchmarks."""
    parser = kinds.add_parser(
        "loading",
        help="load data as training does, and say what it waits for",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flag = parser.add_argument
    add_flag("words", metavar="DATA", nargs="+", help="a prepared dataset, raw scans, or both to compare them")
    add_flag("--mode", choices=MODES, help="insist on this one (default: by what DATA is)")
    add_flag("--listing-only", action="store_true", help="list DATA, say what it took, and stop")
    loop = parser.add_argument_group("the loop")
    loop.add_argument("--step-time", type=float, metavar="S", default=0.1, help="a step's seconds (default 0.1)")
    loop.add_argument("--batch", type=int, metavar="N", default=2, help="samples a rank and step (default 2)")
    loop.add_argument("--epochs", type=int, metavar="N", default=2, help="epochs measured (default 2)")
    loop.add_argument("--samples", type=int, metavar="N", help="an epoch's, over all ranks (default: one a case)")
    loop.add_argument("--steps", type=int, metavar="N", help="an epoch's steps, instead of --samples")
    loop.add_argument("--patch", metavar="Z,Y,X", help="voxels, or one number (default: the plan's; raw scans: 128)")
    loop.add_argument(
        "--foreground-share",
        type=float,
        metavar="F",
        default=0.33,
        help="of patches, drawn around foreground (default 0.33; 0: both modes cut exactly the same patches, where "
        "preparing kept the grid)",
    )
    loop.add_argument("--no-sync", action="store_true", help="ranks do not wait for one another at every step")
    loop.add_argument("--seed", type=int, metavar="N", default=0, help="of the order and the patches (default 0)")
    loader = parser.add_argument_group("the loader")
    loader.add_argument(
        "--workers", type=int, metavar="N", default=0, help="DataLoader processes of a rank (default 0: itself)"
    )
    loader.add_argument(
        "--prefetch", type=int, metavar="N", default=2, help="batches on their way, a rank or a worker (default 2)"
    )
    loader.add_argument(
        "--in-flight",
        type=int,
        metavar="N",
        help="samples that a process fetches at once (default: --prefetch batches, in a worker one batch)",
    )
    loader.add_argument(
        "--max-gap",
        metavar="SIZE",
        default="128Ki",
        help="patches: chunks so close together come in one request (default 128Ki)",
    )
    loader.add_argument("--cache", action="append", choices=CACHES, help="repeatable (default none)")
    loader.add_argument("--cache-dir", metavar="DIR", help="of each node (default: a temporary folder)")
    loader.add_argument("--cache-bytes", metavar="SIZE", default="100Gi", help="of each node's disk (default 100Gi)")
    loader.add_argument("--manifest", metavar="FILE", help="a saved listing of raw scans (voxlane ls --save)")
    where = parser.add_argument_group("where it runs")
    where.add_argument("--ranks", type=int, metavar="N", default=1, help="processes a node (default 1)")
    where.add_argument("--nodes", type=int, metavar="N", default=1, help="nodes; local ones are played (default 1)")
    where.add_argument("--launcher", choices=LAUNCHERS, default="local", help="(default local)")
    where.add_argument("--address", metavar="A", help="a Ray cluster that is there: host:port, or auto")
    add_flag(
        "--out",
        metavar="FILE",
        default="loading-bench.json",
        help="result file, a path or a URI; the plot lies beside it as .png (default loading-bench.json)",
    )
    add_flag("--no-plot", action="store_true", help="no plot (needs no matplotlib)")
    add_store_options(parser)
    parser.set_defaults(run=lambda options: _run(options, store_config(options)))


def _run(options: argparse.Namespace, store: StoreConfig) -> int:
    from voxlane.bench.loading_setting import from_options
    from voxlane.bench.outcome import Outcome

    plot = not options.no_plot and not options.listing_only
    setting = from_options(options, store)
    out = Outcome(options.out, store, plot=plot)

    from voxlane.bench.loading import measure  # imports torch, after the user's mistakes are told

    setting, found = measure(setting)
    if found is None:  # another rank reports
        return 0

    from voxlane.bench import loading_report

    if isinstance(found, dict):
        result = loading_report.listing_document(setting, found)
    else:
        result = loading_report.document(setting, found)
    print(loading_report.table(result))
    for sentence in loading_report.words(result):
        print(sentence)
    for place in out.save(result, loading_report.draw):
        print(f"wrote {place}", file=sys.stderr)
    return 0
