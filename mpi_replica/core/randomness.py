"""The random numbers of a strategy: streams that depend on a seed, and never on the layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

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


class PCG64(np.random.PCG64):
    """numpy's, that may be asked before each draw; its copies are numpy's.

    A generator holds the lock of its bits while it draws (``BitGenerator.lock``). The name is
    numpy's, too, since states have it.
    """

    before_draw: Callable[[], None] | None = None

    @property
    def lock(self) -> Any:  # type: ignore[override]  # read-only, as numpy's is
        """What a generator holds while it draws."""
        lock = super().lock
        return lock if self.before_draw is None else _AskingLock(lock, self.before_draw)

    def spawn(self, n_children: int) -> Any:
        """Makes independent children, which is a draw of their seeds."""
        if self.before_draw is not None:
            self.before_draw()
        return super().spawn(n_children)

    def __reduce__(self) -> Any:
        make, _, *state = super().__reduce__()
        return make, (np.random.PCG64,), *state


class _AskingLock:
    """A lock that is taken where a function does not raise."""

    def __init__(self, lock: AbstractContextManager[Any], ask: Callable[[], None]) -> None:
        self._lock = lock
        self._ask = ask

    def __enter__(self) -> None:
        self._ask()
        self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)


class Generators:
    """The generators of a strategy: one for each replica, and one that all ranks have alike.

    Parameters
    ----------
    seed : int, optional
        Default: fresh entropy of the system.
    before_draw : callable, optional
        Called before each draw from the one that all ranks have alike; it raises where a draw would
        not be the same on all ranks.

    Notes
    -----
    See ``numpy.random.SeedSequence`` about keys that make streams independent of each other.
    """

    def __init__(
        self, seed: int | None = None, before_draw: Callable[[], None] | None = None
    ) -> None:
        self.seed = int.from_bytes(os.urandom(16)) if seed is None else seed
        self._before_draw = before_draw
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

    def _get(self, name: int | None) -> np.random.Generator:
        generator = self._made.get(name)
        if generator is None:
            bits = self._begin(name)
            if name is None:
                bits.before_draw = self._before_draw
            generator = self._made[name] = np.random.Generator(bits)
        return generator

    def _begin(self, name: int | None) -> PCG64:
        """Returns the bits of a generator that nobody has drawn from."""
        key = (_SHARED,) if name is None else (_REPLICAS, name)
        # Not default_rng, which may become another one with a version of numpy.
        return PCG64(np.random.SeedSequence(self.seed, spawn_key=key))

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
