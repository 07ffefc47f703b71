"""How datasets are made: of arrays, numbers, objects with rows, functions, and other datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from ..core.argument_checks import integer
from ..core.more_than_numbers import goes_by_label
from ..core.nest import flatten_tensors, leaf_paths
from .chain import Chain
from .elements import as_arrays, at
from .plans import changes, sources
from .plans.sources import HasRows, number_of_rows


class Factories(Chain):
    """Make datasets."""

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Self:
        """Make a dataset of the rows of arrays: element i is row i of every leaf.

        Source: `tf.data.Dataset.from_tensor_slices`. Arrays are neither copied nor read here, so a
        `np.memmap` stays on disk; what is yielded is a copy.

        Parameters
        ----------
        tensors : nest of array_like, each of shape (n, ...)
            Dicts, tuples and namedtuples are structure; a list is one array, as in tf. Elements and
            batches of torch tensors, JAX arrays and others are such arrays, on the same device:
            the dataset holds the rows in the memory of the host, where it shares them if they are
            there.

        Returns
        -------
        Dataset
            Of n elements.

        Raises
        ------
        ValueError
            If there is no leaf, a leaf has no axis 0, or leaves differ in n.
        TypeError
            If a leaf has dtype object, a mask or a unit, or is an array that numpy can't hold; or a
            list has texts beside numbers, or ints of which numpy makes floats, as ``[2**63, 1]``;
            or a table of pandas has ints above 2**53 beside floats.

        Examples
        --------
        >>> [element.tolist() for element in mr.data.Dataset.from_tensor_slices([[1, 2], [3, 4]])]
        [[1, 2], [3, 4]]
        """
        return cls(sources.Slices(as_arrays(tensors, lambda: "from_tensor_slices")))

    @classmethod
    def range(cls, *args: int) -> Self:
        """Make a dataset of int64 numbers, with the arguments of Python's `range`.

        Source: `tf.data.Dataset.range`.

        Parameters
        ----------
        *args : int
            (stop), (start, stop) or (start, stop, step).

        Returns
        -------
        Dataset
            Of as many numpy.int64 as Python's `range` has numbers.

        Raises
        ------
        TypeError
            If there are not 1 to 3 arguments, or one is no integer.
        ValueError
            If step is 0, or a number does not fit int64.

        Examples
        --------
        >>> [int(number) for number in mr.data.Dataset.range(5, 0, -2)]
        [5, 3, 1]
        """
        if not 1 <= len(args) <= 3:
            raise TypeError(
                f"Dataset.range takes 1 to 3 integers, got {len(args)}: {args!r}. Call "
                "range(stop), range(start, stop) or range(start, stop, step)."
            )
        limits = np.iinfo(np.int64)
        numbers = [integer("a number of range", n, limits.min, limits.max) for n in args]
        start, stop, step = {1: [0, *numbers, 1], 2: [*numbers, 1], 3: numbers}[len(numbers)]
        if step == 0:
            raise ValueError(f"Dataset.range{args!r} has step 0. Give a step that is not 0.")
        return cls(sources.Range(start, stop, step))

    @classmethod
    def from_source(cls, source: HasRows) -> Self:
        """Make a dataset of the rows of any object that has a length and gives row i for `[i]`.

        A map-style dataset of PyTorch, an array of h5py or zarr, a list, a class of one's own. For
        arrays `from_tensor_slices` is quicker: it reads many rows at once.

        Parameters
        ----------
        source : object with ``__len__`` (or a shape) and ``__getitem__``
            ``source[i]``, for an int i from 0 on, is a nest of array_like; a list is one array.
            The length is asked for once, here. Only the rows that are wanted are read, one at a
            time, by this thread or by that of `prefetch`. What it gives is copied.

        Returns
        -------
        Dataset
            Of as many elements as the source has rows.

        Raises
        ------
        TypeError
            If it has no length or no rows by number, as a dict or a frame.

        Notes
        -----
        Whatever the source raises for a row gets a note that names the row. A replica without rows
        of a batch needs their shapes and dtypes: the first row of the batch is read for it.

        Examples
        --------
        >>> class Squares:
        ...     def __len__(self):
        ...         return 5
        ...     def __getitem__(self, i):
        ...         return {"x": i, "y": i * i}
        >>> [batch["y"].tolist() for batch in mr.data.Dataset.from_source(Squares()).batch(3)]
        [[0, 1, 4], [9, 16]]
        """
        kind = type(source)
        if isinstance(source, Mapping):
            raise TypeError(
                f"from_source got a {kind.__name__}, whose rows are not reached by number. Call "
                "from_tensor_slices for a dict of arrays."
            )
        if goes_by_label(kind):
            raise TypeError(
                f"from_source got a {kind.__name__}, whose [i] goes by label or column. Call"
                " from_tensor_slices(dict(frame)) or from_tensor_slices(series.to_numpy()), which"
                " take its rows in their order."
            )
        rows = number_of_rows(source) if hasattr(kind, "__getitem__") else None
        if rows is None:
            raise TypeError(
                "from_source needs an object with __len__ and __getitem__, or a shape for the "
                f"length, got {source!r}. Call from_generator for what can only be iterated."
            )
        return cls(sources.Items(source, rows))

    @classmethod
    def from_generator(cls, generator: Callable[[], Iterable[Any]]) -> Self:
        """Make a dataset of what a generator function yields; its length is unknown.

        Source: `tf.data.Dataset.from_generator`. Every rank calls the function and reads all that
        it yields, so it must yield the same on every rank.

        Parameters
        ----------
        generator : callable without arguments
            Called for each pass, and again where one goes on after an error or a checkpoint;
            returns a new iterator over nests of array_like, all of one structure. A list is one
            array. What it yields is copied: it may reuse its buffers. A `Dataset` that was made
            before, and that it iterates in its own thread, is in the epoch of the pass: make this
            one once, outside of a loop over epochs, of which each would be the first.

        Returns
        -------
        Dataset
            Of unknown length, read as a stream.

        Raises
        ------
        TypeError
            If it is not callable, or (when iterated) returns no new iterator.

        Examples
        --------
        >>> dataset = mr.data.Dataset.from_generator(lambda: ((i, i / 2) for i in range(3)))
        >>> [(x.tolist(), y.tolist()) for x, y in dataset.batch(2)]
        [([0, 1], [0.0, 0.5]), ([2], [1.0])]
        """
        if not callable(generator):
            raise _not_a_function(generator)
        return cls(sources.Generated(generator))

    @classmethod
    def zip(cls, *datasets: Any) -> Self:
        """Make a dataset of nests of elements, one of each dataset; the shortest ends it.

        Source: `tf.data.Dataset.zip`.

        Parameters
        ----------
        *datasets : Dataset, or one nest of Dataset
            ``zip(a, b)`` yields tuples, as ``zip((a, b))`` does; ``zip({"x": a, "y": b})`` dicts.

        Returns
        -------
        Dataset
            Of unknown length where that of one of them is not known.

        Raises
        ------
        TypeError
            If something in it is no dataset; a list is none, as in tf.
        ValueError
            When distributed, if all are batched and their batches differ in rows: zip first.

        Notes
        -----
        Each pass reads the same epoch of all of them. Elements that several datasets of rows make
        up stay rows by position, and batches stay batches where all datasets are batched.

        Examples
        --------
        >>> images, labels = mr.data.Dataset.range(3), mr.data.Dataset.range(10, 15)
        >>> [(int(x), int(y)) for x, y in mr.data.Dataset.zip(images, labels)]
        [(0, 10), (1, 11), (2, 12)]
        """
        nest = datasets[0] if len(datasets) == 1 else datasets
        parts, structure = flatten_tensors(nest)
        for path, part in zip(leaf_paths(structure), parts, strict=True):
            if not isinstance(part, Chain):
                raise TypeError(
                    f"Dataset.zip got {part!r}{at(path)}, which is no Dataset. Call zip(a, b), or "
                    "give a tuple or a dict of datasets."
                )
        if not parts:
            raise TypeError("Dataset.zip got no dataset. Call zip(a, b).")
        return cls(changes.Zip(structure, [part._plan for part in parts]))


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
