"""Ranks that read together: waiting for one another, sending bytes, and failing together."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from voxlane.distributed import gather_objects, run_on_rank_zero
from voxlane.errors import CheckpointError, MismatchError, VoxlaneError

_T = TypeVar("_T")
_WAIT_S = 120.0
"""Seconds that ranks wait for one another before they report who is missing."""
_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer")
_MISMATCH = ("Missing key in checkpoint", "Size mismatch", "mismatch sizes")
"""Texts in torch's errors, which have no type or code to tell them apart."""
_gloo_groups: dict[Any, Any] = {}


class RankGroup:
    """The ranks of a process group that read together. All its methods are collective."""

    def __init__(self, group: Any = None) -> None:
        original: Any = group if group is not None else dist.group.WORLD
        is_gloo = dist.get_backend(original) == "gloo"
        self.group = original if is_gloo else _get_gloo_group(original, dist.get_process_group_ranks(original))
        self.rank = dist.get_rank(self.group)
        """Rank of this process in the group."""
        self.size = dist.get_world_size(self.group)

    @classmethod
    def current(cls, group: Any = None) -> RankGroup | None:
        """Return the ranks of `group` (default: all ranks), or None if there is only this process."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
            return None
        return cls(group)

    def wait_for_all(self, uri: str) -> None:
        """Wait for all ranks to read `uri`; raise a CheckpointError that names missing ranks."""
        try:
            dist.monitored_barrier(self.group, timeout=timedelta(seconds=_WAIT_S), wait_all_ranks=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"{uri} is read by all ranks together, but some did not join: {str(error).splitlines()[0]}",
                fix="Load on every rank, or pass read_once=False to let each rank read by itself",
            ) from None

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        """Raise on every rank if any rank passes an error: its own error if it has one, else that of another rank."""
        own = error if isinstance(error, VoxlaneError) else error and repr(error)
        failures = gather_objects(own, self.group)
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise (
                    failure if isinstance(failure, VoxlaneError) else CheckpointError(f"rank {rank} failed: {failure}")
                )


def run_once(ranks: RankGroup | None, read: Callable[[], _T]) -> _T:
    """Call `read` on the first of the ranks and return its result, or raise its error, on all of them. None: this
    process is alone."""
    return read() if ranks is None else run_on_rank_zero(read, ranks.group)


def make_sub_group(ranks: RankGroup, members: Sequence[int]) -> Any:
    """Return a process group of some of the ranks, given by their rank in `ranks`; only the members call this."""
    if len(members) == ranks.size:
        return ranks.group
    return _get_gloo_group(ranks.group, [dist.get_global_rank(ranks.group, member) for member in members])


def _get_gloo_group(parent: Any, global_ranks: Sequence[int]) -> Any:
    """Return a gloo group of some ranks of the group `parent`, created once."""
    key = (parent, tuple(global_ranks))
    if key not in _gloo_groups:
        _gloo_groups[key] = dist.new_group(list(global_ranks), backend="gloo", use_local_synchronization=True)
    return _gloo_groups[key]


@contextlib.contextmanager
def ignore_single_process_warnings() -> Iterator[None]:
    """Hide torch's warnings about distributed checkpoints in a single process, which are fine to use."""
    with warnings.catch_warnings():
        silence_single_process_warnings()
        yield


def silence_single_process_warnings() -> None:
    """Hide the warnings from now on, for saves on other threads: warning filters are shared by all threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@contextlib.contextmanager
def unwrap_rank_errors(uri: str) -> Iterator[None]:
    """Raise the first VoxlaneError of any rank in place of torch's CheckpointException, which wraps the errors and
    tracebacks of all ranks; raise MismatchError if the checkpoint does not fit the model."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as wrapped:
        errors = {rank: failure[0] for rank, failure in sorted(wrapped.failures.items())}
        for error in errors.values():
            if isinstance(error, VoxlaneError):
                raise error from None
        rank, error = next(iter(errors.items()))
        if isinstance(error, RuntimeError | ValueError | KeyError) and any(mark in str(error) for mark in _MISMATCH):
            raise MismatchError(
                f"the checkpoint does not fit the model (rank {rank}): {str(error).strip()}",
                uri=uri,
                fix="Load it into the model it was saved from, or leave those names out of the state dict",
            ) from None
        raise
    except RuntimeError as error:
        if any(mark in str(error) for mark in _LOST_CONNECTION):
            raise CheckpointError(
                "another rank is gone", uri=uri, fix="Nothing was published; see its log, then start the job again"
            ) from None
        raise
