"""Arrays that a replica has given away, and that no other one of its rank may write meanwhile.

What a replica gives to a call is read when all of its rank have come there, and what it returns
when all have returned. An array that they share, as a buffer made outside of the step, would hold
by then what the last of them has put there; on ranks of one replica each has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..collectives.agreement.call import Call
from ..core.array_ways import Array
from ..core.exceptions import ContextError
from ..core.imported_libraries import imported_library
from ..core.indexed_slices import IndexedSlices
from .memory_of_replicas import MADE_APART

if TYPE_CHECKING:
    from .torch_shared_state import TensorVersion

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

# Of an array that nothing refers to but a container of the program, the leaves of its call and who
# counts. One that can be written through something else, as a view that was made before, has more:
# this one holds it.
_FEWEST_REFERENCES = 3

# Of a larger one so many elements, spread over it, show that other values are there: they take as
# long as a copy of this one.
_COMPARED_BYTES, _SAMPLE_ITEMS = 32_768, 500


class LendingReplica(Protocol):
    """A replica of this rank."""

    replica_id: int
    status: str
    call: Call | None
    error: BaseException | None


def _with_its_bytes(array: Array) -> Array:
    """Returns an array of the same memory of which the elements are all that is there."""
    if type(array) is not np.ndarray:
        array = array.view(np.ndarray)
    if array.dtype.names is not None and not array.dtype.hasobject:
        # Between fields there may be anything in what is copied by its fields.
        array = array.view(f"V{array.itemsize}")
    return array


def _elements_of(array: Array) -> bytes:
    """Returns elements of an array as they are: all, or some of a large one."""
    if array.nbytes <= _COMPARED_BYTES:
        return array.tobytes()
    elements = array.reshape(-1) if array.flags.c_contiguous else array.flat
    return elements[:: array.size // _SAMPLE_ITEMS | 1].tobytes()


class LentArrays:
    """Those of the replicas of one rank: arrays of numpy refuse writes until they are given back.

    Where one can be written all the same, as a part of another one or through a view that was made
    before, or is a tensor of torch, it is looked at whether it was.
    """

    def __init__(self) -> None:
        self._owners: list[Array] = []
        self._views: list[Array] = []
        #: With the elements that each had, or how it was.
        self._samples: list[tuple[LendingReplica, int, Array, bytes]] = []
        self._tensors: list[tuple[LendingReplica, int, TensorVersion]] = []

    @property
    def refuse_writes(self) -> bool:
        """Whether there are any of numpy."""
        return bool(self._owners or self._views)

    def add(self, lender: LendingReplica, leaves: Sequence[Any]) -> None:
        """Takes the arrays among some leaves, which `lender` has given to its call or returned."""
        if _UNWRITABLE.issuperset(map(type, leaves)):
            return
        counts = [*map(sys.getrefcount, leaves)]  # before anything here refers to one
        for position, (leaf, references) in enumerate(zip(leaves, counts, strict=True)):
            is_slices = type(leaf) is IndexedSlices
            for array in (leaf.values, leaf.indices) if is_slices else (leaf,):
                if isinstance(array, np.ndarray):
                    flags = array.flags
                    if flags.writeable and not flags.owndata:
                        self._lock_view(array)
                    elif flags.writeable:
                        self._owners.append(array)  # first: Ctrl-C may come between the two
                        array.setflags(write=False)  # in a third of the time of flags.writeable
                    if is_slices or references > _FEWEST_REFERENCES or not flags.owndata:
                        array = _with_its_bytes(array)
                        self._samples.append((lender, position, array, _elements_of(array)))
        torch = imported_library("torch")
        if torch is not None and any([isinstance(leaf, torch.Tensor) for leaf in leaves]):
            from .torch_shared_state import TensorVersion  # torch is imported

            self._tensors += [(lender, i, version) for i, version in TensorVersion.among(leaves)]

    def _lock_view(self, view: Array) -> None:
        """Has a view refuse writes, and the array that it is a view of where that is all of it."""
        base = view.base
        # Of other memory, as of C, numpy makes no array writable again.
        if type(base) is np.ndarray and base.flags.owndata and base.flags.writeable:
            view.setflags(write=False)
            self._views.append(view)
            if base.nbytes == view.nbytes:  # other parts of it may be those of other replicas
                base.setflags(write=False)
                self._owners.append(base)

    def give_back(self) -> None:
        """Has all take writes again."""
        # A view can't be written before what it is a view of can.
        for arrays in (self._owners, self._views):
            for array in arrays:
                array.setflags(write=True)
            arrays.clear()

    def check(self) -> None:
        """Makes it an error of the call, or of the end, of a replica where one was written."""
        samples, self._samples = self._samples, []
        tensors, self._tensors = self._tensors, []
        written = [(who, i) for who, i, array, was in samples if _elements_of(array) != was]
        written += [(who, i) for who, i, tensor in tensors if tensor.is_written()]
        for lender, position in written:
            call, whose = lender.call, f"replica {lender.replica_id}"
            text = f"what {whose} returned was written while"
            if call is not None:
                value = f"value{call.paths[position]} of {whose}"
                text = f"{value} was written while it waited in {call.kind} and"
            error = ContextError(
                f"{text} other replicas of its rank ran: one of these has the same array or"
                " tensor, or a view of it, such as the gradient of a parameter that they share."
                f" {_INSTEAD}"
            )
            if call is None:
                lender.error, lender.status = error, "raised"
            elif call.error is None:  # the first leaf
                call.error = error
