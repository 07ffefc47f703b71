"""What the context machine must know of a strategy, and of the context of a replica."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from .randomness import Generators


class CallsPerReplica(Protocol):
    """What notes that a function of the program is called for a replica, and not for all."""

    #: While it is: that function, the call that calls it, and how, in words.
    per_replica_call: tuple[str, str, str] | None


class CountsEpochs(Protocol):
    """What counts the epochs of a dataset."""

    #: How many have begun in a replica, or above the replicas: None.
    begun: Counter[int | None]


class AbstractStrategy:
    """A strategy, to who asks which one holds."""

    is_default: bool
    #: Its random numbers.
    generators: Generators

    @property
    def per_replica_call(self) -> tuple[str, str, str] | None:
        """While it calls a function for each replica of a rank: that function and the call."""
        raise NotImplementedError

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        raise NotImplementedError

    @property
    def is_in_run(self) -> bool:
        """Whether a step is under way."""
        raise NotImplementedError

    @property
    def is_between_replicas(self) -> bool:
        """Whether a step is under way, and the code that runs now is in none of its replicas."""
        raise NotImplementedError

    def name_of_variable(self, value: Any) -> str | None:
        """Returns a name for a variable; None for anything else."""
        raise NotImplementedError


class AbstractReplicaContext:
    """The context of a replica, to who asks which one holds."""

    @property
    def strategy(self) -> AbstractStrategy:
        """Its strategy."""
        raise NotImplementedError

    @property
    def replica_id(self) -> int:
        """The id of the replica."""
        raise NotImplementedError

    @property
    def replica_id_in_sync_group(self) -> int:
        """The id of the replica, for what belongs to it alone."""
        raise NotImplementedError

    def require_run(self, what: str) -> None:
        """Raises where it was made by hand, of one of several replicas."""
        raise NotImplementedError

    def will_write(self, storage: Any) -> None:
        """Notes that the replica writes what it alone has of a variable."""
        raise NotImplementedError

    def will_begin_epoch(self, epochs: CountsEpochs) -> None:
        """Notes that the replica begins an epoch of a dataset."""
        raise NotImplementedError

    def meet(self, call: Any) -> Any:
        """Waits until all replicas are at a call, and returns its result."""
        raise NotImplementedError
