"""Modules and tensors in the arguments of a run that are one object on each rank.

What several replicas of a rank write in them would be changed so often: an error on all ranks.
"""

import pytest

import mpi_replica as mr
from everywhere import (
    check_equal,
    check_works,
    gathered,
    holds_everywhere,
    needs_two_replicas,
    raises_everywhere,
    shares_ranks,
)
from gradient_programs import replica_id
from mpi_replica.errors import ContextError

torch = pytest.importorskip("torch", reason="torch is not installed")
swa_utils = pytest.importorskip("torch.optim.swa_utils", reason="torch is not installed")


def network():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return model


def plain():
    return network()[0]


def averaged():
    return swa_utils.AveragedModel(plain())


def average(model):
    model.update_parameters(plain())


def move_by_hand(model):
    model(torch.ones(3, 2)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def move_behind_a_collective(model):
    loss = mr.get_replica_context().all_reduce("SUM", model(torch.ones(3, 2)).sum().detach())
    with torch.no_grad():
        model.bias += loss
    mr.get_replica_context().all_reduce("SUM", loss)


def count(model):
    model.num_batches_tracked += 1


def normalize(model):
    torch.manual_seed(0)  # a lazy one draws its weights here
    model(torch.ones(3, 2))


def lazy():
    return torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.BatchNorm1d(2))


def zeros():
    return torch.zeros(3)


def add_one(tensor):
    tensor += 1.0


def replace_parameter(model):
    model.weight = torch.nn.Parameter(model.weight.detach() + 1.0)


def replace_values(model):
    model.weight.data = model.weight.data + 1.0


def replace_buffer(model):
    model.running_mean = model.running_mean + 1.0


# How a module or tensor is made, what a step does with it, and what of it is written first.
WRITES = {
    "an average": (averaged, average, "the buffer 'n_averaged' of the AveragedModel"),
    "a step by hand": (plain, move_by_hand, "the parameter 'weight' of the Linear"),
    "behind a collective": (plain, move_behind_a_collective, "the parameter 'bias' of the Linear"),
    "a counter": (lambda: network()[1], count, "the buffer 'num_batches_tracked' of the BatchNo"),
    "statistics": (network, normalize, "the buffer '1.num_batches_tracked'"),
    "another parameter": (plain, replace_parameter, "the parameter 'weight' of the Linear"),
    "other values": (plain, replace_values, "the parameter 'weight' of the Linear"),
    "another buffer": (lambda: network()[1], replace_buffer, "the buffer 'running_mean' of the"),
    "a tensor": (zeros, add_one, "the tensor in (args, kwargs)"),
    "a lazy one": (lazy, normalize, "the buffer '1.num_batches_tracked'"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_module_in_args_that_several_replicas_of_a_rank_write_is_an_error_on_all(strategy, name):
    make, write, what = WRITES[name]
    given = {"net": [make()]}

    def step(given):
        write(given["net"][0])

    if not shares_ranks(strategy):
        strategy.run(step, args=(given,))  # each rank has its own
    else:
        error = raises_everywhere(ContextError, lambda: strategy.run(step, args=(given,)))
        assert what in str(error), str(error)
        assert "in (args, kwargs)[0][0]['net'][0] of strategy.run" in str(error)
        assert "strategy.experimental_distribute_values_from_function" in str(error)
        raises_everywhere(ContextError, lambda: strategy.run(step, kwargs={"given": given}))
    check_works(strategy)


def test_a_module_in_a_mirrored_is_shared_like_any_other(strategy):
    models = mr.Mirrored(plain())
    if not shares_ranks(strategy):
        strategy.run(move_by_hand, args=(models,))
    else:
        error = raises_everywhere(ContextError, lambda: strategy.run(move_by_hand, args=(models,)))
        assert "the parameter 'weight' of the Linear" in str(error)
    check_works(strategy)


#: How the components of several replicas come to be one thing, or parts of one.
SHARED = {
    "one module": (plain, lambda shared, replica: shared, move_by_hand),
    "one tensor": (zeros, lambda shared, replica: shared, add_one),
    "equal parts": (zeros, lambda shared, replica: shared[:2], add_one),
    "parts that overlap": (
        lambda: torch.zeros(50),
        lambda shared, replica: shared[replica : replica + 2],
        add_one,
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_one_that_is_the_component_of_several_replicas_is_not_written_by_each(strategy, name):
    make, part, write = SHARED[name]
    shared = make()
    models = strategy.experimental_distribute_values_from_function(
        lambda context: part(shared, context.replica_id_in_sync_group)
    )
    if not shares_ranks(strategy):
        strategy.run(write, args=(models,))
    else:
        error = raises_everywhere(ContextError, lambda: strategy.run(write, args=(models,)))
        assert "in (args, kwargs)[0][0] of strategy.run" in str(error)
        assert "strategy.experimental_distribute_values_from_function" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("name", WRITES)
def test_a_module_of_each_replica_may_be_written(strategy, name):
    make, write, _ = WRITES[name]
    models = strategy.experimental_distribute_values_from_function(lambda context: make())
    for _ in range(2):
        strategy.run(write, args=(models,))
    strategy.verify(models)


def test_a_generator_from_which_several_replicas_draw_is_an_error_on_all(strategy):
    generator = torch.Generator().manual_seed(0)

    def step(generator):
        return torch.rand(1, generator=generator).item()

    if shares_ranks(strategy):
        error = raises_everywhere(ContextError, lambda: strategy.run(step, args=(generator,)))
        assert "has drawn from the generator in (args, kwargs)[0][0]" in str(error)
    else:
        strategy.run(step, args=(generator,))
    check_works(strategy)


def test_modes_of_a_module_that_replicas_share_are_those_of_each_also_behind_a_call(strategy):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    ids = strategy.local_replica_ids

    def modes(model):
        return [model.training, model[1].training, model[0].weight.requires_grad]

    def step(model):
        context, is_even = mr.get_replica_context(), replica_id() % 2 == 0
        found = [modes(model)]
        model.train(is_even)
        model[0].weight.requires_grad_(is_even)
        context.all_reduce("SUM", 1.0)
        found.append(modes(model))
        model[1].eval()
        context.all_reduce("SUM", 1.0)
        found.append(modes(model))
        context.merge_call(lambda _: model.train().requires_grad_(True))
        return [*found, modes(model)]

    results = strategy.experimental_local_results(strategy.run(step, args=(model,)))
    for i, found in zip(ids, results, strict=True):
        even = i % 2 == 0
        assert found == [[True] * 3, [even] * 3, [even, False, even], [True] * 3]
    check_works(strategy)


def test_what_a_replica_has_made_of_a_module_leaves_others_the_modes_that_fit(strategy):
    """A lazy weight has a mode, too, and one of integers can have no other."""
    model = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.Linear(2, 2))

    def step(model):
        context, is_first = mr.get_replica_context(), replica_id() == 0
        lazy = model[0].weight
        lazy.requires_grad = is_first
        if is_first:
            model[1].bias.requires_grad_(False)
            model[1].bias.data = torch.zeros(2, dtype=torch.int64)
        context.all_reduce("SUM", 1.0)
        return lazy.requires_grad

    results = strategy.experimental_local_results(strategy.run(step, args=(model,)))
    assert list(results) == [i == 0 for i in strategy.local_replica_ids]
    check_works(strategy)


def test_the_modes_of_a_tensor_that_replicas_share_are_those_of_each(strategy):
    def step(tensor):
        tensor.requires_grad_(replica_id() == 0)
        mr.get_replica_context().all_reduce("SUM", 1.0)
        return tensor.requires_grad

    results = strategy.run(step, args=(torch.zeros(2),))
    found = [one for part in gathered(strategy.experimental_local_results(results)) for one in part]
    assert found == [True] + [False] * (strategy.num_replicas_in_sync - 1)


def rows_of(replica):
    return torch.arange(6.0).reshape(3, 2) + replica


def gradient_alone(replica, times=1):
    model = plain()
    for _ in range(times):
        model(rows_of(replica)).pow(2).sum().backward()
    return model.weight.grad.tolist()


@pytest.mark.parametrize("clears", ["before", "after", "in a merge_fn"])
def test_gradients_of_a_module_that_replicas_share_are_those_of_each_also_behind_a_call(
    strategy, clears
):
    """Who prints its loss between ``backward`` and the reduction waits there for the others."""
    shared = plain()

    def step(model):
        context = mr.get_replica_context()
        if clears == "before":
            model.zero_grad()
        loss = model(rows_of(replica_id())).pow(2).sum()
        loss.backward()
        context.all_reduce("SUM", loss.detach())
        mine = model.weight.grad.tolist()
        context.all_reduce("MEAN", [one.grad for one in model.parameters()])
        if clears == "after":
            model.zero_grad()
        elif clears == "in a merge_fn":
            context.merge_call(lambda strategy: shared.zero_grad())
            assert model.weight.grad is None
        return mine

    for _ in range(2):
        found = strategy.experimental_local_results(strategy.run(step, args=(shared,)))
        alone = [gradient_alone(replica) for replica in strategy.local_replica_ids]
        holds_everywhere(lambda found=found, alone=alone: check_equal(list(found), alone))


def test_what_a_merge_fn_has_put_into_gradients_all_replicas_find(strategy):
    shared = plain()

    def merge_fn(strategy, values):
        shared.weight.grad = torch.full_like(shared.weight, 3.0)

    def step(model):
        model(rows_of(replica_id())).sum().backward()
        mr.get_replica_context().merge_call(merge_fn, args=(replica_id(),))
        return model.weight.grad.tolist()

    found = strategy.experimental_local_results(strategy.run(step, args=(shared,)))
    holds_everywhere(lambda: check_equal(list(found), [[[3.0] * 2] * 2] * len(found)))


def test_gradients_of_a_lazy_module_are_those_of_each_replica(strategy):
    shared = torch.nn.LazyLinear(2)

    def step(model):
        torch.manual_seed(0)
        model(rows_of(replica_id())).sum().backward()
        return model.weight.grad.tolist()

    found = strategy.experimental_local_results(strategy.run(step, args=(shared,)))
    alone = [[rows_of(i).sum(0).tolist()] * 2 for i in strategy.local_replica_ids]
    holds_everywhere(lambda: check_equal(list(found), alone))


def test_gradients_of_a_merge_fn_that_several_replicas_change_in_place_are_an_error(strategy):
    shared = plain()

    def merge_fn(strategy):
        shared.weight.grad = torch.ones_like(shared.weight)

    def step(model):
        mr.get_replica_context().merge_call(merge_fn)
        model.weight.grad.mul_(0.5)
        return model.weight.grad.tolist()

    if shares_ranks(strategy):
        error = raises_everywhere(ContextError, lambda: strategy.run(step, args=(shared,)))
        assert "the gradient of the parameter 'weight' of the Linear" in str(error)
    else:
        (found,) = strategy.experimental_local_results(strategy.run(step, args=(shared,)))
        holds_everywhere(lambda: check_equal(found, [[0.5, 0.5], [0.5, 0.5]]))
    check_works(strategy)


def test_an_error_of_what_is_shared_that_a_step_catches_leaves_its_gradients(strategy):
    needs_two_replicas(strategy)
    shared, generator = plain(), torch.Generator().manual_seed(0)
    found = []

    def step(model, generator):
        model(rows_of(replica_id())).pow(2).sum().backward()
        torch.rand(1, generator=generator)
        try:
            mr.get_replica_context().all_reduce("SUM", 1.0)
        finally:
            found.append((replica_id(), model.weight.grad.tolist()))

    if shares_ranks(strategy):
        raises_everywhere(ContextError, lambda: strategy.run(step, args=(shared, generator)))
    else:
        strategy.run(step, args=(shared, generator))
    holds_everywhere(lambda: check_equal(found, [(i, gradient_alone(i)) for i, _ in found]))
    assert found
    check_works(strategy)


def test_gradients_to_which_several_replicas_add_over_runs_are_an_error_on_all(strategy):
    """In the second run each would add to what the last one of the rank has left."""
    shared = plain()

    def step(model):
        model(rows_of(replica_id())).pow(2).sum().backward()
        return model.weight.grad.tolist()

    strategy.run(step, args=(shared,))
    if shares_ranks(strategy):
        error = raises_everywhere(ContextError, lambda: strategy.run(step, args=(shared,)))
        assert "the gradient of the parameter 'weight' of the Linear" in str(error)
    else:
        (found,) = strategy.experimental_local_results(strategy.run(step, args=(shared,)))
        (replica,) = strategy.local_replica_ids
        holds_everywhere(lambda: check_equal(found, gradient_alone(replica, 2)))
    check_works(strategy)


def differentiate(model):
    model.zero_grad()
    model.eval()(torch.ones(1, 2) + replica_id()).sum().backward()


def call_as_a_function(model):
    weights = {name: one.detach() * replica_id() for name, one in model[0].named_parameters()}
    torch.func.functional_call(model[0], weights, (torch.ones(1, 2),))


def move_in_a_merge_fn(model):
    def merge_fn(strategy):
        count(model[1])

    for _ in range(2):
        mr.get_replica_context().merge_call(merge_fn)


def move_on_one_replica(model):
    for _ in range(2):
        if replica_id() == 0:
            count(model[1])
        mr.get_replica_context().all_reduce("SUM", 1.0)


USES = [differentiate, call_as_a_function, move_in_a_merge_fn, move_on_one_replica]


@pytest.mark.parametrize("use", USES)
def test_a_module_in_args_that_replicas_do_not_write_each_may_be_shared(strategy, use):
    model = network()
    for _ in range(2):
        strategy.run(use, args=(model,))
        with torch.no_grad():
            model[0].weight += 1.0  # between the runs, once on each rank
    weights = gathered(model[0].weight.tolist())
    holds_everywhere(lambda: check_equal(weights, [[[2.5, 2.5], [2.5, 2.5]]] * len(weights)))
    check_works(strategy)


def test_a_module_of_inference_mode_may_be_shared(strategy):
    with torch.inference_mode():
        frozen = plain()
    model = torch.nn.ModuleList([frozen, plain()])

    def step(model):
        with torch.no_grad():
            return float(model[0](torch.ones(1, 2)).sum())

    found = strategy.experimental_local_results(strategy.run(step, args=(model,)))
    holds_everywhere(lambda: check_equal(found, (3.0,) * len(found)))
    check_works(strategy)


#: What a step does with a tensor that all replicas of a rank fill in turn, and with a variable.
GIVEN = {
    "all_reduce": lambda buffer, total: mr.get_replica_context().all_reduce("SUM", buffer),
    "merge_call": lambda buffer, total: mr.get_replica_context().merge_call(
        lambda strategy, value: strategy.experimental_local_results(value)[0] + 0, args=(buffer,)
    ),
    "returned": lambda buffer, total: buffer,
    "returned as numpy's": lambda buffer, total: {"a": buffer.numpy()},
    "all_reduce as numpy's": lambda buffer, total: mr.get_replica_context().all_reduce(
        "SUM", buffer.numpy()
    ),
    "assigned": lambda buffer, total: total.assign(buffer),
}


@pytest.mark.parametrize("way", GIVEN)
def test_a_tensor_that_replicas_of_a_rank_fill_in_turn_is_never_a_wrong_number(strategy, way):
    with strategy.scope():
        total = mr.Variable(torch.zeros(3).numpy(), aggregation=mr.VariableAggregation.SUM)
    buffer = torch.zeros(3)

    def step():
        buffer.fill_(replica_id() + 1.0)
        return GIVEN[way](buffer, total)

    if shares_ranks(strategy):
        error = raises_everywhere(ContextError, lambda: strategy.run(step))
        assert "strategy.experimental_distribute_values_from_function" in str(error)
    else:
        strategy.run(step)
    buffer.fill_(0.0)
    check_works(strategy)
