"""Restoring: the ranks agree on one index, and check all files before anything changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..collectives.agreement.call import Call
from ..collectives.agreement.group import Group
from ..collectives.agreement.site import CallSite
from ..collectives.agreement.steps import Agree, Steps, Texts
from ..core.array_ways import Array
from ..core.exceptions import CorruptCheckpointError
from ..core.layout import Layout
from ..core.options import CommunicationOptions
from . import files
from .comparison import Comparison
from .index import MOST_BYTES, SUFFIX, Index, checkpoint_path, index_path, unpacked
from .saved_values import Reader


class Restoring(Call):
    """The call that restores a checkpoint.

    Parameters
    ----------
    path : path_like
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
        site: CallSite,
        options: CommunicationOptions,
        path: str | os.PathLike[str],
        match: Callable[[Index, Reader], Comparison],
        finish: Callable[[Index, dict[str, Any]], None],
        is_reader: bool,
    ) -> None:
        super().__init__(site, options)
        if path is None:
            raise TypeError(
                "Checkpoint.restore got None, as latest_checkpoint gives where there is none yet."
                " Call restore_or_initialize of a CheckpointManager, which begins anew then."
            )
        self.path, self.match, self.finish = checkpoint_path(path), match, finish
        self.data = _index_data(self.path) if is_reader else b""
        self.detail = repr(str(self.path))
        self.identify(self.detail)

    def steps(self, group: Group, calls: Sequence[Call], prepared: None) -> Steps[None]:
        """Reads on all ranks, and puts back where none of them failed."""
        data, *_ = yield Texts(self.data)

        def check() -> tuple[bytes, tuple[Index, Comparison]]:
            index = unpacked(data, index_path(self.path))
            return b"", (index, self._checked(index, group.layout))

        index, matching = yield Agree(check)  # all files are as they were written
        values = yield Agree(lambda: (b"", matching.put_back()))  # no object refuses its state
        yield Agree(lambda: (b"", self.finish(index, values)))

    def _checked(self, index: Index, layout: Layout) -> Comparison:
        """Returns the objects with their state; each rank checks its share of the files."""
        paths = {name: self.path.with_name(name) for name in index.files()}
        checked: dict[str, files.Version] = {}

        def read(name: str, array: Array) -> None:
            record = index.arrays[name]
            files.read_into(paths[record.file], record.extent, array, checked.get(record.file))

        for path in paths.values():
            # Of several errors that of replica 0's rank is raised: what all miss is corrupt.
            if layout.rank == layout.rank_of(0):
                files.check(path, [])
            else:
                files.require_here(path, layout.rank)
        matching = self.match(index, read)
        for position, (name, path) in enumerate(paths.items()):
            if position % layout.size == layout.rank:
                extents = [r.extent for r in index.arrays.values() if r.file == name]
                checked[name] = files.check(path, extents)
        return matching


def _index_data(path: Path) -> bytes:
    """Returns the bytes of the index of a checkpoint.

    Raises
    ------
    CheckpointError
        It can't be read; where there is none, it says what else the path may be.
    """
    index = index_path(path)
    try:
        return files.read_small(index, MOST_BYTES)
    except CorruptCheckpointError as error:
        refusal = error.__cause__
        if not isinstance(refusal, FileNotFoundError):
            raise
        remedy = (
            "There is no checkpoint of that name on rank 0's host. Restore the path that was given"
            " to save, or that a CheckpointManager gave."
        )
        if path.suffix == SUFFIX:
            remedy = f"Leave {SUFFIX} off: the path of a checkpoint is {path.with_suffix('')}."
        elif os.path.isdir(path):
            remedy = f"{path} is a folder: restore mr.latest_checkpoint(folder), if any."
        raise CorruptCheckpointError(
            f"{index} can't be read: {refusal.strerror}. {remedy}"
        ) from refusal
