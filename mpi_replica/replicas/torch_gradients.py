"""Gradients through collectives, for torch.

What is differentiated is the sum of the losses of all replicas, as in tf: the way back of a sum is
the sum of what comes back on all replicas, of a mean their mean, of a gather the sum of it, cut to
this replica's rows. So a way back is a collective call like any other: agreed, with its lines.

Imported where torch records a leaf, and so has been imported.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from ..collectives.agreement.call import Call
from ..collectives.agreement.site import CallSite
from ..collectives.blocks import Blocks
from ..collectives.gather import AllGather
from ..collectives.reduce import AllReduce
from ..collectives.sparse import has_slices
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.argument_checks import integer
from ..core.array_libraries import by_numpy, recorded_by_torch
from ..core.context import current_state
from ..core.exceptions import ContextError
from ..core.options import CommunicationOptions, ReduceOp
from .replica import Replica
from .torch_functions import GATHER, REDUCTIONS

_ADVICE = (
    "A replica takes part in the way back of a collective where its own loss depends on a result of"
    " it: where it does not, add `+ 0 * y.sum()` of such a result y to the loss, and make the same"
    " backward passes on every replica"
)
_SHOWN = 3

# Multiplied by it, small numbers differ in all bits.
_ODD, _64_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1


def all_reduce(
    context: Replica,
    reduce_op: ReduceOp | str,
    leaves: Sequence[Any],
    recorded: Sequence[int],
    structure: nest.Structure,
    options: CommunicationOptions | None,
    out: Any,
) -> Any:
    """Returns ``all_reduce`` of a nest of which torch records the leaves at these places."""
    owner = _Owner(context.strategy, context.replica_id, "all_reduce", options)
    try:
        op = ReduceOp.of(reduce_op)
        if out is not None:
            path = nest.leaf_paths(structure)[recorded[0]]
            raise TypeError(
                f"all_reduce with out= got value{path}, which needs"
                " gradients: what is written into memory that is there is no part of torch's graph."
                " Leave out= away, call it under torch.no_grad(), or detach() the value."
            )
    except Exception as error:
        return context.meet(context.strategy.engine.failed("all_reduce", options, error))
    return nest.unflatten(structure, _Pass(owner, op, leaves, recorded, structure).results())


def all_gather(
    context: Replica,
    axis: int,
    leaves: Sequence[Any],
    recorded: Sequence[int],
    structure: nest.Structure,
    options: CommunicationOptions | None,
) -> Any:
    """Returns ``all_gather`` of a nest of which torch records the leaves at these places."""
    owner = _Owner(context.strategy, context.replica_id, "all_gather", options)
    try:
        axis = integer("axis", axis)
    except Exception as error:
        return context.meet(context.strategy.engine.failed("all_gather", options, error))
    return nest.unflatten(structure, _Pass(owner, axis, leaves, recorded, structure).results())


class _Owner(NamedTuple):
    """What a collective call is, and whose."""

    strategy: StrategyBase
    replica_id: int
    kind: str
    options: CommunicationOptions | None
    #: The call that it goes back through: its line, which one it was in its run, and that run.
    through: tuple[str, int, int] | None = None

    def back(self, line: str, number: int, run: int) -> Self:
        """Returns what goes back through this call."""
        kind, through = f"gradient of {self.kind}", (line, number, run)
        return type(self)(self.strategy, self.replica_id, kind, self.options, through)

    def mark(self, call: Call) -> None:
        """Tells `call` from others that go back through a call on the same line."""
        if self.through is None:
            return
        line, number, run = self.through
        # Counted from now, and no part of what is kept of calls: steps are alike then.
        runs = self.run - run
        call.fingerprint ^= (number << 32 | runs) * _ODD & _64_BITS
        call.through = f"call {number} at {line}" + (f", {runs} runs before" if runs else "")
        call.advice = _ADVICE

    @property
    def run(self) -> int:
        """The ordinal of the run that is under way."""
        return self.strategy.engine.agreement.last_run_ordinal

    def context(self) -> Replica:
        """Returns the context of the replica, where the code that calls is part of it.

        Raises
        ------
        ContextError
            It is not.
        """
        state = current_state()
        context = None if state is None else state.replica_context
        if isinstance(context, Replica) and context.strategy is self.strategy:
            if context.replica_id == self.replica_id:
                return context
            where = f"by replica {context.replica_id}"
        elif self.strategy.num_replicas_in_sync == 1 and self.strategy.engine.is_in_its_thread():
            return Replica(self.strategy, 0)
        else:
            where = "outside of its strategy.run"
        raise ContextError(
            f"the {self.kind} of replica {self.replica_id} was called for {where}: it is a"
            " collective call. Make the backward pass in the function that is given to"
            " strategy.run, in each replica that of its own loss."
        )


@functools.cache
def _list_of(count: int) -> nest.Structure:
    """Returns the structure of a list; of a single leaf where there is one."""
    return nest.flatten([0] * count if count != 1 else 0)[1]


class _Pass:
    """A nest that goes through a collective; also gradients, on their way back through one.

    Parameters
    ----------
    owner : _Owner
    how : ReduceOp or int
        How leaves are reduced; or the axis along which they are gathered.
    leaves : sequence
    recorded : sequence of int, optional
        The places of those that torch records. Default: it is asked.
    structure : nest.Structure, optional
        Where these are. Default: in a list, where they are several.
    words : str
        What else must be the same.
    """

    #: Its line, which call it was in its run, and that run; known when it was performed.
    _performed: tuple[str, int, int]
    _results: list[Any]
    _blocks: Sequence[Blocks]

    def __init__(
        self,
        owner: _Owner,
        how: ReduceOp | int,
        leaves: Sequence[Any],
        recorded: Sequence[int] | None = None,
        structure: nest.Structure | None = None,
        words: str = "",
    ) -> None:
        self._owner = owner
        self.how = how
        self._leaves = leaves
        self._structure = _list_of(len(leaves)) if structure is None else structure
        self._paths = nest.leaf_paths(self._structure)
        self._recorded = recorded_by_torch(leaves) if recorded is None else recorded
        self._words = words

    @property
    def way_back(self) -> _Owner:
        """What goes back through it."""
        return self._owner.back(*self._performed)

    def results(self) -> list[Any]:
        """Returns the results; those of leaves that torch records are part of its graph."""
        if not self._recorded:
            return self._perform(self._leaves)
        forms = GATHER if isinstance(self.how, int) else REDUCTIONS[self.how]
        outputs = forms[torch._C._are_functorch_transforms_active()].apply(
            self, *[self._leaves[i] for i in self._recorded]
        )
        results, self._results, self._leaves = self._results, [], ()  # no part of the graph
        for index, output in zip(self._recorded, outputs, strict=True):
            results[index] = output
        return results

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Performs the call; `tensors` are the leaves that torch records, as plain ones."""
        self._results = self._perform(self._with(tensors))
        return self._those_of_tensors()

    def stacked(self, how: ReduceOp | int, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Performs the call with the tensors that `vmap` has stacked in place of the recorded."""
        leaves = list(self._with(tensors))
        others: set[int] = set()
        if isinstance(how, int) and how >= 0:  # which counts the axis of the stacks
            others = {*range(len(leaves))}.difference(self._recorded)
        for place in others:
            leaves[place] = by_numpy(lambda leaf: np.asarray(leaf)[None], leaves[place])
        other = _Pass(self._owner, how, leaves, structure=self._structure, words=self._words)
        self._results = other.results()
        for place in others:
            self._results[place] = self._results[place][0]
        self._performed, self._blocks = other._performed, other._blocks
        return self._those_of_tensors()

    def _with(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Returns the leaves with other tensors in place of those that torch records."""
        if len(tensors) == len(self._leaves):
            return tensors
        leaves = list(self._leaves)
        for index, tensor in zip(self._recorded, tensors, strict=True):
            leaves[index] = tensor
        return leaves

    def _those_of_tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple([self._results[index] for index in self._recorded])

    def tangents(self, how: ReduceOp | int, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns tangents, combined over all replicas."""
        return _Pass(self._owner, how, tensors, words="tangents").results()

    def back(self, op: ReduceOp, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the tensors, which go back, combined over all replicas."""
        return _Pass(self.way_back, op, tensors).results()

    def stacks_of_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns those of all replicas, one on top of the other; called on the way back."""
        return _Pass(self.way_back, 0, [tensor[None] for tensor in tensors]).results()

    @property
    def replica_id(self) -> int:
        """The id of this replica."""
        return self._owner.replica_id

    def used(self, gradients: Sequence[Any]) -> list[int]:
        """Returns which of the results some replica uses, where this one has these gradients."""
        if len(gradients) == 1:
            return [0]
        mask = np.array([gradient is not None for gradient in gradients], np.uint8)
        asking = _Pass(self.way_back, ReduceOp.MAX, [mask], words="which results are used")
        return [int(index) for index in np.flatnonzero(asking.results()[0])]

    def start(self, position: int) -> int:
        """Returns where this replica's rows begin in a result that was gathered."""
        return int(self._blocks[self._recorded[position]].offsets[self._owner.replica_id])

    def _perform(self, leaves: Sequence[Any]) -> list[Any]:
        owner = self._owner
        context = owner.context()
        engine = owner.strategy.engine
        if forward_ad._current_level >= 0 and len(engine.layout.local_replica_ids) > 1:
            raise ContextError(
                f"{owner.kind} in forward-mode differentiation (torch.func.jvp, forward_ad), where"
                " a rank hosts several replicas: torch keeps its levels for the whole process, and"
                " replicas would enter each other's. Differentiate backwards, or host one replica"
                " on each rank."
            )
        call = engine.make(owner.kind, owner.options, self._call, leaves)
        owner.mark(call)
        results: list[Any] = context.meet(call)
        context.num_recorded += 1
        self._performed = call.site.line, context.num_recorded, owner.run
        self._blocks = call.gathering.leaves if isinstance(call, AllGather) else []
        return results

    def _call(
        self,
        site: CallSite,
        options: CommunicationOptions,
        leaves: Sequence[Any],
    ) -> AllReduce | AllGather:
        structure, kind, how = self._structure, self._owner.kind, self.how
        if any(isinstance(x, torch.Tensor) and is_legacy_batchedtensor(x) for x in leaves):
            raise TypeError(
                f"{kind} got the gradients of a batch at once (is_grads_batched=True, or"
                " vectorize=True in torch.autograd.functional), as torch has them for its own"
                " functions only. Use torch.func: vmap of the function that vjp gives, jacrev, or"
                " jacrev of jacrev."
            )
        words = self._recorded_in_words()
        if isinstance(how, int):
            words = f"axis={how}{words}"
            return AllGather(site, options, kind, how, [leaves], structure, words, self._paths)
        if has_slices([leaves]):
            raise TypeError(
                f"{kind} got IndexedSlices beside leaves that need gradients. Reduce them in a call"
                " of their own."
            )
        return AllReduce(
            site,
            options,
            kind,
            how,
            [leaves],
            structure,
            detail=f"{self._words}{words}".removeprefix(", "),
            paths=self._paths,
        )

    def _recorded_in_words(self) -> str:
        """Returns of which leaves torch records what becomes: replicas must have the same."""
        recorded, count = self._recorded, len(self._leaves)
        if not recorded:
            return ""
        if len(recorded) == count > _SHOWN:
            return ", all need gradients"
        others = sorted({*range(count)}.difference(recorded))
        is_short = len(recorded) <= max(_SHOWN, len(others))
        few, words = (recorded, "") if is_short else (others, "all but ")
        shown = ", ".join([f"value{self._paths[index]}" for index in few[:_SHOWN]])
        more = "" if len(few) <= _SHOWN else f" and {[*few[_SHOWN:]]}"
        need = "needs" if recorded == few and len(few) == 1 else "need"
        return f", {words}{shown}{more} {need} gradients"
