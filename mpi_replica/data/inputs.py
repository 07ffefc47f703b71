"""What is distributed: global batches that are cut, or batches of each rank's own."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..collectives.engine import Engine
from ..core import nest
from ..core.context import called_for
from ..core.layout import shares
from ..core.options import InputOptions, InputReplicationMode
from .batches import copied_batch, cut, digest_of_rows, keeps_batches
from .dataset import Dataset, drops_remainder, parts_of_batches
from .elements import ArraySpec
from .epochs import ReadElements, Reading
from .function_contexts import InputContext
from .pipelines import END, Pipelines, check_source
from .plans.dataset_plan import UNKNOWN_CARDINALITY
from .step_reader import MakeSteps, ReadOnce, SourceKind, Step, StepReader

_log = logging.getLogger("mpi_replica")


class Input:
    """The steps of this rank, and what there is to know about them.

    Parameters
    ----------
    steps : callable
        See `MakeSteps`.
    sources : callable
        Returns what they are made of, for the replicas that are on this rank now.
    length : int
        How many there are, the same on all ranks; or infinite, or unknown.
    pipelines : tuple of int or None
        How many replicas take of each rank's, or replica's, own input; None where all cut the same.
    ahead : int
        How many steps are read before they are asked for.
    drops : callable
        Tells of each pipeline of this rank whether it leaves out what makes no whole batch: no
        replica has a step more than one that takes of such a pipeline.
    """

    def __init__(
        self,
        steps: MakeSteps,
        sources: Callable[[], list[Any]],
        *,
        length: int,
        pipelines: tuple[int, ...] | None,
        ahead: int,
        drops: Callable[[], list[bool]] = list,
    ) -> None:
        #: What tells the dataset from others, and its iterations: the same on all ranks.
        self.name = ""
        self._steps = steps
        self._sources = sources
        self.length = length
        self.pipelines = pipelines
        self.ahead = ahead
        self.drops = drops
        self.once = ReadOnce()
        self._kind()

    def _kind(self) -> SourceKind:
        """Returns how the sources of this rank's replicas can be read.

        Raises
        ------
        ValueError
            They can't be read ahead.
        RuntimeError
            They were read by a rank that is lost.
        """
        sources = self._sources()
        iterators = [source for source in sources if isinstance(source, Iterator)]
        if iterators and self.ahead:
            raise ValueError(
                f"experimental_per_replica_buffer_size={self.ahead!r} can't be had with an"
                f" iterator, as this {type(iterators[0]).__qualname__} is: it goes on where it"
                " stands, so that what was read ahead would be lost wherever an iteration is left."
                " Give what can be iterated anew, such as"
                " mr.data.Dataset.from_generator(function)."
            )
        self.once.require_no_other(iterators)
        is_repeatable = all(isinstance(source, Dataset) for source in sources)
        return SourceKind(is_repeatable, self.once if iterators else None)

    @classmethod
    def of_global_batches(cls, engine: Engine, dataset: Any, options: InputOptions | None) -> Input:
        """Cuts global batches into a part for each replica."""
        options = _checked(options)
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "experimental_distribute_dataset knows only InputReplicationMode.PER_WORKER, as in"
                " tf.distribute. Use distribute_datasets_from_function for PER_REPLICA."
            )
        check_source(dataset, "experimental_distribute_dataset")
        number = engine.layout.num_replicas
        ahead = options.experimental_per_replica_buffer_size
        # What is read ahead outlives the next batch, which may come in the same memory.
        are_copied = bool(ahead) and not isinstance(dataset, Dataset)
        length = dataset.cardinality() if isinstance(dataset, Dataset) else UNKNOWN_CARDINALITY
        # What is only iterated every rank reads whole, and it may differ, as where each shuffles.
        has_ends = length == UNKNOWN_CARDINALITY and engine.layout.size > 1

        def steps(epoch: int, start: int) -> Iterator[Step]:
            ids = engine.layout.local_replica_ids  # others than before, where a rank was lost

            def local_parts(rows: int) -> list[slice]:
                parts = shares(rows, number)
                ends = [slice(0, rows, max(rows - 1, 1))] if has_ends else []
                return [*[parts[i] for i in ids], *ends]

            batches: Iterable[tuple[int, list[Any]]]
            num_left_out = start
            if isinstance(dataset, Dataset):
                batches = parts_of_batches(dataset, local_parts, epoch, start)
            else:
                rest = ReadElements(dataset, Reading(epoch))
                num_left_out = sum(1 for _ in itertools.islice(rest, start))
                keeps = keeps_batches(dataset)
                batches = (cut(batch, local_parts, is_kept=keeps) for batch in rest)
            num_steps: float = length if length >= 0 else num_left_out
            for rows, parts in batches:
                num_steps = math.inf
                ends = digest_of_rows(parts.pop()) if has_ends else 0
                yield Step(list(map(copied_batch, parts)) if are_copied else parts, rows, ends)
            if num_steps < start and engine.layout.rank == 0:
                what = repr(dataset) if isinstance(dataset, Dataset) else type(dataset).__qualname__
                _log.warning(
                    "the input stood at step %s, and has fewer steps now (%s): this epoch is at its"
                    " end. Give the input that it was, or save between two epochs.",
                    start,
                    what,
                )

        if isinstance(dataset, Dataset):
            if not dataset.is_batched:
                raise ValueError(
                    "experimental_distribute_dataset needs global batches, and this dataset is not"
                    " batched: its elements are taken for rows, as those of a generator, of"
                    " enumerate, and of a zip with what is not batched. Call"
                    " dataset.batch(global_batch_size) behind these. What is no mr.data.Dataset is"
                    " taken as it is: an iterable of global batches."
                )
        return cls(steps, lambda: [dataset], length=length, pipelines=None, ahead=ahead)

    @classmethod
    def from_function(
        cls,
        engine: Engine,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None,
    ) -> Input:
        """Takes one batch for each local replica from the datasets that `dataset_fn` makes."""
        options = _checked(options)
        if not callable(dataset_fn):
            raise TypeError(
                f"dataset_fn must be callable, got {dataset_fn!r}. It gets a mr.InputContext."
            )
        per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA

        def of_replica(context: InputContext) -> Any:
            what = "the dataset_fn of distribute_datasets_from_function"
            replica_id = context.input_pipeline_id
            with called_for(engine, replica_id, what, "that"):
                return dataset_fn(context)

        make = of_replica if per_replica else dataset_fn
        pipelines = Pipelines(engine.layout, make, per_replica=per_replica)
        ahead = options.experimental_per_replica_buffer_size

        def sources() -> list[Any]:
            return pipelines.sources(engine.layout.local_replica_ids)

        def drops() -> list[bool]:
            return list(map(drops_remainder, sources()))

        def steps(epoch: int, start: int) -> Iterator[Step]:
            local = engine.layout.local_replica_ids
            for values in pipelines.steps(local, epoch, start):
                batches = [value for value in values if value is not END]
                ended = [i for i, value in zip(local, values, strict=True) if value is END]
                if not batches or any(map(drops_remainder, pipelines.sources(ended))):
                    return
                if len(batches) > 1:  # a difference is an error of this rank's input: all are told
                    nest.transposed(batches, tuple, "a distributed dataset")
                yield Step(values)

        # How long it is on other ranks can't be known.
        unknown, counts = UNKNOWN_CARDINALITY, pipelines.counts
        return cls(steps, sources, length=unknown, pipelines=counts, ahead=ahead, drops=drops)

    @property
    def text(self) -> str:
        """What makes the global batches of a `Dataset`: rows, batch size, seeds; else empty."""
        if self.pipelines is not None:
            return ""
        (source,) = self._sources()
        return repr(source) if isinstance(source, Dataset) else ""

    @property
    def element_spec(self) -> Any:
        """What a replica gets in a step."""
        source = next(iter(self._sources()), None)  # a spare has none
        if not isinstance(source, Dataset):
            raise TypeError(f"{type(source).__name__} does not tell its element_spec.")
        drops = self.drops()
        needs_all = bool(drops) and all(drops)

        def of_replica(spec: ArraySpec) -> ArraySpec:
            if needs_all or not spec.shape:
                return spec
            return dataclasses.replace(spec, shape=(None, *spec.shape[1:]))

        return nest.map_structure(of_replica, source.element_spec)

    def reader(self) -> StepReader:
        """Returns what reads the steps of one more iteration."""
        return StepReader(self._steps, kind=self._kind, ahead=self.ahead)


def _checked(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"options must be mr.InputOptions or None, got {options!r}.")
    return options
