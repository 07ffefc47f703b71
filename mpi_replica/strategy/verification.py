"""``strategy.verify``: whether mirrored state is the same on all ranks."""

from __future__ import annotations

from typing import Any

from ..collectives.agreement.site import call_site
from ..collectives.strategy_base import StrategyBase
from ..collectives.verify import Verification
from ..core.argument_checks import integer
from ..core.context import require_cross_replica
from ..core.options import CommunicationOptions


class Verifying(StrategyBase):
    """The part of a strategy that compares state between its ranks."""

    def verify(
        self, value: Any, *, every: int = 1, options: CommunicationOptions | None = None
    ) -> None:
        """Raise where what should be the same on all ranks, or replicas, is not.

        Collective: all ranks call it, in the same order.

        Parameters
        ----------
        value : nest
            Mirrored variables, `Mirrored` values, arrays of any library, numbers, strings, bytes
            and None, also in modules of equinox and flax; functions in these are compared by name,
            place and code, and not by what they hold. Of modules of torch, optimizers and other
            objects with ``state_dict()``, and of generators, the state is compared. Of a
            `PerReplica`, as ``run`` returns it, the components of all replicas are compared.
            Variables that are synchronized on read are left out: they differ by design.
        every : int, default 1
            With k: does it on the first call from a place of the program, and then on each k-th;
            the calls between cost nothing.
        options : CommunicationOptions, optional
            Fields that are set win over those of the strategy. A name stands for the place.

        Raises
        ------
        DivergenceError
            A leaf differs: on every rank, with the same text, which names it, as
            ``value['0.weight']`` of a module, the replicas, and the first element with its values.
            The strategy works on.
        StructureMismatchError, CollectiveMismatchError
            The ranks passed different nests or variables, or made different calls.
        ValueError
            A `PerReplica` is another strategy's; `every` is less than 1.
        TypeError
            A leaf is an object that can't be compared bit by bit; `every` is no integer.
        ContextError
            Called in a replica, or from another thread.

        Notes
        -----
        Compared bit by bit: 0.0 differs from -0.0, and a NaN only from one of other bits. Replicas
        of one rank share its state, all but `PerReplica` values. One message of 256 bytes a rank,
        and the time to read the state, 20 to 30 ms for 100 MB; where it differs, some messages of a
        few kB.
        ``tf.distribute`` has no counterpart.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> with strategy.scope():
        ...     weights = mr.Variable([0.5, 0.25])
        >>> strategy.verify({"weights": weights, "step": 3})
        """
        require_cross_replica(self, "verify")
        engine = self.engine
        engine.check_thread("verify")
        try:
            step = integer("every", every, 1)
            name = (engine.options if options is None else engine.options.merge(options)).name
        except Exception as error:
            engine.fail("verify", error)
        if step > 1:
            place = call_site(1).digest if name is None else name
            count = engine.verifications[place]
            engine.verifications[place] = count + 1
            if count % step:
                return
        detail = "" if step == 1 else f"every={step}"

        name_of, layout = self.name_of_variable, self.engine.layout
        engine.cross_replica(
            engine.make("verify", options, Verification, {"value": value}, detail, name_of, layout)
        )
