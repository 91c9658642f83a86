"""`voxlane bench simulate`: its flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from voxlane.bench.scale import public

if TYPE_CHECKING:
    from voxlane.store import StoreConfig

_MODES = ("both", "whole-object", "patches")
_DESCRIPTION = """\
Simulate loading on any number of nodes: epoch time, samples/s, egress, requests/s and stall, from the settings of a
loader, a network and a bucket. Discrete events, the same every time for a seed; no bucket and no node is used.

Without flags: the public segmentation benchmark (32 to 1,024 nodes, whole objects) beside its published table, then
patches on the same nodes and on 10,000.

  --check RESULT...   measured runs of voxlane bench loading, simulated from their own settings, and how far off that is
  --plan --nodes N    for a step time, a batch and a cluster: how many workers, what cache, what binds, what it costs
"""

_EPILOG = """\
examples:
  voxlane bench simulate                                                  the public table, and patches
  voxlane bench simulate --mode patches --nodes 8,64,512 --batch 2 --step-time 0.2 --workers 4
  voxlane bench simulate --mode patches --measured loading-bench.json     what a patch takes, measured on your data
  voxlane bench simulate --check loading-*.json
  voxlane bench simulate --plan --mode patches --nodes 64 --ranks 8 --batch 2 --step-time 0.2 --cores 96 --link-gbps 100

Rates: --stream-mb is MB/s (1e6 bytes) of one connection, Gbps are 1e9 bits/s; 0 is no limit. Sizes: 150M, 2Gi.
"""


def add(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
    add_store_options: Callable[[argparse.ArgumentParser], None],
    store_config: Callable[[argparse.Namespace], StoreConfig],
) -> None:
    """Add `simulate` to the benchmarks. It reaches no bucket, so it has no use for the two callables."""
    parser = kinds.add_parser(
        "simulate",
        help="simulate loading on thousands of nodes, check that against measurements, or plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", nargs="+", metavar="RESULT", help="result files of voxlane bench loading")
    what.add_argument("--plan", action="store_true", help="plan for --nodes")
    parser.add_argument("--mode", choices=_MODES, default="both", help="(default both)")
    _add_cluster(parser)
    _add_loop(parser)
    _add_data(parser)
    _add_network(parser)
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of all that is drawn (default 0)")
    parser.add_argument(
        "--thin",
        type=int,
        metavar="N",
        help="simulate at most so many nodes, with their share of the bucket (default 1024, in mode patches 8)",
    )
    parser.add_argument(
        "--window", type=float, metavar="S", default=60.0, help="highest rates are means over this long (default 60)"
    )
    parser.add_argument(
        "--usd-per-gb", type=float, metavar="X", default=0.02, help="egress to another region (default 0.02)"
    )
    parser.add_argument("--usd-per-10k-requests", type=float, metavar="X", default=0.004, help="reads (default 0.004)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("scale.json"),
        help="result file; the plot lies beside it as .png (default scale.json)",
    )
    parser.add_argument("--no-plot", action="store_true", help="no plot (needs no matplotlib)")
    parser.set_defaults(run=_run)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster")
    add = group.add_argument
    add("--nodes", metavar="N,N,...", help="(default 32,64,...,1024 and, for patches, 10000)")
    add("--ranks", type=int, metavar="N", default=1, help="training processes a node (default 1)")
    add("--cores", type=float, metavar="N", default=float(public.CORES), help=f"a node (default {public.CORES})")
    add("--link-gbps", type=float, metavar="X", help=f"of a node (default {public.LINK_GBPS:g})")
    add("--cache", metavar="SIZE", default="0", help="of a node's disk (default 0)")
    add("--warm", action="store_true", help="caches are full from the start")


def _add_loop(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the loop and its loader")
    add = group.add_argument
    add("--step-time", type=float, metavar="S", default=public.STEP_TIME_S, help="a step's seconds (default 1)")
    add("--batch", type=int, metavar="N", default=public.BATCH, help="samples a rank and step (default 32)")
    add(
        "--steps", type=int, metavar="N", help="of a rank in an epoch (default: each volume once; patches: 100 or more)"
    )
    add("--epochs", type=int, metavar="N", default=1, help="(default 1)")
    add("--no-sync", action="store_true", help="ranks do not wait for one another at every step")
    add("--workers", type=int, metavar="N", default=public.WORKERS, help="loader processes of a rank (default 16)")
    add("--prefetch", type=int, metavar="N", default=public.PREFETCH, help="batches a worker has ready (default 2)")
    add("--in-flight", type=int, metavar="N", help="patches: samples on their way in a process (default: a batch)")
    add(
        "--connections", type=int, metavar="N", default=64, help="patches: requests of a process at a time (default 64)"
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the data")
    add = group.add_argument
    add("--volumes", type=int, metavar="N", default=public.VOLUMES, help=f"(default {public.VOLUMES})")
    add("--image-bytes", metavar="SIZE", default="150M", help="of a whole image (default 150M)")
    add("--label-bytes", metavar="SIZE", default="37500k", help="of a whole label (default 37500k)")
    add(
        "--whole-cpu-s",
        type=float,
        metavar="S",
        default=0.0,
        help="processor seconds of a whole sample (default: in the rate)",
    )
    add("--prepared-bytes", metavar="SIZE", default="43130k", help="of a prepared volume (default 43130k)")
    add("--measured", metavar="RESULT", help="what a patch takes, from a result file of voxlane bench loading")
    add("--patch-bytes", metavar="SIZE", help=f"of chunks that a patch reads (default {public.PATCH_BYTES / 1e6:.2f}M)")
    add("--patch-requests", type=float, metavar="X", help=f"for those (default {public.PATCH_REQUESTS})")
    add("--patch-cpu-s", type=float, metavar="S", help=f"processor seconds of a patch (default {public.PATCH_CPU_S})")


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the network and the bucket")
    add = group.add_argument
    add("--latency-ms", type=float, metavar="X", default=30.0, help="to the first byte, median (default 30)")
    add("--latency-p99-ms", type=float, metavar="X", default=150.0, help="its 99th percentile (default 150)")
    add("--stream-mb", type=float, metavar="X", help="MB/s of a connection (default: fitted to the public table)")
    add("--bucket-gbps", type=float, metavar="X", help="of the bucket (default: fitted to the public table)")
    add("--bucket-requests", type=float, metavar="X", help="requests/s that the bucket takes (default no limit)")


def _run(options: argparse.Namespace) -> int:
    from voxlane.bench import report
    from voxlane.bench.scale import plots, study, tables
    from voxlane.bench.scale.setting import from_options

    plot = not options.no_plot
    setting = None if options.check else from_options(options)
    report.check_writable(options.out, plot=plot)
    if setting is None:
        result = study.check(options.check, _say)
    else:
        result = study.planned(setting) if options.plan else study.scale(setting, _say)
    print(tables.text(result))
    for path in report.save(result, options.out, plot=plot, draw=plots.draw):
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
