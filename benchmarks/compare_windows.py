"""Measure sliding-window inference on a CT of 400 x 512 x 512 voxels in the machine's memory, on one GPU.

    python benchmarks/compare_windows.py [--out results/windows.json]

The network is MLPerf's U-Net3D in bfloat16, with windows of 128 cubed that overlap by one half and Gaussian weights,
with and without the eight mirrorings. Our kernels are compared with PyTorch's operations on the same windows. Time runs
from the call until the logits are in the machine's memory in half precision. Only torch and Triton are needed.
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
from voxlane.model.networks import UNet3D
from voxlane.model.sliding_window import predict_windows

LAST = torch.channels_last_3d


def main() -> None:
    """Measure both networks and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="400,512,512", help="voxels (z,y,x)")
    parser.add_argument("--patch", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="number of windows per batch")
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
    for turn in range(arguments.rounds + 1):  # the first round tunes and compiles kernels
        for name, mirrored in cases:
            if mirrored and turn != 1:  # the mirrored case is slow and measured once
                continue
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            result = predict_windows(
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
                logits[name] = result
            print(f"{name}, {'mirrored' if mirrored else 'once'}: {took:.2f} s", flush=True)
    our_logits, plain_logits = logits["ours"][:, : shape[0] // 2].float(), logits["plain"][:, : shape[0] // 2].float()
    relative_difference = ((our_logits - plain_logits).norm() / plain_logits.norm()).item()
    document = {
        "benchmark": "windows.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": arguments.commit,
        "hardware": report.describe_hardware(),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__},
        "setting": {"shape": shape, "patch": arguments.patch, "batch": arguments.batch, "overlap": 0.5},
        "summary": [{**row, "median_s": statistics.median(row["seconds"])} for row in rows.values()],
        "relative_difference": relative_difference,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"relative difference of the logits: {relative_difference:.1e}; wrote {arguments.out}")


if __name__ == "__main__":
    main()
