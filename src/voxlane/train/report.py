"""`voxlane report`: one HTML page about a run, beside the run's files."""

from __future__ import annotations

from voxlane.store import Store, StoreConfig
from voxlane.train import findings
from voxlane.train.page import page
from voxlane.train.run import Run, runs_at
from voxlane.uri import parse


def report(run_uri: str, config: StoreConfig | None = None) -> str:
    """Write RUN/report.html and return its URI.

    The page holds everything it shows, asks no server for anything, and says plainly what the run has not written yet.
    Where RUN holds one run a fold, each gets its page, and RUN one about their cross-validation. RunError when there is
    no run at `run_uri`.
    """
    runs = runs_at(run_uri, config)
    if [run.where for run in runs] != [Run(run_uri, config).where]:
        for run in runs:
            report(run.where, config)
    found = findings.read(run_uri, config)
    place = parse(found.uri + "/report.html")
    Store(str(place), config).put(place.key, page(found).encode())
    return str(place)
