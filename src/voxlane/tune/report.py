"""`voxlane report` of a search: its page and TensorBoard's events, written anew from what is kept of it."""

from __future__ import annotations

from voxlane.store import StoreConfig
from voxlane.train.run import Run
from voxlane.tune import board
from voxlane.tune.page import page
from voxlane.tune.trials import Search


def report(out: str, config: StoreConfig | None = None) -> str | None:
    """Write OUT/report.html and OUT/tensorboard, also while the search is running, and return the page's URI; None: no
    search is here."""
    place = Run(out, config)
    if not place.store.exists(place.key("tune.json")):
        return None
    search = Search.from_json(bytes(place.store.get(place.key("tune.json"))), origin=place.file_uri("tune.json"))
    board.write(search, place)
    place.write("report.html", page(search).encode())
    return place.file_uri("report.html")
