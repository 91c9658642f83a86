"""`voxlane bench step`: its flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from voxlane.bench.step_setting import CPU_PATCH, GPU_PATCH, WAYS

if TYPE_CHECKING:
    from voxlane.store import StoreConfig

_DESCRIPTION = """\
One training step (forward, loss, backward, optimizer) done in several ways, in one process, in turns; reports
milliseconds, patches/s, memory, start-up, and where a step's time goes on the GPU. No data and no bucket is needed,
and no package but torch (and Triton).

variants, of MLPerf's U-Net3D (Dice and cross-entropy, SGD):
{mlperf}
variants, of nnU-Net's topology (deep supervision, its loss, SGD with Nesterov momentum, gradients clipped):
{nnunet}

A round gives every variant --steps steps, in another order each time. Warm-up, compilation and capture come first and
are told as start-up. Variants of a kind start from the same weights and see the same patches.
"""

_EPILOG = """\
examples:
  voxlane bench step                                          all that this machine can do
  voxlane bench step --variant reference --variant ours --rounds 10
  voxlane bench step --variant ours --patch 96,160,160 --batch 4 --channels 4
  voxlane bench step --device cpu --patch 64,32,32 --steps 1  to see that it runs
  voxlane bench step --plot-from step-bench.json              the plot of a result from a machine without matplotlib
  python -m voxlane.bench.step                                the same without the rest of the command line
"""


def add(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
    add_store_options: Callable[[argparse.ArgumentParser], None],
    store_config: Callable[[argparse.Namespace], StoreConfig],
) -> None:
    """Add `step` to the benchmarks. It reaches no bucket, so it has no use for the two callables."""
    add_flags(
        kinds.add_parser(
            "step",
            help="one training step on this device, in several ways, and where its time goes",
            description=description(),
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )


def alone() -> argparse.ArgumentParser:
    """The parser of `python -m voxlane.bench.step`."""
    parser = argparse.ArgumentParser(
        prog="python -m voxlane.bench.step",
        description=description(),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    return parser


def description() -> str:
    """What the variants are."""
    kinds = {kind: [f"  {name:<15}{way.about}" for name, way in WAYS.items() if way.kind == kind] for kind in _KINDS}
    return _DESCRIPTION.format(**{kind: "\n".join(lines) for kind, lines in kinds.items()})


_KINDS = ("mlperf", "nnunet")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All of them."""
    gpu, cpu = (",".join(map(str, patch)) for patch in (GPU_PATCH, CPU_PATCH))
    add_flag = parser.add_argument
    add_flag("--variant", action="append", metavar="NAME", help="repeatable (default: all that the device can do)")
    add_flag("--device", metavar="D", default="", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add_flag("--patch", metavar="Z,Y,X", help=f"voxels, multiples of 32 (default {gpu}; on a CPU {cpu})")
    add_flag("--batch", type=int, metavar="N", default=2, help="patches a step (default 2)")
    add_flag("--channels", type=int, metavar="N", default=1, help="of a patch (default 1)")
    add_flag("--outputs", type=int, metavar="N", default=3, help="classes, background included (default 3)")
    add_flag("--rounds", type=int, metavar="N", default=5, help="(default 5)")
    add_flag("--steps", type=int, metavar="N", default=10, help="measured, of a variant in a round (default 10)")
    add_flag("--warmup", type=int, metavar="N", default=10, help="steps of a variant before the first (default 10)")
    add_flag("--seed", type=int, metavar="N", default=0, help="of weights and patches (default 0)")
    add_flag("--commit", metavar="HASH", help="of the source, for the result file, where it is no checkout of git")
    add_flag(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("step-bench.json"),
        help="result file; the plot lies beside it as .png (default step-bench.json)",
    )
    add_flag("--no-profile", action="store_true", help="do not profile")
    add_flag("--no-plot", action="store_true", help="no plot; without matplotlib there is none either")
    add_flag("--plot-from", metavar="FILE", type=Path, help="measure nothing: draw the plot of this result file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, or draw; returns the exit status, which is 1 where a variant failed."""
    from voxlane.bench import report, step_report
    from voxlane.bench.step_setting import from_options

    if options.plot_from is not None:
        report.check_plot(plot=True)
        _say(f"wrote {step_report.draw_again(options.plot_from)}")
        return 0
    setting = from_options(options)
    plot = not options.no_plot and find_spec("matplotlib") is not None
    report.check_writable(options.out, plot=plot)

    from voxlane.bench.step import measure  # imports torch, after the user's mistakes are told

    outcome = measure(setting, _say)
    result = step_report.document(setting, outcome, commit=options.commit)
    print(step_report.text(result))
    for path in report.save(result, options.out, plot=plot, draw=step_report.draw):
        _say(f"wrote {path}")
    if not (plot or options.no_plot):
        _say(f"no plot, as matplotlib is not here; draw it where it is: voxlane bench step --plot-from {options.out}")
    return 1 if outcome.failed else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
