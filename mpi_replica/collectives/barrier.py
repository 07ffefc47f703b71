"""A call at which ranks only meet."""

from __future__ import annotations

from ..core.options import CommunicationOptions
from .agreement.call import Call
from .agreement.site import CallSite


class BarrierCall(Call):
    """A call that has ended when all ranks have come to it: nothing travels but the header.

    Parameters
    ----------
    kind : str
    is_anywhere : bool
        Whether ranks may come to it on different lines.
    """

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        *,
        is_anywhere: bool = False,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        if not is_anywhere:
            self.identify(None)
