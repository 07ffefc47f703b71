"""Arrays of other libraries as arguments of merge_call: they travel as arrays, and stay theirs."""

import contextlib

import numpy as np
import pytest

import mpi_replica as mr
from array_kinds import LIBRARIES, Library
from everywhere import check_works, cost_of, needs_two_ranks, raises_everywhere
from mpi_replica.collectives.arguments import pack
from mpi_replica.errors import CollectiveMismatchError

LARGE = 20_000  # float32: more than travels with the call


@pytest.fixture(params=LIBRARIES)
def library(request):
    return Library(request.param)


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def merged(strategy, merge_fn, make):
    """Return what merge_call gives each local replica; `make` makes its arguments of its id."""

    def step():
        return mr.get_replica_context().merge_call(merge_fn, make(replica_id()))

    return strategy.experimental_local_results(strategy.run(step))


@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3), (LARGE,)])
def test_merge_fn_gets_arrays_of_the_library_and_so_do_the_replicas(strategy, library, shape):
    def both(strategy, x, plain):
        for i, part in enumerate(strategy.experimental_local_results(x)):
            library.holds(part, np.full(shape, i))
        for i, part in enumerate(strategy.experimental_local_results(plain)):
            assert type(part) is np.ndarray
            np.testing.assert_array_equal(part, np.full(shape, i))
        return x, x.component(0)

    count = strategy.num_replicas_in_sync
    found = merged(strategy, both, lambda i: (library.array(np.full(shape, i)), np.full(shape, i)))
    for i, (mine, first) in zip(strategy.local_replica_ids, found, strict=True):
        library.holds(mine, np.full(shape, i))
        library.holds(first, np.full(shape, 0))
    assert count


@pytest.mark.parametrize("size", [4, 2 * LARGE])
def test_strided_arrays_arrive_as_they_are(strategy, library, size):
    def check(strategy, x):
        for i, part in enumerate(x.values):
            library.holds(part, np.arange(size, dtype="f4").reshape(2, -1).T + i)

    merged(strategy, check, lambda i: ((library.array(np.arange(size).reshape(2, -1)) + i).T,))


# Ways in which an array is not in C order.
ORDERS = {
    "turned": lambda array: array.T,
    "a part": lambda array: array[:, 1:],
    "every other one": lambda array: array[::2],
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("shape", [(40, 50), (300, 400)], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_sums_in_merge_fn_have_the_same_bits_on_all_ranks_in_whatever_order(
    strategy, kind, shape, name
):
    make = np.asarray if kind == "numpy" else pytest.importorskip("torch").as_tensor
    given = [
        np.random.default_rng(i).normal(size=shape).astype("f4")
        for i in range(strategy.num_replicas_in_sync)
    ]

    def sums(strategy, x):
        return mr.PerReplica([[float(part.sum()) for part in x.values]] * len(given))

    ordered = [make(np.ascontiguousarray(ORDERS[name](array))) for array in given]
    expected = [float(array.sum()) for array in ordered]
    for found in merged(strategy, sums, lambda i: (ORDERS[name](make(given[i])),)):
        assert found == expected


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("kind", ["numpy", "torch", "recorded"])
def test_what_merge_fn_writes_into_an_argument_is_in_that_of_the_replica_in_whatever_order(
    strategy, kind, name
):
    torch = None if kind == "numpy" else pytest.importorskip("torch")

    def double(strategy, x, again, other):
        for part in x.values:
            part *= 2
        return x, again, other

    def step():
        whole = np.ones((4, 6)) if torch is None else torch.ones((4, 6), dtype=torch.float64)
        mine, other = ORDERS[name](whole), ORDERS[name](whole + 0)
        if kind == "recorded":
            mine = mine.detach().requires_grad_()
        found = mr.get_replica_context().merge_call(double, (mine, mine, other))
        is_own = [a is b for a, b in zip(found, (mine, mine, other), strict=True)]
        with contextlib.nullcontext() if torch is None else torch.no_grad():
            return is_own, float(whole.sum()), float(mine.sum()), float(other.sum())

    size = ORDERS[name](np.ones((4, 6))).size
    found = strategy.experimental_local_results(strategy.run(step))
    for is_own, *sums in found:
        assert is_own == [True] * 3
        assert sums == [24 + size, 2 * size, size]


def test_what_merge_fn_writes_into_an_expanded_tensor_is_in_that_of_the_replica(strategy):
    torch = pytest.importorskip("torch")

    def fill(strategy, x):
        for i, part in enumerate(x.values):
            part.fill_(i + 1)

    def step():
        mine = torch.zeros(2, 1).expand(2, 3)
        mr.get_replica_context().merge_call(fill, (mine,))
        return float(mine.sum())

    found = strategy.experimental_local_results(strategy.run(step))
    assert found == tuple([6.0 * (i + 1) for i in strategy.local_replica_ids])


def test_an_argument_in_another_order_that_can_not_be_written_is_so_in_merge_fn(strategy):
    def step():
        mine = np.ones((2, 3)).T
        mine.flags.writeable = False
        mr.get_replica_context().merge_call(write, (mine,))

    def write(strategy, x):
        for i in strategy.local_replica_ids:
            x.values[i][...] = 2.0

    error = raises_everywhere(ValueError, lambda: strategy.run(step))
    assert "read-only" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("size", [4, 2 * LARGE])
def test_bfloat16_stays_bfloat16(strategy, library, size):
    zeros = library.as_bfloat16(library.array(np.zeros(size)))

    def check(strategy, x):
        for i, part in enumerate(x.values):
            assert part.dtype == zeros.dtype
            np.testing.assert_array_equal(library.as_float32(part), np.full(size, i + 0.5))

    merged(strategy, check, lambda i: (zeros + (i + 0.5),))


def test_large_arrays_come_when_they_are_looked_at(strategy, library):
    texts = []

    def look(strategy, x):
        texts[:] = [repr(x)]
        return [float(part[-1]) for part in x.values]

    count = strategy.num_replicas_in_sync
    for last in merged(strategy, look, lambda i: (library.array(np.full(LARGE, i)),)):
        assert last == list(range(count))
    for i in range(count):
        is_local = i in strategy.local_replica_ids
        assert (f"<replica {i}: not gathered>" in texts[0]) != is_local


@pytest.mark.parametrize("size", [100, LARGE])
def test_a_merge_fn_that_reduces_sends_as_many_bytes_as_with_numpy_arrays(
    strategy, library, size, monkeypatch
):
    # Each header as if its call came for the first time.
    monkeypatch.setattr(strategy.engine.agreement.sizes, "learn", lambda payload_bytes: None)

    def total(strategy, x):
        return strategy.reduce("SUM", x, axis=None)

    count = strategy.num_replicas_in_sync
    sent = []
    for array in (np.full(size, 1, "f4"), library.array(np.full(size, 1))):
        make = lambda i, array=array: (array,)  # noqa: E731
        merged(strategy, total, make)  # the first one plans
        _, sent_bytes = cost_of(strategy, lambda make=make: merged(strategy, total, make))
        sent.append(sent_bytes)
    assert sent[1] <= sent[0] + 64  # which library's it is
    for found in merged(strategy, total, make):
        library.holds(found, np.full(size, count))


def test_arrays_travel_as_their_bytes_and_are_not_pickled(library):
    values = np.arange(6, dtype="f4").reshape(2, 3)
    (entry,), data = pack([library.array(values)])
    assert data == values.tobytes()
    assert not any(isinstance(item, bytes) for item in entry)


@pytest.mark.parametrize("form", ["sparse", "empty", "recorded"])
def test_tensors_of_any_form_come_back_as_their_own_and_others_as_copies(strategy, form):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    forms = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "empty": lambda: torch.empty(0),
        "recorded": lambda: torch.ones(2, requires_grad=True) * 2,
    }

    def step():
        mine = forms[form]()
        merge_call = mr.get_replica_context().merge_call
        same = merge_call(lambda s, x: x, (mine,))
        first = merge_call(lambda s, x: s.experimental_local_results(x)[0], (mine,))
        return same is mine, first.requires_grad, first.layout == mine.layout

    results = strategy.experimental_local_results(strategy.run(step))
    for i, found in zip(strategy.local_replica_ids, results, strict=True):
        assert found == (True, form == "recorded" and i == 0, True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["rows", "columns"])
@pytest.mark.parametrize("again", [True, False], ids=["its own", "that of the next"])
def test_replicas_may_pass_parts_of_one_tensor_that_share_no_element(strategy, form, dtype, again):
    """What is given back is the argument on every layout; what is another one's is not."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    count = strategy.num_replicas_in_sync
    whole = torch.zeros(count, count, dtype=getattr(torch, dtype))

    def merge(strategy, x):
        values = strategy.experimental_local_results(x)
        return x if again else mr.PerReplica([*values[1:], values[0]])

    def step():
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        mine = (whole if form == "rows" else whole.T)[i]
        mine.fill_(i)
        found = ctx.merge_call(merge, (mine,))
        number = float(found[0])
        ctx.all_reduce("SUM", 0)  # all replicas are here
        found += 100
        ctx.all_reduce("SUM", 0)
        return found is mine, number, float(mine[0])

    results = strategy.experimental_local_results(strategy.run(step))
    for i, found in zip(strategy.local_replica_ids, results, strict=True):
        if again or count == 1:
            assert found == (True, i, i + 100)
        else:
            assert found == (False, (i + 1) % count, i)


def test_each_replica_may_write_into_what_merge_fn_returned(strategy, library):
    library.needs_writable_arrays()

    def step():
        total = mr.get_replica_context().merge_call(
            lambda strategy, x: strategy.reduce("SUM", x, axis=None), (library.array([1.0]),)
        )
        total += 1 + replica_id()
        return total

    found = strategy.experimental_local_results(strategy.run(step))
    for i, total in zip(strategy.local_replica_ids, found, strict=True):
        library.holds(total, [strategy.num_replicas_in_sync + 1 + i])


def test_a_result_of_merge_fn_that_differs_between_ranks_is_an_error(strategy, library):
    needs_two_ranks(strategy)

    def step():
        context = mr.get_replica_context()
        context.merge_call(lambda strategy: library.array([strategy.rank]))
        context.all_reduce("SUM", 1.0)

    error = raises_everywhere(CollectiveMismatchError, lambda: strategy.run(step))
    assert "merge_fn must return the same on all ranks" in str(error)
    check_works(strategy)


def test_replicas_may_mix_libraries(strategy, library):
    def kinds(strategy, x):
        return [isinstance(part, library.type) for part in x.values]

    def make(i):
        return (library.array([1.0]) if i % 2 else np.ones(1, "f4"),)

    for found in merged(strategy, kinds, make):
        assert found == [i % 2 == 1 for i in range(strategy.num_replicas_in_sync)]


@pytest.mark.parametrize("size", [2, LARGE])
@pytest.mark.parametrize("records", [True, False])
def test_what_torch_records_is_constant_in_merge_fn_on_all_ranks(strategy, size, records):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def need_gradients(strategy, x, weight):
        return [[part.requires_grad for part in each.values] for each in (x, weight)]

    def step():
        x = torch.ones(size, requires_grad=replica_id() % 2 == 1)
        weight = torch.nn.Parameter(torch.ones(size))
        with torch.set_grad_enabled(records):
            return mr.get_replica_context().merge_call(need_gradients, (x, weight))

    count = strategy.num_replicas_in_sync
    for found in strategy.experimental_local_results(strategy.run(step)):
        some = [i % 2 == 1 and not records for i in range(count)]
        assert found == [some, [not records] * count]


def test_torch_tensors_that_hold_more_than_numbers_arrive_pickled(strategy):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def check(strategy, sparse):
        for i, part in enumerate(sparse.values):
            assert part.is_sparse
            assert part.to_dense().tolist() == [[i, 0], [0, i]]

    merged(strategy, check, lambda i: ((torch.eye(2) * i).to_sparse(),))


def test_random_keys_of_jax_arrive_pickled(strategy):
    jax = pytest.importorskip("jax", reason="jax is not installed")

    def check(strategy, key):
        for i, part in enumerate(key.values):
            assert (jax.random.key_data(part) == jax.random.key_data(jax.random.key(i))).all()

    merged(strategy, check, lambda i: (jax.random.key(i),))


def test_a_merge_fn_leaves_nothing_of_the_options_of_its_step(strategy):
    """It runs in a thread that other runs, and the program, go on in."""
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def options():
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def step():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return mr.get_replica_context().merge_call(lambda strategy: options())

    assert set(strategy.gather_objects(strategy.run(step))) == {(False, True)}
    assert {options(), *strategy.gather_objects(strategy.run(options))} == {(True, False)}


def test_weak_arrays_of_jax_come_out_of_merge_call_as_strong_ones_on_every_layout(strategy):
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")

    def both(strategy, x):
        parts = strategy.experimental_local_results(x)
        assert not [part for part in parts if part.weak_type]
        assert {(part + np.float16(1)).dtype for part in parts} == {np.dtype("f4")}
        return x, parts[0]

    for shape in ((), (3,), (LARGE,)):
        for mine, first in merged(strategy, both, lambda i, s=shape: (jnp.full(s, float(i)),)):
            assert not mine.weak_type
            assert not first.weak_type
            np.testing.assert_array_equal(first, np.zeros(shape))


def test_weak_arrays_of_jax_are_strong_in_a_merge_fn_without_a_strategy():
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    context = mr.get_replica_context()
    assert not context.merge_call(lambda strategy, x: x.weak_type, args=(jnp.asarray(2.0),))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "complex32"])
def test_tensors_of_dtypes_that_numpy_does_not_know_are_refused_on_every_layout(strategy, dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def call():
        tensor = torch.ones(2 + replica_id()).to(getattr(torch, dtype))
        mr.get_replica_context().merge_call(lambda strategy, x: None, ({"a": tensor},))

    error = raises_everywhere(TypeError, lambda: strategy.run(call))
    assert "merge_call got Tensor for value[0][0]['a'], which can't travel" in str(error)
    assert f"torch.{dtype}" in str(error)
    assert "tensor.to(torch." in str(error)
    check_works(strategy)


@pytest.mark.parametrize("kind", ["plain", "recorded", "bfloat16", "with numpy"])
def test_tensors_that_share_memory_are_each_their_own_in_merge_fn(strategy, kind):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def write_first(strategy, first, second, third, fourth):
        for i, one in enumerate(strategy.experimental_local_results(first)):
            one[0] += i + 1
        others = [*strategy.experimental_local_results(second)]
        others += strategy.experimental_local_results(third)
        total = float(sum([one.sum() for one in others]))
        return total, first, second, third, fourth

    def step():
        x = torch.ones(3, 4, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float64)
        x.requires_grad_(kind == "recorded")
        first = x.detach().numpy() if kind == "with numpy" else x
        given = first, x, x.T[1:], x[:2]
        total, *found = mr.get_replica_context().merge_call(write_first, given)
        x = x.detach()
        are_given = [one is mine for one, mine in zip(found, given, strict=True)]
        return total, are_given, x[0].double().numpy(), x[1:].double().numpy()

    expected = (12.0 + 9) * strategy.num_replicas_in_sync
    found = strategy.experimental_local_results(strategy.run(step))
    for i, (total, are_given, row, rest) in zip(strategy.local_replica_ids, found, strict=True):
        assert total == expected
        assert are_given == [True] * 4
        np.testing.assert_array_equal(row, np.full(4, i + 2.0))
        np.testing.assert_array_equal(rest, np.ones((2, 4)))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_arrays_without_dimensions_that_are_given_twice_are_written_each_by_itself(strategy, kind):
    torch = None if kind == "numpy" else pytest.importorskip("torch")

    def write(strategy, first, second):
        for i, one in enumerate(strategy.experimental_local_results(second)):
            one += i + 1
        return [float(one) for one in strategy.experimental_local_results(first)]

    def step():
        mine = np.zeros(()) if torch is None else torch.zeros(())
        return mr.get_replica_context().merge_call(write, (mine, mine)), float(mine)

    found = strategy.experimental_local_results(strategy.run(step))
    for i, (firsts, value) in zip(strategy.local_replica_ids, found, strict=True):
        assert list(firsts) == [0.0] * strategy.num_replicas_in_sync
        assert value == i + 1


@pytest.mark.parametrize("recorded", [False, True])
def test_tensors_in_one_memory_that_replicas_of_a_rank_give_are_each_their_own(strategy, recorded):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    table = torch.ones(8, 2)

    def add_id(strategy, x):
        for i, one in enumerate(strategy.experimental_local_results(x)):
            one += i
        return x, [float(one.sum()) for one in strategy.experimental_local_results(x)]

    def step():
        mine = table[1:].requires_grad_() if recorded else table[1:]
        found, sums = mr.get_replica_context().merge_call(add_id, (mine,))
        return found.detach().numpy().copy(), sums

    count = strategy.num_replicas_in_sync
    found = strategy.experimental_local_results(strategy.run(step))
    for i, (values, sums) in zip(strategy.local_replica_ids, found, strict=True):
        assert sums == [14.0 * (1 + j) for j in range(count)]
        np.testing.assert_array_equal(values, np.full((7, 2), 1.0 + i))


def test_a_tensor_that_replicas_of_a_rank_give_and_get_back_unchanged_keeps_its_graph(strategy):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weight = torch.ones(3, requires_grad=True)

    def step():
        mine = weight * 1
        found = mr.get_replica_context().merge_call(lambda strategy, *x: x, (mine, weight))
        return torch.autograd.grad((found[0] + found[1]).sum(), weight)[0].numpy()

    for gradient in strategy.experimental_local_results(strategy.run(step)):
        np.testing.assert_array_equal(gradient, np.full(3, 2.0))


def test_gradients_that_a_merge_fn_sets_are_those_of_the_replicas_parameters(strategy):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def set_gradients(strategy, weight):
        for i, one in enumerate(strategy.experimental_local_results(weight)):
            one.grad = torch.full((2,), i + 1.0)

    def step():
        weight = torch.nn.Parameter(torch.zeros(2))
        with torch.no_grad():
            mr.get_replica_context().merge_call(set_gradients, (weight,))
        return weight.grad.numpy()

    found = strategy.experimental_local_results(strategy.run(step))
    for i, gradient in zip(strategy.local_replica_ids, found, strict=True):
        np.testing.assert_array_equal(gradient, np.full(2, i + 1.0))


@pytest.mark.parametrize("kind", ["conj", "neg", "needs gradients"])
def test_tensors_are_alike_on_all_ranks_whatever_they_are_where_they_come_from(strategy, kind):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def look(strategy, x):
        return [
            (one.is_conj(), one.is_neg(), one.requires_grad, one.tolist())
            for one in strategy.experimental_local_results(x)
        ]

    def step():
        z = torch.tensor([1 + 2j, 3 + 4j])
        with torch.no_grad():
            if kind == "needs gradients":
                mine = torch.ones(2, 2).T[:, :1].requires_grad_()
            else:
                mine = z.conj() if kind == "conj" else z.conj().imag
            return mr.get_replica_context().merge_call(look, (mine,))

    values = {"conj": [1 - 2j, 3 - 4j], "neg": [-2.0, -4.0], "needs gradients": [[1.0], [1.0]]}
    expected = (False, False, kind == "needs gradients", values[kind])
    for found in strategy.experimental_local_results(strategy.run(step)):
        assert list(found) == [expected] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_tensors_that_were_made_outside_come_alone_into_a_merge_fn(strategy, dtype):
    """And not with all that they are views of."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dtype = getattr(torch, dtype)

    def step():
        i = mr.get_replica_context().replica_id_in_sync_group
        return torch.full((1000, 2), 1.0 + i, dtype=dtype).requires_grad_()[:3]

    outside = strategy.run(step)

    def look(strategy):
        found = strategy.experimental_local_results(outside)
        for i, one in enumerate(found):
            assert (one == 1 + i).all()
            assert one.shape == (3, 2)
            assert one.dtype == dtype
            assert one.requires_grad == (len(found) == 1)  # no graph comes from other replicas
            if i not in strategy.local_replica_ids:
                assert one.untyped_storage().nbytes() == 6 * dtype.itemsize
        return len(found)

    found = strategy.run(lambda: mr.get_replica_context().merge_call(look))
    count = strategy.num_replicas_in_sync
    assert set(strategy.experimental_local_results(found)) == {count}


@pytest.mark.parametrize("is_written", [False, True])
def test_a_tensor_that_nobody_wrote_keeps_its_graph_where_others_were_written(strategy, is_written):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weight, table = torch.ones(3, requires_grad=True), torch.zeros(4)

    def write(strategy, same, again, window):
        for i, one in enumerate(strategy.experimental_local_results(window)):
            one += i + 1
        if is_written:
            for i, one in enumerate(strategy.experimental_local_results(same)):
                one[0] += i
        return same

    def step():
        given = weight * 1
        found = mr.get_replica_context().merge_call(write, (given, given, table[1:]))
        shared = mr.get_replica_context().merge_call(write, (weight, weight, table[1:]))
        gradient = torch.autograd.grad((found + shared).sum(), weight)[0]
        return gradient.numpy(), found.detach().numpy()

    found = strategy.experimental_local_results(strategy.run(step))
    for i, (gradient, values) in zip(strategy.local_replica_ids, found, strict=True):
        np.testing.assert_array_equal(gradient, np.full(3, 2.0))
        np.testing.assert_array_equal(values, [1.0 + i * is_written, 1, 1])


def test_parts_of_a_split_tensor_are_written_back(strategy):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def add(strategy, whole, low, high):
        for i, one in enumerate(strategy.experimental_local_results(low)):
            one += i
        for one in strategy.experimental_local_results(high):
            one += 1

    def step():
        with torch.no_grad():
            mine = torch.ones(4, requires_grad=True)
            mr.get_replica_context().merge_call(add, (mine, *mine.split(2)))
            return mine.detach().numpy()

    found = strategy.experimental_local_results(strategy.run(step))
    for i, values in zip(strategy.local_replica_ids, found, strict=True):
        np.testing.assert_array_equal(values, [1.0 + i, 1 + i, 2, 2])
