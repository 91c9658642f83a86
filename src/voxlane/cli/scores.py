"""`voxlane score` and `compare`: scores of masks from any tool, and of two runs on the same cases."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from voxlane.cli.config_options import ConfiguredOptions, FieldsFileOptions, StoreFileOptions
from voxlane.errors import ScanError
from voxlane.settings import ARGUMENT, Flag, PathOrUri, build, record
from voxlane.sizes import format_plural

if TYPE_CHECKING:
    from voxlane.train.evaluate import EvaluationResult

_MAX_SHOWN = 30
"""Largest number of problems that are printed; the summary lists all."""


@record
class ScoreCommand(FieldsFileOptions, ConfiguredOptions):
    """Score masks from any tool against labels.

    Compare each mask below PREDICTIONS with the label of the same name below LABELS, in the label's grid: Dice, HD95,
    surface Dice and volumes, as `voxlane evaluate` does, with 95% bootstrap confidence intervals. No model is needed.
    Classes are named by their values unless `labels` names them. Masks without a label, labels without a mask, and
    masks on another grid are listed, and the exit status is 1.

    Examples:
      voxlane score nnunet/predictions Task04_Hippocampus/labelsTr
      voxlane score masks labels 'labels={kidney: 1, tumour: 2}' -o scores
      voxlane score gs://work/masks gs://work/labels 'regions={WT: [1, 2, 4], TC: [1, 4], ET: [4]}' --json
    """

    config_class: ClassVar[str] = "voxlane.train.mask_scores:ScoreConfig"

    predictions: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the masks, or one mask."""
    labels: Annotated[PathOrUri, ARGUMENT]
    """URI or folder of the labels, or one label."""
    out: Annotated[PathOrUri | None, Flag("-o")] = None
    """URI or folder for summary.json, cases.json and cases.csv."""
    json: bool = False
    """Print summary and cases as JSON instead of a table."""

    def _run(self) -> None:
        from voxlane.train.evaluate import format_table, replace_nan
        from voxlane.train.mask_scores import ScoreConfig, score_masks, write_scores

        values, store_config = self.load(self.overrides)
        config = build(ScoreConfig, values)
        result, description = score_masks(self.predictions, self.labels, config, store_config, progress=self.progress)
        if self.json:
            print(json.dumps({**replace_nan(result.summary), "scores": replace_nan(result.cases)}, indent=1))
        else:
            print(format_table(result, description))
        if self.out is not None:
            print(f"scores: {write_scores(result, description, self.out, store_config)}", file=sys.stderr)
        print_problems(result, excluded=config.bad_cases == "exclude")


def print_problems(result: EvaluationResult, *, excluded: bool) -> None:
    """Print the problems of the cases, and raise ScanError if cases were not scored, unless they may be excluded."""
    problems: list[dict[str, Any]] = result.summary["problems"]
    for problem in problems[:_MAX_SHOWN]:
        prefix = "" if problem["severity"] == "error" else "warning: "
        print(f"{prefix}{problem['case']}: {problem['detail']}", file=sys.stderr)
    if len(problems) > _MAX_SHOWN:
        print(f"... and {len(problems) - _MAX_SHOWN} more", file=sys.stderr)
    bad = {problem["case"] for problem in problems if problem["severity"] == "error"}
    if bad and not excluded:
        count = f"{format_plural(len(bad), 'case')} of {len(result.cases) + len(bad)}"
        raise ScanError(
            f"{count} could not be scored; the means are of the others",
            fix="Correct them, or leave them out with bad_cases=exclude",
        )


@record
class CompareCommand(StoreFileOptions):
    """Compare the scores of two runs on the same cases.

    A and B are evaluated runs, or folders that hold a cases.json, such as those of `voxlane score -o`. Pair the cases
    that both scored, and print for each target the mean difference B minus A with its 95% bootstrap confidence interval
    and the p-value of Wilcoxon's signed-rank test. Write OUT/compare.json, with every case, and the page
    OUT/compare.html, with the pictures of the cases that differ most.

    Examples:
      voxlane compare runs/small runs/large
      voxlane compare runs/first scores/nnunet -o runs/first-vs-nnunet
      voxlane compare runs/first runs/second --evaluation external-site2
    """

    first: Annotated[PathOrUri, Flag(positional=True, metavar="A")]
    """URI or folder of a run, or of scores."""
    second: Annotated[PathOrUri, Flag(positional=True, metavar="B")]
    """URI or folder of a run, or of scores, to compare with A."""
    out: Annotated[PathOrUri, Flag("-o")] = "comparison"
    """URI or folder for compare.json and compare.html."""
    evaluation: str | None = None
    """Evaluation of both runs to compare, a folder below RUN/evaluation (default: the one that both have)."""

    def _run(self) -> None:
        from voxlane.train.comparison import compare, format_comparison
        from voxlane.train.comparison_report import write_comparison

        store_config = self.store_config()
        comparison = compare(self.first, self.second, store_config, evaluation=self.evaluation)
        print(format_comparison(comparison))
        for note in comparison.notes:
            print(f"warning: {note}", file=sys.stderr)
        print(f"page: {write_comparison(comparison, self.out, store_config)}")
