"""Objects that only pickle knows: those of all replicas, given to every rank."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
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
from .blobs import all_blobs, payload_of, pickled


class ObjectGather(Call):
    """One call of ``gather_objects``, or of another kind that gathers objects.

    The object of each replica is pickled by itself. Every rank loads all of them, its own ones
    too: what pickle makes of an object is the same everywhere, and in every layout.

    Parameters
    ----------
    values : dict of nests
        By what errors call them. Of each, the objects of a replica follow each other in the result.
    """

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        values: Mapping[str, Any],
        layout: Layout,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.detail = ", ".join(values)
        columns = [_pickled(kind, name, value, layout) for name, value in values.items()]
        self._count = len(columns)
        self._data = b"".join(itertools.chain(*zip(*columns, strict=True)))
        self.identify(self.detail)

    def prepare(self, group: Group, calls: Sequence[Call]) -> tuple[bytes, None]:
        return payload_of(group, self._data), None

    def steps(self, group: Group, calls: Sequence[Call], prepared: None) -> Steps[tuple[Any, ...]]:
        blobs = yield from all_blobs(group, self._data)
        objects: tuple[Any, ...] = yield Agree(lambda: (b"", tuple(self._loaded(blobs, group))))
        return objects

    def _loaded(self, blobs: Sequence[memoryview], group: Group) -> Iterator[Any]:
        """Yields the objects of all replicas, out of the bytes of all ranks."""
        layout = group.layout
        for rank, data in enumerate(blobs):
            file = io.BytesIO(data)
            for replica_id in [i for i in layout.replica_ids(rank) for _ in range(self._count)]:
                try:
                    yield pickle.load(file)
                except MemoryError:
                    raise
                except Exception as error:
                    raise TypeError(
                        f"{self.kind} can't load the object of {layout.describe([replica_id])} on"
                        f" rank {layout.rank}. What it is made of must be there on all ranks."
                        f" pickle raised {in_words(error)}"
                    ) from error


def _pickled(kind: str, name: str, value: Any, layout: Layout) -> list[bytes]:
    """Returns the object of each replica of this rank, out of the nest `value`, as bytes."""
    ids = layout.local_replica_ids
    leaves, structure = nest.flatten(value)
    what = f"{name} of " if name else ""
    if not any([isinstance(leaf, DistributedValues) for leaf in leaves]):
        return [pickled(kind, value, f"{what}{layout.describe(ids)}")] * len(ids)
    return [
        pickled(
            kind,
            nest.unflatten(
                structure, [component_of(leaf, i, layout.num_replicas) for leaf in leaves]
            ),
            f"{what}{layout.describe([i])}",
        )
        for i in ids
    ]
