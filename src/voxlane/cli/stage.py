"""`voxlane stage`: what lies below a URI on this machine's own disk, or on those of SLURM nodes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from voxlane.cli.store_options import add_store_options
from voxlane.errors import ClusterError, ConfigError
from voxlane.sizes import written

if TYPE_CHECKING:
    from voxlane.staging import Progress, Report
    from voxlane.store import StoreConfig

Commands = argparse._SubParsersAction
_ALL = "all"

_STAGE = """\
Copy the objects below SOURCE to a folder on this machine's own disk, in parallel and with checksums. What is there is
kept, what changed is copied anew, and what two sources share is there once. They lie in FOLDER/datasets/NAME, under
their names.

Of a prepared dataset, what training reads is copied; training with loader.staged=FOLDER then reads from there, the rest
from SOURCE."""

_EXAMPLES = """\
examples:
  voxlane stage gs://work/kits19 /scratch/voxlane
  voxlane train gs://work/kits19 --run gs://work/runs/a loader.staged=/scratch/voxlane
  voxlane stage s3://scans/raw /scratch/voxlane --capacity 200Gi --name raw
  voxlane stage gs://work/kits19 /scratch/voxlane --nodes         on every node of this SLURM allocation
  voxlane stage gs://work/kits19 /scratch/voxlane --nodelist 'gpu[1-4]'
  voxlane stage --list /scratch/voxlane
  voxlane stage gs://work/kits19 /scratch/voxlane --remove"""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "stage",
        help="copy a dataset to this machine's own disk",
        description=_STAGE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", nargs="?", help="URI or folder whose objects are copied")
    add("folder", metavar="FOLDER", nargs="?", help="folder on this machine's own disk")
    add("--name", metavar="NAME", help="what the copy is called (default: SOURCE's last word and a hash)")
    add("--capacity", metavar="SIZE", help="a larger SOURCE is an error, such as 100Gi")
    add("--if-room", action="store_true", help="too little room is said, and no error")
    add("--verify", action="store_true", help="read what is there, and compare checksums")
    add("--remove", action="store_true", help="remove the copy instead")
    add("--list", metavar="FOLDER", dest="list_folder", help="list the copies in FOLDER instead")
    add("--no-progress", action="store_true", help="no progress bar")
    group = parser.add_argument_group("on SLURM nodes, by srun")
    group.add_argument(
        "--nodes",
        metavar="N",
        nargs="?",
        const=_ALL,
        help="on every node of the allocation this runs in, or on N nodes; write it last",
    )
    group.add_argument("--nodelist", metavar="NODES", help="on these nodes, such as 'gpu[1-4]'")
    add_store_options(parser, "a YAML, JSON or TOML file whose `store` part holds StoreConfig fields for the bucket")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.list_folder is not None:
        if options.source is not None:
            raise ConfigError("--list takes a folder, and nothing else is copied", fix="Leave out SOURCE and FOLDER")
        return _list(options.list_folder)
    if options.source is None or options.folder is None:
        raise ConfigError("two things are needed: what to copy, and where to", fix="Write: voxlane stage SOURCE FOLDER")
    _capacity(options)
    if options.nodes is not None or options.nodelist is not None:
        return _on_nodes(options)
    if options.remove:
        return _remove(options)
    return _stage(options)


def _host() -> str:
    import socket

    return socket.gethostname().split(".")[0]


def _capacity(options: argparse.Namespace) -> int | None:
    from voxlane.sizes import bytes_of

    return None if options.capacity is None else bytes_of(options.capacity, what="--capacity")


def _stage(options: argparse.Namespace) -> int:
    from voxlane.cli.segmentation import _said
    from voxlane.errors import NoRoomError

    store = _said(options, [])[1]
    try:
        with _Bar(options) as bar:
            done, where = _copy(options, store, bar)
    except NoRoomError as error:
        if not options.if_room:
            raise
        lacking = f"{written(error.lacking_bytes)} too little room"
        print(f"{_host()}: {options.folder}: {lacking}; it will be read from {options.source}")
        return 0
    moved = f"copied {done.copied}, {written(done.copied_bytes)}"
    moved += f" in {done.seconds:.0f} s ({written(int(done.copied_bytes / max(done.seconds, 1e-3)))}/s)"
    told = [moved] if done.copied else []
    told += [f"{done.shared} from other copies here"] if done.shared else []
    told += [f"removed {done.removed} that the source has no longer or otherwise"] if done.removed else []
    print(
        f"{_host()}: {done.objects} object{'s' * (done.objects != 1)}, {written(done.total_bytes)} in {where}; "
        + (", ".join(told) or "all were there")
    )
    return 0


def _copy(options: argparse.Namespace, store: StoreConfig, bar: _Bar) -> tuple[Report, str]:
    """Copy, and say where: the folder that loader.staged takes, or that of the objects."""
    from voxlane import staging
    from voxlane.volume import staged
    from voxlane.volume.prepared import Prepared

    how: dict[str, Any] = {
        "name": options.name,
        "capacity_bytes": _capacity(options),
        "verify": options.verify,
        "progress": bar.show,
    }
    if staged.is_prepared(options.source, store):
        return staged.stage(Prepared.load(options.source, store), options.folder, **how), options.folder
    done = staging.stage(options.source, options.folder, config=store, **how)
    return done, done.folder


def _remove(options: argparse.Namespace) -> int:
    from voxlane import staging
    from voxlane.staging.sources import place_of

    source = place_of(options.source)
    copies = [
        one
        for one in staging.staged(options.folder)
        if one.source == source and (options.name is None or one.name == options.name)
    ]
    freed = sum(staging.remove(options.folder, one.name) for one in copies)
    what = (
        f"removed from {options.folder}, {written(freed)} free" if copies else f"nothing of it was in {options.folder}"
    )
    print(f"{_host()}: {what}")
    return 0


def _list(folder: str) -> int:
    from voxlane.errors import CacheError
    from voxlane.staging import staged

    if not os.path.isdir(os.path.expanduser(folder)):
        raise CacheError("no such folder", uri=folder, fix="Check its spelling")
    rows = [("NAME", "OBJECTS", "SIZE", "LAST USED", "SOURCE")]
    for one in staged(folder):
        size = written(one.bytes) + ("" if one.whole else " (not whole)")
        used = one.last_used.astimezone().strftime("%Y-%m-%d %H:%M")
        rows.append((one.name, f"{one.objects:,}", size, used, one.source or "-"))
    if len(rows) == 1:
        print(f"nothing is staged in {folder}")
        return 0
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    return 0


class _Bar:
    """A progress bar on stderr, where that is a terminal."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._shown = sys.stderr.isatty() and not options.no_progress
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, now: Progress) -> None:
        """Show how far it is."""
        if not self._shown:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=now.total_bytes, unit="B", unit_scale=True, unit_divisor=1024, leave=False)
        words = {"waiting": "waiting for another process", "checking": "checking what is there"}
        self._bar.set_description_str(words.get(now.doing, "copying"), refresh=False)
        self._bar.set_postfix_str(f"{now.objects}/{now.total_objects} objects", refresh=False)
        self._bar.update(now.bytes - self._bar.n)
        self._bar.refresh()


# -- on SLURM nodes ----------------------------------------------------------------------------------------------------


def srun_words(options: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """The command that runs the same on nodes: those of the allocation that `environment` tells of, or others."""
    inside = "SLURM_JOB_ID" in environment
    count = environment.get("SLURM_JOB_NUM_NODES", "1") if options.nodes == _ALL else options.nodes
    if count is not None and not (count.isdigit() and int(count) > 0):
        raise ConfigError(f"--nodes {count}", fix="Give a number of nodes, or none, and write --nodes last")
    if options.nodes == _ALL and not inside and options.nodelist is None:
        raise ClusterError(
            "this runs in no SLURM allocation, so its nodes are unknown",
            fix="Give --nodelist or --nodes N, or run it below salloc or in a job",
        )
    words = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    words += ["--overlap"] if inside else []
    if options.nodelist is not None:
        words.append(f"--nodelist={options.nodelist}")
    if options.nodelist is None or options.nodes not in (None, _ALL):
        words.append(f"--nodes={count}")
    words += [sys.executable, "-m", "voxlane", "stage", _absolute(options.source), options.folder, "--no-progress"]
    for name in ("if_room", "verify", "remove", "anonymous"):
        words += [f"--{name.replace('_', '-')}"] * bool(getattr(options, name))
    for name in ("name", "capacity", "config", "endpoint"):
        value = getattr(options, name)
        if value is not None:
            words.append(f"--{name}={os.path.abspath(value) if name == 'config' else value}")
    return words


def _absolute(source: str) -> str:
    return source if "://" in source else os.path.abspath(os.path.expanduser(source))


def _on_nodes(options: argparse.Namespace) -> int:
    import subprocess

    words = srun_words(options, os.environ)
    sys.stdout.flush()
    try:
        status = subprocess.run(words).returncode
    except FileNotFoundError:
        raise ClusterError("srun is not here", fix="Run it where SLURM is installed, or leave out --nodes") from None
    if status:
        raise ClusterError(
            f"it failed on one node or more (srun ended with status {status})", fix="See the lines above"
        )
    return 0
