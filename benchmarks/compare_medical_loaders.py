"""Compare our loader of training patches with other loaders, on the same volumes and the same server.

`python benchmarks/compare_medical_loaders.py [--quick] [--ct SCAN.nii.gz] [--label LABEL.nii.gz]` writes
results/peers.json. Batches hold two patches of 128 cubed with their labels, from volumes of 152 MB (float32) and labels
of 38 MB, the sizes that the public segmentation demo reads. The data come from a bucket with 20 ms added to every
request (our emulator, which speaks S3 and GCS) and from local disk. `medical_loader_contenders` documents how each
loader is used and what is counted. The first batch of every measurement is checked against the volumes. A run takes
about seven minutes on two cores and less than 16 GB of memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import isolated_runs
import medical_loader_data
import servers
from medical_loader_contenders import CONTENDERS, Job, load_patches, monai_persistent
from voxlane.bench.report import summarize
from voxlane.testing import Faults

BUCKET = "peers"
LATENCY_S = 0.02
BATCH, WORKERS = 2, 2
LIMIT_S = 180.0
COUNTED = {"nnU-Net blosc2": "nnU-Net blosc2, counted"}
"""Contenders that map their files, which no counter sees, by the contender that reads the same bytes by calls."""
COUNTED_PATCHES = 32
FULL_CACHE = "litdata, full cache"
PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of the data and of the measurements."""

    patch: int = 128
    """Voxels of a patch along each axis."""
    volume_side: int
    """Voxels of a volume along each axis."""
    volumes: int
    patches: int
    """Patches per measurement of a contender that reads parts of a volume."""
    whole_patches: int
    """Patches per measurement of a contender that reads whole volumes."""
    litdata_items: int
    """Volumes in litdata's format; they repeat, so that it fetches as many as the others do."""
    rounds: int


FULL = Setting(volume_side=336, volumes=6, patches=240, whole_patches=32, litdata_items=12, rounds=3)
QUICK = Setting(volume_side=160, volumes=3, patches=24, whole_patches=8, litdata_items=8, rounds=1)
ONCE = {"litdata, empty cache", "litdata, zstd, empty cache", FULL_CACHE}
"""Contenders that yield each volume once per epoch; they run one epoch."""
WHOLE = {"voxlane whole objects", "dataflux", "s3torchconnector", "litdata, windows", "MONAI PersistentDataset"}
FORMS = {
    "voxlane patches": "prepared",
    "litdata, empty cache": "litdata",
    "litdata, zstd, empty cache": "litdata-zstd",
    "litdata, windows": "litdata",
    FULL_CACHE: "litdata",
    "voxlane patches from disk": "prepared",
    "nnU-Net blosc2": "nnunet",
    "nnU-Net blosc2, counted": "nnunet",
    "MONAI PersistentDataset": "persistent",
}
"""Format that each contender reads; contenders not listed read `raw`."""


def main() -> None:
    """Measure the chosen contenders and write the result file."""
    arguments = _arguments()
    setting = QUICK if arguments.quick else FULL
    setting = replace(setting, rounds=arguments.rounds or setting.rounds)
    chosen = arguments.contender or [name for name in CONTENDERS if name not in COUNTED.values()]
    facts = isolated_runs.facts(["torch", "numpy", *dict.fromkeys(p for c in CONTENDERS.values() for p in c.packages)])
    data_settings, samples = run(setting, chosen, arguments.ct, arguments.label)
    settings = {**asdict(setting), "quick": arguments.quick, **data_settings}
    document = {**facts, "settings": settings, "summary": summary(samples), "samples": samples}
    isolated_runs.save(arguments.out, document)
    # If a peer fails, the result file records its error. A failure of ours ends the benchmark with an error.
    if failed := [s for s in samples if s["contender"].startswith("voxlane") and "error" in s]:
        sys.exit(f"{len(failed)} of our own measurements failed; first: {failed[0]['error']}")


def run(
    setting: Setting, chosen: Sequence[str], ct: Path | None = None, label: Path | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make the data and measure the chosen contenders on it, in turns; return a description of the data and all
    measurements."""
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="voxlane-bench-") as folder, servers.emulator(latency_s=0) as server:
        assert server.emulator is not None
        server.emulator.create_bucket(BUCKET)
        started = perf_counter()
        data = Data(folder, server, setting, *(str(path.resolve()) if path else "" for path in (ct, label)))
        data.write({FORMS.get(name, "raw") for name in chosen})
        print(f"data: {perf_counter() - started:.0f} s", flush=True)
        places = [(n, s) for n in chosen for s in _latencies(n)]
        for turn, number in isolated_runs.interleaved([str(i) for i in range(len(places))], setting.rounds):
            contender, latency_s = places[int(number)]
            before = [s for s in samples if (s["contender"], s["latency_s"]) == (contender, latency_s)]
            if any("error" in s for s in before):
                continue  # a failed contender is not measured again
            sample = data.measured(contender, latency_s)
            samples.append({"contender": contender, "latency_s": latency_s, "round": turn, **sample})
            _print_sample(samples[-1])
        data_settings = {
            "batch": BATCH,
            "workers": WORKERS,
            "volume": "a real CT, repeated" if ct else "synthetic",
            "label": "a real label, repeated" if label else "synthetic",
            "form_bytes_per_volume": data.sizes(),
            "form_write_s": {name: round(s, 1) for name, s in data.write_s.items()},
            "server": "voxlane.testing.Emulator",
        }
    return data_settings, samples


def _latencies(contender: str) -> tuple[float, ...]:
    if CONTENDERS[contender].place == "disk":
        return (0.0,)
    return (0.0, LATENCY_S) if contender == "voxlane patches" else (LATENCY_S,)


class Data:
    """The volumes in all formats, and measurements on them."""

    def __init__(self, folder: str, server: servers.Server, setting: Setting, ct: str, label: str) -> None:
        self._folder = folder
        self._server = server
        self._setting = setting
        self._ct = ct
        self._label = label
        self._missing: dict[str, str] = {}
        """Error message of each format that could not be written."""
        self.write_s: dict[str, float] = {}
        """Seconds that two processes took to write each format."""

    # -- making ----------------------------------------------------------------------------------------------------

    def write(self, forms: set[str]) -> None:
        """Write all volumes in the formats `forms`. If writing a format fails, its contenders report that error."""
        numbers = range(self._setting.volumes)
        context = multiprocessing.get_context("spawn")  # forking a process with threads is unsafe
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            shape = (self._setting.volume_side, self._ct, self._label)
            for future in [pool.submit(medical_loader_data.make_source, self._folder, i, *shape) for i in numbers]:
                future.result()
            writers: dict[str, Callable[[ProcessPoolExecutor], None]] = {
                "raw": self._write_raw,
                "prepared": self._write_prepared,
                "nnunet": self._write_nnunet,
                "persistent": self._write_persistent,
                "litdata": lambda pool: self._write_litdata(pool, "litdata", None),
                "litdata-zstd": lambda pool: self._write_litdata(pool, "litdata-zstd", "zstd"),
            }
            for form, writer in writers.items():
                if form not in forms | {"raw"}:
                    continue
                started = perf_counter()
                try:
                    writer(pool)
                except Exception as error:  # noqa: BLE001 - process boundary: the error becomes the result
                    last = str(error).strip(" .\n").splitlines()[-1]
                    self._missing[form] = isolated_runs.anonymous(f"{form} not written: {type(error).__name__}: {last}")
                    print(self._missing[form], flush=True)
                self.write_s[form] = perf_counter() - started

    def _each(self, pool: ProcessPoolExecutor, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        futures = [pool.submit(work, self._folder, i, *arguments) for i in range(self._setting.volumes)]
        return [future.result() for future in futures]

    def _write_raw(self, pool: ProcessPoolExecutor) -> None:
        self._each(pool, medical_loader_data.write_raw)
        self._upload("raw")

    def _write_prepared(self, pool: ProcessPoolExecutor) -> None:
        for root, endpoint in ((f"file://{self._folder}/prepared", ""), (f"s3://{BUCKET}/prepared", self._server.url)):
            volumes = self._each(pool, medical_loader_data.write_prepared, root, endpoint, self._setting.patch)
            medical_loader_data.publish_prepared(root, endpoint, self._setting.patch, volumes)

    def _write_nnunet(self, pool: ProcessPoolExecutor) -> None:
        self._each(pool, medical_loader_data.write_nnunet, self._setting.patch)

    def _write_persistent(self, pool: ProcessPoolExecutor) -> None:
        job = self._job("MONAI PersistentDataset", 1)
        futures = [pool.submit(_persist, asdict(job), i) for i in range(self._setting.volumes)]
        for future in futures:
            future.result()

    def _write_litdata(self, pool: ProcessPoolExecutor, form: str, compression: str | None) -> None:
        numbers = [i % self._setting.volumes for i in range(self._setting.litdata_items)]
        pool.submit(medical_loader_data.write_litdata, self._folder, numbers, form, compression).result()
        self._upload(form)

    def _upload(self, form: str) -> None:
        assert self._server.emulator is not None
        for path in sorted(Path(self._folder, form).rglob("*")):
            if path.is_file():
                self._server.emulator.put(BUCKET, str(path.relative_to(self._folder)), path.read_bytes())

    def sizes(self) -> dict[str, int]:
        """Return the bytes of a volume in each format, label included."""
        bytes_by_form = {}
        for form in self.write_s:
            files = [p for p in Path(self._folder, form).rglob("*") if p.is_file()]
            items = self._setting.litdata_items if form.startswith("litdata") else self._setting.volumes
            bytes_by_form[form] = sum(p.stat().st_size for p in files) // items
        return bytes_by_form

    # -- measuring -------------------------------------------------------------------------------------------------

    def measured(self, contender: str, latency_s: float) -> dict[str, Any]:
        """Measure once, with the bytes and requests per sample that the server and the disk saw."""
        form = FORMS.get(contender, "raw")
        if form in self._missing:
            return {"error": self._missing[form]}
        if contender == FULL_CACHE and not Path(self._full_cache()).exists():
            filled = self._run(contender, 0.0, self._setting.litdata_items)
            if "error" in filled:
                return {"error": f"filling its cache: {filled['error']}"}
        setting = self._setting
        patches = setting.whole_patches if contender in WHOLE else setting.patches
        if contender in ONCE:
            patches = setting.litdata_items
        sample = self._run(contender, latency_s, patches)
        if "error" in sample:
            return sample
        if CONTENDERS[contender].place == "disk":
            sample["disk_bytes_per_sample"] = sample["read_calls_bytes"] / sample["samples"]
        if contender in COUNTED:
            counted = self._run(COUNTED[contender], 0.0, min(patches, COUNTED_PATCHES))
            if "error" in counted:
                return counted
            sample["disk_bytes_per_sample"] = counted["read_calls_bytes"] / counted["samples"]
        return sample

    def _run(self, contender: str, latency_s: float, patches: int) -> dict[str, Any]:
        emulator = self._server.emulator
        assert emulator is not None
        emulator.set_faults(Faults(latency_s=latency_s))
        emulator.reset_counters()
        with self._proof() as proof:
            job = self._job(contender, patches, proof)
            sample = isolated_runs.measure(load_patches, asdict(job), self._server, limit_s=LIMIT_S, shared_once=True)
            counted = emulator.counters()
            if "error" not in sample:
                try:
                    sample["checked"] = self._check(proof)
                    sample["bucket_bytes_per_sample"] = counted.bytes_out / sample["samples"]
                    sample["requests_per_sample"] = counted.requests / sample["samples"]
                except ValueError as error:
                    sample = {"error": str(error)}
        if job.cache != self._full_cache():
            shutil.rmtree(job.cache, ignore_errors=True)
        return sample

    def _check(self, proof: str) -> int:
        """Return the number of patches in the first batch; ValueError if one of them is not in the volumes."""
        sources = [medical_loader_data.open_verified(self._folder, i) for i in range(self._setting.volumes)]
        with np.load(proof) as arrays:
            images, labels = (arrays[k].reshape(-1, *[self._setting.patch] * 3) for k in ("image", "label"))
        for image, label in zip(images, labels, strict=True):
            medical_loader_data.locate(sources, image, label)
        return len(images)

    def _job(self, contender: str, patches: int, proof: str = "") -> Job:
        cache = self._full_cache() if contender == FULL_CACHE else str(Path(self._folder, "cache"))
        return Job(
            contender=contender,
            folder=self._folder,
            endpoint=self._server.url,
            bucket=BUCKET,
            volumes=self._setting.volumes,
            volume_side=self._setting.volume_side,
            patches=patches,
            side=self._setting.patch,
            batch=BATCH,
            workers=WORKERS,
            cache=cache,
            proof=proof,
        )

    def _full_cache(self) -> str:
        return str(Path(self._folder, "full-cache"))

    @contextmanager
    def _proof(self) -> Iterator[str]:
        path = Path(self._folder, "proof.npz")
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)


def _persist(job: dict[str, Any], number: int) -> None:
    """Write MONAI's cache file of one volume."""
    monai_persistent(Job(**job))[number]


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each contender."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault((sample["contender"], sample["latency_s"]), []).append(sample)
    rows = []
    for (contender, latency_s), group in groups.items():
        row: dict[str, Any] = {"contender": contender, "place": CONTENDERS[contender].place, "latency_s": latency_s}
        if errors := [s["error"] for s in group if "error" in s]:
            rows.append({**row, "error": errors[0]})
            continue
        row["samples"] = group[0]["samples"]
        for key in _SPREADS:
            if key in group[0]:
                row[key] = summarize([s[key] for s in group])
        rows.append(row)
    return rows


_SPREADS = ("samples_per_s", "first_batch_s", "import_s", "total_s", "client_cpu_s_per_sample", "peak_memory_bytes")
_SPREADS += ("bucket_bytes_per_sample", "requests_per_sample", "disk_bytes_per_sample", "server_cpu_s")


def _print_sample(sample: dict[str, Any]) -> None:
    result_text = sample.get("error")
    if result_text is None:
        result_text = (
            f"{sample['samples_per_s']:.1f} patches/s, first batch {sample['first_batch_s']:.2f} s, "
            f"bucket {sample['bucket_bytes_per_sample'] / 1e6:.2f} MB in {sample['requests_per_sample']:.1f} requests, "
            f"disk {sample.get('disk_bytes_per_sample', 0) / 1e6:.2f} MB, "
            f"cpu {sample['client_cpu_s_per_sample'] * 1000:.0f} ms, peak {sample['peak_memory_bytes'] >> 20} MiB"
        )
    print(f"{sample['contender']}, {sample['latency_s'] * 1000:.0f} ms: {result_text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="use small volumes, few patches and one round: about a minute"
    )
    parser.add_argument("--rounds", type=int, help="number of measurements of each contender")
    choices = [name for name in CONTENDERS if name not in COUNTED.values()]
    parser.add_argument(
        "--contender", action="append", choices=choices, help="measure only this contender (repeatable)"
    )
    parser.add_argument("--ct", type=Path, help="CT scan (NIfTI) to build the volumes from")
    parser.add_argument("--label", type=Path, help="label (NIfTI, slices first) to build the labels from")
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "peers.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
