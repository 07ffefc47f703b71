"""Random numbers of replicas: streams that depend on the seed and the id, and on nothing else."""

import copy
import pickle

import numpy as np
import pytest

import mpi_replica as mr

# With seed 0: of replicas 0 and 1, and of the code above them.
PUBLISHED = [[1549492777984469684, 1544746767416922900], [1617390233616911008, 248613921103111336]]
PUBLISHED_SHARED = [3321941988530776071, 3502784532332894231]


def strategy_of(seed=None, replicas=4, **options):
    given = mr.CommunicationOptions(**options)
    return mr.MPIStrategy(num_replicas=replicas, seed=seed, communication_options=given)


def draw(count=3):
    return mr.get_replica_context().rng.integers(1 << 62, size=count).tolist()


def draws(strategy, count=3):
    """What each replica draws next."""
    found = []
    strategy.run(lambda: found.append(draw(count)))
    return found


def test_each_replica_has_its_own_numbers_whatever_the_number_of_replicas():
    found = draws(strategy_of(7, replicas=6))
    assert len({tuple(numbers) for numbers in found}) == 6
    assert draws(strategy_of(7, replicas=2)) == found[:2]


def test_they_are_these():
    """What somebody has published must come out again with any later version."""
    assert draws(strategy_of(0, replicas=2), 2) == PUBLISHED
    assert strategy_of(0).rng.integers(1 << 62, size=2).tolist() == PUBLISHED_SHARED


def test_they_depend_on_the_seed():
    seeds = [0, 1, 2, 1 << 32, 1 << 64, 1 << 127, 1 << 200]
    assert len({str(draws(strategy_of(seed))) for seed in seeds}) == len(seeds)
    assert draws(strategy_of(5)) == draws(strategy_of(np.int64(5)))


def test_they_go_on_from_one_run_to_the_next_and_within_one():
    strategy = strategy_of(7)
    pairs = zip(draws(strategy, 2), draws(strategy, 1), strict=True)
    assert [one + other for one, other in pairs] == draws(strategy_of(7), 3)
    rng = []
    for _ in range(2):
        strategy.run(lambda: rng.append(mr.get_replica_context().rng))
    assert rng[:4] == rng[4:]


def test_of_one_strategy_they_are_not_those_of_another_without_a_seed():
    found = [draws(strategy_of()) for _ in range(3)] + [draws(strategy_of(0))]
    assert len({str(numbers) for numbers in found}) == 4


def test_a_reproducible_strategy_has_the_same_in_every_run():
    assert draws(strategy_of(reproducible=True)) == draws(strategy_of(0))
    assert draws(strategy_of(3, reproducible=True)) == draws(strategy_of(3))


@pytest.mark.parametrize("seed", [0, 7])
def test_they_are_not_the_numbers_that_a_program_gets_from_the_seed_itself(seed):
    """Neither from it nor from what it spawns: both may be drawn in one program."""
    strategy = strategy_of(seed)
    ours = [tuple(numbers) for numbers in draws(strategy)]
    ours.append(tuple(strategy.rng.integers(1 << 62, size=3).tolist()))
    sequence = np.random.SeedSequence(seed)
    others = [np.random.default_rng(seed), *np.random.default_rng(seed).spawn(8)]
    others += map(np.random.default_rng, [*sequence.spawn(8), (seed, 0), (seed, 1)])
    theirs = [tuple(rng.integers(1 << 62, size=3).tolist()) for rng in others]
    assert len({*ours, *theirs}) == len(ours) + len({*theirs})
    assert len(set(ours)) == len(ours)


def test_above_the_replicas_there_is_a_generator_that_goes_on_too():
    strategy = strategy_of(7)
    first, second = (strategy.rng.integers(1 << 62) for _ in range(2))
    assert [first, second] == strategy_of(7).rng.integers(1 << 62, size=2).tolist()
    assert strategy.rng is strategy.rng


def test_a_replica_is_told_that_its_own_are_elsewhere():
    strategy = strategy_of(7)
    with pytest.raises(mr.errors.ContextError, match=r"strategy\.rng"):
        strategy.run(lambda: strategy.rng)
    assert draws(strategy) == draws(strategy_of(7))


def test_a_merge_fn_draws_from_the_one_above():
    strategy = strategy_of(7)
    found = strategy.run(
        lambda: mr.get_replica_context().merge_call(lambda strategy: strategy.rng.random())
    )
    assert set(found.values) == {strategy_of(7).rng.random()}


def test_a_context_that_was_made_by_hand_has_the_numbers_of_its_replica():
    expected = draws(strategy_of(7))
    strategy = strategy_of(7)
    with mr.ReplicaContext(strategy, 2) as ctx:
        assert ctx.rng.integers(1 << 62, size=3).tolist() == expected[2]
    with mr.ReplicaContext(strategy, None) as ctx, pytest.raises(ValueError, match="has no id"):
        ctx.rng.random()


DRAWS = {
    "beta": (1, 1), "binomial": (3, 0.5), "bytes": (3,), "chisquare": (1,), "choice": (3,),
    "dirichlet": ([1, 2],), "f": (1, 1), "gamma": (1,), "geometric": (0.5,),
    "hypergeometric": (1, 2, 2), "integers": (3,), "logseries": (0.5,), "multinomial": (3, [1.0]),
    "multivariate_hypergeometric": ([1, 2], 2), "multivariate_normal": ([0], [[1]]),
    "negative_binomial": (1, 0.5), "noncentral_chisquare": (1, 1), "noncentral_f": (1, 1, 1),
    "pareto": (1,), "permutation": (3,), "permuted": ([1, 2],), "power": (1,),
    "shuffle": ([1, 2],), "spawn": (1,), "standard_gamma": (1,), "standard_t": (1,),
    "triangular": (0, 1, 2), "vonmises": (0, 1), "wald": (1, 1), "weibull": (1,), "zipf": (2,),
}  # fmt: skip


def test_whatever_is_drawn_from_the_one_above_is_refused_in_a_replica():
    """By each way that numpy has, also those of versions to come."""
    strategy = strategy_of()
    above, plain = strategy.rng, np.random.default_rng(0)
    ways = {name for name in dir(above) if not name.startswith("_")} - {"bit_generator"}
    for name in sorted(ways):
        arguments = DRAWS.get(name, ())
        getattr(plain, name)(*arguments)  # they are right
        before = above.bit_generator.state
        with pytest.raises(mr.errors.ContextError, match=r"strategy\.rng was drawn from in a repl"):
            strategy.run(getattr(above, name), args=arguments)
        assert above.bit_generator.state == before


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_the_one_above_is_a_generator_of_its_own(again):
    strategy = strategy_of(7)
    strategy.rng.random()
    copied = again(strategy.rng)
    assert type(copied.bit_generator) is np.random.PCG64
    assert copied.bit_generator.state == strategy.rng.bit_generator.state
    (first, *others) = strategy.experimental_local_results(strategy.run(lambda: copied.random()))
    assert first == strategy.rng.random()
    assert others
    (child,) = strategy.rng.spawn(1)
    strategy.run(child.random)


def test_the_default_strategy_has_random_numbers_too():
    assert 0 <= mr.get_replica_context().rng.random() < 1
    with mr.get_strategy().scope():
        assert 0 <= mr.get_strategy().rng.random() < 1


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (-1, ValueError, "seed must be at least 0, got -1"),
        (True, TypeError, "seed must be an integer, got True"),
        (1.0, TypeError, "seed must be an integer, got 1.0"),
        ("1", TypeError, "seed must be an integer, got '1'"),
        ([1], TypeError, r"seed must be an integer, got \[1\]"),
    ],
)
def test_what_is_no_seed_is_an_error(seed, error, words):
    with pytest.raises(error, match=words):
        strategy_of(seed)


# MPI_REPLICA_REPRODUCIBLE

VARIABLE = "MPI_REPLICA_REPRODUCIBLE"
# In another order than along the tree their sum is lost in the first one.
NUMBERS = [2.0**53, 0.0, 1.0, 1.0]


def is_reproducible(**options):
    """Whether the sum of a strategy goes along the tree: on one rank it goes from left to right."""
    strategy = strategy_of(**options)

    def step():
        ctx = mr.get_replica_context()
        return ctx.all_reduce("SUM", NUMBERS[ctx.replica_id_in_sync_group])

    (total,) = set(strategy.run(step).values)
    return bool(total == 2.0**53 + 2)


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("0", False), (None, False)])
def test_the_environment_says_whether_strategies_are_reproducible(monkeypatch, text, expected):
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    assert is_reproducible() is expected


@pytest.mark.parametrize("text", ["1", "0"])
def test_the_options_of_a_strategy_win_over_the_environment(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    assert is_reproducible(reproducible=True)
    assert not is_reproducible(reproducible=False)


def test_a_strategy_that_the_environment_makes_reproducible_has_seed_0(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert draws(strategy_of()) == draws(strategy_of(0))


@pytest.mark.parametrize("text", ["", "yes", "true", " 1", "2"])
def test_anything_else_in_the_environment_is_an_error(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"{VARIABLE}='{text}' is neither 1 nor 0"):
        strategy_of()
    assert is_reproducible(reproducible=True)  # where it is not asked for


def test_the_library_s_own_order_does_not_fit_to_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(ValueError, match="can't be had with implementation=ALLREDUCE"):
        strategy_of(implementation="ALLREDUCE")
