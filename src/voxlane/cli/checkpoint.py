"""`voxlane checkpoint`: list, verify, copy, remove and clean up checkpoints in a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import pydantic

from voxlane.cli.config_options import ProgressOptions, StoreOptions
from voxlane.cli.storage import TEN_YEARS_MINUTES
from voxlane.errors import ConfigError, IncompleteError, NotFoundError
from voxlane.settings import ARGUMENT, Flag, PathOrUri, record
from voxlane.sizes import format_bytes

if TYPE_CHECKING:
    from voxlane.checkpoint import lifecycle

HELP = """\
Manage checkpoints in a bucket.

A checkpoint is one file (step-100.ckpt, with its checksums in step-100.ckpt.sums) or a folder that a distributed save
wrote. A folder is complete when it holds .metadata and every file that .metadata names.

Examples:
  voxlane checkpoint ls gs://bucket/run1                      list checkpoints and their problems
  voxlane checkpoint latest gs://bucket/run1                  the URI of the newest complete one, for scripts
  voxlane checkpoint verify gs://bucket/run1                  read every byte, compare with the checksums
  voxlane checkpoint rm gs://bucket/run1/step-100.ckpt        delete one
  voxlane checkpoint rm gs://bucket/run1 --keep-last 3 --keep-every 1000
  voxlane checkpoint gc gs://bucket/run1                      remove what killed saves left behind
  voxlane checkpoint cp gs://bucket/run1/step-100 s3://other/model
"""


@record
class CheckpointOptions(StoreOptions):
    """What every command on checkpoints takes."""

    uri: Annotated[PathOrUri, ARGUMENT]
    """URI or path of a checkpoint, or of a folder of checkpoints."""

    def list_existing(self) -> list[lifecycle.StoredCheckpoint]:
        """Return the checkpoints at the URI, or raise NotFoundError if there are none."""
        from voxlane.checkpoint.lifecycle import list_checkpoints

        checkpoints = list_checkpoints(self.uri, self.store_config())
        if not checkpoints:
            raise NotFoundError("no checkpoints here", uri=self.uri, fix="Check the URI (voxlane ls lists all objects)")
        return checkpoints


@record
class CheckpointLsCommand(CheckpointOptions):
    """List checkpoints, including unfinished ones, oldest first."""

    complete: bool = False
    """List only checkpoints that can be loaded."""

    def _run(self) -> None:
        rows = [c for c in self.list_existing() if c.complete or not self.complete]
        if not rows:
            raise IncompleteError(
                "no complete checkpoint here", uri=self.uri, fix="Leave out --complete to see the rest"
            )
        for c in rows:
            kind = "folder" if c.is_folder else "file"
            state = "complete" if c.complete else "no checksums: may be incomplete"
            state = f"INCOMPLETE: {c.problem}" if c.problem else state
            print(f"{c.created:%Y-%m-%d %H:%M:%S}  {format_bytes(c.size):>10}  {kind:<6}  {c.uri}  {state}")


@record
class CheckpointLatestCommand(CheckpointOptions):
    """Print the URI of the newest complete checkpoint.

    The exit status is 1 if there is none.
    """

    def _run(self) -> None:
        from voxlane.checkpoint.lifecycle import latest

        print(latest(self.uri, self.store_config()).uri)


@record
class CheckpointVerifyCommand(CheckpointOptions, ProgressOptions):
    """Read every byte of checkpoints and compare with their checksums.

    A checkpoint is sound if all of its files have checksums and match them. Files without checksums, which other
    programs wrote, are listed: they can be read, but nothing shows whether their bytes are those that were written.
    The exit status is 1 if a checkpoint is damaged and, with --strict, if a file has no checksums.
    """

    strict: bool = False
    """Count files without checksums as failures."""

    def _run(self) -> int:
        from voxlane.checkpoint.lifecycle import verify

        checkpoints = self.list_existing()
        unpublished = [c for c in checkpoints if not c.published]
        checkpoints = [c for c in checkpoints if c.published]
        damaged = unchecked = 0
        with _progress_bar("verifying", sum(c.size for c in checkpoints), self) as bar:
            for c in checkpoints:
                verdict = verify(c, bar.update)
                damaged += bool(verdict.problems)
                unchecked += bool(verdict.unchecked and not verdict.problems)
                state = "DAMAGED" if verdict.problems else "readable" if verdict.unchecked else "sound"
                print(f"{state:<8} {format_bytes(c.size):>10}  {c.uri}")
                for problem in verdict.problems:
                    print(f"         {problem}")
                for key in verdict.unchecked:
                    print(f"         no checksums, only readable: {c.store.uri(key)}")
        for c in unpublished:
            print(f"never published, not verified: {c.uri}")
        counts = [f"{len(checkpoints) - damaged - unchecked} of {len(checkpoints)} checkpoints are sound"]
        counts += [f"without checksums, only readable: {unchecked}"] if unchecked else []
        counts += [f"damaged: {damaged}"] if damaged else []
        print("; ".join(counts))
        return 1 if damaged or not checkpoints or (self.strict and unchecked) else 0


@record
class CheckpointRmCommand(CheckpointOptions):
    """Delete a checkpoint, or all but the newest."""

    keep_last: Annotated[int | None, Flag(metavar="K")] = None
    """Keep the newest K checkpoints in the folder URI, and delete the others."""
    keep_every: int | None = None
    """Keep also the checkpoints whose step is a multiple of N (needs --keep-last)."""
    dry_run: bool = False
    """Only report the checkpoints that would be deleted."""

    def _run(self) -> None:
        from voxlane.checkpoint.lifecycle import Retention, find_checkpoint, remove_checkpoint

        if self.keep_last is None:
            if self.keep_every is not None:
                raise ConfigError("--keep-every needs --keep-last", fix="Give the number of newest checkpoints to keep")
            try:
                doomed = [find_checkpoint(self.uri, self.store_config())]
            except NotFoundError:
                others = self.list_existing()
                raise ConfigError(
                    f"not a checkpoint, but {len(others)} are below it",
                    uri=self.uri,
                    fix="Name one of them, or give the number to keep with --keep-last",
                ) from None
        else:
            retention = Retention(keep_last=self.keep_last, keep_every=self.keep_every)
            doomed = retention.surplus(self.list_existing())
        for c in doomed:
            if not self.dry_run:
                remove_checkpoint(c)
            print(f"{'would delete' if self.dry_run else 'deleted'}  {format_bytes(c.size):>10}  {c.uri}")
        if not doomed:
            print("nothing to delete")


@record
class CheckpointGcCommand(CheckpointOptions):
    """Remove unfinished uploads and stray files that killed saves left."""

    older_than: Annotated[float, pydantic.Field(ge=0, le=TEN_YEARS_MINUTES), Flag(metavar="MINUTES")] = 1440.0
    """Smallest age of files to remove, in minutes. Younger files may belong to a save that is still running."""
    dry_run: bool = False
    """Only report the files that would be removed."""

    def _run(self) -> None:
        from voxlane.checkpoint.lifecycle import find_orphans

        orphans = find_orphans(self.uri, self.store_config(), older_than_s=self.older_than * 60)
        for upload in orphans.uploads:
            print(f"unfinished upload of {upload.started:%Y-%m-%d %H:%M:%S}  {orphans.store.uri(upload.key)}")
        for stored in orphans.objects:
            print(f"orphaned file  {format_bytes(stored.size):>10}  {orphans.store.uri(stored.key)}")
        if not self.dry_run:
            orphans.remove()
        action = "found" if self.dry_run else "removed"
        print(f"{len(orphans.uploads)} unfinished uploads and {len(orphans.objects)} orphaned files {action}")
        if orphans.younger:
            print(f"{orphans.younger} younger ones kept: a save may still be writing them (--older-than 0 removes all)")


@record
class CheckpointCpCommand(StoreOptions, ProgressOptions):
    """Copy a checkpoint to another URI, checking every byte."""

    source: Annotated[PathOrUri, ARGUMENT]
    """URI or path of the checkpoint."""
    target: Annotated[PathOrUri, ARGUMENT]
    """URI or path for the copy; it must not exist yet."""

    def _run(self) -> None:
        from voxlane.checkpoint.lifecycle import copy_checkpoint, find_checkpoint

        config = self.store_config()
        source = find_checkpoint(self.source, config)
        with _progress_bar("copying", source.size, self) as bar:
            copied = copy_checkpoint(source, self.target, config, bar.update)
        print(f"{format_bytes(copied.size)}  {copied.uri}")


def _progress_bar(title: str, total_bytes: int, options: ProgressOptions) -> Any:
    """Return a progress bar on stderr, which stays empty if that is no terminal."""
    from tqdm import tqdm

    disable = options.no_progress or None  # None: unless stderr is a terminal
    return tqdm(
        desc=title, total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=disable, leave=False
    )
