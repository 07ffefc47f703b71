"""A module, an optimizer, a scheduler and a generator of each replica, and one module of each rank.

It ends with the same bits, whoever is lost. ``FOLDER``, if it is set, has a checkpoint of step 2.
"""

import hashlib
import os

import dying
import torch

import mpi_replica as mr

STEPS = 6

reproducible = mr.CommunicationOptions(reproducible=True)
strategy = mr.MPIStrategy(
    num_replicas=4,
    communication_options=reproducible,
    spares=int(os.environ.get("SPARES", "0")),
)
dying.watch_exchanges(strategy)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def network():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(1)))
    return model


def make(context):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def make_generator(context):
    return seeded(context.replica_id_in_sync_group)


parts = strategy.experimental_distribute_values_from_function(make)
generators = strategy.experimental_distribute_values_from_function(make_generator)
average = network()
state = mr.ElasticState(
    strategy,
    step=0,
    parts=parts,
    nest=[(generators, 7)],
    average=average,
    best=torch.ones(2, requires_grad=True),
)
folder = os.environ.get("FOLDER")
manager = mr.CheckpointManager(state, folder) if folder else None
first = [*average.parameters()]


def step(parts, generator):
    model, optimizer = parts["model"], parts["optimizer"]
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model(torch.randn(5, 3, generator=generator)).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    means = mr.get_replica_context().all_reduce("MEAN", gradients)
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean)
    optimizer.step()
    optimizer.zero_grad()  # what a step leaves that is broken off before, none must add up
    parts["scheduler"].step()


def train():
    while state.step < STEPS:
        dying.enter(f"step{state.step}")
        state.best.square().sum().backward()
        strategy.run(step, args=(state.parts, state.nest[0][0]))
        here = strategy.experimental_local_results(state.parts["model"])[0]
        with torch.no_grad():
            for one, other in zip(average.parameters(), here.parameters(), strict=True):
                one.lerp_(other, 0.5)
            state.best.copy_(here[2].bias + state.best.grad)
            state.best.grad = None
        state.step += 1
        if manager is not None and state.step == 2:
            manager.save(state.step)
        state.commit()
    return True


if strategy.run_elastic(train, state):
    assert all(one is other for one, other in zip(average.parameters(), first, strict=True))
    assert state.average is average
    strategy.verify([average, state.best])
    strategy.verify(state.parts)
    digest = hashlib.sha256()
    for model in (*strategy.experimental_local_results(state.parts["model"])[:1], average):
        for tensor in model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
    digest.update(state.best.detach().numpy().tobytes())
    draws = strategy.run(lambda one: float(torch.rand((), generator=one)), args=(state.nest[0][0],))
    every = [
        float(x) for x in strategy.gather(strategy.run(lambda x: torch.tensor([x]), (draws,)), 0)
    ]
    dying.tell("TOLD", [digest.hexdigest(), every, len(strategy.losses)])
strategy.close()
