"""Reading of whole scans for prediction: all channels on one grid, checked, and if wanted in a process with limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from voxlane.errors import ScanError
from voxlane.store import StoreConfig
from voxlane.volume.case_checks import compare_grids, count_not_finite, stack_channels
from voxlane.volume.formats import Remark
from voxlane.volume.memory import available_bytes
from voxlane.volume.scan import Scan, Spacing, read_scan
from voxlane.volume.scan_checks import check_geometry, check_intensities
from voxlane.volume.worker_process import WorkerCrashError, WorkerMemoryError, WorkerProcess, WorkerTimeoutError


def read_channels(files: Sequence[str], config: StoreConfig | None = None, spacing: Spacing | None = None) -> Scan:
    """Read the files of one scan as one image. They must share a grid, all voxels must be finite, and no check of the
    scan may find an error; the scan's remarks are warnings. `spacing` is that of files that store none."""
    scans = [read_scan(file, config, spacing=spacing) for file in files]
    remarks: list[Remark] = []
    for file, scan in zip(files, scans, strict=True):
        remarks += _check(file, [*scan.remarks, *check_geometry(scan.geometry)])
        if len(files) > 1 and len(scan.image) > 1:
            raise ScanError(
                f"a 4D file of {len(scan.image)} volumes, but each file must be one channel",
                uri=file,
                fix="Give it alone, or its volumes as 3D files",
            )
        difference, is_too_large = compare_grids(scans[0].geometry, scan.geometry)
        if is_too_large:
            raise ScanError(
                f"not on the grid of {files[0]}: {difference}", uri=file, fix="Resample the channels onto one grid"
            )
        if difference is not None:
            remarks.append(Remark("geometry", f"{file}: nearly on the grid of {files[0]}: {difference}"))
        if invalid := sum(count_not_finite(channel) for channel in scan.image):
            raise ScanError(
                f"{invalid:,} of {scan.image.size:,} voxels are NaN or infinite", uri=file, fix="Set them to a number"
            )
    stacked = stack_channels(scans)
    remarks += _check(files[0], check_intensities(stacked.image, ())[0])
    return replace(stacked, remarks=tuple(remarks))


def _check(file: str, remarks: Sequence[Remark]) -> list[Remark]:
    """Raise ScanError for a fatal remark; return the others with the name of the file."""
    for remark in remarks:
        if remark.fatal:
            raise ScanError(remark.detail, uri=file, fix="Correct the file, or copy it again from its source")
    return [replace(remark, detail=f"{file}: {remark.detail}") for remark in remarks]


class ScanReader:
    """Reads scans in another process, which is ended if a scan takes too long or too much memory."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process = WorkerProcess(memory_bytes=available_bytes())

    def __enter__(self) -> ScanReader:
        self._process.start()  # in the background
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def read(self, files: Sequence[str], config: StoreConfig | None = None, spacing: Spacing | None = None) -> Scan:
        """Do as `read_channels`; also raise ScanError for a scan that exceeds the limits or ends the process."""
        try:
            scan: Scan = self._process.call(read_channels, files, config, spacing, timeout_s=self._timeout_s)
        except WorkerTimeoutError as error:
            text = f"reading was ended: {error}"
            raise ScanError(text, uri=files[0], fix="scan_timeout_s sets how long it may take") from None
        except (WorkerCrashError, WorkerMemoryError) as error:
            text = f"reading was ended: {error}"
            raise ScanError(text, uri=files[0], fix="Check the shape in its header, and copy it again") from None
        return scan
