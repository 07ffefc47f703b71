"""Generators of random numbers that replicas of a rank get as one, in the arguments of a run."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.exceptions import ContextError
from ..core.imported_libraries import imported_library
from ..core.randomness import state_of
from .shared_objects import SharedObjects


def _state(generator: Any) -> Any:
    """Returns where a generator of numpy, Python or torch stands; None for anything else."""
    if isinstance(generator, np.random.Generator):
        return state_of(generator)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate()
    torch = imported_library("torch")
    if torch is not None and isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    return None


def is_generator(leaf: Any) -> bool:
    """Returns whether an argument of a run is a generator, whose draws can be seen."""
    return _state(leaf) is not None


class SharedGenerators(SharedObjects):
    """Generators of numpy, Python or torch: what each replica draws would depend on how many draw.

    Parameters
    ----------
    paths : sequence of str
        Where each leaf is among the arguments of ``strategy.run``.
    leaves : sequence
        The generators, and anything else.
    """

    def __init__(self, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        self._leaves = [
            (path, leaf) for path, leaf in zip(paths, leaves, strict=True) if is_generator(leaf)
        ]
        super().__init__([leaf for _, leaf in self._leaves])

    def entered_by(self, replica_id: int) -> None:
        """Does nothing: there is one state for all."""

    def _versions_now(self) -> list[bytes]:
        # Bytes: the states of some hold arrays, which have no one truth value.
        return [pickle.dumps(_state(generator)) for generator in self._objects]

    def _error(self, changed: Any, replica_id: int, first: int) -> ContextError:
        path = next(path for path, leaf in self._leaves if leaf is changed)
        return ContextError(
            f"replica {replica_id} has drawn from the generator in (args, kwargs){path} of"
            f" strategy.run, from which replica {first} of the same rank has drawn already: they"
            " share it, so what each draws would depend on how many replicas a rank hosts. Draw"
            " from mr.get_replica_context().rng, or give each replica one of its own, as"
            " strategy.experimental_distribute_values_from_function makes them."
        )
