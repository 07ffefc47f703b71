"""Where gradients end: in `out`, in what a merge_fn computes, and outside of replicas."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, raises_everywhere
from gradient_programs import replica_id, results
from mpi_replica.core.array_libraries import to_numpy
from on_a_device import in_memory_of_the_host

torch = pytest.importorskip("torch", reason="torch is not installed")


def weight(i):
    return 10.0**i


def needs(*values):
    return torch.tensor(values, dtype=torch.float64).requires_grad_()


# out


@in_memory_of_the_host
@pytest.mark.parametrize("size", [1, 5, 3000, 100_000])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_out_takes_tensors_and_the_results_are_in_their_memory(strategy, op, size):
    count = strategy.num_replicas_in_sync

    def step():
        mine = torch.arange(size, dtype=torch.float32) % 7 + replica_id()
        nest = {"a": mine, "b": np.full(3, 1.0)}
        out = {"a": torch.empty(size), "b": np.empty(3)}
        view = out["a"].numpy()
        found = mr.get_replica_context().all_reduce(op, nest, out=out)
        assert found["a"] is out["a"]
        assert found["b"] is out["b"]
        assert np.shares_memory(view, out["a"].numpy())
        return view, mine

    factor, more = {
        "SUM": (count, count * (count - 1) / 2),
        "MEAN": (1, (count - 1) / 2),
        "MAX": (1, count - 1),
    }[op]
    for i, (view, mine) in results(strategy, step).items():
        base = np.arange(size, dtype="f4") % 7
        np.testing.assert_array_equal(view, base * factor + more)
        np.testing.assert_array_equal(mine, base + i)


@in_memory_of_the_host
@pytest.mark.parametrize("size", [1, 3000])
def test_gradients_are_reduced_in_place(strategy, size):
    """The ordinary loop: `out` is the value itself."""
    count = strategy.num_replicas_in_sync

    def step():
        model = torch.nn.Linear(size, 2)
        model(torch.full((1, size), 1.0 + replica_id())).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found = mr.get_replica_context().all_reduce("MEAN", gradients, out=gradients)
        assert all(one is other for one, other in zip(found, gradients, strict=True))
        return [parameter.grad for parameter in model.parameters()]

    for weights, bias in results(strategy, step).values():
        np.testing.assert_allclose(weights, np.full((2, size), (count + 1) / 2))
        np.testing.assert_allclose(bias, [1, 1])


@in_memory_of_the_host
def test_memory_of_out_is_written_through_views_of_it(strategy):
    def step():
        memory = torch.zeros(4, 3)
        mr.get_replica_context().all_reduce("SUM", torch.ones(2, 3), out=memory[1:3])
        return memory

    count = strategy.num_replicas_in_sync
    for memory in results(strategy, step).values():
        assert memory.tolist() == [[0] * 3, [count] * 3, [count] * 3, [0] * 3]


# What a replica has, of which torch records nothing. The first six can be `out`, too.
TENSORS = {
    "float32": lambda: torch.arange(5) + replica_id() * 0.5,
    "bfloat16": lambda: (torch.arange(70) + replica_id()).to(torch.bfloat16),
    "integers": lambda: torch.arange(4).reshape(2, 2) * replica_id(),
    "scalar": lambda: torch.tensor(1.5 + replica_id()),
    "nothing": lambda: torch.ones(0, 3),
    "part of a memory": lambda: torch.full((9,), 2.0 + replica_id())[3:7],
    "parameter": lambda: torch.nn.Parameter(torch.ones(3) + replica_id(), requires_grad=False),
    "transposed": lambda: (torch.arange(6.0) + replica_id()).reshape(2, 3).T,
    "conjugate": lambda: torch.full((3,), 1 + 2j * replica_id()).conj(),
    "float": lambda: 0.5 + replica_id(),
}


@pytest.mark.parametrize(
    "names",
    [
        ["float32", "integers", "scalar", "nothing", "part of a memory", "parameter"],
        ["bfloat16"],
        ["parameter", "bfloat16", "float32"],
        ["transposed", "scalar", "bfloat16"],
        ["float32", "conjugate"],
        ["float", "bfloat16", "nothing"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_several_tensors_in_a_call_get_what_each_gets_alone(strategy, names, op):
    names = [name for name in names if op != "MAX" or name != "conjugate"]

    def step():
        context = mr.get_replica_context()
        alone = [context.all_reduce(op, TENSORS[name]()) for name in names]
        together = context.all_reduce(op, [TENSORS[name]() for name in names])
        return list(zip(alone, together, strict=True))

    for pairs in results(strategy, step).values():
        for one, other in pairs:
            assert type(one) is type(other)
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(*(np.asarray(to_numpy(x)) for x in (one, other)))


@in_memory_of_the_host
@pytest.mark.parametrize("where", ["in place", "elsewhere"])
def test_several_tensors_are_written_into_their_own_memory(strategy, where):
    names = list(TENSORS)[:6]

    def step():
        context = mr.get_replica_context()
        values = [TENSORS[name]() for name in names]
        expected = context.all_reduce("SUM", values)
        out = values if where == "in place" else [torch.empty_like(value) for value in values]
        addresses, versions = zip(*((t.data_ptr(), t._version) for t in out), strict=True)
        found = context.all_reduce("SUM", values, out=out)
        assert all(one is other for one, other in zip(found, out, strict=True))
        assert [tensor.data_ptr() for tensor in out] == list(addresses)
        assert all(t._version > version for t, version in zip(out, versions, strict=True))
        return list(zip(out, expected, strict=True))

    for pairs in results(strategy, step).values():
        for one, other in pairs:
            assert torch.equal(one, other)


WRONG_OUT = {
    "needs gradients": (lambda: (torch.ones(2), torch.ones(2).requires_grad_()), "gradient"),
    "value needs gradients": (lambda: (torch.ones(2).requires_grad_(), torch.ones(2)), "gradient"),
    "both": (lambda: (torch.ones(2).requires_grad_(), torch.ones(2).requires_grad_()), "gradient"),
    "shape": (lambda: (torch.ones(2), torch.ones(3)), "(3,)"),
    "dtype": (lambda: (torch.ones(2), torch.ones(2, dtype=torch.float64)), "float64"),
    "strides": (lambda: (torch.ones(2, 3), torch.ones(3, 2).T), "contiguous"),
    "expanded": (lambda: (torch.ones(4), torch.ones(1).expand(4)), "contiguous"),
    "device": (lambda: (torch.ones(2), torch.empty(2, device="meta")), "meta"),
    "in place, conjugate": (lambda: [torch.ones(2, dtype=torch.complex64).conj()] * 2, "plain"),
    "in place, strides": (lambda: [torch.ones(2, 3).T] * 2, "contiguous"),
    "in place, expanded": (lambda: [torch.ones(1).expand(4)] * 2, "contiguous"),
}


@in_memory_of_the_host
@pytest.mark.parametrize("name", WRONG_OUT)
def test_a_wrong_out_is_the_same_error_on_all_ranks_that_says_why(strategy, name):
    make, word = WRONG_OUT[name]

    def step():
        value, out = make()
        mr.get_replica_context().all_reduce("SUM", {"x": value}, out={"x": out})

    error = raises_everywhere((TypeError, ValueError), lambda: strategy.run(step))
    assert word in str(error)
    assert "['x']" in str(error)
    assert "out" in str(error)
    check_works(strategy)


@in_memory_of_the_host
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_nothing_is_recorded_out_takes_what_needs_gradients_elsewhere(strategy, mode):
    count = strategy.num_replicas_in_sync

    def step():
        x = needs(1.0 + replica_id(), 2.0)
        with mode():
            out = torch.zeros(2, dtype=torch.float64)
            found = mr.get_replica_context().all_reduce("SUM", x, out=out)
            assert found is out
        assert not out.requires_grad
        with torch.no_grad():
            mr.get_replica_context().all_reduce("MEAN", x, out=x)  # as torch's own `copy_`
        assert x.requires_grad
        assert x.is_leaf
        return out, x

    for out, x in results(strategy, step).values():
        assert out.tolist() == [count * (count + 1) / 2, 2 * count]
        assert x.tolist() == [(count + 1) / 2, 2]


@in_memory_of_the_host
def test_a_write_into_out_is_one_that_torch_sees(strategy):
    """A tensor that a graph has saved and that is written must be torch's error, as in `copy_`."""

    def step():
        x, saved = needs(2.0), torch.ones(1, dtype=torch.float64)
        y = (x * saved).sum()
        mr.get_replica_context().all_reduce("SUM", torch.tensor([3.0]).double(), out=saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    strategy.run(step)


# What a merge_fn computes


def test_an_identity_merge_fn_passes_each_replicas_gradient_through(strategy):
    def step():
        i = replica_id()
        x, z = needs(2.0 + i), needs(3.0)
        y = mr.get_replica_context().merge_call(lambda strategy, x: x, args=(x * x,))
        pair = mr.get_replica_context().merge_call(lambda s, x, y: {"y": y, "x": x}, (x, z * i))
        (weight(i) * y + 3 * pair["y"] + 0 * pair["x"]).sum().backward()
        return x.grad, z.grad

    for i, (of_x, of_z) in results(strategy, step).items():
        assert of_x.tolist() == [weight(i) * 2 * (2 + i)]
        assert of_z.tolist() == [3 * i]


COMPUTED = {
    "reduce": lambda strategy, x: strategy.reduce("SUM", x, axis=None),
    "reduce along an axis": lambda strategy, x: strategy.reduce("MEAN", x, axis=0),
    "reduce_to": lambda strategy, x: strategy.extended.reduce_to("SUM", x, None),
    "gather": lambda strategy, x: strategy.gather(x, axis=0),
    "sum of local results": lambda strategy, x: sum(strategy.experimental_local_results(x)),
    "a component": lambda strategy, x: 2 * x.component(0),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_a_merge_fn_computes_is_a_constant(strategy, name):
    """On every rank alike, also on the one that holds what it was computed of."""

    def step():
        x = needs(2.0 + replica_id())
        y = mr.get_replica_context().merge_call(COMPUTED[name], args=(x * x,))
        (y.sum() * x).sum().backward()
        return y, x

    for y, x in results(strategy, step).values():
        assert not y.requires_grad
        np.testing.assert_allclose(x.grad, [y.sum()])


@pytest.mark.parametrize("size", [1, 20_000])
def test_a_merge_fn_may_compute_gradients_of_its_own(strategy, size):
    def differentiate(strategy, x):
        leaf = strategy.reduce("SUM", x, axis=None).requires_grad_()
        (leaf**2).sum().backward()
        return leaf.grad

    def step():
        x = torch.full((size,), 1.0 + replica_id())
        return mr.get_replica_context().merge_call(differentiate, args=(x,))

    count = strategy.num_replicas_in_sync
    for found in results(strategy, step).values():
        np.testing.assert_allclose(found, np.full(size, count * (count + 1)))


# Outside of replicas


def test_results_of_reduce_and_gather_are_constants(strategy):
    given = strategy.run(lambda: needs(1.0 + replica_id()) * 2)
    count = strategy.num_replicas_in_sync
    for found in (strategy.reduce("SUM", given, axis=None), strategy.gather(given, axis=0)):
        assert not found.requires_grad
        assert found.sum().item() == count * (count + 1)


def test_a_variable_holds_constants(strategy):
    with strategy.scope():
        v = mr.Variable(np.ones(2), aggregation=mr.VariableAggregation.SUM)

    def step():
        v.assign_add(needs(1.0, replica_id()))
        x = torch.as_tensor(np.array(v))
        assert not x.requires_grad

    strategy.run(step)
    count = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(v.numpy(), [1 + count, 1 + count * (count - 1) / 2])


def test_a_recorded_result_can_be_returned_from_a_run_and_read(strategy):
    def step():
        return mr.get_replica_context().all_reduce("SUM", needs(1.0 + replica_id()))

    count = strategy.num_replicas_in_sync
    for found in results(strategy, step).values():
        assert found.requires_grad
        assert found.detach().item() == count * (count + 1) / 2


def test_rows_that_need_gradients_are_refused_where_they_are_made_indexed_slices():
    rows = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(TypeError, match=r"no gradient passes it\. Give it values\.detach"):
        mr.IndexedSlices(rows, [0, 1])
    with torch.no_grad():
        assert mr.IndexedSlices(rows, [0, 1]).values.tolist() == [[1, 1], [1, 1]]


def test_an_axis_is_checked_before_anything_is_gathered(strategy):
    def gather(axis):
        x = needs(replica_id() + 1.0)
        found = mr.get_replica_context().all_gather(x, axis)
        found.sum().backward()
        return x.grad

    count = strategy.num_replicas_in_sync
    for found in results(strategy, lambda: gather(np.int64(0))).values():
        assert found.tolist() == [count]
    for wrong, kind, words in (("first", TypeError, "axis must be"), (1, ValueError, "axis 1 is")):
        error = raises_everywhere(kind, lambda wrong=wrong: strategy.run(gather, (wrong,)))
        assert words in str(error)
    check_works(strategy)
