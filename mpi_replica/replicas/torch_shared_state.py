"""State of torch that replicas of a rank share by mistake: results would depend on the layout.

On as many ranks as replicas each has a module and an optimizer of its own. Imported where torch is,
and a rank hosts several replicas.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..collectives.reduce import AllReduce
from ..core.context import current_state
from ..core.exceptions import ContextError
from .replica import Replica

_ADVICE = (
    "Give each replica a module and an optimizer of its own, as"
    " strategy.experimental_distribute_values_from_function makes them, or make the step in a"
    " merge_fn, which runs once on each rank"
)

#: The last step of optimizers and parameters: its strategy, run and replica.
_steps: Any = WeakIdKeyDictionary()


@functools.cache
def watch_optimizers() -> None:
    """Has steps of optimizers looked at from now on."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    state = current_state()
    replica = None if state is None else state.replica_context
    if not isinstance(replica, Replica):
        return  # in a merge_fn, or outside of steps
    strategy, mine = replica.strategy, replica.replica_id_in_sync_group
    run = weakref.ref(strategy), strategy.engine.agreement.run_ordinal
    has_closure = bool(args or kwargs)  # which computes gradients, perhaps the first ones
    parameters = [
        one
        for group in optimizer.param_groups
        for one in group["params"]
        if one.grad is not None or (has_closure and one.requires_grad)
    ]  # the others it leaves as they are
    for thing in (optimizer, *parameters):
        before = _steps.get(thing)
        if before is not None and before[0] == run and before[1] != mine:
            what = "" if thing is optimizer else "of another optimizer, with the same parameters, "
            raise ContextError(
                f"replica {mine} makes a step of {type(optimizer).__name__} in a run in which"
                f" replica {before[1]} of the same rank has made one {what}already: the parameters"
                f" would be moved once for each replica of the rank. {_ADVICE}."
            )
        _steps[thing] = run, mine


class _Version(NamedTuple):
    """How often a tensor had been written when a replica contributed it."""

    path: str
    tensor: torch.Tensor
    number: int
    #: Its values, where it is a part of a memory: that has one number, whichever part is written.
    values: torch.Tensor | None

    def is_written(self) -> bool:
        """Returns whether it has been written since."""
        if self.tensor._version == self.number:
            return False
        if self.values is None:
            return True
        now = self.tensor.detach()
        is_same = (now == self.values) | ((now != now) & (self.values != self.values))  # NaN
        return not bool(is_same.all())


def _is_part(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has only a part of its memory, as rows of a batch do."""
    try:
        return bool(tensor.untyped_storage().nbytes() > tensor.nbytes)
    except (NotImplementedError, RuntimeError):  # a sparse one, say
        return False


class Versions:
    """The tensors that a replica contributes to a reduction, as they are when it comes there."""

    def __init__(self, call: AllReduce) -> None:
        self._call = call
        [leaves] = call.leaves
        self._versions = [
            _Version(path, leaf, leaf._version, leaf.detach().clone() if _is_part(leaf) else None)
            for path, leaf in zip(call.paths, leaves, strict=True)
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        ]

    def check(self) -> None:
        """Makes it an error of the call where one was written since: by another replica."""
        for version in self._versions:
            if version.is_written():
                call = self._call
                call.error = ContextError(
                    f"value{version.path} of replica {call.replica_ids[0]} was written while it"
                    f" waited in {call.kind} for the other replicas of its rank: one of these has"
                    " the same tensor, such as the gradient of a parameter that they share."
                    f" {_ADVICE}."
                )
                return
