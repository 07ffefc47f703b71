"""A call at which ranks only meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.options import CommunicationOptions
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite, FunctionIdentity


class BarrierCall(Call):
    """A call that has ended when all ranks have come to it: nothing travels but the header.

    Parameters
    ----------
    kind : str
    detail : str
        What else must be the same on all ranks.
    function : FunctionIdentity, optional
        That it is about.
    is_anywhere : bool
        Whether ranks may come to it on different lines.
    """

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        detail: str = "",
        function: FunctionIdentity | None = None,
        *,
        is_anywhere: bool = False,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.detail, self.identity = detail, function
        if not is_anywhere:
            self.identify((detail, function and function.digest))


class CloseCall(BarrierCall):
    """The last call of a strategy: the others are gone when they have agreed to it.

    Parameters
    ----------
    agreed : callable
        Called as soon as they have.
    """

    def __init__(
        self, site: CallSite, options: CommunicationOptions, agreed: Callable[[], None]
    ) -> None:
        super().__init__(site, options, "close", is_anywhere=True)
        self._agreed = agreed

    def steps(self, group: Group, calls: Sequence[Call], prepared: None) -> None:
        self._agreed()
