"""Arrays that a replica has given away, and that no other one of its rank may write meanwhile.

What a replica gives to a call is read when all of its rank have come there, and what it returns
when all have returned. An array that they share, as a buffer made outside of the step, would hold
by then what the last of them has put there; on ranks of one replica each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..collectives.agreement.call import Call
from ..core.array_ways import Array
from ..core.exceptions import ContextError
from ..core.indexed_slices import IndexedSlices

_INSTEAD = (
    "Write into a copy, or give each replica an array of its own, as"
    " strategy.experimental_distribute_values_from_function makes them."
)
#: What to do where one could not be written.
ADVICE = (
    "Replicas of a rank share this array: several got it in args of strategy.run, or another one"
    " has given it to the call in which it waits, or has returned it."
    f" {_INSTEAD}"
)
# Of a larger array so many elements, spread over it, show that other values are there.
_COMPARED_BYTES, _SAMPLE_ITEMS = 4096, 500


class LendingReplica(Protocol):
    """A replica of this rank."""

    replica_id: int
    status: str
    call: Call | None
    error: BaseException | None


class _Part(NamedTuple):
    """An array that is a part of another one, which has parts of other replicas perhaps."""

    lender: LendingReplica
    position: int
    array: Array
    sample: bytes


def _sample_of(array: Array) -> bytes:
    if array.nbytes <= _COMPARED_BYTES:
        return array.tobytes()
    elements = array.reshape(-1) if array.flags.c_contiguous else array.flat
    return elements[:: array.size // _SAMPLE_ITEMS | 1].tobytes()


class LentArrays:
    """Those of the replicas of one rank. They refuse writes until they are given back.

    Of one that is a part of another array, that can be written through this, it is looked at
    whether it was.
    """

    def __init__(self) -> None:
        self._owners: list[Array] = []
        self._views: list[Array] = []
        self._parts: list[_Part] = []

    def __bool__(self) -> bool:
        return bool(self._owners or self._views)

    def add(self, lender: LendingReplica, leaves: Sequence[Any]) -> None:
        """Takes the arrays among some leaves, which `lender` has given to its call or returned."""
        for position, leaf in enumerate(leaves):
            arrays = (leaf.values, leaf.indices) if type(leaf) is IndexedSlices else (leaf,)
            for array in arrays:
                if type(array) is np.ndarray and (flags := array.flags).writeable:
                    if flags.owndata:
                        array.setflags(write=False)  # in a third of the time of flags.writeable
                        self._owners.append(array)
                    else:
                        self._add_view(lender, position, array)

    def _add_view(self, lender: LendingReplica, position: int, view: Array) -> None:
        base = view.base
        # Of other memory, as of C, numpy makes no array writable again.
        if type(base) is not np.ndarray or not (base.flags.owndata and base.flags.writeable):
            return
        view.setflags(write=False)
        self._views.append(view)
        if base.nbytes == view.nbytes:
            base.setflags(write=False)
            self._owners.append(base)
        elif view.dtype.names is None:  # between fields there may be anything
            self._parts.append(_Part(lender, position, view, _sample_of(view)))

    def give_back(self) -> None:
        """Has all take writes again."""
        # A view can't be written before what it is a view of can.
        for arrays in (self._owners, self._views):
            for array in arrays:
                array.setflags(write=True)
            arrays.clear()

    def check(self) -> None:
        """Makes it an error of the call, or of the end, of a replica where a part was written."""
        parts, self._parts = self._parts, []
        for part in parts:
            if _sample_of(part.array) != part.sample:
                lender, call = part.lender, part.lender.call
                whose = f"replica {lender.replica_id}"
                text = f"what {whose} returned was written while"
                if call is not None:
                    value = f"value{call.paths[part.position]} of {whose}"
                    text = f"{value} was written while it waited in {call.kind} and"
                error = ContextError(
                    f"{text} other replicas of its rank ran: one of these has the same memory."
                    f" {_INSTEAD}"
                )
                if call is not None:
                    call.error = error
                else:
                    lender.error, lender.status = error, "raised"
