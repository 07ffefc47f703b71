"""The ordinary loop of torch: as one process with the global batch, with the same bits everywhere.

Where modules and optimizers are shared by replicas of a rank, results would depend on the layout:
that is an error on all ranks.
"""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_equal,
    check_works,
    error_of,
    gathered,
    holds_everywhere,
    raises_everywhere,
    shares_ranks,
)
from gradient_programs import as_numpy, replica_id, results
from mpi_replica.errors import ContextError
from on_a_device import DEVICE

torch = pytest.importorskip("torch", reason="torch is not installed")
stateless = pytest.importorskip("torch.nn.utils.stateless", reason="torch is not installed")

ROWS = (3, 0, 2, 4, 1, 5, 2) * 10  # of up to 70 replicas
STEPS = 4
F64 = torch.float64


def network():
    """The same on all replicas and ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    generator = torch.Generator(DEVICE).manual_seed(3)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))
    return model


def batch(i, number):
    """The rows of replica i in a step, and what is to be learnt of them."""
    random = np.random.default_rng([i, number])
    x, y = random.standard_normal((ROWS[i], 3)), random.standard_normal((ROWS[i], 1))
    return torch.as_tensor(x), torch.as_tensor(y + i)


def global_batch(count, number):
    return tuple(map(torch.cat, zip(*(batch(i, number) for i in range(count)), strict=True)))


def in_groups(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.05},
    ]


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
    "AdamW": lambda model: torch.optim.AdamW(in_groups(model), lr=0.02, weight_decay=0),
}
FORMS = ["plain", "clipped", "divided by a norm", "with a norm", "accumulated", "scheduled"]
LOOPS = [("Adam", form) for form in FORMS]
LOOPS += [(optimizer, form) for optimizer in ("SGD", "AdamW") for form in ("clipped", "scheduled")]


class Loop:
    """What a replica keeps from step to step; or one process, which has the rows of all.

    Parameters
    ----------
    share : float
        Of what the losses of all replicas have in common, so that it counts once.
    summed : callable
        Sums a nest over all replicas.
    """

    def __init__(self, optimizer, form, share=1.0, summed=lambda nest: nest):
        self.model = network()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.form, self.share, self.summed = form, share, summed
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.25)
        enabled = form == "scaled"
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=8.0, growth_interval=2, enabled=enabled
        )

    def loss(self, x, y, count):
        z = self.model(x)
        loss = ((z - y) ** 2).sum() / count
        if self.form in ("divided by a norm", "with a norm"):
            norm = self.summed((z**2).sum()).sqrt()
            if self.form == "with a norm":
                return loss + self.share * norm
            return loss / norm.detach()
        return loss

    def step(self, x, y, count):
        self.optimizer.zero_grad()
        parts = [slice(1), slice(1, None)] if self.form == "accumulated" else [slice(None)]
        for part in parts:
            self.scaler.scale(self.loss(x[part], y[part], count)).backward()
        parameters = list(self.model.parameters())
        sums = self.summed([parameter.grad for parameter in parameters])
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient
        self.scaler.unscale_(self.optimizer)
        if self.form == "clipped":
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.form == "scheduled":
            self.scheduler.step()

    def state(self):
        kept = self.optimizer.state_dict()["state"]
        tensors = [one for state in kept.values() for one in state.values() if one is not None]
        numbers = [self.scaler.get_scale(), *self.scheduler.get_last_lr()]
        return [as_numpy(p).copy() for p in (*self.model.parameters(), *tensors)], numbers


def trained(strategy, optimizer, form, overflows=None):
    """What each local replica has learnt, by its id: a run for each step."""
    count = strategy.num_replicas_in_sync

    def summed(nest):
        return mr.get_replica_context().all_reduce("SUM", nest)

    loops = strategy.experimental_distribute_values_from_function(
        lambda context: Loop(optimizer, form, 1 / count, summed)
    )

    def step(loop, number):
        x, y = batch(replica_id(), number)
        if (replica_id(), number) == overflows:
            y *= np.inf
        loop.step(x, y, sum(ROWS[:count]))

    for number in range(STEPS):
        strategy.run(step, (loops, number))
    states = [loop.state() for loop in strategy.experimental_local_results(loops)]
    return dict(zip(strategy.local_replica_ids, states, strict=True))


def trained_alone(count, optimizer, form, overflows=None):
    """What one process learns of the global batches."""
    loop = Loop(optimizer, form)
    for number in range(STEPS):
        x, y = global_batch(count, number)
        if overflows is not None and number == overflows[1]:
            y[0] *= np.inf
        loop.step(x, y, sum(ROWS[:count]))
    return loop.state()


def on_one_rank(count):
    """A strategy of this rank alone, which hosts all replicas."""
    from mpi4py import MPI

    options = mr.CommunicationOptions(reproducible=True)
    return mr.MPIStrategy(MPI.COMM_SELF, num_replicas=count, communication_options=options)


def bits(state):
    tensors, numbers = state
    return [tensor.tobytes() for tensor in tensors], numbers


def check_learnt(strategy, *arguments):
    """Check that replicas learn what one process does; with the same bits as on one rank."""
    count = strategy.num_replicas_in_sync
    found = trained(strategy, *arguments)
    with on_one_rank(count) as alone:
        same = trained(alone, *arguments)
    tensors, numbers = trained_alone(count, *arguments)

    def check():
        for mine in found.values():
            assert bits(mine) == bits(same[0])
            assert mine[1] == numbers
            for one, other in zip(mine[0], tensors, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)

    holds_everywhere(check)
    return numbers


@pytest.mark.parametrize(("optimizer", "form"), LOOPS)
def test_a_module_and_an_optimizer_a_replica_learn_as_one_process(reproducible, optimizer, form):
    check_learnt(reproducible, optimizer, form)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_overflow_on_one_replica_is_one_of_all(reproducible, optimizer):
    """The step is left out on all replicas, and the scale halved."""
    last = max(i for i in range(reproducible.num_replicas_in_sync) if ROWS[i])
    scale, *_ = check_learnt(reproducible, optimizer, "scaled", (last, 1))
    assert scale == 8.0  # halved once, and doubled after two steps without overflow


def test_all_steps_in_one_run_are_as_a_run_for_each(reproducible):
    """A replica may make many steps of its own optimizer in a run."""
    count, states = reproducible.num_replicas_in_sync, {}

    def step():
        context = mr.get_replica_context()
        loop = Loop("Adam", "clipped", 1 / count, lambda nest: context.all_reduce("SUM", nest))
        for number in range(STEPS):
            loop.step(*batch(replica_id(), number), sum(ROWS[:count]))
        states[replica_id()] = bits(loop.state())

    reproducible.run(step)
    expected = trained(reproducible, "Adam", "clipped")

    def check():
        assert states == {i: bits(state) for i, state in expected.items()}

    holds_everywhere(check)


# What replicas of a rank share


def own_gradients(model):
    """Those of this replica's rows; not written into the module."""
    x, y = batch(replica_id(), 0)
    return list(torch.autograd.grad(((model(x) - y) ** 2).sum(), list(model.parameters())))


def reduced(model):
    return mr.get_replica_context().all_reduce("SUM", own_gradients(model))


def written(model, gradients):
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def one_optimizer(kind):
    def make():
        model = network()
        optimizer = OPTIMIZERS[kind](model)

        def step():
            written(model, reduced(model))
            optimizer.step()

        return step

    return make


def an_optimizer_each():
    model = network()

    def step():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        written(model, reduced(model))
        optimizer.step()

    return step


def a_head_each_on_one_body():
    """The parameters that are shared are not the first of the optimizer."""
    body = network()

    def step():
        head = torch.nn.Linear(1, 1).double()
        both = torch.nn.Sequential(head, body)
        optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
        written(body, reduced(body))
        written(head, [torch.zeros_like(one) for one in head.parameters()])
        optimizer.step()

    return step


def one_scaler():
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step():
        factor = scaler.scale(torch.ones((), dtype=F64))
        written(model, [factor * gradient for gradient in reduced(model)])
        scaler.step(optimizer)
        scaler.update()

    return step


def with_a_scheduler():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step():
        written(model, reduced(model))
        optimizer.step()
        scheduler.step()

    return step


def a_gradient_without_zero_grad():
    model = network()

    def step():
        x, y = batch(replica_id(), 0)
        ((model(x) - y) ** 2).sum().backward()
        mr.get_replica_context().all_reduce("SUM", [p.grad for p in model.parameters()])

    return step


def a_gradient_set_to_zero_in_place():
    model = network()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step():
        model.zero_grad(set_to_none=False)
        x, y = batch(replica_id(), 0)
        ((model(x) - y) ** 2).sum().backward()
        mr.get_replica_context().all_reduce("SUM", {"g": [p.grad for p in model.parameters()]})

    return step


OF_OTHERS = "of another optimizer, with the same parameters"
MISTAKES = {
    "one SGD": (one_optimizer("SGD"), ["makes a step of SGD", "of the same rank"]),
    "one Adam": (one_optimizer("Adam"), ["makes a step of Adam"]),
    "one AdamW of groups": (one_optimizer("AdamW"), ["makes a step of AdamW"]),
    "two optimizers of the same parameters": (an_optimizer_each, ["step of SGD", OF_OTHERS]),
    "a head each on one body": (a_head_each_on_one_body, ["step of SGD", OF_OTHERS]),
    "one scaler": (one_scaler, ["makes a step of SGD"]),
    "with a scheduler": (with_a_scheduler, ["makes a step of SGD"]),
    "without zero_grad": (a_gradient_without_zero_grad, ["value[0] of", "was written while"]),
    "zeros in place": (a_gradient_set_to_zero_in_place, ["value['g'][0] of", "was written while"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_replicas_of_a_rank_share_is_an_error_on_all_ranks_where_some_do(strategy, mistake):
    make, words = MISTAKES[mistake]
    step = make()
    if not shares_ranks(strategy):
        strategy.run(step)  # each rank has its own
        strategy.run(step)
    else:
        error = raises_everywhere(ContextError, lambda: strategy.run(step))
        text = str(error)
        assert [word for word in words if word not in text] == [], text
        assert "strategy.experimental_distribute_values_from_function" in text
        assert "or make the step in a merge_fn" in text
        raises_everywhere(ContextError, lambda: strategy.run(step))  # also the next time
    check_works(strategy)


def test_after_an_error_a_run_with_its_own_modules_learns_as_if_there_had_been_none(reproducible):
    if shares_ranks(reproducible):
        raises_everywhere(ContextError, lambda: reproducible.run(one_optimizer("Adam")()))
    check_learnt(reproducible, "Adam", "plain")


def learnt_in_merge_fn(strategy):
    model = network()
    optimizer = OPTIMIZERS["Adam"](model)

    def merge_fn(strategy, gradients):
        written(model, strategy.reduce("SUM", gradients, axis=None))
        optimizer.step()
        optimizer.step()

    def step():
        mr.get_replica_context().merge_call(merge_fn, (own_gradients(model),))

    for _ in range(2):
        strategy.run(step)
    return [as_numpy(p).tobytes() for p in model.parameters()]


def test_a_shared_module_may_be_stepped_in_a_merge_fn(reproducible):
    found = learnt_in_merge_fn(reproducible)
    with on_one_rank(reproducible.num_replicas_in_sync) as alone:
        expected = learnt_in_merge_fn(alone)
    assert gathered(found) == [expected] * reproducible.size


def test_one_replica_may_step_twice_and_another_one_in_the_next_run(strategy):
    model = network()
    optimizer = OPTIMIZERS["SGD"](model)
    ids = strategy.local_replica_ids
    weight = model[0].weight.detach()

    def step(number):
        gradients = reduced(model)
        before = weight.clone()
        if replica_id() == ids[number % len(ids)]:
            written(model, gradients)
            optimizer.step()
            optimizer.step()
            assert not torch.equal(weight, before)

    for number in range(3):
        strategy.run(step, (number,))


def test_steps_outside_of_runs_are_nobodys(strategy):
    model = network()
    optimizer = OPTIMIZERS["Adam"](model)
    for _ in range(2):
        found = strategy.experimental_local_results(strategy.run(lambda: reduced(model)))
        written(model, found[0])
        optimizer.step()
    states = gathered([as_numpy(p).tobytes() for p in model.parameters()])
    assert len({tuple(state) for state in states}) == 1


def test_a_shared_module_whose_gradients_are_set_to_none_gives_each_replicas_own(strategy):
    model = network()

    def step():
        model.zero_grad()
        x, y = batch(replica_id(), 0)
        ((model(x) - y) ** 2).sum().backward()
        return mr.get_replica_context().all_reduce("SUM", [p.grad for p in model.parameters()])

    found = results(strategy, step)
    x, y = global_batch(strategy.num_replicas_in_sync, 0)
    plain = network()
    expected = torch.autograd.grad(((plain(x) - y) ** 2).sum(), list(plain.parameters()))

    def check():
        for mine in found.values():
            for one, other in zip(mine, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)

    holds_everywhere(check)


def test_replicas_may_write_their_own_rows_of_one_memory_in_place(strategy):
    """torch counts writes to a memory, whichever part of it is written."""
    count = strategy.num_replicas_in_sync
    memory = torch.arange(2.0 * count).reshape(count, 2)
    memory[0, 1] = torch.nan

    def step():
        rows = memory[replica_id()]
        rows.mul_(2)
        return mr.get_replica_context().all_reduce("SUM", rows)

    for found in results(strategy, step).values():
        assert as_numpy(found)[0] == 2.0 * count * (count - 1)
        assert np.isnan(as_numpy(found)[1])
    check_works(strategy)


def test_a_part_of_a_memory_that_another_replica_writes_is_an_error(strategy):
    if strategy.num_replicas_in_sync == strategy.size:
        pytest.skip("no rank has two replicas, of which one could write what is another's")
    memory = torch.ones(2, 2)

    def step():
        memory[0].add_(1.0)
        return mr.get_replica_context().all_reduce("SUM", memory[0])

    error = raises_everywhere(ContextError, lambda: strategy.run(step))
    assert "was written while" in str(error)
    check_works(strategy)


def recorded():
    """A tensor of which torch records what becomes of it."""
    return torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda context, shared: context.all_reduce("SUM", shared),
        lambda context, shared: context.all_gather({"x": shared}, 0),
        lambda context, shared: context.merge_call(lambda _, x: x, (shared,)),
        lambda context, shared: context.all_reduce("SUM", [shared, recorded()]),
        lambda context, shared: context.all_reduce("SUM", [shared, recorded(), 1.0]),
        lambda context, shared: context.all_gather({"x": shared, "y": recorded()}, 0),
        lambda context, shared: context.all_reduce("SUM", shared.requires_grad_()),
        lambda context, shared: context.merge_call(lambda _, *x: x, (shared, recorded())),
        lambda context, shared: torch.func.grad(
            lambda x: context.all_reduce("SUM", [shared, x])[1].sum()
        )(recorded()),
    ],
    ids=[
        "all_reduce",
        "all_gather",
        "merge_call",
        "all_reduce beside a recorded one",
        "all_reduce beside a recorded one and a number",
        "all_gather beside a recorded one",
        "all_reduce, recorded",
        "merge_call beside a recorded one",
        "all_reduce in torch.func",
    ],
)
def test_a_tensor_that_replicas_share_and_write_is_an_error_at_any_call(strategy, call):
    if strategy.num_replicas_in_sync == strategy.size:
        pytest.skip("no rank has two replicas, of which one could write what is another's")
    shared = torch.zeros(3)

    def step():
        with torch.no_grad():
            shared.fill_(replica_id())
        return call(mr.get_replica_context(), shared)

    error = raises_everywhere(ContextError, lambda: strategy.run(step))
    assert "was written while" in str(error)
    check_works(strategy)


MIRRORED = {
    "broadcast": lambda strategy: strategy.extended.broadcast_to(torch.ones(2)),
    "reduced": lambda strategy: strategy.extended.reduce_to(
        "MEAN", strategy.run(lambda: torch.ones(2))
    ),
    "a part": lambda strategy: mr.Mirrored(torch.ones(2, 3)[:, 1]),
}


@pytest.mark.parametrize("name", MIRRORED)
def test_a_replica_that_writes_into_a_mirrored_tensor_is_an_error_on_every_layout(strategy, name):
    """The replicas of a rank share it, as a mirrored array, which can't be written into."""
    given = {"g": [MIRRORED[name](strategy)]}
    last = strategy.num_replicas_in_sync - 1

    def step(given):
        if replica_id() == last:
            given["g"][0].mul_(2.0)
        return mr.get_replica_context().all_reduce("SUM", 1.0)

    error = raises_everywhere(ContextError, lambda: strategy.run(step, args=(given,)))
    assert "(args, kwargs)[0][0]['g'][0] of strategy.run was written" in str(error)
    check_works(strategy)


def test_replicas_may_compute_with_a_mirrored_tensor_and_write_into_copies(strategy):
    whole = torch.ones(3, 2)
    given = mr.Mirrored(whole[1])

    def step(given):
        whole[2].fill_(5.0)  # another part of the same memory
        return float((given.clone().mul_(2.0) + given).sum())

    found = strategy.experimental_local_results(strategy.run(step, args=(given,)))
    assert found == (6.0,) * len(strategy.local_replica_ids)
    check_works(strategy)


def test_an_update_of_components_that_writes_into_a_tensor_is_an_error_on_every_layout(strategy):
    with strategy.scope():
        v = mr.Variable(np.zeros(2), synchronization=mr.VariableSynchronization.ON_READ)
    given = strategy.extended.broadcast_to(torch.ones(2))
    strategy.extended.update(v, lambda v, g: v.assign(g * 2.0), args=(given,))
    for component in strategy.experimental_local_results(v):
        assert component.tolist() == [2.0, 2.0]

    def update():
        strategy.extended.update(v, lambda v, g: v.assign(g.mul_(2.0)), args=(given,))

    error = raises_everywhere(ContextError, update)
    assert "(args, kwargs)[0][0] of update was written" in str(error)
    check_works(strategy)


def test_optimizers_of_replicas_may_have_parameters_that_are_frozen_and_shared(strategy):
    backbone = torch.nn.Linear(3, 3).double().requires_grad_(False)

    def make(context):
        head = network()
        parameters = [*backbone.parameters(), *head.parameters()]
        return head, torch.optim.SGD(parameters, lr=0.1)

    def step(head, optimizer):
        x, y = batch(replica_id(), 0)
        optimizer.zero_grad()
        ((head(backbone(x)) - y) ** 2).sum().backward()
        for parameter in head.parameters():
            parameter.grad = mr.get_replica_context().all_reduce("MEAN", parameter.grad)
        optimizer.step()

    before = as_numpy(backbone.weight).copy()
    strategy.run(step, args=strategy.experimental_distribute_values_from_function(make))
    assert (as_numpy(backbone.weight) == before).all()
    check_works(strategy)


# A module as a function, whose weights are arguments


class Summed(torch.nn.Module):
    def forward(self, x):
        return mr.get_replica_context().all_reduce("SUM", x)


def factor():
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer


def own_after(body):
    return torch.nn.Sequential(body, Summed(), factor())


# By name: a replica's module, of one that all of a rank share; which weights it gets in a call.
FUNCTIONS = {
    "one module": (lambda shared: shared, ["0.weight", "2.weight"]),
    "one in a module of each": (torch.nn.Sequential, ["0.0.weight", "0.2.weight"]),
    "one layer": (lambda shared: own_after(shared[0]), ["0.weight", "2.weight"]),
    "their own": (lambda shared: own_after(factor()), ["0.weight", "2.weight"]),
    "their own after a frozen one": (lambda shared: own_after(shared[0]), ["2.weight"]),
}


@pytest.mark.filterwarnings(r"ignore:.*stateless\.functional_call:FutureWarning")
@pytest.mark.parametrize("call", [torch.func.functional_call, stateless.functional_call])
@pytest.mark.parametrize("form", FUNCTIONS)
def test_weights_of_a_functional_call_are_those_of_its_replica_or_an_error(strategy, form, call):
    make, names = FUNCTIONS[form]
    shared, x = own_after(factor()), torch.ones(1, 1)

    def step():
        weight = torch.full((1, 1), 2.0 + replica_id())
        module = make(shared)
        total = Summed()(call(shared[0], {"weight": weight}, (x,)))  # the collective after it
        return torch.cat([total, call(module, dict.fromkeys(names, weight), (x,))])

    if form.startswith("one") and shares_ranks(strategy):
        error = raises_everywhere(ContextError, lambda: strategy.run(step))
        assert "functional_call of Sequential" in str(error)
        assert "Call the collective after it. Give each replica a module" in str(error)
    else:
        found = {i: one.flatten().tolist() for i, one in results(strategy, step).items()}
        count = strategy.num_replicas_in_sync
        total = sum(2.0 + i for i in range(count))
        inner = total if len(names) == 2 else count
        expected = {i: [total, (2 + i) * inner] for i in strategy.local_replica_ids}
        holds_everywhere(lambda: check_equal(found, expected))
    weights = [one.item() for one in shared.parameters()]
    holds_everywhere(lambda: check_equal(weights, [1, 1]))


def test_after_a_run_a_model_can_be_converted_also_where_its_parameters_are_swapped(strategy):
    def make(context):
        model = torch.nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def convert():
        models = strategy.experimental_local_results(made[0])
        return [model.to(torch.float64).weight.dtype for model in models]

    made = strategy.experimental_distribute_values_from_function(make)
    strategy.run(step, args=made)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        found = error_of(convert) or convert()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)

    def check():
        assert found == [torch.float64] * len(strategy.local_replica_ids)

    holds_everywhere(check)
