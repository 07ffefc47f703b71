"""Modes of modules and tensors that replicas of a rank share: each replica has its own ones.

Nothing is written where a step calls ``train()``, ``eval()`` or ``requires_grad_()``; but who waits
behind that goes on as it was, and not as another replica has left them. Imported where torch is,
and a rank hosts several replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch


class _Modes(NamedTuple):
    """``training`` of modules, and ``requires_grad`` of tensors that a program may set it of."""

    of_modules: Sequence[tuple[torch.nn.Module, bool]]
    of_tensors: Sequence[tuple[torch.Tensor, bool]]

    @classmethod
    def of(cls, leaves: Iterable[Any]) -> Self:
        """Returns those of modules and tensors as they are now."""
        modules, tensors, seen = [], [], set()
        waiting = [*leaves]
        while waiting:
            one = waiting.pop()
            if isinstance(one, torch.Tensor):
                tensors.append(one)
            elif one is not None and one not in seen:
                seen.add(one)
                modules.append((one, one.training))
                tensors += one._parameters.values()
                waiting += one._modules.values()
        leaves_of_graph = [one for one in tensors if one is not None and one.is_leaf]
        return cls(modules, [(one, one.requires_grad) for one in leaves_of_graph])

    def put_back(self) -> None:
        """Sets them where they are others now."""
        for module, is_training in self.of_modules:
            if module.training is not is_training:
                module.training = is_training
        for tensor, is_required in self.of_tensors:
            if tensor.requires_grad is not is_required and tensor.is_leaf:
                tensor.requires_grad_(is_required)

    def are_as(self, others: Self) -> bool:
        """Returns whether these are the same, of the same modules and tensors."""
        mine, theirs = (
            [(id(one), mode) for part in modes for one, mode in part] for modes in (self, others)
        )
        return mine == theirs


class ModesOfReplicas:
    """Keeps the modes that each replica has set while they take turns.

    Parameters
    ----------
    leaves : sequence
        The modules and tensors.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        #: What a replica begins with, and what the last one has left.
        self._at_first = self._left = _Modes.of(leaves)
        self._of_replicas: dict[int, _Modes] = {}

    def entered_by(self, replica_id: int) -> None:
        """Sets those of a replica that begins, or goes on where it has waited."""
        self._of_replicas.get(replica_id, self._at_first).put_back()

    def left_by(self, replica_id: int) -> None:
        """Keeps those of a replica that waits or ends now."""
        self._left = self._of_replicas[replica_id] = _Modes.of(self._leaves)

    def renew(self) -> None:
        """Takes for all what a merge_fn has set."""
        now = _Modes.of(self._leaves)
        if not now.are_as(self._left):
            self._at_first = now
            self._of_replicas.clear()
