"""Where the program is, looked at from outside, many times a second."""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterable
from time import perf_counter_ns
from types import FrameType

from ...core.thread_frames import current_frames
from ...core.tracebacks import is_of_package
from .event_log import OF_RANK, EventKind, EventLog, pack_event


def take_samples(log: EventLog, threads: Iterable[int]) -> None:
    """Notes where these threads of the process are."""
    frames = current_frames()
    for thread in threads:
        if (frame := frames.get(thread)) is not None:
            now = perf_counter_ns()
            log.add(pack_event(EventKind.SAMPLE, log.names[_place(frame)], OF_RANK, now, now, 0, 0))


def _place(frame: FrameType) -> str:
    """Returns the program's innermost line; one of a library, where no code is the program's."""
    shown = innermost = frame
    while _is_of_others(shown.f_code.co_filename):
        if shown.f_back is None:
            shown = innermost
            break
        shown = shown.f_back
    code = shown.f_code
    return f"{os.path.basename(code.co_filename)}:{shown.f_lineno} in {code.co_name}"


@functools.lru_cache(maxsize=4096)
def _is_of_others(file: str) -> bool:
    return file.startswith(("<frozen", *_library_folders())) or is_of_package(file)


@functools.cache
def _library_folders() -> list[str]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [os.path.join(folder, "") for name in names if (folder := sysconfig.get_path(name))]
