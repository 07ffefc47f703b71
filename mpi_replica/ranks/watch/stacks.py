"""Where a thread of this process is, in words that can travel."""

from __future__ import annotations

import dis
import os
import traceback
from types import CodeType, FrameType
from typing import NamedTuple

from ...core.thread_frames import current_frames
from ...core.tracebacks import is_of_package

# A place travels in one message, and a report shows one for each missing rank.
_MOST_FRAMES = 12
_MOST_CHARACTERS = 2400

# What calls the code of a test, and tells its author nothing.
_RUNNERS = ("_pytest", "pluggy")
_LOCKING_MODULES = ("threading.py", "queue.py")


class Whereabouts(NamedTuple):
    """Where a thread is."""

    #: The innermost frames as a traceback has them, the innermost last.
    stack: str
    #: Whether it is about to get a lock.
    waits_for_lock: bool


def place_of_thread(ident: int) -> Whereabouts:
    """Returns where the thread `ident` of this process is, as its stack shows: it need not help."""
    frame = current_frames().get(ident)
    if frame is None:
        return Whereabouts("  its thread has ended\n", False)
    shown: list[tuple[FrameType, int]] = []
    for caller, line in traceback.walk_stack(frame):
        # What the package does between the program and MPI says nothing to its user.
        if is_of_package(caller.f_code.co_filename):
            continue
        if shown and str(caller.f_globals.get("__name__")).partition(".")[0] in _RUNNERS:
            break
        shown.append((caller, line))
    if not shown:
        return Whereabouts("  no code of the program: it starts or ends\n", False)
    text = "".join(traceback.StackSummary.extract(reversed(shown[:_MOST_FRAMES])).format())
    if len(text) > _MOST_CHARACTERS:
        text = "  …\n" + text[-_MOST_CHARACTERS:].partition("\n")[2]
    return Whereabouts(text, _waits_for_lock(frame))


def _waits_for_lock(frame: FrameType) -> bool:
    code = frame.f_code
    if os.path.basename(code.co_filename) in _LOCKING_MODULES:
        return True
    return _enters_a_lock(code, frame.f_lasti)


def _enters_a_lock(code: CodeType, offset: int) -> bool:
    """Returns whether the instruction is ``with x:`` or a call of ``x.acquire``.

    A lock is C code: it has no frame of its own, so the frame that is about to get it is the
    innermost one. What else is entered by ``with``, and written in C, does not take long.
    """
    passed = [i for i in dis.get_instructions(code) if i.offset <= offset]
    current = passed[-1]
    if current.opname in ("BEFORE_WITH", "LOAD_SPECIAL") or passed[-2:][0].opname == "LOAD_SPECIAL":
        return True
    if current.positions is None or "CALL" not in current.opname:
        return False
    return any(
        other.argval == "acquire"
        and other.positions is not None
        and other.positions.lineno == current.positions.lineno
        and other.positions.col_offset == current.positions.col_offset
        for other in passed
        if other.opname in ("LOAD_METHOD", "LOAD_ATTR")
    )
