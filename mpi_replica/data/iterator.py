"""Iterating over a distributed dataset: all ranks take the same steps, and end at the same one.

Where every rank can tell the length of the input, a step costs no message: the number of steps
taken is compared with the next one. Otherwise each step is agreed on.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..collectives.agreement.site import CallSite, call_site
from ..collectives.agreement.stand import Note
from ..collectives.engine import Engine
from ..core import nest
from ..core.argument_checks import integer
from ..core.context import is_in_step, require_once
from ..core.exceptions import RankLostError
from ..core.jax_state import require_unstaged
from ..core.key_order import key_order
from ..core.options import CommunicationOptions
from ..core.values import per_replica
from ..ranks.watch.span import span
from .batches import empty_like, kind_of, kind_text
from .inputs import Input
from .next_step import NextStep
from .pipelines import END
from .plans.dataset_plan import UNKNOWN_CARDINALITY
from .step_reader import Step

_log = logging.getLogger("mpi_replica")

#: Of who asks for values in a replica.
GIVES_ALL = (
    "it gives values for all replicas. Call it outside and pass the result to strategy.run(fn,"
    " args=(batch,))."
)
_SAME_STEPS = "All ranks must take the same steps: call next() equally often on each."
_LOST = (
    "rows would be lost or repeated. Use experimental_distribute_dataset, or save between two"
    " epochs."
)


def require_no_step(call: str, advice: str) -> None:
    """Raises in a replica, where `call` would be made as often as a rank has replicas.

    Raises
    ------
    ValueError
        It is made in one.
    """
    if is_in_step():
        raise ValueError(f"{call} was called in a replica: {advice}")


def require_no_step_to_load() -> None:
    """Raises where ``load_state_dict`` is called in a replica."""
    require_no_step(
        "load_state_dict of a distributed dataset or iterator",
        "it says where the input of all replicas goes on. Call it outside of steps.",
    )


@dataclasses.dataclass
class Progress:
    """Where an iteration stands."""

    epoch: int
    #: How many steps were taken.
    steps: int
    has_ended: bool = False

    @classmethod
    def of_state(cls, state: Mapping[str, Any], made_of: Input, engine: Engine) -> Progress:
        """Returns the place of a state; warns where the input is not what it was then.

        Raises
        ------
        TypeError, ValueError
            It is no mapping; its numbers are no integers, or negative.
        ValueError
            It is in the middle of input of each rank's own, and there are other ranks, or replicas
            on them, now.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict needs what state_dict() gave, got {state!r}.")
        epoch, steps = (integer(key, state[key], 0) for key in ("epoch", "steps"))
        place = cls(epoch, steps)
        if not steps:
            return place
        pipelines = made_of.pipelines
        number = None if pipelines is None else len(pipelines)
        if state["pipelines"] != number:
            raise ValueError(
                f"the input stood at step {steps} of {state['pipelines'] or 'no'} input pipelines"
                f" of their own, and has {number or 'none'} now: {_LOST}"
            )
        if pipelines is not None and "replicas" in state:  # not in those of older versions
            for i, (had, has) in enumerate(zip(state["replicas"], pipelines, strict=True)):
                if had != has:
                    raise ValueError(
                        f"the input stood at step {steps}, and the number of replicas at input"
                        f" pipeline {i} was {had} then, and is {has} now: {_LOST}"
                    )
        source = state.get("source", made_of.text)  # not in those of older versions
        if _of_rows(source) != _of_rows(made_of.text) and engine.layout.rank == 0:
            _log.warning(
                "the input stood at step %s of %s, and is %s now: the rest of this epoch has other"
                " rows, so that some come twice and others never. Give the input that it was, or"
                " save between two epochs.",
                steps,
                source,
                made_of.text or "no mr.data.Dataset",
            )
        return place

    def state(self, made_of: Input) -> dict[str, Any]:
        """Returns it for a checkpoint."""
        place = {"epoch": self.epoch, "steps": self.steps}
        if made_of.pipelines is not None:
            pipelines = list(made_of.pipelines)
            return {**place, "pipelines": len(pipelines), "replicas": pipelines}
        source = {"source": made_of.text} if self.steps and made_of.text else {}
        return {**place, "pipelines": None, **source}

    def go_back(self, epoch: int, steps: int) -> None:
        """Stands where fewer steps were taken."""
        if (self.epoch, self.steps) != (epoch, steps):
            self.epoch, self.steps, self.has_ended = epoch, steps, False


class DistributedIterator:
    """One pass over a `DistributedDataset` (`tf.distribute.DistributedIterator`).

    What ``iter(dataset)`` gives, and what a ``for`` loop over the dataset takes its batches from.

    Examples
    --------
    >>> dataset = mr.data.Dataset.range(4).batch(2)
    >>> iterator = iter(mr.MPIStrategy().experimental_distribute_dataset(dataset))
    >>> len(iterator), next(iterator).values, len(iterator)
    (2, (array([0, 1]),), 1)
    """

    def __init__(self, engine: Engine, made_of: Input, place: Progress) -> None:
        self._engine = engine
        self._input = made_of
        self._is_global = made_of.pipelines is None
        self._must_agree = made_of.length == UNKNOWN_CARDINALITY
        #: By replica of this rank: its first batch, without rows.
        self._forms: dict[int, Any] = {}
        #: What kind of batch the newest one is, for this rank and in words for all.
        self._kind: Any = None
        self._kind_text = ""
        #: That, with its rows and the order of its keys.
        self._batch_text = ""
        #: The orders of keys of the newest batches of this rank, by their text.
        self._orders: list[str] = []
        self._place = place
        self._begin_to_read()

    def _begin_to_read(self) -> None:
        """Reads on from its place, for the replicas that are on this rank now."""
        self._reader = self._input.reader()
        self._era = self._engine.layout.era

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a distributed iterator can't be copied or pickled: the other ranks would not know of"
            " the copy. iter(dataset) makes another one, and a mr.Checkpoint saves where it is."
        )

    def __len__(self) -> int:
        if self._input.length < 0:
            raise TypeError("the length of this distributed iterator is infinite or not known.")
        # it may stand beyond the end: that of a state of smaller batches
        return max(0, self._input.length - self._place.steps)

    def __bool__(self) -> bool:
        return True

    @property
    def element_spec(self) -> Any:
        """What a replica gets in a step: see `DistributedDataset.element_spec`."""
        return self._input.element_spec

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands, for a checkpoint. Steps that were read ahead do not count.

        Returns
        -------
        dict
            Plain data, as `DistributedDataset.state_dict` gives it.

        Examples
        --------
        >>> dataset = mr.data.Dataset.range(4).batch(2)
        >>> iter(mr.MPIStrategy().experimental_distribute_dataset(dataset)).state_dict()
        {'epoch': 0, 'steps': 0, 'pipelines': None}
        """
        return self._place.state(self._input)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the iterator of `state_dict` stood: with the step after it.

        Parameters
        ----------
        state : mapping
            What `state_dict` gave, the same on all ranks.

        Raises
        ------
        ValueError
            It stood in the middle of input of each rank's own, and there are other ranks, or
            replicas on them, now; or its numbers are negative. Or called in a replica.
        KeyError, TypeError
            It is no such mapping.

        Examples
        --------
        >>> dataset = mr.data.Dataset.range(4).batch(2)
        >>> iterator = iter(mr.MPIStrategy().experimental_distribute_dataset(dataset))
        >>> iterator.load_state_dict({"epoch": 0, "steps": 1, "pipelines": None})
        >>> next(iterator).values
        (array([2, 3]),)
        """
        require_no_step_to_load()
        place = Progress.of_state(state, self._input, self._engine)
        vars(self._place).update(vars(place))
        self._begin_to_read()

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        """Return the next step's values: a nest of `PerReplica`.

        Collective where the length of the input is not known. Where it is known a rank whose input
        fails raises here, with a note that names the row, and the others at their next collective.

        Returns
        -------
        nest of PerReplica
            A component for each replica of this rank.

        Raises
        ------
        StopIteration
            The input has ended, on all ranks.
        ValueError
            Called in a replica.
        ContextError
            This rank is a spare. JAX traces a function (jit, scan): the step would be the same for
            all its later calls. Or called in a function that is called for each replica of a rank:
            a ``value_fn``, a ``dataset_fn`` under ``PER_REPLICA``, or that of an update of a
            variable that is synchronized on read.
        StructureMismatchError
            The global batches of the ranks have different numbers of rows, or what a rank makes of
            its part differs in structure, dtypes or numbers of axes (where the length is known: at
            the next collective). Input of each rank's own may differ in all but structure.
        DivergenceError
            Global batches of unknown length, which every rank reads whole, differ between ranks in
            their first or last row.
        CollectiveMismatchError
            The ranks have taken different numbers of steps.
        RuntimeError
            Reading has failed before, and the input can't be read again.
        RankLostError
            It was made before a rank was lost, and is not in the `ElasticState`.

        Notes
        -----
        After an error of any rank's input all ranks stand before the step that failed: the next
        call reads it again, and may raise the same again. To do so, hold this call and the one of
        ``strategy.run`` in one ``try``: the other ranks may have the error there. Steps that other
        ranks took meanwhile, without another collective call, come again. What is no
        `mr.data.Dataset` can't be read again: then every further call is a `RuntimeError`, on all
        ranks. To leave out a step whose rows are reached by position, count it as taken:
        ``state = iterator.state_dict()``, ``state["steps"] += 1``,
        ``iterator.load_state_dict(state)``.

        Messages: none where the length is known, but for the note of it in the next call's; else
        one of 256 bytes a rank, and some more where a rank never had input. Counterpart of
        ``tf.distribute.DistributedIterator.__next__``.

        Examples
        --------
        >>> dataset = mr.data.Dataset.range(4).batch(4)
        >>> next(iter(mr.MPIStrategy(num_replicas=2).experimental_distribute_dataset(dataset)))
        PerReplica:{
          0: array([0, 1]),
          1: array([2, 3])
        }
        """
        require_no_step("next() of a distributed iterator", GIVES_ALL)
        require_once(self._engine.per_replica_call, "next() of a distributed iterator")
        require_unstaged("next() of a distributed iterator", "was called")
        if self._engine.is_spare:
            self._engine.require_replicas("next() of a distributed iterator")
        if self._place.has_ended and not self._era.is_over:
            raise StopIteration
        if self._input.ahead:  # what is read in the other thread must not communicate first
            self._engine.claim_thread()
        values = self._agreed_step() if self._must_agree else self._step()
        if values is None:
            self._place.has_ended = True
            raise StopIteration
        self._reader.take()
        self._place.steps += 1
        layout = self._engine.layout
        return nest.transposed(
            values,
            lambda column: per_replica(column, layout, are_rows=True),
            "a distributed dataset",
        )

    def get_next(self) -> Any:
        """Return the next step's values, as ``next()`` does, which says more.

        Collective where ``next()`` is.

        Returns
        -------
        nest of PerReplica
            A component for each replica of this rank.

        Raises
        ------
        IndexError
            The input has ended, on all ranks. All else as for ``next()``.

        Notes
        -----
        Counterpart of ``tf.distribute.DistributedIterator.get_next``.

        Examples
        --------
        >>> dataset = mr.data.Dataset.range(4).batch(2)
        >>> iterator = iter(mr.MPIStrategy().experimental_distribute_dataset(dataset))
        >>> iterator.get_next().values
        (array([0, 1]),)
        """
        optional = self.get_next_as_optional()
        if not optional.has_value():
            raise IndexError("the distributed dataset has ended.")
        return optional.get_value()

    def get_next_as_optional(self) -> OptionalStep:
        """Return the next step's values, or nothing at the end, without an exception.

        Collective where ``next()`` is.

        Returns
        -------
        object
            Its ``has_value()`` says whether there was a step; ``get_value()`` gives the values, and
            is a `ValueError` at the end.

        Raises
        ------
        Exception
            As for ``next()``, but for the StopIteration.

        Notes
        -----
        Counterpart of ``tf.distribute.DistributedIterator.get_next_as_optional``.

        Examples
        --------
        >>> dataset = mr.data.Dataset.range(2).batch(2)
        >>> iterator = iter(mr.MPIStrategy().experimental_distribute_dataset(dataset))
        >>> iterator.get_next_as_optional().get_value().values
        (array([0, 1]),)
        >>> iterator.get_next_as_optional().has_value()
        False
        """
        return OptionalStep(list(itertools.islice(self, 1)))

    @span("next", kind="input")
    def _step(self) -> list[Any] | None:
        is_shared = self._engine.layout.size > 1 and self._engine.is_in_its_thread()
        steps, since = self._place.steps, self._engine.agreement.num_raised
        try:
            step = self._read()
        except (Exception, SystemExit) as error:
            # The others sent no message for this step: they hear at their next call.
            if is_shared and not self._engine.agreement.was_told(error, since):
                self._note_steps(steps)
                self._engine.fail("next", error)
            raise
        if step is None:
            return None
        if is_shared:
            self._look_at(step.values[:1])  # the others are parts of the same batch
            order = "".join(f", its keys in the order {order}" for order in self._orders if order)
            self._batch_text = f"{step.rows} rows of {self._kind_text}{order}"
            self._note_steps(steps + 1)
        return step.values

    def _read(self) -> Step | None:
        """Returns the next step of this rank; None at the end."""
        if self._era.is_over:
            raise RankLostError(
                f"an iterator of {self._input.name} was made before a rank was lost, and has not"
                " gone back to the last commit with the others. Make it anew, in the function that"
                " is given to run_elastic, or hold it in the mr.ElasticState."
            )
        return self._reader.read(self._place.epoch, self._place.steps)

    def _look_at(self, batches: Sequence[Any]) -> None:
        """Keeps the kind of the newest batch, the first one, and the orders of keys of all."""
        kind = kind_of(batches[0], self._is_global)
        if kind != self._kind:
            self._kind = kind
            self._kind_text = kind_text(batches[0], self._is_global)
        structure, _ = kind
        self._orders = sorted({key_order(batch, structure) for batch in batches})

    def _note_steps(self, steps: int) -> None:
        """Adds a note of the steps taken, and of the newest batch, to the next header."""
        place = self._place
        epoch = place.epoch
        what = f"the number of steps taken in {self._name_of_epoch}"
        error, batch = "CollectiveMismatchError", self._batch_text
        note = Note(what, placeless_site(), steps, _SAME_STEPS, error, batch)
        self._engine.agreement.notes.count(
            note, place.steps, lambda least: place.go_back(epoch, least), id(place)
        )

    @property
    def _name_of_epoch(self) -> str:
        return f"{self._input.name}, iteration {self._place.epoch}"

    @span("next", kind="input")
    def _agreed_step(self) -> list[Any] | None:
        engine = self._engine
        values, self._forms = engine.cross_replica(engine.make("next", None, self._next_step))
        return values  # type: ignore[no-any-return]

    def _next_step(self, site: CallSite, options: CommunicationOptions) -> NextStep:
        """Returns the call that agrees on a step; reads it."""
        place = self._place
        step = self._read()
        if step is not None:
            replica_ids = self._engine.layout.local_replica_ids
            pairs = zip(replica_ids, step.values, strict=True)
            batches = {i: batch for i, batch in pairs if batch is not END}
            for i, batch in batches.items():
                if i not in self._forms:
                    self._forms[i] = empty_like(batch)
            self._look_at([*batches.values(), *self._forms.values()])
        named = dataclasses.replace(options, name=self._name_of_epoch)
        return NextStep(
            site,
            named,
            step,
            self._forms,
            place.steps,
            self._kind_text,
            self._orders,
            is_global=self._is_global,
            needs_all=any(self._input.drops()),
        )


class OptionalStep:
    """A step that may not be there (`tf.experimental.Optional`)."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def has_value(self) -> bool:
        """Returns whether there was a step."""
        return bool(self._values)

    def get_value(self) -> Any:
        """Returns the step's values.

        Raises
        ------
        ValueError
            There was none.
        """
        if not self._values:
            raise ValueError("there is no value: the distributed dataset has ended.")
        return self._values[0]


def _of_rows(text: str) -> str:
    """Returns what tells of the rows in the text of a `Dataset`: not what is read ahead."""
    return re.sub(r"\.prefetch\(\d+\)", "", text)


def placeless_site() -> CallSite:
    """Returns the site of this call, for its line only: it is the same as every other one."""
    return call_site()._replace(digest=b"")
