"""The connection of a rank to its launcher: each of them sees the end of the other one.

A rank opens it as its first act: only the standard library is imported here. What a rank tells goes
to the launcher in lines of JSON. Nothing ever comes back: whatever comes, and that is the end of
the launcher, lets the kernel kill this process, in whatever it is. A thread could not do it, since
mpi4py holds Python's lock while MPI starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import traceback
from os import getpid, getppid
from time import monotonic, sleep

#: What the launcher hands to its ranks, with blanks between: a secret, the limit of stalls in
#: seconds, how often the job was started before, and its addresses.
VARIABLE = "MPI_REPLICA_LAUNCHER"
#: Tells the program how often its job was started before; unset at its first start.
RESTART_VARIABLE = "MPI_REPLICA_RESTART"

#: The first of these that is set says which rank this is, also where the MPI library does not
#: understand the launcher.
RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID")

_SECONDS_TO_CONNECT = 5.0
_LOOK_SECONDS = 1.0
# A host that gives no sign of life is seen after 3 + 3 * 2 seconds.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}

# As much as a connection takes that nobody reads.
_MOST_BYTES = 1 << 16
# Of the stack that is told: the innermost ones.
_MOST_FRAMES = 20

_connection: socket.socket | None = None
_told_bytes = 0
_identity: os.stat_result
_end: dict[str, object] = {}
_has_told_end = False
_has_started = False


def connect_to_launcher() -> None:
    """Opens the connection, where the launcher is one that waits for it.

    Raises
    ------
    ConnectionError
        It can't be reached.
    """
    global _connection, _identity
    # What the program starts is no rank.
    words = os.environ.pop(VARIABLE, "").split()
    if not words:
        return
    secret, seconds, restarts, *addresses = words
    _connection = _opened(addresses)
    _identity = os.fstat(_connection.fileno())
    # Python lets go of what this module holds before what __main__ does, which may take long at
    # its end, and of what sys holds last.
    vars(sys)["_mpi_replica_connection"] = _connection
    os.register_at_fork(after_in_child=_leave_to_parent)
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "")
    tell(secret=secret, rank=int(rank), host=socket.gethostname(), pid=getpid())
    _end_with_launcher(_connection)
    # So many frames of its stack are none of the program's.
    depth = len(traceback.extract_stack())
    threading.Thread(
        target=_look, args=(float(seconds), depth), name="mpi_replica launcher", daemon=True
    ).start()
    if restarts != "0":
        os.environ[RESTART_VARIABLE] = restarts


def _look(seconds: float, depth: int) -> None:
    """Ends this rank with the daemon that started it, which the launcher may not see end.

    Until MPI has started it tells where this rank is: others may wait for it, and can't ask.
    """
    parent, main, due = getppid(), threading.main_thread().ident, seconds
    start = monotonic()
    while True:
        sleep(_LOOK_SECONDS)
        if getppid() != parent:
            os.kill(getpid(), signal.SIGKILL)
        if not _has_started and monotonic() - start > due:
            stack = traceback.extract_stack(sys._current_frames().get(main or 0))
            innermost = stack[depth:][-_MOST_FRAMES:]
            tell(place="".join(traceback.format_list(innermost)))
            due *= 2


def _opened(addresses: list[str]) -> socket.socket:
    problems = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            if host:
                opened = socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT)
                opened.settimeout(None)
                keep_alive(opened)
            else:  # on this host; the name stands in no folder
                opened = socket.socket(socket.AF_UNIX)
                opened.connect(f"\0{port}")
        except OSError as error:
            problems.append(f"{address}: {error}")
        else:
            return opened
    raise ConnectionError(
        f"a rank on {socket.gethostname()} can't reach the launcher ({'; '.join(problems)}). Let"
        " the hosts of the job connect to each other by TCP, or start it by mpirun itself."
    )


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel end a connection whose other side gives no sign of life."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _end_with_launcher(connection: socket.socket) -> None:
    if sys.platform == "linux":  # elsewhere the signal can't be chosen
        fcntl.fcntl(connection, fcntl.F_SETOWN, getpid())
        fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
        _set_async(connection, True)
    try:
        connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    except OSError:
        pass
    os.kill(getpid(), signal.SIGKILL)  # it has ended before


def _set_async(connection: socket.socket, is_async: bool) -> None:
    flags = fcntl.fcntl(connection, fcntl.F_GETFL) & ~os.O_ASYNC
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC * is_async)


def _leave_to_parent() -> None:
    """Closes the connection in a forked child, which would hold it open."""
    global _connection
    if (connection := _own_connection()) is not None:
        connection.close()
        _connection = None


def _own_connection() -> socket.socket | None:
    """Returns the connection, unless the program has closed it: its number is another file's."""
    global _connection
    if _connection is not None:
        try:
            is_own = os.path.samestat(os.fstat(_connection.fileno()), _identity)
        except OSError:
            is_own = False
        if not is_own:
            _connection.detach()
            _connection = None
    return _connection


def tell(**facts: object) -> None:
    """Tells the launcher, where there is one; only its end when much was told before.

    The kernel would end this process also when there is room again in a connection that was full,
    since the launcher did not read for long.
    """
    global _told_bytes
    data = json.dumps(facts).encode() + b"\n"
    is_end = "end" in facts or "begins_end" in facts
    if not is_end and _told_bytes + len(data) > _MOST_BYTES:
        return  # what is shorter, and may matter more, still has room
    _told_bytes += len(data)
    if (connection := _own_connection()) is not None:
        with contextlib.suppress(OSError):  # the kernel ends this process
            connection.send(data)


def tell_mpi_has_started() -> None:
    """Tells that MPI has started here, and that others can ask from now on where this rank is."""
    global _has_started
    _has_started = True
    tell(mpi=True)


def note_end(kind: str, status: int) -> None:
    """Keeps for `tell_end` how the program has ended; the first one is kept, if it is no good one.

    A program that has come to its end may abort the job then, since a message is in flight.

    Parameters
    ----------
    kind : {'done', 'exit', 'error', 'left', 'loss', 'abort'}
        By itself, by sys.exit with a status, by an error, by one that says that the program has
        ended on another rank, or that a rank was lost, or by our own end of the whole job.
    status : int
        The exit status.
    """
    if not _end or (kind == "abort" and _end["end"] == "done"):
        _end.update(end=kind, status=status)
        tell(begins_end=kind, ends_with=status)  # what others do then is no cause of it


def tell_end(status_of_error: int | None = None) -> None:
    """Tells how the program has ended. A rank that ends without is a lost one.

    `status_of_error` is that of an error at its very end.
    """
    global _has_told_end
    if _connection is not None and _end:
        if status_of_error is not None:
            _end.update(end="error", status=status_of_error)
        _has_told_end = True
        tell(begins_end=_end["end"], **_end)


def leave() -> None:
    """Tells that another program takes the place of this one, whose end says nothing."""
    tell(end="unknown")
    if (connection := _own_connection()) is not None:  # which the kernel closes then
        _set_async(connection, False)


def stay() -> None:
    """Tells that no other program has taken the place of this one, after `leave`."""
    tell(end=None)
    if (connection := _own_connection()) is not None:
        _end_with_launcher(connection)


def has_told_end() -> bool:
    """Returns whether the launcher knows that this rank ends."""
    return _has_told_end
