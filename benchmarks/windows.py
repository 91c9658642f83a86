"""Sliding windows over a CT of 400 x 512 x 512 voxels that lies in the machine's memory, on one GPU.

    python benchmarks/windows.py [--out results/windows.json]

MLPerf's U-Net3D in bfloat16, windows of 128 cubed with an overlap of one half, Gaussian weights; with and without the
eight mirrorings; our kernels, and PyTorch's own operations with the same windows. Seconds are from the call to the
logits in the machine's memory, half precision. Needs torch and Triton alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from voxlane.bench import report
from voxlane.model.mlperf import UNet3D
from voxlane.model.windows import predict_windows

LAST = torch.channels_last_3d


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="400,512,512", help="voxels (z,y,x)")
    parser.add_argument("--patch", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="windows at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "windows.json")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = tuple(int(n) for n in arguments.shape.split(","))
    image = torch.randn((1, *shape), generator=torch.Generator().manual_seed(0))
    networks = {}
    for name, fused in (("ours", True), ("plain", False)):
        torch.manual_seed(0)
        networks[name] = UNet3D(1, 3, fused=fused).eval().to(device).to(memory_format=LAST)  # type: ignore[call-overload]
    cases = [("ours", False), ("plain", False), ("ours", True)]
    rows: dict[tuple[str, bool], dict[str, Any]] = {}
    logits: dict[str, torch.Tensor] = {}
    for turn in range(arguments.rounds + 1):  # the first chooses and compiles kernels
        for name, mirrored in cases:
            if mirrored and turn != 1:  # once is enough for the long one
                continue
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            found = predict_windows(
                networks[name],
                image,
                (arguments.patch,) * 3,
                batch=arguments.batch,
                mirror_axes=(0, 1, 2) if mirrored else (),
                result_dtype=torch.float16,
                autocast=torch.bfloat16,
            )
            took = time.perf_counter() - began
            row = rows.setdefault((name, mirrored), {"network": name, "mirrored": mirrored, "seconds": []})
            if turn or mirrored:
                row["seconds"].append(took)
            if device.type == "cuda":
                row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
            if not mirrored:
                logits[name] = found
            print(f"{name}, {'mirrored' if mirrored else 'once'}: {took:.2f} s", flush=True)
    one, two = logits["ours"][:, : shape[0] // 2].float(), logits["plain"][:, : shape[0] // 2].float()
    apart = ((one - two).norm() / two.norm()).item()
    document = {
        "benchmark": "windows.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": arguments.commit,
        "hardware": report.hardware(),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__},
        "setting": {"shape": shape, "patch": arguments.patch, "batch": arguments.batch, "overlap": 0.5},
        "summary": [{**row, "median_s": statistics.median(row["seconds"])} for row in rows.values()],
        "relative_difference": apart,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"logits of both apart by {apart:.1e}; wrote {arguments.out}")


if __name__ == "__main__":
    main()
