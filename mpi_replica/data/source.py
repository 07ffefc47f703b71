"""The source of batches: tf.data's verbs over numpy, without MPI.

A `Dataset` is a chain of verbs that reads nothing until it is iterated. Every rank makes the same
chain and reads it for itself, so the order may depend on nothing but the arguments: a shuffle is
computed from its seed and the number of the pass.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from . import plans
from .elements import ArraySpec, as_arrays
from .plans import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Plan, SliceRows

__all__ = ["INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "ArraySpec", "Dataset"]


class Dataset:
    """Hold a chain of verbs that yields numpy values, in the style of `tf.data.Dataset`.

    Make one with `from_tensor_slices`, `range` or `from_generator`. Each verb returns a new
    dataset. A dataset can be iterated any number of times; each iteration is the next epoch, and
    each pass of a `repeat` too, which is what `shuffle` draws a new order for. The dataset object
    counts its epochs: iterate it on all ranks or on none, or give `batches` the epoch.

    Examples
    --------
    >>> dataset = Dataset.from_tensor_slices({"x": np.arange(6.0), "y": np.arange(6)})
    >>> for batch in dataset.shuffle(seed=1).batch(4):
    ...     print(batch["x"].shape, batch["y"].dtype)
    (4,) int64
    (2,) int64
    """

    INFINITE: ClassVar[int] = INFINITE_CARDINALITY
    UNKNOWN: ClassVar[int] = UNKNOWN_CARDINALITY

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(
                f"Dataset can't be made of {plan!r} directly. Call Dataset.from_tensor_slices, "
                "Dataset.range or Dataset.from_generator."
            )
        self._plan = plan
        self._epochs = itertools.count()

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Make a dataset of the rows of arrays: element i is row i of every leaf.

        Source: `tf.data.Dataset.from_tensor_slices`. Arrays are neither copied nor read here, so a
        `np.memmap` stays on disk; what is yielded is a copy.

        Parameters
        ----------
        tensors : nest of array_like, each of shape (n, ...)
            Dicts, tuples and namedtuples are structure; a list is one array, as in tf.

        Raises
        ------
        ValueError
            If there is no leaf, a leaf has no axis 0, or leaves differ in n.
        TypeError
            If a leaf has dtype object or is a masked array.

        Examples
        --------
        >>> [element.tolist() for element in Dataset.from_tensor_slices([[1, 2], [3, 4]])]
        [[1, 2], [3, 4]]
        """
        return Dataset(plans.Slices(as_arrays(tensors, "from_tensor_slices")))

    @staticmethod
    def range(*args: int) -> Dataset:
        """Make a dataset of int64 numbers, with the arguments of Python's `range`.

        Source: `tf.data.Dataset.range`.

        Parameters
        ----------
        *args : int
            (stop), (start, stop) or (start, stop, step).

        Raises
        ------
        TypeError
            If there are not 1 to 3 arguments, or one is no integer.
        ValueError
            If step is 0, or a number does not fit int64.

        Examples
        --------
        >>> [int(number) for number in Dataset.range(5, 0, -2)]
        [5, 3, 1]
        """
        if not 1 <= len(args) <= 3:
            raise TypeError(
                f"Dataset.range takes 1 to 3 integers, got {len(args)}: {args!r}. Call "
                "range(stop), range(start, stop) or range(start, stop, step)."
            )
        limits = np.iinfo(np.int64)
        numbers = [_integer("a number of range", n, limits.min, limits.max) for n in args]
        start, stop, step = {1: [0, *numbers, 1], 2: [*numbers, 1], 3: numbers}[len(numbers)]
        if step == 0:
            raise ValueError(f"Dataset.range{args!r} has step 0. Give a step that is not 0.")
        return Dataset(plans.Range(start, stop, step))

    @staticmethod
    def from_generator(generator: Callable[[], Iterable[Any]]) -> Dataset:
        """Make a dataset of what a generator function yields; its length is unknown.

        Source: `tf.data.Dataset.from_generator`. Every rank calls the function and reads all that
        it yields, so it must yield the same on every rank.

        Parameters
        ----------
        generator : callable without arguments
            Called for each pass; returns a new iterator over nests of array_like, all of one
            structure. A list is one array. What it yields is copied: it may reuse its buffers.

        Raises
        ------
        TypeError
            If it is not callable, or (when iterated) returns no new iterator.

        Examples
        --------
        >>> dataset = Dataset.from_generator(lambda: ((i, i / 2) for i in range(3)))
        >>> [(x.tolist(), y.tolist()) for x, y in dataset.batch(2)]
        [([0, 1], [0.0, 0.5]), ([2], [1.0])]
        """
        if not callable(generator):
            raise _not_a_function(generator)
        return Dataset(plans.Generated(generator))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stack consecutive elements, leaf by leaf, along a new axis 0.

        Source: `tf.data.Dataset.batch`. This is the global batch: distributing cuts it.

        Parameters
        ----------
        batch_size : int
            Elements in a batch, at least 1.
        drop_remainder : bool
            Leave out a last batch that is smaller.

        Raises
        ------
        TypeError, ValueError
            If an argument is none of these.
        ValueError
            When iterated, if elements differ in structure, shape or kind of dtype.

        Examples
        --------
        >>> [batch.tolist() for batch in Dataset.range(5).batch(2)]
        [[0, 1], [2, 3], [4]]
        """
        batch_size = _integer("batch_size", batch_size, 1)
        drop_remainder = _flag("drop_remainder", drop_remainder)
        return Dataset(plans.Batch(self._plan, batch_size, drop_remainder))

    def shuffle(
        self,
        buffer_size: int | None = None,
        *,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
    ) -> Dataset:
        """Put the elements in a random order that is computed from the seed and the epoch.

        Source: `tf.data.Dataset.shuffle`, but a dataset over arrays or a range, of finite length,
        is permuted as a whole.

        Parameters
        ----------
        buffer_size : int, optional
            Where the whole can be permuted it is ignored (accepted so that tf programs run).
            Elsewhere it is required: each element is drawn from a buffer of that many.
        seed : int
            Required, at least 0: every rank shuffles for itself and must get the same order.
        reshuffle_each_iteration : bool
            Whether each epoch has an order of its own.

        Raises
        ------
        TypeError, ValueError
            If seed is left out, an argument is none of these, or buffer_size is missing.

        Examples
        --------
        >>> dataset = Dataset.range(100).shuffle(seed=7)
        >>> first, second = list(dataset), list(dataset)
        >>> first == second, sorted(first) == sorted(second)
        (False, True)
        """
        if seed is None:
            raise TypeError(
                "shuffle needs a seed: every rank shuffles for itself, and without one the ranks "
                "would get different orders. Call shuffle(seed=0), with one number on all ranks."
            )
        seed = _integer("seed", seed, 0)
        reshuffle = _flag("reshuffle_each_iteration", reshuffle_each_iteration)
        if buffer_size is not None:
            buffer_size = _integer("buffer_size", buffer_size, 1)
        if self._plan.indexable and self._plan.length >= 0:
            return Dataset(plans.Permutation(self._plan, seed, reshuffle))
        if buffer_size is None:
            raise ValueError(
                f"{self!r} can't be permuted as a whole, since its rows can't be reached by "
                "position or never end. Say how many elements to draw from: "
                f"shuffle(buffer_size=1000, seed={seed!r})."
            )
        return Dataset(plans.BufferShuffle(self._plan, seed, reshuffle, buffer_size))

    def repeat(self, count: int | None = None) -> Dataset:
        """Go through the dataset several times; each pass is the next epoch of a shuffle below.

        Source: `tf.data.Dataset.repeat`.

        Parameters
        ----------
        count : int, optional
            The number of passes, at least 0. None, and -1 as in tf, is without end.

        Raises
        ------
        TypeError, ValueError
            If count is none of these.
        ValueError
            When iterated, if a pass of an endless repeat yields nothing.

        Examples
        --------
        >>> [int(number) for number in Dataset.range(2).repeat(3)]
        [0, 1, 0, 1, 0, 1]
        """
        if count is not None:
            count = _integer("count (None repeats without end)", count, -1)
        return Dataset(plans.Repeat(self._plan, None if count == -1 else count))

    def cardinality(self) -> int:
        """Return the number of elements of one iteration, or INFINITE (-1), or UNKNOWN (-2).

        Source: `tf.data.Dataset.cardinality`.

        Examples
        --------
        >>> Dataset.range(5).batch(2).cardinality()
        3
        >>> Dataset.range(5).repeat().cardinality() == Dataset.INFINITE
        True
        """
        return self._plan.length

    def __len__(self) -> int:
        """Return the number of elements of one iteration; TypeError where there is no number."""
        if self._plan.length < 0:
            what = "no end" if self._plan.length == INFINITE_CARDINALITY else "an unknown length"
            raise TypeError(f"{self!r} has {what}, so len() has no value. Use cardinality().")
        return self._plan.length

    def __bool__(self) -> bool:
        """Return True, as in tf, so that `if dataset` asks for no length."""
        return True

    @property
    def element_spec(self) -> Any:
        """Return the nest of `ArraySpec` of an element.

        Source: `tf.data.Dataset.element_spec`. A batch axis is None unless drop_remainder fixes
        it. A generator is started once, and its first element looked at.

        Raises
        ------
        ValueError
            If a generator yields nothing.

        Examples
        --------
        >>> Dataset.from_tensor_slices(np.zeros((5, 3))).batch(2, drop_remainder=True).element_spec
        ArraySpec(shape=(2, 3), dtype=dtype('float64'))
        """
        return self._plan.spec()

    @property
    def is_batched(self) -> bool:
        """Return whether axis 0 of the elements is a batch: only such input can be distributed.

        Examples
        --------
        >>> Dataset.range(4).batch(2).repeat().is_batched, Dataset.range(4).is_batched
        (True, False)
        """
        return self._plan.batched

    def __iter__(self) -> Iterator[Any]:
        """Start the next epoch: iterate the elements as numpy values."""
        return (value for _, value in self._plan.iterate(next(self._epochs), None))

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Start the next epoch, as `iter(dataset)`; values are numpy's anyway.

        Source: `tf.data.Dataset.as_numpy_iterator`.

        Examples
        --------
        >>> next(Dataset.range(4).batch(2).as_numpy_iterator()).tolist()
        [0, 1]
        """
        return iter(self)

    def batches(
        self, slice_rows: SliceRows | None = None, *, epoch: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Start an epoch: iterate (rows of the global batch, the wanted rows of it).

        Where rows are reached by position only the wanted ones are read. Elsewhere (a generator, a
        buffered shuffle) the whole batch is made and cut.

        Parameters
        ----------
        slice_rows : callable, optional
            Gets the number of rows n of a global batch, returns the slice of them that is wanted.
        epoch : int, optional
            The number of the epoch, from 0. None takes the next one, which iterating counts too.

        Raises
        ------
        ValueError
            If the dataset is not batched.

        Examples
        --------
        >>> dataset = Dataset.range(5).batch(3)
        >>> [(n, rows.tolist()) for n, rows in dataset.batches(lambda n: slice(2, n))]
        [(3, [2]), (2, [])]
        """
        if not self._plan.batched:
            raise ValueError(
                f"{self!r} is not batched, so there is no global batch to take rows of. "
                "Call .batch(global_batch_size) first."
            )
        epoch = next(self._epochs) if epoch is None else _integer("epoch", epoch, 0)
        return self._plan.iterate(epoch, slice_rows)

    def __repr__(self) -> str:
        """Return the chain of verbs."""
        return f"<Dataset.{self._plan.text}>"


def _not_a_function(generator: Any) -> TypeError:
    mend = "Pass a function: from_generator(lambda: iter(values))."
    if isinstance(generator, Iterator):
        mend = (
            "An iterator can be read only once. Pass the function that makes it: "
            "from_generator(rows), not from_generator(rows())."
        )
    return TypeError(
        "from_generator needs a callable that returns a new iterator for each pass, got "
        f"{generator!r}. {mend}"
    )


def _integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}. Convert it with int().")
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limits}, got {value!r}.")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}. Pass it by name.")
    return bool(value)
