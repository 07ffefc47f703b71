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
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    if isinstance(generator, np.random.SeedSequence):
        return generator.n_children_spawned
    if isinstance(generator, random.Random):
        try:
            return generator.getstate()
        except NotImplementedError:  # as of one that the system draws for
            return None
    torch = imported_library("torch")
    if torch is not None and isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    return None


def bit_generator_of(value: Any) -> np.random.BitGenerator | None:
    """Returns what a generator of numpy draws from; None for anything else."""
    if isinstance(value, np.random.RandomState):
        bits: np.random.BitGenerator = value._bit_generator
        return bits
    return value.bit_generator if isinstance(value, np.random.Generator) else None


def is_generator(leaf: Any) -> bool:
    """Returns whether an argument of a run is a generator, whose draws can be seen."""
    return _state(leaf) is not None


class SharedGenerators(SharedObjects[int]):
    """Generators of numpy, Python or torch: what each replica draws would depend on how many draw.

    Parameters
    ----------
    paths : sequence of str
        Where each leaf is among the arguments of ``strategy.run``.
    leaves : sequence
        The generators, and anything else.
    """

    def __init__(self, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        pairs = zip(paths, leaves, strict=True)
        self._leaves = [(path, leaf) for path, leaf in pairs if is_generator(leaf)]
        super().__init__()

    def entered_by(self, replica_id: int) -> None:
        """Does nothing: there is one state for all."""

    def _look(self) -> dict[int, bytes]:
        # Bytes: the states of some hold arrays, which have no one truth value.
        return {
            place: pickle.dumps(_state(generator))
            for place, (_, generator) in enumerate(self._leaves)
        }

    def _error(self, changed: int, replica_id: int, first: int) -> ContextError:
        path, _ = self._leaves[changed]
        return ContextError(
            f"replica {replica_id} has drawn from the generator in (args, kwargs){path} of"
            f" strategy.run, from which replica {first} of the same rank has drawn already: they"
            " share it, so what each draws would depend on how many replicas a rank hosts. Draw"
            " from mr.get_replica_context().rng, or give each replica one of its own, as"
            " strategy.experimental_distribute_values_from_function makes them."
        )
