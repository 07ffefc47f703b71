"""What every transport promises, once; each transport's tests inherit it.

A test class gives `make()`, which returns a transport and is collective over its ranks. Ranks
hold different data, always.
"""

import math

import numpy as np
import pytest

from mpi_replica.core.options import ReduceOp
from mpi_replica.ranks.transport import ALIGNMENT, HEADER_BYTES

# How many bytes a rank gives to another one, of so many.


def blocks_of_all_lengths(sender, receiver, size):
    return (2 * sender + receiver) % 4


def nothing_to_itself(sender, receiver, size):
    return 0 if sender == receiver else 5


def all_to_the_last(sender, receiver, size):
    return 7 if receiver == size - 1 else 0


class TransportContract:
    large_block_bytes = 70_000

    def make(self):
        raise NotImplementedError

    @pytest.fixture
    def transport(self):
        transport = self.make()
        yield transport
        transport.close()

    def header(self, rank, turn=0, size_bytes=HEADER_BYTES):
        return bytes([rank + 1, turn % 251]) * (size_bytes // 2)

    def test_rank_and_size_and_hosts_fit_together(self, transport):
        assert 0 <= transport.rank < transport.size
        assert len(transport.hosts) == transport.size
        assert all(isinstance(host, str) and host for host in transport.hosts)

    def test_exchange_gives_the_headers_of_all_ranks_in_rank_order(self, transport):
        sizes = sorted(transport.headers)
        assert sizes[0] == HEADER_BYTES
        for turn, size_bytes in enumerate([*sizes, *sizes[::-1], *sizes]):
            mine = self.header(transport.rank, turn, size_bytes)
            transport.exchange(mine[:17], size_bytes, memoryview(mine)[17:])
            assert transport.headers[size_bytes].tobytes() == b"".join(
                self.header(r, turn, size_bytes) for r in range(transport.size)
            )

    def test_exchange_with_a_limit_is_the_same_when_all_come(self, transport):
        transport.timeout_seconds = 60
        transport.exchange(self.header(transport.rank))
        assert transport.headers[HEADER_BYTES].tobytes() == b"".join(
            self.header(r) for r in range(transport.size)
        )

    def test_maximum_is_over_all_ranks_word_by_word(self, transport):
        mine = np.array([transport.rank, 2**64 - 1 - transport.rank, 7], np.uint64)
        got = transport.maximum(mine)
        assert got.tolist() == [transport.size - 1, 2**64 - 1, 7]

    @pytest.mark.parametrize("length", [0, 1, 1000])
    def test_bytes_of_different_lengths_are_gathered_in_rank_order(self, transport, length):
        size = transport.size
        blocks = [bytes([r]) * math.ceil(length * r / size) for r in range(size)]
        assert transport.all_gather_bytes(blocks[transport.rank]) == blocks

    @pytest.mark.parametrize("timeout_seconds", [None, 60])
    def test_uneven_blocks_are_gathered_out_of_place_and_in_place(self, transport, timeout_seconds):
        transport.timeout_seconds = timeout_seconds
        counts = [3 * r + 1 for r in range(transport.size)]
        start = sum(counts[: transport.rank])
        mine = np.full(counts[transport.rank], transport.rank, np.uint8)
        expected = np.repeat(np.arange(transport.size, dtype=np.uint8), counts)
        received = np.full(sum(counts), 255, np.uint8)
        transport.all_gather_blocks(mine, received, counts)
        assert received.tolist() == expected.tolist()
        received = np.full(sum(counts), 255, np.uint8)
        received[start : start + mine.size] = mine
        transport.all_gather_blocks(None, received, counts)
        assert received.tolist() == expected.tolist()

    @pytest.mark.parametrize("timeout_seconds", [None, 60])
    @pytest.mark.parametrize("least", [0, 1])
    def test_a_tiny_block_is_gathered_with_large_ones(self, transport, least, timeout_seconds):
        """Intel MPI 2021.19 cuts all blocks of an Iallgatherv into pieces of the least one."""
        transport.timeout_seconds = timeout_seconds
        counts = [least, *[self.large_block_bytes] * (transport.size - 1)]
        mine = np.full(counts[transport.rank], transport.rank, np.uint8)
        received = np.full(sum(counts), 255, np.uint8)
        transport.all_gather_blocks(mine, received, counts)
        expected = np.repeat(np.arange(transport.size, dtype=np.uint8), counts)
        np.testing.assert_array_equal(received, expected)

    @pytest.mark.parametrize("timeout_seconds", [None, 60])
    @pytest.mark.parametrize("length", [0, 1, 1000])
    def test_a_broadcast_gives_what_one_rank_has_and_may_not_write(
        self, transport, length, timeout_seconds
    ):
        transport.timeout_seconds = timeout_seconds
        for root in range(transport.size):
            expected = bytes([root + 1]) * length
            data = np.full(length, 255, np.uint8)
            if transport.rank == root:
                data = np.frombuffer(expected, np.uint8)  # read-only
            transport.broadcast(data, root)
            assert data.tobytes() == expected

    @pytest.mark.parametrize("timeout_seconds", [None, 60])
    @pytest.mark.parametrize("dtype", ["int8", "uint64", "float32", "float64", "complex128"])
    def test_sums_are_over_all_ranks_out_of_place_and_in_place(
        self, transport, dtype, timeout_seconds
    ):
        transport.timeout_seconds = timeout_seconds
        mine = (np.arange(5) + transport.rank).astype(dtype)
        ranks = range(transport.size)
        expected = sum((np.arange(5) + r).astype(dtype) for r in ranks)
        result = np.zeros(5, dtype)
        transport.all_reduce(mine, result, ReduceOp.SUM)
        assert result.tolist() == expected.tolist()
        assert mine.tolist() == (np.arange(5) + transport.rank).tolist()
        transport.all_reduce(None, mine, ReduceOp.MEAN)  # not divided here
        assert mine.tolist() == expected.tolist()

    @pytest.mark.parametrize(
        ("op", "reference"),
        [(ReduceOp.MIN, np.min), (ReduceOp.MAX, np.max), (ReduceOp.PROD, np.prod)],
    )
    def test_other_ops_are_over_all_ranks(self, transport, op, reference):
        rows = [np.array([r + 2, 3 - r, -r], np.int64) for r in range(transport.size)]
        result = np.zeros(3, np.int64)
        transport.all_reduce(rows[transport.rank], result, op)
        assert result.tolist() == reference(rows, axis=0).tolist()

    @pytest.mark.parametrize("timeout_seconds", [None, 60])
    @pytest.mark.parametrize("gives", [blocks_of_all_lengths, nothing_to_itself, all_to_the_last])
    def test_each_rank_gets_its_block_of_every_rank_in_rank_order(
        self, transport, gives, timeout_seconds
    ):
        """Blocks may be uneven and empty."""
        transport.timeout_seconds = timeout_seconds
        ranks = range(transport.size)

        def block(sender, receiver):
            length = gives(sender, receiver, transport.size)
            return np.full(length, (16 * sender + receiver) % 256, np.uint8)

        sent = [block(transport.rank, receiver) for receiver in ranks]
        given = [block(sender, transport.rank) for sender in ranks]
        send = np.concatenate(sent)
        before = send.tolist()
        received = np.full(sum(map(len, given)), 255, np.uint8)
        lengths = [[len(one) for one in blocks] for blocks in (sent, given)]
        transport.all_to_all(send, lengths[0], received, lengths[1])
        assert received.tolist() == np.concatenate(given).tolist()
        assert send.tolist() == before

    def test_each_rank_gets_the_messages_of_those_that_send_it_something(self, transport):
        def message(sender, receiver):
            return bytes([(16 * sender + receiver) % 256] * (sender + 4 * receiver))

        here = transport.rank
        others = [rank for rank in range(transport.size) if rank != here]
        sent = {rank: message(here, rank) for rank in others if rank != 1}
        coming = {rank: message(rank, here) for rank in others if here != 1}
        sizes = {rank: len(data) for rank, data in coming.items()}
        for _ in range(3):
            assert transport.pass_on(sent, sizes) == coming

    @pytest.mark.parametrize("timeout_seconds", [None, 60])
    def test_what_is_written_into_shared_memory_before_a_barrier_is_read_after_it(
        self, transport, timeout_seconds
    ):
        transport.timeout_seconds = timeout_seconds
        size, rank = transport.size, transport.rank
        memory = transport.open_shared_memory(size * 8)
        transport.barrier()
        numbers = memory.view(np.int64)
        seen = []
        for turn in range(9):
            numbers[rank] = 100 * turn + rank
            transport.barrier()
            seen.append(numbers.tolist())
            transport.barrier()
        assert seen == [[100 * turn + r for r in range(size)] for turn in range(9)]

    def test_no_rank_leaves_a_barrier_before_the_last_one_has_come(self, transport):
        memory = transport.open_shared_memory(transport.size)
        transport.barrier()
        for last in range(transport.size):
            if transport.rank == last:
                sum(range(100_000))  # the others get there first
                memory[last] = 1
            transport.barrier()
            assert memory.tolist() == [1] * (last + 1) + [0] * (transport.size - last - 1)
            transport.barrier()

    def test_shared_memory_is_as_large_as_asked_for_and_apart_from_any_other(self, transport):
        """And numbers of any kind can lie in it."""
        sizes = [1, 1000, 1 << 20]
        memories = [transport.open_shared_memory(size) for size in sizes]
        transport.barrier()
        for memory, size in zip(memories, sizes, strict=True):
            assert (memory.dtype, memory.shape) == (np.uint8, (size,))
            assert memory.ctypes.data % ALIGNMENT == 0
        if transport.rank == transport.size - 1:
            for value, memory in enumerate(memories, 5):
                memory[:] = value
        transport.barrier()
        for value, memory in enumerate(memories, 5):
            assert set(memory.tolist()) == {value}

    def test_shared_memory_takes_as_many_steps_on_every_rank(self, transport):
        """And none is left in flight."""
        transport.open_shared_memory(1000)
        assert transport.steps_ended == transport.steps
        assert not transport.is_in_flight
        mine = b"%d" % transport.steps
        assert set(transport.all_gather_bytes(mine)) == {mine}

    def exchanges(self, transport):
        """Every exchange there is, by name."""
        size, rank = transport.size, transport.rank
        words, numbers = np.full(3, rank, np.uint64), np.full(9, rank, np.float64)
        block, blocks = np.full(4, rank, np.uint8), np.empty(4 * size, np.uint8)
        counts = [4] * size
        return {
            "exchange": lambda: transport.exchange(self.header(rank)),
            "maximum": lambda: transport.maximum(words),
            "all_gather_bytes": lambda: transport.all_gather_bytes(b"four"),
            "all_gather_blocks": lambda: transport.all_gather_blocks(block, blocks, counts),
            "broadcast": lambda: transport.broadcast(blocks, size - 1),
            "all_reduce": lambda: transport.all_reduce(None, numbers, ReduceOp.MAX),
            "all_to_all": lambda: transport.all_to_all(blocks.copy(), counts, blocks, counts),
            "barrier": lambda: transport.barrier(),
        }

    @pytest.mark.parametrize("timeout_seconds", [None, 60])
    def test_steps_and_sent_bytes_count_the_same_on_every_rank_and_each_time(
        self, transport, timeout_seconds
    ):
        """By the steps of an exchange the others know which one has failed."""
        transport.timeout_seconds = timeout_seconds
        for name, exchange in self.exchanges(transport).items():
            costs = []
            for _ in range(3):
                before = transport.steps, transport.sent_bytes
                exchange()
                assert transport.steps_ended == transport.steps
                assert not transport.is_in_flight
                costs.append((transport.steps - before[0], transport.sent_bytes - before[1]))
            assert len(set(costs)) == 1, name
            mine = repr((name, costs, transport.steps)).encode()
            assert set(transport.all_gather_bytes(mine)) == {mine}

    def test_empty_arrays_are_reduced_and_gathered(self, transport):
        transport.all_reduce(None, np.empty(0, np.float32), ReduceOp.SUM)
        transport.all_gather_blocks(
            np.empty(0, np.uint8), np.empty(0, np.uint8), [0] * transport.size
        )
