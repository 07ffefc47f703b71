"""The agreement at the end of a run: what the replicas returned, and from which function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..collectives.agreement.call import Call
from ..collectives.agreement.group import Group
from ..collectives.agreement.site import CallSite, FunctionIdentity
from ..collectives.agreement.stand import LeafDescription
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.options import CommunicationOptions
from ..core.values import component_of


class RunEnd(Call):
    """The end of a run: what a replica returned, and from which function."""

    kind = "run"
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
        name = strategy.name_of_variable
        self.kinds = tuple(
            [
                "none" if leaf is None else ("" if is_plain else name(leaf)) or "value"
                for leaf in leaves
            ]
        )
        self._identify()

    def _identify(self) -> None:
        self.identify((self.identity.digest, nest.key(self.structure), self.kinds))

    def leaves_in_words(self, position: int) -> tuple[LeafDescription, ...]:
        """Returns the kinds of values that a replica returned."""
        return tuple(LeafDescription(kind) for kind in self.kinds)

    def promote(self, change: Sequence[str]) -> None:
        """Counts leaves that some replicas returned nothing for as values."""
        self.kinds = tuple(change)
        self._identify()

    def steps(self, group: Group, calls: Sequence[RunEnd], prepared: None) -> tuple[str, ...]:
        """Returns what kinds of values the replicas returned."""
        return self.kinds
