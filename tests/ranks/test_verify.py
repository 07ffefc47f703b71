"""strategy.verify: state that should be the same on all ranks is, or the difference is named."""

import ctypes

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    cost_of,
    culprits,
    gathered,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
)
from mpi_replica.errors import (
    CollectiveMismatchError,
    ContextError,
    DivergenceError,
    StructureMismatchError,
)

NAN = np.array([0x7FF8000000000000, 0x7FF8000000000001], "u8").view("f8")


def variable(strategy, *args, **kwargs):
    with strategy.scope():
        return mr.Variable(*args, **kwargs)


def who(strategy, ranks):
    """How an error names the replicas of these ranks."""
    layout = strategy.engine.layout
    return layout.describe(i for rank in ranks for i in layout.replica_ids(rank))


def others(strategy, rank):
    return [other for other in range(strategy.size) if other != rank]


def diverges(strategy, value, *words):
    """`verify` raises one text everywhere, with these words in it; return it."""
    error = raises_everywhere(DivergenceError, lambda: strategy.verify(value))
    text = str(error)
    assert [word for word in words if word not in text] == [], text
    assert "test_verify.py:" in text
    check_works(strategy)
    return text


def sides(strategy, rank, mine, theirs):
    """What an error says where `rank` holds `mine`, and all others hold `theirs`."""
    of_ranks = [(rank, f"{mine} on {who(strategy, [rank])}")]
    of_ranks.append(
        (others(strategy, rank)[0], f"{theirs} on {who(strategy, others(strategy, rank))}")
    )
    return "; ".join(text for _, text in sorted(of_ranks))


def changed_behind_its_back(v, index, value):
    """Write into the memory of a variable, as a bug in a C library would."""
    array = v.value()
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    np.frombuffer(memory, array.dtype).reshape(array.shape)[index] = value


# Where all is the same


def test_state_that_is_the_same_passes(strategy):
    v = variable(strategy, np.arange(12.0).reshape(3, 4), name="v")
    generator = np.random.default_rng(7)
    strategy.verify(
        {
            "v": v,
            "mirrored": strategy.extended.broadcast_to({"x": np.ones(3), "text": "a"}),
            "number": 3,
            "large": 1 << 90,
            "none": None,
            "strings": ("a", b"b", np.array(["c", "de"])),
            "random": generator.bit_generator.state,
            "more": [True, 1.5, 2j, np.float16(3), np.int64(2)],
        }
    )
    strategy.verify([])
    strategy.run(lambda: v.assign_add(np.ones((3, 4))))
    strategy.verify(v)
    check_works(strategy)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(20_000.0).reshape(100, 200)),
        np.arange(40.0)[::-2],
        np.arange(6, dtype=">i4"),
        np.array(2.0),
        np.empty((0, 3)),
        np.array([True, False]),
        np.array([0.1, np.inf], "f2"),
        np.array([1 + 2j, -0.0j], "c8"),
        np.array(["a", "bc"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([(1, 2.0)], [("a", "i1"), ("b", "f8")]),
        np.array([(1, (2.0, 3.0))], [("a", "i1"), ("b", ">f8", 2)]),
        np.array([1.0, -0.0, NAN[1]]),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_of_each_kind_are_the_same_however_they_lie_in_memory(strategy, array):
    if strategy.rank % 2:
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    strategy.verify({"array": array})


def test_bytes_that_mean_nothing_do_not_count(strategy):
    dtype = np.dtype([("a", "i1"), ("b", "f8"), ("c", np.longdouble)], align=True)
    array = np.empty(3, dtype)
    array.view(np.uint8)[:] = strategy.rank
    array["a"], array["b"], array["c"] = 1, 2, 3
    long = np.empty(3, np.clongdouble)
    long.view(np.uint8)[:] = strategy.rank
    long.real, long.imag = 1, 2
    strategy.verify([array, long])


def test_bytes_that_no_field_covers_do_not_count_where_others_have_titles_or_overlap(strategy):
    one = {"names": ["a"], "formats": ["f4"], "titles": ["a title"], "itemsize": 8}
    two = {"names": ["a", "b"], "formats": ["f4", "f4"], "offsets": [0, 0], "itemsize": 8}
    for dtype in (np.dtype(one), np.dtype(two)):
        array = np.empty(3, dtype)
        array.view(np.uint8)[:] = strategy.rank
        array["a"] = 1
        strategy.verify([array, array[0]])


def test_a_time_without_a_unit_that_is_the_same_passes(strategy):
    strategy.verify([np.array(5).view("M8"), np.array(5).view("M8")[()]])


def test_objects_with_an_array_in_them_are_compared_by_it(strategy):
    class Tensor:
        def __init__(self, array):
            self.array = array

        def __array__(self, dtype=None, copy=None):
            return self.array

    strategy.verify(Tensor(np.arange(3)))
    needs_two_ranks(strategy)
    diverges(strategy, Tensor(np.arange(3) + strategy.rank), "first element [0]")


def cost_of_one(strategy):
    """What a call takes: one message, and above 32 ranks, where headers do not travel, two."""
    return (1, 256) if strategy.size <= 32 else (2, 280)


def test_it_takes_one_message_and_no_data(strategy):
    v = variable(strategy, np.zeros(200_000), name="v")
    strategy.verify({"v": v, "x": np.ones(200_000)})
    cost = cost_of(strategy, lambda: strategy.verify({"v": v, "x": np.ones(200_000)}))
    assert cost == cost_of_one(strategy)


def test_the_default_strategy_has_nothing_to_compare():
    mr.get_strategy().verify({"x": np.ones(3), "n": 1})
    with pytest.raises(TypeError, match=r"value\['x'\]"):
        mr.get_strategy().verify({"x": {1}})


# Where it is not


@pytest.mark.parametrize("culprit", [0, -1])
def test_a_variable_that_was_changed_on_one_rank_is_named_with_element_and_values(
    strategy, culprit
):
    needs_two_ranks(strategy)
    culprit %= strategy.size
    variable(strategy, 1.0, name="other")
    v = variable(strategy, np.arange(12.0).reshape(3, 4), name="weights")
    if strategy.rank == culprit:
        changed_behind_its_back(v, (1, 2), 0.5)
        changed_behind_its_back(v, (2, 0), -8.0)
    text = diverges(
        strategy,
        {"step": 3, "w": v},
        "variable 1 'weights' (value['w']) differs: 2 of 12 elements, first element [1, 2]: ",
        sides(strategy, culprit, "0.5", "6.0"),
        "assign(variable)",
    )
    assert "step" not in text
    v.assign(v)  # what the text says
    strategy.verify({"step": 3, "w": v})
    assert gathered(v.value()[1, 2]) == [0.5 if culprit == 0 else 6.0] * strategy.size


def test_what_was_broadcast_again_as_the_text_says_is_the_same(strategy):
    needs_two_ranks(strategy)
    value = {"x": np.full(3, strategy.rank), "y": 1}
    diverges(strategy, value, "broadcast_to(value)")
    strategy.verify(strategy.extended.broadcast_to(value))


# By name: what the last rank holds and what the others hold; how the text begins; both values.
DIFFERENT = {
    "float": (1.5, 2.5, "value differs: ", ("1.5", "2.5")),
    "bool": (
        np.array([True, False]),
        np.array([True, True]),
        "first element [1]",
        ("False", "True"),
    ),
    "float16": (
        np.array([1, 2], "f2"),
        np.array([1, 3], "f2"),
        "first element [1]",
        ("2.0", "3.0"),
    ),
    "complex": (np.array([1j]), np.array([2j]), "value differs: ", ("1j", "2j")),
    "0-d": (np.array(3), np.array(4), "value differs: ", ("3", "4")),
    "Fortran order": (
        np.asfortranarray([[1, 2], [3, 4]]),
        np.array([[1, 5], [6, 4]]),
        "2 of 4 elements, first element [0, 1]: ",
        ("2", "5"),
    ),
    "strings": (np.array(["ab", "c"]), np.array(["ab", "d"]), "element [1]: ", ("'c'", "'d'")),
    "a string": ("adam", "sgd", "value differs: ", ("'adam'", "'sgd'")),
    "a long string": ("x" * 99 + "y", "x" * 99 + "z", "1 of 100 elements", ("'y'", "'z'")),
    "bytes": (b"a", b"b", "value differs: ", ("b'a'", "b'b'")),
    "long bytes": (
        bytes(99),
        bytes(98) + b"\1",
        "1 of 99 elements, first element [98]",
        ("0", "1"),
    ),
    "None": (None, 0.0, "value differs: ", ("None", "float64 0.0")),
    "a large int": (1 << 70, 5, "value differs: ", ("1180591620717411303424", "int64 5")),
    "zeros": (np.array([1, 0.0]), np.array([1, -0.0]), "first element [1]: ", ("0.0", "-0.0")),
    "payloads": (
        NAN[:1],
        NAN[1:],
        "value differs: ",
        ("nan (0x7ff8000000000000)", "nan (0x7ff8000000000001)"),
    ),
    "times": (
        np.array(["2020-01-01"], "M8[D]"),
        np.array(["2020-01-02"], "M8[D]"),
        "value differs: ",
        ("2020-01-01", "2020-01-02"),
    ),
    "times without a unit": (
        np.array([4, 5]).view("M8"),
        np.array([4, 6]).view("M8"),
        "first element [1]: ",
        ("bytes 05 00 00 00 00 00 00 00", "bytes 06 00 00 00 00 00 00 00"),
    ),
    "characters that are none": (
        np.array([0x41, 0x110000], np.uint32).view("U1"),
        np.array([0x41, 0x110001], np.uint32).view("U1"),
        "first element [1]: ",
        ("bytes 00 00 11 00", "bytes 01 00 11 00"),
    ),
    "rows": (
        np.array([(1, 2.0), (3, 4.0)], [("a", "i1"), ("b", "f8")]),
        np.array([(1, 2.0), (3, 5.0)], [("a", "i1"), ("b", "f8")]),
        "first element [1]: ",
        ("(3, 4.0)", "(3, 5.0)"),
    ),
    "shapes": (np.ones(3), np.ones((3, 1)), "value differs: ", ("float64[3]", "float64[3, 1]")),
    "empty": (
        np.ones((0, 2)),
        np.ones((0, 3)),
        "value differs: ",
        ("float64[0, 2]", "float64[0, 3]"),
    ),
    "dtypes": (np.ones(3, "f4"), np.ones(3), "value differs: ", ("float32[3]", "float64[3]")),
    "bytes of one large element": (
        np.array(b"a" * 9999),
        np.array(b"a" * 5000 + b"b" + b"a" * 4998),
        "1 of 9999 bytes, first byte 5000 of value: ",
        ("61", "62"),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_value_that_differs_on_one_rank_is_told_with_what_all_hold(strategy, name):
    needs_two_ranks(strategy)
    last = strategy.size - 1
    mine, theirs, beginning, (shown, shown_of_others) = DIFFERENT[name]
    value = mine if strategy.rank == last else theirs
    diverges(strategy, value, beginning, sides(strategy, last, shown, shown_of_others))


def test_the_first_of_several_leaves_that_differ_is_told_and_the_others_are_named(strategy):
    needs_two_ranks(strategy)
    rank = strategy.rank
    text = diverges(
        strategy,
        {"a": 1, "b": [rank == 0, 2], "c": np.full(3, rank), "d": {"e": rank}},
        "value['b'][0] differs: True on",
        "Further leaves that differ: value['c'], value['d']['e'].",
    )
    assert "value['a']" not in text
    text = diverges(strategy, [rank] * 30, "value[0] differs", "value[8], 21 more.")
    assert "value[9]" not in text


def test_each_group_of_ranks_that_agree_is_named(strategy):
    needs_two_ranks(strategy)
    size = strategy.size
    value = np.zeros(10)
    value[5] = strategy.rank == size - 1
    value[7] = strategy.rank
    text = diverges(strategy, value, "of 10 elements, first element [5]: ")
    assert f"0.0 on {who(strategy, range(size - 1))}; 1.0 on {who(strategy, [size - 1])}." in text
    more = [f"{size - 8} more"] if size > 8 else []
    apart = " and ".join([*(who(strategy, [rank]) for rank in range(min(size, 8))), *more])
    assert (f"As a whole it differs between {apart}." in text) == (size > 2)


def test_a_bit_in_the_middle_of_a_large_array_is_found_with_a_few_small_messages(strategy):
    needs_two_ranks(strategy)
    v = variable(strategy, np.random.default_rng(0).normal(size=(1000, 300)), name="large")
    at = (517, 123)
    before = v.value()[at]
    if strategy.rank == strategy.size - 1:
        bits = before.view("u8") ^ np.uint64(1)
        changed_behind_its_back(v, at, bits.view("f8"))
    after = (before.view("u8") ^ np.uint64(1)).view("f8")

    def call():
        error = raises_everywhere(DivergenceError, lambda: strategy.verify([v]))
        expected = sides(strategy, strategy.size - 1, after, before)
        assert f"1 of 300000 elements, first element [517, 123]: {expected}." in str(error)

    _, sent = cost_of(strategy, call)
    assert sent < 8000
    check_works(strategy)


@pytest.mark.parametrize("first", [0, 1, 131_071, 299_999])
def test_the_first_of_the_elements_of_a_large_array_is_told_and_how_many_differ(strategy, first):
    needs_two_ranks(strategy)
    value = np.zeros(300_000, "i2")
    if strategy.rank:
        value[first:] = 1
    text = diverges(strategy, value, f"first element [{first}]: ")
    assert f"0 on {who(strategy, [0])}; 1 on {who(strategy, range(1, strategy.size))}." in text


def test_arrays_that_differ_in_all_signs_are_found(strategy):
    """Sums of words, which are quick, do not see that."""
    needs_two_ranks(strategy)
    value = np.random.default_rng(0).normal(size=(128, 256))
    diverges(
        strategy, value if strategy.rank else -value, "of 32768 elements, first element [0, 0]"
    )


# What is no state that is the same everywhere


def test_what_is_synchronized_on_read_is_left_out(strategy):
    count = variable(
        strategy,
        0.0,
        name="count",
        synchronization=mr.VariableSynchronization.ON_READ,
        aggregation=mr.VariableAggregation.SUM,
    )
    v = variable(strategy, 1.0)
    strategy.run(lambda: count.assign(mr.get_replica_context().replica_id_in_sync_group))
    assert cost_of(strategy, lambda: strategy.verify([count, v])) == cost_of_one(strategy)
    strategy.verify(count)


def test_values_of_replicas_that_are_the_same_pass(strategy):
    """What `run` returned, as the parameters of a JAX program; and where `merge_fn` sees all."""
    values = strategy.run(lambda: {"w": np.arange(5000.0), "n": 3, "text": "a"})
    strategy.verify({"values": values, "step": 1})

    def step():
        context = mr.get_replica_context()
        return context.merge_call(lambda s, *x: s.verify(x), args=(np.ones(20_000), 2))

    strategy.run(step)
    assert cost_of(strategy, lambda: strategy.verify(values)) == cost_of_one(strategy)


@pytest.mark.parametrize("size", [3, 20_000])
def test_a_replica_whose_value_differs_is_named_wherever_it_is(strategy, size):
    layout = strategy.engine.layout
    needs_two_replicas(strategy)
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            x = np.zeros(size)
            x[2] = mr.get_replica_context().replica_id_in_sync_group == culprit
            return {"w": x, "n": 1}

        values = strategy.run(step)
        rest = [i for i in layout.all_replica_ids if i != culprit]
        wanted = [(culprit, f"1.0 on {layout.describe([culprit])}")]
        wanted += [(rest[0], f"0.0 on {layout.describe(rest)}")]
        held = "; ".join(text for _, text in sorted(wanted))
        diverges(
            strategy,
            [1.5, values],
            f"value[1]['w'] differs: 1 of {size} elements, first element [2]: {held}.",
            "on all replicas",
            "what replica 0 has",
        )
        first = strategy.experimental_local_results(values["w"])[0]
        strategy.verify(strategy.extended.broadcast_to(first))


def test_values_of_replicas_that_differ_in_kind_or_on_all_are_told(strategy):
    layout = strategy.engine.layout
    needs_two_replicas(strategy)
    ids = strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
    text = diverges(strategy, ids, "value differs: 0 on replica 0 (rank 0); 1 on ")
    assert layout.describe([1]) in text
    last = layout.all_replica_ids[-1]
    kinds = strategy.run(
        lambda: "a" if mr.get_replica_context().replica_id_in_sync_group == last else 1.0
    )
    diverges(strategy, kinds, "float64 1.0 on ", f"'a' on {layout.describe([last])}")


@pytest.mark.usefixtures("few_ranks")
def test_objects_of_replicas_in_other_containers_are_a_mismatch_that_shows_them():
    with mr.MPIStrategy(num_replicas=4) as strategy:
        local = strategy.engine.layout.local_replica_ids
        objects = {
            i: [np.random.default_rng(0)] if i else (np.random.default_rng(0),) for i in local
        }
        error = raises_everywhere(
            StructureMismatchError,
            lambda: strategy.verify(mr.PerReplica(list(objects.values()), local, 4)),
        )
        assert "({'bit_generator'" in str(error)
        assert "[{'bit_generator'" in str(error)


def test_a_value_of_another_strategy_or_per_replica_on_one_rank_alone_is_an_error(strategy):
    count = strategy.num_replicas_in_sync
    other = mr.PerReplica([1] * (count + 1))
    error = raises_everywhere(ValueError, lambda: strategy.verify({"x": other}))
    assert f"a PerReplica of {count + 1} replicas" in str(error)
    needs_two_ranks(strategy)
    value = mr.PerReplica([1] * count) if strategy.rank else 1
    error = raises_everywhere(StructureMismatchError, lambda: strategy.verify([value]))
    assert "got different kinds for value[0]" in str(error)
    assert "Pass the same variable, or the same kind of value, on every replica." in str(error)
    check_works(strategy)


@pytest.mark.parametrize(
    "leaf",
    [object(), {1}, np.array([None]), np.ma.masked_array([1, 2], [True, False])],
    ids=lambda x: type(x).__name__,
)
def test_a_leaf_without_bits_is_an_error_on_every_rank_also_where_one_holds_it(strategy, leaf):
    for ranks in (range(strategy.size), [strategy.size - 1]):
        value = [1, leaf if strategy.rank in ranks else 2]
        error = raises_everywhere(TypeError, lambda value=value: strategy.verify(value))
        assert "for value[1]" in str(error)
        check_works(strategy)


def test_functions_of_a_file_whose_name_is_no_utf_8_are_compared_and_run(strategy):
    needs_two_ranks(strategy)
    names = {}
    exec(compile("def f(): return 1\ndef g(): return 2", "tr\udce4in.py", "exec"), names)
    strategy.verify([names["f"]])
    assert strategy.reduce("MIN", strategy.run(names["f"]), axis=None) == 1
    value = [names["f" if strategy.rank == 0 else "g"]]
    error = raises_everywhere(DivergenceError, lambda: strategy.verify(value))
    assert "f at tr\udce4in.py:1" in str(error)
    check_works(strategy)


def schedule_of_the_learning_rate_with_warmup_of_the_first_run():
    return 1


def schedule_of_the_learning_rate_with_warmup_of_the_second_run():
    return 2


def test_functions_with_long_names_that_differ_are_told(strategy):
    needs_two_ranks(strategy)
    of_ranks = (
        schedule_of_the_learning_rate_with_warmup_of_the_first_run,
        schedule_of_the_learning_rate_with_warmup_of_the_second_run,
    )
    strategy.verify(of_ranks)
    text = diverges(strategy, {"f": of_ranks[min(strategy.rank, 1)]}, "value['f'] differs: ")
    assert [name for name in of_ranks if f"{name.__qualname__} at " not in text] == []


def test_functions_of_one_line_that_differ_are_told(strategy):
    needs_two_ranks(strategy)
    apart = f"{who(strategy, [0])} and {who(strategy, others(strategy, 0))}"
    for functions in (
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x in {"a", "b"}, lambda x: x in {"a", "c"}),
    ):
        strategy.verify(functions)
        text = diverges(strategy, functions[min(strategy.rank, 1)], "<lambda> at test_verify.py:")
        assert f"As a whole it differs between {apart}." in text


def test_other_nests_and_other_variables_are_a_mismatch(strategy):
    needs_two_ranks(strategy)
    v, w = variable(strategy, 1.0, name="v"), variable(strategy, 1.0, name="w")
    for mine, other in (([1], (1,)), ({"a": 1}, {"b": 1}), ([v], [w]), ([v], [1.0])):
        value = mine if strategy.rank else other
        raises_everywhere(mr.errors.StructureMismatchError, lambda x=value: strategy.verify(x))
        check_works(strategy)


# Where and how often it is called


def test_in_a_replica_it_is_a_context_error_that_names_the_call_that_fits(strategy):
    error = raises_everywhere(ContextError, lambda: strategy.run(lambda: strategy.verify(1)))
    assert "verify was called in a replica" in str(error)
    assert "merge_call" in str(error)
    check_works(strategy)


def test_in_a_merge_fn_it_compares_and_an_error_ends_the_run_everywhere(strategy):
    v = variable(strategy, [1.0, 2.0], name="v")

    shared = mr.Mirrored(7)

    def passes(strategy):
        strategy.verify([v, shared])
        return 5

    strategy.run(lambda: mr.get_replica_context().merge_call(passes))
    needs_two_ranks(strategy)
    rank = strategy.rank

    def in_merge_fn(strategy):
        strategy.verify({"v": v, "rank": rank})

    error = raises_everywhere(
        DivergenceError,
        lambda: strategy.run(lambda: mr.get_replica_context().merge_call(in_merge_fn)),
    )
    assert "value['rank'] differs: 0 on" in str(error)
    check_works(strategy)

    def caught(strategy):
        try:
            strategy.verify(rank)
        except DivergenceError:
            return 1.0
        return 0.0

    def goes_on():
        context = mr.get_replica_context()
        return context.all_reduce("SUM", context.merge_call(caught))

    results = strategy.experimental_local_results(strategy.run(goes_on))
    assert set(results) == {strategy.num_replicas_in_sync}


def test_every_k_is_the_first_call_and_each_kth_after_it_from_its_place(strategy):
    value, (once, _) = np.ones(3), cost_of_one(strategy)
    costs = [cost_of(strategy, lambda: strategy.verify(value, every=3)) for _ in range(8)]
    steps = [number for number, _ in costs]
    assert steps == [once, 0, 0, once, 0, 0, once, 0]
    assert {sent for number, sent in costs if not number} == {0}

    def elsewhere():
        strategy.verify(value, every=np.int64(2))

    assert [cost_of(strategy, elsewhere)[0] for _ in range(4)] == [once, 0, once, 0]
    strategy.run(int)
    assert [cost_of(strategy, elsewhere)[0] for _ in range(2)] == [once, 0]


def test_every_counts_by_the_name_where_the_call_has_one(strategy):
    options = mr.CommunicationOptions(name="state")
    steps = [cost_of(strategy, lambda: strategy.verify(1, every=3, options=options))[0]]
    steps.append(cost_of(strategy, lambda: strategy.verify(1, every=3, options=options))[0])
    assert steps == [cost_of_one(strategy)[0], 0]


def test_every_counts_on_after_a_difference(strategy):
    needs_two_ranks(strategy)
    seen = []
    for step in range(6):
        try:
            strategy.verify(strategy.rank if step < 4 else 0, every=2)
            seen.append(False)
        except DivergenceError:
            seen.append(True)
    assert seen == [True, False, True, False, False, False]
    check_works(strategy)


@pytest.mark.parametrize(
    ("every", "kind"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_an_every_that_is_no_number_of_calls_is_an_error_on_every_rank(strategy, every, kind):
    mine = every if strategy.rank == strategy.size - 1 else 1
    error = raises_everywhere(kind, lambda: strategy.verify(1, every=mine))
    assert f"got {every!r}" in str(error)
    check_works(strategy)


def test_another_every_or_another_call_on_one_rank_is_a_mismatch(strategy):
    needs_two_ranks(strategy)
    error = raises_everywhere(
        CollectiveMismatchError, lambda: strategy.verify(1, every=2 + strategy.rank % 2)
    )
    assert "verify(every=2" in str(error)

    def apart():
        if strategy.rank:
            strategy.verify(1)
        else:
            strategy.extended.broadcast_to(1)

    raises_everywhere(CollectiveMismatchError, apart)
    check_works(strategy)


def test_where_not_all_ranks_see_all_headers_a_difference_is_found_too(strategy, monkeypatch):
    """Worlds of more ranks than that agree in another way."""
    monkeypatch.setattr(strategy.engine.agreement, "_wide", True)
    strategy.verify({"x": np.ones(3000)})
    needs_two_ranks(strategy)
    diverges(strategy, {"x": np.full(3000, strategy.rank)}, "first element [0]: 0 on")
    strategy.verify({"x": np.ones(3000)})


def test_with_a_timeout_a_difference_is_found_too():
    options = mr.CommunicationOptions(timeout_seconds=60)
    with mr.MPIStrategy(replicas_per_rank=2, communication_options=options) as strategy:
        needs_two_ranks(strategy)
        diverges(strategy, np.full(30_000, strategy.rank), "first element [0]: 0 on")
