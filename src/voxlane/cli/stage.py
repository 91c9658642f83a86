"""`voxlane stage`: a prepared dataset on this machine's own disk."""

from __future__ import annotations

import argparse

from voxlane.cli.store_options import add_store_options, human

Commands = argparse._SubParsersAction


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "stage",
        help="copy a prepared dataset to this machine's own disk",
        description="Copy the prepared dataset DATA below FOLDER, in parallel and with checksums; what is there "
        "is checked and kept. Training with loader.staged=FOLDER then reads from there, the rest from DATA.",
        epilog="examples:\n  voxlane stage gs://work/kits19 /scratch/voxlane\n"
        "  voxlane train gs://work/kits19 --run gs://work/runs/a loader.staged=/scratch/voxlane\n"
        "  voxlane stage gs://work/kits19 /scratch/voxlane --remove",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", metavar="DATA", help="URI or folder of the prepared dataset")
    parser.add_argument("folder", metavar="FOLDER", help="folder on this machine's own disk")
    parser.add_argument("--if-room", action="store_true", help="too little room is said, and no error")
    parser.add_argument("--remove", action="store_true", help="remove the copy instead")
    add_store_options(parser, "a YAML, JSON or TOML file whose `store` part holds StoreConfig fields for the bucket")
    parser.set_defaults(run=_stage)


def _stage(options: argparse.Namespace) -> int:
    import socket

    from voxlane.cli.segmentation import _said
    from voxlane.errors import CacheError
    from voxlane.volume.prepared import Prepared
    from voxlane.volume.staged import remove, stage

    prepared = Prepared.load(options.data, _said(options, [])[1])
    host = socket.gethostname().split(".")[0]
    if options.remove:
        there = remove(prepared, options.folder)
        print(f"{host}: {'removed' if there else 'nothing of it was in'} {options.folder}")
        return 0
    done = stage(prepared, options.folder)
    if done.lacking_bytes:
        what = f"{human(done.lacking_bytes)} too little room for the dataset's {human(done.total_bytes)}"
        if not options.if_room:
            raise CacheError(what, uri=options.folder, fix="Make room, or train without staging")
        print(f"{host}: {options.folder}: {what}; it will be read from {prepared.uri}")
        return 0
    speed = f" in {done.seconds:.0f} s ({human(int(done.copied_bytes / max(done.seconds, 1e-3)))}/s)"
    print(
        f"{host}: {done.objects} objects, {human(done.total_bytes)} in {options.folder}; "
        + (f"copied {done.copied}, {human(done.copied_bytes)}{speed}" if done.copied else "all were there")
    )
    return 0
