"""`voxlane tensorboard`: TensorBoard of a run in a bucket."""

from __future__ import annotations

import contextlib
from typing import Annotated

import pydantic

from voxlane.cli.config_options import StoreOptions
from voxlane.cli.signals import interrupted_by, open_in_browser, print_note
from voxlane.settings import Flag, PathOrUri, record


@record
class TensorBoardOptions:
    """Options of `voxlane tensorboard`."""

    uri: Annotated[PathOrUri, Flag(positional=True, metavar="RUN")]
    """URI or folder of a run, of a search with all its trials, or of many runs."""
    port: Annotated[int, pydantic.Field(ge=0, le=65535)] = 6006
    """First port to try; 0 picks a free one."""
    every: Annotated[float, pydantic.Field(ge=1, le=3600), Flag(metavar="SECONDS")] = 10.0
    """Seconds between reads of the bucket."""
    no_open: bool = False
    """Do not open a browser."""
    wait: bool = False
    """Wait for a run that does not exist yet."""


def show_tensorboard(options: TensorBoardOptions, store: StoreOptions) -> int:
    """Show a run in TensorBoard.

    Show the run's curves, and its validation cases as rows of ground truth, scan and prediction. The event files are
    copied from the bucket to a temporary folder as they grow. TensorBoard listens only on this machine's loopback
    address; Ctrl-C ends it.

    Examples:
      voxlane tensorboard gs://work/runs/a
      voxlane tensorboard s3://work/search --port 7000
    """
    from voxlane.train.tensorboard import serve

    def ready(url: str) -> None:
        print(f"TensorBoard of {options.uri}: {url}", flush=True)
        if not options.no_open:
            open_in_browser(url)

    with interrupted_by("SIGTERM"), contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the normal end
        serve(
            options.uri,
            store.store_config(),
            port=options.port,
            every_s=options.every,
            print_line=print_note,
            ready=ready,
            wait=options.wait,
        )
    return 0
