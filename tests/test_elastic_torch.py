"""Snapshots of a program's state with tensors and modules, and modules of replicas that move."""

import numpy as np
import pytest

import mpi_replica as mr
from mpi_replica.core.layout import Layout
from mpi_replica.errors import CheckpointError
from mpi_replica.strategy.elastic.replica_objects import for_another_rank, held_in, moved
from mpi_replica.strategy.elastic.snapshot import put_back, take

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def strategy():
    with mr.MPIStrategy(num_replicas=3, seed=1) as strategy:
        yield strategy


def go_back(strategy, objects, snapshot):
    """Put everything back, as after a loss."""
    return put_back(strategy, objects, snapshot.shared, snapshot.own)


def made_alike(make):
    """One object a replica; all are the same."""
    return mr.PerReplica([make() for _ in range(3)])


def filled(model, value):
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def test_tensors_go_back_into_their_memory_and_those_that_are_gone_come_anew(strategy):
    x, gone = torch.ones(3, dtype=torch.bfloat16), torch.arange(2)
    objects = {"nest": {"x": x, "gone": gone, "list": [torch.zeros(1)]}}
    snapshot = take(strategy, objects)
    for _ in range(2):
        x.fill_(5)
        gone += 1
        del objects["nest"]["gone"]
        objects["nest"]["list"].append(torch.ones(1))
        objects = go_back(strategy, objects, snapshot)
        nest = objects["nest"]
        assert nest["x"] is x
        assert x.tolist() == [1, 1, 1]
        assert nest["gone"].equal(torch.arange(2))
        assert [item.tolist() for item in nest["list"]] == [[0]]
        gone = nest["gone"]


def test_a_snapshot_is_not_changed_by_training(strategy):
    model = filled(torch.nn.Linear(2, 2), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    models = made_alike(lambda: filled(torch.nn.Linear(2, 2), 2))
    objects = {"model": model, "optimizer": optimizer, "models": models}
    snapshot = take(strategy, objects)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for one in models.values:
            filled(one, 7)
        objects = go_back(strategy, objects, snapshot)
        assert model.weight.tolist() == [[1, 1], [1, 1]]
        assert optimizer.state_dict()["state"] == {}
        assert [one.bias.sum().item() for one in objects["models"].values] == [4, 4, 4]
        assert objects["models"].values == models.values


def test_a_module_that_has_changed_its_parameters_is_an_error_and_keeps_them(strategy):
    model = filled(torch.nn.Sequential(torch.nn.Linear(2, 2)), 1)
    snapshot = take(strategy, {"model": model})
    filled(model, 3)[0] = torch.nn.Linear(2, 3)
    model.append(torch.nn.Linear(2, 2))
    with pytest.raises(
        CheckpointError, match=r"model\['0.weight'\] is float32\[3, 2\] here"
    ) as caught:
        go_back(strategy, {"model": model}, snapshot)
    assert "not in the checkpoint: model['1.weight']" in str(caught.value)
    assert model[0].weight.shape == (3, 2)


def trainer():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}


def test_a_replica_that_moves_here_gets_objects_of_its_own_that_belong_together():
    """As rank 1 of 3 with two replicas each becomes rank 0 of 2, with three."""
    trainers = {i: trainer() for i in (2, 3)}
    names = ("model", "optimizer")
    objects = {
        "step": 3,
        **{name: mr.PerReplica([trainers[i][name] for i in (2, 3)], (2, 3), 6) for name in names},
        "plain": mr.PerReplica([np.zeros(1), np.ones(1)], (2, 3), 6),
    }
    inner = objects["nest"] = {"items": [objects["model"], (objects["optimizer"], "text")]}
    held = held_in(objects)
    found = moved(objects, held, Layout((3, 3), 0))
    assert found["nest"] is inner
    assert found["plain"] is objects["plain"]
    for models, optimizers in (
        (found["model"], found["optimizer"]),
        (inner["items"][0], inner["items"][1][0]),
    ):
        assert models.replica_ids == (0, 1, 2)
        assert models.values[2] is trainers[2]["model"]
        assert len({id(model) for model in models.values}) == 3
        for model, optimizer in zip(models.values, optimizers.values, strict=True):
            assert optimizer.param_groups[0]["params"][0] is model.weight
    assert found["model"].values == inner["items"][0].values


def test_a_rank_that_had_no_replicas_makes_all_from_those_of_one(strategy):
    held = held_in({"parts": mr.PerReplica([trainer() for _ in range(3)])})
    sent = for_another_rank(held)
    assert [list(parts) for parts in sent.values()] == [[0]]
    here = {"parts": mr.PerReplica([], (), 3)}
    found = moved(here, sent, Layout((1, 2), 1))["parts"]
    assert found.replica_ids == (1, 2)
    models = [part["model"] for part in found.values]
    assert len({model.weight.data_ptr() for model in models}) == 2
    for part in found.values:
        assert part["optimizer"].param_groups[0]["params"][0] is part["model"].weight


def test_what_can_not_be_sent_to_a_rank_without_replicas_is_told():
    model = torch.nn.Linear(1, 1)
    model.scale = lambda x: 2 * x
    held = held_in({"models": [mr.PerReplica([model])]})
    with pytest.raises(AttributeError, match="lambda") as caught:
        for_another_rank(held)
    (note,) = caught.value.__notes__
    assert "models[0]" in note
    assert "must be importable" in note
