"""Arrays that a replica has given away, and that no other one of its rank may write meanwhile.

What a replica gives to a call is read when all of its rank have come there, and what it returns
when all have returned. An array that they share, as a buffer made outside of the step, would hold
by then what the last of them has put there; on ranks of one replica each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from ..collectives.agreement.call import Call
from ..core.array_ways import Array
from ..core.exceptions import ContextError
from ..core.imported_libraries import imported_library
from ..core.indexed_slices import IndexedSlices
from .memory_of_replicas import MADE_APART

_INSTEAD = (
    "Write into a copy, or give each replica one of its own (of torch a module and an optimizer),"
    f" {MADE_APART}."
)
#: What to do where one could not be written.
ADVICE = (
    "Replicas of a rank share this array: several got it in args of strategy.run, or another one"
    " has given it to the call in which it waits, or has returned it. Or it is a part of the"
    " program's own array, of which a distributed dataset gives the rows in each epoch."
    f" {_INSTEAD}"
)
# Nobody can write into these: of thousands of replicas most give a number.
_UNWRITABLE = frozenset({float, int, bool, complex, str, bytes, type(None), np.float32, np.float64})

# Of a larger one so many elements, spread over it, show that other values are there.
_COMPARED_BYTES, _SAMPLE_ITEMS = 4096, 500


class LendingReplica(Protocol):
    """A replica of this rank."""

    replica_id: int
    status: str
    call: Call | None
    error: BaseException | None


class Look(Protocol):
    """An array or tensor as it was."""

    def is_written(self) -> bool:
        """Returns whether it has other values since."""


class _Sample(NamedTuple):
    """Elements of an array as they were."""

    array: Array
    elements: bytes

    @classmethod
    def of(cls, array: Array) -> Self:
        return cls(array, _elements_of(array))

    def is_written(self) -> bool:
        return _elements_of(self.array) != self.elements


def _elements_of(array: Array) -> bytes:
    if array.nbytes <= _COMPARED_BYTES:
        return array.tobytes()
    elements = array.reshape(-1) if array.flags.c_contiguous else array.flat
    return elements[:: array.size // _SAMPLE_ITEMS | 1].tobytes()


class LentArrays:
    """Those of the replicas of one rank: arrays of numpy refuse writes until they are given back.

    Where one can be written all the same, as a part of another one, or is a tensor of torch, it is
    looked at whether it was.
    """

    def __init__(self) -> None:
        self._owners: list[Array] = []
        self._views: list[Array] = []
        self._looks: list[tuple[LendingReplica, int, Look]] = []

    @property
    def refuse_writes(self) -> bool:
        """Whether there are any of numpy."""
        return bool(self._owners or self._views)

    def add(self, lender: LendingReplica, leaves: Sequence[Any]) -> None:
        """Takes the arrays among some leaves, which `lender` has given to its call or returned."""
        if _UNWRITABLE.issuperset(map(type, leaves)):
            return
        for position, leaf in enumerate(leaves):
            arrays = (leaf.values, leaf.indices) if type(leaf) is IndexedSlices else (leaf,)
            for array in arrays:
                if isinstance(array, np.ndarray) and (flags := array.flags).writeable:
                    if flags.owndata:
                        self._owners.append(array)  # first: Ctrl-C may come between the two
                        array.setflags(write=False)  # in a third of the time of flags.writeable
                    elif not self._has_taken(array) and array.dtype.names is None:
                        # Between fields there may be anything.
                        self._looks.append((lender, position, _Sample.of(array)))
        torch = imported_library("torch")
        if torch is not None and any([isinstance(leaf, torch.Tensor) for leaf in leaves]):
            from .torch_shared_state import TensorVersion  # torch is imported

            self._looks += [(lender, i, version) for i, version in TensorVersion.among(leaves)]

    def _has_taken(self, view: Array) -> bool:
        """Has a view refuse writes; returns whether all of its memory does."""
        base = view.base
        # Of other memory, as of C, numpy makes no array writable again.
        if type(base) is not np.ndarray or not (base.flags.owndata and base.flags.writeable):
            return False
        view.setflags(write=False)
        self._views.append(view)
        if base.nbytes != view.nbytes:  # other parts of it may be those of other replicas
            return False
        base.setflags(write=False)
        self._owners.append(base)
        return True

    def give_back(self) -> None:
        """Has all take writes again."""
        # A view can't be written before what it is a view of can.
        for arrays in (self._owners, self._views):
            for array in arrays:
                array.setflags(write=True)
            arrays.clear()

    def check(self) -> None:
        """Makes it an error of the call, or of the end, of a replica where one was written."""
        looks, self._looks = self._looks, []
        for lender, position, look in looks:
            if look.is_written():
                call, whose = lender.call, f"replica {lender.replica_id}"
                text = f"what {whose} returned was written while"
                if call is not None:
                    value = f"value{call.paths[position]} of {whose}"
                    text = f"{value} was written while it waited in {call.kind} and"
                error = ContextError(
                    f"{text} other replicas of its rank ran: one of these has the same array or"
                    f" tensor, such as the gradient of a parameter that they share. {_INSTEAD}"
                )
                if call is None:
                    lender.error, lender.status = error, "raised"
                elif call.error is None:  # the first leaf
                    call.error = error
