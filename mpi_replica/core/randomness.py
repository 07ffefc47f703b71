"""The random numbers of a strategy: streams that depend on a seed, and never on the layout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .exceptions import ContextError

#: How functions of the program are called that must not do what stands for all replicas, and why.
FOR_EACH_REPLICA = (
    "for each replica of a rank: what comes of it would depend on how many a rank hosts"
)
WHERE_REPLICA_0_IS = "where replica 0 is, and nowhere else: other ranks would not do the same"

# Streams that start from one seed are told apart by a key of numbers. These begin ours, so that
# they are not those that a program gets from the same seed by ``spawn``.
_REPLICAS, _SHARED = 0x6D70695F72657031, 0x6D70695F72657032

# Beside what numpy has in a state.
_NUM_SPAWNED = "num_spawned"


class Generators:
    """The generators of a strategy: one for each replica, and one that all ranks have alike.

    Parameters
    ----------
    seed : int, optional
        Default: fresh entropy of the system.

    Notes
    -----
    See ``numpy.random.SeedSequence`` about keys that make streams independent of each other.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = int.from_bytes(os.urandom(16)) if seed is None else seed
        #: Those that were asked for, by replica id; None is that of all ranks.
        self._made: dict[int | None, np.random.Generator] = {}
        #: Whether they have never gone back to a state.
        self.are_new = True

    def of_replica(self, replica_id: int) -> np.random.Generator:
        """Returns the generator of a replica."""
        return self._get(replica_id)

    @property
    def shared(self) -> np.random.Generator:
        """The generator for code that runs on all ranks alike."""
        return self._get(None)

    @contextlib.contextmanager
    def unshared(self, function: str, how: str = FOR_EACH_REPLICA) -> Iterator[None]:
        """Runs a body that calls a function, and `how` it does, without the shared one.

        Raises
        ------
        ContextError
            It has drawn from it: ranks would draw other numbers from then on. It draws them again.
        """
        before = state_of(self.shared)
        try:
            yield
        finally:  # also where it raises, on this rank alone
            has_drawn = state_of(self.shared) != before
            if has_drawn:
                put_state(self.shared, before)
        if has_drawn:
            raise ContextError(
                f"{function} has drawn from strategy.rng. It is called {how}. Draw before it, or"
                " make a generator for each replica: np.random.default_rng((seed, replica_id))."
            )

    def _get(self, name: int | None) -> np.random.Generator:
        generator = self._made.get(name)
        if generator is None:
            generator = self._made[name] = np.random.Generator(self._begin(name))
        return generator

    def _begin(self, name: int | None) -> np.random.PCG64:
        """Returns the bits of a generator that nobody has drawn from."""
        key = (_SHARED,) if name is None else (_REPLICAS, name)
        # Not default_rng, which may become another one with a version of numpy.
        return np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=key))

    def state(self, replica_ids: Iterable[int]) -> dict[str, Any]:
        """Returns the state of the shared generator and of those of replicas, as plain data."""
        replicas = {str(i): state_of(self._made[i]) for i in replica_ids if i in self._made}
        shared = self._made.get(None)
        return {
            "seed": self.seed,
            "shared": None if shared is None else state_of(shared),
            "replicas": replicas,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to a `state`; generators that it does not name begin anew, with its seed."""
        self.are_new = False
        self.seed = int(state["seed"])
        for made, generator in self._made.items():
            # In place, since programs hold them; with the seed that `spawn` starts from.
            bits: Any = generator.bit_generator
            bits.__setstate__(self._begin(made).__getstate__())
        if state["shared"] is not None:
            put_state(self.shared, state["shared"])
        for name, of_replica in state["replicas"].items():
            put_state(self.of_replica(int(name)), of_replica)


def state_of(generator: np.random.Generator) -> dict[str, Any]:
    """Returns where a generator stands: what it draws next, and how many children it has."""
    bits: Any = generator.bit_generator
    seeds = bits.seed_seq
    # that of others can't spawn, or is None: of a RandomState with a seed
    has_children = isinstance(seeds, np.random.SeedSequence)
    children = {_NUM_SPAWNED: seeds.n_children_spawned} if has_children else {}
    return {**bits.state, **children}


def put_state(generator: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Undoes what a generator has drawn and spawned since `state_of`.

    A state of an older version does not tell how many children there were: they stay as many.
    """
    bits: Any = generator.bit_generator
    seeds = bits.seed_seq
    if isinstance(seeds, np.random.SeedSequence):
        num_spawned = state.get(_NUM_SPAWNED, seeds.n_children_spawned)
        if seeds.n_children_spawned != num_spawned:
            known: Any = {**seeds.state, "n_children_spawned": num_spawned}
            bits.__setstate__((bits.state, np.random.SeedSequence(**known)))
    bits.state = state
