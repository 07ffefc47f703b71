"""Programs of collectives for tests of gradients, and what torch alone finds for them.

A program is a generator function: it yields its collectives and returns the loss of its replica.
Replicas make the calls; the reference runs the programs of all replicas side by side, with one
graph over the data of all, whose root is the sum of all losses. Every rank can do that: data depend
on the id of a replica alone.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import optree

import mpi_replica as mr
from everywhere import holds_everywhere

#: What torch makes of the leaves of all replicas, one on top of the other.
OPS = {
    "SUM": lambda stack: stack.sum(0),
    "MEAN": lambda stack: stack.mean(0),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
    "PROD": lambda stack: stack.prod(0),
}


class Reduced(NamedTuple):
    """all_reduce, as a program asks for it."""

    op: str
    value: Any

    def made(self, context):
        return context.all_reduce(self.op, self.value)

    def of_all(self, *leaves):
        import torch

        stack = torch.stack(leaves)
        narrow = stack.dtype in (torch.float16, torch.bfloat16)
        return OPS[self.op](stack.float() if narrow else stack).to(stack.dtype)


class Gathered(NamedTuple):
    """all_gather, as a program asks for it."""

    value: Any
    axis: int = 0

    def made(self, context):
        return context.all_gather(self.value, self.axis)

    def of_all(self, *leaves):
        import torch

        return torch.cat(leaves, self.axis)


def by_calls(program):
    """Run a program in a replica; return its loss."""
    context = mr.get_replica_context()
    found = None
    while True:
        try:
            call = program.send(found)
        except StopIteration as end:
            return end.value
        found = call.made(context)


def by_torch(programs):
    """Run the programs of all replicas in one process; return their losses."""
    found = [None] * len(programs)
    losses = []
    while True:
        calls = []
        for program, result in zip(programs, found, strict=True):
            try:
                calls.append(program.send(result))
            except StopIteration as end:
                losses.append(end.value)
        if not calls:
            return losses
        assert not losses, "some programs make more calls than others"
        result = optree.tree_map(calls[0].of_all, *(call.value for call in calls))
        found = [result] * len(programs)


def differentiated(loss, leaves, *, twice=False):
    """The gradients of a loss, or those of the sum of their squares; zeros where there are none."""
    import torch

    if twice:
        firsts = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        squares = [(first.conj() * first).real.sum() for first in firsts if first is not None]
        # Gradients may be constants: then those of their squares are 0.
        loss = sum(squares) + sum(0 * leaf.real.sum() for leaf in leaves)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if one is None else one
        for one, leaf in zip(found, leaves, strict=True)
    ]


def reference(program, leaves_of, count, *, twice=False):
    """The gradients of all replicas, in the order of their ids.

    In float32 where leaves have less: torch rounds each of the sums of many replicas.
    """
    given = [leaves_of(i) for i in range(count)]
    leaves = [[widened(leaf) for leaf in mine] for mine in given]
    losses = by_torch([program(i, *mine) for i, mine in enumerate(leaves)])
    flat = [leaf for mine in leaves for leaf in mine]
    gradients = iter(
        differentiated(functools.reduce(lambda x, y: x + y, losses), flat, twice=twice)
    )
    return [[next(gradients).to(leaf.dtype) for leaf in mine] for mine in given]


def widened(leaf):
    """A narrow float in float32, others as they are."""
    if leaf.is_floating_point() and leaf.element_size() < 4:
        return leaf.detach().float().requires_grad_(leaf.requires_grad)
    return leaf


def results(strategy, step):
    """What `step` returns for each local replica, by its id."""
    found = strategy.experimental_local_results(strategy.run(step))
    return dict(zip(strategy.local_replica_ids, found, strict=True))


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def check_gradients(strategy, program, leaves_of, *, twice=False, about="", **tolerance):
    """Check the gradients of ``program(replica_id, *leaves)`` on all replicas.

    Parameters
    ----------
    leaves_of : callable
        Makes the leaves of a replica, of its id: fresh ones that need gradients.
    twice : bool
        Whether those of the squared gradients are meant.
    **tolerance
        Of `numpy.testing.assert_allclose`.
    """

    def step():
        leaves = leaves_of(replica_id())
        return differentiated(by_calls(program(replica_id(), *leaves)), leaves, twice=twice)

    found = results(strategy, step)
    expected = reference(program, leaves_of, strategy.num_replicas_in_sync, twice=twice)

    def check():
        for i, mine in found.items():
            for number, (one, other) in enumerate(zip(mine, expected[i], strict=True)):
                same(one, other, f"{about} replica {i}, leaf {number}", **tolerance)

    holds_everywhere(check)


def same(found, expected, about="", **tolerance):
    """Check that a tensor is as another one."""
    assert found.dtype == expected.dtype, f"{about}: {found.dtype}, not {expected.dtype}"
    assert found.shape == expected.shape, f"{about}: {found.shape}, not {expected.shape}"
    found, expected = (as_numpy(tensor) for tensor in (found, expected))
    np.testing.assert_allclose(found, expected, err_msg=about, **({"rtol": 1e-6} | tolerance))


def as_numpy(tensor):
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    return np.asarray(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)
