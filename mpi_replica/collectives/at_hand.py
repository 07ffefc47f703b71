"""Calls of values whose components are all at hand: every rank works them out, and asks nobody."""

from __future__ import annotations

from types import GeneratorType
from typing import Any

from ..core.exceptions import mark_reporter
from ..core.layout import Layout
from ..ranks.single import SingleTransport
from .agreement.call import Call
from .agreement.group import Group
from .agreement.header import AGREES, head
from .agreement.header_sizes import HeaderSizes
from .agreement.judgement import judge
from .agreement.stand import Report, Stand
from .agreement.steps import Agree, Raise, Steps


class AtHand:
    """What does such calls; kept by a group.

    Parameters
    ----------
    group : Group
        That of the strategy.
    """

    def __init__(self, group: Group) -> None:
        self._layout = group.layout
        self._transport = transport = SingleTransport()
        alone = Layout((group.layout.num_replicas,), 0)
        self._sizes = HeaderSizes(transport.headers)
        self._group = Group(alone, transport.hosts, self._sizes)
        self._group.pool = group.pool  # which the strategy closes

    def perform(self, call: Call) -> Any:
        """Returns the result of a call that was made of the components of all replicas.

        Not collective. An error is that of all ranks, since all of them have the same components.
        """
        try:
            if call.error is not None:
                raise call.error
            while not call.agrees:
                self._make_alike(call)
            (answer,) = call.answer([call], self._do(self._steps(call)))
            return answer
        except Exception as error:
            mark_reporter(error, self._layout.rank == 0)
            raise
        finally:
            if self._group.pool.is_used:
                self._group.pool.end_call()

    def _make_alike(self, call: Call) -> None:
        """Changes what the components don't have in common; raises where that can't be done."""
        ids = self._layout.all_replica_ids
        stands = [Stand((i,), call.status, call.describe(i)) for i in ids]
        verdict = judge([Report(tuple(stands), (), 0)], self._layout)
        if verdict.error is not None:
            raise verdict.error
        call.promote(verdict.change)

    def _steps(self, call: Call) -> Steps[Any]:
        prepared = yield Agree(lambda: call.prepare(self._group, [call]) or (b"", None))
        results = call.steps(self._group, [call], prepared)
        return (yield from results) if isinstance(results, GeneratorType) else results

    def _do(self, steps: Steps[Any]) -> Any:
        """Does steps, and returns the results to which they lead."""
        transport, answer = self._transport, None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(step, Agree):
                payload, answer = step.prepare()
                size_bytes = self._sizes.next_bytes
                transport.exchange(head(0, 0, AGREES, False, len(payload)), size_bytes, payload)
                self._sizes.agree(0)
            elif isinstance(step, Raise):
                raise step.error
            else:
                answer = step.exchange(transport)
