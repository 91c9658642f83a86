"""Kill saving processes, and single ranks of four, at random moments, and report how many kills were survived.

`python benchmarks/kill_saves.py [--kills 100] [--seed 0] [--server seaweedfs] [--mode both]` takes about six minutes on
two cores. A kill is survived if every checkpoint that `ls` lists as complete loads exactly, `latest` loads, no finished
save is lost, and gc removes all leftovers and nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.kills import KillResult, open_target, run_kills
from tests.savers import PHASES

from isolated_runs import RESULTS, facts, save

_SINGLE_SHARE = 0.6


def main() -> None:
    """Run all kills, print the summary and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="number of kills in both modes together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and victims")
    parser.add_argument("--server", choices=("seaweedfs", "emulator", "folder"), default="seaweedfs")
    parser.add_argument("--mode", choices=("single", "distributed", "both"), default="both")
    parser.add_argument("--out", type=Path, default=RESULTS / "kill.json", help="result file")
    arguments = parser.parse_args()
    single = {"single": arguments.kills, "distributed": 0, "both": round(arguments.kills * _SINGLE_SHARE)}
    num_single = single[arguments.mode]
    run_facts = facts(["torch", "obstore"])
    verdicts: list[KillResult] = []
    start = time.monotonic()
    with open_target(arguments.server) as target:
        for mode, num_kills in (("single", num_single), ("distributed", arguments.kills - num_single)):
            for verdict in run_kills(target, mode, num_kills, arguments.seed) if num_kills else ():
                verdicts.append(verdict)
                _show(verdict, len(verdicts), arguments.kills, arguments.seed)
    print(summary(verdicts), flush=True)
    document = {
        **run_facts,
        "server": arguments.server,
        "seed": arguments.seed,
        "took_s": round(time.monotonic() - start, 1),
        "summary": summary(verdicts),
        "kills": [asdict(verdict) for verdict in verdicts],
    }
    save(arguments.out, document)
    if any(verdict.problems for verdict in verdicts):
        sys.exit(1)


def summary(verdicts: Sequence[KillResult]) -> str:
    """Return the result in one line."""
    survived = Counter(verdict.mode for verdict in verdicts if not verdict.problems)
    phases = Counter(verdict.phase for verdict in verdicts)
    by_mode = ", ".join(f"{mode} {survived[mode]}" for mode in dict.fromkeys(verdict.mode for verdict in verdicts))
    by_phase = ", ".join(f"{phase} {phases[phase]}" for phase in PHASES)
    return (
        f"kills: {len(verdicts)}, survived: {survived.total()} ({by_mode}); died during: {by_phase}; "
        f"orphans found by gc: {sum(v.orphans for v in verdicts)}, "
        f"left after gc: {sum(v.left for v in verdicts)}"
    )


def _show(verdict: KillResult, number: int, total: int, seed: int) -> None:
    moment = f"{verdict.phase} {verdict.name}".strip()
    line = f"{number}/{total} {verdict.mode}: killed while {moment}"
    # A terminal shows one line that changes; other outputs get a line every tenth kill.
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="" if number < total else "\n", flush=True)
    elif number % 10 == 0:
        print(line, flush=True)
    for problem in verdict.problems:
        print(f"NOT SURVIVED: seed {seed}, {verdict.mode} kill {verdict.kill} ({moment}): {problem}", flush=True)


if __name__ == "__main__":
    main()
