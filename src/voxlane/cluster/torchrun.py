"""torchrun for voxlane's commands: python -m voxlane.cluster.torchrun TORCHRUN_ARGUMENTS...

It differs from torchrun at the end. Ranks that were asked to stop have printed what happened, and ranks that failed
have printed why: torchrun would add tracebacks of its own, and end with status 1 in both cases. Its temporary folder is
removed, by the next start if it was killed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from voxlane.cluster.commands import STOPPED
from voxlane.temporary import remove_abandoned, temporary_folder


def main(arguments: Sequence[str]) -> int:
    """Run torchrun and return the exit status: 128+n if signal n stopped it or its ranks."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    for name in ("elastic", "launcher", "run"):
        logging.getLogger(f"torch.distributed.{name}").setLevel(logging.CRITICAL)
    remove_abandoned()
    with temporary_folder("torchrun") as logs:
        try:
            run(parse_args(["--log-dir", logs, *arguments]))  # type: ignore[no-untyped-call]
        except SignalException as stop:
            return 128 + stop.sigval
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            statuses = {128 - f.exitcode if f.exitcode < 0 else f.exitcode for f in error.failures.values()}
            if statuses == {STOPPED}:
                return STOPPED
            ended = f"was killed by signal {-failure.exitcode}" if failure.exitcode < 0 else "failed"
            print(f"voxlane: rank {rank} {ended}; its output is above", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
