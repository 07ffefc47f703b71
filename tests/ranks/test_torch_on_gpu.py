"""Tensors on a GPU: a nest goes through page-locked memory at once, and nobody waits too little.

Where there is no GPU, tensors of the host stand in for those on one: that shows the packing of a
nest, and nothing of time. `on_a_device` has all other tests of torch use a GPU.
"""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpi_replica as mr
from gradient_programs import replica_id, results
from mpi_replica.core import gpu_tensors
from mpi_replica.core.array_libraries import to_numpy, way_back

torch = pytest.importorskip("torch", reason="torch is not installed")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
DTYPES += [torch.int64, torch.uint8, torch.bool]
ORDERS = ["plain", "transposed", "every other", "conjugate", "negative"]


class NoStream:
    def synchronize(self):
        """There is nothing to wait for."""


@pytest.fixture
def tensors_of_the_host_stand_in(monkeypatch):
    monkeypatch.setattr(
        gpu_tensors,
        "_on_gpus",
        lambda leaves: [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)],
    )
    monkeypatch.setattr(
        gpu_tensors, "_block", lambda size: torch.empty(size, dtype=torch.uint8, device="cpu")
    )
    monkeypatch.setattr(gpu_tensors, "_BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    current_stream = torch.cuda.current_stream
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device=None: NoStream() if is_of_host(device) else current_stream(device),
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        lambda tensor, other, non_blocking=False: copy(
            tensor, memory_of(other) if non_blocking else other
        ),
    )


def is_of_host(device):
    return isinstance(device, torch.device) and device.type == "cpu"


def memory_of(tensor):
    """Return the values that lie in memory, of which a tensor may be a conjugate or negative view.

    torch conjugates what a copy from a GPU shall become before the copy is there.
    """
    if tensor.is_conj():
        return tensor.conj()
    return -tensor.resolve_neg() if tensor.is_neg() else tensor


def tensor(seed, dtype, shape, order):
    values = torch.as_tensor(np.random.default_rng(seed).integers(0, 100, shape)).to(dtype)
    if order == "transposed":
        return values.T if values.ndim == 2 else values
    if order == "every other":
        return values.repeat(2)[::2] if values.ndim == 1 else values
    if order == "negative" and dtype in (torch.float32, torch.float64):
        return torch.complex(values, -values).conj().imag
    return values.conj() if order == "conjugate" and dtype.is_complex else values


@st.composite
def nests(draw):
    """Leaves of all kinds, in any order of memory, and the seed of each."""
    return [
        tensor(
            seed,
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from([(), (0,), (1,), (7,), (3, 5), (0, 4), (1000,)])),
            draw(st.sampled_from(ORDERS)),
        )
        if draw(st.booleans())
        else np.arange(seed)
        for seed in range(draw(st.integers(0, 6)))
    ]


def as_it_is(leaf):
    return np.asarray(to_numpy(leaf)).copy()


def check_that_any_nest_comes_back(leaves, lend):
    expected = [as_it_is(leaf) for leaf in leaves]
    here = gpu_tensors.on_host(leaves)
    for leaf, copy, values in zip(leaves, here, expected, strict=True):
        assert (copy is leaf) == isinstance(leaf, np.ndarray)
        np.testing.assert_array_equal(as_it_is(copy), values, strict=True)
    # what a call gives back lies in a block, several in one, or anywhere
    arrays = []
    for values in expected:
        memory = lend(values.nbytes + 64)[64:] if values.size % 2 else np.empty(values.nbytes, "u1")
        array = memory.view(values.dtype).reshape(values.shape)
        array[...] = values
        arrays.append(array)
    give = way_back(leaves)
    for leaf, found, values in zip(leaves, give(arrays) if give else arrays, expected, strict=True):
        assert type(found) is type(leaf)
        if isinstance(leaf, torch.Tensor):
            assert (found.dtype, found.device) == (leaf.dtype, leaf.device)
        np.testing.assert_array_equal(as_it_is(found), values, strict=True)


# What hypothesis draws differs between the ranks: no call is made.
def test_any_nest_goes_through_a_block_and_comes_back(tensors_of_the_host_stand_in):
    @given(nests())
    def check(leaves):
        check_that_any_nest_comes_back(leaves, gpu_tensors.page_locked_bytes)

    check()


@needs_gpu
def test_any_nest_goes_to_a_gpu_and_comes_back():
    @given(nests())
    def check(leaves):
        there = [leaf if isinstance(leaf, np.ndarray) else leaf.cuda() for leaf in leaves]
        check_that_any_nest_comes_back(there, gpu_tensors.page_locked_bytes)

    check()


def test_results_of_whole_calls_are_right_where_tensors_go_through_a_block(
    strategy, tensors_of_the_host_stand_in
):
    check_many_calls(strategy, lambda: contextlib.nullcontext(), "cpu", rounds=3)


@needs_gpu
def test_results_are_right_where_the_gpu_is_late_and_memory_is_reused_at_once(strategy):
    """Each replica computes in a stream of its own, and nobody waits but the calls."""

    def late():
        stack = contextlib.ExitStack()
        if replica_id() % 2:
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        return stack

    check_many_calls(strategy, late, "cuda", rounds=30)


def check_many_calls(strategy, in_stream, device, rounds):
    count = strategy.num_replicas_in_sync

    def step():
        context, i, wrong = mr.get_replica_context(), replica_id(), 0
        with in_stream():
            for number in range(rounds):
                for size in (1, 7, 1000, 70_000, 300_000):
                    a = torch.full((size,), float(i + number), device=device)
                    if device == "cuda":
                        torch.cuda._sleep(200_000)  # some 100 us
                    a += 1
                    b = torch.full((size // 3 + 1, 2), i + number, device=device)
                    c = torch.full((5,), float(i), device=device, dtype=torch.bfloat16)
                    e = torch.complex(a, -a).conj()
                    nest = {"a": a, "b": b, "c": c, **({"d": 2.0} if number % 2 else {}), "e": e}
                    found = context.all_reduce("SUM", nest)
                    rows = context.all_gather(b[: i + 1].T, axis=1)
                    a += 1  # what was given is the program's again
                    b += 1
                    total = sum(j + number for j in range(count))
                    gathered = sum(min(j + 1, size // 3 + 1) * (j + number) for j in range(count))
                    wrong += (found["a"] != total + count).sum() + (found["b"] != total).sum()
                    wrong += (found["c"] != sum(range(count))).sum()
                    wrong += (found["e"] != (1 + 1j) * (total + count)).sum()
                    wrong += rows.sum() != 2 * gathered
        return int(wrong)

    assert set(results(strategy, step).values()) == {0}
