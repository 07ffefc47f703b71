"""Moving the blocks of all replicas to every rank.

Rows of a result that are long are gathered in their place. Short ones, along another axis than the
first, come in batches that stay in the cache, and find their places from there. Small leaves share
a message. So no result is ever held a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .blocks import Blocks, Gathering
from .engine import Engine

__all__ = ["Collection", "gather_bytes", "place_all"]

Array = np.ndarray[Any, Any]

#: Longer rows go straight to their place.
_LONG_ROW_BYTES = 1 << 18
#: Bytes of a batch of short rows.
_BATCH_BYTES = 1 << 20


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
        engine: Engine,
        gathering: Gathering,
        contributions: Sequence[Sequence[Array]],
    ) -> None:
        self._engine = engine
        self._gathering = gathering
        #: Of each leaf, what the local replicas have.
        self._columns = [
            [leaf.astype(blocks.dtype, copy=False) for leaf in column]
            for blocks, column in zip(
                gathering.leaves, zip(*contributions, strict=True), strict=True
            )
        ]
        self.results = gathering.allocation.make()
        # For a pack: what this rank sends, and what all have sent.
        rank = engine.layout.rank
        packs = [self._rank_bytes(pack) for pack in gathering.packs]
        needs = [sizes[rank] + sum(sizes) for sizes in packs]
        large = [gathering.leaves[index] for index in gathering.large]
        needs += [_batch_rows(leaf) * leaf.row_bytes for leaf in large]
        self._scratch = engine.scratch(max(needs, default=0))

    def run(self, timeout_seconds: float | None) -> None:
        """Move everything; called where all ranks have agreed to."""
        leaves = self._gathering.leaves
        for pack in self._gathering.packs:
            self._gather_pack(pack, timeout_seconds)
        for index in self._gathering.large:
            blocks, table = leaves[index], leaves[index].table(self.results[index])
            parts = [leaf.reshape(blocks.rows, -1) for leaf in self._columns[index]]
            if blocks.rows == 1 or blocks.row_bytes >= _LONG_ROW_BYTES:
                for row in range(blocks.rows):
                    mine_of_row = [_as_bytes(part[row]) for part in parts]
                    self._gather(
                        mine_of_row, _as_bytes(table[row]), blocks.rank_row_bytes, timeout_seconds
                    )
            else:
                self._gather_in_batches(blocks, table, parts, timeout_seconds)

    def _rank_bytes(self, pack: Sequence[int]) -> list[int]:
        leaves = [self._gathering.leaves[index] for index in pack]
        columns = [[leaf.rows * size for size in leaf.rank_row_bytes] for leaf in leaves]
        return [sum(of_rank) for of_rank in zip(*columns, strict=True)]

    def _gather_pack(self, pack: Sequence[int], timeout_seconds: float | None) -> None:
        rank_bytes = self._rank_bytes(pack)
        size = rank_bytes[self._engine.layout.rank]
        mine, every = self._scratch[:size], self._scratch[size : size + sum(rank_bytes)]
        np.concatenate([_as_bytes(leaf) for i in pack for leaf in self._columns[i]], out=mine)
        gather = self._engine.transport.all_gather_blocks
        self._engine.carry(gather, mine, every, rank_bytes, timeout_seconds)
        leaves = [self._gathering.leaves[index] for index in pack]
        results = [self.results[index] for index in pack]
        parts = np.split(every, np.cumsum(rank_bytes)[:-1])
        place_all(leaves, results, parts, self._engine.layout.counts)

    def _gather_in_batches(
        self,
        blocks: Blocks,
        table: Array,
        parts: Sequence[Array],
        timeout_seconds: float | None,
    ) -> None:
        most = _batch_rows(blocks)
        for start in range(0, blocks.rows, most):
            rows = slice(start, min(start + most, blocks.rows))
            count = rows.stop - rows.start
            every = self._scratch[: count * blocks.row_bytes]
            mine = [_as_bytes(part[rows]) for part in parts]
            rank_bytes = [count * size for size in blocks.rank_row_bytes]
            self._gather(mine, every, rank_bytes, timeout_seconds)
            rest = every
            for replica in range(len(blocks.lengths)):
                rest = blocks.place(table[rows], replica, rest)

    def _gather(
        self,
        parts: Sequence[Array],
        receive: Array,
        rank_bytes: Sequence[int],
        timeout_seconds: float | None,
    ) -> None:
        gather_bytes(self._engine, parts, receive, rank_bytes, timeout_seconds)


def _batch_rows(blocks: Blocks) -> int:
    """Return how many rows a batch has; none where rows go straight to their place."""
    if blocks.rows == 1 or blocks.row_bytes >= _LONG_ROW_BYTES:
        return 0
    return max(1, _BATCH_BYTES // max(1, blocks.row_bytes))


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def place_all(
    leaves: Sequence[Blocks],
    results: Sequence[Array],
    parts: Sequence[Array],
    counts: Sequence[int],
    *,
    is_raw: bool = False,
) -> None:
    """Put what each rank sent into the results: for each leaf, the block of each of its replicas.

    `parts` are the bytes of each rank. `is_raw`: strings have the replicas' own item sizes.
    """
    tables = [leaf.table(result) for leaf, result in zip(leaves, results, strict=True)]
    first = 0
    for part, count in zip(parts, counts, strict=True):
        rest = part
        for leaf, table in zip(leaves, tables, strict=True):
            for replica in range(first, first + count):
                rest = leaf.place(table, replica, rest, is_raw=is_raw)
        first += count


def gather_bytes(
    engine: Engine,
    parts: Sequence[Array],
    receive: Array,
    rank_bytes: Sequence[int],
    timeout_seconds: float | None,
) -> None:
    """Fill `receive` with the blocks of all ranks; this rank's block is made of `parts`."""
    layout, gather = engine.layout, engine.transport.all_gather_blocks
    if layout.has_one_each:
        engine.carry(gather, parts[0], receive, rank_bytes, timeout_seconds)
        return
    start = sum(rank_bytes[: layout.rank])
    np.concatenate(parts, out=receive[start : start + rank_bytes[layout.rank]])
    engine.carry(gather, None, receive, rank_bytes, timeout_seconds)
