"""strategy.verify of tensors, modules and optimizers: the parameter that differs is named."""

import numpy as np
import pytest

from everywhere import (
    check_works,
    cost_of,
    culprits,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
)
from mpi_replica.errors import DivergenceError, StructureMismatchError
from on_a_device import DEVICE

torch = pytest.importorskip("torch", reason="torch is not installed")


def network(seed=0):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    generator = torch.Generator(DEVICE).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def stepped(model):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(6.0).reshape(3, 2)).square().sum().backward()
    optimizer.step()
    return optimizer


def each(strategy, make):
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


def diverges(strategy, value, *words):
    error = raises_everywhere(DivergenceError, lambda: strategy.verify(value))
    assert [word for word in words if word not in str(error)] == [], str(error)
    check_works(strategy)


def changed(model, parameter, index):
    with torch.no_grad():
        model.get_parameter(parameter)[index] += 1
    return model


def test_what_is_the_same_passes_in_one_message(strategy, small_world):
    model = network()
    value = {
        "model": model,
        "optimizer": stepped(model),
        "tensors": [torch.ones(3, dtype=torch.float16), torch.tensor(True), model[0].weight.t()],
        "generator": torch.Generator(DEVICE).manual_seed(3),
        "rng": np.random.default_rng(3),
        "models": each(strategy, lambda i: network()),
        "both": each(strategy, lambda i: [network(), i * 0]),
    }
    assert cost_of(strategy, lambda: strategy.verify(value))[0] == 1
    strategy.verify(model)


def test_a_parameter_that_differs_on_a_rank_is_named(strategy):
    needs_two_ranks(strategy)
    model = network()
    if strategy.rank == strategy.size - 1:
        changed(model, "0.weight", (2, 1))
    diverges(
        strategy,
        model,
        "value['0.weight'] differs: 1 of 6 elements, first element [2, 1]: ",
        "strategy.run(value.load_state_dict, args=(strategy.extended.broadcast_to("
        "value.state_dict()),))",
    )
    diverges(strategy, {"net": [model]}, "value['net'][0]['0.weight'] differs")
    optimizer = stepped(model)
    diverges(strategy, {"optimizer": optimizer}, "value['optimizer']['state'][0]['exp_avg']")
    diverges(strategy, torch.full((), strategy.rank / 3), "value differs: 0.0 on ")
    generator = torch.Generator(DEVICE).manual_seed(strategy.rank)
    diverges(strategy, generator, "give all the same seed")


def test_a_parameter_that_differs_on_a_replica_is_named(strategy):
    needs_two_replicas(strategy)
    layout = strategy.engine.layout
    for culprit in culprits(strategy):
        models = each(
            strategy,
            lambda i, one=culprit: changed(network(), "1.bias", 1) if i == one else network(),
        )
        others = [i for i in layout.all_replica_ids if i != culprit]
        diverges(
            strategy,
            {"models": models},
            "value['models']['1.bias'] differs: 1 of 3 elements, first element [1]: ",
            f" on {layout.describe([culprit])}",
            f" on {layout.describe(others)}",
            "strategy.experimental_local_results(value['models'])[0].state_dict()",
        )


def test_what_the_error_says_makes_them_the_same(strategy):
    model = network(strategy.rank)
    strategy.run(model.load_state_dict, args=(strategy.extended.broadcast_to(model.state_dict()),))
    strategy.verify(model)
    assert model[0].weight.equal(network(0)[0].weight)


def test_optimizers_that_have_not_all_stepped_are_a_mismatch(strategy):
    needs_two_replicas(strategy)

    def make(i):
        return stepped(network()) if i else torch.optim.Adam(network().parameters())

    optimizers = each(strategy, make)
    error = raises_everywhere(StructureMismatchError, lambda: strategy.verify(optimizers))
    assert "['state'][0]['exp_avg']" in str(error), str(error)
    check_works(strategy)


def test_a_tensor_without_plain_values_is_named(strategy):
    value = {"a": [torch.eye(2).to_sparse()]}
    error = raises_everywhere(TypeError, lambda: strategy.verify(value))
    assert "verify got Tensor for value['a'][0]: " in str(error)
    assert "tensor.to_dense()" in str(error)
    check_works(strategy)
