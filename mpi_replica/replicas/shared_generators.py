"""Generators of random numbers that replicas of a rank get as one, in the arguments of a run."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.exceptions import ContextError
from ..core.randomness import state_of
from .shared_objects import SharedObjects


class SharedGenerators(SharedObjects):
    """Generators of numpy: what each replica draws would depend on how many draw.

    Parameters
    ----------
    paths : sequence of str
        Where each leaf is among the arguments of ``strategy.run``.
    leaves : sequence
        The generators, and anything else.
    """

    def __init__(self, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        self._leaves = [
            (path, leaf)
            for path, leaf in zip(paths, leaves, strict=True)
            if isinstance(leaf, np.random.Generator)
        ]
        super().__init__([leaf for _, leaf in self._leaves])

    def _versions_now(self) -> list[bytes]:
        # Bytes: the states of some hold arrays, which have no one truth value.
        return [pickle.dumps(state_of(generator)) for generator in self._objects]

    def _error(self, changed: Any, replica_id: int, first: int) -> ContextError:
        path = next(path for path, leaf in self._leaves if leaf is changed)
        return ContextError(
            f"replica {replica_id} has drawn from the generator in (args, kwargs){path} of"
            f" strategy.run, from which replica {first} of the same rank has drawn already: they"
            " share it, so what each draws would depend on how many replicas a rank hosts. Draw"
            " from mr.get_replica_context().rng, or give each replica one of its own, as"
            " strategy.experimental_distribute_values_from_function makes them."
        )
