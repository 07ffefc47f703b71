"""Texts of classes of the program, which can't be pickled: ranks agree on errors all the same."""

import pytest

import mpi_replica as mr
from everywhere import check_works


def odd(text):
    class Odd(str):
        pass

    return Odd(text)


class OddError(Exception):
    def __str__(self):
        return odd("no such row")


def test_an_error_whose_text_is_of_another_class_is_raised_everywhere(strategy):
    def step():
        if strategy.rank == strategy.size - 1:
            raise OddError
        return mr.get_replica_context().all_reduce("SUM", 1.0)

    with pytest.raises(OddError, match="no such row"):
        strategy.run(step)
    check_works(strategy)
