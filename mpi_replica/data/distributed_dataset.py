"""Distributed datasets: what the replicas of a rank get, epoch by epoch."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from ..collectives.agreement.stand import Note
from ..collectives.engine import Engine
from ..core.context import require_once
from ..core.digests import digest_of
from .inputs import Input
from .iterator import (
    GIVES_ALL,
    DistributedIterator,
    Progress,
    placeless_site,
    require_no_step,
    require_no_step_to_load,
)


class DistributedDataset:
    """An iterable of nests of `PerReplica`, one for each step.

    Made by ``strategy.experimental_distribute_dataset`` and
    ``strategy.distribute_datasets_from_function``. It can be iterated again; each iteration is the
    next epoch of a shuffled source. All ranks must iterate it alike. Counterpart of
    ``tf.distribute.DistributedDataset``.

    Examples
    --------
    >>> strategy = mr.MPIStrategy(num_replicas=2)
    >>> dataset = mr.data.Dataset.range(5).batch(3)
    >>> for batch in strategy.experimental_distribute_dataset(dataset):
    ...     print(strategy.experimental_local_results(batch))
    (array([0, 1]), array([2]))
    (array([3]), array([4]))
    """

    def __init__(self, engine: Engine, made_of: Input) -> None:
        self._engine = engine
        self._input = made_of
        # Where the newest iteration is; None where that which comes next begins at `_start`.
        self._newest: Progress | None = None
        self._start = Progress(0, 0)
        #: Gives the iterator whose place that is, as long as anyone holds it.
        self._iterator: Callable[[], DistributedIterator | None] = lambda: None
        # Both of an iterator that was restored at `_start`: the newest one where it goes on first.
        self._beside: tuple[Progress, Callable[[], DistributedIterator | None]] | None = None
        # Call sites tell nothing here: one rank may iterate through a progress bar.
        made_of.name = engine.add_dataset(self)

    @property
    def element_spec(self) -> Any:
        """What a replica gets in a step: a nest of `mr.data.ArraySpec`.

        Axis 0 is None, unless no replica ever gets an incomplete batch: see
        ``strategy.distribute_datasets_from_function``. What is no `mr.data.Dataset` does not tell:
        a TypeError. Counterpart of ``tf.distribute.DistributedDataset.element_spec``, which has a
        spec for each replica.
        """
        return self._input.element_spec

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a distributed dataset can't be copied or pickled: it belongs to a strategy. Copy the"
            " dataset that was given to strategy.experimental_distribute_dataset."
        )

    def __len__(self) -> int:
        if self._input.length < 0:
            raise TypeError(
                "the length of this distributed dataset is infinite, or not known, as that of all"
                " that is no mr.data.Dataset."
            )
        return self._input.length

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DistributedIterator:
        require_no_step("iter() of a distributed dataset", GIVES_ALL)
        require_once(self._engine.per_replica_call, "iter() of a distributed dataset")
        self._follow()
        place, newest = self._next(), (self._newest, self._iterator)
        iterator = DistributedIterator(self._engine, self._input, place)
        if self._engine.layout.size > 1 and self._engine.is_in_its_thread():

            def go_back() -> None:
                """Forgets an iteration that not all ranks have begun: the next is the same."""
                self._newest, self._iterator = newest

            self._note_iteration(place, go_back)
        # Noted first: where Ctrl-C comes in between, the next call takes it back on all ranks.
        self._newest, self._iterator = place, weakref.ref(iterator)
        return iterator

    def _next(self) -> Progress:
        """Returns where the next iteration begins: in mid-epoch after a checkpoint.

        That of the newest one may have been restored, too.
        """
        if self._newest is not None:
            return Progress(self._newest.epoch + 1, 0)
        return dataclasses.replace(self._start)

    def _note_iteration(self, place: Progress, undo: Callable[[], None]) -> None:
        """Adds a note of the iteration that begins to the next header."""
        source = self._input
        what = f"iteration {place.epoch} of {source.name}"
        if source.text:
            what = f"{what}, {source.text}"
        advice = (
            "All ranks must distribute the same dataset, and iterate it equally often: another"
            " epoch has another shuffle."
        )
        digest = digest_of((place.epoch, place.steps, source.length, source.pipelines, source.text))
        note = Note(what, placeless_site(), digest, advice, "CollectiveMismatchError")
        self._engine.agreement.notes.add(note, undo)

    def begin_anew(self, iterators: Iterable[DistributedIterator]) -> None:
        """Make the next iteration the first one again, or that behind the last of `iterators`."""
        self._start, self._newest, self._beside = Progress(0, 0), None, None
        for iterator in iterators:
            if iterator._input is self._input:
                self._newest = iterator._place

    def go_on_behind(self, restored: Iterable[Any]) -> None:
        """Make the next iteration that behind the iterator that goes on where this one would."""
        for one in restored:
            if isinstance(one, DistributedIterator) and one._input is self._input:
                if self._newest is None and one._place == self._start:
                    self._beside = one._place, weakref.ref(one)

    def _follow(self, *, has_gone_on: bool = False) -> None:
        """Takes the iterator that was restored beside it for the newest, where it has gone on."""
        if self._newest is None and self._beside is not None:
            if has_gone_on or self._beside[0] != self._start:
                self._newest, self._iterator = self._beside

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iteration stands, for a checkpoint.

        Returns
        -------
        dict
            Plain data: "epoch", "steps" that were taken, and "pipelines", how many ranks or
            replicas have input of their own; where they have, "replicas" that take of each. In the
            middle of a `mr.data.Dataset` also its text as "source". Steps that were read ahead do
            not count.

        Notes
        -----
        No communication. A `Checkpoint` that holds the dataset calls it. An iteration that was left
        by ``break`` has not ended: it goes on there. A commit of an `ElasticState` knows better.

        Examples
        --------
        >>> dataset = mr.data.Dataset.range(4).batch(2)
        >>> distributed = mr.MPIStrategy().experimental_distribute_dataset(dataset)
        >>> batch = next(iter(distributed))
        >>> distributed.state_dict()
        {'epoch': 0, 'steps': 1, 'pipelines': None, 'source': '<Dataset.range(0, 4, 1).batch(2)>'}
        """
        self._follow()
        place = self._newest
        if place is None or place.has_ended:
            place = self._next()
        return place.state(self._input)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on where that of `state_dict` stood: with the step after it.

        Parameters
        ----------
        state : mapping
            What `state_dict` gave, the same on all ranks.

        Raises
        ------
        ValueError
            It stood in the middle of input of each rank's own, and there are other ranks, or
            replicas on them, now. Or called in a replica.
        KeyError, TypeError
            It is no such mapping.

        Notes
        -----
        No communication: the ranks compare where they stand when they iterate. A warning tells
        where the "source" was another one, but for what it prefetches. A `Checkpoint` that holds
        the dataset calls it.

        Examples
        --------
        >>> dataset = mr.data.Dataset.range(4).batch(2)
        >>> distributed = mr.MPIStrategy().experimental_distribute_dataset(dataset)
        >>> distributed.load_state_dict({"epoch": 0, "steps": 1, "pipelines": None})
        >>> next(iter(distributed)).values
        (array([2, 3]),)
        """
        require_no_step_to_load()
        self._start = Progress.of_state(state, self._input, self._engine)
        self._newest = self._beside = None


def states_at_commit(
    datasets: Mapping[int, DistributedDataset], held: Container[int]
) -> dict[str, dict[str, Any]]:
    """Returns where datasets go on after a loss, by name: in the middle of a loop alone.

    An iteration that was left goes on no more, and the iterators of which `held` has the identity
    go back by themselves: the next iteration is another one.
    """
    return {one._input.name: _state_at_commit(one, held) for one in datasets.values()}


def go_back(
    datasets: Mapping[int, DistributedDataset], states: Mapping[str, Mapping[str, Any]]
) -> None:
    """Has datasets go on where `states_at_commit` told; others begin anew."""
    for dataset in datasets.values():
        if dataset._input.name in states:
            dataset.load_state_dict(states[dataset._input.name])
        else:  # made since then
            dataset.begin_anew(())


def _state_at_commit(dataset: DistributedDataset, held: Container[int]) -> dict[str, Any]:
    dataset._follow(has_gone_on=True)
    iterator = dataset._iterator()
    if iterator is None or id(iterator) in held:
        return dataset._next().state(dataset._input)
    return dataset.state_dict()


class KnownDataset(NamedTuple):
    """What a spare must know of a dataset."""

    #: What tells it from others on all ranks.
    name: str
    #: The last iteration in which its iterators were read.
    read_once: int | None


def known_datasets(datasets: Mapping[int, DistributedDataset]) -> dict[int, KnownDataset]:
    """Returns what a spare must know of datasets, by number."""
    inputs = {number: dataset._input for number, dataset in datasets.items()}
    return {number: KnownDataset(one.name, one.once.epoch) for number, one in inputs.items()}


def rename(datasets: Mapping[int, DistributedDataset], known: Mapping[int, KnownDataset]) -> None:
    """Gives datasets, and their iterators, the names that they have on other ranks, by number."""
    for number, dataset in datasets.items():
        if number in known:
            dataset._input.name = known[number].name
            dataset._input.once.missed(known[number].read_once)
