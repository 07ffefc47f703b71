"""Components of all replicas, in a ``merge_fn``, of what was made outside of it.

Each rank has those of its own replicas. What a ``merge_fn`` makes of them must not depend on how
many these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import nest
from ..core.array_libraries import (
    Origin,
    as_constants,
    copied,
    dtype_of,
    from_numpy,
    is_in_c_order,
    is_strided,
    origin_of,
    to_numpy,
)
from ..core.array_ways import Array
from ..core.context import require_once
from ..core.layout import Layout
from ..core.object_state import LEAF_TYPES
from ..core.options import CommunicationOptions
from ..core.values import PerReplica, is_made_on_ranks, read_only
from .agreement.site import CallSite
from .arguments import refuses_writes
from .blobs import pickled
from .engine import Engine
from .objects import ObjectGather


class ComponentGather(ObjectGather):
    """One call of ``experimental_local_results`` in a ``merge_fn``.

    Parameters
    ----------
    columns : sequence of sequences
        The components of this rank's replicas, of each of some values.
    paths : sequence of str
        Where these values are.
    """

    kind = "experimental_local_results"

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        columns: Sequence[Sequence[Any]],
        paths: Sequence[str],
        layout: Layout,
    ) -> None:
        self.detail = ", ".join([f"value{path}" for path in paths])
        ids = layout.local_replica_ids
        rows = [[_Travelling.of(one) for one in row] for row in zip(*columns, strict=True)]
        try:
            super().__init__(site, options, PerReplica(rows, ids, layout.num_replicas), layout)
        except TypeError:
            for path, column in zip(paths, columns, strict=True):
                for i, one in zip(ids, column, strict=True):
                    pickled(self.kind, one, f"value{path} of {layout.describe([i])}")
            raise


class _Travelling(NamedTuple):
    """An array on its way, also of another library: its elements in C order, and nothing beside."""

    array: Array
    origin: Origin | None
    refuses_writes: bool

    @classmethod
    def of(cls, component: Any) -> Any:
        """Returns it for an array; anything else as it is."""
        origin = origin_of(component)
        if not _is_array(component) or (origin is None and type(component) is not np.ndarray):
            return component
        array = np.asarray(to_numpy(component), order="C")
        return cls(array, origin, refuses_writes(component))

    def arrived(self, beside: Any) -> Any:
        """Returns the array; on the device of `beside`, where that is one of its library."""
        if self.origin is not None:
            return from_numpy(self.array, self.origin, beside)
        return read_only(self.array) if self.refuses_writes else self.array


def with_all_components(engine: Engine, value: Any) -> Any:
    """Returns the nest `value`, in which each distributed value has all components.

    Collective where some may not have. Those of this rank are the objects that it has, but for
    arrays in another order than C's, of which it gets copies, plain ones for those in files, and
    constants of what torch records. Others come as pickle makes them.

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
    require_once(engine.per_replica_call, ComponentGather.kind)
    ids = layout.local_replica_ids
    columns = []
    for place in places:
        leaves[place].require(layout.num_replicas)
        columns.append(as_constants(leaves[place].components(ids))[0])
    if layout.size > 1 or not all([_is_array(one) for column in columns for one in column]):
        paths = nest.leaf_paths(structure)
        gathered = engine.cross_replica(
            engine.make(
                ComponentGather.kind,
                None,
                ComponentGather,
                columns,
                [paths[place] for place in places],
                layout,
            )
        )
    else:  # nothing would fail on several ranks
        gathered = [[None] * len(places)] * len(ids)
    for number, (place, column) in enumerate(zip(places, columns, strict=True)):
        components = [
            one.arrived(column[0]) if isinstance(one, _Travelling) else one
            for one in [row[number] for row in gathered]
        ]
        for i, one in zip(ids, column, strict=True):
            is_moved = is_strided(one) and not is_in_c_order(one)
            components[i] = copied(one, "C") if is_moved else one
        leaves[place] = PerReplica(components)
    return nest.unflatten(structure, leaves)


def _is_array(component: Any) -> bool:
    """Returns whether it is an array, a number or a text, which can travel."""
    if type(component) in LEAF_TYPES:
        return not (isinstance(component, np.ndarray) and component.dtype.hasobject)
    try:
        return origin_of(component) is not None and dtype_of(component) is not None
    except TypeError:  # numpy has no such dtype, or it has no values
        return False
