"""What a replica runs in: a greenlet, or a thread of its own (decision 23).

What holds for both is tested with both; and what torch keeps for a thread, where it is installed.
"""

import asyncio
import contextvars
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
import weakref

import greenlet
import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, culprits, error_of, gathered, raises_everywhere

WORD = contextvars.ContextVar("WORD", default="none")


@pytest.fixture(params=[False, True], ids=["greenlets", "threads"])
def kind(request):
    """Whether replicas have threads; where torch is imported, several of a rank always do."""
    if not request.param and not {"torch", "jax"}.isdisjoint(sys.modules):
        pytest.skip("with torch or JAX each of several replicas has a thread")
    return request.param


@pytest.fixture(params=[1, 3], ids=["one", "three"])
def both(kind, request, passed_everywhere):
    """A strategy of each kind, with one and three replicas a rank."""
    strategy = mr.MPIStrategy(replicas_per_rank=request.param, replica_threads=kind)
    yield strategy
    if passed_everywhere():
        strategy.close()


@pytest.fixture
def threaded(passed_everywhere):
    """A strategy with a thread for each of three replicas a rank."""
    strategy = mr.MPIStrategy(replicas_per_rank=3, replica_threads=True)
    yield strategy
    if passed_everywhere():
        strategy.close()


def mine():
    return mr.get_replica_context().replica_id_in_sync_group


def total(value=1.0):
    return mr.get_replica_context().all_reduce("SUM", value)


def local(strategy, step):
    return strategy.experimental_local_results(strategy.run(step))


def test_replicas_take_turns_in_the_order_of_their_ids_and_switch_at_collectives_alone(both):
    seen = []

    def step():
        for turn in range(3):
            seen.append((turn, mine(), "begins"))
            sum(range(20_000))
            seen.append((turn, mine(), "ends"))
            total()

    both.run(step)
    ids = both.local_replica_ids
    words = "begins", "ends"
    assert seen == [(turn, i, word) for turn in range(3) for i in ids for word in words]


def test_a_replica_has_the_same_thread_in_each_run_and_no_other_has_it(threaded):
    kept = threading.local()

    def step():
        before = getattr(kept, "runs", [])
        kept.runs = [*before, mine()]
        total()
        return threading.get_ident(), tuple(kept.runs), threading.current_thread().name

    for run in range(1, 4):
        idents = []
        threaded.run(lambda idents=idents: idents.append(step()))
        assert [runs for _, runs, _ in idents] == [(i,) * run for i in threaded.local_replica_ids]
        assert [name for *_, name in idents] == [f"replica {i}" for i in threaded.local_replica_ids]
        if run == 1:
            first = [ident for ident, *_ in idents]
        assert [ident for ident, *_ in idents] == first
        assert len({*first, threading.get_ident()}) == len(first) + 1


def test_without_the_option_and_with_one_replica_the_thread_is_that_of_the_caller(both):
    idents = []
    both.run(lambda: idents.append(threading.get_ident()))
    shares = len(both.local_replica_ids) == 1 or not both.replica_threads
    assert (set(idents) == {threading.get_ident()}) == shares


def test_contextvars_of_the_caller_arrive_and_those_of_a_replica_stay_in_it(both):
    found = []

    def step():
        found.append((WORD.get(), np.geterr()["divide"]))
        WORD.set(f"replica {mine()}")
        total()
        assert WORD.get() == f"replica {mine()}"

    token = WORD.set("the caller's")
    try:
        with np.errstate(divide="raise"):
            both.run(step)
            both.run(step)
        assert WORD.get() == "the caller's"
    finally:
        WORD.reset(token)
    assert set(found) == {("the caller's", "raise")}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_of_another_strategy_inside_of_a_replica_gives_its_results(both, kind, replicas):
    with mr.MPIStrategy(replicas_per_rank=replicas, replica_threads=kind) as other:

        def step():
            inner = contextvars.Context().run(local, other, total)
            assert set(inner) == {other.num_replicas_in_sync}
            return total()

        for _ in range(2):
            assert set(local(both, step)) == {both.num_replicas_in_sync}


def test_a_run_inside_of_a_merge_fn_gives_its_results(both):
    def merge_fn(strategy, value):
        inside = strategy.run(lambda: total(2.0))
        return (
            strategy.reduce("SUM", value, axis=None)
            + strategy.experimental_local_results(inside)[0]
        )

    def step():
        merged = mr.get_replica_context().merge_call(merge_fn, (1.0,))
        return merged + total()

    for _ in range(2):
        assert set(local(both, step)) == {4.0 * both.num_replicas_in_sync}


def test_a_replica_that_swallows_the_error_of_its_run_is_abandoned(both):
    last = both.num_replicas_in_sync - 1
    if last == 0:
        pytest.skip("a single replica has nobody to wait for")

    def step():
        total()
        if mine() == last:
            raise ValueError("the cause")
        while True:
            try:
                total()
            except BaseException:
                pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = raises_everywhere(ValueError, lambda: both.run(step))
    others = [i for i in both.local_replica_ids if i != last]
    assert [("abandoned" in str(one.message)) for one in caught] == [True] * bool(others)
    assert ("abandoned" in "".join(error.__notes__)) == bool(others)
    check_works(both)


def test_an_error_has_the_lines_of_its_replica_in_its_traceback(both):
    def fails():
        raise KeyError(mine())  # this line

    for culprit in culprits(both):

        def step(culprit=culprit):
            total()
            if mine() == culprit:
                fails()
            total()

        error = raises_everywhere(KeyError, lambda step=step: both.run(step))
        assert "# this line" in "".join([*traceback.format_exception(error), *error.__notes__])
        check_works(both)


def test_a_mistake_is_raised_in_each_replica_at_its_own_call(both):
    if both.num_replicas_in_sync == 1:
        pytest.skip("a single replica has nobody to disagree with")
    lines = []

    def step():
        try:
            mr.get_replica_context().all_reduce("SUM", np.ones(1 + mine()))  # here
        except mr.errors.StructureMismatchError as error:
            lines.append(traceback.extract_tb(error.__traceback__)[0].line)
        return total()

    assert set(local(both, step)) == {both.num_replicas_in_sync}
    assert [line.endswith("# here") for line in lines] == [True] * len(both.local_replica_ids)


def test_at_the_limit_of_recursion_a_replica_gets_the_error_and_nobody_waits_for_ever(both):
    def deep(depth):
        return total() if depth == 0 else deep(depth - 1)

    def step():
        frame, here = sys._getframe(), 0
        while frame is not None:
            frame, here = frame.f_back, here + 1
        for room in range(40):
            try:
                deep(sys.getrecursionlimit() - here - room)
            except RecursionError:
                pass

    gc.collect()  # not in the depth
    error_of(lambda: both.run(step))  # how deep the package goes differs from call to call
    check_works(both)


def test_threads_end_with_their_strategy(kind):
    before = set(threading.enumerate())
    strategy = mr.MPIStrategy(replicas_per_rank=3, replica_threads=kind)
    strategy.run(total)
    names = {f"replica {i}" for i in strategy.local_replica_ids}
    threads = [one for one in threading.enumerate() if one not in before and one.name in names]
    assert len(threads) == 3 * kind
    gone = weakref.ref(strategy)
    strategy.close()
    del strategy
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_child_forked_in_a_replica_is_told_that_it_is_one(both):
    """It is not left waiting for the other replicas, which are its parent's."""

    def step():
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, of forks beside threads
            child = os.fork()
        if child == 0:
            try:
                total()  # where it is alone, it may go on by itself
            except mr.errors.ContextError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(7)
        os.close(write)
        with open(read) as told:
            assert "forked" in told.read() or both.size == 1
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return total()

    assert set(local(both, step)) == {both.num_replicas_in_sync}


def test_each_replica_may_have_an_event_loop_that_runs_over_its_collectives(threaded):
    async def work():
        first = total()
        await asyncio.sleep(0)
        return first + total()

    for _ in range(2):
        results = local(threaded, lambda: asyncio.run(work()))
        assert set(results) == {2.0 * threaded.num_replicas_in_sync}


@pytest.mark.parametrize("kind", [False], indirect=True)
def test_without_threads_the_error_of_a_second_event_loop_says_what_to_do(kind):
    async def work():
        return total()

    def step():
        begun = work()
        try:
            return asyncio.run(begun)
        finally:
            begun.close()

    with mr.MPIStrategy(replicas_per_rank=2, replica_threads=kind) as strategy:
        error = raises_everywhere(RuntimeError, lambda: strategy.run(step))
        assert "running event loop" in str(error)
        assert "replica_threads=True" in "".join(error.__notes__)
        check_works(strategy)


@pytest.mark.parametrize("kind", [False], indirect=True)
@pytest.mark.parametrize("replicas_per_rank", [1, 2])
def test_a_step_that_switches_to_the_parent_of_its_greenlet_is_told_so(kind, replicas_per_rank):
    with mr.MPIStrategy(replicas_per_rank=replicas_per_rank, replica_threads=kind) as strategy:
        for culprit in culprits(strategy):
            ended = []

            def step(culprit=culprit, ended=ended):
                try:
                    if mine() == culprit:
                        greenlet.getcurrent().parent.switch(5)
                    return total()
                finally:
                    ended.append(mine() == culprit)

            error = raises_everywhere(mr.errors.ContextError, lambda step=step: strategy.run(step))
            assert f"replica {culprit} has left its step by a switch" in str(error)
            assert True not in ended
            check_works(strategy)


def test_what_only_the_main_thread_may_do_is_an_error_of_python_on_all_ranks(threaded):
    def step():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    error = raises_everywhere(ValueError, lambda: threaded.run(step))
    assert "main thread" in str(error)
    check_works(threaded)


def test_a_thread_that_a_replica_starts_is_no_part_of_it(both):
    found = []

    def step():
        context = mr.get_replica_context()

        def work():
            try:
                context.all_reduce("SUM", 1.0)
            except mr.errors.ContextError as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return total()

    assert set(local(both, step)) == {both.num_replicas_in_sync}
    assert len(found) == len(both.local_replica_ids)


@pytest.fixture(params=[1, 3], ids=["one", "three"])
def with_torch(request, passed_everywhere):
    """A strategy in a program that has imported torch, and torch."""
    torch = pytest.importorskip("torch")
    strategy = mr.MPIStrategy(replicas_per_rank=request.param)
    yield strategy, torch
    if passed_everywhere():
        strategy.close()


def modes(torch):
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_num_threads(),
    )


def modes_in(strategy, torch):
    """Return what the replicas of this rank find, each at its start and behind a collective."""
    found = []

    def step():
        found.append(modes(torch))
        total()
        found.append(modes(torch))

    strategy.run(step)
    return found


@pytest.mark.parametrize(
    "mode", ["no_grad", "inference", "autocast", "dtype", "device", "device2", "threads"]
)
def test_modes_of_the_caller_arrive_in_each_replica_and_go_with_it(with_torch, mode):
    strategy, torch = with_torch
    outside = modes(torch)
    if mode == "dtype":
        torch.set_default_dtype(torch.float64)
    elif mode == "device":
        torch.set_default_device("meta")
    elif mode == "threads":
        torch.set_num_threads(3)
    try:
        with {
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
            "autocast": lambda: torch.autocast("cpu", torch.float16),
            "dtype": torch.enable_grad,
            "device": torch.enable_grad,
            "device2": lambda: torch.device("meta"),
            "threads": torch.enable_grad,
        }[mode]():
            here = modes(torch)
            assert here != outside
            assert set(modes_in(strategy, torch)) == {here}
            assert modes(torch) == here
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(outside[-1])
        if mode == "device":
            torch.set_default_device(None)
    assert modes(torch) == outside
    assert set(modes_in(strategy, torch)) == {outside}


@pytest.mark.parametrize("mode", ["no_grad", "inference", "autocast", "device", "threads"])
def test_what_a_step_leaves_switched_ends_with_its_replica(with_torch, mode):
    """Neither the next replica has it, nor this one in the next run, nor the program."""
    strategy, torch = with_torch
    outside = modes(torch)
    found, kept = [], []

    def step():
        found.append(modes(torch))
        if mode == "device":
            torch.set_default_device("meta")
        elif mode == "threads":
            torch.set_num_threads(3)
        else:
            switch = {
                "no_grad": torch.no_grad,
                "inference": torch.inference_mode,
                "autocast": lambda: torch.autocast("cpu", torch.float16),
            }[mode]()
            switch.__enter__()
            kept.append(switch)
        assert modes(torch) != outside
        total()

    for _ in range(2):
        strategy.run(step)
        assert modes(torch) == outside
    assert set(found) == {outside}
    assert set(modes_in(strategy, torch)) == {outside}


@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference_mode"])
def test_torchs_way_back_stays_in_the_thread_of_its_replica(with_torch, mode):
    """In a thread of its device two replicas would wait for each other: CPUs have none."""
    strategy, torch = with_torch
    is_elsewhere = torch._C._is_multithreading_enabled
    found = []
    # Set last: what a mode means for it is torch's.
    with getattr(torch, mode)(), torch.autograd.set_multithreading_enabled(True):
        strategy.run(lambda: found.append(is_elsewhere()))
        assert is_elsewhere()
    assert found
    assert not any(found)


def test_a_collective_in_torchs_way_back_is_right_with_three_replicas_on_a_rank(with_torch):
    strategy, torch = with_torch

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return mr.get_replica_context().all_reduce("SUM", gradient.detach())

    weight = torch.ones(2, requires_grad=True)

    def step():
        loss = Sum.apply(Sum.apply(weight * (1 + mine())) * 2).sum()
        return torch.autograd.grad(loss, weight)[0].numpy()

    count = strategy.num_replicas_in_sync
    found = []
    strategy.run(lambda: found.append((mine(), step())))
    for replica, gradient in found:
        np.testing.assert_array_equal(gradient, [2.0 * count**2 * (1 + replica)] * 2)
    assert len(gathered(len(found))) == strategy.size


def test_a_merge_fn_finds_torch_as_the_replicas_have_it_that_call_it(with_torch):
    strategy, torch = with_torch

    def merge_fn(strategy):
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def step():
        context = mr.get_replica_context()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            inside = context.merge_call(merge_fn)
        return [inside, context.merge_call(merge_fn)]

    for found in strategy.experimental_local_results(strategy.run(lambda: str(step()))):
        assert found == "[(False, True), (True, False)]"
    assert torch.is_grad_enabled()
