"""Ranks that read together: who reads what, and how it comes to the others."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from voxlane.errors import CheckpointError, MismatchError, VoxlaneError

_T = TypeVar("_T")
_GATHER_S = 120.0
"""How long ranks wait for one another before they say who is missing."""
_gloo_groups: dict[Any, Any] = {}


class Ranks:
    """The ranks of a process group, as far as reading together needs them. All its methods are collective."""

    def __init__(self, group: Any = None) -> None:
        self.group = _with_cpu(group)
        self.rank = dist.get_rank(self.group)
        """This process's place in the group."""
        self.size = dist.get_world_size(self.group)

    @classmethod
    def of(cls, group: Any = None) -> Ranks | None:
        """The ranks at work, or None when this process is alone."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
            return None
        return cls(group)

    def gather(self, what: str) -> None:
        """Wait for all ranks; CheckpointError naming those that did not come."""
        try:
            dist.monitored_barrier(self.group, timeout=timedelta(seconds=_GATHER_S), wait_all_ranks=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"{what} is read by all ranks together, and some did not come: {str(error).splitlines()[0]}",
                fix="Load on every rank, or pass read_once=False to let each rank read by itself",
            ) from None

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        """Send `tensor` (contiguous, on the CPU) from the rank `owner` of the group to all others."""
        dist.broadcast(tensor, group=self.group, group_src=owner)

    def once(self, read: Callable[[], _T]) -> _T:
        """Call `read` on the first rank and give its result, or its error, to all."""
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = read()
            except Exception as error:  # noqa: BLE001 - the other ranks wait: they must get the error, whatever it is
                box[1] = error
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        if box[1] is not None:
            raise box[1]
        result: _T = box[0]
        return result

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank if any brings an error: its own where there is one, else another's."""
        errors: list[Any] = [None] * self.size
        dist.all_gather_object(errors, error if isinstance(error, VoxlaneError) else error and repr(error), self.group)
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                if isinstance(other, VoxlaneError):
                    raise other
                raise CheckpointError(f"rank {rank} failed: {other}")


def sub_group(ranks: Ranks, members: Sequence[int]) -> Any:
    """A group of some of the ranks (their places in `ranks`), this one among them; its members call this together."""
    if len(members) == ranks.size:
        return ranks.group
    world = [dist.get_global_rank(ranks.group, member) for member in members]
    key = (ranks.group, tuple(world))
    if key not in _gloo_groups:
        _gloo_groups[key] = dist.new_group(world, backend="gloo", use_local_synchronization=True)
    return _gloo_groups[key]


def _with_cpu(group: Any) -> Any:
    """The group itself if it is a gloo group, else one of the same ranks, made once."""
    given: Any = group if group is not None else dist.group.WORLD
    if dist.get_backend(given) == "gloo":
        return given
    if given not in _gloo_groups:
        members = dist.get_process_group_ranks(given)
        _gloo_groups[given] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return _gloo_groups[given]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remarks on using distributed checkpoints in one process, which is a fine thing to do."""
    with warnings.catch_warnings():
        silence()
        yield


def silence() -> None:
    """As `quiet`, from now on: for saves on other threads, which share their filters with all."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@contextlib.contextmanager
def unwrapped(uri: str) -> Iterator[None]:
    """torch wraps what the ranks raise into one exception with all their tracebacks; give back the first of ours, or
    say in one line that checkpoint and model do not fit."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as wrapped:
        errors = {rank: failure[0] for rank, failure in sorted(wrapped.failures.items())}
        for error in errors.values():
            if isinstance(error, VoxlaneError):
                raise error from None
        rank, error = next(iter(errors.items()))
        if isinstance(error, RuntimeError | ValueError | KeyError) and _is_mismatch(str(error)):
            raise MismatchError(
                f"the checkpoint does not fit the model (rank {rank}): {str(error).strip()}",
                uri=uri,
                fix="Load it into the model it was saved from, or leave those names out of the state dict",
            ) from None
        raise
    except RuntimeError as error:
        if "Connection closed by peer" in str(error) or "Connection reset by peer" in str(error):
            raise CheckpointError(
                "another rank is gone", uri=uri, fix="Nothing was published; see its log, then start the job again"
            ) from None
        raise


def _is_mismatch(text: str) -> bool:
    return any(mark in text for mark in ("Missing key in checkpoint", "Size mismatch", "mismatch sizes"))
