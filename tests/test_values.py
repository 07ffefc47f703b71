"""PerReplica, Mirrored and IndexedSlices, by themselves and on one rank without MPI."""

import copy
import operator
import pickle

import numpy as np
import pandas
import pytest

import mpi_replica as mr


def test_distributed_values_is_never_made_directly():
    with pytest.raises(TypeError, match="PerReplica"):
        mr.DistributedValues()
    assert issubclass(mr.PerReplica, mr.DistributedValues)
    assert issubclass(mr.Mirrored, mr.DistributedValues)


def test_decision_2_repr_is_that_of_tf_with_global_ids():
    assert repr(mr.PerReplica([5.0, "a"])) == "PerReplica:{\n  0: 5.0,\n  1: 'a'\n}"
    local = mr.PerReplica([np.array([1, 2])], replica_ids=[3], num_replicas=4)
    assert repr(local) == "PerReplica:{\n  3: array([1, 2])\n}"


def test_decision_3_it_knows_which_ids_it_holds():
    local = mr.PerReplica([20, 30], replica_ids=(2, 3), num_replicas=5)
    assert (local.values, local.replica_ids, local.num_replicas) == ((20, 30), (2, 3), 5)
    assert not local.holds_all
    assert mr.PerReplica([1, 2]).holds_all
    assert local.component(3) == 30
    with pytest.raises(ValueError, match=r"replica 0\b"):
        local.component(0)


def test_a_per_replica_needs_a_component_for_each_id():
    with pytest.raises(ValueError, match="2 components"):
        mr.PerReplica([1, 2], replica_ids=[0])


def test_a_per_replica_has_one_component_of_a_replica():
    with pytest.raises(ValueError, match=r"\(0, 0\), of which one stands twice"):
        mr.PerReplica([1, 2], replica_ids=[0, 0])


def test_decision_3_one_of_one_replica_converts():
    value = mr.PerReplica([np.float64(2.5)])
    assert float(value) == 2.5
    assert int(value) == 2
    assert bool(value) is True
    assert f"{value:.2f}" == "2.50"
    assert f"{value}" == str(value)
    assert value.item() == 2.5
    assert type(value.item()) is float
    np.testing.assert_array_equal(np.asarray(mr.PerReplica([[1, 2]]), dtype=float), [1.0, 2.0])


@pytest.mark.parametrize(
    "convert",
    [float, int, bool, np.asarray, lambda value: value.item(), lambda value: f"{value:.2f}"],
)
@pytest.mark.parametrize(
    "value", [mr.PerReplica([1.0, 2.0]), mr.PerReplica([1.0], replica_ids=[1], num_replicas=2)]
)
def test_decision_3_others_do_not_also_with_one_local_component(value, convert):
    with pytest.raises(TypeError) as caught:
        convert(value)
    for way in ("strategy.reduce", "gather", "experimental_local_results"):
        assert way in str(caught.value)


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"]
BINARY += ["lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", BINARY)
def test_decision_3_it_has_no_arithmetic_on_either_side(name):
    function = getattr(operator, name)
    for value in (mr.PerReplica([2]), mr.PerReplica([1, 2])):
        for other in (1, np.ones(2), value):
            for sides in ((value, other), (other, value)):
                with pytest.raises(TypeError, match=r"strategy\.reduce"):
                    function(*sides)


@pytest.mark.parametrize("function", [len, iter, abs, operator.neg, operator.invert, range])
def test_decision_3_it_is_no_sequence_and_no_number(function):
    with pytest.raises(TypeError, match=r"strategy\.reduce"):
        function(mr.PerReplica([2]))


def test_a_per_replica_can_be_pickled():
    value = pickle.loads(pickle.dumps(mr.PerReplica([1, 2], (2, 3), 4)))
    assert (value.values, value.replica_ids, value.num_replicas) == ((1, 2), (2, 3), 4)


def test_a_mirrored_value_acts_like_the_value_in_it():
    array = np.array([1.0, 2.0])
    value = mr.Mirrored(array)
    np.testing.assert_array_equal(value + 1, [2, 3])
    np.testing.assert_array_equal(array - value, [0, 0])
    np.testing.assert_array_equal(np.sqrt(mr.Mirrored(np.array([4.0]))), [2])
    np.testing.assert_array_equal(np.asarray(value), array)
    assert (value.shape, len(value), value[1], list(value)) == ((2,), 2, 2.0, [1.0, 2.0])
    assert float(mr.Mirrored(2.5)) == 2.5
    assert list(range(mr.Mirrored(2))) == [0, 1]
    assert pickle.loads(pickle.dumps(mr.Mirrored(3))).value == 3


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), np.float64(2.0)])
def test_a_mirrored_value_is_not_changed_in_place(value):
    mirrored = mr.Mirrored(value.copy())
    for change in (operator.imul, operator.iadd):
        with pytest.raises(TypeError, match=r"in place.*g = g \* 2"):
            change(mirrored, 2.0)
    with pytest.raises(TypeError, match="in place"):
        np.add(value, 1.0, out=mirrored)
    with pytest.raises(TypeError, match="in place"):
        np.add.at(mirrored, ..., 1.0)
    np.testing.assert_array_equal(mirrored.value, value)
    out = np.zeros(2)
    assert np.add(mirrored, 1.0, out=out) is out
    out *= mirrored
    np.testing.assert_array_equal(out, (value + 1.0) * value)
    np.subtract.at(out, ..., mirrored)
    np.testing.assert_array_equal(out, value * value)


def test_a_mirrored_value_contains_what_the_value_does_and_is_the_same_key():
    array = np.arange(6.0).reshape(2, 3)
    for holder in (mr.Mirrored(array), mr.Variable(array)):
        assert 5.0 in holder
        assert 7.0 not in holder
    assert "bc" in mr.Mirrored("abcd")
    assert "k" in mr.Mirrored({"k": 1})
    assert {mr.Mirrored(3), 3.0} == {3}
    assert {"a": 1}[mr.Mirrored("a")] == 1
    held = mr.Mirrored(array)
    assert {held: 1}[held] == 1


def test_numpy_takes_variables_and_mirrored_values_as_where():
    mask = np.array([True, False])
    for where in (mr.Mirrored(mask), mr.Variable(mask)):
        assert np.sum([1.0, 2.0], where=where) == 1.0
        assert np.mean(mr.Variable([1.0, 2.0]), where=where) == 1.0
        out = np.add([1.0, 1.0], mr.Mirrored([2.0, 2.0]), out=np.zeros(2), where=where)
        assert out.tolist() == [3.0, 0.0]


def test_indexed_slices_add_rows_of_one_index():
    slices = mr.IndexedSlices([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1, 3, 1], dense_shape=(4, 2))
    np.testing.assert_array_equal(slices.to_dense(), [[0, 0], [6, 8], [0, 0], [3, 4]])
    empty = mr.IndexedSlices(np.ones((0, 2)), [], dense_shape=(2, 2))
    np.testing.assert_array_equal(empty.to_dense(), np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (([[1.0]], [0, 1]), ValueError),
        ((1.0, 0), ValueError),
        (([[1.0]], [[0]]), ValueError),
        (([[1.0]], [0.5]), TypeError),
        (([[1.0, 2.0]], [0], (3, 1)), ValueError),
        (([[1.0, 2.0]], [0], (3.9, 2)), TypeError),
        (([[1.0, 2.0]], [0], (-3, 2)), ValueError),
        (([1.0], [0], ()), ValueError),
        ((np.ma.masked_less([[1.0, 2.0]], 2.0), [0]), TypeError),
        (([[1.0]], np.ma.masked_less([0], 1)), TypeError),
    ],
)
def test_indexed_slices_that_do_not_fit_are_refused(given, kind):
    with pytest.raises(kind):
        mr.IndexedSlices(*given)


def test_indexed_slices_become_dense_only_with_a_shape_that_holds_them():
    with pytest.raises(ValueError, match="dense_shape"):
        mr.IndexedSlices([1.0], [0]).to_dense()
    for index in (3, -1):
        with pytest.raises(IndexError, match=str(index)):
            mr.IndexedSlices([1.0], [index], (3,)).to_dense()


# On one rank without MPI


def my_id():
    return mr.get_replica_context().replica_id_in_sync_group


def test_decision_2_one_replica_gives_per_replica_leaves_too():
    result = mr.MPIStrategy(num_replicas=1).run(lambda: {"a": 4.0, "b": (8.0, [16.0]), "c": None})
    assert repr(result["a"]) == "PerReplica:{\n  0: 4.0\n}"
    assert float(result["b"][1][0]) == 16
    assert result["c"] is None


def test_replicas_on_one_rank_reduce_and_gather_without_mpi():
    strategy = mr.MPIStrategy(num_replicas=3)

    def step():
        ctx = mr.get_replica_context()
        total = ctx.all_reduce("SUM", np.full(30_000, my_id()))
        return total[0], ctx.all_gather(np.full(my_id(), my_id()), axis=0)

    result = strategy.run(step)
    assert strategy.experimental_local_results(result[0]) == (3, 3, 3)
    for rows in strategy.experimental_local_results(result[1]):
        np.testing.assert_array_equal(rows, [1, 2, 2])
    assert strategy.reduce("MEAN", result[0], axis=None) == 3
    np.testing.assert_array_equal(strategy.gather(result[1], axis=0), [1, 2, 2] * 3)


def test_outside_of_any_strategy_collectives_are_those_of_one_replica():
    ctx = mr.get_replica_context()
    assert ctx.all_reduce("MEAN", 3) == 3.0
    assert type(ctx.all_reduce("MEAN", 3)) is np.float64
    given = np.ones(2)
    for result in (ctx.all_reduce("SUM", given), ctx.all_gather(given, axis=0)):
        assert not np.shares_memory(result, given)
        np.testing.assert_array_equal(result, given)
    with pytest.raises(ValueError, match=r"np\.array"):
        ctx.all_gather(3, axis=0)
    with pytest.raises(TypeError, match="bool"):
        ctx.all_reduce("SUM", True)


NANOSECONDS = 1_732_000_000_000_000_000


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 10,
        lambda x: 10 * x,
        lambda x: x << 70,
        lambda x: x**-1,
        lambda x: x + x,
        lambda x: divmod(x, 7),
        lambda x: divmod(7, x),
        lambda x: [-x, +x, abs(x), ~x],
        lambda x: [x == 5, 5 == x, x != 5, x > 4.5, 4.5 > x],
        lambda x: [round(x, -1), complex(x), f"{x:.2f}", f"{x:08d}"],
    ],
)
@pytest.mark.parametrize("value", [5, NANOSECONDS, 2**70, True])
def test_a_mirrored_int_has_the_operators_of_an_int(value, compute):
    expected = compute(value)
    got = compute(mr.Mirrored(value))
    assert (got, type(got)) == (expected, type(expected))


def sparse(kind):
    """Return a sparse matrix, whose `*` is that of matrices, or a sparse array."""
    scipy_sparse = pytest.importorskip("scipy.sparse", reason="scipy is not installed")
    return getattr(scipy_sparse, kind)([[1.0, 0.0], [0.0, 4.0]])


OPERANDS = {
    "matrix": lambda: np.matrix([[1.0, 2.0], [3.0, 4.0]]),
    "sparse matrix": lambda: sparse("csr_matrix"),
    "sparse array": lambda: sparse("csr_array"),
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], [0, 1]),
    "frame": lambda: pandas.DataFrame([[1.0, 2.0], [3.0, 4.0]]),
    "series": lambda: pandas.Series([1.0, 2.0]),
    "list": lambda: [[1.0, 2.0], [3.0, 4.0]],
    "number": lambda: 3,
    "text": lambda: "3",
}


def outcome(operation, *operands):
    """Return the kind and the items of what comes of it, or of the error."""
    try:
        result = operation(*operands)
    except Exception as error:
        return type(error).__name__
    dense = result.todense() if hasattr(result, "todense") else result
    return type(result).__name__, np.asarray(dense).tolist()


@pytest.mark.filterwarnings("ignore")  # of divisions by zero, and of sparse comparisons
@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "matmul", "truediv", "pow", "mod", "lt", "eq", "and_"]
)
@pytest.mark.parametrize("operand", OPERANDS)
def test_an_operator_of_a_variable_or_mirrored_value_is_that_of_the_array_in_it(operand, name):
    """`*` with a matrix is a product of matrices, from both sides."""
    other, operation = OPERANDS[operand](), getattr(operator, name)
    value = np.arange(1.0, 5.0).reshape(2, 2)
    for given in (mr.Variable(value), mr.Mirrored(value)):
        assert outcome(operation, given, other) == outcome(operation, value, other)
        assert outcome(operation, other, given) == outcome(operation, other, value)


@pytest.mark.parametrize("name", ["iadd", "imul", "imatmul", "ipow", "ior", "ilshift"])
def test_no_operator_changes_a_variable_or_mirrored_value_in_place(name):
    for given in (mr.Variable(np.eye(2)), mr.Mirrored(np.eye(2))):
        with pytest.raises(TypeError, match="can't be changed in place"):
            getattr(operator, name)(given, np.eye(2))
        assert given.shared_value().tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_a_mirrored_int_divides_by_zero_as_an_int_does():
    with pytest.raises(ZeroDivisionError):
        mr.Mirrored(2) // 0


@pytest.mark.parametrize("others", [[7], [np.float64(7)], [np.ones(2)], [mr.PerReplica([7])]])
def test_a_per_replica_is_equal_to_itself_and_compared_with_nothing_else(others):
    value = mr.PerReplica([7])
    assert value == value
    assert value in [0, value][1:]
    assert not value != value
    assert {value: 1}[value] == 1
    for other in others:
        for compare in (operator.eq, operator.ne):
            with pytest.raises(TypeError, match="no __eq__"):
                compare(value, other)
            with pytest.raises(TypeError, match="no __eq__"):
                compare(other, value)


def test_variables_and_mirrored_values_have_the_formats_of_the_value_in_them():
    variable = mr.Variable(2.345)
    assert (f"{variable:.1f}", f"{mr.Mirrored(2.345):.1f}") == ("2.3", "2.3")
    assert (f"{variable}", f"{mr.Mirrored(1)}") == (str(variable), str(mr.Mirrored(1)))
    assert round(variable, 1) == round(mr.Mirrored(2.345), 1) == 2.3
    assert complex(mr.Mirrored(1 + 2j)) == 1 + 2j


def test_slices_can_not_be_given_other_rows_than_those_they_were_checked_with():
    slices = mr.IndexedSlices([1.0], [0], dense_shape=(2,))
    for name, value in (("values", [1.0, 2.0]), ("indices", [0, 1]), ("dense_shape", (1,))):
        with pytest.raises(AttributeError):
            setattr(slices, name, value)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["T", "astype", "mean", "shape", "sum"])
def test_an_attribute_of_arrays_that_a_per_replica_lacks_says_where_to_compute(count, name):
    value = mr.PerReplica([np.ones(2)] * count)
    with pytest.raises(AttributeError, match=rf"A PerReplica has no {name}: .* strategy\.run"):
        getattr(value, name)
    assert not hasattr(value, name)
    assert not hasattr(value, "__array_interface__")
    copies = copy.copy(value), pickle.loads(pickle.dumps(value))
    assert [len(one.values) for one in copies] == [count, count]


@pytest.mark.parametrize("count", [1, 2])
def test_arrays_and_a_per_replica_say_where_to_compute(count):
    value = mr.PerReplica([1.0, 2.0][:count])
    ones = np.ones(2)
    for compute in (
        lambda: np.ma.masked_array([1.0, 2.0], mask=[0, 1]) + value,
        lambda: ones + value,
        lambda: value - ones,
        lambda: ones == value,
        lambda: mr.Mirrored(ones) * value,
        lambda: mr.Variable(1.0) * value,
        lambda: np.sqrt(value),
        lambda: np.max(value),
        lambda: np.sum(value),
        lambda: np.add(ones, ones, out=value),
        lambda: np.add(ones, ones, where=value),
        lambda: np.add.at(ones, [0], value),
        lambda: np.float64(1) * value,
        lambda: operator.iadd(ones, value),
        lambda: divmod(value, ones),
    ):
        with pytest.raises(TypeError, match=r"holds a value per replica.* strategy\.run"):
            compute()
    assert ones.tolist() == [1.0, 1.0]


def test_a_per_replica_is_rounded_where_it_converts():
    assert round(mr.PerReplica([2.345]), 1) == 2.3
    with pytest.raises(TypeError, match=r"round\(\) of a PerReplica"):
        round(mr.PerReplica([2.345, 1.0]))
