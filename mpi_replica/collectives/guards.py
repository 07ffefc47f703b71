"""What becomes of an error, by how far the ranks have come in a call.

Classes, since a generator for a context manager costs two microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from ..transport import WaitGivenUpError

__all__ = ["Irrevocable", "Moving", "Preparing"]


class _Guard:
    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        raise NotImplementedError


class Preparing(_Guard):
    """Before the header: an error here becomes one on every rank, by `fail`."""

    def __init__(self, fail: Callable[[Exception], NoReturn]) -> None:
        self._fail = fail

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            self._fail(error)


class Irrevocable(_Guard):
    """After the header: the other ranks can't be told, and `give_up` is called with the error."""

    def __init__(self, give_up: Callable[[BaseException], None]) -> None:
        self._give_up = give_up

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            self._give_up(error)


class Moving(Irrevocable):
    """While data moves: `finish` is called at the end, and `time_out` where the wait was ended."""

    def __init__(
        self,
        give_up: Callable[[BaseException], None],
        finish: Callable[[], None],
        time_out: Callable[[], NoReturn],
    ) -> None:
        super().__init__(give_up)
        self._finish = finish
        self._time_out = time_out

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, WaitGivenUpError):
            self._time_out()
        super()._leave(error)
        if error is None:
            self._finish()
