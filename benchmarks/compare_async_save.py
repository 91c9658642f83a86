"""Measure how long a background save of 8 GB holds up training on one GPU, beside torch's own ways to save.

    python benchmarks/compare_async_save.py [--out results/async_save.json]

The model is 40 linear layers of 4096 x 4096 with AdamW: 8.05 GB of weights and optimizer state. Contenders take turns
and save into a folder in memory, so that no disk limits them. Each step is timed until its work on the GPU is done. A
save holds up training by the time its call takes and by what the following steps take longer than the median step
before it. Every saved checkpoint is loaded again and compared with the state at the time of the call. Only torch and
our own dependencies are needed; without a GPU it runs with small layers, to check that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from voxlane.bench import report
from voxlane.checkpoint import AsyncSaver, load_sharded

OURS = "voxlane AsyncSaver"
LAYERS = 40
BASELINE_STEPS = 12
STEPS_AFTER = 12
"""Least number of timed steps after a save; more if the save takes longer."""
State = dict[str, Any]
Save = Callable[[State, str], tuple[Future[Any], Future[Any] | None]]
"""Starts a save; returns its result, and what the optimizer must wait for before it changes the weights."""


class Training:
    """A model whose steps are timed."""

    def __init__(self, device: torch.device, width: int, batch: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = torch.randn(batch, width, device=device)
        self._device = device

    def step(self, before_update: Future[Any] | None = None) -> float:
        """Run one step; return its seconds."""
        began = time.perf_counter()
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = self.model(self._batch).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if before_update is not None:
            before_update.result()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._device.type == "cuda":  # as reading the loss does; other streams may go on
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter() - began

    def state(self) -> State:
        """Return weights and optimizer state by name."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        state: State = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for parameter, values in self.optimizer.state.items():
            state |= {f"optimizer.{names[id(parameter)]}.{key}": value for key, value in values.items()}
        return state


def contenders(saver: AsyncSaver) -> dict[str, Save]:
    """Return the ways to save, by name."""

    def save_with_voxlane(state: State, folder: str) -> tuple[Future[Any], None]:
        return saver.save(state, folder), None

    def torch_async(state: State, folder: str) -> tuple[Future[Any], None]:
        response: Any = dcp.async_save(state, checkpoint_id=folder, no_dist=True)
        return getattr(response, "upload_completion", response), None

    options = StagingOptions(use_pinned_memory=True, use_shared_memory=False, use_async_staging=True)
    stager = DefaultStager(options if torch.cuda.is_available() else StagingOptions(False, False, False, False))

    def torch_overlapped(state: State, folder: str) -> tuple[Future[Any], Future[Any] | None]:
        response: Any = dcp.async_save(state, checkpoint_id=folder, no_dist=True, async_stager=stager)
        if isinstance(response, Future):
            return response, None
        return response.upload_completion, response.staging_completion

    def torch_blocking(state: State, folder: str) -> tuple[Future[Any], None]:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        done: Future[Any] = Future()
        done.set_result(None)
        return done, None

    return {
        OURS: save_with_voxlane,
        "torch async_save, overlapped staging": torch_overlapped,
        "torch async_save": torch_async,
        "torch save": torch_blocking,
    }


def measure(training: Training, save: Save, folder: str) -> dict[str, Any]:
    """Measure one save and the steps around it."""
    baseline = [training.step() for _ in range(BASELINE_STEPS)]
    usual_s = statistics.median(baseline)
    state = training.state()
    sums = {name: float(tensor.double().sum()) for name, tensor in state.items()}
    began = time.perf_counter()
    saved, before_update = save(state, folder)
    call_s = time.perf_counter() - began
    steps: list[float] = []
    while len(steps) < STEPS_AFTER or not saved.done():
        steps.append(training.step(before_update if not steps else None))
    saved.result()
    loaded: State = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in state.items()}
    load_sharded(loaded, folder)
    wrong = [n for n, t in loaded.items() if abs(float(t.double().sum()) - sums[n]) > 1e-6 * max(1, abs(sums[n]))]
    if wrong:
        raise AssertionError(f"{len(wrong)} tensors differ from the state at the time of the save, first {wrong[0]}")
    return {
        "step_s": usual_s,
        "step_max_s": max(baseline),
        "call_s": call_s,
        "step_times_s": steps,
        "worst_step_s": max(call_s + steps[0], *steps[1:]) - usual_s,
        "total_s": call_s + sum(s - usual_s for s in steps),
        "steps_during_save": len(steps),
    }


def describe(sample: dict[str, Any]) -> str:
    """Return one line about a measured save."""
    if "error" in sample:
        return str(sample["error"])
    figures = {name: f"{1e3 * sample[name]:.1f} ms" for name in ("call_s", "worst_step_s", "total_s", "step_s")}
    return (
        f"call {figures['call_s']}, worst step +{figures['worst_step_s']}, in all +{figures['total_s']} over "
        f"{sample['steps_during_save']} steps of {figures['step_s']}"
    )


def main() -> None:
    """Measure all contenders in turns and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contender", action="append", help="measure only this one (repeatable)")
    parser.add_argument("--commit")
    parser.add_argument("--folder", default="/dev/shm", help="folder to save into, best in memory")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "async_save.json")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = Training(device, *((4096, 8192) if device.type == "cuda" else (64, 32)))
    samples: list[dict[str, Any]] = []
    with AsyncSaver() as saver:
        ways = {k: save for k, save in contenders(saver).items() if k in (arguments.contender or [k])}
        for turn in range(arguments.rounds + 1):
            for name, save in ways.items():
                if any(s["contender"] == name and "error" in s for s in samples):
                    continue  # a failed contender is not measured again
                # The first save of each contender also allocates memory on the CPU.
                sample: dict[str, Any] = {"contender": name, "round": turn, "first": turn == 0}
                with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                    try:
                        sample |= measure(training, save, f"{folder}/checkpoint")
                    except Exception as error:  # a peer's failure is a result; ours is raised
                        if name == OURS:
                            raise
                        sample["error"] = f"{type(error).__name__}: {error}"
                samples.append(sample)
                print(f"{name}, round {turn}: {describe(sample)}", flush=True)
    state_bytes = sum(tensor.nbytes for tensor in training.state().values())
    document = {
        **report.describe_run("compare_async_save.py", ["torch"], commit=arguments.commit),
        "settings": {"layers": LAYERS, "state_bytes": state_bytes, "rounds": arguments.rounds},
        "summary": summary(samples),
        "samples": samples,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each contender, and its first save, which allocates memory."""
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(s["contender"] for s in samples):
        own = [s for s in samples if s["contender"] == name]
        if errors := [s["error"] for s in own if "error" in s]:
            rows.append({"contender": name, "error": errors[0]})
            continue
        row: dict[str, Any] = {"contender": name, "first_worst_step_s": own[0]["worst_step_s"]}
        for figure in ("step_s", "call_s", "worst_step_s", "total_s"):
            row[figure] = report.summarize([s[figure] for s in own if not s["first"]])
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
