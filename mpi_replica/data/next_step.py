"""The agreement on a step of input whose length is not known."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

from ..collectives.agreement.call import Call
from ..collectives.agreement.group import Group
from ..collectives.agreement.site import CallSite
from ..collectives.agreement.stand import SAME_KIND
from ..collectives.agreement.steps import Agree, Raise, Steps, Texts
from ..core.digests import digest_of
from ..core.exceptions import (
    CollectiveMismatchError,
    DivergenceError,
    StructureMismatchError,
    in_words,
)
from ..core.key_order import with_sorted_keys
from ..core.layout import sides
from ..core.options import CommunicationOptions
from .batches import empty_like
from .pipelines import END
from .step_reader import Step


class NextStep(Call):
    """The agreement on one step: whether any rank still has input."""

    kind = "next"
    #: One of the four below, rows of the global batch, steps taken, digests of the kind of batch,
    #: of the orders of its keys, and of its ends.
    _STATE = struct.Struct("<BqqQQQ")
    _HAS, _ENDED, _ENDED_UNSEEN, _ENDS_ALL = 0, 1, 2, 3

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        step: Step | None,
        forms: dict[int, Any],
        num_steps: int,
        kind_text: str,
        orders: list[str],
        *,
        is_global: bool,
        needs_all: bool,
    ) -> None:
        super().__init__(site, options)
        self.step = step
        #: By replica of this rank: its first batch, without rows.
        self.forms = forms
        self.num_steps = num_steps
        self.is_global = is_global
        self.needs_all = needs_all
        self.kind_text = kind_text
        self.orders = orders
        self.identify(is_global)

    def prepare(self, group: Group, calls: Sequence[Call]) -> tuple[bytes, None]:
        """Tells where this rank is."""
        state, number, ends = self._HAS, -1, 0
        if self.step is None:
            state = self._ended()
        else:
            _, number, ends = self.step
        digest = digest_of(self.kind_text) if self.kind_text else 0
        orders = digest_of("\n".join(self.orders)) if self.orders else 0
        return self._STATE.pack(state, number, self.num_steps, digest, orders, ends), None

    def steps(
        self, group: Group, calls: Sequence[Call], prepared: None
    ) -> Steps[tuple[list[Any] | None, dict[int, Any]]]:
        """Returns this rank's values and their forms, None for values at the end."""
        of_ranks = [self._STATE.unpack(data) for data in group.sizes.payloads()]
        states, rows, num_steps, digests, orders, ends = zip(*of_ranks, strict=True)
        if len(set(num_steps)) > 1:
            yield Raise(self._at_other_places(num_steps))
        if self._HAS not in states or self._ENDS_ALL in states:
            return None, self.forms
        if len({*digests} - {0}) > 1:
            texts = yield Texts(self.kind_text.encode())
            yield Raise(self._of_other_kinds([text.decode() for text in texts]))
        forms = self.forms
        if self._ENDED_UNSEEN in states:  # such a rank can't tell what its replicas' nothing is
            first = states.index(self._HAS)
            is_first = group.layout.rank == first
            packed = yield Agree(lambda: (b"", _packed(self._form(forms)) if is_first else b""))
            of_ranks = yield Texts(packed)
            form = yield Agree(lambda: (b"", pickle.loads(of_ranks[first])))
            forms = forms or {self.replica_ids[0]: form}
        if self.is_global and len(set(rows)) > 1:
            yield Raise(self._of_other_lengths(rows))
        if len(set(ends)) > 1:
            yield Raise(self._of_other_values(ends))
        values = self.step.values if self.step else [END] * len(self.replica_ids)
        values = [
            self._nothing_for(i, forms) if value is END else value
            for i, value in zip(self.replica_ids, values, strict=True)
        ]
        if len(self.orders) > 1 or len({*orders} - {0}) > 1:
            values = [*map(with_sorted_keys, values)]
        return values, forms

    def _ended(self) -> int:
        if self.needs_all:
            return self._ENDS_ALL
        return self._ENDED if self.forms else self._ENDED_UNSEEN

    def _nothing_for(self, replica_id: int, forms: dict[int, Any]) -> Any:
        """Returns a batch without rows, in memory of its own: what replicas share is read-only."""
        return forms[replica_id] if replica_id in forms else empty_like(self._form(forms))

    @staticmethod
    def _form(forms: dict[int, Any]) -> Any:
        """Returns that of a replica that never had a batch: of the first one that had."""
        return next(iter(forms.values()))

    def _of_other_kinds(self, texts: Sequence[str]) -> StructureMismatchError:
        """Returns what is raised where batches are not of one kind."""
        return StructureMismatchError(
            f"the batches of {self.options.name} differ between ranks at {self.site.line}:"
            f" {sides(texts, lambda text: text or 'none')}. {SAME_KIND}"
        )

    def _at_other_places(self, num_steps: Sequence[int]) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"the ranks have taken different numbers of steps of {self.options.name} at"
            f" {self.site.line}: {sides(num_steps)}. Call next() equally often on each rank,"
            " and load_state_dict with the same state."
        )

    def _of_other_lengths(self, rows: Sequence[int]) -> StructureMismatchError:
        lengths = sides(rows, lambda n: "no batch" if n < 0 else f"a batch of {n} rows")
        return StructureMismatchError(
            f"the global batches of a distributed dataset differ between ranks at"
            f" {self.site.line}: {lengths}. All ranks must distribute the same dataset; use"
            " distribute_datasets_from_function for a dataset of each rank's own."
        )

    def _of_other_values(self, ends: Sequence[int]) -> DivergenceError:
        """Returns what is raised where ranks would cut batches of other values."""
        digests = sides(ends, lambda digest: f"digest {digest:016x}")
        return DivergenceError(
            f"the global batches of {self.options.name} differ between ranks at {self.site.line},"
            f" in their first or last row: {digests}. Each rank takes its rows of what must be the"
            " same batch. Seed what shuffles or draws on every rank alike (torch's DataLoader:"
            " generator=torch.Generator().manual_seed(0), and no sampler for a rank); use"
            " distribute_datasets_from_function for a dataset of each rank's own."
        )


def _packed(spec: Any) -> bytes:
    """Returns a batch without rows as bytes.

    Raises
    ------
    TypeError
        It can't be pickled.
    """
    try:
        return pickle.dumps(spec, 5)
    except Exception as error:
        raise TypeError(
            "a rank without input can't be told what the batches of the others are:"
            f" {in_words(error)}. Give batches in containers that pickle knows, such"
            " as a dict, or input to every rank."
        ) from None
