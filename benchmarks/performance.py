"""docs/performance.md: every figure we claim beside the peer's, made from the result files alone.

`python benchmarks/performance.py` writes it; `make bench-report` draws the figures and writes results/README.md first.
Nothing is measured here. A result file that is not there leaves a section that says so.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from performance_claims import claims_table, defeats, defeats_table
from performance_results import RESULTS, ROOT, Results, sentence
from performance_scale import scale
from performance_sections import SECTIONS

PAGE = ROOT / "docs" / "performance.md"
_AFTER = 3
"""Sections before the simulator's."""
HEAD = """# Performance

This page shows every figure that voxlane claims beside that of a peer, with the command and the result file behind it.
`make bench-report` writes it from the files in [benchmarks/results](../benchmarks/results); do not edit it. How to read
it:

- A figure is a median, followed by the measured minimum and maximum in brackets. A ratio is the ratio of two medians,
  followed by the smallest and largest ratio that the two ranges allow. If that range includes 1, the difference is
  **not significant**, whatever the medians are. "No spread" means that all measurements were equal, or that there
  was only one.
- The machines were {machines}.
  Client, server and all workers share the processors of a machine. The server is our emulator, or SeaweedFS behind
  envoy, with added latency where stated. Compare a figure only with those beside it: on real clusters and clouds all of
  them will differ. (Training on an H200 ran on another machine; see [accuracy](#accuracy).)
- Peers are used as their documentation recommends, with the settings named in each benchmark. Contenders take turns,
  and each measurement runs in a fresh process. A contender that failed is shown as failed.

"""
LIMITS = """## What was never measured

- **No real cloud.** No figure is from GCS, S3 or Azure. Added latency is constant, connections use the loopback
  interface, and nothing is throttled unless a section says so. No figure includes the effects of a real bucket: jitter,
  slow shards, 503s, cold starts, TLS.
- **No cluster.** Nodes are processes on one machine. Figures for 32 to 10,000 nodes are simulated, and marked as such.
- **Only one GPU, an H200**, for training steps, windows and Hippocampus. Training on several GPUs was not measured;
  scaling was measured with simulated steps. In the table of the training step, compiled kernels were already cached, so
  the start-up time is that of a second start.
- **No large real dataset.** Volumes are one real CT repeated with noise, synthetic volumes, or Hippocampus, which is
  small.
- **No cold start of a machine**: Python's and the libraries' files were in the page cache.
- **One machine, few rounds.** Most figures come from two to five rounds on a machine that was not always idle; "load
  before" in a section is the load average when its benchmark started.

These figures elsewhere in the documentation have no result file: 147 patches/s from 8 processes on 16 cores, the
times and memory of `prepare` and `predict`, the rows of 50 epochs and of nnU-Net in [training.md](training.md),
the efficiency with steps of 0.2 s in [benchmarks/README.md](../benchmarks/README.md), and the abandoned experiments in
[log.md](log.md).
"""


def page(results: Results) -> str:
    """Return the page."""
    lost = defeats(results)
    clear = sum(defeat.ratio["max"] < 1 for defeat in lost)
    slower = (
        "## Where we are slower\n\nThis table lists every measurement in which a peer's median was better than ours: "
        f"{len(lost)}. In {clear} of them the ranges do not overlap. A ratio below 1 means that the peer was faster or "
        f"used less.\n\n{defeats_table(results)}"
    )
    sections = [section(results) for section in SECTIONS]
    sections.insert(_AFTER, scale(results))
    head = HEAD.format(machines=sentence(results.machines()))
    return head + "\n".join(["## Summary\n\n" + claims_table(results), slower, *sections, LIMITS])


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()
    arguments.out.write_text(page(Results.load(arguments.results)))
    print(f"wrote {arguments.out.name}")


if __name__ == "__main__":
    main()
