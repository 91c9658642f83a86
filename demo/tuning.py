"""Run a hyperparameter search: eight trials on a bucket of scans, several at once, with early stopping.

The demo starts the local object store, fills and prepares it as demo.py does, and runs `voxlane tune` with the search
space in space.yaml. It then downloads the best config and the report of the search.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import phantom
from demo import PATCH, PREPARED, RAW, print_heading, voxlane
from tqdm import tqdm

from voxlane import Store
from voxlane.testing import Emulator

SEARCH = "gs://demo/search"


def main() -> None:
    """Run the search and print the path of its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out/search"), help="folder for the page and best config")
    parser.add_argument("--cases", type=int, default=24, help="phantoms to make (default 24)")
    parser.add_argument("overrides", metavar="field=value", nargs="*", help="fields of the space to change")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    started_at = time.monotonic()
    with Emulator() as server:
        server.create_bucket("demo")
        os.environ["STORAGE_EMULATOR_HOST"] = server.url  # as `voxlane emulator` tells its user to
        print_heading("a bucket of scans, prepared")
        print(f"$ export STORAGE_EMULATOR_HOST={server.url}")
        for _ in tqdm(phantom.write(RAW, options.cases), "making scans", options.cases, unit="case", disable=None):
            pass
        voxlane("prepare", RAW, PREPARED, f"plan.patch={PATCH}")
        print_heading("eight trials, as many at once as there are cores")
        space = Path(__file__).with_name("space.yaml")
        voxlane("tune", str(space), PREPARED, "--run", SEARCH, *options.overrides)
        store = Store(SEARCH)
        for name in ("report.html", "best.yaml", "best.json", "tune.json"):
            (options.out / name).write_bytes(bytes(store.get(f"search/{name}")))
    print(f"\nreport    {(options.out / 'report.html').resolve().as_uri()}")
    print(f"config    {options.out / 'best.yaml'}\nin all {time.monotonic() - started_at:.0f} s")


if __name__ == "__main__":
    main()
