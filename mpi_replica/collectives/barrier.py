"""A call at which ranks only meet."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import nest
from ..core.options import CommunicationOptions
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite, FunctionIdentity
from .agreement.stand import CallDescription


class BarrierCall(Call):
    """A call that has ended when all ranks have come to it: nothing travels but the header.

    Parameters
    ----------
    kind : str
    detail : str
        What else must be the same on all ranks.
    function : FunctionIdentity, optional
        That it is about.
    structure : nest.Structure, optional
        Of a nest that must be alike on all ranks.
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
        structure: nest.Structure | None = None,
        *,
        is_anywhere: bool = False,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.detail, self.identity = detail, function
        if structure is not None:
            self.structure = structure
        if not is_anywhere:
            self.identify((detail, function and function.digest, nest.key(self.structure)))


class ComparingBarrier(BarrierCall):
    """A barrier whose result is whether all ranks have told the same few bytes.

    `structures` has that of each local replica's nest; or one, where they have none.
    """

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        told: bytes,
        structures: Sequence[nest.Structure],
    ) -> None:
        self._told, self._structures = told, structures
        super().__init__(site, options, kind, structure=structures[0])
        self.agrees = len(set(map(nest.structure_text, structures))) == 1

    def words(self, position: int = 0) -> CallDescription:
        self.structure = self._structures[position]
        return super().words(position)

    def prepare(self, group: Group, calls: Sequence[Call]) -> tuple[bytes, None]:
        return self._told, None

    def steps(self, group: Group, calls: Sequence[Call], prepared: None) -> bool:
        return all([one == self._told for one in group.sizes.payloads()])
