"""State of torch that replicas of a rank share by mistake: results would depend on the layout.

On as many ranks as replicas each has a module and an optimizer of its own. Imported where torch is,
and a rank hosts several replicas.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import torch
from torch.nn.utils import stateless
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..collectives.strategy_base import StrategyBase
from ..core.context import current_state
from ..core.exceptions import ContextError
from ..core.object_state import is_lazy
from .memory_of_replicas import MADE_APART
from .replica import Replica
from .shared_objects import SharedObjects
from .torch_modes import ModesOfReplicas

_ADVICE = f"Give each replica a module, an optimizer or a tensor of its own, {MADE_APART}"

#: By strategy and run: the replica that has made a step of an optimizer or a parameter.
_steps: dict[tuple[weakref.ref[StrategyBase], int], Any] = {}


def forget_steps(strategy: StrategyBase, run_ordinal: int) -> None:
    """Forgets those of a run that is over: torch swaps no parameter that has weak references."""
    _steps.pop((weakref.ref(strategy), run_ordinal), None)


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
    if len(strategy.engine.layout.local_replica_ids) == 1:
        return  # nobody shares anything with it
    run = weakref.ref(strategy), strategy.engine.agreement.run_ordinal
    steps = _steps.setdefault(run, WeakIdKeyDictionary())
    has_closure = bool(args or kwargs)  # which computes gradients, perhaps the first ones
    parameters = [
        one
        for group in optimizer.param_groups
        for one in group["params"]
        if one.grad is not None or (has_closure and one.requires_grad)
    ]  # the others it leaves as they are
    for thing in (optimizer, *parameters):
        before = steps.setdefault(thing, mine)
        if before != mine:
            what = "" if thing is optimizer else "of another optimizer, with the same parameters, "
            raise ContextError(
                f"replica {mine} makes a step of {type(optimizer).__name__} in a run in which"
                f" replica {before} of the same rank has made one {what}already: the parameters"
                f" would be moved once for each replica of the rank. {_ADVICE}."
            )


class TensorVersion(NamedTuple):
    """How often a tensor had been written; those of inference mode do not count it."""

    tensor: torch.Tensor
    number: int
    #: Its values, where it is a part of a memory: that has one number, whichever part is written.
    values: torch.Tensor | None

    @classmethod
    def among(cls, leaves: Sequence[Any]) -> list[tuple[int, Self]]:
        """Returns those of the tensors among leaves, as they are now, with their positions."""
        return [
            (i, cls(leaf, leaf._version, leaf.detach().clone() if _is_part(leaf) else None))
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        ]

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


class SharedTensors:
    """Tensors that all replicas of a rank get, to be read alone; torch itself knows no such ones.

    Parameters
    ----------
    call : str
        What gives them to the replicas.
    paths : sequence of str
        Where each leaf is among its arguments.
    leaves : sequence
        The tensors, and anything else.
    """

    def __init__(self, call: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        self._call = call
        self._versions = [(paths[i], version) for i, version in TensorVersion.among(leaves)]

    def check(self) -> None:
        """Raises where one was written.

        Raises
        ------
        ContextError
            It was.
        """
        for path, version in self._versions:
            if version.is_written():
                raise ContextError(
                    f"the tensor in (args, kwargs){path} of {self._call} was written: the"
                    " replicas of a rank share it, so what they find in it would depend on how many"
                    " they are. Write into a copy of it, tensor.clone()."
                )


_Gradients: TypeAlias = list[tuple[torch.Tensor, torch.Tensor | None]]


class SharedArguments(SharedObjects[Hashable]):
    """Modules and tensors: what several replicas of a rank write moves so often.

    But for gradients, which each replica has of its own while they take turns: who computes new
    ones waits, with its loss, say, before it reads them. So it is with modes.

    Parameters
    ----------
    paths : sequence of str
        Where each leaf is among the arguments of ``strategy.run``.
    leaves : sequence
        The modules and tensors, and anything else.
    """

    def __init__(self, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        self._leaves = [
            (path, leaf)
            for path, leaf in zip(paths, leaves, strict=True)
            if isinstance(leaf, (torch.nn.Module, torch.Tensor))
        ]
        tensors = self._tensors()
        self._modes = ModesOfReplicas(self._modules, tensors.values())
        #: What a replica begins with, what those have left that have begun, and the last of them.
        self._at_first = self._left = _gradients(tensors)
        self._versions_left = _versions(self._left)
        self._gradients_of: dict[int, _Gradients] = {}
        super().__init__()

    def entered_by(self, replica_id: int) -> None:
        self._modes.entered_by(replica_id)
        gradients = self._gradients_of.get(replica_id)
        if gradients is None:
            at_first = {id(parameter): gradient for parameter, gradient in self._at_first}
            # Others may have come since: of a lazy module, say.
            gradients = [(one, at_first.get(id(one))) for one, _ in _gradients(self._tensors())]
        for parameter, mine in gradients:
            if parameter.grad is not mine:
                try:
                    parameter.grad = mine
                except RuntimeError:  # another replica has given the module another dtype
                    parameter.grad = None if mine is None else mine.to(parameter)

    def left_by(self, replica_id: int) -> None:
        super().left_by(replica_id)
        self._modes.left_by(replica_id, self._modules, self._looked_at.values())
        self._left = self._gradients_of[replica_id] = _gradients(self._looked_at)
        self._versions_left = _versions(self._left)

    def renew(self) -> None:
        tensors = self._tensors()
        self._modes.renew(self._modules, tensors.values())
        now = _gradients(tensors)
        are_same = [id(one) for _, one in now] == [id(one) for _, one in self._left]
        if not are_same or _versions(now) != self._versions_left:
            self._at_first = now
            self._gradients_of.clear()
        super().renew()

    def _tensors(self) -> dict[Hashable, torch.Tensor]:
        """Returns tensors, and parameters and buffers by their module and name.

        As torch does in five times the time. Keeps the modules that it has come through.
        """
        tensors: dict[Hashable, Any] = {}
        waiting: list[Any] = []
        for place, (_, leaf) in enumerate(self._leaves):
            if isinstance(leaf, torch.Tensor):
                tensors[place] = leaf
            else:
                waiting.append(leaf)
        self._modules: dict[torch.nn.Module, None] = {}
        while waiting:
            module = waiting.pop()
            if module is not None and module not in self._modules:
                self._modules[module] = None
                for one in (module._parameters, module._buffers):
                    tensors |= {(id(module), name): tensor for name, tensor in one.items()}
                waiting += module._modules.values()
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _look(self) -> dict[Hashable, Any]:
        tensors = self._tensors()
        self._looked_at = tensors  # so that no other one gets the id of one of them
        looks: dict[Hashable, Any] = {name: _look_at(one) for name, one in tensors.items()}
        for _, gradient in self._at_first:  # all replicas add to it, where it is not cleared
            if gradient is not None:
                looks["gradient", id(gradient)] = gradient._version
        return looks

    def _error(self, changed: Hashable, replica_id: int, first: int) -> ContextError:
        return ContextError(
            f"replica {replica_id} has written {self._named(changed)} of strategy.run, in which"
            f" replica {first} of the same rank has written it already: they share it, so it would"
            f" be changed once for each replica of the rank. {_ADVICE}."
        )

    def _named(self, changed: Hashable) -> str:
        for place, (path, leaf) in enumerate(self._leaves):
            where = f"in (args, kwargs){path}"
            whats: list[tuple[Hashable, str, Any]]
            if isinstance(leaf, torch.Tensor):
                whats = [(place, f"the tensor {where}", leaf)]
            else:
                whats = [
                    (
                        (id(module), name),
                        f"the {kind} {f'{prefix}.{name}'.lstrip('.')!r} of the"
                        f" {type(leaf).__name__} {where}",
                        one,
                    )
                    for prefix, module in leaf.named_modules()
                    for kind, of_kind in (
                        ("parameter", module._parameters),
                        ("buffer", module._buffers),
                    )
                    for name, one in of_kind.items()
                ]
            for name, what, one in whats:
                if name == changed:
                    return what
                if one is not None and not is_lazy(one) and one.is_leaf:
                    if ("gradient", id(one.grad)) == changed:
                        return f"the gradient of {what}"
        return "a parameter or buffer that a module in (args, kwargs) had"


def _gradients(tensors: Mapping[Hashable, torch.Tensor]) -> _Gradients:
    """Returns those that there are now, with their parameters."""
    return [(one, one.grad) for one in tensors.values() if not is_lazy(one) and one.is_leaf]


def _versions(gradients: _Gradients) -> list[int | None]:
    return [None if one is None else one._version for _, one in gradients]


def _look_at(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns which tensor it is, how often it was written, and where its values are."""
    if is_lazy(tensor):
        return (id(tensor),)
    version = 0 if tensor.is_inference() else tensor._version  # those of inference mode have none
    try:
        return id(tensor), version, tensor.data_ptr()
    except RuntimeError:  # a sparse one, say
        return id(tensor), version


#: The ids of the code of functions that call a module with other weights, and put its own back.
_FUNCTIONAL_CALLS = {
    id(inspect.unwrap(function).__code__)
    for function in (torch.func.functional_call, stateless.functional_call)
}


class HeldModules(NamedTuple):
    """The modules of a functional call in which a replica waits."""

    module: torch.nn.Module
    #: Those that it may go through.
    parts: set[torch.nn.Module]
    #: Those of them that have other weights meanwhile.
    changed: set[torch.nn.Module]

    @classmethod
    def of_frame(cls, frame: FrameType) -> Self:
        """Returns those of the call with this frame: it begins with the module and weights."""
        module, weights = [frame.f_locals[name] for name in frame.f_code.co_varnames[:2]]
        parts = dict(module.named_modules(remove_duplicate=False))
        dicts = [weights] if isinstance(weights, dict) else weights
        paths = {name.rpartition(".")[0] for names in dicts for name in names}
        return cls(module, {*parts.values()}, {parts[path] for path in paths if path in parts})

    def is_in_the_way_of(self, other: Self) -> bool:
        """Returns whether one of the calls would go through weights of the other one."""
        return bool(self.changed & other.parts or other.changed & self.parts)


class Waiting(Protocol):
    """A replica of this rank, and what it holds where it waits."""

    replica_id: int
    held: Sequence[HeldModules]


def held_modules(replica_id: int, replicas: Iterable[Waiting]) -> list[HeldModules]:
    """Returns what the replica that calls holds, and will hold while it waits.

    Raises
    ------
    ContextError
        Another one waits that has put weights into the same modules: each call would go on with
        those of the other, and put them back in the end. Now this one ends first.
    """
    held = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame.f_code) in _FUNCTIONAL_CALLS:
            held.append(HeldModules.of_frame(frame))
        frame = frame.f_back
    for mine in held:
        for other in replicas:
            if any(mine.is_in_the_way_of(theirs) for theirs in other.held):
                raise ContextError(
                    f"replica {replica_id} comes to a collective inside of functional_call of"
                    f" {type(mine.module).__name__}, and replica {other.replica_id} of the same"
                    " rank waits in one that goes through the same module: while a call lasts, that"
                    " has its weights, and one would compute with those of the other. Call the"
                    f" collective after it. {_ADVICE}."
                )
    return held
