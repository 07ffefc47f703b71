"""A folder of checkpoints: the newest ones are kept, and the newest one that is whole restored."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..collectives.agreement.site import CallSite
from ..collectives.barrier import BarrierCall
from ..collectives.broadcast import Broadcast
from ..core.argument_checks import absolute_path, flag, integer
from ..core.context import require_cross_replica
from ..core.exceptions import CheckpointError, CorruptCheckpointError, mark_reporter
from ..core.options import CommunicationOptions
from ..ranks.launcher_connection import tell
from . import files, preemption
from .abandoned_saves import remove_abandoned_saves
from .any_signal import MOST_STEP, AnySignal
from .checkpoint import Checkpoint
from .index import MOST_BYTES, index_path, is_torn, order_of, unpacked

_NAME = "ckpt"
_INDEX = re.compile(rf"{_NAME}-(0|[1-9][0-9]*)\.index")  # as `_path` writes it

# os.EX_TEMPFAIL, which not all systems have: a failure that another try may not have.
_EXIT_STATUS = 75

_log = logging.getLogger("mpi_replica")


class CheckpointManager:
    """Keeps the checkpoints of a program in a folder.

    Parameters
    ----------
    checkpoint : Checkpoint
        What is saved and restored.
    directory : path_like
        The folder, the same on all ranks; made when it is needed.
    max_to_keep : int or None, default 5
        How many of the newest ones are kept; None keeps all.
    keep_every : int, optional
        Those whose step is a multiple of it are kept beside.
    save_on_signal : bool, default False
        Whether `exit_if_signalled` saves and ends the program after SIGTERM or SIGUSR1, which
        batch systems send before the time limit. The signals do nothing else then, as long as the
        manager is used; child processes still end by them. The same on all ranks.

    Raises
    ------
    TypeError, ValueError
        `checkpoint` is none; `directory` is no path; a number is not positive.
    ContextError
        `save_on_signal` in another thread than the main one.

    Notes
    -----
    The newest one is the one that was saved last, as in tf. A program that goes back to an older
    one by hand, and saves, goes on from there, also where checkpoints of later steps are left: they
    are removed when they are the oldest. Counterpart of ``tf.train.CheckpointManager`` and, with
    `save_on_signal`, of ``tf.distribute.experimental.PreemptionCheckpointHandler``.

    Examples
    --------
    >>> import tempfile, mpi_replica as mr
    >>> checkpoint = mr.Checkpoint(mr.MPIStrategy(), step=0)
    >>> manager = mr.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=2)
    >>> for checkpoint.step in (10, 20, 30):
    ...     path = manager.save(checkpoint.step)
    >>> checkpoint.step, manager.steps
    (30, [20, 30])
    >>> checkpoint.step = 0
    >>> manager.restore_or_initialize() == path, checkpoint.step
    (True, 30)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_every: int | None = None,
        save_on_signal: bool = False,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"CheckpointManager needs a mr.Checkpoint, got {checkpoint!r}.")
        if max_to_keep is not None:
            max_to_keep = integer("max_to_keep (None keeps all)", max_to_keep, 1)
        if keep_every is not None:
            keep_every = integer("keep_every (None keeps none beside)", keep_every, 1)
        self._checkpoint = checkpoint
        checkpoint._manager = weakref.ref(self)
        self._directory = Path(absolute_path("directory", directory))
        self._max_to_keep = max_to_keep
        self._keep_every = keep_every
        self._save_on_signal = flag("save_on_signal", save_on_signal)
        if self._save_on_signal:
            preemption.listen(self)

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved and restored."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The folder."""
        return str(self._directory)

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints in the folder, as this rank sees it; the newest is last.

        Raises
        ------
        CheckpointError
            The folder can't be read. Where there is none, there are no steps.
        """
        return _steps_in(self._directory)

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest checkpoint of the folder, as `latest_checkpoint` finds it."""
        return latest_checkpoint(self._directory)

    def save(self, step: int) -> str:
        """Save a checkpoint, and remove what is too old; return its path.

        Collective: all ranks call it, in cross-replica context.

        Parameters
        ----------
        step : int
            Its number, from 0 to 2**63 - 1, the same on all ranks.

        Returns
        -------
        str
            The path, as `latest_checkpoint` gives it.

        Raises
        ------
        TypeError, ValueError
            `step` is no such number.
        CheckpointError
            As for ``Checkpoint.save``. No checkpoint was removed then.

        Notes
        -----
        Costs what ``Checkpoint.save`` does, and one message; rank 0 removes, also what saves of any
        step have left in the folder that were broken off. Counterpart of
        ``tf.train.CheckpointManager.save``.

        Examples
        --------
        >>> import tempfile
        >>> checkpoint = mr.Checkpoint(mr.MPIStrategy(), step=0)
        >>> mr.CheckpointManager(checkpoint, tempfile.mkdtemp()).save(10).endswith("ckpt-10")
        True
        """
        engine, kind = self._checkpoint.strategy.engine, "CheckpointManager.save"
        try:
            step = integer("step", step, 0, MOST_STEP)
        except (TypeError, ValueError) as error:
            engine.fail(kind, error)
        if engine.layout.rank == 0:  # what was left takes room that this save may need
            remove_abandoned_saves(self._directory, _NAME, numbered=True)
        path = self._checkpoint.save(self._path(step))
        if engine.layout.rank == 0:
            too_old = self._too_old(step)
            for old in too_old:
                files.remove(index_path(self._path(old)))  # without it the others are left over
            if too_old:
                remove_abandoned_saves(self._directory, _NAME, numbered=True)
        # All ranks find the same steps from now on.
        engine.cross_replica(engine.make(kind, None, BarrierCall, kind, "what was too old is gone"))
        return path

    def exit_if_signalled(self, step: int) -> None:
        """Save and end the program, on all ranks, where any rank got SIGTERM or SIGUSR1.

        Collective: all ranks call it after each step, in cross-replica context. Without
        `save_on_signal` it does nothing.

        Parameters
        ----------
        step : int
            The number of the checkpoint, as for `save`; the same on all ranks.

        Raises
        ------
        SystemExit
            A signal has come, and the checkpoint is saved. The status is 75 (``os.EX_TEMPFAIL``),
            by which a batch script knows that the same command goes on with the work.
        CheckpointError
            As for `save`: a signal has come, and the checkpoint can't be saved.
        CollectiveMismatchError
            The ranks are at different steps.

        Notes
        -----
        Costs one message between the ranks, as a small ``all_reduce`` does.

        Examples
        --------
        >>> import tempfile, mpi_replica as mr
        >>> checkpoint = mr.Checkpoint(mr.MPIStrategy(), step=0)
        >>> manager = mr.CheckpointManager(checkpoint, tempfile.mkdtemp(), save_on_signal=True)
        >>> manager.restore_or_initialize()
        >>> for checkpoint.step in range(checkpoint.step + 1, 4):
        ...     manager.exit_if_signalled(checkpoint.step)  # a step of training would come before
        """
        if not self._save_on_signal:
            return
        strategy = self._checkpoint.strategy
        require_cross_replica(strategy, AnySignal.kind)
        engine = strategy.engine
        rank, number = engine.cross_replica(
            engine.make(AnySignal.kind, None, AnySignal, step, preemption.arrived())
        )
        if not number:
            return
        path = self.save(step)
        if engine.layout.rank == 0:
            name = signal.Signals(number).name
            with contextlib.suppress(Exception):  # logging fails where stderr is closed
                _log.warning("rank %d got %s: saved %s, the program ends.", rank, name, path)
        preemption.answer()
        raise SystemExit(_EXIT_STATUS)

    def restore_or_initialize(
        self, init_fn: Callable[[], Any] | None = None, *, strict: bool = True
    ) -> str | None:
        """Restore the newest checkpoint that is whole; return its path, None where there is none.

        Collective: all ranks call it, in cross-replica context. One that is torn or corrupt, or
        that another job removes meanwhile, is skipped, and a warning tells; where none is whole of
        those that are there, that is an error.

        Parameters
        ----------
        init_fn : callable, optional
            Called without arguments where there is none.
        strict : bool, default True
            As for ``Checkpoint.restore``: otherwise what fits is restored, and a warning names the
            rest.

        Returns
        -------
        str or None
            The path of what was restored. None also on a spare, where nothing is done.

        Raises
        ------
        CheckpointError
            The newest one that is whole does not fit the program. None of those that are there is
            whole: a `CorruptCheckpointError`. The folder, or a file in it, is there and can't be
            read: by its permissions, say, or without free descriptors. Or a file is in the place
            of the folder.
        TypeError
            `init_fn` is not callable; on every rank.
        Exception
            As for ``Checkpoint.restore``; what `init_fn` raised.

        Notes
        -----
        The folder is what rank 0 sees of it: the steps travel as by ``broadcast_to``, once more
        for each that is skipped. Beside that it costs what ``Checkpoint.restore`` does. Counterpart
        of ``tf.train.CheckpointManager.restore_or_initialize``.

        Examples
        --------
        >>> import tempfile
        >>> checkpoint = mr.Checkpoint(mr.MPIStrategy(), step=0)
        >>> manager = mr.CheckpointManager(checkpoint, tempfile.mkdtemp())
        >>> manager.restore_or_initialize(lambda: print("from the beginning"))
        from the beginning
        """
        tell(goes_on=True)  # a start of this job after another one repeats little
        if self._checkpoint.strategy.engine.is_spare:  # it gets its state with its replicas
            return None
        return self._restore_or_initialize(init_fn, strict=strict)

    def _restore_or_initialize(
        self, init_fn: Callable[[], Any] | None = None, *, strict: bool = True
    ) -> str | None:
        """Does as `restore_or_initialize`, where a program need not begin with it."""
        strategy, kind = self._checkpoint.strategy, "CheckpointManager.restore_or_initialize"
        engine = strategy.engine
        require_cross_replica(strategy, kind)
        given: object = init_fn
        if given is not None and not callable(given):
            text = f"init_fn must be callable or None, got {init_fn!r}."
            engine.fail(kind, TypeError(text))
        problems: dict[int, CheckpointError] = {}
        steps = self._steps_for_all(kind)
        while untried := [step for step in steps if step not in problems]:
            step = untried[-1]
            path = self._path(step)
            try:
                self._checkpoint.restore(path, strict=strict)
            except CheckpointError as error:
                # Another job may save meanwhile, and remove what is older.
                steps = self._steps_for_all(kind)
                if step in steps and not isinstance(error, CorruptCheckpointError):
                    raise
                problems[step] = error
                if steps and problems.keys() >= {*steps}:
                    raise self._none_is_whole(len(steps), steps[-1], problems[steps[-1]]) from None
                if engine.layout.rank == 0:
                    _log.warning("%s is skipped: %s", path, error)
            else:
                return str(path)
        if init_fn is not None:
            init_fn()
        return None

    def _none_is_whole(self, number: int, step: int, problem: Exception) -> CheckpointError:
        """Returns the error of a folder whose checkpoints are all torn or corrupt."""
        have = "1 checkpoint, which is not"
        if number > 1:
            have = f"{number} checkpoints, none of them"
        why = str(problem).removesuffix(f" {files.TAKE_OLDER}")
        error = CorruptCheckpointError(
            f"{self._directory} has {have} whole. Of the newest, {_NAME}-{step}: {why} Put whole"
            " files in their place, or move the folder away to begin anew."
        )
        mark_reporter(error, self._checkpoint.strategy.engine.layout.rank == 0)
        return error

    def _steps_for_all(self, kind: str) -> list[int]:
        """Returns the steps that rank 0 sees: a folder on several hosts may not look alike."""
        engine = self._checkpoint.strategy.engine
        steps: list[int] = engine.cross_replica(engine.make(kind, None, self._broadcast, kind))
        return steps

    def _broadcast(self, site: CallSite, options: CommunicationOptions, kind: str) -> Broadcast:
        """Returns the call that gives all ranks the steps that one sees."""
        steps = self.steps if self._checkpoint.strategy.engine.layout.rank == 0 else []
        return Broadcast(site, options, kind, "", steps, compared=False)

    def _path(self, step: int) -> Path:
        return self._directory / f"{_NAME}-{step}"

    def _too_old(self, newest: int) -> list[int]:
        if self._max_to_keep is None:
            return []
        known = _steps_in(self._directory, skip_unreadable=True)
        steps = [step for step in known if step != newest]
        every = self._keep_every
        older = [step for step in steps if every is None or step % every]
        return older[: max(0, len(older) - self._max_to_keep + 1)]

    def __repr__(self) -> str:
        return f"<mr.CheckpointManager of {self._directory}>"


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint that was saved last, of those whose index is whole.

    No communication: what this rank sees. Counterpart of ``tf.train.latest_checkpoint``.

    Parameters
    ----------
    directory : path_like
        The folder of a `CheckpointManager`.

    Returns
    -------
    str or None
        None where there is none, or no such folder.

    Raises
    ------
    TypeError
        `directory` is no path.
    CheckpointError
        The folder, or an index in it, is there and can't be read; or it is a file.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> manager = mr.CheckpointManager(mr.Checkpoint(mr.MPIStrategy(), step=0), folder)
    >>> manager.save(10) == mr.latest_checkpoint(folder)
    True
    """
    folder = Path(absolute_path("directory", directory))
    for step in reversed(_steps_in(folder)):
        path = folder / f"{_NAME}-{step}"
        index = index_path(path)
        try:
            data = files.read_small(index, MOST_BYTES)
        except CorruptCheckpointError:
            continue
        with contextlib.suppress(CheckpointError):
            unpacked(data, index)
            return str(path)
    return None


def _steps_in(folder: Path, *, skip_unreadable: bool = False) -> list[int]:
    """Returns the steps of the checkpoints in a folder, in the order in which they were saved.

    One whose index is so torn that it tells no order may be the newest: it is the last one.

    Raises
    ------
    CheckpointError
        The folder, or an index in it, can't be read; with `skip_unreadable` that is left out, and a
        torn one stands in front.
    """
    ignored = (CheckpointError,) if skip_unreadable else ()
    found: list[tuple[float, int]] = []
    with contextlib.suppress(*ignored):
        for name in files.names_in(folder):
            match = _INDEX.fullmatch(name)
            if match and int(match[1]) <= MOST_STEP:
                with contextlib.suppress(*ignored):
                    order = order_of(folder / name)
                    is_last = order == 0 and not skip_unreadable and is_torn(folder / name)
                    found.append((math.inf if is_last else order, int(match[1])))
    return [step for _, step in sorted(found)]
