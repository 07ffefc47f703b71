"""The agreement on what replicas have returned from a function that is called for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ..collectives.agreement.call import Call
from ..collectives.agreement.group import Group
from ..collectives.agreement.site import CallSite, FunctionIdentity
from ..collectives.agreement.stand import CallDescription, LeafDescription
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.key_order import key_order, with_sorted_keys
from ..core.layout import Layout
from ..core.options import CommunicationOptions
from ..core.values import component_of, per_replica


class ReturnedValues(Call):
    """What a replica has returned.

    Parameters
    ----------
    kind : str
        The call that called the function.
    value : nest
    replica_id : int, optional
        None where `value` is of several replicas.
    always_wrap : bool
        Whether a leaf is a value of each replica also where all have None or a variable.
    """

    #: Whether it stands for another order of keys than the replica has returned.
    has_other_order = False

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        strategy: StrategyBase,
        value: Any,
        replica_id: int | None = None,
        *,
        always_wrap: bool = False,
    ) -> None:
        self.site = site
        self.options = options
        self.kind = kind
        leaves, self.structure, is_plain = nest.flatten_plain(value)
        if replica_id is not None:
            self.replica_ids = (replica_id,)
            if not is_plain:  # a PerReplica stands for a component here, too
                number = strategy.num_replicas_in_sync
                leaves = [component_of(leaf, replica_id, number) for leaf in leaves]
        self.leaves = leaves
        #: In which the dicts of all replicas are given to the program.
        self.key_order = key_order(value, self.structure)
        self.kinds: tuple[str, ...] = ("value",) * len(leaves)
        if not always_wrap:
            name = strategy.name_of_variable
            kinds = [
                "none" if leaf is None else ("" if is_plain else name(leaf)) or "value"
                for leaf in leaves
            ]
            self.kinds = tuple(kinds)
        self._identify()

    def _identify(self) -> None:
        function = self.identity and self.identity.digest
        self.identify((function, nest.key(self.structure), self.key_order, self.kinds))

    def words(self, position: int = 0) -> CallDescription:
        return super().words(position)._replace(key_order=self.key_order)

    def leaves_in_words(self, position: int) -> tuple[LeafDescription, ...]:
        """Returns the kinds of values that a replica returned."""
        return tuple(LeafDescription(kind) for kind in self.kinds)

    def promote(self, change: Sequence[str]) -> None:
        """Counts leaves that some replicas returned nothing for as values, and orders keys."""
        order, *kinds = change
        self.has_other_order |= order != self.key_order
        self.key_order, self.kinds = order, tuple(kinds)
        self._identify()

    def steps(
        self, group: Group, calls: Sequence[ReturnedValues], prepared: None
    ) -> tuple[str, ...]:
        """Returns what kinds of values the replicas returned."""
        return self.kinds


class RunEnd(ReturnedValues):
    """The end of a run: what a replica returned, and from which function."""

    status = "returned"
    identity: FunctionIdentity

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        function: FunctionIdentity,
        strategy: StrategyBase,
        value: Any,
        replica_id: int | None = None,
    ) -> None:
        self.identity = function
        super().__init__(site, options, "run", strategy, value, replica_id)


def joined(returned: Sequence[ReturnedValues], kinds: Sequence[str], layout: Layout) -> Any:
    """Returns what the replicas of this rank have returned as one nest, alike on all ranks.

    Parameters
    ----------
    returned : sequence of ReturnedValues
        Of each replica, or of all of them.
    kinds : sequence of str
        What the ranks have agreed on.
    layout : Layout
    """
    leaves: list[Any] = []
    for index, kind in enumerate(kinds):
        if kind == "none":
            leaves.append(None)
        elif kind == "value":
            values = [one.leaves[index] for one in returned]
            values *= len(layout.local_replica_ids) // len(values)
            leaves.append(per_replica(values, layout))
        else:
            leaves.append(returned[0].leaves[index])
    structures, rows = [one.structure for one in returned], [one.leaves for one in returned]
    result = nest.merged(structures, rows, leaves, lambda nests: per_replica(nests, layout))
    return with_sorted_keys(result) if returned[0].has_other_order else result


def joined_on_all_ranks(
    strategy: StrategyBase, kind: str, values: Sequence[Any], *, always_wrap: bool = False
) -> Any:
    """Returns what a function has returned for each replica of this rank as one nest. Collective.

    Parameters are those of `ReturnedValues`, with `values` of all of them.

    Raises
    ------
    StructureMismatchError
        They are not alike in structure; on every rank.
    """
    engine = strategy.engine
    ids = engine.layout.local_replica_ids
    calls = [
        engine.make(kind, None, ReturnedValues, kind, strategy, value, i, always_wrap=always_wrap)
        for i, value in zip(ids, values, strict=True)
    ]
    kinds = engine.for_each_replica(calls)[0]
    return joined(cast("list[ReturnedValues]", calls), kinds, engine.layout)
