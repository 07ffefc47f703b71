"""The ranks of a strategy in one process, without MPI: what their calls want of each other.

A call does no I/O: here those of all ranks are done in turn, step by step. Each step of a rank must
meet one of the same kind on all others, with what must agree about it.
"""

import contextlib
import itertools
from types import GeneratorType

import numpy as np

from mpi_replica.collectives.agreement.group import Group
from mpi_replica.collectives.agreement.header import AGREES, head
from mpi_replica.collectives.agreement.header_sizes import HeaderSizes
from mpi_replica.collectives.agreement.steps import (
    Agree,
    AllToAll,
    Barrier,
    Bcast,
    Gather,
    OpenWindow,
    PassOn,
    Raise,
    Reduce,
    Texts,
)
from mpi_replica.core.layout import Layout
from mpi_replica.core.ufuncs import UFUNCS
from mpi_replica.ranks import HEADER_BYTES, SharedMemoryError
from mpi_replica.ranks.transport import LARGER_HEADER_BYTES


class Failed(Exception):
    """An error on a rank, and where it came up.

    "told": before a header, so all ranks raise it. "over": between two steps, which ends the
    strategy. "own": where the rank has all that it needs of the others.
    """

    def __init__(self, where, rank, error):
        super().__init__(f"{where}: rank {rank}: {error!r}")
        self.where, self.rank, self.error = where, rank, error


class World:
    """The ranks, each with its `Group`.

    Parameters
    ----------
    counts : tuple of int
        How many replicas each rank hosts.
    has_shared_memory, carries_payload : bool
    **about
        For each `Group`.
    """

    def __init__(self, counts, *, has_shared_memory=True, carries_payload=True, **about):
        self.layouts = [Layout(counts, rank) for rank in range(len(counts))]
        self.ranks = range(len(counts))
        self.has_shared_memory = has_shared_memory
        self.groups = []
        for layout in self.layouts:
            memory = {
                size: np.zeros(len(counts) * size, np.uint8)
                for size in (HEADER_BYTES, *LARGER_HEADER_BYTES)
            }
            sizes = HeaderSizes(memory, carries_payload=carries_payload)
            self.groups.append(Group(layout, ["here"] * len(counts), sizes, **about))
        #: The rank whose code runs now, and what becomes of an error there.
        self.running = None
        self.where = "told"
        #: The kinds of steps that were done.
        self.done = []
        #: What the code of a rank runs in.
        self.around = contextlib.nullcontext

    def perform(self, make):
        """Perform the calls that ``make(layout)`` gives on each rank; return their answers.

        A list of calls is one of each local replica; a call alone is one of the rank.
        """
        calls = self._each("told", lambda rank: self._made(make, rank))
        told = self._each("told", lambda r: calls[r][0].prepare(self.groups[r], calls[r]))
        has_header = {one is not None for one in told}
        assert len(has_header) == 1
        payloads, prepared = zip(*told, strict=True) if has_header == {True} else (None, told)
        if payloads is not None:
            self._agree(calls, payloads)
        results = self._each(
            "over", lambda r: calls[r][0].steps(self.groups[r], calls[r], prepared[r])
        )
        generators = [isinstance(one, GeneratorType) for one in results]
        if any(generators):
            assert all(generators)
            results = self._do(calls, results)
        return self._each("own", lambda rank: calls[rank][0].answer(calls[rank], results[rank]))

    def _made(self, make, rank):
        calls = make(self.layouts[rank])
        if not isinstance(calls, list):
            calls.replica_ids = self.layouts[rank].local_replica_ids
            return [calls]
        assert len({call.fingerprint for call in calls}) == 1
        return calls

    def _each(self, where, do):
        """Return what `do` gives on each rank; an error comes up when all ranks were there."""
        found, failed = {}, []
        ranks = self.ranks if len(self.done) % 2 else self.ranks[::-1]  # the order is nobody's
        for rank in ranks:
            self.running, self.where = rank, where
            try:
                with self.around():
                    found[rank] = do(rank)
            except Exception as error:
                failed.append(Failed(where, rank, error))
            finally:
                self.running = None
        if failed:
            raise failed[0] from failed[0].error
        return [found[rank] for rank in self.ranks]

    def _agree(self, calls, payloads, *, is_begun=False):
        """Put the headers of all ranks where all of them see them."""
        notes = [group.notes for group in self.groups]
        if len({note.chain for note in notes}) > 1:
            for note in notes:
                note.undo([one.all for one in notes])
                note.drop()
            raise Failed("told", 0, ValueError("the notes differ"))
        (size,) = {group.sizes.next_bytes for group in self.groups}
        headers = bytearray(b"\xff" * len(self.groups) * size)  # more is undefined
        for rank, (mine, payload) in enumerate(zip(calls, payloads, strict=True)):
            assert mine[0].fingerprint == calls[0][0].fingerprint, "at other calls"
            whole = (
                head(mine[0].fingerprint, notes[rank].chain, AGREES, False, len(payload)) + payload
            )
            assert len(whole) <= size
            headers[rank * size : rank * size + len(whole)] = whole
        for group in self.groups:
            group.sizes.memory[size][:] = np.frombuffer(headers, np.uint8)
            if is_begun:
                group.sizes.agree_again()
            else:
                group.sizes.agree(calls[0][0].fingerprint)
            group.notes.drop()

    def _do(self, calls, generators):
        """Do all steps, and return the results."""
        ends = {}

        def next_step(rank):
            try:
                return generators[rank].send(answers[rank])
            except StopIteration as end:
                ends[rank] = end.value
                return None

        answers = [None] * len(generators)
        try:
            while True:
                steps = self._each("over", next_step)
                (kind,) = {type(step) for step in steps}  # all ranks want the same
                self.done.append(kind)
                if kind is type(None):
                    return [ends[rank] for rank in self.ranks]
                if kind is Agree:
                    answers = self._prepare(calls, steps)
                elif kind is Raise:
                    assert len({repr(step.error) for step in steps}) == 1
                    raise steps[0].error
                else:
                    answers = _EXCHANGES[kind](self, steps)
        finally:
            for generator in generators:
                generator.close()

    def _prepare(self, calls, steps):
        try:
            told = self._each("told", lambda rank: steps[rank].prepare())
        except Failed:
            for step in steps:
                if step.undo is not None:
                    step.undo()
            raise
        payloads, answers = zip(*told, strict=True)
        self._agree(calls, payloads, is_begun=True)
        return answers

    def _gather(self, steps):
        (counts,) = {tuple(step.rank_bytes) for step in steps}
        (is_in_place,) = {step.send is None for step in steps}
        ends = list(itertools.accumulate(counts))
        blocks = []
        for step, count, end in zip(steps, counts, ends, strict=True):
            block = step.receive[end - count : end] if is_in_place else step.send
            assert block.nbytes == count
            blocks.append(block.tobytes())
        for step in steps:
            assert step.receive.nbytes == ends[-1]
            step.receive[:] = np.frombuffer(b"".join(blocks), np.uint8)
        return [None] * len(steps)

    def _bcast(self, steps):
        ((root, _),) = {(step.root, step.data.nbytes) for step in steps}
        for rank, step in enumerate(steps):
            if rank != root:
                step.data[:] = steps[root].data
        return [None] * len(steps)

    def _reduce(self, steps):
        ((op, _, size),) = {(step.op, step.total.dtype, step.total.size) for step in steps}
        (is_in_place,) = {step.send is None for step in steps}
        given = [(step.total if is_in_place else step.send).reshape(-1) for step in steps]
        assert {(one.dtype, one.size) for one in given} == {(steps[0].total.dtype, size)}
        total = given[0].copy()
        with np.errstate(all="ignore"):
            for one in given[1:]:
                UFUNCS[op](total, one, out=total)
        for step in steps:
            np.copyto(step.total, total.reshape(step.total.shape))
        return [None] * len(steps)

    def _all_to_all(self, steps):
        blocks = []
        for step in steps:
            assert step.send.nbytes == sum(step.send_bytes)
            ends = itertools.accumulate(step.send_bytes)
            pairs = zip(ends, step.send_bytes, strict=True)
            blocks.append([step.send[end - count : end].tobytes() for end, count in pairs])
        for rank, step in enumerate(steps):
            mine = [of_rank[rank] for of_rank in blocks]
            assert list(map(len, mine)) == list(step.receive_bytes)
            step.receive[:] = np.frombuffer(b"".join(mine), np.uint8)
        return [None] * len(steps)

    def _barrier(self, steps):
        return [None] * len(steps)

    def _texts(self, steps):
        return [[one.data for one in steps]] * len(steps)

    def _pass_on(self, steps):
        answers = [{} for _ in steps]
        for rank, step in enumerate(steps):
            for to, data in step.messages.items():
                answers[to][rank] = data
        for step, came in zip(steps, answers, strict=True):
            assert {rank: len(data) for rank, data in came.items()} == dict(step.sizes)
        return answers

    def _window(self, steps):
        (size,) = {step.size_bytes for step in steps}
        window = np.zeros(size, np.uint8)
        if not self.has_shared_memory:
            window = SharedMemoryError("there is none here")
        return [window] * len(steps)


_EXCHANGES = {
    Gather: World._gather,
    Bcast: World._bcast,
    Reduce: World._reduce,
    AllToAll: World._all_to_all,
    Barrier: World._barrier,
    Texts: World._texts,
    PassOn: World._pass_on,
    OpenWindow: World._window,
}
