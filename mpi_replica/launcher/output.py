"""What a job writes, on its way through: one look of tags, and what launchers say of deaths.

Whoever reads it may be slow, and may have said that writing must not block.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import selectors
import stat
import sys
from typing import IO

from ..core.exceptions import LaunchError

#: What MPICH's launcher is told to mark output with: no text of a program looks like it.
MPICH_MARK = "\x1e%r\x1f"

_SECONDS_TO_TELL = 2.0

_READ_BYTES = 1 << 16
# A pipe that can be written to takes so much at once: nothing blocks, and signals are served.
_WRITE_BYTES = select.PIPE_BUF

# What shows the rank: [2]<stdout>: of Open MPI 5, [1,2]<stdout>: of 4, and 2: of srun. They stand
# at the beginning of lines, and where the piece ends that the launcher has read.
_MARKS = {
    "openmpi": rb"\[(?:\d+,)?(\d+)\]<std(?:out|err|diag)>: ?",
    "mpich": rb"\x1e(\d+)\x1f",
    "srun": rb"(?:(?<=\n)|\A) *(\d+): ",
}
# What may be the beginning of such a mark, at the end of what has come so far.
_BEGINNINGS = {
    "openmpi": rb"\[[\d,]*(?:\](?:<[a-z]*(?:>:?)?)?)?\Z",
    "mpich": rb"\x1e\d*\Z",
    "srun": rb"(?:(?<=\n)|\A)[^\n]+\Z",
}


def tell(text: str, command: str = "run") -> None:
    """Writes a line of the command's own, unless nobody reads, or no more can be written."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], _SECONDS_TO_TELL)[1]:
            line = f"mpi_replica {command}: {text}\n"
            os.write(2, line.encode(errors="backslashreplace"))


def show(text: str, name: str) -> None:
    """Prints what a command was asked for, at once.

    Raises
    ------
    LaunchError
        It can't be written, as on a disk that is full; a reader may have seen enough of it.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        # What is left shall not come up at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # `| head` has seen enough
            raise LaunchError(f"{name} can't be written: {error}") from None


def is_output_blocked() -> bool:
    """Returns whether stdout or stderr takes nothing now, since nobody reads it."""
    return len(select.select([], [1, 2], [], 0.0)[1]) < 2


def is_output_unread() -> bool:
    """Returns whether what read stdout or stderr has ended: whatever writes there would, too."""
    streams = select.poll()
    for number in (1, 2):
        streams.register(number, 0)
    return any(event & select.POLLERR for _, event in streams.poll(0))


def may_fill_up(stream: int) -> bool:
    """Returns whether a stream goes to a file, of which the disk may take no more.

    Open MPI's launcher loses that without a word.
    """
    mode = os.fstat(stream).st_mode
    return not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(stream))


def open_standard_streams() -> None:
    """Opens those that are closed: other files would get their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def show_for_shell(line: str) -> None:
    """Prints a line with the names of files in it as they are, whatever the encoding of texts."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors="surrogateescape")
    show(line, "the line")


class OutputStream:
    """A stream from a pipe of the launcher to a file of the command's own.

    It reads on when all that it has read is written: a job whose output nobody reads waits.

    Parameters
    ----------
    selector : BaseSelector
        Has `pass_on` as data of what it waits for.
    pipe : file
    target : int
        1 or 2.
    notice : DeathNotice
        Gets all that comes.
    tags : Tags, optional
        What is written instead of it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        pipe: IO[bytes],
        target: int,
        notice: DeathNotice,
        tags: Tags | None,
    ) -> None:
        self.is_closed = False
        self._selector = selector
        self._pipe = pipe
        self._target = target
        self._notice = notice
        self._tags = tags
        self._has_ended = False
        self._is_lost = False
        self._text = b""
        selector.register(pipe, selectors.EVENT_READ, self.pass_on)

    @property
    def has_text(self) -> bool:
        """Whether something that was read is not yet written."""
        return bool(self._text)

    def pass_on(self) -> None:
        """Reads or writes, whichever it waits for and can be done now."""
        if self._text:
            self._write()
        else:
            self._read()
        if self._has_ended and not self._text:
            self.close()

    def close(self) -> None:
        """Waits for nothing any more: what is not written by now is lost."""
        if not self.is_closed:
            self._selector.unregister(self._target if self._text else self._pipe)
            self._pipe.close()
            self.is_closed = True

    def _read(self) -> None:
        data = os.read(self._pipe.fileno(), _READ_BYTES)
        self._has_ended = not data
        self._notice.feed(data)
        self._text = data
        if self._tags is not None:
            self._text = self._tags.feed(data) if data else self._tags.end()
        if self._text:
            self._selector.unregister(self._pipe)
            self._selector.register(self._target, selectors.EVENT_WRITE, self.pass_on)

    def _write(self) -> None:
        try:
            self._text = self._text[os.write(self._target, self._text[:_WRITE_BYTES]) :]
        except BlockingIOError:  # another process was faster
            return
        except BrokenPipeError:  # nobody reads it any more: the launcher shall learn it, too
            self._text, self._has_ended = b"", True
        except OSError as error:  # a disk that is full: no reason to end a job of hours
            self._text = b""
            if not self._is_lost and self._target == 1:
                tell(f"what ranks write is lost, stdout takes no more: {error}")
            self._is_lost = True
        if not self._text:
            self._selector.unregister(self._target)
            self._selector.register(self._pipe, selectors.EVENT_READ, self.pass_on)


class Tags:
    r"""Gives the output of any launcher one look, with each line of a rank in one piece.

    Examples
    --------
    >>> tags = Tags("openmpi")
    >>> tags.feed(b"[1]<stdout>: one\n[0]<std"), tags.feed(b"out>: two"), tags.feed(b"!\n")
    (b'[1] one\n', b'', b'[0] two!\n')
    """

    def __init__(self, launcher: str) -> None:
        self._mark = re.compile(_MARKS[launcher] + rb"|\n")
        self._beginning = re.compile(_BEGINNINGS[launcher])
        self._kept = b""
        # Whose text comes; None for the launcher's own.
        self._rank: int | None = None
        self._lines: dict[int | None, bytes] = {}

    def feed(self, data: bytes) -> bytes:
        """Returns what can be written of all that has come: whole lines."""
        text = self._kept + data
        beginning = self._beginning.search(text)
        end = len(text) if beginning is None else beginning.start()
        self._kept = text[end:]
        return self._tagged(text[:end])

    def end(self) -> bytes:
        """Returns what is left: lines without an end, each of which gets one."""
        written = self._tagged(self._kept)
        left = [_line(rank, text) + b"\n" for rank, text in self._lines.items() if text]
        return b"".join([written, *left])

    def _tagged(self, text: bytes) -> bytes:
        out: list[bytes] = []
        position = 0
        for mark in self._mark.finditer(text):
            self._add(text[position : mark.start()], out)
            position = mark.end()
            if mark[1] is None:  # the end of a line
                out.append(_line(self._rank, self._lines.pop(self._rank, b"")) + b"\n")
                self._rank = None
            else:
                self._rank = int(mark[1])
        self._add(text[position:], out)
        return b"".join(out)

    def _add(self, text: bytes, out: list[bytes]) -> None:
        if not text:
            return
        line = self._lines.get(self._rank, b"") + text
        # A bar of progress goes back to the beginning of its line again and again.
        shown, back, rest = line.rpartition(b"\r")
        if back and rest:
            out.append(_line(self._rank, shown + back))
            line = rest
        self._lines[self._rank] = line


def _line(rank: int | None, text: bytes) -> bytes:
    return text if rank is None else b"[%d] %s" % (rank, text)


class DeathNotice:
    r"""Looks for what launchers print, and no exit status says.

    That of MPICH is the bare number of the signal of which a rank has died, which a program may
    return as well. That of Open MPI is 0 where it loses a daemon at the end of a job.

    Examples
    --------
    >>> notice = DeathNotice()
    >>> notice.feed(b"...\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Kil")
    >>> notice.feed(b"led (signal 9)\nThis typically refers to a problem")
    >>> notice.status(9), notice.status(1)
    (137, 1)
    """

    _PATTERN = re.compile(
        rb"^YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)", re.MULTILINE
    )
    _DAEMON_IS_LOST = b"RTE has lost communication with a remote daemon"
    _KEPT_BYTES = 4096

    def __init__(self) -> None:
        #: Whether a host may keep files of the job for that.
        self.has_lost_daemon = False
        self._last = b""
        self._signal = 0

    def feed(self, data: bytes) -> None:
        """Looks at what has come."""
        text = self._last + data
        for line in self._PATTERN.finditer(text):
            self._signal = int(line[1])
        self.has_lost_daemon |= self._DAEMON_IS_LOST in text
        self._last = text[-self._KEPT_BYTES :]

    def status(self, status: int) -> int:
        """Returns the status of the job for that of the launcher."""
        return 128 + status if self._signal and status == self._signal else status
