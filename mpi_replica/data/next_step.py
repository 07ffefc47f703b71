"""The agreement on a step of input whose length is not known."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from ..collectives.broadcasting import digest_of
from ..collectives.call import Call
from ..collectives.callsite import CallSite
from ..collectives.engine import Engine
from ..collectives.judgement import Verdict
from ..collectives.standing import SAME_KIND, CallDescription
from ..errors import CollectiveMismatchError, StructureMismatchError
from ..layout import compressed
from ..options import CommunicationOptions
from .step_reader import Step

__all__ = ["NextStep"]

_Value = TypeVar("_Value", int, str)


class NextStep(Call):
    """The agreement on one step: whether any rank still has input."""

    kind = "next"
    #: One of the four below, rows of the global batch, steps taken, digest of the kind of batch.
    _STATE = struct.Struct("<BqqQ")
    _HAS, _ENDED, _ENDED_UNSEEN, _ENDS_ALL = 0, 1, 2, 3

    def __init__(
        self,
        found: Step | None,
        spec: Any,
        taken: int,
        kind_text: str,
        *,
        is_global: bool,
        needs_all: bool,
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(site, options)
        self.found = found
        self.spec = spec
        self.taken = taken
        self.is_global = is_global
        self.needs_all = needs_all
        self.kind_text = kind_text
        self.identify(is_global)

    def words(self, position: int = 0) -> CallDescription:
        """Return the call in words, for messages."""
        return CallDescription(self.kind, "", self.site, self.options.name)

    def perform(self, engine: Engine, calls: Sequence[Call]) -> list[Any]:
        """Agree; return this rank's values and their spec, None for values at the end."""
        state, number = self._ended() if self.found is None else (self._HAS, self.found[1])
        digest = digest_of(self.kind_text) if self.kind_text else 0
        mine = self._STATE.pack(state, number, self.taken, digest)
        engine.agreement.agree(calls, mine)
        of_ranks = [self._STATE.unpack(data) for data in engine.agreement.payloads()]
        states, rows, taken, digests = zip(*of_ranks, strict=True)
        self._require_same_place(engine, taken)
        if self._HAS not in states or self._ENDS_ALL in states:
            return [(None, self.spec)]
        if len({*digests} - {0}) > 1:
            self._tell_kinds(engine)
        spec = self.spec
        if self._ENDED_UNSEEN in states:  # such a rank can't tell what its replicas' nothing is
            with engine.moving(self):
                specs = engine.carry(engine.transport.all_gather_bytes, _packed(spec))
            spec = pickle.loads(specs[states.index(self._HAS)])
            if isinstance(spec, TypeError):
                _raise(engine, spec)
        if self.is_global:
            self._require_same_rows(engine, rows)
        values = self.found[0] if self.found else [spec] * len(self.replica_ids)
        return [(values, spec)]

    def _ended(self) -> tuple[int, int]:
        if self.needs_all:
            return self._ENDS_ALL, -1
        return self._ENDED_UNSEEN if self.spec is None else self._ENDED, -1

    def _tell_kinds(self, engine: Engine) -> NoReturn:
        """Raise on all ranks that their batches are not of one kind."""
        with engine.moving(self):
            gather = engine.transport.all_gather_bytes
            texts = [text.decode() for text in engine.carry(gather, self.kind_text.encode())]
        sides = _sides(texts, lambda text: text or "none")
        text = (
            f"the batches of {self.options.name} differ between ranks at {self.site.line}: {sides}."
        )
        _raise(engine, StructureMismatchError(f"{text} {SAME_KIND}"))

    def _require_same_place(self, engine: Engine, taken: Sequence[int]) -> None:
        if len(set(taken)) > 1:
            error = CollectiveMismatchError(
                f"the ranks have taken different numbers of steps of {self.options.name} at"
                f" {self.site.line}: {_sides(taken, str)}. Call next() equally often on each rank,"
                " and load_state_dict with the same state."
            )
            _raise(engine, error)

    def _require_same_rows(self, engine: Engine, rows: Sequence[int]) -> None:
        if len(set(rows)) > 1:
            sides = _sides(rows, lambda n: "no batch" if n < 0 else f"a batch of {n} rows")
            error = StructureMismatchError(
                f"the global batches of a distributed dataset differ between ranks at"
                f" {self.site.line}: {sides}. All ranks must distribute the same dataset; use"
                " distribute_datasets_from_function for a dataset of each rank's own."
            )
            _raise(engine, error)


def _packed(spec: Any) -> bytes:
    """Return a batch without rows as bytes, or an error that says why it can't be."""
    try:
        return pickle.dumps(spec, 5)
    except Exception as error:
        unfit = TypeError(
            "a rank without input can't be told what the batches of the others are:"
            f" {type(error).__name__}: {error}. Give batches in containers that pickle knows, such"
            " as a dict, or input to every rank."
        )
        return pickle.dumps(unfit, 5)


def _raise(engine: Engine, error: Exception) -> NoReturn:
    """Raise what every rank raises here, with the same text."""
    engine.agreement.raise_agreed(error, Verdict("raise", error))


def _sides(values: Sequence[_Value], words: Callable[[_Value], str]) -> str:
    """Return which ranks have which value."""
    return ", ".join(
        f"{words(value)} on ranks"
        f" {compressed(rank for rank, found in enumerate(values) if found == value)}"
        for value in sorted(set(values))
    )
