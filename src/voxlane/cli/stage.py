"""`voxlane stage`: copy objects to this machine's own disk, or to those of SLURM nodes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from voxlane.cli.config_options import StoreFileOptions, check_no_secrets
from voxlane.errors import CacheError, ClusterError, ConfigError, NoRoomError, UsageError
from voxlane.settings import ARGUMENT, Flag, PathOrUri, record
from voxlane.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from voxlane.store.staging import StagingProgress

_ALL = "all"


@record
class StageNodesOptions:
    """Options of `voxlane stage` on SLURM nodes."""

    flag_group: ClassVar[str] = "On SLURM nodes, by srun"

    nodes: Annotated[str | None, Flag(metavar="[N]", bare_value=_ALL)] = None
    """Copy on every node of the current allocation, or on N nodes. Give this flag last."""
    nodelist: Annotated[str | None, Flag(metavar="NODES")] = None
    """Copy on these nodes, such as 'gpu[1-4]'."""


@record
class StageCommand(StoreFileOptions, StageNodesOptions):
    """Copy a dataset to this machine's own disk.

    Copy the objects below SOURCE to FOLDER/datasets/NAME, in parallel and with checksums. Objects that are already
    there are not copied again unless they changed. Objects that two sources share are stored once.

    For a prepared dataset, only its index and the objects that training reads are copied. Training with
    loader.staged=FOLDER reads them from there, and everything else from SOURCE. FOLDER/datasets/NAME is also a dataset
    of its own, which commands take as DATA without SOURCE.

    Examples:
      voxlane stage gs://work/kits19 /scratch/voxlane
      voxlane train gs://work/kits19 --run gs://work/runs/a loader.staged=/scratch/voxlane
      voxlane stage s3://scans/raw /scratch/voxlane --capacity 200Gi --name raw
      voxlane stage gs://work/kits19 /scratch/voxlane --nodes         on every node of this SLURM allocation
      voxlane stage gs://work/kits19 /scratch/voxlane --nodelist 'gpu[1-4]'
      voxlane stage --list /scratch/voxlane
      voxlane stage gs://work/kits19 /scratch/voxlane --remove
    """

    source: Annotated[PathOrUri | None, ARGUMENT] = None
    """URI or folder of the objects to copy."""
    folder: Annotated[str | None, ARGUMENT] = None
    """Folder on this machine's own disk."""
    name: str | None = None
    """Name of the copy (default: the last part of SOURCE and a hash)."""
    capacity: Annotated[str | None, Flag(metavar="SIZE")] = None
    """Fail if SOURCE is larger than this, such as 100Gi."""
    if_room: bool = False
    """If the disk has too little free space, say so and exit with status 0."""
    verify: bool = False
    """Read existing copies and compare checksums."""
    remove: bool = False
    """Remove the copy of SOURCE from FOLDER instead."""
    list_folder: Annotated[str | None, Flag(long="--list", metavar="FOLDER")] = None
    """List the copies in FOLDER instead."""
    no_progress: bool = False
    """Show no progress bar."""

    @property
    def capacity_bytes(self) -> int | None:
        """Largest size that may be copied, in bytes."""
        return None if self.capacity is None else parse_bytes(self.capacity, name="--capacity")

    def _run(self) -> None:
        if self.list_folder is not None:
            if self.source is not None:
                raise ConfigError("--list takes a folder and copies nothing", fix="Leave out SOURCE and FOLDER")
            _list_copies(self.list_folder)
            return
        if self.source is None or self.folder is None:
            missing = "SOURCE" if self.source is None else "FOLDER"
            raise UsageError(f"voxlane stage: missing {missing}", fix="See: voxlane stage --help")
        _ = self.capacity_bytes  # a wrong --capacity fails before anything is done
        if self.nodes is not None or self.nodelist is not None:
            _stage_on_nodes(srun_words(self, os.environ))
        elif self.remove:
            _remove_copies(self.source, self.folder, self.name)
        else:
            self._stage_here(self.source, self.folder)

    def _stage_here(self, source: str, folder: str) -> None:
        from tqdm import tqdm

        from voxlane.store import staging
        from voxlane.volume import staged_dataset
        from voxlane.volume.prepared_dataset import Prepared

        titles = {"waiting": "waiting for another process", "checking": "checking existing copies"}

        def show(progress: StagingProgress) -> None:
            bar.total = progress.total_bytes
            bar.set_description_str(titles.get(progress.activity, progress.activity), refresh=False)
            bar.set_postfix_str(f"{progress.objects}/{progress.total_objects} objects", refresh=False)
            bar.update(progress.bytes - bar.n)
            bar.refresh()

        capacity_bytes, config = self.capacity_bytes, self.store_config()
        stage: Any = partial(staging.stage, source, config=config)
        if is_prepared := staged_dataset.is_prepared(source, config):
            stage = partial(staged_dataset.stage, Prepared.load(source, config))
        # The bar appears with the first report, on a terminal only.
        is_hidden = True if self.no_progress else None
        try:
            with tqdm(unit="B", unit_scale=True, unit_divisor=1024, leave=False, delay=1e-3, disable=is_hidden) as bar:
                report = stage(folder, name=self.name, capacity_bytes=capacity_bytes, verify=self.verify, progress=show)
        except NoRoomError as error:
            if not self.if_room:
                raise
            lacking = f"{format_bytes(error.lacking_bytes)} too little room"
            print(f"{_hostname()}: {folder}: {lacking}; it will be read from {source}")
            return
        rate = format_bytes(int(report.copied_bytes / max(report.seconds, 1e-3)))
        copied = f"copied {report.copied}, {format_bytes(report.copied_bytes)} in {report.seconds:.0f} s ({rate}/s)"
        changes = [copied] if report.copied else []
        changes += [f"{report.shared} from other copies here"] if report.shared else []
        changes += [f"removed {report.removed} that changed or are gone from the source"] if report.removed else []
        objects = f"{report.objects} object{'s' * (report.objects != 1)}, {format_bytes(report.total_bytes)}"
        location = folder if is_prepared else report.folder  # as loader.staged takes it, or where the objects are
        print(f"{_hostname()}: {objects} in {location}; {', '.join(changes) or 'all were there'}")
        if is_prepared:
            print(f"{_hostname()}: a dataset of its own: {report.folder}")


def _hostname() -> str:
    return socket.gethostname().split(".")[0]


def _remove_copies(source: str, folder: str, name: str | None) -> None:
    from voxlane.store import staging
    from voxlane.store.staging.sources import normalize_source

    origin = normalize_source(source)
    copies = [copy for copy in staging.list_copies(folder) if copy.source == origin and name in (None, copy.name)]
    freed = sum(staging.remove(folder, copy.name) for copy in copies)
    result = f"removed from {folder}, {format_bytes(freed)} free" if copies else f"nothing of it was in {folder}"
    print(f"{_hostname()}: {result}")


def _list_copies(folder: str) -> None:
    from voxlane.store.staging import list_copies

    if not os.path.isdir(os.path.expanduser(folder)):
        raise CacheError("no such folder", uri=folder, fix="Check its spelling")
    rows = [("NAME", "OBJECTS", "SIZE", "LAST USED", "SOURCE")]
    for copy in list_copies(folder):
        size = format_bytes(copy.bytes) + ("" if copy.complete else " (incomplete)")
        last_used = copy.last_used.astimezone().strftime("%Y-%m-%d %H:%M")
        rows.append((copy.name, f"{copy.objects:,}", size, last_used, copy.source or "-"))
    if len(rows) == 1:
        print(f"nothing is staged in {folder}")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# -- on SLURM nodes ----------------------------------------------------------------------------------------------------


def srun_words(command: StageCommand, environment: Mapping[str, str]) -> list[str]:
    """Return the command that runs the same on nodes: those of the allocation in `environment`, or others."""
    inside = "SLURM_JOB_ID" in environment
    count = environment.get("SLURM_JOB_NUM_NODES", "1") if command.nodes == _ALL else command.nodes
    if count is not None and not (count.isdigit() and int(count) > 0):
        raise ConfigError(f"--nodes {count}", fix="Give a number of nodes, or none, and write --nodes last")
    if command.nodes == _ALL and not inside and command.nodelist is None:
        raise ClusterError(
            "--nodes without a number needs a SLURM allocation, and this process runs in none",
            fix="Give --nodelist or --nodes N, or run it below salloc or in a job",
        )
    words = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    words += ["--overlap"] if inside else []
    if command.nodelist is not None:
        words.append(f"--nodelist={command.nodelist}")
    if command.nodelist is None or command.nodes not in (None, _ALL):
        words.append(f"--nodes={count}")
    stage_words = _stage_words(command)
    check_no_secrets(stage_words, "the command line of srun, which every user of the nodes can read,")
    return [*words, sys.executable, "-m", "voxlane", *stage_words]


def _stage_words(command: StageCommand) -> list[str]:
    """Return the command that stages on one node, with absolute paths."""
    source = command.source or ""
    source = source if "://" in source else os.path.abspath(os.path.expanduser(source))
    switches = {"--if-room": command.if_room, "--verify": command.verify, "--remove": command.remove}
    switches["--anonymous"] = command.anonymous
    config = os.path.abspath(command.config) if command.config else None
    values = {
        "--name": command.name,
        "--capacity": command.capacity,
        "--config": config,
        "--endpoint": command.endpoint,
    }
    words = ["stage", source, command.folder or "", "--no-progress", *(flag for flag, on in switches.items() if on)]
    return words + [f"{flag}={value}" for flag, value in values.items() if value is not None]


def _stage_on_nodes(words: list[str]) -> None:
    import subprocess

    from voxlane.processes import make_death_hook

    sys.stdout.flush()
    try:
        status = subprocess.run(words, preexec_fn=make_death_hook()).returncode
    except FileNotFoundError:
        raise ClusterError(
            "srun is not installed", fix="Run this where SLURM is installed, or leave out --nodes"
        ) from None
    if status:
        raise ClusterError(
            f"staging failed on one node or more (srun ended with status {status})", fix="See the lines above"
        )
