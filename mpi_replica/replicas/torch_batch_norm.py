"""Batch norm over the rows of all replicas, for torch."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.exceptions import ContextError
from ..core.object_state import is_lazy
from .replica_context import ReplicaContext, get_replica_context

# In which run of which strategy the running statistics were last written, and by which replica. Not
# in the module: a copy of it, or a pickle, is another one.
_written: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class SyncBatchNorm(_BatchNorm):
    """Normalize with mean and variance of the rows of all replicas.

    What ``torch.nn.SyncBatchNorm`` is to a process group. In training a call of it is collective:
    every replica makes it, also one without rows. In evaluation it sends nothing.

    Parameters
    ----------
    num_features : int
        The channels: the extent of the second axis of the input.
    eps : float
        Added to the variance.
    momentum : float or None
        How much of the running statistics a step replaces; None for their mean over all steps.
    affine : bool
        Whether it has a weight and a bias, which are learnt.
    track_running_stats : bool
        Whether it keeps mean and variance for evaluation. Without, it always takes those of the
        input.
    device, dtype : optional
        Of its parameters and buffers.
    bias : bool
        Whether it has a bias beside the weight; where torch has this argument.

    Raises
    ------
    ValueError
        In a call: the input has less than two axes or other channels, or all replicas together
        have one value a channel; on every rank.
    ContextError
        In a call: in training, in cross-replica context.
    StructureMismatchError
        In a call: replicas have other dtypes; on every rank.
    RuntimeError
        In a call: it is to keep running statistics in a function that ``torch.func`` transforms.

    Notes
    -----
    Input of shape (rows, channels, ...); replicas may have different numbers of rows, or none: call
    the module on one line for all of them, in front of an ``if`` about rows. One ``all_gather`` of
    two numbers a channel and the number of values; another message on the way back. What is
    gathered is combined in the order of the replicas: the same bits on every layout. float16 and
    bfloat16 are added up in float32. The running statistics are those of all rows, the same on all
    replicas; where replicas of a rank share a module, the first of them in a step writes them.

    Examples
    --------
    >>> import torch
    >>> strategy = mr.MPIStrategy(num_replicas=2)
    >>> def step():
    ...     norm = mr.torch.SyncBatchNorm(1, affine=False)
    ...     norm(torch.tensor([[float(mr.get_replica_context().replica_id_in_sync_group)]]))
    ...     return norm.running_mean
    >>> strategy.run(step)  # a tenth of the mean of 0 and 1
    PerReplica:{
      0: tensor([0.0500]),
      1: tensor([0.0500])
    }
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input, normalized.

        Parameters
        ----------
        input : torch.Tensor, shape (rows, channels, ...)

        Returns
        -------
        torch.Tensor
            Of the same shape and dtype.

        Raises
        ------
        ValueError, ContextError, StructureMismatchError, RuntimeError
            As the class says.

        Examples
        --------
        >>> import torch
        >>> norm = mr.torch.SyncBatchNorm(2).eval()
        >>> norm(torch.zeros(3, 2)).shape
        torch.Size([3, 2])
        """
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None):
            return torch.nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        context = get_replica_context()
        if context is None:
            raise ContextError(
                "SyncBatchNorm was called in training mode in cross-replica context: it needs the"
                " rows of each replica. Call it in the function that is given to strategy.run, or"
                " call eval() of the module first."
            )
        mean, variance, count = _moments(context, input)
        if self.training and self.track_running_stats:
            self._keep(context, mean.detach(), variance.detach(), count)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shape = (1, -1) + (1,) * (input.dim() - 2)
        # Less the mean first: where it is large, gradients are those of small numbers so.
        centred = input.to(mean.dtype) - mean.view(shape)
        if self.bias is None:
            return (centred * scale.view(shape)).to(input.dtype)
        return torch.addcmul(self.bias.view(shape), centred, scale.view(shape)).to(input.dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm got an input of shape {tuple(input.shape)}: it must be (rows,"
                " channels, ...)."
            )
        if input.shape[1] != self.num_features:  # its weight might be stretched to them
            raise ValueError(
                f"SyncBatchNorm got an input of shape {tuple(input.shape)}, with"
                f" {input.shape[1]} channels: it was made for {self.num_features}."
            )

    def _keep(
        self, context: ReplicaContext, mean: torch.Tensor, variance: torch.Tensor, count: int
    ) -> None:
        """Moves the running statistics; once in a run, where replicas share this module."""
        strategy, replica = context.strategy, context.replica_id_in_sync_group
        run = weakref.ref(strategy), strategy.engine.agreement.run_ordinal
        before = _written.get(self)
        if before is not None and before[0] == run and before[1] != replica:
            return
        try:
            self._move_statistics(mean, variance * (count / (count - 1)))
        except RuntimeError as error:
            if not torch._C._are_functorch_transforms_active():
                raise
            raise RuntimeError(
                "SyncBatchNorm can't write its running statistics in a function that torch.func"
                " transforms (grad, vmap). Make it with track_running_stats=False, call eval() of"
                " it, or give its buffers to that function as arguments, for"
                " torch.func.functional_call; vmap needs one of the first two."
            ) from error
        _written[self] = run, replica

    @torch.no_grad()
    def _move_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        count = self.num_batches_tracked  # None where it was taken away, which torch allows
        if self.running_mean is not None:  # so is this
            part = self.momentum
            if part is None:
                part = 0 if count is None else 1 / (int(count) + 1)
            for running, now in ((self.running_mean, mean), (self.running_var, variance)):
                # In place it has no rule of vmap, of which torch warns where it then refuses it.
                running.copy_(running.lerp(now.to(running.dtype), part))
        if count is not None:
            count.add_(1)


def _moments(
    context: ReplicaContext, input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns mean and variance of each channel over all replicas, and of how many values."""
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    axes = [axis for axis in range(input.dim()) if axis != 1]
    count = input.numel() // max(input.shape[1], 1)
    if count:
        variance, mean = torch.var_mean(wide, axes, correction=0)
    else:  # zeros that are part of the graph: the way back is collective
        variance = mean = wide.sum(axes)
    # The count is no tensor: in functions that vmap transforms it stays one number.
    own = {"moments": torch.stack([mean, variance])[None], "count": np.array([count])}
    found = context.all_gather(own, axis=0)
    means, variances = found["moments"].unbind(1)
    total = int(found["count"].sum())
    if total < 2:
        raise ValueError(
            f"SyncBatchNorm got {total} values a channel of all replicas together, in training: it"
            " needs two or more to have a variance."
        )
    counts = torch.as_tensor(found["count"], dtype=means.dtype, device=means.device)
    weights = (counts / total)[:, None]
    mean = (weights * means).sum(0)
    # Of two groups of values, and so of any number (Chan, Golub and LeVeque, 1979).
    variance = (weights * (variances + (means - mean) ** 2)).sum(0)
    return mean, variance, total


def convert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module with each batch norm in it replaced by a `SyncBatchNorm`.

    Parameters
    ----------
    module : torch.nn.Module
        It is changed; a batch norm itself is not, and its successor is returned.

    Returns
    -------
    torch.nn.Module
        With the same parameters and buffers, not copies of them.

    Raises
    ------
    TypeError
        It is no module; or a batch norm in it has hooks, modules or a forward of its own, as one
        that is pruned or parametrized, or is lazy and has seen no input: nothing is changed.

    Notes
    -----
    Counterpart of ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``. No communication. Make
    optimizers before or after it: parameters stay the same objects.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3))
    >>> type(mr.torch.convert_sync_batchnorm(model)[1]).__name__
    'SyncBatchNorm'
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"convert_sync_batchnorm needs a torch.nn.Module, got {module!r}.")
    for path, one in module.named_modules():
        if _is_to_be_replaced(one):
            _check_is_bare(path, one)
    return _converted(module, {})


def _converted(module: Any, done: dict[Any, Any]) -> Any:
    """Returns what becomes of a module, which may be in several places."""
    if module in done:
        return done[module]
    done[module] = module
    if _is_to_be_replaced(module):
        done[module] = _successor(module)
    for name, child in list(module._modules.items()):
        if child is not None:
            module.add_module(name, _converted(child, done))
    return done[module]


def _is_to_be_replaced(module: Any) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def _check_is_bare(path: str, norm: Any) -> None:
    """Raises where a norm computes with more than its successor would have, or is none yet."""
    where = f" at {path}" if path else ""
    if any(map(is_lazy, norm.parameters())):
        raise TypeError(
            f"convert_sync_batchnorm can't replace the {type(norm).__name__}{where}: it does not"
            " know its channels yet. Call the module once with an input."
        )
    hooks = [name for name, some in vars(norm).items() if name.endswith("_hooks") and some]
    plain = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)
    if "forward" in vars(norm) or type(norm).forward not in plain:
        hooks.append("forward")
    if hooks or norm._modules:
        raise TypeError(
            f"convert_sync_batchnorm can't replace the {type(norm).__name__}{where}: it has"
            f" {', '.join([*hooks, *norm._modules])} (hooks, modules or a forward of its own, as"
            " pruning and parametrizations are), which a SyncBatchNorm in its place would not have."
            " Convert the module first and add them to what that returns, or remove them before, as"
            " torch.nn.utils.prune.remove does; derive a class with a forward of its own from"
            " mr.torch.SyncBatchNorm."
        )


def _successor(norm: Any) -> SyncBatchNorm:
    new = SyncBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
    )
    for name, parameter in norm._parameters.items():
        new.register_parameter(name, parameter)
    for name, buffer in norm._buffers.items():
        new.register_buffer(name, buffer, name not in norm._non_persistent_buffers_set)
    new.train(norm.training)
    return new
