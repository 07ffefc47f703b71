"""Contexts (DESIGN.md section 3, decisions 13, 14, 19; tf_semantics.md 1.1, cases 1 to 14)."""

import concurrent.futures
import contextlib
import contextvars
import ctypes
import functools
import gc
import io
import operator
import sys
import threading
import time
import warnings

import greenlet
import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    culprits,
    error_of,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
)


def state():
    context = mr.get_replica_context()
    return (
        None if context is None else context.replica_id_in_sync_group,
        mr.in_cross_replica_context(),
        mr.has_strategy(),
        mr.get_strategy(),
    )


DEFAULT = (0, False, False, mr.get_strategy())


@pytest.fixture(autouse=True)
def every_test_ends_in_the_default_state():
    yield
    assert state() == DEFAULT


def test_a_program_starts_with_one_replica_of_the_default_strategy():
    """Case 1."""
    assert state() == DEFAULT
    assert mr.get_replica_context().num_replicas_in_sync == 1
    assert mr.get_replica_context() is mr.get_replica_context()


def test_a_scope_is_cross_replica_context(strategy):
    """Case 2."""
    with strategy.scope() as entered:
        assert entered is strategy
        assert state() == (None, True, True, strategy)
    assert state() == DEFAULT


def test_a_replica_has_one_context_during_the_whole_function(strategy):
    seen = []

    def step():
        first = mr.get_replica_context()
        first.all_reduce("SUM", 1.0)
        assert mr.get_replica_context() is first
        assert first.strategy is strategy
        assert first.num_replicas_in_sync == strategy.num_replicas_in_sync
        seen.append(state())

    strategy.run(step)
    assert seen == [(i, False, True, strategy) for i in strategy.local_replica_ids]


def test_a_merge_fn_runs_in_cross_replica_context(strategy):
    """Case 4."""
    seen = []

    def merge_fn(first):
        seen.append((first, *state()))

    strategy.run(lambda: mr.get_replica_context().merge_call(merge_fn))
    assert seen == [(strategy, None, True, True, strategy)]


def test_merge_call_in_the_default_state():
    """There has_strategy() stays False (section 1.1, default-merge)."""
    assert mr.get_replica_context().merge_call(lambda s: (s, *state())) == (
        mr.get_strategy(),
        None,
        True,
        False,
        mr.get_strategy(),
    )


def test_a_scope_may_be_entered_again_and_nested(strategy):
    """Case 5."""
    scope = strategy.scope()
    with scope, strategy.scope(), scope:
        assert state() == (None, True, True, strategy)
    with scope:
        assert mr.has_strategy()


def test_an_exception_leaves_the_scope(strategy):
    with pytest.raises(KeyError), strategy.scope(), strategy.scope():
        raise KeyError("x")
    assert state() == DEFAULT


def test_scopes_are_left_in_the_order_they_were_entered(strategy):
    outer, inner = strategy.scope(), strategy.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(mr.errors.ContextError, match="nesting"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)


def in_scope_while_it_lives(strategy):
    with strategy.scope():
        yield
        yield


def test_an_error_leaves_all_scopes_that_were_entered_below_it(strategy):
    """Also those of a generator that goes on to live, as the traceback holds it."""

    def fails():
        with strategy.scope():
            layers = in_scope_while_it_lives(strategy)
            for _ in layers:
                raise ValueError("this trial fails")

    with pytest.raises(ValueError, match="this trial fails") as caught:
        fails()
    assert not mr.in_cross_replica_context()
    del caught
    gc.collect()
    assert not mr.in_cross_replica_context()
    with strategy.scope():
        with pytest.raises(ValueError, match="this trial fails"):
            fails()
        gc.collect()
        assert mr.get_strategy() is strategy
    check_works(strategy)


def test_generators_that_end_in_any_order_leave_their_own_scopes_alone(strategy):
    for first, second in ((0, 1), (1, 0)):
        generators = [in_scope_while_it_lives(strategy) for _ in range(2)]
        for generator in generators:
            next(generator)
        generators[first].close()
        assert mr.get_strategy() is strategy
        next(generators[second])
        generators[second].close()
        assert not mr.in_cross_replica_context()
    check_works(strategy)


def test_a_scope_that_was_not_entered_can_not_be_left(strategy):
    with pytest.raises(mr.errors.ContextError, match="nesting error"):
        strategy.scope().__exit__(None, None, None)
    check_works(strategy)


def test_the_default_scope_must_not_be_nested_in_another(strategy):
    """Case 7."""
    default = mr.get_strategy()
    with strategy.scope(), pytest.raises(RuntimeError, match="Must not nest"), default.scope():
        pass
    with default.scope(), default.scope():
        assert state() == DEFAULT
        with strategy.scope():
            assert mr.get_strategy() is strategy


def test_another_strategy_can_not_be_entered(strategy):
    with mr.MPIStrategy() as other:
        with strategy.scope(), pytest.raises(RuntimeError, match="Mixing"), other.scope():
            pass
        with other.scope():
            assert mr.get_strategy() is other


def test_a_strategy_can_be_set_for_good(strategy):
    """Case 8."""
    with mr.MPIStrategy() as other:
        try:
            mr.experimental_set_strategy(strategy)
            assert state() == (None, True, True, strategy)
            with strategy.scope():
                assert mr.get_strategy() is strategy
            mr.experimental_set_strategy(other)
            assert state() == (None, True, True, other)
        finally:
            mr.experimental_set_strategy(None)
    assert state() == DEFAULT


def test_what_is_no_strategy_can_not_be_set(strategy):
    for chosen in (1, "mpi", mr.MPIStrategy):
        with pytest.raises(TypeError, match="experimental_set_strategy needs a strategy or None"):
            mr.experimental_set_strategy(chosen)
    assert state() == DEFAULT


@pytest.mark.parametrize("inside", ["scope", "replica"])
def test_a_strategy_can_not_be_set_inside_a_scope_or_a_replica(strategy, inside):
    for chosen in (strategy, None):
        attempt = functools.partial(mr.experimental_set_strategy, chosen)
        if inside == "replica":
            attempt = functools.partial(strategy.run, attempt)
        scope = strategy.scope() if inside == "scope" else contextlib.nullcontext()
        with pytest.raises(RuntimeError, match="experimental_set_strategy"), scope:
            attempt()


CROSS_REPLICA_CALLS = {
    "run": (lambda s, x: s.run(print), "merge_call"),
    "reduce": (lambda s, x: s.reduce("SUM", x, axis=None), "merge_call"),
    "gather": (lambda s, x: s.gather(x, axis=0), "all_gather"),
    "scope": (lambda s, x: s.scope().__enter__(), "merge_call"),
    "reduce_to": (lambda s, x: s.extended.reduce_to("SUM", x, None), "merge_call"),
    "batch_reduce_to": (lambda s, x: s.extended.batch_reduce_to("SUM", [(x, None)]), "merge_call"),
    "broadcast_to": (lambda s, x: s.extended.broadcast_to(1.0), "merge_call"),
    "experimental_distribute_dataset": (
        lambda s, x: s.experimental_distribute_dataset(mr.data.Dataset.range(4).batch(2)),
        "",
    ),
    "distribute_datasets_from_function": (
        lambda s, x: s.distribute_datasets_from_function(lambda _: []),
        "",
    ),
    "barrier": (lambda s, x: s.barrier(), "all_reduce"),
    "gather_objects": (lambda s, x: s.gather_objects(x), "merge_call"),
    "close": (lambda s, x: s.close(), ""),
}


@pytest.mark.parametrize("call", CROSS_REPLICA_CALLS)
def test_calls_from_above_in_a_replica_name_the_call_that_fits(strategy, call):
    """Case 10."""
    do, instead = CROSS_REPLICA_CALLS[call]
    ones = strategy.run(lambda: np.ones(1))
    error = raises_everywhere(
        mr.errors.ContextError, lambda: strategy.run(lambda: do(strategy, ones))
    )
    assert call in str(error)
    assert instead in str(error)
    check_works(strategy)


@pytest.mark.parametrize("call", CROSS_REPLICA_CALLS)
def test_calls_from_above_under_another_strategy(strategy, call):
    """Case 13: legal in the default state and in its own scope, mixing elsewhere."""
    do, _ = CROSS_REPLICA_CALLS[call]
    ones = strategy.run(lambda: np.ones(1))
    with mr.MPIStrategy() as other, other.scope():
        with pytest.raises(RuntimeError, match="Mixing"):
            do(strategy, ones)
    check_works(strategy)
    if call not in ("close", "scope"):
        do(strategy, ones)
        with strategy.scope():
            do(strategy, ones)


REPLICA_CALLS = {
    "all_reduce": (lambda c: c.all_reduce("SUM", 1.0), "strategy.reduce"),
    "all_gather": (lambda c: c.all_gather(np.ones(1), 0), "strategy.gather"),
    "merge_call": (lambda c: c.merge_call(lambda s: 1), "function itself"),
}


@pytest.mark.parametrize("call", REPLICA_CALLS)
def test_a_stored_context_is_of_no_use_outside_of_its_replica(strategy, call):
    """Case 11."""
    do, instead = REPLICA_CALLS[call]
    kept = []
    strategy.run(lambda: kept.append(mr.get_replica_context()))
    with pytest.raises(RuntimeError, match=call):
        do(kept[0])
    with strategy.scope(), pytest.raises(RuntimeError, match=instead):
        do(kept[0])
    with pytest.raises(RuntimeError, match="mismatching"):
        strategy.run(lambda: do(kept[0]))
    check_works(strategy)


def test_the_context_of_a_run_can_not_be_entered_in_a_merge_fn_or_later(strategy):
    """What is assigned there would be a component of one replica, on one rank."""
    kept = []

    def step():
        context = mr.get_replica_context()
        kept.append(context)
        context.merge_call(lambda strategy: context.__enter__())

    def later():
        with kept[0]:
            pass

    for call in (functools.partial(strategy.run, step), later):
        error = raises_everywhere(mr.errors.ContextError, call)
        assert "mr.ReplicaContext(strategy, replica_id)" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("call", REPLICA_CALLS)
def test_a_collective_of_a_replica_inside_merge_fn_names_the_one_that_fits(strategy, call):
    """Decision 13: all_reduce inside merge_fn is a RuntimeError that names strategy.reduce."""
    do, instead = REPLICA_CALLS[call]

    def step():
        context = mr.get_replica_context()
        return context.merge_call(lambda strategy: do(context))

    error = raises_everywhere(RuntimeError, lambda: strategy.run(step))
    assert "merge_fn" in str(error)
    assert instead in str(error)
    check_works(strategy)


def test_the_context_of_another_replica_is_of_no_use(strategy):
    kept = {}

    def step():
        context = mr.get_replica_context()
        kept[context.replica_id_in_sync_group] = context
        context.all_reduce("SUM", 1.0)
        first = kept[min(kept)]
        error = None if first is context else error_of(lambda: first.all_reduce("SUM", 1.0))
        return type(error).__name__

    names = strategy.experimental_local_results(strategy.run(step))
    assert names == ("NoneType", *["ContextError"] * (len(names) - 1))


def test_run_of_the_default_strategy_makes_a_context_of_its_own():
    contexts = mr.get_strategy().run(lambda: [mr.get_replica_context()])
    (inner,) = mr.get_strategy().experimental_local_results(contexts)[0]
    assert inner is not mr.get_replica_context()
    assert inner.replica_id_in_sync_group == 0


def test_a_context_made_by_hand_needs_one_replica_for_collectives(strategy):
    """Section 3."""
    with mr.ReplicaContext(strategy, 0) as context:
        assert mr.get_replica_context() is context
        if strategy.num_replicas_in_sync == 1:
            assert context.all_reduce("SUM", 2.0) == 2.0
            assert context.merge_call(lambda s, x: x, (5,)) == 5
        else:
            with pytest.raises(mr.errors.ContextError, match=r"strategy\.run"):
                context.all_reduce("SUM", 2.0)
    with mr.ReplicaContext(strategy, None) as context, pytest.raises(ValueError, match="None"):
        _ = context.replica_id_in_sync_group
    check_works(strategy)


def in_a_thread(call):
    """Call `call` in a thread of its own; return what it returns or raises there."""
    found = []

    def work():
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def test_a_new_thread_starts_in_the_default_state(strategy):
    """Case 14."""

    def state_and_context():  # its id is an error beside an open strategy of several replicas
        context = mr.get_replica_context()
        return context, mr.in_cross_replica_context(), mr.has_strategy(), mr.get_strategy()

    default = state_and_context()
    assert default[0].replica_id_in_sync_group == 0
    with strategy.scope():
        assert in_a_thread(state_and_context) == default
    assert in_a_thread(state_and_context) == default


def test_the_default_strategy_works_in_every_thread():
    """It is in every thread from its start, and nobody can make another."""

    def work():
        context = mr.get_replica_context()
        ones = mr.get_strategy().run(lambda: context.num_replicas_in_sync)
        total = mr.get_strategy().reduce("SUM", ones, axis=None)
        return total + context.all_reduce("SUM", 1.0) + context.merge_call(lambda strategy: 1)

    assert [work(), in_a_thread(work), work(), in_a_thread(work)] == [3.0] * 4


THREADED_CALLS = {
    "run": lambda s, x: s.run(lambda: 1),
    "reduce": lambda s, x: s.reduce("SUM", x, axis=None),
    "gather": lambda s, x: s.gather(x, axis=0),
    "barrier": lambda s, x: s.barrier(),
    "gather_objects": lambda s, x: s.gather_objects(x),
    "close": lambda s, x: s.close(),
}


@pytest.mark.parametrize("call", THREADED_CALLS)
def test_a_collective_from_another_thread_is_an_error(strategy, call):
    """Decision 19, also where that happens on one rank only: the others wait for this call."""
    ones = strategy.run(lambda: np.ones(1))
    for culprit in {0, strategy.size - 1}:

        def mistake(culprit=culprit):
            if strategy.rank == culprit:
                raise in_a_thread(lambda: THREADED_CALLS[call](strategy, ones))
            strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))

        error = raises_everywhere(mr.errors.ContextError, mistake)
        assert "thread" in str(error)
        check_works(strategy)


def test_a_collective_from_another_thread_on_all_ranks_is_an_error(strategy):
    check_works(strategy)

    def mistake():
        raise in_a_thread(lambda: strategy.run(lambda: 1))

    error = raises_everywhere(mr.errors.ContextError, mistake)
    assert "strategy.run in thread" in str(error)
    check_works(strategy)


def test_a_replica_must_not_call_from_a_thread_that_it_starts(strategy):
    """Decision 19."""

    def step():
        context = mr.get_replica_context()
        error = in_a_thread(lambda: context.all_reduce("SUM", 1.0))
        return type(error).__name__, context.all_reduce("SUM", 1.0)

    names, totals = strategy.run(step)
    assert set(strategy.experimental_local_results(names)) == {"ContextError"}
    assert set(strategy.experimental_local_results(totals)) == {strategy.num_replicas_in_sync}


@pytest.mark.parametrize("copied", [False, True], ids=["plain", "in a copied context"])
def test_what_it_catches_of_calls_there_fails_no_run_on_any_layout(strategy, copied):
    needs_two_replicas(strategy)

    def reduce():
        return mr.get_replica_context().all_reduce("SUM", 1.0)

    def step():
        run = contextvars.copy_context().run if copied else operator.call
        errors = [
            in_a_thread(functools.partial(run, reduce)),
            in_a_thread(functools.partial(run, strategy.barrier)),
        ]
        reduce()
        return [(type(error).__name__, str(error)) for error in errors]

    for found in strategy.experimental_local_results(strategy.run(step)):
        assert [name for name, _ in found] == ["ContextError"] * 2
        assert "no part of its replica" in found[0][1]
    check_works(strategy)


@pytest.mark.parametrize("call", THREADED_CALLS)
def test_nor_may_it_call_the_strategy_there(strategy, call):
    """On every rank it is the error of the run, since the others wait for that replica."""
    ones = strategy.run(lambda: np.ones(1))

    def step(culprit):
        context = mr.get_replica_context()
        if context.replica_id_in_sync_group == culprit:
            raise in_a_thread(lambda: THREADED_CALLS[call](strategy, ones))
        context.all_reduce("SUM", 1.0)

    for culprit in culprits(strategy):
        run = functools.partial(strategy.run, step, (culprit,))
        error = raises_everywhere(mr.errors.ContextError, run)
        assert "thread" in str(error)
        check_works(strategy)


def test_a_thread_that_calls_while_the_main_thread_is_in_a_collective_comes_after_it(strategy):
    """The ranks agree on its mistake at their next call."""
    needs_two_ranks(strategy)
    from mpi4py import MPI  # starts MPI, so not when this file is imported

    world = MPI.COMM_WORLD

    def call_from_above(culprit):
        while not strategy.engine.watch.is_waiting:
            time.sleep(0.001)  # each turn takes the interpreter from the thread that waits
        for rank in range(strategy.size):
            if rank != culprit:
                world.send(None, rank)
        strategy.extended.broadcast_to(2.0)

    def mistake(culprit, values):
        errors = []
        thread = threading.Thread(
            target=lambda: errors.append(error_of(lambda: call_from_above(culprit)))
        )
        if strategy.rank == culprit:
            thread.start()
        else:
            world.recv(source=culprit)
        values.append(strategy.extended.broadcast_to(1.0))
        if strategy.rank == culprit:
            thread.join()
            raise errors[0]
        values.append(strategy.extended.broadcast_to(3.0))

    for culprit in {0, strategy.size - 1}:
        values = []
        error = raises_everywhere(
            mr.errors.ContextError, functools.partial(mistake, culprit, values)
        )
        assert "broadcast_to in thread" in str(error)
        assert values == [1.0]
        check_works(strategy)


@pytest.mark.parametrize("replicas_per_rank", [1, 2])
def test_a_strategy_belongs_to_the_thread_that_first_runs_it(replicas_per_rank):
    """Decision 19: made here, and given to a thread before its first use."""
    strategy = mr.MPIStrategy(replicas_per_rank=replicas_per_rank)
    refused = []

    def work():
        with strategy:
            try:
                check_works(strategy)
            finally:
                ready.set()
            tried.wait()

    def try_here():
        ready.wait()
        refused.append(error_of(lambda: strategy.run(lambda: 1)))
        tried.set()

    ready, tried = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: refused.append(error_of(work)))
    thread.start()
    try_here()
    thread.join()
    assert [type(error) for error in refused] == [mr.errors.ContextError, type(None)]


def test_two_threads_use_two_strategies():
    """Decision 19, tf_semantics.md 139."""
    errors = []

    def work(strategy):
        count = strategy.num_replicas_in_sync
        with strategy:
            for _ in range(20):
                total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
                assert set(strategy.experimental_local_results(total)) == {count}

    strategies = [mr.MPIStrategy(replicas_per_rank=number) for number in (1, 2)]
    threads = [
        threading.Thread(target=lambda one=one: errors.append(error_of(lambda: work(one))))
        for one in strategies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None, None]


def test_replicas_of_a_rank_run_one_at_a_time_and_switch_only_at_collectives(strategy):
    """Decision 14, and the order of tf_semantics.md 47: a0 a1 m b0 b1."""
    log = []

    def merge_fn(strategy):
        log.append("m")

    def step():
        context = mr.get_replica_context()
        mine = context.replica_id_in_sync_group
        for part in "ab":
            log.append(f"{part}{mine}")
            log.append(f"{part}{mine}")
            context.merge_call(merge_fn)
        log.append(f"c{mine}")

    strategy.run(step)
    local = strategy.local_replica_ids
    expected = []
    for part in "ab":
        expected += [f"{part}{i}" for i in local for _ in range(2)] + ["m"]
    assert log == expected + [f"c{i}" for i in local]


def test_each_replica_runs_in_a_copy_of_the_callers_context_variables(strategy):
    """Decision 14, a single one too."""
    setting = contextvars.ContextVar("setting", default="none")
    token = setting.set("the caller's")

    def step():
        context = mr.get_replica_context()
        before = setting.get()
        setting.set(context.replica_id_in_sync_group)
        context.all_reduce("SUM", 1.0)
        return before, setting.get(), context.merge_call(lambda strategy: setting.get())

    before, after, above = strategy.run(step)
    local = strategy.local_replica_ids
    assert setting.get() == "the caller's"
    assert before.values == ("the caller's",) * len(local)
    assert after.values == local
    assert above.values == ("the caller's",) * len(local)
    setting.reset(token)


def test_libraries_may_look_at_the_callers_of_c(strategy):
    """As numpy and torch do; the stack of a greenlet ends in memory that is not its own."""
    backtrace = ctypes.PyDLL(None).backtrace
    frames = (ctypes.c_void_p * 64)()

    def step():
        has_ended = backtrace(frames, len(frames)) < len(frames)
        assert not has_ended or threading.current_thread() is not threading.main_thread()
        large = np.ones(1 << 16)
        np.testing.assert_array_equal((large * 2 + 1) * 3, 9 * large)

    def run_above(calls):
        operator.call(*[operator.call] * calls, strategy.run, step)

    for calls in (30, 0, 7, 1, 30):  # what the hub has left is another thing each time
        run_above(calls)


def test_what_numpy_keeps_in_context_variables_is_each_replicas_own(strategy):
    """Decision 14: np.errstate over a collective, where another replica has its own."""

    def step():
        context = mr.get_replica_context()
        over = "raise" if context.replica_id_in_sync_group % 2 else "ignore"
        with np.errstate(over=over):
            context.all_reduce("SUM", 1.0)
            return np.geterr()["over"]

    expected = tuple("raise" if i % 2 else "ignore" for i in strategy.local_replica_ids)
    assert strategy.run(step).values == expected


def test_replicas_of_a_rank_share_module_state(strategy):
    """Decision 14, and run's docstring says so."""
    shared = []
    strategy.run(lambda: shared.append(mr.get_replica_context().replica_id_in_sync_group))
    assert tuple(shared) == strategy.local_replica_ids
    for word in ("module state", "np.random", "warnings filters", "working directory", "lock"):
        assert word in " ".join(mr.Strategy.run.__doc__.split())


def test_every_collective_call_says_so_in_its_docstring():
    """Decision 15."""
    calls = [
        mr.Strategy.run,
        mr.Strategy.reduce,
        mr.Strategy.gather,
        mr.ReplicaContext.all_reduce,
        mr.ReplicaContext.all_gather,
        mr.ReplicaContext.merge_call,
        mr.Variable,
        mr.Variable.assign,
        mr.MPIStrategy,
        mr.MPIStrategy.close,
        mr.DistributedIterator.__next__,
    ]
    assert [call for call in calls if "collective" not in (call.__doc__ or "").lower()] == []


def test_devices_are_deprecated_strings(strategy):
    def step():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            devices = mr.get_replica_context().devices
        assert [warning.category for warning in caught] == [DeprecationWarning]
        return [devices]

    for devices in strategy.experimental_local_results(strategy.run(step)):
        (one,) = devices[0]
        assert isinstance(one, str)


def test_a_default_strategy_never_communicates():
    """Section 3: one replica, no MPI; on one rank only, too."""
    default = mr.get_strategy()
    for _ in range(default.num_replicas_in_sync + 1):
        assert default.run(lambda: mr.get_replica_context().all_reduce("SUM", 2.0)).item() == 2.0
    assert default.reduce("SUM", 3.0, axis=None) == 3.0
    with pytest.raises(AttributeError):
        _ = default.communicator


def total(_=None):
    return mr.get_replica_context().all_reduce("SUM", 1.0)


def in_a_pool(call):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


ELSEWHERE = {
    "thread": in_a_pool,
    "greenlet": lambda call: greenlet.greenlet(call).switch(),
    "context": lambda call: contextvars.Context().run(call),
}

ON_THE_DEFAULT_STRATEGY = {
    "all_reduce": total,
    "all_gather": lambda: mr.get_replica_context().all_gather(np.ones(1), axis=0),
    "merge_call": lambda: mr.get_replica_context().merge_call(lambda strategy: 1),
    "Variable": lambda: mr.Variable(0.0),
    "run": lambda: mr.get_strategy().run(lambda: 1),
    "reduce": lambda: mr.get_strategy().reduce("SUM", mr.PerReplica([1.0]), axis=None),
    "broadcast_to": lambda: mr.get_strategy().extended.broadcast_to(1.0),
    "replica_id_in_sync_group": lambda: mr.get_replica_context().replica_id_in_sync_group,
    "num_replicas_in_sync": lambda: mr.get_replica_context().num_replicas_in_sync,
    "rng": lambda: mr.get_replica_context().rng.random(),
}


@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("call", ON_THE_DEFAULT_STRATEGY)
def test_what_a_step_starts_elsewhere_is_not_silently_for_one_replica(strategy, place, call):
    """New threads, greenlets and contexts start in the default state: with one replica."""
    needs_two_replicas(strategy)

    def work():
        return ELSEWHERE[place](ON_THE_DEFAULT_STRATEGY[call])

    for way in (lambda: strategy.run(work), work):
        error = raises_everywhere(mr.errors.ContextError, way)
        assert "the default strategy, which has one replica" in str(error)
        assert "contextvars.copy_context().run(" in str(error)
    check_works(strategy)


ON_THE_STRATEGY_OF_THE_STEP = {
    "assign": lambda strategy, v: v.assign_add(1.0),
    "barrier": lambda strategy, v: strategy.barrier(),
    "run": lambda strategy, v: strategy.run(lambda: 1),
    "gather_objects": lambda strategy, v: strategy.gather_objects(1),
    "reduce": lambda strategy, v: strategy.reduce("MEAN", 1.0, axis=None),
    "rng": lambda strategy, v: strategy.rng.random(),
}


@pytest.mark.parametrize("place", ELSEWHERE)
def test_what_a_step_starts_reads_variables_and_computes_with_what_the_step_hands_on(
    strategy, place
):
    with strategy.scope():
        v = mr.Variable(2.0)

    def work(context):
        return float(v) * context.num_replicas_in_sync + context.replica_id_in_sync_group

    def step():
        context = mr.get_replica_context()
        copied = contextvars.copy_context()
        by_copy = ELSEWHERE[place](lambda: copied.run(lambda: work(mr.get_replica_context())))
        return ELSEWHERE[place](lambda: work(context)), by_copy

    count = strategy.num_replicas_in_sync
    found = strategy.gather_objects(strategy.run(step))
    assert list(found) == [(2.0 * count + i,) * 2 for i in range(count)]


def in_scope(strategy, call):
    with strategy.scope():
        return call()


@pytest.mark.parametrize("place", [*ELSEWHERE, "copied context", "scope in a greenlet"])
@pytest.mark.parametrize("call", ON_THE_STRATEGY_OF_THE_STEP)
def test_what_a_step_starts_elsewhere_is_not_above_its_replicas(strategy, place, call):
    """A call for each replica of a rank: how often it counts would depend on the layout."""
    with strategy.scope():
        v = mr.Variable(0.0, aggregation=mr.VariableAggregation.SUM)
        above = contextvars.copy_context()
    places = ELSEWHERE | {
        "copied context": lambda call: above.copy().run(call),
        "scope in a greenlet": lambda call: greenlet.greenlet(in_scope).switch(strategy, call),
    }

    def step():
        places[place](lambda: ON_THE_STRATEGY_OF_THE_STEP[call](strategy, v))

    error = raises_everywhere(mr.errors.ContextError, lambda: strategy.run(step))
    assert "in none of its replicas" in str(error)
    assert v.numpy() == 0
    check_works(strategy)


def test_a_scope_in_a_merge_fn_changes_nothing_of_what_may_be_called_there(strategy):
    with strategy.scope():
        v = mr.Variable(0.0)

    def merge_fn(inner, ids):
        with inner.scope():
            total = inner.reduce("SUM", ids, axis=None)
            inner.extended.update(v, lambda v: in_scope(inner, lambda: v.assign(total)))
        return total

    def step():
        context = mr.get_replica_context()
        return context.merge_call(merge_fn, (context.replica_id_in_sync_group,))

    count = strategy.num_replicas_in_sync
    results = strategy.experimental_local_results(strategy.run(step))
    assert set(results) == {v.numpy()} == {count * (count - 1) / 2}


class CallsWhenLoaded:
    """Calls a collective where its pickle is loaded: in no replica."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return total, (self.value,)


def test_what_is_called_in_the_middle_of_a_step_but_in_no_replica_is_an_error(strategy):
    needs_two_ranks(strategy)

    def step():
        context = mr.get_replica_context()
        context.merge_call(lambda strategy, x: 1, args=(CallsWhenLoaded(1),))

    error = raises_everywhere(mr.errors.ContextError, lambda: strategy.run(step))
    assert "the default strategy, which has one replica" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("place", ELSEWHERE)
def test_the_default_strategy_can_be_asked_for_beside_an_open_one(strategy, place):
    def work():
        mr.experimental_set_strategy(None)
        return total(), float(mr.Variable(2.0))

    assert strategy.run(lambda: ELSEWHERE[place](work)) is not None
    assert ELSEWHERE[place](work) == (1.0, 2.0)


def test_the_default_strategy_holds_beside_an_open_one_where_that_was_made(strategy):
    assert total() == 1.0
    assert float(mr.Variable(2.0)) == 2.0


def test_the_default_strategy_holds_elsewhere_where_no_other_one_is_open():
    gc.collect()  # strategies of tests that were skipped halfway are open until then
    with mr.MPIStrategy(replicas_per_rank=2):
        pass
    for place in ELSEWHERE.values():
        assert place(total) == 1.0


def test_a_copied_context_makes_variables_of_the_strategy_in_a_greenlet(strategy):
    with strategy.scope():
        context = contextvars.copy_context()
        variable = greenlet.greenlet(lambda: context.run(mr.Variable, 1.0)).switch()
    assert strategy.run(lambda: variable) is variable


def test_output_that_a_replica_redirects_over_a_collective_is_its_own_and_comes_back(strategy):
    outputs = sys.stdout, sys.stderr

    def step():
        context = mr.get_replica_context()
        name = str(context.replica_id_in_sync_group)
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            for word in ("before", "behind"):
                sys.stdout.write(f"{word} {name}\n")
                sys.stderr.write(f"{word} {name}\n")
                context.all_reduce("SUM", 1.0)
        assert (sys.stdout, sys.stderr) == outputs
        return out.getvalue(), err.getvalue()

    found = strategy.experimental_local_results(strategy.run(step))
    assert (sys.stdout, sys.stderr) == outputs
    texts = [f"before {i}\nbehind {i}\n" for i in strategy.local_replica_ids]
    assert found == tuple((text, text) for text in texts)
