"""Run all benchmarks one after another, then draw the figures and write the page.

`python benchmarks/run.py [--quick]` takes more than an hour on two cores, or about ten minutes with --quick, which
writes to results/quick so that it never overwrites published figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from performance_results import RESULTS, SCRIPTS


def main() -> None:
    """Run each script in its own process, so that memory it leaves behind cannot slow the next one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use few objects and rounds")
    quick: bool = parser.parse_args().quick
    folder = RESULTS / "quick" if quick else RESULTS
    failed = []
    for name, script in SCRIPTS.items():
        started = time.monotonic()
        command = [sys.executable, str(Path(__file__).with_name(script)), "--out", str(folder / f"{name}.json")]
        # After a failure the others still run; each result file records its own failures.
        if subprocess.run([*command, *(["--quick"] if quick else [])]).returncode:
            failed.append(name)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    page = [] if not quick else ["--out", str(folder / "performance.md")]
    for script, arguments in (("plot.py", []), ("performance.py", page)):
        path = str(Path(__file__).with_name(script))
        subprocess.run([sys.executable, path, "--results", str(folder), *arguments], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
