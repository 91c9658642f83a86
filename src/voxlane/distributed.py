"""Work that one rank does for all ranks of a process group."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def run_on_rank_zero(work: Callable[[], _T], group: Any = None) -> _T:
    """Call `work` on rank 0 of `group` (default: all ranks) and return its result on every rank.

    If `work` raises, every rank raises the same error. This is a collective call: all ranks of the group must make it.
    Without an initialised process group it just calls `work`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return work()
    answer: list[Any] = [None, None]
    own_error: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            answer[0] = work()
        except BaseException as error:  # noqa: BLE001 - the other ranks wait: they must get the error, whatever it is
            own_error = error
            answer[1] = _make_picklable(error)
    dist.broadcast_object_list(answer, group=group, group_src=0)
    if own_error is not None:
        raise own_error
    if answer[1] is not None:
        raise answer[1]
    result: _T = answer[0]
    return result


def gather_objects(value: _T, group: Any = None) -> list[_T]:
    """Return the `value` of every rank of `group` (default: all ranks), by rank. This is a collective call unless there
    is one rank."""
    values: list[Any] = [value]
    if dist.is_available() and dist.is_initialized():
        values = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group)
    return values


def _make_picklable(error: BaseException) -> Exception:
    """Return `error`, or a RuntimeError that describes it if other ranks could not receive or should not raise it."""
    if isinstance(error, Exception):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - any class may refuse pickling; the description must still arrive
            pass
        else:
            return error
    return RuntimeError(f"rank 0 failed: {error!r}")
