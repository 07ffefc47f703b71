"""Batch norm over the rows of all replicas: what torch's own finds with all rows in one process."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    cost_of,
    culprits,
    holds_everywhere,
    needs_two_replicas,
    raises_everywhere,
)
from gradient_programs import as_numpy, replica_id, results
from mpi_replica.errors import ContextError, StructureMismatchError

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.nn.utils import parametrize, prune  # noqa: E402

CHANNELS = 3
ROWS = (3, 0, 2, 4, 1, 5, 2) * 10  # of up to 70 replicas
INNER = {2: (), 3: (4,), 4: (4, 2), 5: (2, 1, 3)}
PLAIN = {
    2: torch.nn.BatchNorm1d,
    3: torch.nn.BatchNorm1d,
    4: torch.nn.BatchNorm2d,
    5: torch.nn.BatchNorm3d,
}


def numbers(seed, i, inner, dtype, offset=0.0):
    """Rows of replica i, as many as it has."""
    random = np.random.default_rng([seed, i])
    values = random.standard_normal((ROWS[i], CHANNELS, *inner)) * (1 + i) + i + offset
    return torch.as_tensor(values).to(dtype)


def batches(i, steps, inner, dtype, offset=0.0):
    """The inputs of replica i in some steps, and by what its loss multiplies the outputs."""
    return [
        (numbers(step, i, inner, dtype, offset), numbers(100 + step, i, inner, dtype))
        for step in range(steps)
    ]


def of_all(count, *arguments):
    """The batches of all replicas in one."""
    steps = zip(*(batches(i, *arguments) for i in range(count)), strict=True)
    return [tuple(torch.cat(part) for part in zip(*of_step, strict=True)) for of_step in steps]


def own_rows(tensors, i):
    """Those of replica i of what was found for all rows."""
    first = sum(ROWS[:i])
    return [tensor[first : first + ROWS[i]] for tensor in tensors]


def initialized(norm):
    """A norm whose weights are no ones and zeros."""
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.arange(1, CHANNELS + 1) * 0.5 - number)
    return norm


def learnt(norm, steps):
    """What a norm gives and learns in some steps."""
    inputs = [x.clone().requires_grad_() for x, _ in steps]
    outputs = []
    for x, (_, factors) in zip(inputs, steps, strict=True):
        y = norm(x)
        (factors * y).sum().backward()
        outputs.append(y.detach())
    return (
        outputs,
        [x.grad for x in inputs],
        {name: p.grad for name, p in norm.named_parameters()},
        {name: b.clone() for name, b in norm.named_buffers()},
    )


def check_learnt(strategy, make, norm, arguments, **tolerance):
    """Check what `make()` learns on each replica against `norm`, which gets all rows."""

    def step():
        found = learnt(make(), batches(replica_id(), *arguments))
        sums = mr.get_replica_context().all_reduce("SUM", found[2]) if found[2] else {}
        return *found[:2], sums, found[3]

    found = results(strategy, step)
    outputs, inputs, parameters, buffers = learnt(
        norm, of_all(strategy.num_replicas_in_sync, *arguments)
    )

    def check():
        for i, mine in found.items():
            expected = own_rows(outputs, i), own_rows(inputs, i), parameters, buffers
            close(mine, expected, f"replica {i}", **tolerance)

    holds_everywhere(check)


def close(found, expected, about, **tolerance):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, about
        np.testing.assert_allclose(as_numpy(found), as_numpy(expected), err_msg=about, **tolerance)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), about
        close(
            list(found.values()), list(expected.values()), f"{about} {list(expected)}", **tolerance
        )
    else:
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            close(one, other, f"{about}, {number}", **tolerance)


FORMS = {
    "as it is": {},
    "without weights": {"affine": False},
    "a mean of all steps": {"momentum": None},
    "another momentum": {"momentum": 0.3, "eps": 0.1},
    "without running statistics": {"track_running_stats": False},
    "bare": {"affine": False, "track_running_stats": False},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axes", PLAIN)
def test_three_steps_are_those_of_one_process_with_all_rows(strategy, axes, form):
    arguments = 3, INNER[axes], torch.float64
    check_learnt(
        strategy,
        lambda: initialized(mr.torch.SyncBatchNorm(CHANNELS, **FORMS[form]).double()),
        initialized(PLAIN[axes](CHANNELS, **FORMS[form]).double()),
        arguments,
        rtol=1e-9,
        atol=1e-10,
    )


@pytest.mark.parametrize(
    ("dtype", "parameters", "tolerance"),
    [
        ("float32", "float32", 1e-5),
        ("float64", "float64", 1e-10),
        ("float16", "float32", 4e-3),
        ("bfloat16", "float32", 3e-2),
        ("float16", "float16", 1e-2),
        ("bfloat16", "bfloat16", 6e-2),
    ],
)
def test_each_dtype_of_inputs_and_parameters(strategy, dtype, parameters, tolerance):
    """Narrow ones against torch's own in float32, which get the same numbers."""
    dtype, parameters = getattr(torch, dtype), getattr(torch, parameters)
    count, inner = strategy.num_replicas_in_sync, (3, 3)

    def step():
        norm = initialized(mr.torch.SyncBatchNorm(CHANNELS).to(parameters))
        return learnt(norm, batches(replica_id(), 2, inner, dtype))

    def check():
        for i, mine in found.items():
            for tensor in (*mine[0], *mine[1]):
                assert tensor.dtype == dtype
            for tensor in (*mine[2].values(), *list(mine[3].values())[:2]):
                assert tensor.dtype == parameters
            pairs = [*zip(mine[0], own_rows(outputs, i), strict=True)]
            pairs += zip(mine[1], own_rows(inputs, i), strict=True)
            pairs += [(mine[3][name], buffers[name]) for name in buffers]
            for one, other in pairs:
                scale = float(other.abs().max()) if other.numel() else 1
                np.testing.assert_allclose(
                    as_numpy(one), as_numpy(other), rtol=tolerance, atol=tolerance * scale
                )

    found = results(strategy, step)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    steps = [(x.to(wide), factors.to(wide)) for x, factors in of_all(count, 2, inner, dtype)]
    outputs, inputs, _, buffers = learnt(initialized(PLAIN[4](CHANNELS).to(wide)), steps)
    holds_everywhere(check)


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_large_means_cost_no_more_digits_than_in_torch(strategy, offset):
    """Of outputs, gradients of inputs and of weights, and running variances."""
    count, inner = strategy.num_replicas_in_sync, (16, 16)

    def step():
        norm = mr.torch.SyncBatchNorm(CHANNELS)
        outputs, inputs, parameters, buffers = learnt(
            norm, batches(replica_id(), 1, inner, torch.float32, offset)
        )
        sums = mr.get_replica_context().all_reduce("SUM", parameters)
        return outputs[0], inputs[0], sums["weight"], buffers["running_var"]

    def plain(dtype):
        [(x, factors)] = of_all(count, 1, inner, torch.float32, offset)
        outputs, inputs, parameters, buffers = learnt(
            PLAIN[4](CHANNELS).to(dtype), [(x.to(dtype), factors.to(dtype))]
        )
        return outputs[0], inputs[0], parameters["weight"], buffers["running_var"]

    def check():
        right, torchs = plain(torch.float64), plain(torch.float32)
        for i, mine in found.items():
            for number, (exact, rounded, one) in enumerate(zip(right, torchs, mine, strict=True)):
                [own] = own_rows([exact], i) if number < 2 else [exact]
                if not own.numel():
                    continue
                error = float((one.double() - own).abs().max())
                of_torch = float((rounded.double() - exact).abs().max())
                # Torch adds the variance up in float64. Here it is as good as the inputs are.
                ulp = torch.finfo(torch.float32).eps * (offset if number == 3 else 1)
                assert error <= 8 * of_torch + ulp, (i, number, error, of_torch)

    found = results(strategy, step)
    holds_everywhere(check)


def test_second_derivatives_are_those_of_one_process(strategy):
    count, arguments = strategy.num_replicas_in_sync, (1, (2,), torch.float64)

    def squared_gradients(norm, step):
        [(x, factors)] = step
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((factors * norm(x) ** 2).sum(), x, create_graph=True)
        first.square().sum().backward()
        return x.grad, norm.weight.grad

    def step():
        norm = initialized(mr.torch.SyncBatchNorm(CHANNELS).double())
        of_x, of_weight = squared_gradients(norm, batches(replica_id(), *arguments))
        return of_x, mr.get_replica_context().all_reduce("SUM", of_weight)

    found = results(strategy, step)
    norm = initialized(PLAIN[3](CHANNELS).double())
    of_x, of_weight = squared_gradients(norm, of_all(count, *arguments))

    def check():
        for i, (mine, total) in found.items():
            close(mine, own_rows([of_x], i)[0], f"replica {i}", rtol=1e-8, atol=1e-8)
            close(total, of_weight, f"replica {i}", rtol=1e-8, atol=1e-8)

    holds_everywhere(check)


def test_evaluation_sends_nothing_and_is_that_of_torch(strategy):
    plain = initialized(PLAIN[4](CHANNELS).double())
    plain(of_all(1, 1, (2, 2), torch.float64)[0][0])
    norm = mr.torch.SyncBatchNorm(CHANNELS).double()
    norm.load_state_dict(plain.state_dict())
    plain.eval()
    norm.eval()

    def step():
        [(x, _)] = batches(replica_id(), 1, (2, 2), torch.float64)
        torch.testing.assert_close(norm(x), plain(x), rtol=0, atol=0)

    nothing = cost_of(strategy, lambda: strategy.run(lambda: None))[0]
    assert cost_of(strategy, lambda: strategy.run(step))[0] == nothing
    with strategy.scope():  # where there is no replica
        assert norm(torch.zeros(2, CHANNELS, 1, 1, dtype=torch.float64)).shape[0] == 2
    assert norm.num_batches_tracked == 1


def test_without_running_statistics_evaluation_takes_those_of_all_rows(strategy):
    check_learnt(
        strategy,
        lambda: mr.torch.SyncBatchNorm(CHANNELS, track_running_stats=False).double().eval(),
        PLAIN[4](CHANNELS, track_running_stats=False).double().eval(),
        (1, (2, 2), torch.float64),
        rtol=1e-9,
        atol=1e-10,
    )


def test_running_statistics_of_a_shared_module_move_once_a_call(strategy):
    """As where each replica has its own: also where a step calls it twice."""
    norm, plain = (kind(CHANNELS).double() for kind in (mr.torch.SyncBatchNorm, PLAIN[4]))

    def step(first, second):
        mine = batches(replica_id(), 4, (2, 2), torch.float64)
        for number in (first, second):
            norm(mine[number][0])

    every = of_all(strategy.num_replicas_in_sync, 4, (2, 2), torch.float64)
    for numbers_of_run in ((0, 1), (2, 3)):
        strategy.run(step, numbers_of_run)
        for number in numbers_of_run:
            plain(every[number][0])
    holds_everywhere(
        lambda: close(dict(norm.named_buffers()), dict(plain.named_buffers()), "", rtol=1e-9)
    )
    assert norm.num_batches_tracked == 4


def test_the_same_bits_on_every_layout(reproducible):
    """Outputs, running statistics and gradients, and those on one rank that hosts all replicas."""
    from mpi4py import MPI

    count = reproducible.num_replicas_in_sync

    def step():
        norm = initialized(mr.torch.SyncBatchNorm(CHANNELS))
        return learnt(norm, batches(replica_id(), 2, (3, 3), torch.float32))

    def bits(tree):
        if isinstance(tree, torch.Tensor):
            return as_numpy(tree).tobytes()
        return [bits(one) for one in (tree.values() if isinstance(tree, dict) else tree)]

    options = mr.CommunicationOptions(reproducible=True)
    with mr.MPIStrategy(MPI.COMM_SELF, num_replicas=count, communication_options=options) as alone:
        expected = results(alone, step)
    found = results(reproducible, step)

    def check():
        for i, mine in found.items():
            assert bits(mine) == bits(expected[i]), i
            assert bits(mine[3]) == bits(expected[0][3]), i

    holds_everywhere(check)


# Mistakes


def fails(strategy, kind, call, *words):
    error = raises_everywhere(kind, lambda: strategy.run(call))
    assert [word for word in words if word not in str(error)] == [], str(error)
    check_works(strategy)


@pytest.mark.parametrize("rows", [0, 1])
def test_less_than_two_values_of_all_replicas_are_an_error(strategy, rows):
    def step():
        norm = mr.torch.SyncBatchNorm(CHANNELS)
        norm(torch.ones(rows if replica_id() == 0 else 0, CHANNELS))

    fails(strategy, ValueError, step, f"{rows} values a channel", "two or more")


def test_one_value_on_each_replica_is_enough(strategy):
    needs_two_replicas(strategy)
    plain, count = PLAIN[2](1).double(), strategy.num_replicas_in_sync
    expected = plain(torch.arange(count, dtype=torch.float64)[:, None])

    def step():
        norm = mr.torch.SyncBatchNorm(1).double()
        return norm(torch.full((1, 1), replica_id(), dtype=torch.float64))

    for i, found in results(strategy, step).items():
        np.testing.assert_allclose(found.item(), expected[i].item(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((4,), ["shape (4,)", "(rows, channels, ...)"]),
        ((), ["shape ()"]),
        ((4, 1), ["shape (4, 1)", "made for 3"]),
        ((4, 5, 2), ["5 channels", "made for 3"]),
    ],
)
def test_an_input_of_another_shape_on_one_replica_is_an_error_on_all_ranks(strategy, shape, words):
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            norm = mr.torch.SyncBatchNorm(CHANNELS)
            norm(torch.ones(shape if replica_id() == culprit else (4, CHANNELS)))

        fails(strategy, ValueError, step, *words)


def test_another_dtype_or_number_of_channels_on_one_replica_is_an_error_on_all_ranks(strategy):
    needs_two_replicas(strategy)
    for culprit in culprits(strategy):

        def other_module(culprit=culprit):
            channels = 2 if replica_id() == culprit else CHANNELS
            mr.torch.SyncBatchNorm(channels)(torch.ones(4, channels))

        def other_dtype(culprit=culprit):
            dtype = torch.float64 if replica_id() == culprit else torch.float32
            mr.torch.SyncBatchNorm(CHANNELS).to(dtype)(torch.ones(4, CHANNELS, dtype=dtype))

        for step in (other_module, other_dtype):
            fails(strategy, StructureMismatchError, step, "moments")


def test_in_cross_replica_context_training_is_an_error(strategy):
    norm = mr.torch.SyncBatchNorm(CHANNELS)
    with strategy.scope(), pytest.raises(ContextError, match=r"strategy\.run, or call eval"):
        norm(torch.ones(4, CHANNELS))
    check_works(strategy)


# States and the converter


def test_each_item_of_a_batch_of_vmap_is_normalized_by_itself(strategy):
    norm = initialized(mr.torch.SyncBatchNorm(CHANNELS, track_running_stats=False).double())

    def step():
        rows = numbers(1, 2, (), torch.float64) * (1 + replica_id())
        items = torch.stack([rows, rows.flip(0) - 7, rows**2])
        apart = [norm(item) for item in items]
        return torch.func.vmap(norm)(items), torch.stack(apart)

    for together, apart in results(strategy, step).values():
        torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_running_statistics_in_a_transformed_function_are_an_error_that_says_so(
    strategy, transform
):
    norm = mr.torch.SyncBatchNorm(CHANNELS)

    def step():
        rows = numbers(1, 0, (), torch.float32) * (1 + replica_id())
        return transform(lambda x: norm(x).square().sum())(rows[None].expand(2, -1, -1))

    error = raises_everywhere(RuntimeError, lambda: strategy.run(step))
    for word in ("running statistics", "torch.func", "track_running_stats=False"):
        assert word in str(error)
    check_works(strategy)


def test_states_of_torchs_own_are_loaded_and_given():
    for form in FORMS.values():
        plain = initialized(PLAIN[4](CHANNELS, **form))
        plain(of_all(1, 1, (2, 2), torch.float32)[0][0])
        norm = mr.torch.SyncBatchNorm(CHANNELS, **form)
        norm.load_state_dict(plain.state_dict())
        close(norm.state_dict(), plain.state_dict(), "", rtol=0)
        again = PLAIN[4](CHANNELS, **form)
        again.load_state_dict(norm.state_dict())
        close(again.state_dict(), plain.state_dict(), "", rtol=0)


class Block(torch.nn.Module):
    """A model with norms at several places, one of them twice."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.BatchNorm1d(4, eps=0.5, momentum=None)
        self.again = self.first
        self.nothing = None
        self.register_module("none", None)
        self.inner = torch.nn.ModuleDict(
            {
                "list": torch.nn.ModuleList(
                    [torch.nn.Linear(4, 4), torch.nn.BatchNorm2d(4, affine=False)]
                ),
                "bare": torch.nn.Sequential(torch.nn.BatchNorm3d(4, track_running_stats=False)),
            }
        )
        self.shared = self.inner["list"][1]


def test_the_converter_replaces_norms_and_keeps_all_else():
    model = Block()
    model.inner.eval()
    before = dict(model.named_parameters()), dict(model.named_buffers())
    names = list(model.state_dict())
    assert mr.torch.convert_sync_batchnorm(model) is model
    for kept, now in zip(before, (model.named_parameters(), model.named_buffers()), strict=True):
        now = dict(now)
        assert list(now) == list(kept)
        assert all(now[name] is kept[name] for name in kept)
    assert list(model.state_dict()) == names
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert [type(norm) for norm in norms] == [mr.torch.SyncBatchNorm] * 3
    assert [norm.training for norm in norms] == [True, False, False]
    assert (norms[0].eps, norms[0].momentum) == (0.5, None)
    assert (norms[1].affine, norms[2].track_running_stats) == (False, False)
    assert model.again is model.first
    assert model.shared is model.inner["list"][1]
    converted = list(model.modules())
    mr.torch.convert_sync_batchnorm(model)
    assert list(model.modules()) == converted  # once more: nothing


def test_the_converter_returns_the_successor_of_a_norm_and_takes_modules_only():
    plain = torch.nn.BatchNorm2d(CHANNELS)
    norm = mr.torch.convert_sync_batchnorm(plain)
    assert type(norm) is mr.torch.SyncBatchNorm
    assert norm.weight is plain.weight
    assert mr.torch.convert_sync_batchnorm(norm) is norm
    assert type(mr.torch.convert_sync_batchnorm(torch.nn.SyncBatchNorm(2))) is type(norm)
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module"):
        mr.torch.convert_sync_batchnorm("model")


class Scaled(torch.nn.BatchNorm1d):
    """A norm with more states than those of torch."""

    def __init__(self):
        super().__init__(CHANNELS)
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.register_parameter("shift", None)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_the_converter_keeps_parameters_and_buffers_of_a_programs_own_norm():
    plain = Scaled()
    norm = mr.torch.convert_sync_batchnorm(plain)
    assert list(norm.state_dict()) == list(plain.state_dict())
    for found, expected in (
        (norm._parameters, plain._parameters),
        (norm._buffers, plain._buffers),
    ):
        assert list(found) == list(expected)
        assert all(found[name] is expected[name] for name in expected)


class Rectified(torch.nn.BatchNorm1d):
    """A norm that calls a module of its own."""

    def __init__(self):
        super().__init__(CHANNELS)
        self.act = torch.nn.ReLU()

    def forward(self, input):
        return self.act(super().forward(input))


class Doubled(torch.nn.BatchNorm1d):
    """A norm that computes more than that."""

    def forward(self, input):
        return 2 * super().forward(input)


def patched():
    norm = torch.nn.BatchNorm1d(CHANNELS)
    norm.forward = torch.nn.functional.relu
    return norm


def hooked():
    norm = torch.nn.BatchNorm1d(CHANNELS)
    norm.register_forward_hook(lambda module, given, found: 2 * found)
    return norm


BESET = {
    "pruned": lambda: prune.l1_unstructured(torch.nn.BatchNorm1d(CHANNELS), "weight", 1),
    "parametrized": lambda: parametrize.register_parametrization(
        torch.nn.BatchNorm1d(CHANNELS), "weight", torch.nn.Softplus(), unsafe=True
    ),
    "hooked": hooked,
    "with a module": Rectified,
    "with a forward": lambda: Doubled(CHANNELS),
    "with another forward": patched,
}


@pytest.mark.parametrize("name", BESET)
def test_the_converter_refuses_a_norm_whose_hooks_modules_and_forward_would_be_lost(name):
    plain = torch.nn.BatchNorm1d(CHANNELS)
    model = torch.nn.Sequential(plain, torch.nn.Sequential(BESET[name]()))
    with pytest.raises(TypeError, match=r"can't replace the \w+ at 1\.0: it has .*Convert"):
        mr.torch.convert_sync_batchnorm(model)
    assert model[0] is plain


def test_the_converter_takes_a_lazy_norm_that_has_seen_an_input():
    model = torch.nn.Sequential(torch.nn.LazyBatchNorm1d())
    with pytest.raises(TypeError, match=r"the LazyBatchNorm1d at 0: .* Call the module once"):
        mr.torch.convert_sync_batchnorm(model)
    model(torch.ones(2, CHANNELS))
    converted = mr.torch.convert_sync_batchnorm(model)[0]
    assert type(converted) is mr.torch.SyncBatchNorm
    assert converted.num_features == CHANNELS


def test_a_converted_norm_can_be_pruned_and_the_model_converted_again():
    model = mr.torch.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(CHANNELS)))
    prune.l1_unstructured(model[0], "weight", 1)
    assert mr.torch.convert_sync_batchnorm(model)[0].weight.count_nonzero() == CHANNELS - 1


def test_a_norm_whose_running_statistics_were_taken_away_takes_those_of_the_input(strategy):
    def without_statistics(norm):
        norm.running_mean = norm.running_var = None
        return norm.double()

    check_learnt(
        strategy,
        lambda: without_statistics(mr.torch.SyncBatchNorm(CHANNELS)),
        without_statistics(PLAIN[4](CHANNELS)),
        (2, (2, 2), torch.float64),
        rtol=1e-9,
        atol=1e-10,
    )


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_norm_whose_count_of_batches_was_taken_away_is_that_of_torch(strategy, momentum):
    def without_count(norm):
        norm.num_batches_tracked = None
        return norm.double()

    check_learnt(
        strategy,
        lambda: without_count(mr.torch.SyncBatchNorm(CHANNELS, momentum=momentum)),
        without_count(PLAIN[4](CHANNELS, momentum=momentum)),
        (2, (2, 2), torch.float64),
        rtol=1e-9,
        atol=1e-10,
    )


def test_a_norm_that_has_a_weight_and_no_bias_stays_so(strategy):
    def without_bias():
        norm = initialized(PLAIN[4](CHANNELS).double())
        norm.bias = None
        return norm

    check_learnt(
        strategy,
        lambda: mr.torch.convert_sync_batchnorm(without_bias()),
        without_bias(),
        (2, (2, 2), torch.float64),
        rtol=1e-9,
        atol=1e-10,
    )


def test_a_converted_model_that_was_optimized_before_learns_as_with_all_rows(strategy):
    def model():
        torch.manual_seed(5)
        return torch.nn.Sequential(
            torch.nn.Conv2d(CHANNELS, 4, 2), torch.nn.BatchNorm2d(4), torch.nn.Tanh()
        ).double()

    def trained(net, steps, reduced):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        net = mr.torch.convert_sync_batchnorm(net) if reduced else net
        for x, _ in steps:
            optimizer.zero_grad()
            net(x).pow(3).sum().backward()
            parameters = list(net.parameters())
            gradients = [p.grad for p in parameters]
            for p, gradient in zip(
                parameters, reduced(gradients) if reduced else gradients, strict=True
            ):
                p.grad = gradient
            optimizer.step()
        return net.state_dict()

    def step():
        context = mr.get_replica_context()
        return trained(
            model(),
            batches(replica_id(), 3, (3, 3), torch.float64),
            lambda gradients: context.all_reduce("SUM", gradients),
        )

    found = results(strategy, step)
    every = of_all(strategy.num_replicas_in_sync, 3, (3, 3), torch.float64)
    expected = trained(model(), every, None)

    def check():
        for i, mine in found.items():
            close(mine, expected, f"replica {i}", rtol=1e-8, atol=1e-9)

    holds_everywhere(check)
