"""The verbs that make other elements of the elements, or look at each, or read them ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from ..core.argument_checks import flag, integer
from ..core.nest import flatten
from .chain import Chain, require_callable
from .plans import changes, positions, sources, streams
from .plans.function_calls import AUTOTUNE


class ElementVerbs(Chain):
    """Change elements."""

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Self:
        """Stack consecutive elements, leaf by leaf, along a new axis 0.

        Source: `tf.data.Dataset.batch`. This is the global batch: distributing cuts it.

        Parameters
        ----------
        batch_size : int
            Elements in a batch, at least 1.
        drop_remainder : bool
            Leave out a last batch that is smaller.

        Returns
        -------
        Dataset
            Of batches: n elements make ``ceil(n / batch_size)``, or ``n // batch_size`` without the
            remainder.

        Raises
        ------
        TypeError, ValueError
            If an argument is none of these.
        ValueError
            When iterated, if elements differ in structure, shape or kind of dtype, or are integers
            of dtypes that only floats have in common (int64 and uint64).

        Notes
        -----
        Distributed, the rows of each replica are stacked by themselves where they are reached by
        position: they must fit one another, texts are as wide as its widest, and all replicas need
        one dtype and number of axes. A stream's are stacked as a whole, and then cut.

        Examples
        --------
        >>> [batch.tolist() for batch in mr.data.Dataset.range(5).batch(2)]
        [[0, 1], [2, 3], [4]]
        """
        batch_size = integer("batch_size", batch_size, 1)
        drop_remainder = flag("drop_remainder", drop_remainder)
        return self._with(changes.Batch(self._plan, batch_size, drop_remainder))

    def unbatch(self) -> Self:
        """Make elements of the rows of each element; it undoes `batch`.

        Source: `tf.data.Dataset.unbatch`. The result has an unknown length and is read as a stream:
        every rank reads all of it.

        Returns
        -------
        Dataset
            Of the rows, in their order.

        Raises
        ------
        ValueError
            When iterated, if the leaves of an element have no rows, or not as many in each.

        Examples
        --------
        >>> [int(number) for number in mr.data.Dataset.range(4).batch(3).unbatch()]
        [0, 1, 2, 3]
        """
        return self._with(streams.Unbatch(self._plan))

    def map(self, map_func: Callable[..., Any], num_parallel_calls: int | None = None) -> Self:
        """Call a function on each element, and make an element of what it returns.

        Source: `tf.data.Dataset.map`.

        Parameters
        ----------
        map_func : callable
            Gets an element: the items of a tuple as arguments, ``map(lambda x, y: ...)``, anything
            else as one. Returns a nest of array_like, which is copied; a list is one array. Arrays
            are of the library that the source, and then the function, gives. All ranks must have
            the same function. Random numbers from a generator would differ, also after a restore:
            draw from ``np.random.default_rng([seed, int(i)])``, where `enumerate` gives the i.
        num_parallel_calls : int, optional
            How many calls run at once, in threads; the order is kept. `mr.data.AUTOTUNE` is one for
            each core that this process may use. None or 1 calls in the thread that reads.

        Returns
        -------
        Dataset
            Of as many elements.

        Raises
        ------
        TypeError, ValueError
            If an argument is none of these.
        ValueError
            When distributed, if what is made of a batch has no rows.
        ContextError
            When distributed, if ranks call it for rows of their own replicas, and it makes a
            collective call or a variable, assigns to one, or draws from ``strategy.rng``.

        Notes
        -----
        Map before `batch`: then a rank calls it for the rows of its own replicas only. After
        `batch` the function must see the whole batch, so every rank reads and maps all of it, and
        takes its rows of the result. `element_spec` is that of the first element, which is made
        for it once; for a replica without rows of a batch the first row of that is made.

        An exception gets a note that names the row, and is raised on all ranks by a distributed
        dataset.

        Examples
        --------
        >>> pairs = mr.data.Dataset.from_tensor_slices((np.arange(3), np.arange(3.0)))
        >>> [float(total) for total in pairs.map(lambda x, y: x + y)]
        [0.0, 2.0, 4.0]
        """
        require_callable("map_func", map_func, "map(lambda x: x + 1)")
        calls = 1 if num_parallel_calls is None else num_parallel_calls
        calls = _count_or_autotune("num_parallel_calls", calls)
        return self._with(changes.Map(self._plan, map_func, calls))

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """Leave out the elements for which a function returns False.

        Source: `tf.data.Dataset.filter`. The result has an unknown length and is read as a stream:
        every rank reads all of it.

        Parameters
        ----------
        predicate : callable
            Gets an element as the function of `map` does, a batch as a whole; returns a bool.

        Returns
        -------
        Dataset
            Of the elements that are left.

        Raises
        ------
        TypeError
            If it is not callable, or (when iterated) returns no bool.

        Examples
        --------
        >>> [int(number) for number in mr.data.Dataset.range(6).filter(lambda x: x % 2 == 0)]
        [0, 2, 4]
        """
        require_callable("predicate", predicate, "filter(lambda x: x > 0)")
        return self._with(streams.Filter(self._plan, predicate))

    def enumerate(self, start: int = 0) -> Self:
        """Put the number of each element before it.

        Source: `tf.data.Dataset.enumerate`.

        Parameters
        ----------
        start : int
            The number of the first one.

        Returns
        -------
        Dataset
            Of tuples of a numpy.int64 and an element.

        Raises
        ------
        TypeError, ValueError
            If start is no integer, or the numbers do not fit int64: when iterated where the length
            is infinite or not known.

        Examples
        --------
        >>> letters = mr.data.Dataset.from_tensor_slices(["a", "b"])
        >>> [(int(number), str(letter)) for number, letter in letters.enumerate()]
        [(0, 'a'), (1, 'b')]
        """
        limits = np.iinfo(np.int64)
        start = integer("start", start, limits.min, limits.max - max(0, self._plan.length))
        _, structure = flatten((0, 0))
        # Where nobody knows how many it takes, it has no end, and an error where int64 has one.
        stop = None if self._plan.length < 0 else start + self._plan.length
        return self._with(changes.Zip(structure, [sources.Range(start, stop, 1), self._plan]))

    def prefetch(self, buffer_size: int) -> Self:
        """Read ahead in a thread while elements are worked on.

        Source: `tf.data.Dataset.prefetch`. Put it last. What the program sees is the same without
        it: elements, order, epochs, exceptions; but functions that make them see what the program
        changes meanwhile, as a variable that its step assigns, at any time.

        Parameters
        ----------
        buffer_size : int
            How many elements may be read ahead, at least 1. `mr.data.AUTOTUNE` is 2.

        Returns
        -------
        Dataset
            Of the same elements.

        Raises
        ------
        TypeError, ValueError
            If buffer_size is none of these.

        Notes
        -----
        The thread starts with the first element that is asked for, and ends with the iterator: at
        its end, or when nobody holds it any more. It reads the rows of this rank only and makes no
        collective call, so what is distributed may be prefetched. Verbs after it that ask for
        positions (`batch`, `shuffle`, `shard`) read them when they are asked, not ahead.

        Examples
        --------
        >>> [batch.tolist() for batch in mr.data.Dataset.range(5).batch(2).prefetch(1)]
        [[0, 1], [2, 3], [4]]
        """
        size = _count_or_autotune("buffer_size", buffer_size)
        return self._with(positions.Prefetch(self._plan, 2 if size == AUTOTUNE else size))


def _count_or_autotune(name: str, value: Any) -> int:
    count = integer(name, value, AUTOTUNE)
    if count == 0:
        raise ValueError(
            f"{name} must be at least 1, or mr.data.AUTOTUNE, which is -1, got {value!r}."
        )
    return count
