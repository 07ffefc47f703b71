"""What errors tell the program to do, by the call that raises them."""

import ml_dtypes
import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, needs_two_replicas, raises_everywhere

STRUCTURE, CALL = mr.errors.StructureMismatchError, mr.errors.CollectiveMismatchError
NAMES = "Where two lines mean one call"


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


@pytest.mark.parametrize(
    "call",
    [
        lambda options: mr.get_replica_context().all_reduce(
            "SUM" if replica_id() else "MEAN", 1.0, options
        ),
        lambda options: mr.get_replica_context().all_gather(
            np.ones((2, 2)), axis=1 if replica_id() else 0, options=options
        ),
        lambda options: mr.get_replica_context().all_reduce(
            "SUM", 1.0, mr.CommunicationOptions(name="x", bytes_per_pack=8 * replica_id())
        ),
    ],
    ids=["op", "axis", "options"],
)
def test_names_are_no_advice_where_more_than_the_line_differs(strategy, call):
    needs_two_replicas(strategy)
    options = mr.CommunicationOptions(name="x")
    error = raises_everywhere(CALL, lambda: strategy.run(call, args=(options,)))
    assert NAMES not in str(error)
    check_works(strategy)


def test_names_are_no_advice_where_a_call_takes_none(strategy):
    needs_two_replicas(strategy)

    def step():
        if replica_id() == 0:
            return mr.get_replica_context().merge_call(lambda _: 1)
        return mr.get_replica_context().merge_call(lambda _: 1)

    error = raises_everywhere(CALL, lambda: strategy.run(step))
    assert NAMES not in str(error)
    check_works(strategy)


def test_unlike_shapes_are_told_what_takes_them_by_the_call(strategy):
    needs_two_replicas(strategy)

    def all_gather():
        mr.get_replica_context().all_gather(np.ones((1, 2 + replica_id())), axis=0)

    def all_reduce():
        mr.get_replica_context().all_reduce("SUM", np.ones(2 + replica_id()))

    error = raises_everywhere(STRUCTURE, lambda: strategy.run(all_gather))
    assert str(error).endswith("on every replica: only the length along the axis may differ.")
    error = raises_everywhere(STRUCTURE, lambda: strategy.run(all_reduce))
    assert str(error).endswith("on every replica, or use all_gather for uneven ones.")
    uneven = strategy.run(lambda: np.ones((2 + replica_id(), 2 + replica_id())))
    advice = {
        None: "on every replica, or use strategy.gather or axis=0 for uneven ones.",
        0: "on every replica.",
    }
    for axis, end in advice.items():
        error = raises_everywhere(
            STRUCTURE, lambda axis=axis: strategy.reduce("SUM", uneven, axis=axis)
        )
        assert str(error).endswith(end)
    check_works(strategy)


def test_an_empty_array_beside_integers_is_told_to_be_of_floats(strategy):
    needs_two_replicas(strategy)

    def step():
        mine = np.arange(replica_id()) if replica_id() else np.array([])
        mr.get_replica_context().all_gather(mine, axis=0)

    error = raises_everywhere(STRUCTURE, lambda: strategy.run(step))
    assert str(error).endswith("on every replica, also an empty one: np.array([]) is float64.")
    check_works(strategy)


def test_variables_of_unlike_shapes_are_not_told_to_gather(strategy):
    if strategy.size == 1:
        pytest.skip("needs two ranks")
    with strategy.scope():
        error = raises_everywhere(STRUCTURE, lambda: mr.Variable(np.zeros(2 + strategy.rank)))
    assert str(error).endswith("Make the leaf the same shape on every replica.")
    check_works(strategy)


def test_texts_are_gathered_by_what_there_is_where_they_were_reduced(strategy):
    texts = strategy.run(lambda: f"replica {replica_id()}")
    error = raises_everywhere(TypeError, lambda: strategy.reduce("SUM", texts, axis=None))
    assert "Use strategy.gather for strings and dates, and strategy.gather_objects" in str(error)
    rows = strategy.run(lambda: np.array(["a", "b"]))
    error = raises_everywhere(TypeError, lambda: strategy.reduce("SUM", rows, axis=0))
    assert "Above the replicas use strategy.gather or strategy.gather_objects" in str(error)
    error = raises_everywhere(
        TypeError,
        lambda: strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", str(replica_id()))),
    )
    assert "Use all_gather for strings and dates, and merge_call" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("dtype", [ml_dtypes.complex32, ml_dtypes.bcomplex32], ids=str)
def test_narrow_complex_numbers_are_converted_where_they_were_reduced(strategy, dtype):
    """To numpy they are numbers or not, by the version of ml_dtypes."""
    values = strategy.run(lambda: np.array([replica_id(), 1j], dtype))
    for call in (
        lambda: strategy.reduce("SUM", values, axis=None),
        lambda: strategy.run(
            lambda value: mr.get_replica_context().all_reduce("SUM", value), args=(values,)
        ),
    ):
        error = raises_everywhere(TypeError, call)
        assert "is not supported. Convert the leaf first, .astype('complex64') say." in str(error)
    check_works(strategy)


def test_a_step_that_returned_nothing_is_told_so(strategy):
    nothing = strategy.run(lambda: None)
    for call in (
        lambda: strategy.reduce("SUM", nothing, axis=None),
        lambda: strategy.reduce("PROD", {"loss": nothing}, axis=None),
        lambda: strategy.reduce("MEAN", nothing, axis=None),
        lambda: strategy.reduce("MAX", nothing, axis=0),
        lambda: strategy.gather(nothing, axis=0),
    ):
        error = raises_everywhere(ValueError, call)
        assert "the function returned nothing" in str(error)
        assert "Pass what strategy.run returned" not in str(error)
    check_works(strategy)
