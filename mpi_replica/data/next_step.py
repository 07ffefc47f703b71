"""The agreement on a step of input whose length is not known."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ..collectives.call import Call
from ..collectives.callsite import CallSite
from ..collectives.engine import Engine
from ..collectives.standing import CallDescription
from ..errors import CollectiveMismatchError, StructureMismatchError
from ..layout import compressed
from ..options import CommunicationOptions
from .reading import Step

__all__ = ["NextStep"]


class NextStep(Call):
    """The agreement on one step: whether any rank still has input."""

    kind = "next"
    _STATE = struct.Struct("<Bqq")
    _HAS, _ENDED, _ENDED_UNSEEN = 0, 1, 2

    def __init__(
        self,
        found: Step | None,
        spec: Any,
        taken: int,
        is_global: bool,
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(site, options)
        self.found = found
        self.spec = spec
        self.taken = taken
        self.is_global = is_global
        self.identify(is_global)

    def words(self, position: int = 0) -> CallDescription:
        """Return the call in words, for messages."""
        return CallDescription(self.kind, "", self.site, self.options.name)

    def perform(self, engine: Engine, calls: Sequence[Call]) -> list[Any]:
        """Agree; return this rank's values and their spec, None for values at the end."""
        if self.found is not None:
            mine = self._STATE.pack(self._HAS, self.found[1], self.taken)
        else:
            ended = self._ENDED_UNSEEN if self.spec is None else self._ENDED
            mine = self._STATE.pack(ended, -1, self.taken)
        engine.agreement.agree(calls, mine)
        states = [self._STATE.unpack(data) for data in engine.agreement.payloads()]
        kinds = [kind for kind, _, _ in states]
        self._require_same_place([taken for _, _, taken in states])
        if self._HAS not in kinds:
            return [(None, self.spec)]
        spec = self.spec
        if self._ENDED_UNSEEN in kinds:  # such a rank can't tell what its replicas' nothing is
            with engine.moving(self):
                specs = engine.carry(engine.transport.all_gather_bytes, pickle.dumps(spec, 5))
            spec = pickle.loads(specs[kinds.index(self._HAS)])
        if self.is_global:
            self._require_same_rows([rows for _, rows, _ in states])
        values = self.found[0] if self.found else [spec] * len(self.replica_ids)
        return [(values, spec)]

    def _require_same_place(self, taken: Sequence[int]) -> None:
        if len(set(taken)) > 1:
            raise CollectiveMismatchError(
                f"the ranks have taken different numbers of steps of {self.options.name} at"
                f" {self.site.line}: {_sides(taken, str)}. Call next() equally often on each rank,"
                " and load_state_dict with the same state."
            )

    def _require_same_rows(self, rows: Sequence[int]) -> None:
        if len(set(rows)) > 1:
            sides = _sides(rows, lambda n: "no batch" if n < 0 else f"a batch of {n} rows")
            raise StructureMismatchError(
                f"the global batches of a distributed dataset differ between ranks at"
                f" {self.site.line}: {sides}. All ranks must distribute the same dataset; use"
                " distribute_datasets_from_function for a dataset of each rank's own."
            )


def _sides(numbers: Sequence[int], words: Callable[[int], str]) -> str:
    """Return which ranks have which number."""
    return ", ".join(
        f"{words(number)} on ranks"
        f" {compressed(rank for rank, found in enumerate(numbers) if found == number)}"
        for number in sorted(set(numbers))
    )
