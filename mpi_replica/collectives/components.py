"""Components of all replicas, in a ``merge_fn``, of what was made outside of it.

Each rank has those of its own replicas. What a ``merge_fn`` makes of them must not depend on how
many these are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import nest
from ..core.context import require_once
from ..core.object_state import LEAF_TYPES
from ..core.values import PerReplica, is_made_on_ranks
from .engine import Engine
from .objects import ObjectGather

_KIND = "experimental_local_results"


def with_all_components(engine: Engine, value: Any) -> Any:
    """Returns the nest `value`, in which each distributed value has all components.

    Collective where some has not. Those of this rank are the objects that it has; others come as
    pickle makes them.

    Raises
    ------
    TypeError
        One can't be pickled, on every rank; also where there is one rank.
    """
    layout = engine.layout
    leaves, structure = nest.flatten(value)
    places = [i for i, leaf in enumerate(leaves) if is_made_on_ranks(leaf)]
    if not places or layout.num_replicas == 1:
        return value
    require_once(engine.per_replica_call, _KIND)
    paths = nest.leaf_paths(structure)
    own_ids = layout.local_replica_ids
    values = {}
    for place in places:
        leaves[place].require(layout.num_replicas)
        components = leaves[place].components(own_ids)
        leaves[place] = PerReplica(components, own_ids, layout.num_replicas)
        if layout.size > 1 or not all(map(_is_plain, components)):  # what is plain never fails
            values[f"value{paths[place]}"] = leaves[place]
    if values:
        gathered = engine.cross_replica(
            engine.make(_KIND, None, ObjectGather, _KIND, values, layout)
        )
    if layout.size > 1:
        for number, place in enumerate(places):
            components = list(gathered[number :: len(places)])
            for i, mine in zip(own_ids, leaves[place].values, strict=True):
                components[i] = mine
            leaves[place] = PerReplica(components)
    return nest.unflatten(structure, leaves)


def _is_plain(component: Any) -> bool:
    is_of_objects = isinstance(component, np.ndarray) and component.dtype.hasobject
    return type(component) in LEAF_TYPES and not is_of_objects
