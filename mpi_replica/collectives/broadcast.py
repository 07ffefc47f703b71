"""One replica's value for all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import nest
from ..core.dtypes import common, wire_name
from ..core.options import CommunicationOptions
from ..ranks import Bytes
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite
from .agreement.stand import LeafDescription
from .agreement.steps import Agree, Bcast, Steps
from .blobs import (
    LARGE_BYTES,
    all_blobs,
    behind_sizes,
    marks,
    payload_of,
    pickled,
    sizes_before,
    unpickled,
)

# What rank 0 tells of its blob: whether it runs code where it is loaded, and whether memory of
# arrays travels beside it.
_RUNS_CODE, _HAS_BESIDE = 1, 2

_PLAIN_TYPES = (int, float, complex, bool, str, bytes, type(None))


class Broadcast(Call):
    """A value of replica 0, given to all replicas.

    Parameters
    ----------
    compared : bool
        Whether the dtype and shape of the value must be the same on all ranks, although only
        those of replica 0 count.
    others : sequence, optional
        What the other replicas of this rank give, which are compared, too.
    finish : callable, optional
        What is done with the value, once on each rank; it gives the result of the call.
    writing : Writing, optional
        What writes the value, once on each rank.
    """

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        detail: str,
        value: Any,
        *,
        compared: bool,
        others: Sequence[Any] = (),
        finish: Callable[[Any], Any] | None = None,
        writing: Writing | None = None,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.detail = detail
        self.value = value
        self.finish = finish
        self.writing = writing
        self._leaves = [LeafDescription("any value")]
        if compared:
            arrays = map(np.asarray, [value, *others])
            self._leaves = [LeafDescription(wire_name(one.dtype), one.shape) for one in arrays]
            self.agrees = len(set(self._leaves)) == 1
        self.identify((detail, self._leaves[0]))

    @property
    def lent(self) -> Sequence[Any]:
        return (self.value,)

    def leaves_in_words(self, position: int) -> tuple[LeafDescription, ...]:
        return (self._leaves[min(position, len(self._leaves) - 1)],)

    def prepare(self, group: Group, calls: Sequence[Call]) -> tuple[bytes, _Pickled]:
        blob, beside, mark = b"", list[Bytes](), 0
        if group.layout.rank == group.layout.rank_of(0):
            nest.flatten(self.value)  # an error where it contains itself
            mark = 0 if _is_plain(self.value) else _RUNS_CODE
            if mark or group.layout.size > 1:
                blob = pickled(self.kind, self.value, "rank 0", beside)
            if beside:
                blob, mark = behind_sizes(blob, beside), mark | _HAS_BESIDE
        if self.writing is not None:
            self.writing.prepare()
        return payload_of(group, blob, mark), _Pickled(blob, beside)

    def steps(self, group: Group, calls: Sequence[Call], prepared: _Pickled) -> Steps[Any]:
        root = group.layout.rank_of(0)
        is_root = group.layout.rank == root
        mark = marks(group.sizes.payloads())[root]
        runs_code = bool(mark & _RUNS_CODE)
        blob = (yield from all_blobs(group, prepared.blob))[root]
        beside = prepared.beside
        if mark & _HAS_BESIDE:
            sizes, blob = sizes_before(blob)
            beside = yield Agree(lambda: (b"", beside or [np.empty(n, np.uint8) for n in sizes]))
            for data in beside:
                yield Bcast(data, root)
        writing = self.writing

        def load() -> Any:
            # Of an object what pickle makes of it, also where it comes from.
            if is_root and not runs_code:
                return self.value
            memory = [data.copy() for data in beside] if is_root else beside
            return unpickled(blob, memory)

        if runs_code or len(blob) > LARGE_BYTES:
            value = yield Agree(lambda: (b"", load()))
        else:
            value = group.with_reserve(load)
        if writing is not None:
            if writing.may_fail:

                def compute() -> tuple[bytes, None]:
                    writing.compute(value)
                    return b"", None

                yield Agree(compute)
            else:
                writing.compute(value)
            writing.commit()
        return value

    def answer(self, calls: Sequence[Call], results: Any) -> list[Any]:
        return [results if self.finish is None else self.finish(results)] * len(calls)


class Writing:
    """An assignment: what can fail comes first, and then what is seen."""

    #: Whether `compute` may fail, so that the ranks must agree that it did not.
    may_fail: bool

    def prepare(self) -> None:
        """Takes the memory that `compute` needs, where it can be told."""
        raise NotImplementedError

    def compute(self, value: Any) -> None:
        """Works out what is to be there."""
        raise NotImplementedError

    def commit(self) -> None:
        """Puts it there."""
        raise NotImplementedError


class _Pickled(NamedTuple):
    """A value on its way: empty where it does not come from."""

    blob: bytes
    #: The memory of its large arrays.
    beside: list[Bytes]


def _is_plain(value: Any) -> bool:
    """Returns whether all in `value` is loaded as it is, and runs no code of its own for that."""
    left = [value]
    while left:
        value = left.pop()
        kind = type(value)
        if kind in (list, tuple, dict, OrderedDict):
            left += value
            left += value.values() if isinstance(value, dict) else ()
        elif kind is np.ndarray or isinstance(value, np.generic):
            if kind not in (np.ndarray, value.dtype.type) or not _is_of_numpy(value.dtype):
                return False
            if not (value.flags.forc or value.dtype.isnative):  # numpy turns its bytes round
                return False
        elif kind not in _PLAIN_TYPES:
            return False
    return True


def _is_of_numpy(dtype: np.dtype[Any]) -> bool:
    """Returns whether pickle makes `dtype` out of itself, and numbers or texts out of its items.

    A program may have scalars of its own, and a longlong comes back as an int64.
    """
    kind = dtype.type
    is_known = kind.__module__ in ("numpy", "ml_dtypes") and kind is common(dtype).type
    return is_known and not dtype.hasobject
