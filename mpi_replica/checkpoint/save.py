"""Saving: every rank writes its share of the arrays, and then rank 0 the index.

The index is what makes a checkpoint: it takes the place of an older one at once, when all that it
refers to is on disk. So there is always the one or the other.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..collectives.agreement.call import Call
from ..collectives.agreement.group import Group
from ..collectives.agreement.site import CallSite
from ..collectives.agreement.stand import CallDescription
from ..collectives.agreement.steps import Agree, Steps, Texts
from ..core.array_ways import Array
from ..core.exceptions import CheckpointError
from ..core.options import CommunicationOptions
from . import files
from .abandoned_saves import remove_abandoned_saves
from .array_kinds import ArrayKind
from .decoder import structure_of
from .index import ArrayRecord, Index, index_path, packed, packed_record, unpacked_record


class Own(NamedTuple):
    """What only this rank knows: of its own replicas."""

    #: The state of their random numbers, as plain data.
    generators: Mapping[str, Any]
    #: What stands for the components of each `PerReplica`, by its name and the replica's id.
    of_replicas: Mapping[str, Mapping[str, Any]]
    #: What that refers to.
    arrays: Mapping[str, Array]


class Saving(Call):
    """The call that saves a checkpoint.

    Parameters
    ----------
    path : Path
        Of the checkpoint; its files have names that begin with it.
    state : dict
        What stands for the objects, the same on all ranks.
    arrays : dict of array
        What it refers to, the same on all ranks.
    own : Own
    """

    kind = "Checkpoint.save"

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        path: Path,
        state: Mapping[str, Any],
        arrays: Mapping[str, Array],
        own: Own,
    ) -> None:
        super().__init__(site, options)
        self.path, self.state, self.arrays, self.own = path, dict(state), dict(arrays), own
        self.detail = repr(str(path))
        self._leaves = tuple(
            ArrayKind(array.dtype, array.shape).described() for array in arrays.values()
        )
        self._structure = json.dumps(structure_of(self.state))
        # Not by `identify`, which keeps what it is given: that is large, and of another path each
        # time.
        description = self.describe()
        self.fingerprint = description.fingerprint()
        self.text = f"{description.what} at {description.where}"

    def words(self, position: int = 0) -> CallDescription:
        paths = tuple(f" array {name}" for name in self.arrays)
        return super().words()._replace(structure=self._structure, paths=paths, leaves=self._leaves)

    def steps(self, group: Group, calls: Sequence[Call], prepared: None) -> Steps[None]:
        """Writes, all ranks at the same path."""
        rank, size = group.layout.rank, group.layout.size

        undo = contextlib.ExitStack()

        def begin() -> tuple[bytes, tuple[bytes, files.NewFile | None]]:
            files.make_folder(self.path.parent)
            if rank:
                return b"", (b"", None)
            remove_abandoned_saves(self.path.parent, self.path.name)  # they take room
            mark = os.urandom(8)
            index_file = files.NewFile(index_path(self.path), mark.hex())
            undo.callback(index_file.remove)
            return b"", (mark, index_file)

        mark, index_file = yield Agree(begin, undo.close)
        first, *_ = yield Texts(mark)
        prefix = f"{self.path.name}.{first.hex()}.data-"
        names = [f"{prefix}{r:05}-of-{size:05}" for r in range(size)]
        shares = _shares(self.arrays, size)
        own_file = self.path.with_name(names[rank])
        undo.callback(files.remove, own_file)

        def write() -> tuple[bytes, bytes]:
            return b"", json.dumps(self._write(own_file, shares[rank])).encode()

        def write_index() -> tuple[bytes, None]:
            if index_file:
                records = [json.loads(text) for text in texts]
                index = self._index_of_shares(group.layout.num_replicas, names, shares, records)
                for name in index.files():  # a rank may have written into a folder of its own
                    files.require_here(self.path.with_name(name), rank)
                index_file.write(packed(index, self.path.parent))
            return b"", None

        def take_place() -> tuple[bytes, None]:
            if index_file:
                self._take_place(index_file, names)
            return b"", None

        mine = yield Agree(write, undo.close)
        texts = yield Texts(mine)
        yield Agree(write_index, undo.close)  # all is on disk
        yield Agree(take_place)

    def _write(self, file: Path, share: Sequence[str]) -> list[Any]:
        """Writes this rank's share and what is its own; returns what rank 0 must know of it."""
        arrays = [self.arrays[name] for name in share] + list(self.own.arrays.values())
        extents = files.write_new(file, arrays) if arrays else []
        own = zip(self.own.arrays.items(), extents[len(share) :], strict=True)
        records = {
            name: packed_record(ArrayRecord.of(array, file.name, extent))
            for (name, array), extent in own
        }
        return [extents[: len(share)], records, self.own.of_replicas, self.own.generators]

    def _index_of_shares(
        self,
        num_replicas: int,
        names: Sequence[str],
        shares: Sequence[Sequence[str]],
        of_ranks: Sequence[Any],
    ) -> Index:
        records: dict[str, ArrayRecord] = {}
        of_replicas: dict[str, dict[str, Any]] = {}
        for file, share, (extents, own, components, _) in zip(names, shares, of_ranks, strict=True):
            for name, extent in zip(share, extents, strict=True):
                extent = files.Extent(*extent)
                records[name] = ArrayRecord.of(self.arrays[name], file, extent)
            records |= {name: unpacked_record(*entry) for name, entry in own.items()}
            for name, of_replica in components.items():
                of_replicas.setdefault(name, {}).update(of_replica)
        generators = [own for *_, own in of_ranks]
        return Index(self.state, records, num_replicas, generators, of_replicas)

    def _take_place(self, index_file: files.NewFile, names: Sequence[str]) -> None:
        """Makes these files the checkpoint, and removes those of the older one."""
        try:
            index_file.put_in_place()
        except CheckpointError:
            index_file.remove()
            for name in names:
                files.remove(self.path.with_name(name))
            raise
        files.sync_folder(self.path.parent)
        remove_abandoned_saves(self.path.parent, self.path.name)


def _shares(arrays: Mapping[str, Array], size: int) -> list[list[str]]:
    """Returns which arrays each rank writes: about as many bytes each, the same on all ranks."""
    shares: list[list[str]] = [[] for _ in range(size)]
    loads = [0] * size
    for name in sorted(arrays, key=lambda name: -arrays[name].nbytes):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += arrays[name].nbytes
    return shares
