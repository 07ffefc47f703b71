"""What gradients through collectives cost: messages, and memory that is freed at once."""

import gc
import weakref

import pytest

import mpi_replica as mr
from everywhere import check_works, cost_of
from gradient_programs import replica_id, results
from on_a_device import in_memory_of_the_host

torch = pytest.importorskip("torch", reason="torch is not installed")

LARGE = 100_000


@pytest.fixture
def without_collector():
    """What is only found by Python's collector of cycles stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def goes_back(context, x, way):
    y = context.all_reduce("SUM", {"a": x, "b": x * 2})["b"]
    z = context.all_gather(x[None], 0)
    if way == "twice":
        (once,) = torch.autograd.grad((y * y).sum() + z.sum(), x, create_graph=True)
        once.sum().backward()
    elif way == "backward":
        (y.sum() + z.sum()).backward()
    return y, z


@pytest.mark.parametrize("way", ["backward", "none"])
def test_what_a_step_has_recorded_is_freed_with_it(strategy, without_collector, way):
    """Memory of a device is gone long before Python's collector of cycles has a look."""
    found = []

    def step():
        x = torch.ones(LARGE, requires_grad=True)
        kept = goes_back(mr.get_replica_context(), x, way)
        found.extend(map(weakref.ref, (x, *kept)))

    for _ in range(3):
        strategy.run(step)
    strategy.run(lambda: None)
    assert [one() for one in found if one() is not None] == []


def test_what_gradients_of_gradients_have_recorded_is_no_leak(strategy):
    found = []

    def step():
        x = torch.ones(10, requires_grad=True)
        found.extend(map(weakref.ref, goes_back(mr.get_replica_context(), x, "twice")))

    strategy.run(step)
    strategy.run(lambda: None)
    gc.collect()
    assert [one() for one in found if one() is not None] == []


def test_nothing_is_sent_for_leaves_that_nobody_uses(strategy):
    def step(names):
        nest = {name: torch.ones(LARGE, requires_grad=True) for name in "abc"}
        found = mr.get_replica_context().all_reduce("SUM", nest)
        sum(found[name].sum() for name in names).backward()

    costs = {}
    for names in ("a", "abc", "a", "abc"):  # the first ones plan
        costs[names] = cost_of(strategy, lambda names=names: strategy.run(step, args=(names,)))[1]
    if strategy.size > 1:
        assert costs["a"] < 0.8 * costs["abc"]


def test_a_way_back_of_one_leaf_takes_as_many_messages_as_the_call(strategy):
    def step(is_back):
        y = mr.get_replica_context().all_reduce("SUM", torch.ones(3, requires_grad=True))
        if is_back:
            y.sum().backward()

    costs = {}
    for is_back in (False, True, False, True):
        costs[is_back] = cost_of(strategy, lambda b=is_back: strategy.run(step, args=(b,)))[0]
    nothing = cost_of(strategy, lambda: strategy.run(lambda: None))[0]
    assert costs[True] - costs[False] == costs[False] - nothing


@in_memory_of_the_host
def test_where_nothing_is_recorded_a_call_costs_as_much_as_of_arrays(strategy):
    def step(x):
        with torch.no_grad():
            mr.get_replica_context().all_reduce("SUM", [x, x])

    costs = []
    for x in (torch.ones(LARGE, requires_grad=True), torch.ones(LARGE).numpy()):
        for _ in range(2):
            cost = cost_of(strategy, lambda x=x: strategy.run(step, args=(x,)))
        costs.append(cost)
    assert costs[0] == costs[1]


def test_many_steps_with_two_lines_of_collectives_stay_one_strategy_that_works(strategy):
    def step():
        context, i = mr.get_replica_context(), replica_id()
        x = torch.tensor([1.0 + i], requires_grad=True)
        for _ in range(20):
            y = context.all_reduce("MEAN", x * x)
            (y + context.all_gather(x, 0).sum()).sum().backward()
        return x.grad.item()

    count = strategy.num_replicas_in_sync
    for _ in range(3):
        for i, found in results(strategy, step).items():
            assert found == pytest.approx(20 * (2 * (1 + i) + count))
    check_works(strategy)
