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
from ..errors import StructureMismatchError
from ..layout import compressed
from ..options import CommunicationOptions

__all__ = ["NextStep", "Step"]

#: A step of this rank: one value for each local replica, and the rows of the whole global batch.
Step = tuple[list[Any], int]


class NextStep(Call):
    """The agreement on one step: whether any rank still has input."""

    kind = "next"
    _STATE = struct.Struct("<Bq")
    _HAS, _ENDED, _ENDED_UNSEEN = 0, 1, 2

    def __init__(
        self,
        found: Step | None,
        spec: Any,
        is_global: bool,
        taken: Callable[[], None],
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(site, options)
        self.found = found
        self.spec = spec
        self.is_global = is_global
        self.taken = taken
        self.identify(is_global)

    def words(self, position: int = 0) -> CallDescription:
        """Return the call in words, for messages."""
        return CallDescription(self.kind, "", self.site, self.options.name)

    def perform(self, engine: Engine, calls: Sequence[Call]) -> list[Any]:
        """Agree; return this rank's values and their spec, None for values at the end."""
        if self.found is not None:
            mine = self._STATE.pack(self._HAS, self.found[1])
        else:
            ended = self._ENDED_UNSEEN if self.spec is None else self._ENDED
            mine = self._STATE.pack(ended, -1)
        engine.agreement.agree(calls, mine)
        states = [self._STATE.unpack(data) for data in engine.agreement.payloads()]
        self.taken()
        kinds = [kind for kind, _ in states]
        if self._HAS not in kinds:
            return [(None, self.spec)]
        spec = self.spec
        if self._ENDED_UNSEEN in kinds:  # such a rank can't tell what its replicas' nothing is
            with engine.moving(self):
                specs = engine.carry(engine.transport.all_gather_bytes, pickle.dumps(spec, 5))
            spec = pickle.loads(specs[kinds.index(self._HAS)])
        if self.is_global and len(set(states)) > 1:
            sides = ", ".join(
                f"{'no batch' if rows < 0 else f'a batch of {rows} rows'} on ranks"
                f" {compressed(rank for rank, state in enumerate(states) if state[1] == rows)}"
                for rows in sorted({rows for _, rows in states})
            )
            raise StructureMismatchError(
                f"the global batches of a distributed dataset differ between ranks at"
                f" {self.site.line}: {sides}. All ranks must distribute the same dataset; use"
                " distribute_datasets_from_function for a dataset of each rank's own."
            )
        values = self.found[0] if self.found else [spec] * len(self.replica_ids)
        return [(values, spec)]
