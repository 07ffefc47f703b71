"""What torch programs save: tensors, modules, optimizers, schedulers and generators as they are."""

import copy
import os

import numpy as np
import pytest

import mpi_replica as mr
from checkpoints import Stateful, listing, on_other_layouts, replica_id
from everywhere import (
    check_works,
    error_of,
    gathered,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
)
from mpi_replica.core.object_state import put_state
from mpi_replica.errors import (
    CheckpointError,
    ContextError,
    DivergenceError,
    StructureMismatchError,
)
from on_a_device import DEVICE

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("ml_dtypes", reason="numpy knows bfloat16 by it")


def save(strategy, path, **objects):
    mr.Checkpoint(strategy, **objects).save(path)


def restored(strategy, path, **objects):
    checkpoint = mr.Checkpoint(strategy, **objects)
    checkpoint.restore(path)
    return checkpoint


def same(one, other):
    """Whether two tensors have the same bits, dtype and shape."""
    return one.dtype == other.dtype and one.shape == other.shape and one.cpu().equal(other.cpu())


def same_state(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(same_state(*pair) for pair in zip(one, other, strict=True))
        )
    return type(one) is type(other) and one == other


def made(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)


def network(seed):
    """A module with parameters, buffers, tied weights, and a scalar."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    )
    model[3].weight = model[2].weight
    model[2].register_parameter("scale", torch.nn.Parameter(torch.zeros(())))
    with torch.no_grad():
        for tensor in (*model.parameters(), model[1].running_mean):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def trained(model, optimizer, steps, schedulers=()):
    """Train on what does not depend on the rank."""
    for number in range(steps):
        optimizer.zero_grad()
        loss = (model(made(number, 6, 3)) * model[2].scale.exp()).square().mean()
        loss.backward()
        optimizer.step(*[lambda loss=loss: loss][: isinstance(optimizer, torch.optim.LBFGS)])
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*[loss.item()][:plateau])
    return model


def each(strategy, make):
    """One object a replica; `make` gets the replica's id."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


# Tensors


TENSORS = {
    "float32": lambda i: made(i, 3, 4),
    "float16": lambda i: made(i, 5, dtype=torch.float16),
    "bfloat16": lambda i: made(i, 5, dtype=torch.bfloat16),
    "complex64": lambda i: torch.complex(made(i, 3), made(i + 1, 3)),
    "int64": lambda i: torch.arange(4) + i,
    "uint8": lambda i: torch.tensor([i, 255], dtype=torch.uint8),
    "bool": lambda i: torch.tensor([bool(i), True]),
    "without dimensions": lambda i: torch.tensor(float(i)),
    "empty": lambda i: torch.empty(0, 3),
    "transposed": lambda i: made(i, 3, 4).t(),
    "every other": lambda i: made(i, 8)[::2],
    "conjugate": lambda i: torch.complex(made(i, 3), made(i + 1, 3)).conj(),
    "parameter": lambda i: torch.nn.Parameter(made(i, 3)),
    "made in inference mode": lambda i: in_inference_mode(lambda: made(i, 3)),
}


def in_inference_mode(make):
    with torch.inference_mode():
        return make()


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_comes_back_into_the_memory_that_is_there(strategy, path, kind):
    wanted, here = TENSORS[kind](1), TENSORS[kind](0)
    save(strategy, path, nest={"x": [wanted]}, x=wanted, pair=(wanted, 3))
    alias = here.detach()
    nest, number = {"x": [here]}, here.requires_grad
    checkpoint = restored(strategy, path, nest=nest, x=here, pair=(here, 0))
    for found in (checkpoint.nest["x"][0], checkpoint.x, checkpoint.pair[0]):
        assert found is here
    assert same(alias.resolve_conj(), wanted.detach().resolve_conj())
    assert (here.requires_grad, here.is_inference()) == (number, wanted.is_inference())
    assert checkpoint.pair[1] == 3


def test_a_computed_tensor_that_two_names_hold_gives_each_what_was_saved_of_it(strategy, path):
    """torch copies only what it has not computed."""
    weight = torch.ones(2, requires_grad=True)
    save(strategy, path, x=2 * weight, y=[3 * weight])
    one = strategy.rank * weight
    found = restored(strategy, path, x=one, y=[one])
    assert found.x is one
    assert (found.x.tolist(), found.y[0].tolist()) == ([2, 2], [3, 3])


ALIKE = {
    "detached": lambda tensor: tensor.detach(),
    "of the same shape": lambda tensor: tensor.view(4),
    "an array of numpy": lambda tensor: tensor.detach().numpy(),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="tensors on a GPU are known by their identity")
@pytest.mark.parametrize("how", ALIKE)
def test_a_tensor_and_what_has_its_memory_get_each_what_was_saved_of_it(strategy, path, how):
    view = ALIKE[how]
    save(strategy, path, x=made(1, 4).requires_grad_(), y=view(made(2, 4).requires_grad_()))
    here = (made(0, 4) + strategy.rank).requires_grad_()
    found = restored(strategy, path, x=here, y=view(here))
    assert found.x is here
    assert same(here.detach(), made(1, 4))
    assert same(torch.as_tensor(found.y).detach(), made(2, 4))


def test_what_others_look_into_stays_one_memory(strategy, path):
    whole = made(1, 4, 4)
    save(strategy, path, part=whole[1:3, ::2], mirrored=mr.Mirrored(whole[0]))
    again = torch.zeros(4, 4)
    checkpoint = restored(strategy, path, part=again[1:3, ::2], mirrored=mr.Mirrored(again[0]))
    assert same(again[1:3, ::2], whole[1:3, ::2])
    assert same(again[0], whole[0])
    assert again[3].count_nonzero() == 0
    assert isinstance(checkpoint.mirrored, mr.Mirrored)


def test_a_tensor_that_cannot_be_written_is_replaced(strategy, path):
    wanted = torch.ones(1).expand(3)
    save(strategy, path, x=wanted)
    here = torch.zeros(1).expand(3)
    found = restored(strategy, path, x=here).x
    assert same(found, torch.ones(3))
    assert here.count_nonzero() == 0


def test_autograd_sees_that_a_tensor_was_restored(strategy, path):
    """Else a gradient would be made of what is no longer there."""
    save(strategy, path, x=made(1, 3))
    x = torch.zeros(3, requires_grad=True)
    y = x.square().sum()
    restored(strategy, path, x=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_numpy_arrays_and_tensors_fit_each_other(strategy, path):
    save(strategy, path, a=np.arange(3.0), b=torch.arange(3.0))
    tensor, array = torch.zeros(3, dtype=torch.float64), np.zeros(3, np.float32)
    checkpoint = restored(strategy, path, a=tensor, b=array)
    assert (tensor.tolist(), array.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert checkpoint.a is tensor


def test_another_shape_or_dtype_is_told_and_nothing_changed(strategy, path):
    save(strategy, path, x=[torch.ones(3), torch.ones(2)], step=3)
    here = [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)]
    checkpoint = mr.Checkpoint(strategy, x=here, step=0)
    error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    assert "x[1] is bfloat16[2] here, and float32[2] in the checkpoint" in str(error)
    assert [tensor.count_nonzero() for tensor in here] == [0, 0]
    checkpoint.restore(path, strict=False)
    assert [tensor.count_nonzero() for tensor in here] == [3, 0]
    assert checkpoint.step == 3


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(2).to_sparse(), "tensor.to_dense()"),
        (lambda: torch.empty(2, device="meta"), "on meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "no such dtype"),
        (lambda: torch.ones(2).to(torch.float8_e4m3fn), "no such dtype"),
        (lambda: torch.nn.UninitializedParameter(), "uninitialized"),
    ],
    ids=["sparse", "meta", "quantized", "float8", "uninitialized"],
)
def test_a_tensor_without_plain_values_is_an_error_that_says_where(strategy, path, make, words):
    for value, where in (
        ({"a": make()}, "(checkpoint.x['a'])"),
        (Stateful(w=make()), "(checkpoint.x.state_dict()['w'])"),
    ):
        error = raises_everywhere(TypeError, lambda x=value: save(strategy, path, x=x))
        assert where in str(error), str(error)
        assert words in str(error), str(error)
    assert listing(path) == []
    save(strategy, path, x={"a": torch.ones(2)})
    error = raises_everywhere(
        (TypeError, CheckpointError), lambda: restored(strategy, path, x={"a": make()})
    )
    assert "x['a']" in str(error)
    check_works(strategy)


def test_the_state_of_an_object_has_tensors_where_it_had_some(strategy, path):
    state = {
        "tensor": made(1, 3, dtype=torch.bfloat16),
        "array": np.arange(3),
        "nest": [(torch.tensor(2), None), {7: torch.empty(0)}],
    }
    save(strategy, path, holder=Stateful(**state))
    holder = Stateful()
    restored(strategy, path, holder=holder)
    assert same_state(holder.state["nest"], state["nest"])
    assert same(holder.state["tensor"], state["tensor"])
    assert isinstance(holder.state["array"], np.ndarray)


def test_an_object_in_the_state_of_another_one_is_an_error_that_says_what_to_put_there(
    strategy, path
):
    for inner in (network(1), torch.Generator(DEVICE)):
        error = raises_everywhere(
            TypeError, lambda x=inner: save(strategy, path, trainer=Stateful(parts=[x]))
        )
        assert "(checkpoint.trainer.state_dict()['parts'][0])" in str(error)
        assert "Put its own state there" in str(error)
    check_works(strategy)


def test_a_tensor_of_each_replica_goes_where_its_replica_is(strategy, path):
    own = strategy.run(lambda: {"x": torch.full((replica_id() + 1,), float(replica_id()))})
    save(strategy, path, own=own)
    before = own["x"].values
    found = restored(strategy, path, own=each(strategy, lambda i: {"x": 0})).own["x"]
    assert all(same(*pair) for pair in zip(found.values, before, strict=True))


# Modules


def test_a_module_is_restored_on_any_number_of_ranks_and_replicas(strategy, world, path):
    wanted = network(1)
    save(strategy, path, model=wanted, step=3)

    def check(other):
        model = network(2)
        weight, tensors = model[0].weight, list(model.parameters())
        checkpoint = restored(other, path, model=model, step=0)
        assert checkpoint.model is model
        assert model[0].weight is weight
        assert all(map(torch.Tensor.is_set_to, model.parameters(), tensors))
        assert model[3].weight is model[2].weight
        assert all(tensor.requires_grad for tensor in model.parameters())
        assert same_state(dict(model.state_dict()), dict(wanted.state_dict()))

    on_other_layouts(world, check)


def test_each_parameter_is_written_once_and_each_rank_writes_about_as_much(strategy, path):
    layers = [torch.nn.Linear(10, 10, bias=False) for _ in range(6)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    for number, layer in enumerate(layers):
        layer.weight.fill_(number)
    layers[5].weight = layers[4].weight  # tied
    save(strategy, path, models=each(strategy, lambda i: copy.deepcopy(model)))
    sizes = [os.path.getsize(file) for file in path.parent.glob("trained.*.data-*")]
    assert len(sizes) == min(strategy.size, 5)
    assert max(sizes) - min(sizes) <= 400
    assert sum(sizes) == 5 * 400
    gathered(None)


def test_views_that_are_conjugate_or_negative_are_arrays_of_their_own(strategy, path):
    x = torch.tensor([1 + 2j, 3 + 4j], device=DEVICE)
    views = [x, x.conj(), x.imag, x.conj().imag]
    mr.Checkpoint(strategy, views=views).save(path)
    found = mr.Checkpoint(strategy, views=[torch.zeros_like(view) for view in views])
    found.restore(path)
    assert [view.tolist() for view in found.views] == [view.tolist() for view in views]


def test_a_module_that_lacks_a_parameter_is_told_by_name_before_anything_changes(strategy, path):
    save(strategy, path, model=network(1), x=np.ones(2))
    model, x = network(2), np.zeros(2)
    model[1] = torch.nn.Identity()
    model[0] = torch.nn.Linear(3, 4, dtype=torch.float64)
    model.append(torch.nn.Linear(4, 1))
    model[2].scale = torch.nn.Parameter(torch.zeros(1))
    before = copy.deepcopy(model.state_dict())
    checkpoint = mr.Checkpoint(strategy, x=x, model=model)
    error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    for words in (
        "not in the checkpoint: model['4.weight'], model['4.bias']",
        "not in the program: model['1.weight'], model['1.bias'], model['1.running_mean']",
        "model['0.weight'] is float64[4, 3] here, and float32[4, 3] in the checkpoint",
        "model['2.scale'] is float32[1] here, and float32[] in the checkpoint",
    ):
        assert words in str(error), str(error)
    assert same_state(dict(model.state_dict()), dict(before))
    assert x.tolist() == [0, 0]
    checkpoint.restore(path, strict=False)
    assert same(model[2].weight, network(1)[2].weight)
    assert same(model[4].weight, before["4.weight"])
    assert same(model[0].weight, before["0.weight"])
    assert x.tolist() == [1, 1]
    check_works(strategy)


def test_of_many_parameters_that_have_other_names_some_are_told(strategy, path):
    model = torch.nn.Sequential(*(torch.nn.PReLU() for _ in range(30)))
    save(strategy, path, model=model)
    error = raises_everywhere(
        CheckpointError,
        lambda: restored(strategy, path, model=torch.nn.ModuleDict({"inner": model})),
    )
    assert "model['inner.19.weight'] and 10 more; not in the program: " in str(error)


class Versioned(torch.nn.Module):
    """A module that has learned, at version 2, to keep its scale as a logarithm."""

    _version = 2

    def __init__(self, value):
        super().__init__()
        self.log_scale = torch.nn.Parameter(torch.tensor(value))
        self.loaded = None

    def get_extra_state(self):
        return {"classes": ["a", "b"], "table": torch.arange(2)}

    def set_extra_state(self, state):
        self.loaded = state

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}log_scale"] = state[f"{prefix}log_scale"].log()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_module_gets_its_extra_state_and_the_version_that_wrote_it(strategy, path):
    model = torch.nn.Sequential(Versioned(0.5))
    save(strategy, path, model=model)
    again = torch.nn.Sequential(Versioned(0.0))
    restored(strategy, path, model=again)
    assert again[0].log_scale.item() == 0.5
    assert same_state(again[0].loaded, model[0].get_extra_state())


def test_a_lazy_module_gets_its_shapes(strategy, path):
    layer = network(1)[0]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    save(strategy, path, model=torch.nn.Sequential(layer), optimizer=optimizer)
    model = torch.nn.Sequential(torch.nn.LazyLinear(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    restored(strategy, path, model=model, optimizer=optimizer)
    assert model[0].weight.shape == (4, 3)
    assert optimizer.param_groups[0]["lr"] == 0.5


# Optimizers, schedulers, generators


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "SGD without momentum": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "Adam": lambda ps: torch.optim.Adam(
        ps, lr=torch.tensor(0.01, device="cpu"), amsgrad=True, foreach=False
    ),
    "AdamW in groups": lambda ps: torch.optim.AdamW(
        [{"params": ps[:2], "weight_decay": 0.1}, {"params": ps[2:], "lr": 0.02}]
    ),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, max_iter=2, history_size=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_training_goes_on_as_if_it_had_not_been_stopped(strategy, path, name, steps):
    def make(seed):
        model = network(seed)
        return model, OPTIMIZERS[name](list(model.parameters()))

    model, optimizer = make(1)
    trained(model, optimizer, steps)
    save(strategy, path, model=model, optimizer=optimizer)
    trained(model, optimizer, 3)
    for steps_before in (0, 1):
        again = make(2)
        trained(*again, steps_before)
        restored(strategy, path, model=again[0], optimizer=again[1])
        trained(*again, 3)
        assert same_state(dict(again[0].state_dict()), dict(model.state_dict()))
        assert same_state(again[1].state_dict(), optimizer.state_dict())


def test_a_learning_rate_that_is_a_tensor_stays_on_its_device():
    optimizer, saved = (torch.optim.SGD([torch.zeros(2)], lr=torch.tensor(0.5)) for _ in range(2))
    # another device than that of what was read, as a GPU is
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25, device="meta")
    put_state(optimizer, saved.state_dict())
    assert optimizer.param_groups[0]["lr"].device.type == "meta"


def test_an_optimizer_of_other_parameters_is_told_before_anything_changes(strategy, path):
    model = network(1)
    save(strategy, path, x=torch.ones(1), optimizer=torch.optim.Adam(model.parameters()))
    x = torch.zeros(1)
    parameters = list(model.parameters())
    for others, words in (
        (parameters[1:], "groups of [8] parameters here, and of [9] in the checkpoint"),
        (
            [parameters[1], parameters[0], *parameters[2:]],
            "parameter 0 of shape [4] here, and of shape [4, 3]",
        ),
    ):
        if "groups" in words:
            words = words.replace("8", str(len(others))).replace("9", str(len(parameters)))
        checkpoint = mr.Checkpoint(strategy, x=x, optimizer=torch.optim.Adam(others))
        error = raises_everywhere(CheckpointError, lambda one=checkpoint: one.restore(path))
        assert words in str(error), str(error)
        assert float(x) == 0


@pytest.mark.parametrize(
    ("saved", "other", "missing", "unexpected"),
    [
        ("Adam", "SGD", "momentum", "betas"),
        ("AdamW", "RMSprop", "alpha", "betas"),
        ("Adam", "Adagrad", "lr_decay", "betas"),
        ("SGD", "Adam", "betas", "dampening"),
    ],
)
def test_a_state_of_another_kind_of_optimizer_is_told_before_anything_changes(
    strategy, path, saved, other, missing, unexpected
):
    model = network(1)
    optimizer = trained_by(getattr(torch.optim, saved), model)
    save(strategy, path, x=torch.ones(1), nest=[optimizer])
    x, optimizer = torch.zeros(1), getattr(torch.optim, other)(model.parameters(), lr=0.5)
    checkpoint = mr.Checkpoint(strategy, x=x, nest=[optimizer])
    error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    here, there = str(error).split("for its parameters, and the checkpoint has [")
    assert "different: nest[0] needs [" in here, here
    assert (repr(missing) in here, repr(unexpected) in there) == (True, True), str(error)
    assert (float(x), optimizer.param_groups[0]["lr"]) == (0, 0.5)
    checkpoint.restore(path, strict=False)
    assert (float(x), optimizer.param_groups[0]["lr"]) == (1, 0.5)
    trained(model, optimizer, 1)


def trained_by(kind, model):
    optimizer = kind(model.parameters(), lr=0.01)
    trained(model, optimizer, 1)
    return optimizer


def test_options_that_torch_fills_in_or_that_a_scheduler_has_added_may_differ(strategy, path):
    model = network(1)
    optimizer = trained_by(torch.optim.AdamW, model)
    torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False)
    for name in ("decoupled_weight_decay", "fused", "maximize"):  # as of an older version of torch
        optimizer.param_groups[0].pop(name, None)
    save(strategy, path, optimizer=optimizer)
    again = torch.optim.AdamW(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.StepLR(again, 2)
    restored(strategy, path, optimizer=again)
    assert again.param_groups[0]["lr"] == 0.01
    trained(model, again, 1)


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "CosineAnnealingWarmRestarts": (
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3)
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o),
            torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(strategy, path, name):
    def make():
        model = network(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    def train(objects, steps):
        trained(objects["model"], objects["optimizer"], steps, [objects["scheduler"]])
        return [group["lr"] for group in objects["optimizer"].param_groups]

    objects = make()
    train(objects, 3)
    save(strategy, path, **objects)
    wanted = train(objects, 2)
    again = make()
    restored(strategy, path, **again)
    assert train(again, 2) == wanted
    states = [one["scheduler"].state_dict() for one in (again, objects)]
    assert same_state(*states)


def test_generators_and_scalers_go_on_where_they_were(strategy, path):
    def make(seed):
        return {
            "generator": torch.Generator(DEVICE).manual_seed(seed),
            "rng": np.random.default_rng(seed),
            "twister": np.random.Generator(np.random.MT19937(seed)),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed),
        }

    def draws(objects):
        numbers = torch.rand(3, generator=objects["generator"]).tolist()
        return [*numbers, objects["rng"].random(), objects["twister"].random()]

    objects = make(1)
    draws(objects)
    save(strategy, path, **objects)
    wanted = draws(objects)
    again = make(2)
    restored(strategy, path, **again)
    assert draws(again) == wanted
    assert same_state(again["scaler"].state_dict(), objects["scaler"].state_dict())


# Objects of each replica


def objects_of_each(strategy, seed):
    def make(context):
        model = network(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    return strategy.experimental_distribute_values_from_function(make)


def train_each(strategy, objects, steps):
    strategy.run(
        lambda one: trained(one["model"], one["optimizer"], steps, [one["scheduler"]]) and None,
        args=(objects,),
    )


def states_of(objects):
    return [
        {name: parts.values[i].state_dict() for name, parts in objects.items()}
        for i in range(len(objects["model"].values))
    ]


def test_a_module_and_an_optimizer_of_each_replica_go_on_in_any_layout(strategy, world, path):
    objects = objects_of_each(strategy, 1)
    train_each(strategy, objects, 2)
    save(strategy, path, objects=objects, step=2)
    train_each(strategy, objects, 2)
    wanted = states_of(objects)[0]

    def check(other):
        again = objects_of_each(other, 2)
        before = again["model"].values
        checkpoint = restored(other, path, objects=again, step=0)
        assert checkpoint.objects["model"].values == before
        train_each(other, checkpoint.objects, 2)
        for state in states_of(checkpoint.objects):
            assert same_state(dict(state["model"]), dict(wanted["model"]))
            assert same_state(state["optimizer"], wanted["optimizer"])
            assert same_state(state["scheduler"], wanted["scheduler"])
        optimizers = checkpoint.objects["optimizer"].values
        states = [one.state[one.param_groups[0]["params"][0]]["exp_avg"] for one in optimizers]
        assert len({state.data_ptr() for state in states}) == len(states)

    on_other_layouts(world, check)


def test_what_was_saved_of_replicas_is_restored_without_them_and_back(strategy, path):
    """By a program that evaluates, say, on one process."""
    model = network(1)
    save(strategy, path, model=each(strategy, lambda i: network(1)))
    again = network(2)
    restored(strategy, path, model=again)
    assert same_state(dict(again.state_dict()), dict(model.state_dict()))
    save(strategy, path, model=again)
    models = each(strategy, lambda i: network(2))
    restored(strategy, path, model=models)
    for one in models.values:
        assert same_state(dict(one.state_dict()), dict(model.state_dict()))


def test_replicas_whose_parameters_differ_are_named_with_the_parameter(strategy, path):
    needs_two_replicas(strategy)
    culprit = strategy.num_replicas_in_sync - 1

    def make(i):
        model = network(1)
        with torch.no_grad():
            model[2].bias[1] += i == culprit
        return model

    models = each(strategy, make)
    layout = strategy.engine.layout
    error = raises_everywhere(DivergenceError, lambda: save(strategy, path, models=models))
    text = str(error)
    for words in (
        "Checkpoint.save at ",
        "test_checkpoint_torch.py:",
        "checkpoint.models['2.bias'] differs: 1 of 4 elements, first element [1]: ",
        f"on {layout.describe([culprit])}",
        "strategy.experimental_local_results(checkpoint.models)[0].state_dict()",
        "as a PerReplica of its state",
    ):
        assert words in text, text
    assert listing(path) == []
    check_works(strategy)


def test_what_the_error_says_makes_replicas_the_same_or_keeps_them_different(strategy, path):
    models = each(strategy, network)
    state = strategy.extended.broadcast_to(
        strategy.experimental_local_results(models)[0].state_dict()
    )
    own = strategy.run(lambda one: one.state_dict(), args=(models,))
    save(strategy, path, own=own)
    again = each(strategy, lambda i: network(7))
    found = restored(strategy, path, own=strategy.run(lambda m: m.state_dict(), args=(again,))).own
    strategy.run(lambda m, state: m.load_state_dict(state), args=(again, found))
    for i, model in zip(again.replica_ids, again.values, strict=True):
        assert same(model[0].weight, network(i)[0].weight)
    strategy.run(lambda one, state: one.load_state_dict(state), args=(models, state))
    save(strategy, path, models=models)


def test_an_optimizer_that_one_replica_has_not_stepped_is_an_error(strategy, path):
    needs_two_replicas(strategy)
    objects = objects_of_each(strategy, 1)
    strategy.run(
        lambda one: (replica_id() and trained(one["model"], one["optimizer"], 1)) and None,
        args=(objects,),
    )
    error = raises_everywhere(
        StructureMismatchError, lambda: save(strategy, path, optimizer=objects["optimizer"])
    )
    assert "['state'][0]['exp_avg']" in str(error), str(error)
    assert listing(path) == []
    check_works(strategy)


def test_a_module_of_each_rank_that_differs_is_an_error(strategy, path):
    """Each rank writes a part of it: it would be a mixture."""
    needs_two_ranks(strategy)
    error = raises_everywhere(
        DivergenceError, lambda: save(strategy, path, model=network(strategy.rank))
    )
    assert "checkpoint.model['0.weight'] differs" in str(error)
    assert "checkpoint.model.load_state_dict" in str(error)
    generator = torch.Generator(DEVICE).manual_seed(strategy.rank)
    error = raises_everywhere(DivergenceError, lambda: save(strategy, path, generator=generator))
    assert "give all the same seed" in str(error)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1 + strategy.rank)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for name, one in (("optimizer", optimizer), ("scheduler", scheduler)):
        with pytest.raises(DivergenceError, match=rf"checkpoint\.{name}\['"):
            save(strategy, path, **{name: one})
    check_works(strategy)


def test_a_generator_of_each_replica_goes_on_with_its_replica(strategy, path):
    def draws(generators):
        return [torch.rand(2, generator=one).tolist() for one in generators.values]

    generators = each(strategy, lambda i: torch.Generator(DEVICE).manual_seed(i))
    save(strategy, path, generators=generators)
    wanted = draws(generators)
    again = each(strategy, lambda i: torch.Generator(DEVICE).manual_seed(99))
    before = again.values
    found = restored(strategy, path, generators=again).generators
    assert found.values == before
    assert draws(found) == wanted


# Which strategy


def test_a_checkpoint_without_variables_says_how_to_give_its_strategy(strategy, path):
    checkpoint = mr.Checkpoint(model=network(1), step=0)
    for call in (checkpoint.save, checkpoint.restore):
        error = error_of(lambda call=call: call(path))
        assert isinstance(error, ContextError)
        assert "mr.Checkpoint(strategy, ...)" in str(error)
    with strategy.scope():
        checkpoint.save(path)
    check_works(strategy)
