"""Where another rank of this host is: asked over a socket, answered by a thread.

The thread answers also while the main thread waits inside the MPI library, and needs no MPI, no
signal and no help of the launcher. Where the process is stopped, or C code holds the lock of the
interpreter, nothing answers.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Whereabouts", "ask"]

_ANSWER_SECONDS = 3.0
_MOST_FRAMES = 20

# What lies below the code of a test, and tells its author nothing.
_RUNNERS = ("_pytest", "pluggy")


class Whereabouts:
    """Tells whoever asks what this rank does, and where its main thread is.

    Parameters
    ----------
    describe : callable
        Returns what is told beside the stack, as a dict that JSON can hold.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]) -> None:
        self._describe = describe
        #: Where to ask; empty where this machine has no such sockets.
        self.address = ""
        self._folder: str | None = None
        try:
            self._listen()
        except OSError:
            return
        self._thread = threading.Thread(target=self._serve, name="whereabouts", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        name = f"mpi_replica-{os.getpid()}-{secrets.token_hex(8)}"
        if sys.platform == "linux":
            address = f"\0{name}"  # no file: nothing stays behind when the job is aborted
        else:
            self._folder = tempfile.mkdtemp(prefix="mpi_replica-")
            address = os.path.join(self._folder, "rank")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address)
        self._socket.listen()
        self.address = address

    def _serve(self) -> None:
        while True:
            try:
                asker, _ = self._socket.accept()
            except OSError:  # closed
                return
            with asker:
                try:
                    asker.settimeout(_ANSWER_SECONDS)
                    told = self._describe() | {"stack": _stack_of_main_thread()}
                    asker.sendall(json.dumps(told).encode())
                except OSError:
                    continue  # whoever asked is gone

    def close(self) -> None:
        """Answer no more."""
        if not self.address:
            return
        self.address = ""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._thread.join(_ANSWER_SECONDS)
        self._socket.close()
        if self._folder is not None:
            os.unlink(os.path.join(self._folder, "rank"))
            os.rmdir(self._folder)


def ask(address: str) -> dict[str, Any] | str:
    """Return what the rank at `address` tells, or in words why it tells nothing."""
    if not address:
        return "can't be asked where it is"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(_ANSWER_SECONDS)
        try:
            asker.connect(address)
            parts = []
            while part := asker.recv(1 << 16):
                parts.append(part)
            told: dict[str, Any] = json.loads(b"".join(parts))
        except (ConnectionError, FileNotFoundError):
            return "can't be reached: its process has ended"
        except (OSError, ValueError):
            return "does not answer: it is stopped, or C code holds the lock of its interpreter"
    return told


def _stack_of_main_thread() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else _written(frame)


def _written(frame: FrameType) -> str:
    """Return the stack, the innermost call last, without what called the test."""
    frames: list[tuple[FrameType, int]] = []
    for caller in traceback.walk_stack(frame):
        package = str(caller[0].f_globals.get("__name__")).partition(".")[0]
        if frames and package in _RUNNERS:
            break
        frames.append(caller)
    stack = traceback.StackSummary.extract(reversed(frames[:_MOST_FRAMES]))
    return "".join(stack.format()).rstrip()
