"""Hosts and ranks in the words of tf's cluster resolvers."""

from __future__ import annotations

from ..ranks.transport import Transport


class MPIClusterResolver:
    """What a `tf.distribute.cluster_resolver.ClusterResolver` tells, read off the communicator."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def task_type(self) -> str:
        """Always "worker"."""
        return "worker"

    @property
    def task_id(self) -> int:
        """The rank."""
        return self._transport.rank

    def cluster_spec(self) -> dict[str, list[str]]:
        """Returns the host of each rank, in rank order, under "worker"."""
        return {"worker": list(self._transport.hosts)}
