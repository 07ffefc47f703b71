"""What the arguments of merge_call share, in memory: on ranks of their own they share nothing."""

import numpy as np
import pytest
from mpi4py import MPI

import mpi_replica as mr
from contributions import laid_out
from everywhere import check_works

SIZES = [4, 1 << 14]  # large ones are gathered when they are looked at


@pytest.fixture(params=["replicas", "default"])
def any_strategy(request, strategy):
    """A strategy, and the one of a program that has made none."""
    return strategy if request.param == "replicas" else mr.get_strategy()


def merged(strategy, merge_fn, make_args):
    def step():
        context = mr.get_replica_context()
        return context.merge_call(merge_fn, args=make_args(context.replica_id_in_sync_group))

    return strategy.experimental_local_results(strategy.run(step))


def local_ids(strategy):
    return list(getattr(strategy, "local_replica_ids", range(1)))


def whole_and(part):
    def make(size, order):
        array = np.ones((size, 3), order=order)
        return array, part(array)

    return make


PARTS = {
    "itself": whole_and(lambda array: array),
    "a view": whole_and(lambda array: array[1:]),
    "its transpose": whole_and(lambda array: array.T),
    "rows to read": whole_and(lambda array: np.broadcast_to(array[0], array.shape)),
    "bytes": whole_and(lambda array: array.view(np.uint8)[:, :1]),
}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", PARTS)
def test_what_a_merge_fn_writes_into_an_argument_is_not_in_another_one(
    any_strategy, part, size, order
):
    def bytes_of_second(strategy, first, second):
        for array in strategy.experimental_local_results(first):
            array += 1
        seconds = strategy.experimental_local_results(second)
        for array, other in zip(strategy.experimental_local_results(first), seconds, strict=True):
            assert not np.shares_memory(array, other)
        return [array.tobytes() for array in seconds]

    if part == "bytes" and order == "F":
        order = "C"  # numpy has no such view of columns
    count = any_strategy.num_replicas_in_sync
    expected = [PARTS[part](size, order)[1].tobytes()] * count
    found = merged(any_strategy, bytes_of_second, lambda i: PARTS[part](size, order))
    assert list(found) == [expected] * len(local_ids(any_strategy))
    check_works(any_strategy)


@pytest.mark.parametrize("part", PARTS)
def test_what_a_merge_fn_writes_into_either_argument_is_the_replicas_afterwards(any_strategy, part):
    """And what it returns is what the replica has given."""

    def write_first_row(strategy, first, second):
        for i, array in enumerate(strategy.experimental_local_results(first)):
            array[0] = i + 2
        return first, second

    def step():
        context = mr.get_replica_context()
        first, second = PARTS[part](5, "C")
        found = context.merge_call(write_first_row, args=(first, second))
        return first, [found[0] is first, found[1] is second]

    firsts, are_given = map(any_strategy.experimental_local_results, any_strategy.run(step))
    expected = np.ones((5, 3))
    for i, first, is_given in zip(local_ids(any_strategy), firsts, are_given, strict=True):
        expected[0] = i + 2
        np.testing.assert_array_equal(first, expected)
        assert is_given == [True, True]


def test_writes_into_two_windows_of_one_array_are_both_the_replicas(any_strategy):
    def write(strategy, low, high):
        for part in strategy.experimental_local_results(low):
            part[:4] += 1
        for part in strategy.experimental_local_results(high):
            part[2:] += 2

    def step():
        table = np.zeros(8)
        mr.get_replica_context().merge_call(write, args=(table[:6], table[2:]))
        return table

    for table in any_strategy.experimental_local_results(any_strategy.run(step)):
        np.testing.assert_array_equal(table, [1, 1, 1, 1, 2, 2, 2, 2])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_windows_of_one_array_that_replicas_of_a_rank_give_are_each_their_own(
    strategy, size, order
):
    count = strategy.num_replicas_in_sync
    table = np.ones((size + count, 3), order=order)

    def add_id(strategy, window):
        for i, one in enumerate(strategy.experimental_local_results(window)):
            one[1:] += i
        return window, [one.sum() for one in strategy.experimental_local_results(window)]

    ids = strategy.local_replica_ids
    windows = {i: table[i : i + size] for i in ids}
    found = merged(strategy, add_id, lambda i: (windows[i],))
    expected = [3 * size + 3.0 * i * (size - 1) for i in range(count)]
    for i, (window, sums) in zip(ids, found, strict=True):
        assert sums == expected
        np.testing.assert_array_equal(window, [[1.0] * 3] + [[1.0 + i] * 3] * (size - 1))
    rows = np.ones(size + count)
    for i in ids:  # of what several have written, the last
        if i:
            rows[i + 1 : i + size] = 1 + i
    np.testing.assert_array_equal(table, np.repeat(rows, 3).reshape(-1, 3))
    check_works(strategy)


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_that_replicas_of_a_rank_give_in_two_forms_is_each_their_own(strategy, order):
    table = np.ones((3, 4), order=order)

    def add_id(strategy, rows, columns):
        for i, one in enumerate(strategy.experimental_local_results(rows)):
            one += i
        assert all([(one == 1).all() for one in strategy.experimental_local_results(columns)])
        return rows

    found = merged(strategy, add_id, lambda i: (table, table.T))
    for i, rows in zip(strategy.local_replica_ids, found, strict=True):
        np.testing.assert_array_equal(rows, np.full((3, 4), 1.0 + i))


def test_parts_of_one_array_that_lie_apart_are_not_copied(any_strategy):
    """As the layers of a model are, in one buffer; nor is what nobody can write into."""
    ids = local_ids(any_strategy)
    table = np.arange(6.0)
    table.flags.writeable = False
    buffers = {i: np.zeros(10) for i in ids}

    def write(strategy, low, high, *read):
        for layer in (low, high):
            own = strategy.experimental_local_results(layer)
            for i in ids:
                assert np.shares_memory(own[i], buffers[i])
                own[i][...] = i
        for one in read:
            own = strategy.experimental_local_results(one)
            assert all([np.shares_memory(own[i], table) for i in ids])

    merged(any_strategy, write, lambda i: (buffers[i][:3], buffers[i][3:], table, table[1:], table))
    for i, buffer in buffers.items():
        np.testing.assert_array_equal(buffer, np.full(10, float(i)))


@pytest.mark.parametrize("count", [3, 100])
def test_columns_of_one_array_are_written_each_by_itself(any_strategy, count):
    def write(strategy, *columns):
        for number, column in enumerate(columns):
            for i, one in enumerate(strategy.experimental_local_results(column)):
                one += 100 * i + number

    def step():
        table = np.zeros((4, count))
        mr.get_replica_context().merge_call(write, args=tuple(table.T))
        return table

    tables = any_strategy.experimental_local_results(any_strategy.run(step))
    for i, table in zip(local_ids(any_strategy), tables, strict=True):
        np.testing.assert_array_equal(table, [[100.0 * i + n for n in range(count)]] * 4)


def test_records_with_padding_come_back_as_what_was_given(any_strategy):
    dtype = np.dtype([("kind", "u1"), ("value", "f8")], align=True)

    def write(strategy, first, second):
        for i, one in enumerate(strategy.experimental_local_results(second)):
            one["value"][1:] = i
        return first, second

    def step():
        records = np.zeros(6, dtype)
        tail = records[2:]
        found = mr.get_replica_context().merge_call(write, args=(records[:2], tail))
        again = mr.get_replica_context().merge_call(write, args=(records[::2], tail))
        return records["value"].copy(), [found[1] is tail, again[1] is tail]

    values, are_given = map(any_strategy.experimental_local_results, any_strategy.run(step))
    for i, value, is_given in zip(local_ids(any_strategy), values, are_given, strict=True):
        assert is_given == [True, True]
        np.testing.assert_array_equal(value, [0, 0, 0, i, i, i])


def written_by(any_strategy, make, write):
    """Return what each replica's own array holds when `write` has got what was made of it."""

    def step():
        parts, own = make()
        mr.get_replica_context().merge_call(write, args=parts)
        return own.tobytes()

    return any_strategy.experimental_local_results(any_strategy.run(step))


def fields():
    records = np.zeros(3, [("x", "f8"), ("y", "f8")])
    return (records["x"], records), records


def parts_of_numbers():
    numbers = np.zeros(3, complex)
    return (numbers.real, numbers), numbers


def record_and_rows():
    rows = np.zeros(3, [("x", "f8"), ("y", "f8")])
    return (rows, rows[1:], rows[0]), rows


def padded():
    records = np.frombuffer(b"\xff" * 96, np.dtype([("k", "u1"), ("x", "f8")], align=True)).copy()
    records["x"] = 0
    return (records["x"], records[1:]), records


def test_writes_into_fields_of_one_record_are_all_the_replicas(any_strategy):
    def write(strategy, x, whole):
        for one in strategy.experimental_local_results(x):
            one[...] = 1
        for one in strategy.experimental_local_results(whole):
            one["y"] = 2

    expected = fields()[1]
    expected["x"], expected["y"] = 1, 2
    for found in written_by(any_strategy, fields, write):
        assert found == expected.tobytes()


def test_writes_into_parts_of_complex_numbers_are_all_the_replicas(any_strategy):
    def write(strategy, real, whole):
        for one in strategy.experimental_local_results(real):
            one[...] = 1
        for one in strategy.experimental_local_results(whole):
            one.imag = 2

    for found in written_by(any_strategy, parts_of_numbers, write):
        assert found == np.full(3, 1 + 2j).tobytes()


def test_nothing_but_what_was_written_is_written_back(any_strategy):
    """Neither what is between fields, nor over what came there in another way."""

    def write(strategy, x, tail):
        for one in strategy.experimental_local_results(x):
            one[...] = 5
        for one in strategy.experimental_local_results(tail):
            one["k"][0] = 9

    expected = padded()[1]
    expected["x"] = 5
    expected["k"][1] = 9
    found = written_by(any_strategy, padded, write)
    for mine in found:
        records = np.frombuffer(mine, expected.dtype)
        np.testing.assert_array_equal(records["x"], expected["x"])
        np.testing.assert_array_equal(records["k"], expected["k"])


def test_a_record_that_shares_memory_with_rows_is_written_itself(any_strategy):
    def write(strategy, rows, tail, record):
        for one in strategy.experimental_local_results(record):
            one["x"] = 1
        for one in strategy.experimental_local_results(tail):
            one["y"] = 2

    expected = record_and_rows()[1]
    expected["x"][0] = 1
    expected["y"][1:] = 2
    for found in written_by(any_strategy, record_and_rows, write):
        assert found == expected.tobytes()


@pytest.mark.parametrize("order", ["C", "F"])
def test_what_a_merge_fn_has_written_before_it_fails_is_the_replicas(any_strategy, order):
    arrays = {i: np.zeros((3, 2), order=order) for i in local_ids(any_strategy)}

    def write(strategy, first, second):
        for i, one in enumerate(strategy.experimental_local_results(second)):
            one[0] = i + 1
        raise KeyError("not found")

    def step():
        mine = arrays[mr.get_replica_context().replica_id_in_sync_group]
        mr.get_replica_context().merge_call(write, args=(mine[1:], mine))

    with pytest.raises(KeyError, match="not found"):
        any_strategy.run(step)
    for i, array in arrays.items():
        np.testing.assert_array_equal(array, [[i + 1] * 2, [0, 0], [0, 0]])


#: What a merge_fn may make for all replicas of a total that it may also assign to a variable.
MADE_FOR_ALL = {
    "turned": lambda total, weights: total.T,
    "every other column": lambda total, weights: total[:, ::2],
    "Fortran": lambda total, weights: np.asfortranarray(total),
    "unaligned": lambda total, weights: laid_out(total, "unaligned"),
    "value of a variable": lambda total, weights: weights.assign(total).value().T,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", MADE_FOR_ALL)
def test_what_a_merge_fn_makes_for_all_is_aligned_and_in_c_order_at_each_replica(
    strategy, kind, size
):
    with strategy.scope():
        weights = mr.Variable(np.zeros((size, 3)))

    def merge_fn(strategy, x):
        made = MADE_FOR_ALL[kind](strategy.reduce("SUM", x, axis=None), weights)
        return made, {"again": [made]}

    def step():
        context = mr.get_replica_context()
        mine = np.arange(3.0 * size).reshape(size, 3) + context.replica_id_in_sync_group
        found, nest = context.merge_call(merge_fn, args=(mine,))
        flags = found.flags
        is_one = nest["again"][0] is found
        return found, [flags.c_contiguous, flags.aligned, is_one, flags.writeable]

    ids = range(strategy.num_replicas_in_sync)
    total = sum([np.arange(3.0 * size).reshape(size, 3) + i for i in ids])
    arrays, flags = map(strategy.experimental_local_results, strategy.run(step))
    expected = MADE_FOR_ALL[kind](total, weights)
    for array, of_array in zip(arrays, flags, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert of_array == [True, True, True, kind != "value of a variable"]


@pytest.mark.parametrize("is_in_file", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_comes_back_as_it_was_given_lies_in_memory_as_it_was(
    any_strategy, order, is_in_file, path
):
    """Also the copies of what the replicas of a rank give as one object."""
    table = np.ones((3, 2), order=order)
    if is_in_file:
        file = f"{path}.{MPI.COMM_WORLD.rank}"
        table.tofile(file)
        table = np.memmap(file, "f8", "r", shape=(3, 2), order=order)
    own = {i: np.full((3, 2), i, order=order) for i in local_ids(any_strategy)}
    found = merged(any_strategy, lambda strategy, *given: given, lambda i: (own[i], table))
    for i, (mine, same) in zip(local_ids(any_strategy), found, strict=True):
        assert mine is own[i]
        assert same is table or len(own) > 1
        np.testing.assert_array_equal(same, table)
        assert same.flags.fnc == (order == "F")


@pytest.mark.parametrize("part", ["rows", "columns"])
def test_parts_of_a_file_that_cross_are_each_replicas_own(strategy, part, path):
    file = f"{path}.{strategy.rank}"
    np.zeros(16).tofile(file)
    table = np.memmap(file, "f8", "c", shape=(4, 4))
    table = table if part == "rows" else table.T

    def add(strategy, x):
        for i, one in enumerate(strategy.experimental_local_results(x)):
            one += i + 1
        return [float(one.sum()) for one in strategy.experimental_local_results(x)]

    expected = [12.0 * (i + 1) for i in range(strategy.num_replicas_in_sync)]
    for found in merged(strategy, add, lambda i: (table[i % 2 : i % 2 + 3],)):
        assert found == expected


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("times", [1, 2])
def test_an_array_that_all_replicas_of_a_rank_give_comes_back_as_each_has_it(
    strategy, order, times
):
    table = np.zeros((3, 2), order=order)

    def write(strategy, *tables):
        for i, one in enumerate(strategy.experimental_local_results(tables[0])):
            one[0] = i + 1
        seen = [one.sum() for one in strategy.experimental_local_results(tables[-1])]
        return tables, seen

    found = merged(strategy, write, lambda i: (table,) * times)
    count = strategy.num_replicas_in_sync
    for i, (mine, seen) in zip(strategy.local_replica_ids, found, strict=True):
        assert seen == [2.0 * (j + 1) if times == 1 else 0 for j in range(count)]
        for one in mine:  # the second one is the first one, as where a rank has one replica
            np.testing.assert_array_equal(one, [[i + 1] * 2, [0, 0], [0, 0]])
            assert one.flags.fnc == (order == "F")


def test_an_array_that_others_have_given_before_is_separated_too(strategy):
    """It refuses writes until all have come to their calls."""
    table = np.zeros(3)

    def write(strategy, first, second):
        for one in strategy.experimental_local_results(first):
            one[0] = 1
        return [one.sum() for one in strategy.experimental_local_results(second)]

    found = merged(strategy, write, lambda i: (table, np.zeros(3) if i == 0 else table))
    for sums in found:
        assert list(sums) == [0.0] * strategy.num_replicas_in_sync


def test_an_argument_that_is_a_copy_can_not_be_given_another_shape_in_place(any_strategy):
    def turn(strategy, first, second):
        for one in strategy.experimental_local_results(first):
            one.resize((3, 1), refcheck=False)

    def step():
        mine = np.zeros(3)
        mr.get_replica_context().merge_call(turn, args=(mine, mine))

    with pytest.raises(
        ValueError, match=r"shape \(3,\) and float64 one of \(3, 1\) and float64, in"
    ):
        any_strategy.run(step)
    check_works(any_strategy)


@pytest.mark.parametrize(
    ("dtype", "before", "first", "second"),
    [
        ("i8", 7, 307, 8),
        ("f8", 0.0, 1.5, 2.0),
        ("f2", 0.0, 1.5, 2.0),
        ("c16", 0, 1.5 + 1.5j, 2 + 2j),
        ("g", 0.0, 1.5, 2.0),
        ("U3", "abc", "xyz", "abd"),
        ([("n", "i8"), ("x", "f4", (2,))], (7, (0, 0)), (307, (1.5, 1.5)), (8, (2, 2))),
    ],
)
def test_of_two_numbers_for_one_element_the_last_one_counts(
    any_strategy, dtype, before, first, second
):
    """And not bytes of both."""
    dtype = np.dtype(dtype)

    def write(strategy, one, again):
        for part in strategy.experimental_local_results(one):
            part[0] = np.array(first, dtype)
        for part in strategy.experimental_local_results(again):
            part[0] = np.array(second, dtype)

    def step():
        mine = np.full(2, np.array(before, dtype))
        mr.get_replica_context().merge_call(write, args=(mine, mine))
        return mine.tobytes()

    expected = np.full(2, np.array(before, dtype))
    expected[0] = np.array(second, dtype)
    for found in any_strategy.experimental_local_results(any_strategy.run(step)):
        mine = np.frombuffer(found, dtype)
        np.testing.assert_array_equal(mine, expected)


def test_the_error_of_a_merge_fn_is_told_and_not_what_is_wrong_with_a_copy(any_strategy):
    arrays = {i: np.zeros(3) for i in local_ids(any_strategy)}

    def turn(strategy, first, second, other):
        for one in strategy.experimental_local_results(other):
            one.resize((3, 1), refcheck=False)
        for one in strategy.experimental_local_results(second):
            one[0] = 1
        raise KeyError("its own")

    def step():
        mine = arrays[mr.get_replica_context().replica_id_in_sync_group]
        mr.get_replica_context().merge_call(turn, args=(mine, mine, np.zeros((3, 3))[:, 1]))

    with pytest.raises(KeyError, match="its own"):
        any_strategy.run(step)
    for array in arrays.values():
        np.testing.assert_array_equal(array, [1, 0, 0])


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_write_into_what_refuses_it_is_told(any_strategy, order):
    def unlock(strategy, first, second):
        for one in strategy.experimental_local_results(second):
            one.flags.writeable = True
            one += 1

    def step():
        mine = np.zeros((2, 3), order=order)
        locked = mine[:]
        locked.flags.writeable = False
        mr.get_replica_context().merge_call(unlock, args=(mine, locked))

    with pytest.raises(ValueError, match="has written into an argument that refuses writes"):
        any_strategy.run(step)
    check_works(any_strategy)


def test_an_empty_result_is_each_replicas_own(strategy):
    """So that what one of them returns, which is locked, refuses no write of another one."""

    def step():
        lowest = mr.get_replica_context().merge_call(
            lambda strategy, rows: strategy.reduce("MIN", rows, axis=None), args=(np.zeros(0),)
        )
        lowest += 1
        return lowest

    assert strategy.gather(strategy.run(step), axis=0).shape == (0,)
