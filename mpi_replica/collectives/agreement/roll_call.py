"""The meeting of all living ranks, in which a loss comes out that only some of them have met."""

from __future__ import annotations

from collections.abc import Callable

from ...core.exceptions import RankLostError
from ...ranks.transport import Transport


class Meeting:
    """Where ranks meet before they go on as if all had come through an exchange.

    A rank that dies may let some of the others through its last exchange, and fail it for others.

    Parameters
    ----------
    transport : Transport
    break_off : callable
        Gives up the strategy with an error.
    """

    def __init__(self, transport: Transport, break_off: Callable[[BaseException], None]) -> None:
        self._transport = transport
        self._break_off = break_off

    def come(self) -> None:
        """Returns where all living ranks come. Collective; nothing where a lost rank ends the job.

        Raises
        ------
        RankLostError
            Some of them have met a loss instead.
        """
        transport = self._transport
        if not transport.is_fault_tolerant or transport.agree(1):
            return
        transport.has_told_loss = True
        transport.revoke()
        loss = transport.loss or RankLostError("a rank has died.")
        self._break_off(loss)
        raise loss
