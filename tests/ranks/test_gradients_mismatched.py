"""Ways back that replicas do not all make, or make in another order: the usual errors.

Each is raised on every rank, with the line of the collective and that of ``backward()``, and what
to do; the strategy works on.
"""

import contextlib
import inspect

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_text,
    check_works,
    culprits,
    gathered,
    holds_everywhere,
    named,
    needs_two_replicas,
    raises_everywhere,
    ranks_of,
)
from gradient_programs import replica_id, results
from mpi_replica.errors import CollectiveMismatchError, ContextError, MPIReplicaError
from on_a_device import DEVICE

torch = pytest.importorskip("torch", reason="torch is not installed")

ADVICE = "+ 0 * y.sum()"


def needs(*values):
    return torch.tensor(values, dtype=torch.float64).requires_grad_()


def summed(value):
    return mr.get_replica_context().all_reduce("SUM", value)  # in a helper


def lines(step, *words):
    """The places of the lines of a step that end with a comment of these words, as errors say."""
    text, start = inspect.getsourcelines(step)
    found = []
    for word in words:
        (number,) = [i for i, line in enumerate(text) if line.rstrip().endswith(f"# {word}")]
        found.append(f"test_gradients_mismatched.py:{start + number}")
    return found


def check_gradients_work(strategy):
    """Check that the next way back is right, and then that collectives are."""

    def step():
        x = needs(1.0 + replica_id())
        (10.0 ** replica_id() * summed(x * x)).sum().backward()
        return x.grad

    everything = sum(10.0**i for i in range(strategy.num_replicas_in_sync))
    for i, found in results(strategy, step).items():
        np.testing.assert_allclose(found, [2 * (1 + i) * everything])
    check_works(strategy)


def check_mistake(strategy, step, *marks, words=(), kind=CollectiveMismatchError):
    """Let each of some replicas make a mistake; ``step(is_culprit)`` has it.

    The error must be the same everywhere, name both sides, and the marked lines.
    """
    needs_two_replicas(strategy)
    layout = strategy.engine.layout
    for culprit in culprits(strategy):
        error = raises_everywhere(
            kind, lambda culprit=culprit: strategy.run(lambda: step(replica_id() == culprit))
        )
        right = set(layout.all_replica_ids) - {culprit}
        sides = [layout.describe((culprit,)), layout.describe(right)]

        def check(error=error, sides=sides):
            check_text(error, [*words, *sides], lines(step, *marks))

        holds_everywhere(check)
        check_gradients_work(strategy)


# A way back that one replica does not make


def test_a_replica_that_makes_no_backward(strategy):
    def step(is_culprit):
        x = needs(1.0 + replica_id())
        y = mr.get_replica_context().all_reduce("SUM", x)  # forward
        if not is_culprit:
            y.sum().backward()  # backward

    check_mistake(strategy, step, "forward", "backward", words=[ADVICE])


def test_a_replica_whose_loss_does_not_use_the_result(strategy):
    def step(is_culprit):
        x = needs(1.0 + replica_id())
        y = mr.get_replica_context().all_reduce("MEAN", x)  # forward
        loss = x.sum() if is_culprit else x.sum() + y.sum()
        loss.backward()  # backward

    check_mistake(strategy, step, "forward", "backward", words=[ADVICE])


def test_a_replica_whose_loss_does_not_use_the_rows(strategy):
    def step(is_culprit):
        x = needs(1.0 + replica_id(), 2.0)
        y = mr.get_replica_context().all_gather(x, axis=0)  # forward
        loss = x.sum() if is_culprit else x.sum() + y.sum()
        loss.backward()  # backward

    check_mistake(strategy, step, "forward", "backward", words=[ADVICE])


def test_what_the_advice_says_is_right(strategy):
    def step():
        x = needs(1.0 + replica_id())
        y = summed(x)
        loss = x.sum() + 0 * y.sum() if replica_id() else x.sum() + y.sum()
        loss.backward()
        return x.grad

    for found in results(strategy, step).values():
        assert found.tolist() == [2]


def test_a_replica_that_goes_on_to_another_collective(strategy):
    def step(is_culprit):
        x = needs(1.0 + replica_id())
        y = mr.get_replica_context().all_reduce("SUM", x)  # forward
        if not is_culprit:
            y.sum().backward()  # backward
        mr.get_replica_context().all_reduce("SUM", 1.0)  # next

    check_mistake(strategy, step, "forward", "backward", "next", words=[ADVICE])


def test_a_replica_that_goes_back_where_the_others_have_gone_on(strategy):
    """It makes a way back more."""

    def step(is_culprit):
        x = needs(1.0 + replica_id())
        y = mr.get_replica_context().all_reduce("SUM", x)  # forward
        loss = y.sum()
        loss.backward(retain_graph=True)
        if is_culprit:
            loss.backward()  # backward

    check_mistake(strategy, step, "forward", "backward", words=[ADVICE])


def test_backward_once_for_all_steps_or_once_for_each(strategy):
    """Another number of ways back, in a loop."""

    def step(is_culprit):
        x = needs(1.0 + replica_id())
        for turn in range(3):
            y = mr.get_replica_context().all_reduce("SUM", x)  # forward
            if turn < 2 or not is_culprit:
                y.sum().backward()  # backward

    check_mistake(strategy, step, "forward", "backward", words=[ADVICE])


# Another order


def test_two_collectives_at_two_lines_in_another_order(strategy):
    def step(is_culprit):
        context, x = mr.get_replica_context(), needs(1.0 + replica_id())
        y = context.all_reduce("SUM", x)  # first
        z = context.all_reduce("SUM", 2 * x)  # second
        for one in (y, z) if is_culprit else (z, y):
            one.sum().backward()  # backward

    check_mistake(strategy, step, "first", "second", "backward")


def test_two_collectives_of_one_line_in_another_order(strategy):
    def step(is_culprit):
        x = needs(1.0 + replica_id())
        found = [mr.get_replica_context().all_reduce("SUM", x * k) for k in (1, 2)]  # forward
        for one in found if is_culprit else found[::-1]:
            one.sum().backward()  # backward

    check_mistake(strategy, step, "forward", "backward")


def test_collectives_of_a_loop_in_another_order(strategy):
    def step(is_culprit):
        x, found = needs(1.0 + replica_id()), []
        for k in range(3):
            found.append(mr.get_replica_context().all_reduce("SUM", x * k))  # forward
        if is_culprit:
            found[0], found[1] = found[1], found[0]
        for one in found:
            one.sum().backward()  # backward

    check_mistake(strategy, step, "forward", "backward")


def test_one_backward_that_needs_other_calls(strategy):
    """As many ways back, of other calls: one replica uses the first, the others the second."""

    def step(is_culprit):
        x = needs(1.0 + replica_id())
        y, z = (mr.get_replica_context().all_reduce("SUM", x * k) for k in (1, 2))  # forward
        (y if is_culprit else z).sum().backward()  # backward

    check_mistake(strategy, step, "forward", "backward", words=[ADVICE])


def test_results_of_an_earlier_step_in_another_order(strategy):
    """Calls of two runs: what is numbered is numbered on."""
    needs_two_replicas(strategy)
    kept = {}

    def forward():
        x = needs(1.0 + replica_id())
        kept[replica_id()] = [mr.get_replica_context().all_reduce("SUM", x * k) for k in (1, 2)]

    def back(is_culprit):
        y, z = kept[replica_id()]
        for one in (y, z) if is_culprit else (z, y):
            one.sum().backward(retain_graph=True)

    strategy.run(forward)
    with contextlib.suppress(MPIReplicaError):
        strategy.run(lambda: back(False))  # right, or an error on all ranks that says no
    for culprit in culprits(strategy):
        raises_everywhere(
            MPIReplicaError,
            lambda culprit=culprit: strategy.run(lambda: back(replica_id() == culprit)),
        )
        check_gradients_work(strategy)


def test_ways_back_of_two_helpers_and_one_line_are_told_apart(strategy):
    def step(is_culprit):
        x = needs(1.0 + replica_id())
        y, z = summed(x), summed(x * 2)  # forward
        for one in (y, z) if is_culprit else (z, y):
            one.sum().backward()  # backward

    check_mistake(strategy, step, "backward")


# What else parts replicas


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_leaves_that_need_gradients_on_some_replicas_only(strategy, kind):
    def step(is_culprit):
        a, b = needs(1.0), needs(1.0 + replica_id())
        if is_culprit:
            b = b.detach()
        nest = {"a": a, "b": [b, np.ones(1)]}
        if kind == "all_reduce":
            mr.get_replica_context().all_reduce("SUM", nest)
        else:
            mr.get_replica_context().all_gather(nest, 0)

    check_mistake(strategy, step, words=["['b'][0]", "gradient"], kind=MPIReplicaError)


def test_the_one_of_many_leaves_that_does_not_need_gradients_is_named(strategy):
    def step(is_culprit):
        nest = {f"k{k:02}": needs(1.0 + replica_id()) for k in range(40)}
        if is_culprit:
            nest["k17"].requires_grad_(False)
        mr.get_replica_context().all_reduce("MEAN", nest)

    check_mistake(strategy, step, words=["['k17']", "gradient"], kind=MPIReplicaError)


def test_grad_mode_that_is_off_on_one_replica_only(strategy):
    def step(is_culprit):
        with torch.set_grad_enabled(not is_culprit):
            mr.get_replica_context().all_reduce("SUM", [needs(1.0), needs(2.0 + replica_id())])

    check_mistake(strategy, step, words=["gradient"], kind=MPIReplicaError)


def test_a_numpy_array_where_the_others_need_gradients(strategy):
    def step(is_culprit):
        x = np.ones(1) if is_culprit else needs(1.0)
        mr.get_replica_context().all_reduce("SUM", {"x": x, "y": needs(2.0)})

    check_mistake(strategy, step, words=["['x']", "gradient"], kind=MPIReplicaError)


class Lost(Exception):
    pass


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_error_in_a_backward_hook_of_one_replica_is_raised_everywhere(strategy, where):
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            def hook(gradient):
                raise Lost(f"replica {replica_id()} is lost")

            x = needs(1.0 + replica_id())
            y = summed(x)
            if replica_id() == culprit:
                (y if where == "before" else x).register_hook(hook)
            y.sum().backward()
            summed(1.0)

        error = raises_everywhere(Lost, lambda step=step: strategy.run(step))
        assert str(error) == f"replica {culprit} is lost"
        origin = ranks_of(strategy)[culprit]
        words = [named(culprit, origin), *["in hook"] * (strategy.rank != origin)]
        holds_everywhere(lambda error=error, words=words: check_text(error, words, []))
        check_gradients_work(strategy)


def test_an_error_that_a_replica_catches_round_its_backward_is_its_own_to_mend(strategy):
    """As of forward calls: all replicas get it, and go on together."""
    needs_two_replicas(strategy)

    def step():
        i, caught = replica_id(), None
        x = needs(1.0 + i)
        y, z = (summed(x * k) for k in (1, 2))
        try:
            (z if i == 0 else y).sum().backward()
        except CollectiveMismatchError as error:
            caught = str(error)
        return caught, summed(i)

    count = strategy.num_replicas_in_sync
    found = results(strategy, step).values()
    texts = {text for of_rank in gathered([text for text, _ in found]) for text in of_rank}
    assert len(texts) == 1
    assert None not in texts
    assert {total for _, total in found} == {count * (count - 1) // 2}
    check_gradients_work(strategy)


def test_a_replica_that_raises_while_the_others_go_back(strategy):
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            y = summed(needs(1.0))
            if replica_id() == culprit:
                raise Lost("before its backward")
            y.sum().backward()

        raises_everywhere(Lost, lambda step=step: strategy.run(step))
        check_gradients_work(strategy)


def test_finally_blocks_run_where_a_backward_was_stopped(strategy):
    needs_two_replicas(strategy)
    ended = []

    def step():
        y = summed(needs(1.0))
        try:
            if replica_id() == 0:
                raise Lost("replica 0")
            y.sum().backward()
        finally:
            ended.append(replica_id())

    raises_everywhere(Lost, lambda: strategy.run(step))
    # One that had not gone on from its first call when replica 0 raised ends all the same.
    assert sorted(ended) == sorted(strategy.local_replica_ids)
    check_gradients_work(strategy)


def test_a_backward_outside_of_replicas_says_where_it_belongs(strategy):
    def step():
        return summed(needs(1.0 + replica_id())).sum()

    losses = strategy.experimental_local_results(strategy.run(step))
    if strategy.num_replicas_in_sync == 1 and DEVICE == "cpu":  # torch has threads for others
        losses[0].backward()
        return
    for loss in losses:
        with pytest.raises(ContextError, match=r"strategy\.run"):
            loss.backward()
    check_gradients_work(strategy)


def test_a_backward_for_another_replica_says_whose_it_is(strategy):
    """Where both are of one rank: a list that all replicas of it fill."""
    kept = {}

    def step():
        kept[replica_id()] = summed(needs(1.0 + replica_id()))
        summed(1.0)
        other = (replica_id() + 1) % strategy.num_replicas_in_sync
        if other in kept:
            kept[other].sum().backward()

    if max(map(len, gathered(strategy.local_replica_ids))) == 1:
        pytest.skip("no rank has two")
    error = raises_everywhere(ContextError, lambda: strategy.run(step))
    assert "by replica" in str(error)
    check_gradients_work(strategy)


def test_a_verification_finds_a_way_back_that_was_made_alone(strategy):
    """What is a call of one replica alone ends the step on all ranks, also as its last one."""

    def step(is_culprit):
        x = needs(1.0 + replica_id())
        y = mr.get_replica_context().all_reduce("MAX", x)  # forward
        if is_culprit:
            torch.autograd.grad(y.sum(), x)  # backward

    check_mistake(strategy, step, "forward", "backward", words=[ADVICE])
