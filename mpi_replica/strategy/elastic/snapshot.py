"""A copy of a program's state in memory: what it was at a commit, and how it is put back.

What is mirrored is on every rank anyway. What belongs to replicas (`PerReplica` values, variables
that are synchronized on read, random numbers) is held apart, replica by replica, so that it can
move with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from ...checkpoint.array_kinds import order_in_memory
from ...checkpoint.comparison import Comparison, variables_in
from ...checkpoint.decoder import replicas_name
from ...checkpoint.encoder import Encoder
from ...checkpoint.index import ArrayRecord, Index
from ...collectives.strategy_base import StrategyBase
from ...core.abstract_variable import AbstractVariable
from ...core.array_ways import Array
from ...core.exceptions import CheckpointError
from ...core.layout import Layout
from ...core.object_state import places_of
from ...core.values import Mirrored, PerReplica
from ...data.distributed_dataset import go_back, states_at_commit
from ...data.epochs import DatasetKey, epochs_begun, put_epochs_back
from ...replicas.assignment import Assignable, lose_later_values
from .aliases import Aliases, aliases_for_another_rank, aliases_of, with_aliases
from .replica_objects import Held, Place, for_another_rank, held_in, moved, values_in
from .value_kinds import ValueKind, kinds_for_another_rank, kinds_of, of_kinds

# What stands for the values of all variables: no object can have this name.
_VARIABLES = "the strategy's variables"


class SharedPart(NamedTuple):
    """The part of a snapshot that is the same on all ranks."""

    #: What stands for each object, as `Encoder.encode` gives it.
    state: dict[str, Any]
    #: The arrays that it refers to.
    arrays: dict[str, Array]
    #: The state of the strategy's random numbers, without those of the replicas.
    generators: Mapping[str, Any]
    #: Where each distributed dataset stood, by name.
    datasets: Mapping[str, Mapping[str, Any]]
    #: The objects of this rank's replicas, themselves: their state may have changed since.
    held: Held
    #: How many epochs datasets that are not distributed had begun above the replicas.
    epochs: Mapping[DatasetKey, int] = {}
    #: The types of values that what stands for them does not tell.
    kinds: Mapping[Place, ValueKind] = {}
    #: What stood in several places.
    aliases: Sequence[Aliases] = ()
    #: The identities of variables that were in none of the objects.
    beside: Set[str] = frozenset()

    def for_another_rank(self) -> SharedPart:
        """Returns what a rank needs that has none."""
        return self._replace(
            held=for_another_rank(self.held),
            kinds=kinds_for_another_rank(self.kinds),
            aliases=aliases_for_another_rank(self.aliases),
        )


class ReplicaPart(NamedTuple):
    """The part that belongs to one replica."""

    #: What stands for its component of each value, by the name by which the state refers to it.
    components: dict[str, Any]
    #: The arrays that it refers to.
    arrays: dict[str, Array]
    #: The state of its random numbers, if they were used.
    generator: Any = None
    #: How many epochs of datasets it had begun.
    epochs: Mapping[DatasetKey, int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not self.components and self.generator is None and not self.epochs


@dataclasses.dataclass
class Snapshot:
    """The state of a program at one moment, as one rank holds it."""

    shared: SharedPart
    #: Of the replicas of this rank.
    own: dict[int, ReplicaPart]
    #: Its own copies of arrays that the program can change, by name.
    copies: dict[str, Array]


def take(
    strategy: StrategyBase, objects: Mapping[str, Any], reuse: Snapshot | None = None
) -> Snapshot:
    """Returns a snapshot of the objects and of the strategy's random numbers. Not collective.

    Arrays of variables are held and not copied: an assignment puts a new array in their place.

    Parameters
    ----------
    strategy : Strategy
    objects : mapping
        What a `Checkpoint` can hold.
    reuse : Snapshot, optional
        One that nobody needs any more: its copies are overwritten.

    Raises
    ------
    TypeError, ValueError
        As for ``Checkpoint.save``.
    """
    engine = strategy.engine
    ids = engine.layout.local_replica_ids
    # The arrays that hold what others look into, and that never change.
    lasting: dict[int, Array] = {}

    def held(value: Any) -> Array:
        array = np.asarray(value)
        owner = _owner(array)
        if not owner.flags.writeable:
            lasting[id(owner)] = owner
        return array

    def plain(value: Any) -> Any:
        if isinstance(value, Assignable):
            return held(np.asarray(value.shared_value(), value.dtype))  # in its byte order
        return value.value if isinstance(value, Mirrored) else value

    def components(value: Any) -> Mapping[int, Any] | None:
        if isinstance(value, PerReplica):
            value.require(engine.layout.num_replicas)
            return dict(zip(ids, value.components(ids), strict=True))
        if isinstance(value, Assignable) and not value.is_mirrored:
            parts = value.components(ids) or ()
            return {i: held(part) for i, part in zip(ids, parts, strict=True)}
        return None

    def identity_of(value: Any) -> str | None:
        is_own = isinstance(value, Assignable) and value.strategy is strategy
        return value.identity if is_own else None

    encoder = Encoder(plain, components, identity_of=identity_of)
    beside = variables_beside(strategy, objects)
    everything = {**objects, _VARIABLES: beside}
    state = {name: encoder.encode(value, f"state.{name}") for name, value in everything.items()}
    state[_VARIABLES] = encoder.variables
    before = {} if reuse is None else reuse.copies
    copies: dict[str, Array] = {}

    def lasting_copy(name: str, array: Array) -> Array:
        if id(_owner(array)) in lasting:
            return array
        kept = before.get(name)
        if (
            kept is None
            or kept.shape != array.shape
            or kept.dtype != array.dtype
            or order_in_memory(kept) != order_in_memory(array)
            or not array.flags.forc  # in another order than these two
        ):
            kept = np.empty_like(array)
        np.copyto(kept, array)
        copies[name] = kept
        return kept

    arrays = {name: lasting_copy(name, array) for name, array in encoder.arrays.items()}
    generators = strategy.generators.state(ids)
    own = {i: ReplicaPart({}, {}, generators["replicas"].get(str(i)), epochs_begun(i)) for i in ids}
    for name, of_ids in encoder.of_replicas.items():
        for i in ids:
            own[i].components[name] = of_ids[str(i)]
    for name, array in encoder.own_arrays.items():
        replica_id = int(name.rsplit(".", 2)[1])  # as the encoder names them
        own[replica_id].arrays[name] = lasting_copy(name, array)
    # iterators among them, which have places of their own
    inside = {id(leaf) for value in objects.values() for _, leaf in places_of(value)}
    values = [*values_in(objects)]
    shared = SharedPart(
        state,
        arrays,
        {**generators, "replicas": {}},
        states_at_commit(engine.datasets, inside),
        held_in(objects),
        epochs_begun(None),
        kinds_of(values),
        aliases_of(values),
        frozenset(beside),
    )
    return Snapshot(shared, own, copies)


def put_back(
    strategy: StrategyBase,
    objects: Mapping[str, Any],
    shared: SharedPart,
    own: Mapping[int, ReplicaPart],
) -> dict[str, Any]:
    """Puts objects, random numbers and datasets back to what they were. Not collective.

    Parameters
    ----------
    strategy : Strategy
    objects : mapping
        Those of `take`, or their counterparts on a rank that has not trained before.
    shared : SharedPart
    own : mapping
        Of each replica that this rank hosts now.

    Returns
    -------
    dict
        The objects, with new ones for what can't be changed.

    Raises
    ------
    CheckpointError
        The objects are others than at the commit.
    """
    engine = strategy.engine
    arrays = dict(shared.arrays)
    of_replicas: dict[str, dict[str, Any]] = {}
    for replica_id, part in own.items():
        arrays |= part.arrays
        for name, value in part.components.items():
            of_replicas.setdefault(name, {})[str(replica_id)] = value

    def read(name: str, array: Array) -> None:
        np.copyto(array, arrays[name])

    known, values = _known_variables(strategy), shared.state[_VARIABLES]
    lose_later_values(known[identity] for identity in known.keys() - values.keys())
    variables = {
        identity: known[identity]
        for identity, saved in values.items()
        if identity in known and _has_all(saved, engine.layout, of_replicas)
    }
    if not values.keys() - shared.beside <= known.keys():
        # A spare lacks what was put into the state while it waited: what stands there since before
        # gets the values of that, and not its own.
        standing = {variable.identity for variable in _own_variables_in(strategy, objects)}
        variables = {i: v for i, v in variables.items() if i not in standing & shared.beside}
    # those that are gone, or can't be had, are not made anew
    of_variables = {identity: values[identity] for identity in variables}
    # First: an object may look at variables where it gets its state.
    index = Index(
        {_VARIABLES: of_variables, **{n: s for n, s in shared.state.items() if n != _VARIABLES}},
        {name: ArrayRecord.of(array) for name, array in arrays.items()},
        engine.layout.num_replicas,
        [],
        of_replicas,
    )
    everything = {_VARIABLES: variables, **moved(objects, shared.held, engine.layout)}
    comparison = Comparison(
        index, everything, read, engine.layout, variables=variables, is_exact=True
    )
    problems = comparison.problems()
    if problems:
        raise CheckpointError(
            f"the state can't be put back to its last commit: {problems}. Make the objects of an"
            " ElasticState before run_elastic, and change what is in them, not which they are."
        )
    restored = comparison.put_back()
    del restored[_VARIABLES]
    restored = with_aliases(of_kinds(restored, shared.kinds), shared.aliases)
    replicas = {str(i): part.generator for i, part in own.items() if part.generator is not None}
    strategy.generators.restore({**shared.generators, "replicas": replicas})
    go_back(engine.datasets, shared.datasets)
    put_epochs_back({None: shared.epochs, **{i: part.epochs for i, part in own.items()}})
    return restored


def _has_all(saved: Any, layout: Layout, of_replicas: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns whether there is what a variable needs: some ranks may have thrown it away before."""
    name = replicas_name(saved)
    if name is None:
        return True
    return all(str(i) in of_replicas.get(name, {}) for i in layout.local_replica_ids)


def variables_beside(strategy: StrategyBase, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the strategy's variables that are not among the objects, by what tells them apart.

    Without those that are lost: a checkpoint that is gone back to has only the objects.
    """
    inside = {variable.identity for variable in _own_variables_in(strategy, objects)}
    known = _known_variables(strategy)
    return {
        identity: known[identity]
        for identity in sorted(known)
        if identity not in inside and not known[identity].is_lost
    }


def _own_variables_in(strategy: StrategyBase, objects: Mapping[str, Any]) -> list[AbstractVariable]:
    """Returns the strategy's variables among the objects: those of another have names as these."""
    return [variable for variable in variables_in(objects) if variable.strategy is strategy]


def _known_variables(strategy: StrategyBase) -> dict[str, Any]:
    """Returns the strategy's variables that are in use, by what tells them apart on all ranks."""
    return {variable.identity: variable for variable in strategy.engine.variables.values()}


def _owner(array: Array) -> Array:
    """Returns the array in whose memory `array` looks."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def are_empty(parts: Iterable[ReplicaPart]) -> bool:
    """Returns whether nothing belongs to any of the replicas."""
    return all(part.is_empty for part in parts)
