"""Patches made ready on a stream of their own, beside the step of the batch before.

Python is a step ahead of the GPU: when it takes a batch, the GPU still works on the one before. What is launched for
the new batch on another stream therefore runs beside that step, though nothing is taken from the loader early: a
checkpoint's place in the epoch is the batch that is trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from voxlane.train.timing import Waits, event, waited_for

STEPS_AHEAD = 2
"""Steps that are launched and not done, at most. One runs, one follows it; more would only hold more patches."""


class Prefetch:
    """One stream for copying and augmenting, and the account of what steps waited for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._ends: deque[Any] = deque(maxlen=STEPS_AHEAD)
        """Of the last steps."""
        self._pending: deque[tuple[Any, Any, Any, float]] = deque()
        """Step before ended, work began, work ended, and how long the loader was waited for: not yet counted."""
        self._total = Waits()

    def __call__(self, work: Callable[[], dict[str, Any]], loader_s: float) -> dict[str, Any]:
        """What `work` makes, launched on the stream; the current stream waits for it, and this thread does not.

        loader_s: how long the loader was waited for, for this batch.
        """
        if len(self._ends) == STEPS_AHEAD:
            self._ends[0].synchronize()
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            began = event()
            made = work()
            ended = event()
        compute.wait_event(ended)
        for value in made.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(compute)  # or its memory would be given out again before the step has read it
        self._pending.append((self._ends[-1] if self._ends else began, began, ended, loader_s))
        return made

    def stepped(self) -> None:
        """The step of the last batch is launched."""
        self._ends.append(event(blocking=True))
        self.waits()

    def waits(self, *, wait: bool = False) -> Waits:
        """What steps waited for so far; of those that are done, unless all are to be waited for."""
        if wait:
            torch.cuda.synchronize(self._device)
        while self._pending and all(point.query() for point in self._pending[0][:3]):
            before, began, ended, loader_s = self._pending.popleft()
            late_s, work_s = before.elapsed_time(ended) / 1000, began.elapsed_time(ended) / 1000
            self._total += waited_for(late_s, work_s, loader_s)
        return self._total
