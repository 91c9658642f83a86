"""`voxlane checkpoint`: the life of checkpoints in a bucket."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from voxlane.cli.store_options import add_store_options, store_config
from voxlane.sizes import written

if TYPE_CHECKING:
    from voxlane.checkpoint.lifecycle import Found

_EPILOG = """\
A checkpoint is one file (step-100.ckpt, with its checksums in step-100.ckpt.sums) or a folder that a distributed
save wrote. A folder is complete when its .metadata is there and every file which that names.

examples:
  voxlane checkpoint ls gs://bucket/run1                      what is there, and what is wrong with it
  voxlane checkpoint latest gs://bucket/run1                  the URI of the newest that is whole, for scripts
  voxlane checkpoint verify gs://bucket/run1                  read every byte, compare with the checksums
  voxlane checkpoint rm gs://bucket/run1/step-100.ckpt        delete one
  voxlane checkpoint rm gs://bucket/run1 --keep-last 3 --keep-every 1000
  voxlane checkpoint gc gs://bucket/run1                      remove what killed saves left behind
  voxlane checkpoint cp gs://bucket/run1/step-100 s3://other/model
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "checkpoint",
        help="list, verify, copy, remove and clean up checkpoints",
        description="The life of checkpoints in a bucket.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda _: _show(parser))
    actions = parser.add_subparsers(title="actions", metavar="ACTION")

    ls = _action(actions, "ls", _ls, "list checkpoints, oldest first, and what was to become one")
    ls.add_argument("--complete", action="store_true", help="only those that can be loaded")

    _action(actions, "latest", _latest, "print the URI of the newest complete checkpoint; status 1 if there is none")

    verify = _action(actions, "verify", _verify, "read every byte and compare with the checksums; status 1 on damage")
    verify.add_argument("--no-progress", action="store_true", help="no progress bar")

    rm = _action(actions, "rm", _rm, "delete a checkpoint, or all but those to keep")
    rm.add_argument("--keep-last", metavar="K", type=int, help="below the URI, keep the newest K and delete the others")
    rm.add_argument("--keep-every", metavar="N", type=int, help="with --keep-last: also keep steps that N divides")
    rm.add_argument("--dry-run", action="store_true", help="only say what would be deleted")

    gc = _action(actions, "gc", _gc, "remove what killed saves left: unfinished uploads, files of no checkpoint")
    gc.add_argument(
        "--older-than",
        metavar="MINUTES",
        type=float,
        default=1440.0,
        help="age from which they are removed (default 1440, a day); younger ones may belong to a save at work",
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")

    cp = _action(actions, "cp", _cp, "copy a checkpoint to another URI, checking every byte", uri="SOURCE")
    cp.add_argument("target", metavar="TARGET", help="where to; must not exist")
    cp.add_argument("--no-progress", action="store_true", help="no progress bar")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    uri: str = "URI",
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("uri", metavar=uri, help="a checkpoint, or a folder or prefix of them")
    add_store_options(parser)
    parser.set_defaults(run=run)
    return parser


def _found(options: argparse.Namespace) -> list[Found]:
    from voxlane.checkpoint.lifecycle import list_checkpoints
    from voxlane.errors import NotFoundError

    found = list_checkpoints(options.uri, store_config(options))
    if not found:
        raise NotFoundError("no checkpoints here", uri=options.uri, fix="Check the URI (voxlane ls lists all objects)")
    return found


def _ls(options: argparse.Namespace) -> int:
    from voxlane.errors import IncompleteError

    rows = [c for c in _found(options) if c.complete or not options.complete]
    if not rows:
        raise IncompleteError(
            "no complete checkpoint here", uri=options.uri, fix="Leave out --complete to see the rest"
        )
    for c in rows:
        kind = "folder" if c.is_folder else "file"
        state = f"INCOMPLETE: {c.problem}" if c.problem else "complete" if c.complete else "no checksums: perhaps whole"
        print(f"{c.created:%Y-%m-%d %H:%M:%S}  {written(c.size):>10}  {kind:<6}  {c.uri}  {state}")
    return 0


def _latest(options: argparse.Namespace) -> int:
    from voxlane.checkpoint.lifecycle import latest

    print(latest(options.uri, store_config(options)).uri)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from voxlane.checkpoint.lifecycle import verify

    found = _found(options)
    unpublished = [c for c in found if not c.published]
    found = [c for c in found if c.published]
    bad = 0
    with _bar(options, "verifying", sum(c.size for c in found)) as progress:
        for c in found:
            verdict = verify(c, progress)
            bad += bool(verdict.problems)
            state = "DAMAGED" if verdict.problems else "ok"
            note = f"  (no checksums: {len(verdict.unchecked)} files only read)" if verdict.unchecked else ""
            print(f"{state:<8} {written(c.size):>10}  {c.uri}{note}")
            for problem in verdict.problems:
                print(f"         {problem}")
    for c in unpublished:
        print(f"never published, not looked at: {c.uri}")
    print(f"{len(found) - bad} of {len(found)} checkpoints are sound")
    return 1 if bad or not found else 0


def _rm(options: argparse.Namespace) -> int:
    from voxlane.checkpoint.lifecycle import Retention, find, remove
    from voxlane.errors import ConfigError, NotFoundError

    if options.keep_last is None:
        if options.keep_every is not None:
            raise ConfigError("--keep-every alone", fix="Say with --keep-last how many of the newest to keep")
        try:
            doomed = [find(options.uri, store_config(options))]
        except NotFoundError:
            others = _found(options)
            raise ConfigError(
                f"not a checkpoint, but {len(others)} are below it",
                uri=options.uri,
                fix="Name one of them, or say with --keep-last how many to keep",
            ) from None
    else:
        doomed = Retention(keep_last=options.keep_last, keep_every=options.keep_every).surplus(_found(options))
    for c in doomed:
        if not options.dry_run:
            remove(c)
        print(f"{'would delete' if options.dry_run else 'deleted'}  {written(c.size):>10}  {c.uri}")
    if not doomed:
        print("nothing to delete")
    return 0


_TEN_YEARS_MINUTES = 10 * 365 * 24 * 60


def _gc(options: argparse.Namespace) -> int:
    from voxlane.checkpoint.lifecycle import find_orphans
    from voxlane.errors import ConfigError

    if not 0 <= options.older_than <= _TEN_YEARS_MINUTES:
        raise ConfigError(f"--older-than {options.older_than}", fix="Give minutes, zero or more")
    orphans = find_orphans(options.uri, store_config(options), older_than_s=options.older_than * 60)
    word = "found" if options.dry_run else "removed"
    for upload in orphans.uploads:
        print(f"unfinished upload of {upload.started:%Y-%m-%d %H:%M:%S}  {orphans.store.uri(upload.key)}")
    for o in orphans.objects:
        print(f"no checkpoint's file  {written(o.size):>10}  {orphans.store.uri(o.key)}")
    if not options.dry_run:
        orphans.remove()
    print(f"{len(orphans.uploads)} unfinished uploads and {len(orphans.objects)} orphaned files {word}")
    if orphans.younger:
        print(f"{orphans.younger} younger ones kept: a save may be at work on them (--older-than 0 takes all)")
    return 0


def _cp(options: argparse.Namespace) -> int:
    from voxlane.checkpoint.lifecycle import copy, find

    config = store_config(options)
    source = find(options.uri, config)
    with _bar(options, "copying", source.size) as progress:
        copied = copy(source, options.target, config, progress)
    print(f"{written(copied.size)}  {copied.uri}")
    return 0


@contextlib.contextmanager
def _bar(options: argparse.Namespace, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr when that is a terminal; yields what to call with bytes done."""
    from tqdm import tqdm

    hidden = options.no_progress or not sys.stderr.isatty()
    with tqdm(desc=what, total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=hidden, leave=False) as bar:
        yield bar.update


def _show(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0
