"""The agreement on whether a signal has come to any rank."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..collectives.agreement.call import Call
from ..collectives.agreement.group import Group
from ..collectives.agreement.site import CallSite
from ..collectives.agreement.steps import Raise, Steps
from ..core.argument_checks import integer
from ..core.exceptions import CollectiveMismatchError
from ..core.layout import sides
from ..core.options import CommunicationOptions

#: The steps travel as such numbers.
MOST_STEP = (1 << 63) - 1


class AnySignal(Call):
    """The call that tells whether any rank got a signal.

    Parameters
    ----------
    step : int
        The same on all ranks. It travels beside the fingerprint: calls that differ in nothing else
        are known already.
    signal : int
        The number of the signal that has come to this rank; 0 where none has.
    """

    kind = "CheckpointManager.exit_if_signalled"
    _STATE = struct.Struct("<qq")

    def __init__(
        self, site: CallSite, options: CommunicationOptions, step: int, signal: int
    ) -> None:
        super().__init__(site, options)
        self._mine = self._STATE.pack(integer("step", step, 0, MOST_STEP), signal)
        self.identify(None)

    def prepare(self, group: Group, calls: Sequence[Call]) -> tuple[bytes, None]:
        return self._mine, None

    def steps(self, group: Group, calls: Sequence[Call], prepared: None) -> Steps[tuple[int, int]]:
        """Returns the first rank that got a signal, and which: 0 where there is none."""
        states = [self._STATE.unpack(data) for data in group.sizes.payloads()]
        steps, signals = zip(*states, strict=True)
        if len(set(steps)) > 1:
            yield Raise(
                CollectiveMismatchError(
                    f"{self.kind} at {self.site.line} got different steps: {sides(steps)}. All"
                    " ranks must be at the same step."
                )
            )
        received = [(rank, signal) for rank, signal in enumerate(signals) if signal]
        return received[0] if received else (0, 0)
