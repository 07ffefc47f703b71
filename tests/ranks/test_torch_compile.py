"""torch.compile of a step with collectives: they break the graph, or are an error under fullgraph.

What compiles with a compiler of C++ is left out: the graph is broken before it comes there.
"""

import re
import sys
import warnings

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, error_of, gathered, holds_everywhere, raises_everywhere
from gradient_programs import as_numpy, replica_id, results
from mpi_replica.errors import CollectiveMismatchError

torch = pytest.importorskip("torch", reason="torch is not installed")
_dynamo = pytest.importorskip("torch._dynamo", reason="torch is not installed")

BACKENDS = ["eager", "aot_eager"]

# Torch gives it itself, where a graph breaks before what is done with a non-leaf.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def nothing_compiled():
    _dynamo.reset()


def loss(x, w):
    """A loss with a collective in the middle, whose gradient passes it, and one of a nest."""
    context = mr.get_replica_context()
    y = context.all_reduce("SUM", (x * w).sin())
    rows = context.all_gather({"rows": y * w, "ids": torch.ones(1)}, 0)
    return (rows["rows"] * rows["ids"].sum() + (y * x).sum()).cos().sum()


def inputs(number):
    return torch.arange(3.0) + replica_id() + number, torch.linspace(1, 2, 3).requires_grad_()


def gradients(fn):
    """Of three calls with other numbers."""
    found = []
    for number in range(3):
        x, w = inputs(number)
        value = fn(x, w)
        value.backward()
        found += [value.detach(), w.grad]
    return found


def check_same(found, expected):
    def check():
        for i, mine in found.items():
            for one, other in zip(mine, expected[i], strict=True):
                np.testing.assert_allclose(as_numpy(one), as_numpy(other), rtol=1e-5, atol=1e-6)

    holds_everywhere(check)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_loss_gives_the_same_gradients_call_after_call(strategy, backend):
    compiled = torch.compile(loss, backend=backend)
    expected = results(strategy, lambda: gradients(loss))
    check_same(results(strategy, lambda: gradients(compiled)), expected)
    check_works(strategy)


def test_a_compiled_step_with_its_backward_pass_gives_the_same(strategy):
    def step(x, w):
        loss(x, w).backward()
        gradient = mr.get_replica_context().all_reduce("MEAN", w.grad)
        return 2 * gradient

    compiled = torch.compile(step, backend="aot_eager")

    def both():
        return compiled(*inputs(0)), compiled(*inputs(1))

    expected = results(strategy, lambda: (step(*inputs(0)), step(*inputs(1))))
    check_same(results(strategy, both), expected)


def test_a_compiled_module_between_collectives_is_one_graph(strategy):
    """What the advice says: the collective stands outside."""
    models = {i: torch.nn.Linear(3, 2) for i in strategy.local_replica_ids}
    for model in models.values():
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.constant_(model.bias, 0.25)

    def gradient(wraps):
        model = models[replica_id()]
        model.zero_grad()
        y = mr.get_replica_context().all_reduce("SUM", wraps(model)(inputs(0)[0]).tanh())
        (y * (1 + replica_id())).sum().backward()
        return [model.weight.grad, model.bias.grad]

    expected = results(strategy, lambda: gradient(lambda model: model))

    def compiled():
        return gradient(lambda model: torch.compile(model, backend="eager", fullgraph=True))

    check_same(results(strategy, compiled), expected)


def test_a_compiled_batch_norm_gives_the_same(strategy):
    def step(wraps):
        norm = mr.torch.SyncBatchNorm(3)
        x = (torch.arange(12.0).reshape(4, 3) * (1 + replica_id())).sin().requires_grad_()
        (wraps(norm)(x) ** 3).sum().backward()
        return [x.grad, norm.running_mean, norm.running_var, norm.weight.grad]

    expected = results(strategy, lambda: step(lambda norm: norm))
    compiled = results(
        strategy, lambda: step(lambda norm: torch.compile(norm, backend="aot_eager"))
    )
    check_same(compiled, expected)


CALLS = {
    "all_reduce": lambda context, x: context.all_reduce("SUM", x),
    "all_gather": lambda context, x: context.all_gather(x, 0),
    "merge_call": lambda context, x: context.merge_call(lambda strategy, value: 1, (x,)),
    "get_replica_context": lambda context, x: mr.get_replica_context(),
}


@pytest.mark.parametrize("call", CALLS)
def test_as_one_graph_a_collective_is_an_error_on_all_ranks_that_says_what_to_do(strategy, call):
    made = CALLS[call]

    def step():
        context = mr.get_replica_context()
        compiled = torch.compile(lambda x: made(context, x) * 2, backend="eager", fullgraph=True)
        compiled(inputs(0)[0])

    error = error_of(lambda: strategy.run(step))
    words = "leave fullgraph=True away, or compile the functions between the collectives"

    def check():
        assert words in re.sub(r"\s+", " ", str(error)), repr(error)
        assert "raised by replica 0 (rank 0)" in "\n".join(error.__notes__)

    holds_everywhere(check)
    # The text has addresses of functions: those of replica 0, on all ranks.
    assert len(set(gathered(str(error).partition("\n")[0]))) == 1
    check_works(strategy)


def test_where_torch_compile_is_in_use_runs_give_no_warnings(strategy):
    assert "torch._dynamo.trace_rules" in sys.modules
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results(strategy, lambda: gradients(loss))
        results(strategy, lambda: torch.compile(lambda x: x * 2, backend="eager")(inputs(0)[0]))
    texts = [str(warning.message) for warning in seen]

    def check():
        assert texts == []

    holds_everywhere(check)


def on_other_shapes(step):
    """Of two calls: in the second one the replicas have different numbers of rows."""
    return [step(torch.ones(3 + number * replica_id(), 2)) for number in range(2)]


def first_a_collective(x):
    total = mr.get_replica_context().all_reduce("SUM", (x * 2).sum())
    return total + mr.get_replica_context().all_reduce("SUM", x.sum() * total)


def one_of_a_helper(x):
    return reduced(x.sin()) * 2 + reduced(x.cos())


def reduced(x):
    return mr.get_replica_context().all_reduce("SUM", x.sum() / len(x))


def behind_a_break(x):
    _dynamo.graph_break()
    y = (x * len(x)).sum()
    _dynamo.graph_break()
    z = [mr.get_replica_context().all_reduce("SUM", y + i) * 2 for i in range(2)]
    return z[0] + mr.mean_over_global_batch([y, z[1]], rows=len(x))[0]


@pytest.mark.parametrize("step", [first_a_collective, one_of_a_helper, behind_a_break])
@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_may_have_other_shapes_for_which_the_step_is_compiled_anew(
    strategy, step, backend
):
    compiled = torch.compile(step, backend=backend)
    expected = results(strategy, lambda: on_other_shapes(step))
    check_same(results(strategy, lambda: on_other_shapes(compiled)), expected)
    check_works(strategy)


def on_two_lines(x, is_first):
    _dynamo.graph_break()
    context, y = mr.get_replica_context(), x.sum()
    if is_first:
        return context.all_reduce("SUM", y)
    return context.all_reduce("SUM", y)


def test_in_a_compiled_step_too_calls_of_two_lines_are_a_mismatch(strategy):
    compiled = torch.compile(on_two_lines, backend="eager")

    def step():
        return compiled(torch.ones(3, 2), replica_id() == 0)

    if strategy.num_replicas_in_sync == 1:
        strategy.run(step)
    else:
        raises_everywhere(CollectiveMismatchError, lambda: strategy.run(step))
    check_works(strategy)
