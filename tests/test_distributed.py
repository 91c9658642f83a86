"""One rank works for all, and all ranks see its result or its error."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool
from voxlane.distributed import run_on_rank_zero
from voxlane.errors import ConfigError


def test_every_rank_gets_the_result_of_rank_zero(ranks: RankPool) -> None:
    assert ranks.run(_return_own_rank, 2) == [0, 0]


def _return_own_rank(rank: int) -> int:
    return run_on_rank_zero(lambda: rank)


def test_every_rank_raises_the_error_of_rank_zero(ranks: RankPool) -> None:
    assert ranks.run(_raise_config_error, 2) == ["gs://b/x", "gs://b/x"]
    assert ranks.run(_raise_unpicklable_error, 2) == ["_UnpicklableError", "RuntimeError"]


def _raise_config_error(rank: int) -> str:
    def fail() -> None:
        raise ConfigError("wrong", uri="gs://b/x")

    with pytest.raises(ConfigError, match="wrong") as caught:
        run_on_rank_zero(fail)
    return caught.value.uri


class _UnpicklableError(Exception):
    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


def _raise_unpicklable_error(rank: int) -> str:
    def fail() -> None:
        raise _UnpicklableError("odd")

    with pytest.raises((_UnpicklableError, RuntimeError), match="odd") as caught:
        run_on_rank_zero(fail)
    return type(caught.value).__name__


def test_without_a_process_group_it_just_calls() -> None:
    assert run_on_rank_zero(lambda: 5) == 5
