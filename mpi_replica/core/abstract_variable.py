"""What a checkpoint must know of a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .abstract_strategy import AbstractStrategy
from .array_ways import Array
from .values import DistributedValues


class AbstractVariable(DistributedValues):
    """A variable, to who saves its value and puts it back."""

    __slots__ = ()

    @property
    def strategy(self) -> AbstractStrategy:
        """The strategy that it belongs to."""
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """A name that tells it from all other variables, the same on every rank."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which never changes."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which never changes."""
        raise NotImplementedError

    @property
    def is_mirrored(self) -> bool:
        """Whether it has one value, and not a component for each replica."""
        raise NotImplementedError

    def put_back(self, fill: Callable[[Array], None]) -> None:
        """Takes what `value` gave above the replicas, which `fill` writes into an array."""
        raise NotImplementedError
