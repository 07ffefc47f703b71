"""The calls by which all ranks commit: copies of what belongs to replicas go to other ranks."""

from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...collectives.agreement.call import Call
from ...collectives.agreement.group import Group
from ...collectives.agreement.site import CallSite, FunctionIdentity
from ...collectives.agreement.steps import PassOn, Steps
from ...collectives.barrier import BarrierCall
from ...core.layout import Layout
from ...core.options import CommunicationOptions
from ...ranks.transport import Messages
from .buddies import buddy_of
from .snapshot import ReplicaPart, Snapshot, are_empty

_SIZE = struct.Struct("<q")


class Guarded(NamedTuple):
    """What a rank knows after a commit of the replicas of others."""

    #: Loads its copies, by replica. Not done where no rank is lost: an error would be one of this
    #: rank alone.
    kept: Callable[[], Mapping[int, ReplicaPart]]
    #: The replicas to which nothing belongs, on all ranks.
    empty: frozenset[int]


class Beginning(BarrierCall):
    """The call at which all ranks begin; each tells whether something belongs to its replicas.

    Parameters
    ----------
    function : FunctionIdentity
        That trains.
    is_empty : bool
        Whether nothing does.
    """

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        function: FunctionIdentity,
        is_empty: bool,
    ) -> None:
        super().__init__(site, options, "run_elastic", "begin of ", function)
        self._mine = b"\0" if is_empty else b"\1"

    def prepare(self, group: Group, calls: Sequence[Call]) -> tuple[bytes, None]:
        """Tells whether something belongs to the replicas of this rank."""
        return self._mine, None

    def steps(self, group: Group, calls: Sequence[Call], prepared: None) -> frozenset[int]:
        """Returns the replicas to which nothing belongs."""
        return _empty(group.layout, [data[0] for data in group.sizes.payloads()])


class Committing(Call):
    """The exchange of what belongs to replicas.

    Parameters
    ----------
    names : sequence of str
        Those of the objects.
    snapshot : Snapshot or None
        What is committed on this rank; None where a lost rank ends the job, and nothing is kept.
    """

    kind = "ElasticState.commit"

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        names: Sequence[str],
        snapshot: Snapshot | None,
    ) -> None:
        super().__init__(site, options)
        self.detail = ", ".join(names)
        own = {} if snapshot is None else snapshot.own
        self.data = b"" if are_empty(own.values()) else pickle.dumps(own, 5)
        self.snapshot = snapshot
        self.identify(tuple(names))

    def prepare(self, group: Group, calls: Sequence[Call]) -> tuple[bytes, None]:
        """Tells how much belongs to the replicas of this rank."""
        return _SIZE.pack(len(self.data)) if self.snapshot is not None else b"", None

    def steps(self, group: Group, calls: Sequence[Call], prepared: None) -> Steps[Guarded | None]:
        """Returns what this rank keeps for others."""
        if self.snapshot is None:
            return None
        layout = group.layout
        sizes = [_SIZE.unpack(data)[0] for data in group.sizes.payloads()]
        empty = _empty(layout, sizes)
        copies: Messages = {}
        if any(sizes) and layout.size > 1:
            buddies = [buddy_of(rank, group.hosts) for rank in range(layout.size)]
            coming = {
                rank: sizes[rank]
                for rank, buddy in enumerate(buddies)
                if buddy == layout.rank and sizes[rank]
            }
            copies = yield PassOn({buddies[layout.rank]: self.data}, coming)
        return Guarded(functools.partial(_load, copies), empty)


def _empty(layout: Layout, sizes: Sequence[int]) -> frozenset[int]:
    """Returns the replicas of the ranks that have nothing of theirs."""
    return frozenset(
        i for rank, size in enumerate(sizes) if not size for i in layout.replica_ids(rank)
    )


def _load(copies: Messages) -> dict[int, ReplicaPart]:
    return {i: part for data in copies.values() for i, part in pickle.loads(data).items()}
