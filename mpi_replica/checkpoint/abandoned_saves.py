"""Leftovers: what a save leaves behind that was broken off, or whose checkpoint is replaced."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..core.exceptions import CheckpointError
from . import files
from .index import MOST_BYTES, index_path

# The name of a checkpoint, that of a save (see `Saving`), and which file of it this is.
_FILE = re.compile(r"(.+)\.([0-9a-f]{16})\.(?:data-\d{5,}-of-\d{5,}|index\.new)", re.DOTALL)


def remove_abandoned_saves(folder: Path, checkpoints: str) -> None:
    """Removes the files in a folder that no checkpoint has, and that no save can need any more.

    A save comes to no end without its new index, which rank 0 makes before all else and keeps
    locked: so it has ended where that file is gone, or nobody has locked it. What can't be told
    stays, such as the files of a save that was broken off where the file system has no locks.

    Parameters
    ----------
    folder : path
    checkpoints : str
        A regular expression: the names of the checkpoints whose files these are.
    """
    try:
        names = set(os.listdir(folder))
    except OSError:
        return
    saves: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        match = _FILE.fullmatch(name)
        if match and re.fullmatch(checkpoints, match[1]):
            saves.setdefault(match[1], {}).setdefault(match[2], []).append(name)
    for checkpoint, of_save in saves.items():
        index = index_path(folder / checkpoint)
        new = {save: files.beside(index, save) for save in of_save}
        is_alone = len(of_save) == 1 and names.isdisjoint(path.name for path in new.values())
        if is_alone and index.name in names and len(saves) > 1:
            continue  # these are its own: of many checkpoints the indices are not read
        ended = [save for save in of_save if files.remove_abandoned(new[save])]
        data = _content(index)  # read after that: a new one may have taken its place
        for save in ended:
            if data is not None and save.encode() not in data:
                for name in of_save[save]:
                    files.remove(folder / name)


def _content(index: Path) -> bytes | None:
    """Returns the bytes of an index, empty where there is none; None where it can't be read."""
    try:
        return files.read_small(index, MOST_BYTES)
    except CheckpointError as error:
        return b"" if isinstance(error.__cause__, FileNotFoundError) else None
