"""gradients: those of torch, and collectives in compiled functions of JAX, beside others.

The first rows are `ctx.all_reduce` of a tensor that needs a gradient, and the way back, which is a
second one, beside two calls with numpy's arrays of the same size, and beside the shortest function
of torch's that makes these two calls; and of many tensors that need none, beside as many arrays.

Then `ctx.all_reduce` inside of a function that JAX has compiled, beside a compiled function that
hands its argument to Python and back (an ordered ``io_callback``), and a call with numpy's array.

The others are steps of training, as they are written first: backward, one `ctx.all_reduce` of all
gradients, a step of the optimizer. Beside them stands torch's DistributedDataParallel over gloo, in
the same processes, some steps in turn, with the same first weights and the same rows; before that
both train a little, and must come to the same weights. They are measured once alone, and once
beside a process that keeps a core busy.

Where there is a GPU, tensors on it follow, beside the same in the memory of the host, and the steps
with all that they compute there. All ranks share one GPU.
"""

import contextlib
import copy
import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import mpi_replica as mr
from mpi_replica.core.array_libraries import values_of

from .launching import Launch
from .measuring import beside, row
from .peers import torch_over_gloo
from .tables import quantity

#: bench.py starts the ranks with an interpreter that has it.
NEEDS_ARRAYS = True

_TENSORS = 1000

# By the name of the function in networks.py: what it is, its width in a trial, and the most of
# DistributedDataParallel's time.
_NETWORKS = {"perceptron": ("a perceptron", 64, 0.6), "resnet18": ("ResNet-18", 8, 0.9)}
_MOST_BESIDE_A_NEIGHBOUR = 1.0

# Steps of one side before the other has its turn.
_STEPS = 3
_STEPS_OF_CHECK = 3
# What the rounds of a row may take.
_LIMIT_SECONDS = 150

# How far the weights of both sides may be from each other, of the way that they have gone.
_MOST_DIFFERENCE = 1e-3

# Bytes, and goals: the most against two calls of numpy's, in seconds more and as a ratio.
_SIZES = {4: ("difference", 30e-6), 1_000_000: ("ratio", 1.25), 100_000_000: ("ratio", 1.25)}

_SIZES_OF_JAX = {**_SIZES, 4: ("difference", 40e-6)}

# Keeps a core busy for as long as the process that started it is there.
_NEIGHBOUR = "import os\nwhile os.getppid() == {}:\n    for _ in range(100_000): pass"


def launches(settings):
    """Return what to start for one library."""
    for ranks in settings.ranks or [2]:
        batches = settings.repeat or (3 if settings.quick else 100)
        arguments = {"is_quick": settings.quick, "batches": batches}
        yield Launch("there_and_back", ranks, arguments)
        yield Launch("many_tensors", ranks, arguments)
        yield Launch("compiled", ranks, arguments)
        arguments = arguments | {"batches": settings.repeat or (3 if settings.quick else 20)}
        for name in _NETWORKS:
            yield Launch("training", ranks, arguments | {"name": name}, limit_seconds=600)
        if Path("/dev/nvidia0").exists():
            yield Launch("on_gpu", ranks, arguments)
            for name in _NETWORKS:
                about = {"name": name, "device": "cuda"}
                yield Launch("training", ranks, arguments | about, limit_seconds=600)


def there_and_back(world, is_quick, batches):
    """Measure a collective that is differentiated, for each size."""
    import torch

    class ByHand(torch.autograd.Function):
        """Knows neither which replicas have gradients nor what a second derivative is."""

        @staticmethod
        def forward(ctx, value):
            total = mr.get_replica_context().all_reduce("SUM", value.detach().numpy())
            return torch.from_numpy(np.asarray(total))

        @staticmethod
        def backward(ctx, upstream):
            total = mr.get_replica_context().all_reduce("SUM", upstream.numpy())
            return torch.from_numpy(np.asarray(total))

    with mr.MPIStrategy() as strategy:
        for size, (comparison, goal) in _SIZES.items():
            length = size // 4 // (100 if is_quick and size > 4 else 1)
            shape = () if length == 1 else (length,)
            value = torch.full(shape, world.rank + 1.0, requires_grad=True)
            upstream = torch.full(shape, world.rank + 3.0)
            arrays = [np.array(tensor.detach()) for tensor in (value, upstream)]

            def differentiated(context, value=value, upstream=upstream):
                total = context.all_reduce("SUM", value)
                return total, torch.autograd.grad(total, value, upstream)[0]

            def twice(context, arrays=arrays):
                return [context.all_reduce("SUM", array) for array in arrays]

            def by_hand(context, value=value, upstream=upstream):
                total = ByHand.apply(value)
                return total, torch.autograd.grad(total, value, upstream)[0]

            calls = (differentiated, twice, by_hand)
            found, *others = (world.once(strategy, call) for call in calls)
            for expected in others:
                for mine, theirs in zip(found, expected, strict=True):
                    is_equal = np.array_equal(values_of(mine), values_of(theirs))
                    world.require(is_equal, "the way there and back")
            taken = world.in_turn([world.in_replica(strategy, call) for call in calls], batches)
            against = beside("two of numpy's arrays", taken[0], taken[1], comparison, goal)
            floor = beside("a function by hand", taken[0], taken[2], comparison)
            what = f"there and back, {quantity(4 * length, 'B')}"
            yield row(what, world.size, taken[0], against, floor)


def many_tensors(world, is_quick, batches):
    """Measure what it costs that a value is many tensors, of which torch records nothing."""
    import torch

    count = _TENSORS // (10 if is_quick else 1)
    tensors = [torch.full((64,), world.rank + 1.0) for _ in range(count)]
    arrays = [np.full(64, world.rank + 1.0, np.float32) for _ in range(count)]
    with mr.MPIStrategy() as strategy:
        for where in ("fresh", "in place"):

            def reduced(context, value, is_in_place=where == "in place"):
                return context.all_reduce("MEAN", value, out=value if is_in_place else None)

            calls = [functools.partial(reduced, value=value) for value in (tensors, arrays)]
            found, expected = (world.once(strategy, call) for call in calls)
            is_equal = all(map(np.array_equal, found, expected))
            world.require(is_equal, "the means of many tensors")
            loops = [world.in_replica(strategy, call) for call in calls]
            ours, others = world.in_turn(loops, batches)
            what = f"{count} tensors of 256 B, {where}"
            yield row(what, world.size, ours, beside("numpy's arrays", ours, others))


def on_gpu(world, is_quick, batches):
    """Measure what it costs that tensors are on a GPU, where results are, too."""
    import torch

    with mr.MPIStrategy() as strategy:
        for count, size in ((1, 4), (1, 1_000_000), (1, 100_000_000), (161, 600_000)):
            length = size // 4 // (100 if is_quick and size > 4 else 1)
            shape = () if length == 1 else (length,)
            here = [torch.full(shape, world.rank + 1.0) for _ in range(count)]
            there = [tensor.cuda() for tensor in here]

            def reduced(context, tensors):
                found = context.all_reduce("SUM", tensors)
                torch.cuda.synchronize()
                return found

            calls = [functools.partial(reduced, tensors=tensors) for tensors in (there, here)]
            found, expected = (world.once(strategy, call) for call in calls)
            is_equal = all(map(torch.equal, (tensor.cpu() for tensor in found), expected))
            world.require(is_equal, "sums on a GPU")
            loops = [world.in_replica(strategy, call) for call in calls]
            ours, others = world.in_turn(loops, batches)
            what = f"on a GPU, {f'{count} of ' * (count > 1)}{quantity(4 * length, 'B')}"
            yield row(what, world.size, ours, beside("in the host's memory", ours, others))


def compiled(world, is_quick, batches):
    """Measure a collective inside of a compiled function, for each size."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import io_callback

    @jax.jit
    def inside(x):
        return mr.get_replica_context().all_reduce("SUM", x)

    @jax.jit
    def through_python(x):
        return io_callback(lambda array: array, jax.typeof(x), x, ordered=True)

    with mr.MPIStrategy() as strategy:
        for size, (comparison, goal) in _SIZES_OF_JAX.items():
            length = size // 4 // (100 if is_quick and size > 4 else 1)
            array = np.full(() if length == 1 else (length,), world.rank + 1.0, np.float32)
            value = jnp.asarray(array)

            def ours(context, value=value):
                return inside(value).block_until_ready()

            def apart(context, value=value, array=array):
                through_python(value).block_until_ready()
                return context.all_reduce("SUM", array)

            found, expected = world.once(strategy, ours), world.once(strategy, apart)
            world.require(np.array_equal(found, expected), "a sum in a compiled function")
            loops = [world.in_replica(strategy, call) for call in (ours, apart)]
            taken = world.in_turn(loops, batches)
            against = beside("io_callback, and numpy's array", *taken, comparison, goal)
            yield row(
                f"compiled by JAX, {quantity(4 * length, 'B')}", world.size, taken[0], against
            )


def training(world, name, is_quick, batches, device="cpu"):
    """Measure steps of training of one network, also where another process keeps a core busy."""
    import torch

    from . import networks

    torch_over_gloo(world)
    # Of a GPU: the same way of computing each time, in all bits, or both sides go apart.
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    described, small, goal = _NETWORKS[name]
    make = getattr(networks, name)
    torch.manual_seed(0)
    network, _, _ = make(small) if is_quick else make()
    torch.manual_seed(1 + world.rank)  # each rank has rows of its own
    _, *batch = make(small) if is_quick else make()
    network, batch = network.to(device), [tensor.to(device) for tensor in batch]
    with mr.MPIStrategy() as strategy:
        ours, others = _Ours(copy.deepcopy(network), batch), _Distributed(network, batch)
        _check(world, strategy, ours, others)
        loops = [_some(world.in_replica(strategy, ours.step)), _some(world.repeated(others.step))]
        size = quantity(sum(weight.nbytes for weight in ours.weights), "B")
        what = f"a step of {described}, {size}"
        cases = [(what, goal, False), (f"{what}, a core is busy", _MOST_BESIDE_A_NEIGHBOUR, True)]
        if device != "cpu":
            cases = [(f"{what}, on a GPU", None, False)]
        for case, most, has_neighbour in cases:
            with _neighbour() if has_neighbour and world.rank == 0 else contextlib.nullcontext():
                taken = world.in_turn(loops, batches, _LIMIT_SECONDS)
            side = beside("DistributedDataParallel", *taken, goal=most)
            yield row(case, world.size, taken[0], side)


class _Trained:
    """A network, its optimizer, and rows of this rank."""

    def __init__(self, network, batch):
        import torch

        self.weights = list(network.parameters())
        self._network, (self._inputs, self._targets) = network, batch
        self._optimizer = torch.optim.SGD(self.weights, lr=0.01, momentum=0.9)
        self._loss_of = torch.nn.functional.cross_entropy

    def _backward(self):
        self._optimizer.zero_grad()
        self._loss_of(self._network(self._inputs), self._targets).backward()

    def _finish(self):
        self._optimizer.step()
        if not self._inputs.is_cpu:  # a GPU goes on by itself
            import torch

            torch.cuda.synchronize()


class _Ours(_Trained):
    def step(self, context):
        """Go a step with the mean of all replicas' gradients."""
        self._backward()
        gradients = [weight.grad for weight in self.weights]
        if gradients[0].is_cpu:
            context.all_reduce("MEAN", gradients, out=gradients)
        else:
            mean = context.all_reduce("MEAN", gradients)
            for weight, gradient in zip(self.weights, mean, strict=True):
                weight.grad = gradient
        self._finish()


class _Distributed(_Trained):
    def __init__(self, network, batch):
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(network, batch)
        # Statistics of batch norm stay with their rank, as on our side.
        self._network = DistributedDataParallel(network, broadcast_buffers=False)

    def step(self):
        """Go a step; the means are made in the way back."""
        self._backward()
        self._finish()


def _check(world, strategy, ours, others):
    """Raise unless both sides come to the same weights, and not to those that they began with."""
    import torch

    first = [weight.detach().clone() for weight in ours.weights]
    world.in_replica(strategy, ours.step)(_STEPS_OF_CHECK)
    world.repeated(others.step)(_STEPS_OF_CHECK)
    with torch.no_grad():
        gone = sum(((a - b) ** 2).sum() for a, b in zip(ours.weights, first, strict=True))
        apart = sum(((a - b) ** 2).sum() for a, b in zip(ours.weights, others.weights, strict=True))
    is_near = bool(gone > 0 and apart <= _MOST_DIFFERENCE**2 * gone)
    ways = f"squares of ways: {float(gone):.2g} gone, {float(apart):.2g} apart"
    world.require(is_near, f"training beside DistributedDataParallel ({ways})")
    strategy.verify([weight.detach() for weight in ours.weights])


def _some(loop):
    """Return the loop that makes several steps for each that it is asked for, and tells of one."""
    return lambda count: loop(_STEPS * count) / _STEPS


@contextlib.contextmanager
def _neighbour():
    """Have another process keep a core busy."""
    # None of the ranks' cores in particular, where the launcher has bound them.
    command = f"import os\nos.sched_setaffinity(0, range({os.cpu_count()}))\n"
    command += _NEIGHBOUR.format(os.getpid())
    with subprocess.Popen([sys.executable, "-S", "-c", command]) as process:
        try:
            time.sleep(0.3)  # it takes so long to begin
            yield
        finally:
            process.kill()
