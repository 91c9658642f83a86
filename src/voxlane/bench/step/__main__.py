"""`python -m voxlane.bench.step`: the benchmark without the rest of the command line.

It needs torch alone (and Triton, for compiled variants and voxlane's own), so it runs on machines that have none of
this package's other requirements. `voxlane bench step --help` describes the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from voxlane.bench.report import ResultFile, check_matplotlib, load_result, print_progress
from voxlane.bench.step import report
from voxlane.bench.step.settings import StepSettings
from voxlane.errors import VoxlaneError


def run(settings: StepSettings) -> int:
    """Measure, or draw the plot of an earlier result. Return the exit status, which is 1 if a variant failed."""
    if settings.plot_from:
        check_matplotlib()
        path = Path(settings.plot_from)
        report.draw(load_result(path, report.BENCHMARK), path.with_suffix(".png"))
        print_progress(f"wrote {path.with_suffix('.png')}")
        return 0
    plot = not settings.no_plot and find_spec("matplotlib") is not None
    result_file = ResultFile(settings.out, plot=plot)

    from voxlane.bench.step.measure import measure  # imports torch only once the settings are known to be valid

    result = measure(settings)
    document = report.build_report(settings, result)
    print(report.format_report(document))
    result_file.save(document, report.draw)
    if not (plot or settings.no_plot):
        print_progress(
            "no plot, because matplotlib is not installed; draw it on another machine: "
            f"voxlane bench step --plot-from {settings.out}"
        )
    return int(any(variant.error is not None for variant in result.variants))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    options = vars(_make_parser().parse_args(arguments))
    options["variant"] = tuple(options["variant"])
    try:
        return run(StepSettings(**options))
    except VoxlaneError as error:
        print(f"voxlane: {error}", file=sys.stderr)
        return 1


def _make_parser() -> argparse.ArgumentParser:
    """Return a parser with one flag per field, typed by the field's default."""
    parser = argparse.ArgumentParser(prog="python -m voxlane.bench.step", description=(__doc__ or "").split("\n\n")[1])
    for field in dataclasses.fields(StepSettings):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, action="append", default=[])
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser


if __name__ == "__main__":
    sys.exit(main())
