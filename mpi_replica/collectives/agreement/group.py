"""What a call knows of the ranks that make it, and the memory that it may use."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ...core.layout import Layout
from ...core.memory_pool import MemoryPool
from ...ranks.transport import Bytes
from .header_sizes import HeaderSizes
from .notes import Notes
from .steps import Steps

T = TypeVar("T")


class Kept(dict[type[Any], Any]):
    """What kinds of calls keep for a group, by class; made of the group when first asked for."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __missing__(self, kind: type[T]) -> T:
        made = self[kind] = cast("Callable[[Group], T]", kind)(self._group)
        return made


class Group:
    """The ranks of a strategy, as its calls see them. Thrown away when it moves to other ranks.

    Parameters
    ----------
    layout : Layout
    hosts : sequence of str
        The host of each rank.
    sizes : HeaderSizes
        Of what travels with an agreement.
    is_crowded, is_between_hosts : bool
        As those of a `Transport`.
    notes : Notes, optional
    """

    def __init__(
        self,
        layout: Layout,
        hosts: Sequence[str],
        sizes: HeaderSizes,
        *,
        is_crowded: bool = False,
        is_between_hosts: bool = False,
        notes: Notes | None = None,
    ) -> None:
        self.layout = layout
        self.hosts = tuple(hosts)
        self.sizes = sizes
        self.is_crowded = is_crowded
        self.is_between_hosts = is_between_hosts
        #: What must have been the same on all ranks since the last header.
        self.notes = notes or Notes()
        #: What kinds of calls keep here, by class.
        self.kept = Kept(self)
        #: Memory for large results.
        self.pool = MemoryPool()
        self._scratch = np.empty(0, np.uint8)
        self._reserve = np.empty(0, np.uint8)
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        #: Calls a function without warnings of numpy's about overflow or NaN: those of a reduction
        #: are no mistake of the program. A fifth of the price of ``np.errstate``.
        self.quietly: Callable[..., Any] = context.run

    def quiet(self, steps: Steps[T]) -> Steps[T]:
        """Returns the same steps, done without warnings of numpy's."""
        answer, send, quietly = None, steps.send, self.quietly
        while True:
            try:
                step = quietly(send, answer)
            except StopIteration as end:
                return cast("T", end.value)
            answer = yield step

    def scratch(self, size_bytes: int) -> Bytes:
        """Returns kept memory; valid until the next call of this method."""
        if self._scratch.size < size_bytes:
            self._scratch = np.empty(size_bytes, np.uint8)
        return self._scratch[:size_bytes]

    def lay_by_reserve(self, size_bytes: int) -> None:
        """Holds so much memory for `with_reserve`; before the ranks agree."""
        if self._reserve.size < size_bytes:
            self._reserve = np.empty(size_bytes, np.uint8)

    def with_reserve(self, allocate: Callable[[], T]) -> T:
        """Returns what `allocate` gives: memory that is needed after all ranks have agreed.

        It must not fail any more then: what was laid by is given up for it.
        """
        try:
            return allocate()
        except MemoryError:
            self._reserve = np.zeros(0, np.uint8)
            return allocate()
