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

Every figure that voxlane claims, beside the peer's, with the command and the result file behind it. `make
bench-report` writes this page from the files in [benchmarks/results](../benchmarks/results); do not edit it. How to
read it:

- A figure is a median, and in brackets the least and the most that were measured. A ratio is that of the medians, and
  in brackets the least and the most that both spreads allow. Where those include 1, the two are **not told apart**,
  whatever the medians say.
- Measured on {machines}.
  Client, server and all workers share a machine's processors; the server is our emulator, or
  SeaweedFS behind envoy, with latency added where it says so. So figures are comparable with those beside them, and
  with nothing else: on real machines and clouds all will differ. (Training on an H200 was on another machine;
  [accuracy](#accuracy) says which figure.)
- Peers are used as their documentation says, at the settings named in each benchmark; contenders are interleaved,
  each measurement in a fresh process. What failed is shown as failed.

"""
LIMITS = """## What was never measured

- **No real cloud.** No figure is from GCS, S3 or Azure. Added latency is constant, connections are loopback, nothing
  is throttled unless a section says so. What a real bucket adds (jitter, slow shards, 503s, cold starts, TLS) is in
  none of them.
- **No cluster.** Nodes are processes of one machine. What is said of 32 to 10,000 nodes is simulated, and says so.
- **No GPU but one H200**, for training steps, windows and Hippocampus. Nobody has trained on several GPUs with this;
  scaling is of sleeping steps. In the training step's table compiled kernels were in a cache, so that start-up there is
  a second start's.
- **No large real dataset.** Volumes are one real CT repeated with noise, synthetic ones, or Hippocampus, which is
  small.
- **No cold start of a machine**: Python's and the libraries' files were in the page cache.
- **One machine, few rounds.** Two to five rounds on a machine whose load was not always zero (each section says
  what it was).

Stated elsewhere in the documentation without a result file, so take them as remarks: 147 patches a second from 8
processes on 16 cores, the times and memory of `prepare` and `predict`,
the row of 50 epochs and nnU-Net's own in [training.md](training.md), steps of 0.2 s in
[benchmarks/README.md](../benchmarks/README.md), and what [log.md](log.md) tells of trials that were given up.
"""


def page(results: Results) -> str:
    """The whole page."""
    lost = defeats(results)
    clear = sum(defeat.ratio["max"] < 1 for defeat in lost)
    slower = (
        f"## Where we are slower\n\nEvery measurement in which a peer's median was better than ours: {len(lost)}, and "
        f"in {clear} of them the spreads do not meet.\n\n{defeats_table(results)}"
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
