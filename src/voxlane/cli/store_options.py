"""Options that every command on a bucket takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from voxlane.store import StoreConfig


_STORE_FILE = "a TOML file whose [store] table holds StoreConfig fields"


def add_store_options(parser: argparse.ArgumentParser, file_help: str = _STORE_FILE) -> None:
    """Add --config, --endpoint and --anonymous."""
    group = parser.add_argument_group("how to reach the bucket")
    group.add_argument("--config", metavar="FILE", help=file_help)
    group.add_argument("--endpoint", metavar="URL", help="server to use instead of the cloud's own")
    group.add_argument("--anonymous", action="store_true", help="send no credentials (public buckets)")


def store_config(options: argparse.Namespace) -> StoreConfig:
    """What those options ask for."""
    import dataclasses

    from voxlane.store import StoreConfig

    config = StoreConfig.load(options.config) if options.config else StoreConfig()
    changes = {}
    if options.endpoint:
        changes["endpoint"] = options.endpoint
    if options.anonymous:
        changes["anonymous"] = True
    return dataclasses.replace(config, **changes)
