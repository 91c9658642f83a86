"""All benchmarks, one after the other, then figures and tables.

`python benchmarks/run.py [--quick]`: more than an hour on two cores, or some ten minutes with --quick, which writes to
results/quick so that it never overwrites figures worth quoting.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from measure import RESULTS

NAMES = ("loading", "listing", "compose", "checkpoint", "patch_readers", "staging", "first_batch", "peers")
NAMES += ("segmentation_loading",)


def main() -> None:
    """Run each as a process of its own: what one leaves behind in memory must not slow the next."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few objects and rounds")
    quick: bool = parser.parse_args().quick
    folder = RESULTS / "quick" if quick else RESULTS
    failed = []
    for name in NAMES:
        started = time.monotonic()
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), "--out", str(folder / f"{name}.json")]
        # The others still run: a quiet machine is rare, and each result file says by itself what failed.
        if subprocess.run([*command, *(["--quick"] if quick else [])]).returncode:
            failed.append(name)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    page = [] if not quick else ["--out", str(folder / "performance.md")]
    for name, arguments in (("plot.py", []), ("performance.py", page)):
        script = str(Path(__file__).with_name(name))
        subprocess.run([sys.executable, script, "--results", str(folder), *arguments], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
