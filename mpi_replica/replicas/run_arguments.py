"""What replicas get as arguments of a run, and what several of a rank get as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from ..core import nest
from ..core.array_libraries import library_of
from ..core.array_ways import COMMON_TYPES
from ..core.imported_libraries import imported_library
from ..core.layout import Layout
from ..core.values import Mirrored, PerReplica, are_known_apart, component_of, read_only
from .memory_of_replicas import held_by_several
from .shared_generators import SharedGenerators, is_generator
from .shared_objects import SharedObjects


class RunArguments(NamedTuple):
    """Those of the replicas of this rank."""

    #: The id, args and kwargs of each.
    of_replicas: Sequence[tuple[int, Sequence[Any], Mapping[str, Any]]]
    #: What finds that a tensor of a `Mirrored` was written; None where there is none.
    mirrored: Any = None
    #: What finds what several replicas write, or draw from.
    shared: Sequence[SharedObjects[Any]] = ()

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], layout: Layout) -> Self:
        """Returns what the replicas of this rank get, where ``run`` gets these."""
        ids = layout.local_replica_ids
        if not args and not kwargs:
            return cls([(i, (), kwargs) for i in ids])
        leaves, structure, _ = nest.flatten_arguments(args, kwargs)
        if layout.has_one_each and not any([isinstance(leaf, Mirrored) for leaf in leaves]):
            (i,) = ids  # and nothing is shared
            mine = [component_of(leaf, i, layout.num_replicas) for leaf in leaves]
            return cls([(i, *nest.unflatten(structure, mine))])
        components = [[component_of(leaf, i, layout.num_replicas) for i in ids] for leaf in leaves]
        shared = _shared(leaves, components, layout)
        if any(shared):
            components = [
                [read_only(one) if id(one) in several else one for one in mine]
                for mine, several in zip(components, shared, strict=True)
            ]
        own = zip(*components, strict=True) if leaves else [()] * len(ids)
        of_replicas = [
            (i, *nest.unflatten(structure, mine)) for i, mine in zip(ids, own, strict=True)
        ]
        mirrored = [leaf.value if isinstance(leaf, Mirrored) else None for leaf in leaves]
        return cls(
            of_replicas,
            shared_tensors("strategy.run", structure, mirrored),
            _shared_objects(structure, leaves, shared) if len(ids) > 1 else (),
        )


def _shared(
    leaves: Sequence[Any], components: Sequence[Sequence[Any]], layout: Layout
) -> list[Mapping[int, Any]]:
    """Returns of each argument, by their ids, the components that replicas of a rank share.

    They would be written once for each of them. So would one that lies in memory of what another
    replica gets as another argument.
    """
    has_one_each = layout.has_one_each
    several: Mapping[int, Any] = {}
    if not has_one_each:
        own, common = [], []
        for leaf, mine in zip(leaves, components, strict=True):
            if not isinstance(leaf, PerReplica):
                common.append(mine[0])
            elif not are_known_apart(leaf):
                own.append(mine)
        if own:
            several = held_by_several([*zip(*own, strict=True)], common)
    shared: list[Mapping[int, Any]] = []
    for leaf, mine in zip(leaves, components, strict=True):
        if isinstance(leaf, PerReplica):
            shared.append({id(one): one for one in mine if id(one) in several})
        elif has_one_each and not isinstance(leaf, Mirrored):
            shared.append({})
        else:
            shared.append({id(mine[0]): mine[0]})
    return shared


def _shared_objects(
    structure: nest.Structure, leaves: Sequence[Any], shared: Sequence[Mapping[int, Any]]
) -> list[SharedObjects[Any]]:
    """Returns what finds what several replicas of a rank write, of torch, or draw from.

    `shared` has, by their ids, what they share of each of the `leaves`; the tensor of a `Mirrored`
    none of them may write.
    """
    places: list[int] = []
    objects: list[Any] = []
    for place, (leaf, of_leaf) in enumerate(zip(leaves, shared, strict=True)):
        if not isinstance(leaf, Mirrored) or library_of(leaf.value) is None:
            places += [place] * len(of_leaf)
            objects += of_leaf.values()
    if COMMON_TYPES.issuperset(map(type, objects)):  # arrays of numpy are read-only
        return []
    all_paths = nest.leaf_paths(structure)
    paths = [all_paths[place] for place in places]
    found: list[SharedObjects[Any]] = []
    if any(map(is_generator, objects)):
        found.append(SharedGenerators(paths, objects))
    torch = imported_library("torch")
    kinds = () if torch is None else (torch.nn.Module, torch.Tensor)
    if any([isinstance(one, kinds) for one in objects]):
        from .torch_shared_state import SharedArguments  # torch is imported

        found.append(SharedArguments(paths, objects))
    return found


def shared_tensors(call: str, structure: nest.Structure, leaves: Sequence[Any]) -> Any:
    """Returns what finds tensors of torch that are written although replicas share them, or None.

    `leaves` are those of the arguments of `call`, without those that replicas may write into.
    """
    torch = imported_library("torch")
    if torch is None or not any([isinstance(leaf, torch.Tensor) for leaf in leaves]):
        return None
    from .torch_shared_state import SharedTensors  # torch is imported

    return SharedTensors(call, nest.leaf_paths(structure), leaves)
