"""Whose turn it is: the hub's, or that of a replica's thread.

Signals go to the main thread, which mostly is the hub, and waits while a replica runs. What a
handler raises belongs to the code that runs, as where there is no thread: it is raised there, or by
the hub, where the replica has handed back meanwhile. A handler may raise wherever Python looks for
signals: behind calls, and where a loop begins again. In what follows all these places stand in a
``try``, or nothing has changed yet; and since a second one may raise where the first is caught,
each ``try`` stands in another one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from _thread import get_ident
from os import getpid
from types import TracebackType
from typing import ClassVar

from ..core.exceptions import ContextError
from ..core.thread_owners import at_work, owner_of_this_thread, stand_in_for
from ..ranks.interrupts import gate

# How long the hub waits before it looks again whose turn it is, where an error is under way.
_SECONDS = 0.01

# How long it waits before it looks for signals: one that comes as it begins to wait, or that the
# system gives to another thread, does not wake it.
_SECONDS_TO_SIGNALS = 0.1

# What is the ident of no thread.
_NOBODY = (1 << 63) - 1

_set_async_error = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)

FORKED = (
    "a child that was forked in a step has come to a collective, or to the end of the step: the"
    " other replicas and the program are its parent's. End it where its work is done, by os._exit."
)

_process = getpid()


def is_forked(process: int) -> bool:
    """Returns whether this is no longer the process of that number, but a forked child."""
    return process != _process


def _note_fork() -> None:
    global _process
    _process = getpid()


os.register_at_fork(after_in_child=_note_fork)


class Turns:
    """The turns of one thread.

    The locks only wake: what counts is how many turns were begun, and how many have ended.
    """

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        #: Whether the thread waits for its next turn; changed by the thread alone.
        self.waits = True
        self.are_over = False
        self._begun = 0
        self._ended = -1
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._process = _process
        self._ident = 0

    def start(self, thread: threading.Thread) -> None:
        """Starts the thread; returns when it waits for its first turn."""
        owner, hub = self.relay.owner, get_ident()
        gate.close()  # Ctrl-C in between would leave a thread that threading does not know
        try:
            # CPython 3.11 takes a thread that begins for the one that starts it.
            at_work[owner] = _NOBODY
            try:
                thread.start()
                while self._ended < 0:
                    self._back.acquire()
            finally:
                at_work[owner] = hub
        finally:
            gate.open()

    def enter(self) -> None:
        """Begins with this thread; returns when its first turn begins."""
        self._ident = get_ident()
        self.relay.turns[self._ident] = self
        stand_in_for(self.relay.owner)
        self.hand_back()

    def let_run(self) -> None:
        """Gives the thread its turn, and waits for the end of it."""
        relay, turn, hub = self.relay, self._begun + 1, get_ident()
        if self._process != _process:
            raise ContextError(FORKED)
        relay.abort_if_repeated()  # where the stack is full this raises: nothing below goes deeper
        self._begun = turn
        at_work[relay.owner] = self._ident
        while True:
            try:
                while True:
                    try:
                        if self._go.locked():
                            self._go.release()
                        while self._ended < turn:
                            if relay.errors:
                                relay.abort_if_repeated()
                            if relay.errors:  # no call in between: it may arrive meanwhile
                                _set_async_error(at_work[relay.owner], relay.carrier)
                                self._back.acquire(True, _SECONDS)
                            else:
                                self._back.acquire(True, _SECONDS_TO_SIGNALS)
                        break
                    except BaseException as error:
                        relay.errors += (error,)
                break
            except BaseException as error:
                relay.errors += (error,)
        at_work[relay.owner] = hub
        if relay.errors:
            raise relay.take_all()

    def hand_back(self) -> None:
        """Ends the turn of this thread, and waits for its next one."""
        turn = self._begun
        if self._process != _process:
            raise ContextError(FORKED)
        self._go.locked()  # where the stack is full this raises: nothing below goes deeper
        self.waits = True
        self._ended = turn
        while True:
            try:
                while True:
                    try:
                        if self._back.locked():
                            self._back.release()
                        while self._begun == turn:
                            self._go.acquire()
                        self.waits = False
                        return
                    except _NotNowError:
                        pass
            except _NotNowError:
                pass

    def end(self) -> None:
        """Lets the thread end; called where nobody uses it any more."""
        self.are_over = True
        self._begun += 1
        if self._go.locked():
            self._go.release()

    def leave(self) -> None:
        """Ends the last turn of this thread, and the thread."""
        self.relay.turns.pop(get_ident(), None)
        self.are_over = self.waits = True
        self._ended = self._begun
        if self._back.locked():
            self._back.release()


class Relay:
    """Errors on their way from the thread `owner`, which they came up in, to the code that runs.

    That may be a replica of a run inside of a replica: so there is one for all of them.
    """

    _of_owners: ClassVar[dict[int, Relay]] = {}

    def __init__(self, owner: int) -> None:
        self.owner = owner
        #: What has not arrived.
        self.errors: list[BaseException] = []
        #: The last one that has: code of C may have made another one of it.
        self.arrived: BaseException | None = None
        #: By ident, of each thread that works for the owner.
        self.turns: dict[int, Turns] = {}
        relay = self

        # Python takes a class, of which it makes the error that it raises in another thread.
        class Carrier(BaseException):
            def __new__(  # type: ignore[misc]
                cls, made: BaseException | None = None
            ) -> BaseException:
                if made is not None:  # CPython 3.11 asks again where code of C hands it on
                    return made
                turns = relay.turns.get(get_ident())
                if turns is None or turns.waits:
                    return _NotNowError()
                relay.arrived = relay.take()
                return relay.arrived

        self.carrier = Carrier

    @classmethod
    def of(cls, owner: int) -> Relay:
        """Returns the one of a thread."""
        return cls._of_owners.setdefault(owner, cls(owner))

    def take(self) -> BaseException:
        """Returns the oldest error, to be raised by who calls."""
        error = self.errors.pop(0)
        return BaseException.with_traceback(error, _above_this_file(error.__traceback__))

    def take_all(self) -> BaseException:
        """Returns one error for all that are left, to be raised by the hub: Ctrl-C, if there is.

        Where there is no thread, each would have come up while the last one was dealt with.
        """
        self.errors.sort(key=lambda error: not isinstance(error, KeyboardInterrupt))
        error = self.take()
        self.errors.clear()
        return error

    def abort_if_repeated(self) -> None:
        """Ends the job where Ctrl-C comes again: the first does not arrive in code of C."""
        interrupts = [one for one in self.errors if isinstance(one, KeyboardInterrupt)]
        if len(interrupts) > 1 and gate.abort is not None:
            gate.abort(128 + signal.SIGINT)


def error_that_arrived() -> BaseException | None:
    """Returns the last error that has arrived where the thread that calls stands; None for none."""
    relay = Relay.of(owner_of_this_thread())
    error, relay.arrived = relay.arrived, None
    return error


class _NotNowError(BaseException):
    """An error was to be raised in a thread whose turn is over: it stays under way."""


def _above_this_file(trace: TracebackType | None) -> TracebackType | None:
    """Leaves out the frames of who waited: the error comes up elsewhere."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
