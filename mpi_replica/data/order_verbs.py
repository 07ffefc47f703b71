"""The verbs that say which elements there are, and in what order."""

from __future__ import annotations

import operator
from typing import Self

from ..core.argument_checks import flag, integer
from .chain import Chain, number_or_all
from .plans import positions, streams


class OrderVerbs(Chain):
    """Choose and order elements."""

    def shuffle(
        self,
        buffer_size: int | None = None,
        *,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
    ) -> Self:
        """Put the elements in a random order that is computed from the seed and the epoch.

        Source: `tf.data.Dataset.shuffle`, but a dataset of finite length whose rows are reached by
        position is permuted as a whole.

        Parameters
        ----------
        buffer_size : int, optional
            Where the whole can be permuted it is ignored (accepted so that tf programs run).
            Elsewhere it is required: each element is drawn from a buffer of that many.
        seed : int
            Required, at least 0: every rank shuffles for itself and must get the same order.
        reshuffle_each_iteration : bool
            Whether each epoch has an order of its own.

        Returns
        -------
        Dataset
            Of the same elements.

        Raises
        ------
        TypeError, ValueError
            If seed is left out, an argument is none of these, or buffer_size is missing.

        Notes
        -----
        The order of a whole is not held in memory, however many rows there are: it is computed for
        the rows that are read, 0.1 to 0.2 ms for each thousand in a row. The order of a seed and an
        epoch stays the same, so that a checkpoint can go on in it.

        Examples
        --------
        >>> dataset = mr.data.Dataset.range(100).shuffle(seed=7)
        >>> first, second = list(dataset), list(dataset)
        >>> first == second, sorted(first) == sorted(second)
        (False, True)
        """
        if seed is None:
            raise TypeError(
                "shuffle needs a seed: every rank shuffles for itself, and without one the ranks "
                "would get different orders. Call shuffle(seed=0), with one number on all ranks."
            )
        seed = integer("seed", seed, 0)
        reshuffle = flag("reshuffle_each_iteration", reshuffle_each_iteration)
        if buffer_size is not None:
            buffer_size = integer("buffer_size", buffer_size, 1)
        if self._plan.indexable and self._plan.length >= 0:
            return self._with(positions.Permutation(self._plan, seed, reshuffle))
        if buffer_size is None:
            raise ValueError(
                f"{self!r} can't be permuted as a whole, since its rows can't be reached by "
                "position or never end. Say how many elements to draw from: "
                f"shuffle(buffer_size=1000, seed={seed!r})."
            )
        return self._with(streams.BufferShuffle(self._plan, seed, reshuffle, buffer_size))

    def repeat(self, count: int | None = None) -> Self:
        """Go through the dataset several times; each pass is the next epoch of a shuffle below.

        Source: `tf.data.Dataset.repeat`.

        Parameters
        ----------
        count : int, optional
            The number of passes, at least 0. None, and -1 as in tf, is without end.

        Returns
        -------
        Dataset
            Of `count` times as many elements, or without end.

        Raises
        ------
        TypeError, ValueError
            If count is none of these.
        ValueError
            When iterated, if a pass of an endless repeat yields nothing of a dataset whose length
            is not known. That of one with a length of 0 has no elements, as in tf.

        Examples
        --------
        >>> [int(number) for number in mr.data.Dataset.range(2).repeat(3)]
        [0, 1, 0, 1, 0, 1]
        """
        if count is not None:
            count = integer("count (None repeats without end)", count, -1)
        return self._with(positions.Repeat(self._plan, None if count == -1 else count))

    def take(self, count: int) -> Self:
        """Leave out all but the first `count` elements.

        Source: `tf.data.Dataset.take`.

        Parameters
        ----------
        count : int
            At least 0; -1 takes all.

        Returns
        -------
        Dataset
            Of `count` elements, or fewer where there are no more.

        Raises
        ------
        TypeError, ValueError
            If count is none of these.

        Examples
        --------
        >>> [int(number) for number in mr.data.Dataset.range(5).take(2)]
        [0, 1]
        """
        number = number_or_all("count of take", count)
        verb = f"take({operator.index(count)})"
        return self._with(positions.Section(self._plan, verb, 0, number))

    def skip(self, count: int) -> Self:
        """Leave out the first `count` elements.

        Source: `tf.data.Dataset.skip`. What is reached by position is skipped without reading.

        Parameters
        ----------
        count : int
            At least 0; -1 skips all.

        Returns
        -------
        Dataset
            Of the others.

        Raises
        ------
        TypeError, ValueError
            If count is none of these.

        Examples
        --------
        >>> [int(number) for number in mr.data.Dataset.range(5).skip(2)]
        [2, 3, 4]
        """
        number = number_or_all("count of skip", count)
        verb = f"skip({operator.index(count)})"
        if number is None:
            return self._with(positions.Section(self._plan, verb, 0, 0))
        return self._with(positions.Section(self._plan, verb, number, None))

    def shard(self, num_shards: int, index: int) -> Self:
        """Take each `num_shards`-th element, from element `index` on.

        Source: `tf.data.Dataset.shard`. A dataset that is distributed is cut anyway: this is for
        `distribute_datasets_from_function`, where each pipeline chooses its own elements.

        Parameters
        ----------
        num_shards : int
            At least 1.
        index : int
            From 0 to num_shards - 1.

        Returns
        -------
        Dataset
            Of elements `index`, ``index + num_shards`` and so on.

        Raises
        ------
        TypeError, ValueError
            If an argument is none of these.

        Examples
        --------
        >>> [int(number) for number in mr.data.Dataset.range(8).shard(3, 1)]
        [1, 4, 7]
        """
        num_shards = integer("num_shards", num_shards, 1)
        index = integer("index of shard", index, 0, num_shards - 1)
        return self._with(positions.Shard(self._plan, num_shards, index))

    def concatenate(self, dataset: Chain) -> Self:
        """Put the elements of another dataset after these.

        Source: `tf.data.Dataset.concatenate`.

        Parameters
        ----------
        dataset : Dataset
            Its elements have the structure, dtypes and numbers of axes of these; lengths of axes
            may differ.

        Returns
        -------
        Dataset
            Of the elements of both.

        Raises
        ------
        TypeError
            If it is no dataset, or its elements do not fit. Where nothing need be read for it this
            is found out at once; else when `element_spec` is asked for.
        StructureMismatchError
            While it is iterated, if they do not fit and both are in one batch that is read by
            position. A stream's batch takes what stacks.

        Examples
        --------
        >>> two, three = mr.data.Dataset.range(2), mr.data.Dataset.range(3)
        >>> [int(number) for number in two.concatenate(three)]
        [0, 1, 0, 1, 2]
        """
        if not isinstance(dataset, Chain):
            raise TypeError(
                f"concatenate needs a Dataset, got {dataset!r}. Make one with Dataset.from_source "
                "or Dataset.from_tensor_slices."
            )
        return self._with(positions.Concatenate(self._plan, dataset._plan))
