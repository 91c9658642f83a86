"""`voxlane ls`, `cp`, `clean` and `emulator`: objects in buckets, and a local server to try things on."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Annotated, Any

import pydantic

from voxlane.cli.config_options import ProgressOptions, StoreFileOptions, StoreOptions
from voxlane.errors import ConfigError, EmptyError
from voxlane.settings import ARGUMENT, Flag, PathOrUri, record
from voxlane.sizes import format_bytes

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
TEN_YEARS_MINUTES = 10 * 365 * 24 * 60


@record
class LsCommand(StoreOptions, ProgressOptions):
    """List the objects under a URI, or save them as a manifest.

    List every object whose key starts with the URI's key (a plain string prefix), in parallel and in key order. With
    --save, write the listing as a manifest (Parquet: key, size, etag, version) that MapDataset(Manifest.load(...)) and
    every rank of a job can read instead of listing again; reading an object that changed since then fails, naming it.

    Every key is listed exactly as it is, except that control characters are printed as escapes (\\n). Folder markers
    (empty objects whose keys end in a slash, as web consoles create them) are counted and left out.

    Examples:
      voxlane ls gs://bucket/prefix
      voxlane ls s3://bucket/ --match '*.nii.gz' --total
      voxlane ls gs://bucket/kits19/ --save gs://bucket/manifests/kits19.parquet
    """

    uri: Annotated[PathOrUri, ARGUMENT]
    """Bucket with or without a prefix, or a folder."""
    match: Annotated[tuple[str, ...], Flag(metavar="GLOB")] = ()
    """List only keys that match this pattern (repeatable); * also matches /."""
    save: Annotated[PathOrUri | None, Flag(metavar="FILE")] = None
    """Write a manifest to this path or URI instead of printing."""
    total: bool = False
    """Print only the number of objects and bytes."""
    long: Annotated[bool, Flag("-l")] = False
    """Print the size and etag of each object."""
    concurrency: Annotated[int, pydantic.Field(ge=1)] = 64
    """Number of list requests in flight."""
    generations: bool = False
    """GCS: also save each object's generation, which composed download (compose='on') needs."""
    folder_markers: bool = False
    """Also list folder markers: empty objects whose keys end in a slash."""

    def _run(self) -> None:
        from voxlane.store import Store
        from voxlane.store.listing import list_objects

        config = self.store_config()
        bucket = Store(self.uri, config)
        manifest = list_objects(
            self.uri,
            match=self.match or None,
            store=bucket,
            concurrency=self.concurrency,
            progress=self.progress,
            generations=self.generations,
            folder_markers=self.folder_markers,
        )
        if count := manifest.folder_markers:
            print(f"{count:,} folder marker{'s' * (count != 1)} left out; see --folder-markers", file=sys.stderr)
        if not len(manifest):
            message = f"no object matches {' '.join(self.match)}" if self.match else "no objects under this prefix"
            raise EmptyError(message, uri=self.uri, fix="Check the prefix and the pattern")
        total = f"{len(manifest):,} objects, {format_bytes(manifest.total_bytes)}"
        if self.save:
            manifest.save(self.save, config)
            print(f"{total} -> {self.save}")
        elif self.total:
            requests = bucket.counters.read().requests
            print(f"{total} ({manifest.total_bytes:,} bytes), {requests:,} list request{'s' * (requests != 1)}")
        elif self.long:
            for entry in manifest:
                print(f"{entry.size:>15,}  {entry.etag or '-':<36} {manifest.root}{_printable(entry.key)}")
        else:
            sys.stdout.writelines(f"{manifest.root}{_printable(key)}\n" for key in manifest.keys())


def _printable(key: str) -> str:
    """Return `key` on one line, with control characters as escapes, so that none reaches the terminal."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], key)


@record
class CpCommand(StoreFileOptions, ProgressOptions):
    """Copy a prepared dataset, or any objects, between disks and buckets.

    Copy the objects below SRC, or the single object SRC, to DST, many at once. The same command continues after an
    interruption: it keeps what DST has, unless its size differs or SRC is newer. A prepared dataset is compared with
    the checksums of its index while it is copied, and its header is written last, so that nothing takes half a copy for
    a dataset; what only its preparation needed (work/) is left out. The copy trains to the same bits.

    Examples:
      voxlane cp prepared gs://work/kits19
      voxlane cp gs://work/kits19 /scratch/kits19
      voxlane cp s3://work/runs/a/report.html .
      voxlane cp gs://work/kits19 s3://other/kits19 --verify
    """

    source: Annotated[PathOrUri, Flag(positional=True, metavar="SRC")]
    """URI or folder of the dataset or other objects, or a single object."""
    target: Annotated[PathOrUri, Flag(positional=True, metavar="DST")]
    """URI or folder for the copy."""
    dst_config: Annotated[PathOrUri | None, Flag(metavar="FILE")] = None
    """Config file whose `store` part is for DST, if that needs another endpoint or other credentials than SRC."""
    verify: bool = False
    """Also read what DST already has, and copy again what has another content."""

    def _run(self) -> None:
        import time

        from tqdm import tqdm

        from voxlane.store.transfer import copy_objects
        from voxlane.volume.dataset_objects import copy_dataset, load_if_prepared

        config = self.store_config()
        target_config = config
        if self.dst_config is not None:
            target_config = dataclasses.replace(
                self, config=self.dst_config, endpoint=None, anonymous=False
            ).store_config()
        began = time.monotonic()
        is_hidden = True if self.no_progress else None
        with tqdm(unit="B", unit_scale=True, unit_divisor=1024, leave=False, delay=1e-3, disable=is_hidden) as bar:

            def show(done: int, total: int) -> None:
                if bar.total is None:  # what is there already says nothing about the speed
                    bar.total, bar.initial, bar.n = total, done, done
                bar.update(done - bar.n)

            options: Any = {"target_config": target_config, "verify": self.verify, "progress": show}
            try:
                prepared = load_if_prepared(self.source, config)
                if prepared is not None:
                    report = copy_dataset(prepared, self.target, **options)
                else:
                    report = copy_objects(self.source, self.target, config, **options)
            except KeyboardInterrupt as interrupt:
                interrupt.args = ("the same command continues",)
                raise
        seconds = time.monotonic() - began
        rate = format_bytes(int(report.copied_bytes / max(seconds, 1e-3)))
        copied = f"copied {report.copied:,}, {format_bytes(report.copied_bytes)} in {seconds:.0f} s ({rate}/s)"
        objects = f"{report.objects:,} object{'s' * (report.objects != 1)}, {format_bytes(report.total_bytes)}"
        print(f"{objects} in {self.target}; {copied if report.copied else 'all were there'}")
        if prepared is not None:
            print(f"{prepared.description.name}: {len(prepared)} cases, complete, digest {prepared.digest}")


@record
class CleanCommand(StoreOptions):
    """Remove temporary objects that killed runs left in a GCS bucket.

    Composed download joins many small objects into temporary ones. If its process is killed, they stay in the bucket,
    and this command removes them. Young ones are kept, because a run may still be reading them.
    """

    uri: Annotated[PathOrUri, Flag(positional=True, metavar="gs://BUCKET")]
    """URI of the bucket to clean."""
    older_than: Annotated[float, pydantic.Field(ge=0, le=TEN_YEARS_MINUTES), Flag(metavar="MINUTES")] = 60.0
    """Smallest age of objects to remove, in minutes."""
    dry_run: bool = False
    """Only report the objects that would be removed."""

    def _run(self) -> None:
        from voxlane.store import Store
        from voxlane.store.uploads import find_leftovers

        bucket = Store(self.uri, self.store_config())
        if bucket.scheme != "gs":
            raise ConfigError("composed download, and so its leftovers, exist on GCS only", uri=self.uri)
        if bucket.root.rstrip("/") != self.uri.rstrip("/").replace("gcs://", "gs://"):
            raise ConfigError("expected a bucket without a prefix", uri=self.uri, fix=f"Write {bucket.root}")
        leftovers, younger = find_leftovers(bucket, older_than_s=self.older_than * 60)
        if not self.dry_run:
            bucket.delete([entry.key for entry in leftovers])
        size = format_bytes(sum(entry.size for entry in leftovers))
        print(f"{len(leftovers)} leftover objects, {size}, {'found' if self.dry_run else 'removed'} in {bucket.root}")
        if younger:
            print(f"{younger} younger ones kept: a run may still be reading them (--older-than 0 removes all)")


@record
class EmulatorCommand:
    """Serve a local, in-memory GCS and S3 (needs voxlane[testing]).

    Serve the GCS (XML and JSON) and S3 APIs on one local port until interrupted, for experiments and tests. Print the
    environment variables that point clients to it.
    """

    port: int = 4443
    """Port on 127.0.0.1; 0 picks a free one."""
    bucket: tuple[str, ...] = ()
    """Bucket to create (repeatable)."""
    latency_ms: str = "0"
    """Milliseconds added to every request."""
    jitter_ms: str = "0"
    """Longest random delay added to the latency, in milliseconds."""
    bandwidth: str = "0"
    """Bytes per second for each connection, such as 100MB; 0: unlimited."""
    total_bandwidth: str = "0"
    """Bytes per second for all responses together; 0: unlimited."""
    requests_per_s: Annotated[str, Flag(metavar="N")] = "0"
    """Largest number of requests per second; further ones are refused. 0: unlimited."""

    def _run(self) -> None:
        from voxlane.testing.__main__ import main as serve

        names = ("port", "latency_ms", "jitter_ms", "bandwidth", "total_bandwidth", "requests_per_s")
        words = [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in names]
        serve([*words, *(f"--bucket={bucket}" for bucket in self.bucket)], program="voxlane emulator")
