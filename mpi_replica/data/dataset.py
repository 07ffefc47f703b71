"""The source of batches: tf.data's verbs over arrays, without MPI.

A `Dataset` is a chain of verbs that reads nothing until it is iterated. Every rank makes the same
chain and reads it for itself, so the order may depend on nothing but the arguments: a shuffle is
computed from its seed and the number of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ..core.argument_checks import integer
from .element_verbs import ElementVerbs
from .elements import numpy_values
from .epochs import Epochs
from .factories import Factories
from .order_verbs import OrderVerbs
from .plans.dataset_plan import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Cut, DatasetPlan


class Dataset(Factories, OrderVerbs, ElementVerbs):
    """Hold a chain of verbs that yields arrays, in the style of `tf.data.Dataset`.

    The arrays are numpy's, or torch's, JAX's or another library's where the source, or the function
    of a `map`, gives such; on a device they are staged through the memory of the host.

    Make one with `from_tensor_slices`, `range`, `from_source`, `from_generator` or `zip`. Each verb
    returns a new dataset. A dataset can be iterated any number of times; each iteration is the next
    epoch, and each pass of a `repeat` too, which is what `shuffle` draws a new order for. The
    dataset object counts its epochs: iterate it on all ranks or on none, or give `batches` the
    epoch. In a step each replica counts its own, from 0; those of a run that fails begin again.
    What makes a row, as the function of a `map`, may iterate one: it begins epochs of that row.

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

    def __init__(self, plan: DatasetPlan) -> None:
        super().__init__(plan)
        self._epochs = Epochs(plan.text)

    def cardinality(self) -> int:
        """Return the number of elements of one iteration, or INFINITE (-1), or UNKNOWN (-2).

        Source: `tf.data.Dataset.cardinality`.

        Returns
        -------
        int
            Counted by the verbs: nothing is read for it.

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
        it. A generator is started once, and its first element looked at; so are the first row of
        a source and the first result of a map.

        Raises
        ------
        ValueError
            If there is no first element to look at.

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
        """Start the next epoch: iterate the elements."""
        return self._plan.values(self._epochs.next())

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Start the next epoch, as `iter(dataset)`, with numpy's values whatever the source gave.

        Source: `tf.data.Dataset.as_numpy_iterator`.

        Returns
        -------
        iterator
            Of nests of numpy arrays and scalars, one for each element.

        Examples
        --------
        >>> next(Dataset.range(4).batch(2).as_numpy_iterator()).tolist()
        [0, 1]
        """
        return map(numpy_values, self)

    def batches(
        self,
        slice_rows: Callable[[int], slice] | None = None,
        *,
        epoch: int | None = None,
        start: int = 0,
    ) -> Iterator[tuple[int, Any]]:
        """Start an epoch: iterate (rows of the global batch, the wanted rows of it).

        Where rows are reached by position only the wanted ones are read. Elsewhere (a generator, a
        filter, a buffered shuffle, a `map` after `batch`) the whole batch is made and cut.

        Parameters
        ----------
        slice_rows : callable, optional
            Gets the number of rows n of a global batch, returns the slice of them that is wanted.
        epoch : int, optional
            The number of the epoch, from 0. None takes the next one, which iterating counts too.
        start : int
            How many batches to leave out, as if they had been taken. What is reached by position is
            not read for it.

        Returns
        -------
        iterator of (int, nest of array)
            For each global batch how many rows all of it has, and those of them that are wanted.

        Raises
        ------
        ValueError
            If the dataset is not batched.
        TypeError
            When iterated, if slice_rows returns no slice.

        Examples
        --------
        >>> dataset = Dataset.range(5).batch(3)
        >>> [(n, rows.tolist()) for n, rows in dataset.batches(lambda n: slice(2, n))]
        [(3, [2]), (2, [])]
        >>> [rows.tolist() for _, rows in dataset.batches(start=1)]
        [[3, 4]]
        """
        if not self._plan.batched:
            raise ValueError(
                f"{self!r} is not batched, so there is no global batch to take rows of. "
                "Call .batch(global_batch_size) first."
            )
        start = integer("start", start, 0)
        epoch = self._epochs.next() if epoch is None else integer("epoch", epoch, 0)
        wanted = slice_rows or _all_rows
        steps = parts_of_batches(self, lambda rows: [_slice_of(wanted, rows)], epoch, start)
        return ((rows, part) for rows, (part,) in steps)


def elements_of(dataset: Dataset, epoch: int, start: int) -> Iterator[Any]:
    """Iterates the elements of an epoch, batched or not, from element `start` on."""
    return dataset._plan.values(epoch, start)


def parts_of_batches(
    dataset: Dataset, cut: Cut, epoch: int, start: int
) -> Iterator[tuple[int, list[Any]]]:
    """Iterates (rows of the global batch, the parts that `cut` wants of it) from `start` on."""
    return dataset._plan.iterate(epoch, cut, start)


def drops_remainder(source: Any) -> bool:
    """Returns whether a source leaves out rows that make no whole batch."""
    return isinstance(source, Dataset) and source._plan.drops_remainder


def _all_rows(rows: int) -> slice:
    return slice(0, rows)


def _slice_of(wanted: Callable[[int], slice], rows: int) -> slice:
    part = wanted(rows)
    if not isinstance(part, slice):  # None and lists would index, too, and give other shapes
        raise TypeError(f"slice_rows must return a slice, got {part!r}. Return slice(start, stop).")
    return part
