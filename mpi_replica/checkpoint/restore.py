"""Restoring: the ranks agree on one index, and check all files before anything changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..collectives.call import Call
from ..collectives.callsite import CallSite
from ..collectives.engine import Engine
from ..collectives.standing import CallDescription
from ..errors import CorruptCheckpointError
from ..options import CommunicationOptions
from . import files
from .comparison import Comparison, Reader
from .index import MOST_BYTES, Index, index_path, unpacked

__all__ = ["Restoring"]

Array = np.ndarray[Any, Any]


class Restoring(Call):
    """The call that restores a checkpoint.

    Parameters
    ----------
    path : Path
    match : callable
        Given an index and what reads arrays, returns the `Comparison` with this rank's objects, or
        raises where they do not fit.
    finish : callable
        Given the index and the objects, when all have been put back.
    is_reader : bool
        Whether this rank reads the index for all.
    """

    kind = "Checkpoint.restore"

    def __init__(
        self,
        path: Path,
        match: Callable[[Index, Reader], Comparison],
        finish: Callable[[Index, dict[str, Any]], None],
        is_reader: bool,
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(site, options)
        self.path, self.match, self.finish = path, match, finish
        self.data = files.read_small(index_path(path), MOST_BYTES) if is_reader else b""
        self.identify(str(path))

    def words(self, position: int = 0) -> CallDescription:
        return CallDescription(self.kind, repr(str(self.path)), self.site, self.options.name)

    def perform(self, engine: Engine, calls: Sequence[Call]) -> list[None]:
        agreement, layout = engine.agreement, engine.layout
        agreement.agree(calls)
        with engine.moving(self):
            data = engine.carry(engine.transport.all_gather_bytes, self.data, None)[0]
        with agreement.preparing(calls):
            index = unpacked(data, index_path(self.path))
            paths = {name: self.path.with_name(name) for name in index.files()}
            checked: dict[str, files.Version] = {}
            matching = self.match(index, functools.partial(_read, index, paths, checked))
            for position, (name, path) in enumerate(paths.items()):
                if position % layout.size == layout.rank:
                    extents = [r.extent for r in index.arrays.values() if r.file == name]
                    checked[name] = files.check(path, extents)
                elif not path.is_file():
                    raise CorruptCheckpointError(
                        f"{path} is not there on this rank. All ranks must see one folder: use a"
                        " file system that all hosts share."
                    )
        agreement.agree(calls)  # all files are as they were written
        with agreement.preparing(calls):
            values = matching.put_back()
        agreement.agree(calls)  # no object refused its state
        with agreement.preparing(calls):
            self.finish(index, values)
        agreement.agree(calls)
        return [None]


def _read(
    index: Index,
    paths: Mapping[str, Path],
    checked: Mapping[str, files.Version],
    name: str,
    array: Array,
) -> None:
    record = index.arrays[name]
    files.read_into(paths[record.file], record.extent, array, checked.get(record.file))
