"""The agreement at the end of a run: what the replicas returned, and from which function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..collectives.agreement.call import Call
from ..collectives.agreement.group import Group
from ..collectives.agreement.site import CallSite, FunctionIdentity
from ..collectives.agreement.stand import CallDescription, LeafDescription
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.key_order import key_order
from ..core.options import CommunicationOptions
from ..core.values import component_of


class RunEnd(Call):
    """The end of a run: what a replica returned, and from which function."""

    kind = "run"
    status = "returned"
    identity: FunctionIdentity
    #: Whether it stands for another order of keys than the replica has returned.
    has_other_order = False

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        function: FunctionIdentity,
        strategy: StrategyBase,
        value: Any,
        replica_id: int | None = None,
    ) -> None:
        self.site = site
        self.options = options
        self.identity = function
        leaves, self.structure, is_plain = nest.flatten_plain(value)
        if replica_id is not None:
            self.replica_ids = (replica_id,)
            if not is_plain:  # a PerReplica stands for a component here, too
                number = strategy.num_replicas_in_sync
                leaves = [component_of(leaf, replica_id, number) for leaf in leaves]
        self.leaves = leaves
        #: In which the dicts of all replicas are given to the program.
        self.key_order = key_order(value, self.structure)
        name = strategy.name_of_variable
        self.kinds = tuple(
            [
                "none" if leaf is None else ("" if is_plain else name(leaf)) or "value"
                for leaf in leaves
            ]
        )
        self._identify()

    def _identify(self) -> None:
        self.identify((self.identity.digest, nest.key(self.structure), self.key_order, self.kinds))

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

    def steps(self, group: Group, calls: Sequence[RunEnd], prepared: None) -> tuple[str, ...]:
        """Returns what kinds of values the replicas returned."""
        return self.kinds
