"""How the contributions of all replicas to a part meet, in whatever order."""

from __future__ import annotations

import abc
from collections.abc import Iterable

import numpy as np

from ..core.options import ReduceOp
from ..core.tree import Partial, in_a_row
from .agreement.group import Group
from .agreement.steps import Reduce, Steps
from .combine import combine_of
from .extremes import from_keys, to_keys
from .parts import Part
from .scratch import Scratch
from .settlement import divide, settle


class Work:
    """What all parts of a call have in common."""

    def __init__(
        self, group: Group, op: ReduceOp, scratch: Scratch, *, is_in_place: bool = False
    ) -> None:
        self.op = op
        self.scale = group.layout.num_replicas if op is ReduceOp.MEAN else 1
        self.scratch = scratch
        #: Whether each large result is the memory of its leaf, on all ranks.
        self.is_in_place = is_in_place


class Way(abc.ABC):
    """A way in which parts are combined over the ranks."""

    def __init__(self, group: Group) -> None:
        layout = self.layout = group.layout
        self.size, self.rank = layout.size, layout.rank
        #: Combines all replicas of this rank, in whatever order.
        self.mine = in_a_row(len(layout.local_replica_ids))

    @abc.abstractmethod
    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        """Reduces parts, which are not empty."""


class Straight(Way):
    """By ``Allreduce``, from the leaf into the result where nothing is to be done to it.

    MPI wants "in place" from all ranks or from none: where one has several replicas, all combine in
    the result, or in scratch memory, and reduce that in place.

    Parameters
    ----------
    group : Group
    mine : Partial, optional
        What combines all replicas of this rank, where the result must be the same on all layouts.
    """

    def __init__(self, group: Group, mine: Partial | None = None) -> None:
        super().__init__(group)
        self._is_settled = mine is not None
        if mine is not None:
            self.mine = mine

    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        scratch, op, scale = work.scratch, work.op, work.scale
        mine, has_one_each = self.mine, self.layout.has_one_each
        is_in_place = work.is_in_place
        for part in parts:
            scratch.clear()
            dtype, send = part.dtype, None
            combine = combine_of(op, dtype)
            total = result = part.result
            if total is None:
                total = scratch.take(dtype, part.length)
            if result is None or not has_one_each:
                temporaries = [
                    scratch.take(dtype, part.length) for _ in range(mine.order.temporaries)
                ]
                part.gather(mine, combine, total, temporaries)
            elif not is_in_place:
                send = part.contribution(dtype)
                # MPI must not be given the memory of the result beside it.
                if send is None or np.may_share_memory(send, total):
                    send = scratch.take(dtype, part.length)
                    part.gather(mine, combine, send, ())
            if self.size == 1:
                if send is not None:
                    np.copyto(total, send)
            elif dtype.kind == "b":  # MIN and MAX, which MPI knows for integers only
                number = np.dtype(np.uint8)
                yield Reduce(send if send is None else send.view(number), total.view(number), op)
            else:
                yield Reduce(send, total, op)
            if self._is_settled:
                settle(total, scale, scratch)
            elif scale != 1:
                divide(total, scale)
            part.deliver(total if result is None else None)


class Keyed(Way):
    """MIN and MAX of floats, by ``Allreduce`` of integers in their place."""

    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        scratch, op, mine = work.scratch, work.op, self.mine
        for part in parts:
            scratch.clear()
            total = part.result
            if total is None:
                total = scratch.take(part.dtype, part.length)
            part.gather(mine, combine_of(op, part.dtype), total, ())
            if self.size == 1:  # which NaN it is must not depend on the layout
                settle(total, 1, scratch)
            else:
                key = np.dtype(f"i{total.dtype.itemsize}")
                keys, spare = scratch.take(key, total.size), scratch.take(key, total.size)
                is_nan = scratch.take(np.dtype(np.bool_), total.size)
                to_keys(op, total, keys, spare, is_nan)
                yield Reduce(None, keys, op)
                from_keys(op, keys, total, spare, is_nan)
            part.deliver(total if part.result is None else None)
