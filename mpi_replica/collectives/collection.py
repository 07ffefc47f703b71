"""Moving the blocks of all replicas to every rank.

Rows of a result that are long are gathered in their place. Short ones, along another axis than the
first, come in batches that stay in the cache, and find their places from there. Small leaves share
a message. So no result is ever held a second time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.array_ways import Array
from ..core.dtypes import is_text
from ..core.gpu_tensors import Lend
from ..core.layout import Layout
from .agreement.group import Group
from .agreement.steps import Gather, Steps
from .blocks import Blocks, Gathering, SharedMessage


class OneRow:
    """The movement of one leaf along its first axis, of each rank's only replica.

    It is what `Collection` does, without what several leaves, rows and replicas need.
    """

    def __init__(self, gathering: Gathering, leaf: Array, lend: Lend) -> None:
        self.results = gathering.allocation.make(lend)
        self._rank_bytes = gathering.leaves[0].rank_row_bytes
        self._leaf = leaf

    def steps(self) -> Steps[list[Array]]:
        """Moves everything, and returns the results."""
        yield Gather(_as_bytes(self._leaf), _as_bytes(self.results[0]), self._rank_bytes)
        return self.results


def collection(
    group: Group, gathering: Gathering, contributions: Sequence[Sequence[Array]], lend: Lend
) -> OneRow | Collection:
    """Returns what moves the C-contiguous leaves of each local replica; results are `lend`'s."""
    if gathering.is_one_row and gathering.result_bytes and group.layout.has_one_each:
        return OneRow(gathering, contributions[0][0], lend)
    return Collection(group, gathering, contributions, lend)


class Collection:
    """The movement of one call's data; all that it needs is allocated when it is made.

    Parameters
    ----------
    contributions : sequence of sequence of array
        The C-contiguous leaves of each local replica.

    Attributes
    ----------
    results : list of array
    """

    def __init__(
        self,
        group: Group,
        gathering: Gathering,
        contributions: Sequence[Sequence[Array]],
        lend: Lend,
    ) -> None:
        self._layout = group.layout
        self._gathering = gathering
        #: Of each leaf, what the local replicas have.
        self._columns = []
        for index, blocks in enumerate(gathering.leaves):
            column = [leaves[index] for leaves in contributions]
            if is_text(blocks.dtype):
                column = [leaf.astype(blocks.dtype, copy=False) for leaf in column]
            self._columns.append(column)
        self.results = gathering.allocation.make(lend)
        self._scratch = group.scratch(gathering.scratch_bytes)

    def steps(self) -> Steps[list[Array]]:
        """Moves everything, and returns the results."""
        leaves, layout = self._gathering.leaves, self._layout
        for message in self._gathering.shared:
            yield from self._gather_shared(message)
        for index in self._gathering.alone:
            blocks, column = leaves[index], self._columns[index]
            if not blocks.result_bytes:
                continue  # as on all ranks
            table = blocks.table(self.results[index])
            if blocks.batch_bytes:
                yield from self._gather_in_batches(blocks, table, column)
            else:
                parts = [leaf.reshape(blocks.rows, -1) for leaf in column]
                for row in range(blocks.rows):
                    mine = [_as_bytes(part[row]) for part in parts]
                    target = _as_bytes(table[row])
                    yield gathered(layout, mine, target, blocks.rank_row_bytes)

        return self.results

    def _gather_shared(self, message: SharedMessage) -> Steps[None]:
        size = message.rank_bytes[self._layout.rank]
        mine, every = self._scratch[:size], self._scratch[size : size + message.size_bytes]
        columns = [self._columns[index] for index in message.leaves]
        np.concatenate([_as_bytes(leaf) for column in columns for leaf in column], out=mine)
        yield Gather(mine, every, message.rank_bytes)
        leaves = [self._gathering.leaves[index] for index in message.leaves]
        tables = [leaves[at].table(self.results[index]) for at, index in enumerate(message.leaves)]
        first = 0
        for start, count in zip(message.starts, self._layout.counts, strict=True):
            rest = every[start:]
            for leaf, table in zip(leaves, tables, strict=True):
                for replica in range(first, first + count):
                    rest = leaf.place(table, replica, rest)
            first += count

    def _gather_in_batches(
        self, blocks: Blocks, table: Array, column: Sequence[Array]
    ) -> Steps[None]:
        parts = [leaf.reshape(blocks.rows, -1) for leaf in column]
        most = blocks.batch_rows
        for start in range(0, blocks.rows, most):
            rows = slice(start, min(start + most, blocks.rows))
            count = rows.stop - rows.start
            every = self._scratch[: count * blocks.row_bytes]
            mine = [_as_bytes(part[rows]) for part in parts]
            rank_bytes = [count * size for size in blocks.rank_row_bytes]
            yield gathered(self._layout, mine, every, rank_bytes)
            rest = every
            for replica in range(len(blocks.lengths)):
                rest = blocks.place(table[rows], replica, rest)


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def gathered(
    layout: Layout, parts: Sequence[Array], receive: Array, rank_bytes: Sequence[int]
) -> Gather:
    """Returns the step that fills `receive` with the blocks of all ranks.

    This rank's block is made of `parts`.
    """
    if layout.has_one_each:
        return Gather(parts[0], receive, rank_bytes)
    start = sum(rank_bytes[: layout.rank])
    np.concatenate(parts, out=receive[start : start + rank_bytes[layout.rank]])
    return Gather(None, receive, rank_bytes)
