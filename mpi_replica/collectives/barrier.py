"""A call at which ranks only meet."""

from __future__ import annotations

from collections.abc import Sequence

from ..options import CommunicationOptions
from .call import Call
from .callsite import CallSite
from .engine import Engine
from .standing import CallDescription

__all__ = ["Barrier"]


class Barrier(Call):
    """A call that has ended when all ranks have come to it: nothing travels but the header."""

    kind = "barrier"

    def __init__(self, site: CallSite, options: CommunicationOptions) -> None:
        super().__init__(site, options)
        self.identify(None)

    def words(self, position: int = 0) -> CallDescription:
        return CallDescription(self.kind, "", self.site, self.options.name)

    def perform(self, engine: Engine, calls: Sequence[Call]) -> list[None]:
        engine.agreement.agree(calls)
        return [None]
