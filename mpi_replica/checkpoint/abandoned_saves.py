"""Leftovers: what a save leaves behind that was broken off, or whose checkpoint is replaced."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..core.exceptions import CheckpointError
from . import files
from .index import MOST_BYTES, index_path

# Behind the name of a checkpoint: that of a save (see `Saving`), and which file of it this is.
_OF_SAVE = r"\.([0-9a-f]{16})\.(?:data-\d{5,}-of-\d{5,}|(index\.new))"


def remove_abandoned_saves(folder: Path, checkpoint: str, *, numbered: bool = False) -> None:
    """Removes the files in a folder that no checkpoint has, and that no save can need any more.

    A save comes to no end without its new index, which rank 0 makes before all else and keeps
    locked: so it has ended where that file is gone, or nobody has locked it. What can't be told
    stays, such as the files of a save that was broken off where the file system has no locks.

    Parameters
    ----------
    folder : path
    checkpoint : str
        Whose files these are; with `numbered`, those of all that have a number behind that name.
    """
    begin, its_name = f"{checkpoint}.", re.escape(checkpoint)
    if numbered:
        begin, its_name = f"{checkpoint}-", rf"{its_name}-\d+"
    try:
        # There may be thousands of other files, and of checkpoints.
        names = {name for name in os.listdir(folder) if name.startswith(begin)}
    except OSError:
        return
    is_file = re.compile(f"({its_name}){_OF_SAVE}").fullmatch
    saves: dict[str, dict[str, list[str]]] = {}
    unfinished = set()
    for match in filter(None, map(is_file, names)):
        name, save, is_new_index = match.groups()
        saves.setdefault(name, {}).setdefault(save, []).append(match.string)
        if is_new_index:
            unfinished.add(name)
    for name, of_save in saves.items():
        is_alone = len(of_save) == 1 and name not in unfinished
        if is_alone and len(saves) > 1 and f"{name}.index" in names:
            continue  # these are its own: of many checkpoints the indices are not read
        index = index_path(folder / name)
        new = {save: files.beside(index, save) for save in of_save}
        ended = [save for save in of_save if files.remove_abandoned(new[save])]
        data = _content(index)  # read after that: a new one may have taken its place
        for save in ended:
            if data is not None and save.encode() not in data:
                for file in sorted(of_save[save]):
                    files.remove(folder / file)


def _content(index: Path) -> bytes | None:
    """Returns the bytes of an index, empty where there is none; None where it can't be read."""
    try:
        return files.read_small(index, MOST_BYTES)
    except CheckpointError as error:
        return b"" if isinstance(error.__cause__, FileNotFoundError) else None
