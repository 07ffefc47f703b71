"""Texts of classes of the program, which can't be pickled: ranks agree on errors all the same."""

import pytest

import mpi_replica as mr
from everywhere import check_works, needs_two_ranks


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


def test_a_mistake_in_a_call_whose_name_is_of_another_class_is_told_everywhere(strategy):
    needs_two_ranks(strategy)
    options = mr.CommunicationOptions(name=odd("loss"))

    def step():
        op = "SUM" if strategy.rank == 0 else "MAX"
        return mr.get_replica_context().all_reduce(op, 1.0, options=options)

    with pytest.raises(mr.errors.CollectiveMismatchError, match="loss"):
        strategy.run(step)
    check_works(strategy)
