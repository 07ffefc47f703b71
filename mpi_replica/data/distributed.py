"""Distributed datasets: what the replicas of a rank get, step by step.

All ranks end an epoch at the same step. Where every rank can tell the length of the input, that
costs no message. Otherwise each step is agreed on: ``next()`` is a collective call then.
"""

from __future__ import annotations

import dataclasses
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import nest
from ..collectives.broadcasting import digest_of
from ..collectives.call import Call
from ..collectives.callsite import CallSite, call_site
from ..collectives.engine import Engine
from ..collectives.standing import CallDescription, Note
from ..context import current_state
from ..errors import StructureMismatchError
from ..layout import compressed, shares
from ..options import CommunicationOptions, InputOptions, InputReplicationMode
from ..values import PerReplica
from .contexts import InputContext
from .source import UNKNOWN_CARDINALITY, Dataset

__all__ = ["DistributedDataset", "DistributedIterator"]

# A step of this rank: one value for each local replica, and the rows of the whole global batch.
_Step = tuple[list[Any], int]


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
        steps: Callable[[int], Iterator[_Step]],
        length: int,
        source: Any,
        *,
        is_global: bool,
    ) -> None:
        self._engine = engine
        self._steps = steps
        self._length = length
        self._source = source
        self._is_global = is_global
        self._epoch = 0
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

        def steps(epoch: int) -> Iterator[_Step]:
            batches: Iterable[tuple[int, Any]]
            if isinstance(dataset, Dataset):
                batches = dataset.batches(rows_of_rank, epoch=epoch)
            else:
                batches = (_cut(batch, rows_of_rank) for batch in dataset)
            for rows, mine in batches:
                parts = shares(rows, layout.num_replicas)
                start = parts[ids[0]].start
                yield (
                    [_rows(mine, parts[i].start - start, parts[i].stop - start) for i in ids],
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
        return cls(engine, steps, length, dataset, is_global=True)

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

        def steps(epoch: int) -> Iterator[_Step]:
            inputs = [iter(source) for source in sources]
            if not per_replica:
                inputs = inputs * len(layout.local_replica_ids)
            last = None
            while True:
                values = [next(source, _END) for source in inputs]
                found = [value for value in values if value is not _END]
                if not found:
                    return
                last = found[0] if last is None else last
                filled = [_empty(last) if value is _END else _arrays(value) for value in values]
                yield filled, 0

        # How long it is on other ranks can't be known.
        return cls(engine, steps, UNKNOWN_CARDINALITY, sources[0], is_global=False)

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
            is_told = self._is_global and isinstance(self._source, Dataset)
            text = repr(self._source) if is_told else ""
            digest = digest_of((epoch, self._length, self._is_global, text))
            note = Note(what, _placeless_site(), digest, advice, "CollectiveMismatchError")
            self._engine.agreement.notes.add(note, lambda: self._go_back_to(epoch))
        steps = self._steps(epoch)
        name = f"{self._name}, iteration {epoch}"
        return DistributedIterator(
            self._engine, steps, self._length == UNKNOWN_CARDINALITY, self._is_global, name
        )

    def _go_back_to(self, epoch: int) -> None:
        """Forget iterations that not all ranks have begun: the next one is the same for all."""
        self._epoch = epoch


class DistributedIterator:
    """One pass over a `DistributedDataset` (`tf.distribute.DistributedIterator`)."""

    def __init__(
        self,
        engine: Engine,
        steps: Iterator[_Step],
        must_agree: bool,
        is_global: bool,
        name: str,
    ) -> None:
        self._engine = engine
        self._steps = steps
        self._must_agree = must_agree
        self._is_global = is_global
        self._name = name
        self._taken = 0
        self._last_note: Note | None = None
        self._spec: Any = None
        # A step that was read, and that not all ranks have agreed to take; None at the end.
        self._read: list[_Step | None] = []
        self._has_ended = False

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
            self._taken += 1
            self._note_steps()
        return found[0]

    def _note_steps(self) -> None:
        """Have the number of steps taken compared with the next header: ranks must not be apart."""
        what = f"the number of steps taken in {self._name}"
        advice = "All ranks must take the same steps: call next() equally often on each."
        note = Note(what, _placeless_site(), self._taken, advice, "CollectiveMismatchError")
        self._engine.agreement.notes.add(note, replaces=self._last_note)
        self._last_note = note

    def _agreed_step(self) -> list[Any] | None:
        engine = self._engine

        def make(site: CallSite, options: CommunicationOptions) -> Call:
            if not self._read:
                self._read.append(next(self._steps, None))
            found = self._read[0]
            if found is not None:
                self._spec = _empty(found[0][0])
            named = dataclasses.replace(options, name=self._name)
            return _NextStep(found, self._spec, self._is_global, self._read.clear, site, named)

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


class _NextStep(Call):
    """The agreement on one step: whether any rank still has input."""

    kind = "next"
    _STATE = struct.Struct("<Bq")
    _HAS, _ENDED, _ENDED_UNSEEN = 0, 1, 2

    def __init__(
        self,
        found: _Step | None,
        spec: Any,
        is_global: bool,
        taken: Callable[[], None],
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(site, options)
        self.found = found
        self.spec = spec
        self.is_global = is_global
        self.taken = taken
        self.identify(is_global)

    def words(self, position: int = 0) -> CallDescription:
        return CallDescription(self.kind, "", self.site, self.options.name)

    def perform(self, engine: Engine, calls: Sequence[Call]) -> list[Any]:
        if self.found is not None:
            mine = self._STATE.pack(self._HAS, self.found[1])
        else:
            ended = self._ENDED_UNSEEN if self.spec is None else self._ENDED
            mine = self._STATE.pack(ended, -1)
        engine.agreement.agree(calls, mine)
        states = [self._STATE.unpack(data) for data in engine.agreement.payloads()]
        self.taken()
        kinds = [kind for kind, _ in states]
        if self._HAS not in kinds:
            return [(None, self.spec)]
        spec = self.spec
        if self._ENDED_UNSEEN in kinds:  # such a rank can't tell what its replicas' nothing is
            with engine.moving(self):
                specs = engine.carry(engine.transport.all_gather_bytes, pickle.dumps(spec, 5))
            spec = pickle.loads(specs[kinds.index(self._HAS)])
        if self.is_global and len(set(states)) > 1:
            sides = ", ".join(
                f"{'no batch' if rows < 0 else f'a batch of {rows} rows'} on ranks"
                f" {compressed(rank for rank, state in enumerate(states) if state[1] == rows)}"
                for rows in sorted({rows for _, rows in states})
            )
            raise StructureMismatchError(
                f"the global batches of a distributed dataset differ between ranks at"
                f" {self.site.line}: {sides}. All ranks must distribute the same dataset; use"
                " distribute_datasets_from_function for a dataset of each rank's own."
            )
        values = self.found[0] if self.found else [spec] * len(self.replica_ids)
        return [(values, spec)]


_END = object()


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


def _arrays(batch: Any) -> Any:
    """Return the nest `batch` with arrays as leaves.

    Raises
    ------
    ValueError
        A leaf has no rows, or another number of them.
    """
    leaves, structure = nest.flatten(batch)
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array, path in zip(arrays, nest.leaf_paths(structure), strict=True):
        if array.ndim == 0:
            raise ValueError(
                f"a batch of a distributed dataset has a scalar for value{path}: it has no rows. "
                "Give batches: arrays whose first dimension are the rows."
            )
        if array.shape[0] != arrays[0].shape[0]:
            raise ValueError(
                f"a batch of a distributed dataset has {arrays[0].shape[0]} rows and"
                f" {array.shape[0]} for value{path}. All leaves must have the same rows."
            )
    return nest.unflatten(structure, arrays)


def _rows(batch: Any, start: int, stop: int) -> Any:
    return nest.map_structure(lambda array: array[start:stop], batch)


def _cut(batch: Any, wanted: Callable[[int], slice]) -> tuple[int, Any]:
    arrays = _arrays(batch)
    leaves, _ = nest.flatten(arrays)
    rows = leaves[0].shape[0] if leaves else 0
    part = wanted(rows)
    return rows, _rows(arrays, part.start, part.stop)


def _empty(batch: Any) -> Any:
    return nest.map_structure(
        lambda array: np.empty((0, *array.shape[1:]), array.dtype), _arrays(batch)
    )
