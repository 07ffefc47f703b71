"""What torch makes of functions, with collectives in them: torch.func and activation checkpoints.

Expected values: d(sum of all losses)/dx of replica i, with weights 10**i, as in test_gradients.py.
"""

import threading

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, error_of, gathered, raises_everywhere
from gradient_programs import replica_id, results
from mpi_replica.errors import ContextError

torch = pytest.importorskip("torch", reason="torch is not installed")

# What torch itself says when a tangent is first made.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def weight(i):
    return 10.0**i


def weights(count):
    return sum(map(weight, range(count)))


def values(i):
    return torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) + i


def total(x):
    return mr.get_replica_context().all_reduce("SUM", x * x)


def rows(x):
    """All replicas' rows, times their place."""
    found = mr.get_replica_context().all_gather(x[None], 0)
    return found * torch.arange(1.0, len(found) + 1, dtype=torch.float64)[:, None]


def loss(x):
    return weight(replica_id()) * total(x).sum()


def all_values(strategy):
    return torch.stack([values(i) for i in range(strategy.num_replicas_in_sync)])


def check(strategy, step, expected):
    """Check that `step` gives each replica the tensor ``expected(i)``."""
    for i, found in results(strategy, step).items():
        np.testing.assert_allclose(found.detach(), expected(i), rtol=1e-12)


def check_forward(strategy, step, expected):
    """As `check`, of derivatives that torch finds forward.

    It keeps the levels of these for the whole process: where a rank hosts several replicas, which
    are inside of a derivative at a time, the derivatives are right or an error on all ranks.
    """
    if max(map(len, gathered(strategy.local_replica_ids))) == 1:
        check(strategy, step, expected)
        return
    error = error_of(lambda: check(strategy, step, expected))
    seen = gathered((type(error).__name__, str(error)))
    assert len(set(seen)) == 1, seen
    if error is not None:
        assert isinstance(error, ContextError), error
        assert "host one replica on each rank" in str(error)
    check_works(strategy)


def test_grad(strategy):
    everything = weights(strategy.num_replicas_in_sync)
    step = lambda: torch.func.grad(loss)(values(replica_id()))  # noqa: E731
    check(strategy, step, lambda i: everything * 2 * values(i))


def test_grad_of_a_mean_and_of_a_product(strategy):
    count = strategy.num_replicas_in_sync

    def mean(x):
        return weight(replica_id()) * mr.get_replica_context().all_reduce("MEAN", x * x).sum()

    def product(x):
        return weight(replica_id()) * mr.get_replica_context().all_reduce("PROD", x).sum()

    def largest(x):
        return weight(replica_id()) * mr.get_replica_context().all_reduce("MAX", x).sum()

    for function, expected in (
        (mean, lambda i: weights(count) / count * 2 * values(i)),
        (product, lambda i: weights(count) * all_values(strategy).prod(0) / values(i)),
        (largest, lambda i: np.full(3, weights(count) * (i == count - 1))),
    ):
        step = lambda function=function: torch.func.grad(function)(values(replica_id()))  # noqa: E731
        check(strategy, step, expected)


def test_grad_of_a_gather(strategy):
    everything = weights(strategy.num_replicas_in_sync)
    weighted = lambda x: weight(replica_id()) * rows(x).sum()  # noqa: E731
    step = lambda: torch.func.grad(weighted)(values(replica_id()))  # noqa: E731
    check(strategy, step, lambda i: np.full(3, everything * (i + 1)))


def test_grad_and_value_with_other_results(strategy):
    count = strategy.num_replicas_in_sync

    def both(x):
        found = total(x)
        return weight(replica_id()) * found.sum(), found

    def step():
        gradient, (value, found) = torch.func.grad_and_value(both, has_aux=True)(
            values(replica_id())
        )
        return torch.stack([gradient, found, value.expand(3)])

    sums = (all_values(strategy) ** 2).sum(0)
    check(
        strategy,
        step,
        lambda i: torch.stack(
            [weights(count) * 2 * values(i), sums, (weight(i) * sums.sum()).expand(3)]
        ),
    )


def test_grad_of_grad(strategy):
    count = strategy.num_replicas_in_sync

    def cubed(x):
        return weight(replica_id()) * mr.get_replica_context().all_reduce("SUM", x**3).sum()

    def step():
        inner = lambda x: torch.func.grad(cubed)(x).sum()  # noqa: E731
        return torch.func.grad(inner)(values(replica_id()))

    check(strategy, step, lambda i: weights(count) * 6 * values(i))


def test_vjp(strategy):
    everything = weights(strategy.num_replicas_in_sync)

    def step():
        i = replica_id()
        found, pull = torch.func.vjp(total, values(i))
        return pull(torch.full_like(found, weight(i)))[0]

    check(strategy, step, lambda i: everything * 2 * values(i))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_jvp_is_the_reduction_of_the_tangents(strategy, op):
    everything = all_values(strategy)
    count = len(everything)

    def step():
        i = replica_id()
        function = lambda x: mr.get_replica_context().all_reduce(op, x * x)  # noqa: E731
        tangent = torch.full_like(values(i), weight(i))
        return torch.stack(torch.func.jvp(function, (values(i),), (tangent,)))

    factors = torch.tensor([weight(i) for i in range(count)], dtype=torch.float64)[:, None]
    expected = torch.stack([(everything**2).sum(0), (2 * everything * factors).sum(0)])
    check_forward(strategy, step, lambda i: expected / (count if op == "MEAN" else 1))


def test_jvp_of_a_gather_is_the_gather_of_the_tangents(strategy):
    count = strategy.num_replicas_in_sync

    def step():
        i = replica_id()
        function = lambda x: mr.get_replica_context().all_gather(x, 0)  # noqa: E731
        mine = torch.full((i + 1,), 2.0, dtype=torch.float64)
        _, tangents = torch.func.jvp(function, (mine,), (mine * weight(i),))
        return tangents

    expected = np.concatenate([np.full(i + 1, 2 * weight(i)) for i in range(count)])
    check_forward(strategy, step, lambda i: expected)


def test_vmap_reduces_and_gathers_each_row(strategy):
    count = strategy.num_replicas_in_sync
    table = lambda i: torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + i  # noqa: E731

    def step():
        context, mine = mr.get_replica_context(), table(replica_id())
        sums = torch.func.vmap(lambda row: context.all_reduce("SUM", row))(mine)
        columns = torch.func.vmap(lambda x: context.all_reduce("SUM", x), 1, 1)(mine)
        gathered = torch.func.vmap(lambda row: context.all_gather(row, 0))(mine)
        assert gathered.shape == (2, 3 * count)
        return torch.cat([sums, columns, gathered], 1)

    sums = sum(table(i) for i in range(count))
    rows_of_all = torch.cat([table(i) for i in range(count)], 1)
    check(strategy, step, lambda i: torch.cat([sums, sums, rows_of_all], 1))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_what_is_no_tensor_is_gathered_in_vmap_as_it_is_outside(strategy, axis):
    count = strategy.num_replicas_in_sync
    table = lambda i: torch.arange(12.0, dtype=torch.float64).reshape(2, 2, 3) + i  # noqa: E731
    array = lambda i: np.arange(6).reshape(2, 3) * (i + 1)  # noqa: E731

    def step():
        found = []

        def gather(x):
            nest = {"x": x, "y": array(replica_id()), "z": [x]}
            gathered = mr.get_replica_context().all_gather(nest, axis)
            found.append(gathered["y"])
            return gathered["x"] + gathered["z"][0]

        gathered = torch.func.vmap(gather)(table(replica_id()))
        np.testing.assert_array_equal(
            found[0], np.concatenate([array(i) for i in range(count)], axis)
        )
        return gathered

    inner = axis if axis < 0 else axis + 1
    check(strategy, step, lambda _: 2 * torch.cat([table(i) for i in range(count)], inner))


def test_replicas_may_stack_values_along_other_axes_for_vmap(strategy):
    count = strategy.num_replicas_in_sync
    rows = torch.arange(9.0, dtype=torch.float64).reshape(3, 3)

    def step():
        context, axis = mr.get_replica_context(), replica_id() % 2
        mine = rows.T if axis else rows
        return torch.func.vmap(lambda row: context.all_reduce("SUM", row), axis)(mine)

    check(strategy, step, lambda i: count * rows)


def test_vmap_of_grad(strategy):
    """Gradients for each row of a batch."""
    everything = weights(strategy.num_replicas_in_sync)

    def step():
        batch = torch.stack([values(replica_id()), -values(replica_id())])
        return torch.func.vmap(torch.func.grad(loss))(batch)

    def expected(i):
        return everything * 2 * torch.stack([values(i), -values(i)])

    check(strategy, step, expected)


@pytest.mark.parametrize("name", ["jacrev", "jacfwd", "torch.autograd.functional.jacobian"])
def test_jacobians(strategy, name):
    """Every replica asks for the whole one: R times its own, or the sum of all, one way."""
    count = strategy.num_replicas_in_sync

    def step():
        if name.startswith("torch"):
            return torch.autograd.functional.jacobian(total, values(replica_id()))
        return getattr(torch.func, name)(total)(values(replica_id()))

    forward = np.diag(2 * all_values(strategy).sum(0))
    checked = check_forward if name == "jacfwd" else check
    checked(
        strategy,
        step,
        lambda i: forward if name == "jacfwd" else np.diag(count * 2 * values(i)),
    )


@pytest.mark.parametrize("op", ["SUM", "MAX", "PROD", "all_gather"])
def test_gradients_of_a_batch_at_once_are_an_error_that_says_what_does_it(strategy, op):
    def function(x):
        context = mr.get_replica_context()
        return context.all_gather(x, 0) if op == "all_gather" else context.all_reduce(op, x)

    def batched():
        x = values(replica_id()).requires_grad_()
        y = function(x)
        return torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)

    def vectorized():
        jacobian = torch.autograd.functional.jacobian
        return jacobian(function, values(replica_id()), vectorize=True)

    for step in (batched, vectorized):
        error = raises_everywhere(TypeError, lambda step=step: strategy.run(step))
        assert "Use torch.func" in str(error)
        check_works(strategy)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_what_takes_no_transformed_tensor_is_an_error_that_says_so(strategy, transform):
    with strategy.scope():
        variable = mr.Variable(np.zeros(()), aggregation=mr.VariableAggregation.MEAN)

    def merge(x):
        return mr.get_replica_context().merge_call(lambda _, x: x, ([x.sum()],))[0]

    def assign(x):
        variable.assign(x.sum())
        return x.sum()

    for function in (merge, assign):
        step = lambda function=function: transform(function)(values(replica_id()))  # noqa: E731
        error = raises_everywhere(TypeError, lambda step=step: strategy.run(step))
        assert "torch.func" in str(error)
        assert function.__name__ in str(error)
        check_works(strategy)


def test_a_merge_call_in_a_function_of_torch_func_refuses_tensors_from_outside_on_every_layout(
    strategy,
):
    def step():
        outside = torch.zeros(2)

        def loss(x):
            mr.get_replica_context().merge_call(lambda _, y: None, (outside,))
            return x.sum()

        return torch.func.grad(loss)(values(replica_id()))

    error = raises_everywhere(TypeError, lambda: strategy.run(step))
    assert str(error).startswith("merge_call: a tensor in a function that torch.func transforms")
    check_works(strategy)


def test_gradients_of_a_functional_model(strategy):
    everything = weights(strategy.num_replicas_in_sync)
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)

    def step():
        def of(parameters):
            outputs = torch.func.functional_call(model, parameters, (values(replica_id()),))
            return weight(replica_id()) * mr.get_replica_context().all_reduce("SUM", outputs).sum()

        return torch.func.grad(of)({k: v.detach() for k, v in model.named_parameters()})["weight"]

    check(strategy, step, lambda i: everything * values(i)[None])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints_make_their_collectives_again(strategy, use_reentrant):
    count = strategy.num_replicas_in_sync
    seen = []

    def layer(x):
        seen.append(replica_id())
        y = mr.get_replica_context().all_reduce("SUM", x * x)
        return torch.sin(y) * x

    def step():
        i = replica_id()
        x = values(i).requires_grad_()
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)
        z = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=use_reentrant)
        (weight(i) * z).sum().backward()
        return x.grad

    x = all_values(strategy).requires_grad_()
    y = torch.sin((x * x).sum(0)) * x
    z = torch.sin((y * y).sum(0)) * y
    of_all = torch.tensor([weight(i) for i in range(count)], dtype=torch.float64)
    (z * of_all[:, None]).sum().backward()
    found = results(strategy, step)
    assert len(seen) == 4 * len(found)
    for i, gradient in found.items():
        np.testing.assert_allclose(gradient, x.grad[i], rtol=1e-9)


def test_products_differentiated_twice_are_right(strategy):
    count = strategy.num_replicas_in_sync

    def step():
        i = replica_id()
        x = values(i).requires_grad_()
        product = weight(i) * mr.get_replica_context().all_reduce("PROD", x).sum()
        (once,) = torch.autograd.grad(product, x, create_graph=True)
        return torch.autograd.grad((once * once).sum(), x)[0]

    x = all_values(strategy).requires_grad_()
    (once,) = torch.autograd.grad(weights(count) * x.prod(0).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad((once * once).sum(), x)
    for i, gradient in results(strategy, step).items():
        np.testing.assert_allclose(gradient, twice[i])


def _linearized(function, x):
    return torch.func.linearize(function, x)[1](x)


def _made_fx(function, x):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(x)(x)


def _made_fx_before_autograd(function, x):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, pre_dispatch=True)(x)(x)


def _exported(function, x):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return torch.export.export(Module(), (x,), strict=False).module()(x)


RECORDERS = {
    "linearize": _linearized,
    "make_fx": _made_fx,
    "make_fx before autograd": _made_fx_before_autograd,
    "export": _exported,
    "jit.trace": lambda function, x: torch.jit.trace(function, x, check_trace=False)(x),
}


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "merge_call"])
def test_what_torch_records_to_run_it_later_makes_no_collective(strategy, recorder, call):
    def function(x):
        context = mr.get_replica_context()
        if call == "all_reduce":
            return context.all_reduce("SUM", x) * 2
        if call == "all_gather":
            return context.all_gather(x, 0) * 2
        return x * context.merge_call(lambda strategy, i: sum(i.values), (replica_id(),))

    step = lambda: RECORDERS[recorder](function, values(replica_id()))  # noqa: E731
    error = raises_everywhere(ContextError, lambda: strategy.run(step))
    is_forward = recorder == "linearize" and "forward-mode" in str(error)
    assert is_forward or f"{call} was called in a function that torch records" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("recorder", ["make_fx", "make_fx before autograd"])
def test_what_another_thread_records_is_no_matter_of_the_replicas(strategy, recorder):
    has_begun, may_end = threading.Event(), threading.Event()

    def function(x):
        has_begun.set()
        may_end.wait(20)
        return x * 2

    thread = threading.Thread(target=RECORDERS[recorder], args=(function, values(1)))
    thread.start()
    try:
        assert has_begun.wait(20)
        count = strategy.num_replicas_in_sync
        step = lambda: mr.get_replica_context().all_reduce("SUM", 1.0)  # noqa: E731
        assert set(results(strategy, step).values()) == {float(count)}
    finally:
        may_end.set()
        thread.join()
