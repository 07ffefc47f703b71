"""Modes of modules and tensors that replicas of a rank share: each replica has its own ones.

Nothing is written where a step calls ``train()``, ``eval()`` or ``requires_grad_()``; but who waits
behind that goes on as it was, and not as another replica has left them. Imported where torch is,
and a rank hosts several replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple, Self

import torch


class _Modes(NamedTuple):
    """``training`` of modules, and ``requires_grad`` of tensors that a program may set it of."""

    modules: list[torch.nn.Module]
    tensors: list[torch.Tensor]
    #: Which these are, and the modes of all, in this order.
    ids: list[int]
    values: list[bool]

    @classmethod
    def of(cls, modules: Iterable[torch.nn.Module], tensors: Iterable[torch.Tensor]) -> Self:
        """Returns those that there are now."""
        modules, tensors = [*modules], [one for one in tensors if one.is_leaf]
        values = [one.training for one in modules]
        values += [one.requires_grad for one in tensors]
        return cls(modules, tensors, [*map(id, modules), *map(id, tensors)], values)

    def are_as(self, others: Self) -> bool:
        """Returns whether these are the same, of the same modules and tensors."""
        return self.values == others.values and self.ids == others.ids

    def put_back(self) -> None:
        """Sets them where they are others now."""
        for module, is_training in zip(self.modules, self.values, strict=False):
            if module.training is not is_training:
                module.training = is_training
        for tensor, is_required in zip(self.tensors, self.values[len(self.modules) :], strict=True):
            if tensor.requires_grad is not is_required:
                # It is part of a graph, or has a dtype without gradients, since another replica
                # has made it so.
                with contextlib.suppress(RuntimeError):
                    tensor.requires_grad = is_required


class ModesOfReplicas:
    """Keeps the modes that each replica has set while they take turns.

    Who holds it hands in the modules and tensors that there are.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], tensors: Iterable[torch.Tensor]) -> None:
        # What a replica begins with, and what there is now.
        self._at_first = self._now = _Modes.of(modules, tensors)
        self._of_replicas: dict[int, _Modes] = {}

    def entered_by(self, replica_id: int) -> None:
        """Sets those of a replica that begins, or goes on where it has waited."""
        mine = self._of_replicas.get(replica_id, self._at_first)
        if not mine.are_as(self._now):
            mine.put_back()

    def left_by(
        self,
        replica_id: int,
        modules: Iterable[torch.nn.Module],
        tensors: Iterable[torch.Tensor],
    ) -> None:
        """Keeps those of a replica that waits or ends now."""
        self._now = self._of_replicas[replica_id] = _Modes.of(modules, tensors)

    def renew(self, modules: Iterable[torch.nn.Module], tensors: Iterable[torch.Tensor]) -> None:
        """Takes for all what there is behind a merge_fn, where that has changed some.

        What it has set to what it was before can't be seen.
        """
        now = _Modes.of(modules, tensors)
        if not now.are_as(self._now):
            self._at_first = self._now = now
            self._of_replicas.clear()
