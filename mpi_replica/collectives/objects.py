"""Objects that only pickle knows: those of all replicas, given to every rank."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from ..core import nest
from ..core.exceptions import in_words
from ..core.layout import Layout
from ..core.options import CommunicationOptions
from ..core.values import DistributedValues, component_of
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite
from .agreement.steps import Agree, Steps
from .blobs import all_blobs, loaded, payload_of, pickled


class ObjectGather(Call):
    """One call of ``gather_objects``.

    The object of each replica is pickled by itself. Every rank loads all of them, its own ones
    too: what pickle makes of an object is the same everywhere, and in every layout.
    """

    kind = "gather_objects"

    def __init__(
        self, site: CallSite, options: CommunicationOptions, value: Any, layout: Layout
    ) -> None:
        super().__init__(site, options)
        self._data = b"".join(_pickled(self.kind, value, layout))
        self.identify(self.detail)

    def prepare(self, group: Group, calls: Sequence[Call]) -> tuple[bytes, None]:
        return payload_of(group, self._data), None

    def steps(self, group: Group, calls: Sequence[Call], prepared: None) -> Steps[tuple[Any, ...]]:
        blobs = yield from all_blobs(group, self._data)
        objects: tuple[Any, ...] = yield Agree(
            lambda: (b"", tuple(_loaded(self.kind, blobs, group.layout)))
        )
        return objects


def _pickled(kind: str, value: Any, layout: Layout) -> list[bytes]:
    """Returns the object of each replica of this rank, out of the nest `value`, as bytes."""
    ids = layout.local_replica_ids
    leaves, structure = nest.flatten(value)
    if not any([isinstance(leaf, DistributedValues) for leaf in leaves]):
        return [pickled(kind, value, layout.describe(ids))] * len(ids)
    return [
        pickled(
            kind,
            nest.unflatten(
                structure, [component_of(leaf, i, layout.num_replicas) for leaf in leaves]
            ),
            layout.describe([i]),
        )
        for i in ids
    ]


def _loaded(kind: str, blobs: Sequence[memoryview], layout: Layout) -> Iterator[Any]:
    """Yields the objects of all replicas, out of the bytes of all ranks."""
    for rank, data in enumerate(blobs):
        file = io.BytesIO(data)
        for replica_id in layout.replica_ids(rank):
            try:
                yield loaded(file)
            except MemoryError:
                raise
            except Exception as error:
                raise TypeError(
                    f"{kind} can't load the object of {layout.describe([replica_id])} on"
                    f" rank {layout.rank}. What it is made of must be there on all ranks. pickle"
                    f" raised {in_words(error)}"
                ) from error
