"""`voxlane`: the command line. Subcommands import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from voxlane.bench import command as bench
from voxlane.cli import app, checkpoint, operator, segmentation, slurm, stage, tensorboard, tune
from voxlane.cli.store_options import add_store_options, store_config
from voxlane.errors import StoppedError, VoxlaneError
from voxlane.sizes import written

_EPILOG = """\
URIs: gs://bucket/prefix, s3://bucket/prefix, az://container/prefix, file:///folder or a plain path.
Credentials are taken from where each cloud's own tools keep them. Endpoints of compatible servers and
emulators: --endpoint, the [store] table of a --config file, or STORAGE_EMULATOR_HOST / AWS_ENDPOINT_URL.

examples:
  voxlane prepare gs://my-bucket/kits19 gs://my-bucket/kits19-prepared
  voxlane train gs://my-bucket/kits19-prepared --run gs://my-bucket/run1
  voxlane tune space.yaml gs://my-bucket/kits19-prepared --run gs://my-bucket/search1
  voxlane evaluate gs://my-bucket/run1 && voxlane report gs://my-bucket/run1
  voxlane predict gs://my-bucket/run1 scan.nii.gz -o masks
  voxlane slurm submit --nodes 2 --gpus-per-node 4 -- train gs://my-bucket/kits19-prepared --run gs://my-bucket/run2
  voxlane app init kits19 && voxlane app deploy kits19     the same on Kubernetes; voxlane app --help
  voxlane tensorboard gs://my-bucket/run1                  its curves and pictures, in a browser
  voxlane ls gs://my-bucket/kits19/ --match '*.nii.gz'     what is there
  voxlane ls s3://my-bucket/scans/ --save scans.parquet    a manifest for training, pinned to versions
  voxlane checkpoint latest gs://my-bucket/run1            the newest checkpoint that is whole
  voxlane emulator --bucket demo                           a local GCS and S3 to try things on
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. A user's mistake is one line on stderr, never a traceback."""
    # Read when torch is loaded. Threads that spin while they wait for each other take the processor from those that
    # fetch and decode patches, and from everything else on the machine: measured, 4 times slower steps.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = parse(arguments)
    if options.run is None:
        _parser().print_help()
        return 0
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except StoppedError as error:
        print(f"voxlane: {error}", file=sys.stderr)
        from voxlane.launch import status as ended

        ended.mark(os.environ)
        return ended.STOPPED
    except VoxlaneError as error:
        print(f"voxlane: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("voxlane: interrupted", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command; a wrong one ends the process with the command's usage."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse gives up on words that come after an option; commands that take any number say where they go.
    taker: str = getattr(options, "rest", "")
    if rest and (not taker or any(word.startswith("-") for word in rest)):
        hint = " (config fields are written field=value)" if taker else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        setattr(options, taker, [*getattr(options, taker), *rest])
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="voxlane",
        description="From a bucket of 3D scans to a trained, evaluated segmentation model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=None)
    parser.add_argument("--version", action="version", version=f"voxlane {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    segmentation.add_parsers(commands)
    tune.add_parser(commands)
    _add_ls(commands)
    _add_clean(commands)
    stage.add_parser(commands)
    slurm.add_parser(commands)
    app.add_parser(commands)
    operator.add_parser(commands)
    tensorboard.add_parser(commands)
    checkpoint.add_parser(commands)
    _add_emulator(commands)
    bench.add_parser(commands, add_store_options, store_config)
    return parser


def _version() -> str:
    from voxlane import __version__

    return __version__


def _add_ls(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "ls",
        help="list the objects under a URI, or save them as a manifest",
        description="List every object whose key starts with the URI's key (a plain string prefix), in parallel and "
        "in key order. With --save, write the listing as a manifest (Parquet: key, size, etag, version) that "
        "MapDataset(Manifest.load(...)) and every rank of a job can read instead of listing again; reading an object "
        "that changed since then fails, naming it.",
        epilog="examples:\n  voxlane ls gs://bucket/prefix\n  voxlane ls s3://bucket/ --match '*.nii.gz' --total\n"
        "  voxlane ls gs://bucket/kits19/ --save gs://bucket/manifests/kits19.parquet",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("uri", metavar="URI", help="bucket and prefix, or a folder")
    parser.add_argument("--match", metavar="GLOB", action="append", help="only keys that fit (repeatable); * crosses /")
    parser.add_argument("--save", metavar="FILE", help="write a manifest to this path or URI instead of printing")
    parser.add_argument("--total", action="store_true", help="print only the number of objects and bytes")
    parser.add_argument("-l", "--long", action="store_true", help="print size and etag before each URI")
    parser.add_argument("--concurrency", metavar="N", type=int, default=64, help="list requests in flight (default 64)")
    parser.add_argument(
        "--generations", action="store_true", help="GCS: save each object's generation too, for compose='on'"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    add_store_options(parser)
    parser.set_defaults(run=_ls)


def _ls(options: argparse.Namespace) -> int:
    from voxlane.errors import ConfigError, EmptyError
    from voxlane.listing import list_objects
    from voxlane.store import Store

    if options.concurrency < 1:
        raise ConfigError(f"--concurrency {options.concurrency}", fix="Give 1 or more")
    config = store_config(options)
    store = Store(options.uri, config)
    progress = False if options.no_progress else None
    manifest = list_objects(
        options.uri,
        match=options.match,
        store=store,
        concurrency=options.concurrency,
        progress=progress,
        generations=options.generations,
    )
    if not len(manifest):
        what = f"no object fits {' '.join(options.match)}" if options.match else "no objects under this prefix"
        raise EmptyError(what, uri=options.uri, fix="Check the prefix and the pattern")
    total = f"{len(manifest):,} objects, {written(manifest.total_bytes)}"
    if options.save:
        manifest.save(options.save, config)
        print(f"{total} -> {options.save}")
        return 0
    if options.total:
        print(f"{total} ({manifest.total_bytes:,} bytes), {store.counters.read().requests:,} list requests")
        return 0
    root = manifest.root
    if options.long:
        for entry in manifest:
            print(f"{entry.size:>15,}  {entry.etag or '-':<36} {root}{entry.key}")
    else:
        sys.stdout.writelines(f"{root}{key}\n" for key in manifest.keys())
    return 0


_TEN_YEARS_MINUTES = 10 * 365 * 24 * 60


def _add_clean(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "clean",
        help="remove what killed runs left in a GCS bucket",
        description="Remove joined objects that composed download left in a GCS bucket because its process was "
        "killed. Younger ones may belong to a run that is still reading and are kept.",
    )
    parser.add_argument("uri", metavar="gs://BUCKET", help="the bucket")
    parser.add_argument(
        "--older-than", metavar="MINUTES", type=float, default=60.0, help="age from which they are removed (default 60)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    add_store_options(parser)
    parser.set_defaults(run=_clean)


def _clean(options: argparse.Namespace) -> int:
    from voxlane.errors import ConfigError
    from voxlane.store import Store
    from voxlane.store.leftovers import find_leftovers

    store = Store(options.uri, store_config(options))
    if store.scheme != "gs":
        raise ConfigError("composed download, and so its leftovers, exist on GCS only", uri=options.uri)
    if store.root.rstrip("/") != options.uri.rstrip("/").replace("gcs://", "gs://"):
        raise ConfigError("a bucket is cleaned as a whole", uri=options.uri, fix=f"Write {store.root}")
    if not 0 <= options.older_than <= _TEN_YEARS_MINUTES:
        raise ConfigError(f"--older-than {options.older_than}", fix="Give minutes, zero or more")
    leftovers, younger = find_leftovers(store, older_than_s=options.older_than * 60)
    if not options.dry_run:
        store.delete([entry.key for entry in leftovers])
    size = written(sum(entry.size for entry in leftovers))
    print(f"{len(leftovers)} leftover objects, {size}, {'found' if options.dry_run else 'removed'} in {store.root}")
    if younger:
        print(f"{younger} younger ones kept: a run may still be reading them (--older-than 0 takes all)")
    return 0


def _add_emulator(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "emulator",
        help="serve a local, in-memory GCS and S3 (needs voxlane[testing])",
        description="Serve GCS (XML and JSON) and S3 on one local port, in memory, until interrupted; for trying "
        "things and for tests. Prints the variables that point clients to it.",
    )
    parser.add_argument("--port", type=int, default=4443, help="port on 127.0.0.1; 0 picks a free one (default 4443)")
    parser.add_argument("--bucket", action="append", help="a bucket to create (repeatable)")
    parser.add_argument("--latency-ms", default="0", help="added to every request (default 0)")
    parser.add_argument("--jitter-ms", default="0", help="up to this is added to that, uniformly (default 0)")
    parser.add_argument(
        "--bandwidth", default="0", help="bytes per second of a connection, such as 100MB (default: any)"
    )
    parser.add_argument(
        "--total-bandwidth", default="0", help="bytes per second of all answers together (default: any)"
    )
    parser.add_argument("--requests-per-s", default="0", help="refuse requests beyond this rate (default: none)")
    parser.set_defaults(run=_emulator)


def _emulator(options: argparse.Namespace) -> int:
    from voxlane.testing.__main__ import main as serve

    names = ("port", "latency_ms", "jitter_ms", "bandwidth", "total_bandwidth", "requests_per_s")
    words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    serve([*words, *(f"--bucket={bucket}" for bucket in options.bucket or [])], program="voxlane emulator")
    return 0


if __name__ == "__main__":
    sys.exit(main())
