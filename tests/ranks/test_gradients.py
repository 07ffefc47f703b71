"""Gradients through all_reduce and all_gather: of the sum of the losses of all replicas.

The rows of the table are what TensorFlow does (MirroredStrategy), for any number of replicas.
"""

import itertools

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import holds_everywhere
from gradient_programs import (
    OPS,
    Gathered,
    Reduced,
    as_numpy,
    check_gradients,
    differentiated,
    replica_id,
    results,
    same,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

WIDE = ["float32", "float64", "complex64", "complex128"]
NARROW = ["float16", "bfloat16"]


def needs(values, dtype=torch.float64):
    """A tensor that needs gradients."""
    return torch.tensor(np.asarray(values), dtype=dtype).requires_grad_()


def weight(i):
    return 10.0**i


def weights(count):
    return sum(map(weight, range(count)))


def first(extents, i):
    """The first place of replica i in what is gathered."""
    return sum(extents[:i])


# By name: the leaves of replica i, its loss, and the gradients that it must get, of (i, count).


def start(i, count):
    return [i + 2.0]


def square(context, i, x):
    return context.all_reduce("SUM", x * x)


def uses_one_leaf_of_two(context, i, a, b):
    return weight(i) * context.all_reduce("SUM", {"a": a, "b": b})["a"]


def uses_a_or_b(context, i, a, b):
    return weight(i) * context.all_reduce("SUM", {"a": a, "b": b})["b" if i else "a"]


def one_call_in_another(context, i, a, b):
    y = context.all_reduce("SUM", a)
    return weight(i) * y * context.all_reduce("MEAN", b * y)


def of_one_call_in_another(i, count):
    total, mean = sum(range(1, count + 1)), np.mean([k + 5 for k in range(count)])
    return [2 * weights(count) * total * mean, weights(count) * total**2 / count]


def downstream(i, shape):
    return weight(i) * torch.arange(1.0, np.prod(shape) + 1, dtype=torch.float64).reshape(shape)


def gathers(axis):
    def loss(context, i, *leaves):
        found = context.all_gather(list(leaves), axis)
        return sum((downstream(i, y.shape) * y).sum() for y in found)

    return loss


def gathered(axis, *shapes):
    """What comes back to replica i, where replica k has a leaf of each ``shape(k)``."""

    def gradients(i, count):
        found = []
        for shape in shapes:
            extents = [shape(k)[axis] for k in range(count)]
            whole = list(shape(i))
            whole[axis] = sum(extents)
            places = np.arange(1, np.prod(whole) + 1).reshape(whole)
            mine = np.arange(first(extents, i), first(extents, i + 1))
            found.append(weights(count) * places.take(mine, axis))
        return found

    def leaves(i, count):
        return [np.ones(shape(i)) for shape in shapes]

    return leaves, gathers(axis), gradients


TABLE = {
    "SUM": (
        start,
        lambda context, i, x: weight(i) * square(context, i, x),
        lambda i, count: [weights(count) * 2 * (i + 2)],
    ),
    "MEAN": (
        start,
        lambda context, i, x: weight(i) * context.all_reduce("MEAN", x * x),
        lambda i, count: [weights(count) / count * 2 * (i + 2)],
    ),
    "one leaf of two is used": (
        lambda i, count: [1.0 + i, 2.0],
        uses_one_leaf_of_two,
        lambda i, count: [weights(count), 0],
    ),
    "replicas use other leaves": (
        lambda i, count: [1.0 + i, 2.0],
        uses_a_or_b,
        lambda i, count: [1.0, weights(count) - 1],
    ),
    "one call in another": (
        lambda i, count: [i + 1.0, i + 5.0],
        one_call_in_another,
        of_one_call_in_another,
    ),
    "gather": gathered(0, lambda i: (1,)),
    "gather uneven": gathered(0, lambda i: (i + 1,)),
    "gather, replica 0 is empty": gathered(0, lambda i: (i,)),
    "gather, only replica 0 has rows": gathered(0, lambda i: (0 if i else 3, 2)),
    "gather, nobody has rows": gathered(0, lambda i: (0, 2)),
    "gather along axis 1": gathered(1, lambda i: (2, 1)),
    "gather along axis 1, uneven": gathered(1, lambda i: (2, i + 1)),
    "gather along the last axis": gathered(-1, lambda i: (2, 2, i)),
    "gather along a negative axis": gathered(-2, lambda i: (2, i + 1, 3)),
    "gather of a nest": gathered(0, lambda i: (1,), lambda i: (2, 3), lambda i: (i + 1, 2)),
    "gather of many rows": gathered(0, lambda i: (4000 * i + 1, 3), lambda i: (2,)),
    "gather of many columns": gathered(1, lambda i: (3, 4000 * i + 1)),
    "upstream 2": (
        start,
        lambda context, i, x: 2 * weight(i) * square(context, i, x),
        lambda i, count: [weights(count) * 4 * (i + 2)],
    ),
    "zero times": (
        start,
        lambda context, i, x: 0 * square(context, i, x),
        lambda i, count: [0],
    ),
    "used by one replica's loss alone": (
        start,
        lambda context, i, x: (i == 0) * square(context, i, x),
        lambda i, count: [2 * (i + 2)],
    ),
    "a constant total": (
        start,
        lambda context, i, x: weight(i) * context.all_reduce("SUM", x).detach() * x,
        lambda i, count: [weight(i) * sum(k + 2 for k in range(count))],
    ),
    "loss over a global count": (  # R times the part of replica i
        lambda i, count: [3.0],
        lambda context, i, w: (
            context.all_reduce("SUM", w * (i + 1)) / context.all_reduce("SUM", i + 1)
        ),
        lambda i, count: [count * (i + 1) / sum(range(1, count + 1))],
    ),
    "mean over the rows of all": (
        start,
        lambda context, i, x: weight(i) * mr.mean_over_global_batch(x * x, rows=i + 1),
        lambda i, count: [weights(count) * 2 * (i + 2) / sum(range(1, count + 1))],
    ),
    "the same leaf twice in a nest": (
        start,
        lambda context, i, x: sum(context.all_reduce("SUM", [x, x])),
        lambda i, count: [2 * count],
    ),
    "used twice": (
        start,
        lambda context, i, x: (lambda y: y * y + y)(context.all_reduce("SUM", x)),
        lambda i, count: [count * (2 * sum(k + 2 for k in range(count)) + 1)],
    ),
    "the issue's first program": (
        lambda i, count: [1.0 + i],
        lambda context, i, x: (lambda m: (x - m) ** 2 + x * m)(context.all_reduce("MEAN", x)),
        lambda i, count: [2 * (i + 1 - (count + 1) / 2) + (count + 1) / 2 + (count + 1) / 2],
    ),
}


@pytest.mark.parametrize("row", TABLE)
def test_a_row_of_the_table(strategy, row):
    make, loss, expected = TABLE[row]
    count = strategy.num_replicas_in_sync

    def step():
        i = replica_id()
        leaves = [needs(leaf) for leaf in make(i, count)]
        mine = loss(mr.get_replica_context(), i, *leaves)
        mine.backward()
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    for i, found in results(strategy, step).items():
        for one, other in zip(found, expected(i, count), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_the_first_program_of_the_issue_gives_two_on_two_replicas():
    make, _, expected = TABLE["the issue's first program"]
    assert make(0, 2) == [1.0]
    assert expected(0, 2) == [2.0]


def test_gradients_of_gradients_are_those_of_the_table(strategy):
    count = strategy.num_replicas_in_sync

    def step():
        i = replica_id()
        found = []
        for power, outside in ((1, 2), (3, 1)):
            x = needs(i + 2.0)
            loss = weight(i) * mr.get_replica_context().all_reduce("SUM", x**power) ** outside
            (once,) = torch.autograd.grad(loss, x, create_graph=True)
            found.append((once.item(), torch.autograd.grad(once, x)[0].item()))
        return found

    total, all_weights = sum(k + 2 for k in range(count)), weights(count)
    for i, found in results(strategy, step).items():
        squared = (2 * all_weights * total, 2 * all_weights * count)
        cubed = (3 * all_weights * (i + 2) ** 2, 6 * all_weights * (i + 2))
        np.testing.assert_allclose(found, [squared, cubed])


# What leaves are, and how they lie in memory

VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1),
    "expanded scalar": lambda x: x[0, 0].expand(3, 2),
    "0-d": lambda x: x[1, 2],
    "one element": lambda x: x[1:, 2:3],
    "empty": lambda x: x[:0],
    "large": lambda x: x.repeat(3000, 2),
    "Parameter": torch.nn.Parameter,
}
COMPLEX_VIEWS = {
    "conjugate": torch.conj,
    "imaginary part": lambda x: x.imag,
    "of the conjugate": lambda x: x.conj().imag,
}


def data(dtype, i):
    """Small whole numbers: other ones for each replica, also ties and zeros."""
    random = np.random.default_rng([i, 7])
    whole = random.integers(-2, 3, (3, 4))
    if dtype.startswith("complex"):
        whole = whole + 1j * random.integers(-2, 3, (3, 4))
    return needs(whole, getattr(torch, dtype))


def small(i, y):
    """A loss of small whole numbers."""
    factors = torch.arange(y.numel()).reshape(y.shape) % 3 + i + 1
    if y.is_complex():
        factors = factors * (1 - 2j)
    return (
        (factors.to(y.dtype) * y).real.sum() if y.is_complex() else (factors.to(y.dtype) * y).sum()
    )


@pytest.mark.parametrize("dtype", WIDE + NARROW)
@pytest.mark.parametrize("op", OPS)
def test_all_reduce_of_each_dtype_however_it_lies_in_memory(strategy, op, dtype):
    is_complex = dtype.startswith("complex")
    if is_complex and op in ("MIN", "MAX"):
        pytest.skip("complex numbers have no order")
    for name, view in (VIEWS | (COMPLEX_VIEWS if is_complex else {})).items():
        if name == "Parameter" and dtype != "float32":
            continue

        def program(i, x, view=view):
            y = yield Reduced(op, view(x) if view is not torch.nn.Parameter else x)
            return small(i, y)

        def leaves_of(i, view=view):
            x = data(dtype, i)
            return [view(x.detach())] if view is torch.nn.Parameter else [x]

        rtol = 3e-2 if dtype in NARROW else 1e-5
        check_gradients(strategy, program, leaves_of, about=name, rtol=rtol)


@pytest.mark.parametrize("dtype", WIDE + NARROW)
def test_all_gather_of_each_dtype_however_it_lies_in_memory(strategy, dtype):
    views = VIEWS | (COMPLEX_VIEWS if dtype.startswith("complex") else {})
    for name, axis in itertools.product(views, (0, -1)):
        if name in ("0-d", "Parameter"):
            continue

        def program(i, x, view=views[name], axis=axis):
            y = yield Gathered(view(x), axis)
            return small(i, y)

        def leaves_of(i):
            return [data(dtype, i)]

        check_gradients(strategy, program, leaves_of, about=f"{name}, axis {axis}", rtol=1e-2)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_an_extremum_gives_its_gradient_to_who_has_it_and_ties_share_it(strategy, op):
    count = strategy.num_replicas_in_sync

    def step():
        i = replica_id()
        # all have it; each has it once; the first half and the last one; the last one
        x = needs([7.0, (i + 1) % count, i % 2, i if op == "MAX" else -i])
        y = mr.get_replica_context().all_reduce(op, x)
        (weight(i) * y).sum().backward()
        return x.grad

    who = (lambda values: max(values)) if op == "MAX" else (lambda values: min(values))
    for i, found in results(strategy, step).items():
        columns = [
            [7] * count,
            [(k + 1) % count for k in range(count)],
            [k % 2 for k in range(count)],
            [k if op == "MAX" else -k for k in range(count)],
        ]
        expected = [
            (values[i] == who(values)) * weights(count) / values.count(who(values))
            for values in columns
        ]
        np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_a_product_with_factors_of_zero_has_the_right_gradient(strategy, zeros):
    def program(i, x):
        y = yield Reduced("PROD", x)
        return small(i, y)

    def leaves_of(i):
        values = np.arange(1.0, 5.0) + i
        values[0] *= i >= zeros  # of the first replicas
        values[1] *= strategy.num_replicas_in_sync - 1 - i >= zeros  # of the last ones
        return [needs(values)]

    check_gradients(strategy, program, leaves_of)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e200])
def test_the_gradient_of_a_product_is_the_product_of_all_others_whatever_they_are(strategy, odd):
    """Also that of replicas with NaN, infinity and zeros: so what is NaN can't be hidden."""
    count = strategy.num_replicas_in_sync

    def factors(i):
        last, middle = count - 1, count // 2
        one, zero = [i + 2.0, 0.0][:: 1 if i == 0 else -1]
        return needs(
            [
                odd if i == 0 else i + 2.0,
                odd if i == last else zero,
                odd if i == middle else 0.0,
                odd if i in (0, last) else one,
                odd if i == 0 else -odd,
            ]
        )

    def step():
        x = factors(replica_id())
        y = mr.get_replica_context().all_reduce("PROD", x)
        (weight(replica_id()) * y).sum().backward()
        return x.grad

    of_all = np.stack([as_numpy(factors(i)) for i in range(count)])
    found = results(strategy, step)

    def check():
        for i, gradient in found.items():
            with np.errstate(invalid="ignore", over="ignore"):
                others = np.delete(of_all, i, 0).prod(0)
                np.testing.assert_allclose(gradient, weights(count) * others, rtol=1e-12)

    holds_everywhere(check)


# What is recorded


def recorded(value):
    """Whether torch has recorded how a value came to be."""
    return value.requires_grad


def test_results_are_recorded_exactly_where_torch_would_record(strategy):
    def step():
        context, i = mr.get_replica_context(), replica_id()
        x = needs([1.0 + i])
        nest = {
            "needs": x * 2,
            "leaf": x,
            "constant": torch.ones(1),
            "detached": x.detach(),
            "integers": torch.tensor([i]),
            "complex": torch.ones(1, dtype=torch.complex64, requires_grad=True),
        }
        calls = [
            lambda: context.all_reduce("SUM", nest),
            lambda: context.all_reduce("MEAN", nest),
            lambda: context.all_gather(nest, 0),
        ]
        found = []
        for call in calls:
            found.append(call())
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    constant = call()
                    assert not any(map(recorded, constant.values()))
                    assert all(one.grad_fn is None for one in constant.values())
            with torch.no_grad(), torch.enable_grad():
                found.append(call())
            with torch.set_grad_enabled(False):
                assert not recorded(call()["needs"])
        return found

    for found in results(strategy, step).values():
        for nest in found:
            assert {name for name, one in nest.items() if recorded(one)} == {
                "needs",
                "leaf",
                "complex",
            }
            for one in nest.values():
                assert (one.grad_fn is not None) == recorded(one) == (not one.is_leaf)


def test_bools_and_integers_are_never_recorded(strategy):
    def step():
        context = mr.get_replica_context()
        x = needs([1.0])
        found = context.all_reduce("MAX", [x, x > 0, torch.tensor([3]), 2, np.ones(1, "i4")])
        means = context.all_reduce("MEAN", [x, torch.tensor([3 + replica_id()])])
        sum(y.sum() for y in (found[0], means[0])).backward()
        return found, means, x.grad

    count = strategy.num_replicas_in_sync
    for found, means, gradient in results(strategy, step).values():
        assert [isinstance(one, torch.Tensor) for one in found] == [True] * 3 + [False] * 2
        assert not recorded(found[1])
        assert not recorded(found[2])
        assert found[1].dtype == torch.bool
        assert found[3] == 2
        assert type(found[4]) is np.ndarray
        assert not recorded(means[1])
        assert means[1].item() == 3 + (count - 1) / 2
        np.testing.assert_allclose(gradient, [2])  # 1 of MAX, where all tie, and 1 of MEAN


def test_a_nest_holds_leaves_of_all_kinds_and_each_comes_back_as_it_was(strategy):
    def step():
        context, i = mr.get_replica_context(), replica_id()
        x, z = needs([1.0 + i, 2.0]), needs(np.full((2, 3), i), torch.float32)
        nest = {
            "x": (x, 3, np.full(2, i)),
            "y": [1.5, torch.full((2,), i), {"z": z.T, "none": torch.ones(3, 0)}],
        }
        found = context.all_reduce("SUM", nest)
        loss = weight(i) * (found["x"][0].sum() + 2 * found["y"][2]["z"].sum())
        loss.backward()
        rows = context.all_gather([x, np.full(2, i), torch.full((i,), i)], 0)
        return found, x.grad, z.grad, rows

    count = strategy.num_replicas_in_sync
    ids = range(count)
    for found, x, z, rows in results(strategy, step).values():
        assert found["x"][0].tolist() == [sum(i + 1 for i in ids), 2 * count]
        assert found["x"][1] == 3 * count
        assert type(found["x"][2]) is np.ndarray
        assert type(found["y"][0]) is np.float64
        assert not recorded(found["y"][1])
        assert found["y"][2]["none"].shape == (3, 0)
        assert found["y"][2]["z"].shape == (3, 2)
        np.testing.assert_allclose(x, np.full(2, weights(count)))
        np.testing.assert_allclose(z, np.full((2, 3), 2 * weights(count)))
        assert recorded(rows[0])
        assert type(rows[1]) is np.ndarray
        assert rows[2].tolist() == [i for i in ids for _ in range(i)]


def test_a_value_that_all_replicas_were_given_stands_for_each_ones_own(strategy):
    given = strategy.experimental_distribute_values_from_function(
        lambda context: needs([1.0 + context.replica_id_in_sync_group])
    )

    def step():
        y = mr.get_replica_context().all_reduce("SUM", {"x": given})["x"]
        (weight(replica_id()) * y).sum().backward()

    strategy.run(step)
    for one in strategy.experimental_local_results(given):
        np.testing.assert_allclose(one.grad, [weights(strategy.num_replicas_in_sync)])


# Backward, more than once


def test_a_second_way_back_adds_to_the_first(strategy):
    def step():
        i = replica_id()
        x = needs(1.0 + i)
        y = mr.get_replica_context().all_reduce("SUM", x * x)
        loss = weight(i) * y
        loss.backward(retain_graph=True)
        once = x.grad.clone()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return once, x.grad

    count = strategy.num_replicas_in_sync
    for i, (once, twice) in results(strategy, step).items():
        np.testing.assert_allclose(once, 2 * (i + 1) * weights(count))
        np.testing.assert_allclose(twice, 2 * once)


def test_two_losses_of_one_result_and_gradients_that_add_up(strategy):
    def step():
        context, i = mr.get_replica_context(), replica_id()
        x = needs(1.0 + i)
        for _ in range(3):  # gradient accumulation
            y, z = context.all_reduce("SUM", [x, 2 * x])
            (weight(i) * y).backward(retain_graph=True)
            z.backward()
        return x.grad

    count = strategy.num_replicas_in_sync
    for found in results(strategy, step).values():
        np.testing.assert_allclose(found, 3 * (weights(count) + 2 * count))


def test_gradients_of_some_leaves_or_with_respect_to_results(strategy):
    def step():
        i = replica_id()
        a, b = needs(1.0 + i), needs(2.0)
        y, z = mr.get_replica_context().all_reduce("SUM", (a, b))
        loss = weight(i) * y * z
        (of_a,) = torch.autograd.grad(loss, [a], retain_graph=True)
        of_results = torch.autograd.grad(loss, [y, z], retain_graph=True)  # no call: each its own
        y.retain_grad()
        loss.backward(inputs=[b, y])
        assert a.grad is None
        return of_a, of_results, b.grad, y.grad

    count = strategy.num_replicas_in_sync
    total = sum(k + 1 for k in range(count))
    for i, (of_a, of_results, of_b, of_y) in results(strategy, step).items():
        np.testing.assert_allclose(of_a, weights(count) * 2 * count)
        np.testing.assert_allclose(of_results, [weight(i) * 2 * count, weight(i) * total])
        np.testing.assert_allclose(of_b, weights(count) * total)
        np.testing.assert_allclose(of_y, weight(i) * 2 * count)


def test_each_replica_may_write_into_what_it_got(strategy):
    """Results and gradients are nobody else's memory."""

    def step():
        context, i = mr.get_replica_context(), replica_id()
        x = needs(np.ones(20_000))
        y = context.all_reduce("SUM", x)
        rows = context.all_gather(x[:1], 0)
        assert recorded(y.mul_(1 + i))  # as torch's own operations allow
        (y.sum() + rows.sum()).backward()
        x.grad += i
        return x.grad, y.detach(), x.detach()

    count = strategy.num_replicas_in_sync
    for i, (gradient, y, x) in results(strategy, step).items():
        total = sum(k + 1 for k in range(count))
        assert gradient[0] == total + count + i
        np.testing.assert_array_equal(gradient[1:], np.full(19_999, total + i))
        np.testing.assert_array_equal(y, np.full(20_000, count * (1 + i)))
        np.testing.assert_array_equal(x, np.ones(20_000))


# The same bits


def tree_sum(arrays):
    """Add arrays up along one balanced tree: split at the largest power of two below n."""
    if len(arrays) == 1:
        return arrays[0]
    half = 1 << ((len(arrays) - 1).bit_length() - 1)
    return tree_sum(arrays[:half]) + tree_sum(arrays[half:])


@pytest.mark.parametrize("size", [1, 5, 3000, 40_000])
def test_reproducible_gradients_have_the_same_bits_on_all_layouts(reproducible, size):
    strategy, count = reproducible, reproducible.num_replicas_in_sync

    def upstream(i):
        values = np.random.default_rng([3, i]).standard_normal(size) * 10.0 ** (i % 5)
        return values.astype("f4")

    def step():
        context, i = mr.get_replica_context(), replica_id()
        found = []
        for make in (
            lambda x: context.all_reduce("SUM", x),
            lambda x: context.all_reduce("MEAN", x),
            lambda x: context.all_gather(x, 0)[i * size : (i + 1) * size],
            lambda x: context.all_gather(x, 0)[:size],
            lambda x: context.all_gather(x[None], 1)[0, -size:],
        ):
            x = needs(np.ones(size), torch.float32)
            (make(x) * torch.as_tensor(upstream(i))).sum().backward()
            found.append(np.asarray(x.grad))
        return found

    total = tree_sum([upstream(i) for i in range(count)])

    def check():
        for i, (of_sum, of_mean, own, of_first, of_last) in found.items():
            nothing = np.zeros(size, "f4")
            np.testing.assert_array_equal(of_sum, total)
            np.testing.assert_array_equal(of_mean, total / np.float32(count))
            np.testing.assert_array_equal(own, upstream(i))
            np.testing.assert_array_equal(of_first, nothing if i else total)
            np.testing.assert_array_equal(of_last, nothing if i < count - 1 else total)

    found = results(strategy, step)
    holds_everywhere(check)


def test_options_of_a_call_hold_on_its_way_back(strategy):
    count = strategy.num_replicas_in_sync
    reproducible = mr.CommunicationOptions(reproducible=True, name="mine")

    def upstream(i):
        return np.random.default_rng([3, i]).standard_normal(9000).astype("f4") * 10.0**i

    def step():
        x = needs(np.ones(9000), torch.float32)
        y = mr.get_replica_context().all_reduce("MEAN", [x, 2 * x], reproducible)[0]
        (y * torch.as_tensor(upstream(replica_id()).astype("f4"))).sum().backward()
        return np.asarray(x.grad)

    total = tree_sum([upstream(i).astype("f4") for i in range(count)])
    found = results(strategy, step)

    def check():
        for gradient in found.values():
            np.testing.assert_array_equal(gradient, total / np.float32(count))

    holds_everywhere(check)


def test_where_torch_looks_for_anomalies_gradients_are_the_same(strategy):
    def step():
        x = needs(2.0 + replica_id())
        (weight(replica_id()) * mr.get_replica_context().all_reduce("MAX", x)).backward()
        return x.grad

    count = strategy.num_replicas_in_sync
    with torch.autograd.set_detect_anomaly(True):  # of the process: not inside of a replica
        found = results(strategy, step)
    for i, gradient in found.items():
        assert gradient.item() == (weights(count) if i == count - 1 else 0)


@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_of_narrow_floats_are_added_up_as_wide_ones(strategy, dtype):
    count = strategy.num_replicas_in_sync
    kind = getattr(torch, dtype)

    def step():
        i = replica_id()
        x = needs([1.0], kind)
        factor = torch.tensor([2048.0 if i == 0 else 1.0], dtype=kind)
        (mr.get_replica_context().all_reduce("SUM", x) * factor).sum().backward()
        return x.grad

    expected = torch.tensor([2048.0 + count - 1]).to(kind)
    for found in results(strategy, step).values():
        same(found, expected)
        assert as_numpy(found) == as_numpy(expected)


@pytest.mark.parametrize("dtype", [*NARROW, "float32", "float64"])
def test_means_over_the_global_batch_have_the_same_bits_with_gradients(strategy, dtype):
    def step():
        sums = torch.arange(1, 400, dtype=getattr(torch, dtype)) / 7 + replica_id()
        plain = mr.mean_over_global_batch(sums, rows=70_001)  # more than float16 can hold
        found = mr.mean_over_global_batch(sums.requires_grad_(), rows=70_001)
        return found.requires_grad, torch.equal(found.detach(), plain), found.dtype == sums.dtype

    for found in results(strategy, step).values():
        assert found == (True, True, True)


def test_a_program_with_all_ops_on_one_process_and_on_replicas(strategy):
    """A step of synchronized batch norm, and one of contrasted rows."""

    def program(i, x, w):
        count, total, squares = yield Reduced(
            "SUM", [torch.full((1,), float(len(x)), dtype=x.dtype), x.sum(0), (x * x).sum(0)]
        )
        mean = total / count
        normal = (x - mean) / torch.sqrt(squares / count - mean * mean + 1e-3)
        rows = yield Gathered(normal @ w)
        largest = yield Reduced("MAX", rows.abs().amax(0) + i)
        return torch.logsumexp(normal @ w @ rows.T, -1).sum() + (largest * (i + 1)).sum()

    def leaves_of(i):
        random = np.random.default_rng([i, 1])
        w = np.random.default_rng(5).standard_normal((3, 2))
        return [needs(random.standard_normal((1 + i, 3))), needs(w)]

    check_gradients(strategy, program, leaves_of, rtol=1e-9)
    check_gradients(strategy, program, leaves_of, twice=True, rtol=1e-7)


def test_losses_of_a_replica_without_rows_count_for_nothing_but_its_gradients_are_those_of_all(
    strategy,
):
    def step():
        i = replica_id()
        x = needs(np.ones((i, 2)))
        rows = mr.get_replica_context().all_gather(x, 0)
        loss = weight(i) * rows[: len(x)].sum()
        return differentiated(loss, [x])[0]

    count = strategy.num_replicas_in_sync
    extents = list(range(count))
    expected = np.zeros((sum(extents), 2))
    for i in extents:
        expected[:i] += weight(i)
    for i, found in results(strategy, step).items():
        np.testing.assert_allclose(found, expected[first(extents, i) : first(extents, i + 1)])
