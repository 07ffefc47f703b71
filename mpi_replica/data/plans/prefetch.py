"""The plan that reads ahead of who iterates it."""

# ruff: noqa: D102 - what a plan overrides is documented in DatasetPlan.

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ..read_ahead import read_ahead
from .dataset_plan import DatasetPlan, Positions, SliceRows, Verb

__all__ = ["Prefetch"]


class Prefetch(Verb):
    """The elements of the source; iterating them reads ahead in a thread."""

    def __init__(self, source: DatasetPlan, buffer_size: int) -> None:
        super().__init__(source, f"prefetch({buffer_size})")
        self._buffer_size = buffer_size

    def iterate(
        self, epoch: int, cut: SliceRows | None, start: int = 0
    ) -> Iterator[tuple[int, Any]]:
        make = functools.partial(self._source.iterate, epoch, cut, start)
        return read_ahead(make, self._buffer_size)

    def element(self, position: int, epoch: int, cut: SliceRows | None) -> tuple[int, Any]:
        return self._source.element(position, epoch, cut)

    def elements(self, positions: Positions, epoch: int) -> list[Any]:
        return self._source.elements(positions, epoch)

    def read(self, positions: Positions, epoch: int) -> Any:
        return self._source.read(positions, epoch)

    def place(self, position: int, epoch: int) -> str:
        return self._source.place(position, epoch)
