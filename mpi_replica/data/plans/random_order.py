"""A random order of n things that is computed, not held: where each position's element comes from.

A Feistel network over pairs of numbers. Position ``p`` is the pair ``divmod(p, columns)``; each
round adds to one half a keyed hash of the other, modulo the size of that half, so that a round can
be undone whatever the hash is. There are a few more pairs than positions. A pair that is no
position is sent through the network again, until it is one ("cycle walking"); what is left is a
bijection of the positions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: So many things can be put in order: numpy counts rows in int64.
MOST_ROWS = 2**63 - 1

# Of few pairs a network makes all orders equally often only after more rounds (24,000 orders of 5:
# after 8 rounds some are seen too often, after 16 none).
_ROUNDS, _ROUNDS_OF_FEW, _FEW = 8, 16, 4096
# So many positions and what is computed of them stay in the cache of a core: three times as fast.
_AT_ONCE = 2**14
# The finaliser of splitmix64: each bit of the result depends on each bit given.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32 = (np.uint64(bits) for bits in (27, 30, 31, 32))


class RandomOrder:
    """A random bijection of the numbers 0 to length - 1.

    Parameters
    ----------
    length : int
        How many numbers there are, at least 1 and at most `MOST_ROWS`.
    seed, epoch : int
        What it is computed from, at least 0.

    Notes
    -----
    It holds a few keys, whatever `length` is. A call costs some 0.1 ms, and a million positions
    27 ms, as `Generator.permutation` does, which also holds 8 bytes a row. The walk is short: about
    one pair in the square root of `length` is no position.

    Examples
    --------
    >>> RandomOrder(5, seed=0, epoch=0)(np.arange(5)).tolist()
    [2, 4, 0, 1, 3]
    >>> RandomOrder(10**12, seed=0, epoch=0)(np.array([10**12 - 1])) < 10**12
    array([ True])
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        self._length = np.uint64(length)
        rows = math.isqrt(length - 1) + 1
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-length // rows))
        sequence = np.random.SeedSequence([seed, epoch])
        rounds = _ROUNDS if length > _FEW else _ROUNDS_OF_FEW
        self._keys = sequence.generate_state(rounds, np.uint64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers at these positions."""
        if positions.size > _AT_ONCE:
            parts = np.array_split(positions, -(-positions.size // _AT_ONCE))
            return np.concatenate([self(part) for part in parts])
        numbers = self._turn(positions.astype(np.uint64))
        walking = np.flatnonzero(numbers >= self._length)
        while walking.size:
            numbers[walking] = self._turn(numbers[walking])
            walking = walking[numbers[walking] >= self._length]
        return numbers.astype(np.int64)

    def _turn(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Sends numbers through the network once."""
        one, other = np.divmod(numbers, self._columns)
        size, other_size = self._rows, self._columns
        for key in self._keys:
            one += _scaled(_hash(other + key), size)
            one -= size * (one >= size)
            one, other = other, one
            size, other_size = other_size, size
        return one * self._columns + other


def _hash(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers ^= numbers >> _30
    numbers *= _FIRST
    numbers ^= numbers >> _27
    numbers *= _SECOND
    numbers ^= numbers >> _31
    return numbers


def _scaled(numbers: NDArray[np.uint64], size: np.uint64) -> NDArray[np.uint64]:
    """Returns the upper halves of the numbers, scaled to 0 to size - 1; size is at most 2**32."""
    numbers >>= _32
    numbers *= size
    numbers >>= _32
    return numbers
