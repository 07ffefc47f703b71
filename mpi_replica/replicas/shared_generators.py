"""Generators of random numbers that replicas of a rank get as one, in the arguments of a run."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.exceptions import ContextError
from ..core.randomness import state_of


class SharedGenerators:
    """Generators of numpy that replicas of a rank share: what each draws depends on how many draw.

    One of them alone may draw, or a merge_fn, as with tensors that are written.

    Parameters
    ----------
    paths : sequence of str
        Where each leaf is among the arguments of ``strategy.run``.
    leaves : sequence
        The generators, and anything else.
    """

    def __init__(self, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        self._generators = [
            (path, leaf)
            for path, leaf in zip(paths, leaves, strict=True)
            if isinstance(leaf, np.random.Generator)
        ]
        self._drawn_by: dict[int, int] = {}
        self.renew()

    def renew(self) -> None:
        """Takes all as they are now: a merge_fn may have drawn, once on each rank."""
        # Bytes: the states of some hold arrays, which have no one truth value.
        self._states = [pickle.dumps(state_of(generator)) for _, generator in self._generators]

    def left_by(self, replica_id: int) -> None:
        """Notes from which the replica has drawn since another one ran: it waits or ends now.

        Raises
        ------
        ContextError
            Another one has drawn from that in this run, too.
        """
        before = self._states
        self.renew()
        for (path, generator), one, other in zip(
            self._generators, before, self._states, strict=True
        ):
            if one != other and self._drawn_by.setdefault(id(generator), replica_id) != replica_id:
                raise ContextError(
                    f"replica {replica_id} has drawn from the generator in (args, kwargs){path} of"
                    f" strategy.run, from which replica {self._drawn_by[id(generator)]} of the same"
                    " rank has drawn already: they share it, so what each draws would depend on how"
                    " many replicas a rank hosts. Draw from mr.get_replica_context().rng, or give"
                    " each replica one of its own, as"
                    " strategy.experimental_distribute_values_from_function makes them."
                )
