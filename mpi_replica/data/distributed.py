"""Distributed datasets: what the replicas of a rank get, step by step.

All ranks end an epoch at the same step. Where every rank can tell the length of the input, that
costs no message. Otherwise each step is agreed on: ``next()`` is a collective call then.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .. import nest
from ..collectives.broadcasting import digest_of
from ..collectives.call import Call
from ..collectives.callsite import CallSite, call_site
from ..collectives.engine import Engine
from ..collectives.standing import Note
from ..context import current_state
from ..layout import shares
from ..options import CommunicationOptions, InputOptions, InputReplicationMode
from ..values import PerReplica
from .contexts import InputContext
from .cutting import arrays_of, cut, empty_like, rows_of
from .next_step import NextStep, Step
from .source import UNKNOWN_CARDINALITY, Dataset

__all__ = ["DistributedDataset", "DistributedIterator"]


class DistributedDataset:
    """An iterable of nests of `PerReplica`, one for each step.

    Made by ``strategy.experimental_distribute_dataset`` and
    ``strategy.distribute_datasets_from_function``. It can be iterated again; each iteration is the
    next epoch of a shuffled source. All ranks must iterate it alike. Counterpart of
    ``tf.distribute.DistributedDataset``.
    """

    def __init__(
        self,
        engine: Engine,
        steps: Callable[[int, int], Iterator[Step]],
        length: int,
        source: Any,
        pipelines: int | None,
    ) -> None:
        self._engine = engine
        self._steps = steps
        self._length = length
        self._source = source
        #: How many ranks or replicas have input of their own; None where all cut the same.
        self._pipelines = pipelines
        self._epoch = 0
        #: Steps that the next iteration leaves out: they were taken before a checkpoint.
        self._start = 0
        self._newest: DistributedIterator | None = None
        # Call sites tell nothing here: one rank may iterate through a progress bar.
        self._name = engine.name_of_next_dataset()

    @classmethod
    def of_global_batches(
        cls, engine: Engine, dataset: Any, options: InputOptions | None
    ) -> DistributedDataset:
        """Cut global batches into a part for each replica."""
        _check_options(options)
        if options and options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "experimental_distribute_dataset knows only InputReplicationMode.PER_WORKER, as in"
                " tf.distribute. Use distribute_datasets_from_function for PER_REPLICA."
            )
        _check_source(dataset, "experimental_distribute_dataset")
        layout = engine.layout
        ids = layout.local_replica_ids

        def rows_of_rank(rows: int) -> slice:
            parts = shares(rows, layout.num_replicas)
            return slice(parts[ids[0]].start, parts[ids[-1]].stop)

        def steps(epoch: int, start: int) -> Iterator[Step]:
            batches: Iterable[tuple[int, Any]]
            if isinstance(dataset, Dataset):
                batches = dataset.batches(rows_of_rank, epoch=epoch, start=start)
            else:
                rest = itertools.islice(dataset, start, None)
                batches = (cut(batch, rows_of_rank) for batch in rest)
            for rows, mine in batches:
                parts = shares(rows, layout.num_replicas)
                start = parts[ids[0]].start
                yield (
                    [rows_of(mine, parts[i].start - start, parts[i].stop - start) for i in ids],
                    rows,
                )

        length = UNKNOWN_CARDINALITY
        if isinstance(dataset, Dataset):
            if not dataset.is_batched:
                raise ValueError(
                    "experimental_distribute_dataset needs global batches, and this dataset is not"
                    " batched. Call dataset.batch(global_batch_size) first."
                )
            length = dataset.cardinality()
        return cls(engine, steps, length, dataset, None)

    @classmethod
    def from_function(
        cls,
        engine: Engine,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None,
    ) -> DistributedDataset:
        """Take one batch for each local replica from the datasets that `dataset_fn` makes."""
        _check_options(options)
        if not callable(dataset_fn):
            raise TypeError(
                f"dataset_fn must be callable, got {dataset_fn!r}. It gets a mr.InputContext."
            )
        layout = engine.layout
        mode = (options or InputOptions()).experimental_replication_mode
        per_replica = mode is InputReplicationMode.PER_REPLICA
        count = layout.num_replicas if per_replica else layout.size
        mine = layout.local_replica_ids if per_replica else (layout.rank,)
        sources = [dataset_fn(InputContext(count, i, layout.num_replicas)) for i in mine]
        for source in sources:
            _check_source(source, "dataset_fn")

        def steps(epoch: int, start: int) -> Iterator[Step]:
            shared = 1 if per_replica else len(layout.local_replica_ids)
            inputs = [_elements(source, epoch, start * shared) for source in sources] * shared
            last = None
            while True:
                values = [next(source, _END) for source in inputs]
                found = [value for value in values if value is not _END]
                if not found:
                    return
                last = found[0] if last is None else last
                filled = [
                    empty_like(last) if value is _END else arrays_of(value) for value in values
                ]
                yield filled, 0

        # How long it is on other ranks can't be known.
        return cls(engine, steps, UNKNOWN_CARDINALITY, sources[0], count)

    @property
    def element_spec(self) -> Any:
        """What the source's elements are, before they are cut (see `mr.data.Dataset`)."""
        if not isinstance(self._source, Dataset):
            raise TypeError(f"{type(self._source).__name__} does not tell its element_spec.")
        return self._source.element_spec

    def __len__(self) -> int:
        if self._length < 0:
            raise TypeError("the length of this distributed dataset is infinite or not known.")
        return self._length

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DistributedIterator:
        epoch = self._epoch
        self._epoch += 1
        if self._engine.layout.size > 1 and self._engine.is_in_its_thread():
            what = f"iteration {epoch} of {self._name}"
            advice = (
                "All ranks must distribute the same dataset, and iterate it equally often: another"
                " epoch has another shuffle."
            )
            # The text of a Dataset tells rows, batch size and seeds: what makes its batches.
            is_told = self._pipelines is None and isinstance(self._source, Dataset)
            text = repr(self._source) if is_told else ""
            digest = digest_of((epoch, self._start, self._length, self._pipelines, text))
            note = Note(what, _placeless_site(), digest, advice, "CollectiveMismatchError")
            self._engine.agreement.notes.add(note, lambda: self._go_back_to(epoch))
        start, self._start = self._start, 0
        self._newest = DistributedIterator(
            self._engine,
            self._steps,
            epoch,
            start,
            self._length,
            self._pipelines,
            f"{self._name}, iteration {epoch}",
        )
        return self._newest

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iteration stands, for a checkpoint."""
        if self._newest is not None and not self._newest.has_ended:
            return self._newest.state_dict()
        return {"epoch": self._epoch, "steps": self._start, "pipelines": self._pipelines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on where that of `state_dict` stood: with the step after it.

        Raises
        ------
        ValueError
            It stood in the middle of input of each rank's own, and there are other ranks now.
        """
        self._epoch, self._start = _position(state, self._pipelines)
        self._newest = None

    def _go_back_to(self, epoch: int) -> None:
        """Forget iterations that not all ranks have begun: the next one is the same for all."""
        self._epoch = epoch


class DistributedIterator:
    """One pass over a `DistributedDataset` (`tf.distribute.DistributedIterator`)."""

    def __init__(
        self,
        engine: Engine,
        steps: Callable[[int, int], Iterator[Step]],
        epoch: int,
        start: int,
        length: int,
        pipelines: int | None,
        name: str,
    ) -> None:
        self._engine = engine
        self._make_steps = steps
        self._length = length
        self._must_agree = length == UNKNOWN_CARDINALITY
        self._pipelines = pipelines
        self._name = name
        self._last_note: Note | None = None
        self._spec: Any = None
        self._begin(epoch, start)

    def _begin(self, epoch: int, start: int) -> None:
        self._epoch = epoch
        self._taken = start
        self._steps = self._make_steps(epoch, start)
        # A step that was read, and that not all ranks have agreed to take; None at the end.
        self._read: list[Step | None] = []
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether it has told the end of its input."""
        return self._has_ended

    def __len__(self) -> int:
        if self._length < 0:
            raise TypeError("the length of this distributed iterator is infinite or not known.")
        return self._length - self._taken

    def __bool__(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands, for a checkpoint."""
        return {"epoch": self._epoch, "steps": self._taken, "pipelines": self._pipelines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the iterator of `state_dict` stood: with the step after it.

        Raises
        ------
        ValueError
            It stood in the middle of input of each rank's own, and there are other ranks now.
        """
        self._begin(*_position(state, self._pipelines))

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        """Return the next step's values: a nest of `PerReplica`.

        Collective where the length of the input is not known. Where it is known a rank whose input
        fails raises here, with a note that names the row, and the others at their next collective.

        Raises
        ------
        StopIteration
            The input has ended, on all ranks.
        ValueError
            Called in a replica.
        StructureMismatchError
            The global batches of the ranks have different numbers of rows.
        """
        state = current_state()
        if state is not None and state.replica_context is not None:
            raise ValueError(
                "next() of a distributed iterator was called in a replica: it gives values for all"
                " replicas. Call it outside and pass the result to strategy.run(fn, args=(batch,))."
            )
        if self._has_ended:
            raise StopIteration
        values = self._agreed_step() if self._must_agree else self._step()
        if values is None:
            self._has_ended = True
            raise StopIteration
        self._taken += 1
        layout = self._engine.layout
        ids, number = layout.local_replica_ids, layout.num_replicas
        return nest.transposed(
            values, lambda column: PerReplica(column, ids, number), "a distributed dataset"
        )

    def get_next(self) -> Any:
        """Return the next step's values, as ``next()`` does.

        Raises
        ------
        IndexError
            The input has ended.
        """
        found = self.get_next_as_optional()
        if not found.has_value():
            raise IndexError("the distributed dataset has ended.")
        return found.get_value()

    def get_next_as_optional(self) -> OptionalStep:
        """Return the next step's values, or nothing at the end, without an exception."""
        # range first: the other way round a step would be taken and lost
        return OptionalStep([value for _, value in zip(range(1), self, strict=False)])

    def _step(self) -> list[Any] | None:
        is_shared = self._engine.layout.size > 1 and self._engine.is_in_its_thread()
        try:
            found = next(self._steps, None)
        except Exception as error:
            if is_shared:  # the others sent no message for this step: they hear at their next call
                self._engine.fail("next", error)
            raise
        if found is None:
            return None
        if is_shared:
            self._note_steps(self._taken + 1)
        return found[0]

    def _note_steps(self, taken: int) -> None:
        """Have the number of steps taken compared with the next header: ranks must not be apart."""
        what = f"the number of steps taken in {self._name}"
        advice = "All ranks must take the same steps: call next() equally often on each."
        note = Note(what, _placeless_site(), taken, advice, "CollectiveMismatchError")
        self._engine.agreement.notes.add(note, replaces=self._last_note)
        self._last_note = note

    def _agreed_step(self) -> list[Any] | None:
        engine = self._engine

        def make(site: CallSite, options: CommunicationOptions) -> Call:
            if not self._read:
                self._read.append(next(self._steps, None))
            found = self._read[0]
            if found is not None:
                self._spec = empty_like(found[0][0])
            named = dataclasses.replace(options, name=self._name)
            return NextStep(
                found, self._spec, self._pipelines is None, self._read.clear, site, named
            )

        values, self._spec = engine.cross_replica(engine.make("next", None, make))
        return values  # type: ignore[no-any-return]


class OptionalStep:
    """A step that may not be there (`tf.experimental.Optional`)."""

    def __init__(self, found: Sequence[Any]) -> None:
        self._found = found

    def has_value(self) -> bool:
        """Return whether there was a step."""
        return bool(self._found)

    def get_value(self) -> Any:
        """Return the step's values.

        Raises
        ------
        ValueError
            There was none.
        """
        if not self._found:
            raise ValueError("there is no value: the distributed dataset has ended.")
        return self._found[0]


_END = object()


def _position(state: Mapping[str, Any], pipelines: int | None) -> tuple[int, int]:
    """Return epoch and steps taken of a state."""
    epoch, steps = int(state["epoch"]), int(state["steps"])
    if steps and state["pipelines"] != pipelines:
        raise ValueError(
            f"the input stood at step {steps} of {state['pipelines'] or 'no'} input pipelines of"
            f" their own, and has {pipelines or 'none'} now: rows would be lost or repeated. Use"
            " experimental_distribute_dataset, or save between two epochs."
        )
    return epoch, steps


def _elements(source: Any, epoch: int, start: int) -> Iterator[Any]:
    """Return an iterator over one epoch of a source, without its first elements."""
    if isinstance(source, Dataset) and source.is_batched:
        return (batch for _, batch in source.batches(epoch=epoch, start=start))
    return itertools.islice(source, start, None)


def _placeless_site() -> CallSite:
    """Return the site of this call, for its line only: it is the same as every other one."""
    return call_site()._replace(digest=b"")


def _check_options(options: InputOptions | None) -> None:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options must be mr.InputOptions or None, got {options!r}.")


def _check_source(source: Any, name: str) -> None:
    if not isinstance(source, Iterable):
        raise TypeError(
            f"{name} needs a mr.data.Dataset or another iterable of batches, got {source!r}."
        )
