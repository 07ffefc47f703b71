"""A part of a program that is traced."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from ..collectives.agreement.site import call_site
from ..collectives.agreement.stand import Note
from ..collectives.barrier import BarrierCall
from ..collectives.strategy_base import StrategyBase
from ..core.argument_checks import absolute_path, flag
from ..core.context import open_strategies, require_cross_replica
from ..core.exceptions import ContextError, is_reported_here
from ..ranks.watch import event_log
from ..ranks.watch.watcher import watcher

_log = logging.getLogger("mpi_replica")

_END = "the end of trace"
_BROKEN = "the end of a trace by an error"
_ADVICE = "All ranks leave 'with strategy.trace' in the same way, or none goes on."


@dataclass
class TraceContext:
    """What `Strategy.trace` returns."""

    _strategy: StrategyBase
    _path: str | os.PathLike[str]
    _last_seconds: float | None
    _has_samples: bool
    _log: event_log.EventLog | None = None
    _name: str = ""

    def __enter__(self) -> None:
        require_cross_replica(self._strategy, "trace")
        self._name = str(self._path)
        before = self._log  # of this trace itself, which is refused then, and goes on
        try:
            self._meet("trace")
            self._meet("trace, room made", self._make_room)
            self._meet("trace, begun", self._open)
        except BaseException:
            if self._log is not before:
                self._close()
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self._meet(_END)
                self._meet(f"{_END}, written", self._close)
                self._meet(f"{_END}, put together", self._merge)
            elif is_reported_here(error) is None:  # the others do not raise it, and may be anywhere
                note = Note(_BROKEN, call_site(), 1, _ADVICE, "CollectiveMismatchError")
                self._strategy.engine.agreement.notes.add(note)
        finally:
            self._close()

    def _meet(self, kind: str, do: Callable[[], None] = lambda: None) -> None:
        """Does something, and returns when all ranks have; an error is raised on all of them."""
        engine = self._strategy.engine
        try:
            do()
        except Exception as error:
            engine.fail(kind, error)
        call = engine.make(kind, None, BarrierCall, kind, self._name)
        if kind == _END:
            engine.watch.recorder.want_comparison()
        engine.cross_replica(call)

    def _make_room(self) -> None:
        """Removes what a trace of this name that was not ended has left: it is of other calls."""
        if event_log.current is not None:
            raise ContextError(
                "this process is traced already, by strategy.trace or MPI_REPLICA_TRACE. Leave out"
                " one of the two."
            )
        flag("samples", self._has_samples)
        self._path = absolute_path("path", self._path)  # the program may go elsewhere
        if self._strategy.engine.layout.rank == 0:
            event_log.clear_parts(os.fspath(self._path))

    def _open(self) -> None:
        path = os.fspath(self._path)
        self._log = event_log.open_log(path, self._last_seconds, has_samples=self._has_samples)
        engine = self._strategy.engine
        engine.record(self._log)
        if not engine.watch.is_watched:  # nobody waits for its one replica
            watcher.add(engine.watch, engine.transport.hosts[engine.transport.rank])

    def _close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            for strategy in (self._strategy, *open_strategies):  # others were made meanwhile
                engine = cast("StrategyBase", strategy).engine
                if engine.log is log:
                    engine.record(None)
            event_log.close_log(log)

    def _merge(self) -> None:
        if self._strategy.engine.layout.rank == 0:
            from ..trace.trace_file import merge  # what reads traces: 6 ms for programs without any

            path = os.fspath(self._path)
            try:
                merge(path)
            except OSError as error:  # the program has done its work
                _log.warning(
                    "the trace %s can't be written: %s. What the ranks have left beside it stays:"
                    " python -m mpi_replica trace %s makes the trace of it.",
                    *(path, error, path),
                )


class Traced(StrategyBase):
    """A strategy that records where its time goes."""

    def trace(
        self,
        path: str | os.PathLike[str],
        *,
        last_seconds: float | None = None,
        samples: bool = True,
    ) -> TraceContext:
        """Record where the time goes while the body runs, on all ranks, in one file.

        Collective: all ranks enter and leave it, in cross-replica context.

        Parameters
        ----------
        path : path-like
            The trace, in a folder that all ranks see; compressed where it ends in ``.gz``. Perfetto
            (https://ui.perfetto.dev) and chrome://tracing show it; ``python -m mpi_replica trace``
            prints a table. A file that is there is replaced.
        last_seconds : float, optional
            How much of the end is kept at least. Default: all.
        samples : bool, optional
            Whether to look 50 times a second at which line the program is.

        Returns
        -------
        context manager

        Raises
        ------
        OSError, TypeError, ValueError
            On every rank: a rank can't write there, `path` is none, or `last_seconds` is not
            positive.
        ContextError
            The process is traced already; called in a replica.

        Notes
        -----
        A collective call costs 1 µs more meanwhile, and 56 bytes of the file that each rank writes
        beside `path`, in a folder that goes when rank 0 has made the trace of all of them. Where
        the body raises they stay, for ``python -m mpi_replica trace``. Now and then, and at the
        end, 16 messages in a row compare the clocks of the ranks.

        See Also
        --------
        span : Names a part of the program.

        Examples
        --------
        >>> import os, tempfile
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> path = os.path.join(tempfile.mkdtemp(), "steps.json.gz")
        >>> with strategy.trace(path):
        ...     for _ in range(3):
        ...         with mr.span("step"):
        ...             _ = strategy.run(lambda: None)
        >>> os.path.exists(path)
        True
        """
        return TraceContext(self, path, last_seconds, samples)
