"""What torch keeps for the process is a replica's own, also where several of a rank take turns."""

import contextlib

import pytest

import mpi_replica as mr
from everywhere import holds_everywhere, raises_everywhere
from gradient_programs import replica_id, results
from on_a_device import DEVICE

torch = pytest.importorskip("torch", reason="torch is not installed")
parametrize = pytest.importorskip("torch.nn.utils.parametrize", reason="torch is not installed")


def draw(size):
    return torch.rand(size, device=DEVICE)


def meet():
    return mr.get_replica_context().all_reduce("SUM", torch.ones(1))


def drawn(i, meet, merge):
    """What a replica draws: as all others, then from a seed of its own."""
    found = [draw(2)]
    meet()
    found.append(draw(1))
    merge(lambda *_: draw(3))
    found.append(draw(1))
    torch.manual_seed(i)
    merge(lambda *_: None)
    found.append(draw(i + 1))
    meet()
    return [number for one in [*found, draw(1)] for number in one.tolist()]


def test_a_replica_draws_from_torchs_generators_what_it_draws_on_a_rank_of_its_own(strategy):
    """So does the merge_fn; and what follows the run goes on from the rank's first replica."""

    def step():
        context = mr.get_replica_context()
        found.append(drawn(replica_id(), meet, context.merge_call))

    def alone(i):
        torch.manual_seed(5)
        return drawn(i, lambda: None, lambda merge_fn: merge_fn()), draw(2).tolist()

    found = []
    torch.manual_seed(5)
    strategy.run(step)
    after = draw(2).tolist()
    expected = [alone(i) for i in strategy.local_replica_ids]

    def check():
        assert sorted(found) == sorted(one for one, _ in expected)
        assert after == expected[0][1]

    holds_everywhere(check)


def test_a_run_that_fails_leaves_torchs_generators_as_the_ranks_first_replica_has_them(strategy):
    def step():
        draw(2)
        meet()
        draw(replica_id() + 1)
        if replica_id() == strategy.num_replicas_in_sync - 1:
            raise ValueError("the last one")
        meet()

    torch.manual_seed(5)
    raises_everywhere(ValueError, lambda: strategy.run(step))
    after = draw(1).tolist()
    torch.manual_seed(5)
    first = strategy.local_replica_ids[0]
    expected = [draw(size).tolist() for size in (2, first + 1, 1)]

    def check():
        assert after == expected[-1]

    holds_everywhere(check)


def test_a_checkpoint_with_dropout_and_a_collective_computes_with_the_same_mask_again(strategy):
    def block(x):
        x = x + 0 * mr.get_replica_context().all_reduce("MEAN", x)
        return torch.nn.functional.dropout(x, 0.5)

    def step():
        torch.manual_seed(replica_id())
        x = torch.ones(64, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        y.sum().backward()
        return torch.stack([y.detach(), x.grad])

    found = results(strategy, step)

    def check():
        for value, gradient in found.values():
            assert value.tolist() == gradient.tolist()

    holds_everywhere(check)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_cached_parametrization_is_computed_again_where_its_replica_has_left_cached(strategy):
    def step():
        module = torch.nn.Linear(1, 1, bias=False)
        parametrize.register_parametrization(module, "weight", Doubled())
        found = []
        for number in range(3):
            with parametrize.cached():
                torch.nn.init.constant_(module.parametrizations.weight.original, number)
                meet()
                weight = module.weight
                meet()
                assert module.weight is weight
                found.append(weight.item() + replica_id())
            assert module.weight is not weight
        return torch.tensor(found)

    found = {i: numbers.tolist() for i, numbers in results(strategy, step).items()}
    expected = {i: [i, i + 2.0, i + 4.0] for i in strategy.local_replica_ids}

    def check():
        assert found == expected

    holds_everywhere(check)


@contextlib.contextmanager
def held(get, switch, value):
    before = get()
    switch(value)
    try:
        yield
    finally:
        switch(before)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_switch_that_is_put_back_is_that_of_its_replica(strategy, ends_well):
    attention, backends = torch.nn.attention, torch.backends

    def now():
        return (
            torch.ones(1).dtype,
            torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cudnn.deterministic,
            backends.mkldnn.enabled,
        )

    def set_mkldnn(is_enabled):
        backends.mkldnn.enabled = is_enabled

    def step():
        context = mr.get_replica_context()
        with (
            held(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
            torch.autograd.set_detect_anomaly(True),
            held(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "warn"),
            attention.sdpa_kernel(attention.SDPBackend.MATH),
            backends.cudnn.flags(deterministic=True),
            held(lambda: backends.mkldnn.enabled, set_mkldnn, False),
        ):
            context.all_reduce("SUM", 1.0)
            inside = now()
            context.merge_call(lambda strategy: 1)
            if not ends_well:
                context.all_reduce("nonsense", 1.0)
        return inside, now()

    before = torch.float32, False, False, False, True, True, False, True
    switched = torch.float64, True, True, True, False, True, True, False
    assert now() == before
    if ends_well:
        found = strategy.gather_objects(strategy.run(step))
        assert set(found) == {(switched, before)}
    else:
        raises_everywhere(ValueError, lambda: strategy.run(step))
    assert now() == before


def linear():
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, 1)
    return module


def autocast(is_enabled=True):
    return torch.autocast("cpu", torch.bfloat16, is_enabled)


def holds(strategy, step, expected):
    """Check that `step` gives each replica what is expected, on every layout."""
    found = results(strategy, step)

    def check():
        assert {str(one) for one in found.values()} == {str(expected)}

    holds_everywhere(check)


@pytest.mark.parametrize("has_inner", [True, False])
def test_under_autocast_round_runs_each_computes_with_the_weights_of_now(strategy, has_inner):
    modules = {i: linear() for i in strategy.local_replica_ids}

    def step():
        module = modules[replica_id()]
        y = module(torch.ones(1, 1))
        with autocast(False) if has_inner else contextlib.nullcontext():
            mr.get_replica_context().all_reduce("MEAN", y.float().sum()).backward()
        with torch.no_grad():
            module.weight -= module.weight.grad
        module.zero_grad()
        return y.item()

    with autocast():
        for expected in (1.0, 0.0, -1.0):
            holds(strategy, step, expected)
        assert {module(torch.ones(1, 1)).item() for module in modules.values()} == {-2.0}


def test_an_autocast_casts_weights_anew_behind_a_collective(strategy):
    """How a gradient is rounded says whether both uses of a weight went through one cast."""

    def step():
        module = linear()
        with autocast():
            first = module(torch.ones(1, 1))
            meet()
            second = module(torch.full((1, 1), 256.0))
        (first + second).sum().backward()
        return module.weight.grad.item()

    holds(strategy, step, 257.0)


def test_what_a_merge_fn_casts_is_cast_anew_behind_it(strategy):
    module = linear()  # of the rank

    def merge_fn(_):
        found = module(torch.ones(1, 1)).item()
        with torch.no_grad():
            module.weight += 1
        return found

    def step():
        with autocast():
            inside = mr.get_replica_context().merge_call(merge_fn)
            return inside, module(torch.ones(1, 1)).item()

    holds(strategy, step, (1.0, 2.0))


def test_an_autocast_that_a_step_leaves_open_ends_with_it_also_for_casts_that_are_kept(strategy):
    module = linear()

    def with_new_weights():
        found = []
        for _ in range(3):
            with autocast():
                found.append(module(torch.ones(1, 1)).item())
            with torch.no_grad():
                module.weight += 1
        return found

    strategy.run(lambda: autocast().__enter__() and None)
    found = with_new_weights()

    def check():
        assert found == [1.0, 2.0, 3.0]

    holds_everywhere(check)
