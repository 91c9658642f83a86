"""Where a benchmark's result file and plot go: a folder of this machine, or a bucket."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from voxlane import uri as uris
from voxlane.bench import report
from voxlane.bench.setting import in_job
from voxlane.errors import ConfigError
from voxlane.store import Store, StoreConfig


class Outcome:
    """`out`, a path or URI that ends in .json, checked now, and not after the measurements."""

    def __init__(self, out: str, config: StoreConfig, *, plot: bool) -> None:
        self._plot = plot
        self._store: Store | None = None
        self._path = Path(out)
        if "://" not in out:
            if not in_job():  # of its ranks one writes, and not all may have the folder
                report.check_writable(self._path, plot=plot)
            return
        parsed = uris.parse(out)
        if not parsed.key.endswith(".json"):
            raise ConfigError("the result file is JSON", uri=out, fix="Give --out URI.json; the plot lies beside it")
        report.check_plot(plot=plot)
        self._key = parsed.key
        self._store = Store(out, config)
        if not in_job():
            probe = f"{self._key}.probe"
            self._store.put(probe, b"")
            self._store.delete([probe])

    def save(self, result: dict[str, Any], draw: Callable[[dict[str, Any], Path], None]) -> list[str]:
        """Write the result file and, beside it, the plot; returns what was written."""
        if self._store is None:
            return [str(path) for path in report.save(result, self._path, plot=self._plot, draw=draw)]
        written = [self._store.uri(self._key)]
        self._store.put(self._key, json.dumps(result, indent=1).encode() + b"\n")
        if self._plot:
            with tempfile.TemporaryDirectory(prefix="voxlane-bench-") as folder:
                picture = Path(folder, "plot.png")
                draw(result, picture)
                key = self._key.removesuffix(".json") + ".png"
                self._store.put(key, picture.read_bytes())
                written.append(self._store.uri(key))
        return written
