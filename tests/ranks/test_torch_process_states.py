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
