"""Objects that hold a state: who they are, and how it is got and put back.

Those with ``state_dict()`` and ``load_state_dict()``, as torch has them, and generators of random
numbers. torch is looked up where the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from . import randomness
from .array_ways import COMMON_TYPES

#: What most leaves of nests are: neither objects nor containers.
LEAF_TYPES = COMMON_TYPES | {str, bytes, type(None)}


def has_state(value: Any) -> bool:
    """Returns whether `value` is an object that gives a state, and takes it back."""
    if type(value) in COMMON_TYPES:
        return False
    return (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")) or is_generator(
        value
    )


def is_generator(value: Any) -> bool:
    """Returns whether `value` is a generator of random numbers, of torch or numpy."""
    return isinstance(value, np.random.Generator) or _is_of_torch(value, "Generator")


def is_module(value: Any) -> bool:
    """Returns whether `value` is a module of torch: its state has a tensor by each name."""
    return _is_of_torch(value, "nn", "Module")


def is_optimizer(value: Any) -> bool:
    """Returns whether `value` is an optimizer of torch: its state grows at the first step."""
    return _is_of_torch(value, "optim", "Optimizer")


def is_compared(value: Any) -> bool:
    """Returns whether the state of `value` is known to be bits that can be compared."""
    return (
        is_module(value)
        or is_optimizer(value)
        or is_generator(value)
        or _is_of_torch(value, "optim", "lr_scheduler", "LRScheduler")
        or _is_of_torch(value, "amp", "GradScaler")
    )


def is_lazy(value: Any) -> bool:
    """Returns whether `value` is a parameter of torch whose shape is not known yet."""
    return _is_of_torch(value, "nn", "parameter", "UninitializedTensorMixin")


def _is_of_torch(value: Any, *names: str) -> bool:
    kind: Any = sys.modules.get("torch")
    if kind is None:
        return False
    for name in names:
        kind = getattr(kind, name, None)  # None also while it is being imported
    return kind is not None and isinstance(value, kind)


def places_of(live: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Returns the leaves of a nest that may be objects, each with its place as errors name it."""
    return ((place_text(path, keys), leaf) for keys, leaf in leaves_of(live))


def leaves_of(live: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of a nest that may be objects, each with the keys by which it is found.

    These follow on `keys`. Unlike their texts they are never those of another leaf.
    """
    if isinstance(live, (Mapping, list, tuple)) and not has_state(live):
        items = live.items() if isinstance(live, Mapping) else enumerate(live)
        for key, item in items:
            if type(item) not in LEAF_TYPES:
                yield from leaves_of(item, (*keys, key))
    else:
        yield keys, live


def place_text(path: str, keys: Sequence[Any]) -> str:
    """Returns the place of a leaf as errors name it."""
    return path + "".join(f"[{key!r}]" for key in keys)


def objects_in(value: Any) -> Iterator[Any]:
    """Returns the objects with a state in a nest."""
    return (leaf for _, leaf in places_of(value) if has_state(leaf))


def holds_objects(value: Any) -> bool:
    """Returns whether there are objects with a state in a nest."""
    return any(True for _ in objects_in(value))


def are_alike(components: Any) -> bool:
    """Returns whether the components of a `PerReplica` are to be the same: they hold objects.

    Generators alone are there to differ.
    """
    return any(not is_generator(found) for part in components for found in objects_in(part))


def state_in(value: Any) -> Any:
    """Returns the state of an object, as plain data and arrays."""
    if isinstance(value, np.random.Generator):
        return randomness.state_of(value)
    return value.get_state() if is_generator(value) else value.state_dict()


def put_state(value: Any, state: Any) -> None:
    """Gives an object a state that `state_in` gave."""
    if isinstance(value, np.random.Generator):
        randomness.put_state(value, state)
    elif is_generator(value):
        value.set_state(state)
    elif is_optimizer(value):
        _put_state_of_optimizer(value, state)
    else:
        value.load_state_dict(state)


def drop_gradients(value: Any) -> None:
    """Removes what torch has added up in a tensor, or in those of a module or an optimizer."""
    if is_module(value):
        tensors = value.parameters()
    elif is_optimizer(value):
        tensors = (one for group in value.param_groups for one in group["params"])
    else:
        tensors = [value] if _is_of_torch(value, "Tensor") else []
    for tensor in tensors:
        tensor.grad = None


def _put_state_of_optimizer(optimizer: Any, state: Any) -> None:
    """Gives it a state; tensors of its groups, such as a learning rate, come to where they were.

    Those of its parameters torch puts where these are.
    """
    groups = optimizer.param_groups
    devices = [
        {key: part.device for key, part in group.items() if _is_of_torch(part, "Tensor")}
        for group in groups
    ]
    optimizer.load_state_dict(state)
    for group, of_group in zip(optimizer.param_groups, devices, strict=True):
        for key in of_group.keys() & group.keys():
            if _is_of_torch(group[key], "Tensor"):
                group[key] = group[key].to(of_group[key])


def parameter_shapes(optimizer: Any) -> list[list[list[int] | None]]:
    """Returns the shapes of an optimizer's parameters, group by group; None where not known yet.

    Its state knows them by their position alone.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    return [[None if is_lazy(one) else list(one.shape) for one in group] for group in groups]


def needed_options(optimizer: Any) -> list[list[str]]:
    """Returns, group by group, which options of an optimizer a state that it takes must have.

    It takes those of the state in place of its own. Of a state of an older version torch fills in
    what it has added since: switches, whose default is a bool or None. What others add to a group,
    such as schedulers, is no option.
    """
    return [
        [
            name
            for name in getattr(optimizer, "defaults", {})
            if name in group and not isinstance(group[name], (bool, type(None)))
        ]
        for group in optimizer.param_groups
    ]
