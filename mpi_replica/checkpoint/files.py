"""Arrays in files, and files that are never half there: all that checkpoints ask of the system.

A file is written under its own name only where nobody knows that name yet. What replaces another
file is written beside it, forced to disk, and renamed: after a crash there is the one or the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..core.array_ways import Array
from ..core.exceptions import CheckpointError, CorruptCheckpointError

# Large enough to be fast, and small enough that the sum finds in the cache what was just written.
_BLOCK_BYTES = 1 << 22

#: What to do about one that is torn or corrupt, where there is an older one.
TAKE_OLDER = "Restore an older checkpoint."


class Extent(NamedTuple):
    """Where an array lies in a file, and the CRC-32 of its bytes."""

    offset: int
    size_bytes: int
    crc32: int


def make_folder(folder: Path) -> None:
    """Makes a folder, and those that it is in, unless it is there.

    Raises
    ------
    CheckpointError
        The system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder} can't be made: {error.strerror or error}. Choose another path."
        ) from error


def write_new(path: Path, arrays: Sequence[Array]) -> list[Extent]:
    """Writes arrays one behind the other into a new file, and forces it to disk.

    Their bytes are in C order. Memory: a few MiB, whatever their layout.

    Raises
    ------
    CheckpointError
        The file is there already, or the system refuses; names the file.
    """
    extents = []
    offset = 0
    with _refusals_named(path, "written"), _forced_to_disk(path) as file:
        for array in arrays:
            crc = 0
            for block in _blocks(array):
                crc = zlib.crc32(block, crc)
                _write_all(file, block)
            extents.append(Extent(offset, array.nbytes, crc))
            offset += array.nbytes
    return extents


@contextlib.contextmanager
def _forced_to_disk(path: Path) -> Iterator[int]:
    """Makes a file and opens it to write to; where that goes well, all is on disk at the end."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def _blocks(array: Array) -> Iterator[memoryview]:
    """Yields the bytes of an array in C order."""
    for part, plain in _plain_parts(array):
        if plain is not part:
            plain[...] = part
        whole = _bytes_of(plain)
        for start in range(0, len(whole), _BLOCK_BYTES):
            yield whole[start : start + _BLOCK_BYTES]


def _plain_parts(array: Array) -> Iterator[tuple[Array, Array]]:
    """Yields parts of an array, in C order, each with itself or a contiguous one of its shape.

    All of these share the memory of one block.
    """
    array = np.asarray(array)  # a part of a np.matrix has its two axes again
    block = bytearray(0 if array.flags.c_contiguous else min(array.nbytes, _BLOCK_BYTES))
    for part in _parts(array):
        is_plain = part.flags.c_contiguous
        yield part, part if is_plain else np.ndarray(part.shape, part.dtype, buffer=block)


def _parts(array: Array) -> Iterator[Array]:
    """Yields parts of an array, in C order: each is contiguous, or at most a block large."""
    if not array.nbytes:
        return
    if array.flags.c_contiguous or array.nbytes <= _BLOCK_BYTES:
        yield array
        return
    rows = max(1, _BLOCK_BYTES * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        if len(part) == 1:
            yield from _parts(part[0, ...])  # an array also of one item
        else:
            yield part


def _bytes_of(array: Array) -> memoryview:
    """Returns the memory of a contiguous array."""
    return np.asarray(array).reshape(-1).view(np.uint8).data


def _write_all(file: int, block: memoryview) -> None:
    while len(block):
        written = os.write(file, block)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        block = block[written:]


# The names of those that this process writes: its locks tell only other processes of them, and are
# gone once it closes any descriptor of the file. A child that was forked writes none of them.
_written_here: set[str] = set()
os.register_at_fork(after_in_child=_written_here.clear)


class NewFile:
    """A file that is written beside another one, to take its place.

    It is there from the beginning, and locked, where the file system has locks: so others see that
    somebody works on it, as long as this process lives.

    Parameters
    ----------
    path : Path
        Whose place it takes.
    mark : str
        Tells it from those that others make.

    Raises
    ------
    CheckpointError
        The system refuses.
    """

    def __init__(self, path: Path, mark: str) -> None:
        self._path, self._beside = path, beside(path, mark)
        _written_here.add(self._beside.name)  # before anybody can see it
        self._forget = weakref.finalize(self, _written_here.discard, self._beside.name)
        while True:
            with _refusals_named(self._beside, "written"):
                self._file = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._close = weakref.finalize(self, os.close, self._file)
            with contextlib.suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_EX)
            if os.path.lexists(self._beside):
                return
            self._close()  # another process has removed it before it was locked

    def write(self, data: bytes) -> None:
        """Writes all of it, and forces it and the folder to disk.

        Raises
        ------
        CheckpointError
            The system refuses.
        """
        with _refusals_named(self._beside, "written"):
            _write_all(self._file, memoryview(data))
            os.fsync(self._file)
            _sync(self._path.parent)

    def put_in_place(self) -> None:
        """Puts it in the place of the file, at once; `sync_folder` makes that last.

        Raises
        ------
        CheckpointError
            The system refuses; the file is as it was.
        """
        with _refusals_named(self._path, "written"):
            os.replace(self._beside, self._path)
        self._close()
        self._forget()

    def remove(self) -> None:
        """Removes it, where it has not taken the place."""
        remove(self._beside)
        self._close()
        self._forget()


def beside(path: Path, mark: str) -> Path:
    """Returns where a `NewFile` is written."""
    return path.with_name(f"{path.stem}.{mark}{path.suffix}.new")


def remove_abandoned(path: Path) -> bool:
    """Removes a `NewFile` that nobody writes; returns whether there is none any more."""
    if path.name in _written_here:
        return False
    try:
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # no link, no pipe
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(file)
    except FileNotFoundError:
        return True
    except OSError:  # it is locked, no file, or that can't be told
        return False
    return True


def names_in(folder: Path) -> list[str]:
    """Returns the names of what is in a folder; none where there is no such folder.

    Raises
    ------
    CheckpointError
        The system refuses; also where it, or what it is in, is no folder.
    """
    with _refusals_named(folder, "read"):
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise CheckpointError(
                f"{folder} is no folder of checkpoints: {error.strerror}. Give the path of a"
                " folder, or of one that can be made."
            ) from error


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to disk.

    Raises
    ------
    CheckpointError
        The system refuses.
    """
    with _refusals_named(folder, "written"):
        _sync(folder)


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems can't
            raise
    finally:
        os.close(file)


def head_of(path: Path, most_bytes: int) -> bytes:
    """Returns the first bytes of a file; none where there is no such file.

    Raises
    ------
    CheckpointError
        The system refuses.
    """
    try:
        with _opened(path) as file:
            return file.read(most_bytes)
    except CorruptCheckpointError:
        return b""


def read_small(path: Path, most_bytes: int) -> bytes:
    """Returns what is in a file.

    Raises
    ------
    CheckpointError
        It can't be read, or is larger than it can be.
    """
    with _opened(path) as raw, io.BufferedReader(raw) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        data = file.read(min(size_bytes, most_bytes) + 1)  # it allocates what it is given
    if len(data) > most_bytes:
        raise CorruptCheckpointError(f"{path} is no index of a checkpoint: it is too large.")
    return data


def require_here(path: Path, rank: int) -> None:
    """Raises unless this rank sees a file that others see.

    Raises
    ------
    CheckpointError
        It does not: the folder is another one here.
    """
    try:
        os.stat(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} is not there on rank {rank}: {error.strerror or error}. All ranks must see one"
            " folder: use a file system that all hosts share."
        ) from error


#: What changes when a file is written to, or is another one of the same name.
Version = tuple[int, ...]


def check(path: Path, extents: Sequence[Extent]) -> Version:
    """Raises unless all of these bytes are there, and are what was written.

    Returns
    -------
    Version
        What `read_into` takes for checked.

    Raises
    ------
    CheckpointError
        The file is missing, too short, or has other bytes.
    """
    block = bytearray(_BLOCK_BYTES)
    with _opened(path) as file:
        version = _version(file)
        for extent in extents:
            file.seek(extent.offset)
            crc, left = 0, extent.size_bytes
            while left:
                view = memoryview(block)[: min(left, _BLOCK_BYTES)]
                got = file.readinto(view)
                if not got:
                    raise _torn(path, extent.offset + extent.size_bytes)
                crc = zlib.crc32(view[:got], crc)
                left -= got
            if crc != extent.crc32:
                raise _corrupt(path, extent)
    return version


def read_into(path: Path, extent: Extent, array: Array, checked: Version | None = None) -> None:
    """Fills an array of as many bytes, in whatever layout. Memory: a few MiB.

    Parameters
    ----------
    path : Path
    extent : Extent
    array : array
    checked : Version, optional
        What `check` returned on this rank: the bytes are not checked once more, unless the file has
        changed.

    Raises
    ------
    CheckpointError
        As for `check`; the array may be written then.
    """
    crc = 0
    with _opened(path) as file:
        is_checked = _version(file) == checked
        file.seek(extent.offset)
        for part, plain in _plain_parts(array):
            target = _bytes_of(plain)
            while target:
                got = file.readinto(target[:_BLOCK_BYTES])
                if not got:
                    raise _torn(path, extent.offset + extent.size_bytes)
                if not is_checked:
                    crc = zlib.crc32(target[:got], crc)
                target = target[got:]
            if plain is not part:
                part[...] = plain
    if not is_checked and crc != extent.crc32:
        raise _corrupt(path, extent)


def _version(file: io.FileIO) -> Version:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def remove(path: Path) -> None:
    """Removes a file that nothing refers to; one that can't be removed does no harm."""
    with contextlib.suppress(OSError):
        os.unlink(path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.FileIO]:
    """Returns a context with a file that is read, in which refusals are named."""
    with _refusals_named(path, "read"), open(path, "rb", 0, opener=_open_no_pipe) as file:
        yield file


def _open_no_pipe(name: str, flags: int) -> int:
    """Opens a file; a pipe, which would wait for who writes into it, is none."""
    descriptor = os.open(name, flags | os.O_NONBLOCK)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), name)
    return descriptor


# No file of that name, but a folder, a socket, a pipe or a link to nothing.
_MISSING = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV}


@contextlib.contextmanager
def _refusals_named(path: Path, done: str) -> Iterator[None]:
    """Returns a context in which what the system refuses is a `CheckpointError` that names a file.

    `done` is what is done with the file: read, or written. Where there is no file to read, the
    checkpoint is corrupt. Otherwise it may be whole, and be read at another time.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        is_missing = done == "read" and error.errno in _MISSING
        raise (CorruptCheckpointError if is_missing else CheckpointError)(
            f"{path} can't be {done}: {error.strerror or error}. Look for free space, permissions,"
            " and whether the folder is there on all hosts."
        ) from error


def _torn(path: Path, size_bytes: int) -> CheckpointError:
    return CorruptCheckpointError(
        f"{path} is torn: it has less than {size_bytes} bytes. {TAKE_OLDER}"
    )


def _corrupt(path: Path, extent: Extent) -> CheckpointError:
    return CorruptCheckpointError(
        f"{path} is corrupt: the {extent.size_bytes} bytes from byte {extent.offset} on have"
        f" another checksum than when they were written. {TAKE_OLDER}"
    )
