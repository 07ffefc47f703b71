"""A folder of checkpoints: what is kept, what is restored, and what a signal does."""

import errno
import gc
import logging
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    culprits,
    error_of,
    gathered,
    needs_two_ranks,
    raises_everywhere,
)
from mpi_replica.checkpoint import files, index, preemption
from mpi_replica.errors import (
    CheckpointError,
    CollectiveMismatchError,
    ContextError,
    CorruptCheckpointError,
)

SIGNALS = [number for number in preemption.SIGNALS if number != signal.SIGTERM] + [signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers():
    """Put the handlers of signals back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def managed(strategy, shared_folder):
    """Return a function that makes a manager over a counter and a variable."""
    with strategy.scope():
        weights = mr.Variable(np.zeros(3))

    def make(**settings):
        checkpoint = mr.Checkpoint(strategy, weights=weights, step=0)
        return mr.CheckpointManager(checkpoint, shared_folder / "kept", **settings)

    return make


def save(manager, *steps):
    for step in steps:
        manager.checkpoint.step = step
        manager.checkpoint.weights.assign(np.full(3, step))
        path = manager.save(step)
        assert path == os.path.join(manager.directory, f"ckpt-{step}")
    gathered(None)  # rank 0 has removed what is too old


def content(manager):
    return manager.checkpoint.step, np.asarray(manager.checkpoint.weights).tolist()


# What is kept


def test_a_program_with_another_component_restores_what_fits_where_it_says_so(managed, strategy):
    save(managed(), 7)
    later = managed()
    later.checkpoint.extra = 0.5
    error = raises_everywhere(CheckpointError, later.restore_or_initialize)
    assert "not in the checkpoint: extra" in str(error)
    assert later.restore_or_initialize(strict=False) == os.path.join(later.directory, "ckpt-7")
    assert content(later) == (7, [7, 7, 7])
    assert later.checkpoint.extra == 0.5


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [3, 4, 5, 6, 7]),
        ({"max_to_keep": 1}, [7]),
        ({"max_to_keep": None}, [1, 2, 3, 4, 5, 6, 7]),
        ({"max_to_keep": 2, "keep_every": 3}, [3, 5, 6, 7]),
        ({"max_to_keep": 1, "keep_every": 1}, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_newest_are_kept_and_those_at_every_so_many_steps(managed, settings, kept):
    manager = managed(**settings)
    save(manager, *range(1, 8))
    assert gathered(manager.steps) == gathered(kept)
    files = os.listdir(manager.directory)
    assert {int(name.split(".")[0].removeprefix("ckpt-")) for name in files} == set(kept)


def test_all_ranks_find_the_same_steps_behind_each_save(managed):
    manager = managed(max_to_keep=2)
    found = []
    for step in range(8):
        save(manager, step)
        found.append(manager.steps)
    assert gathered(found) == [[[*range(max(0, n - 1), n + 1)] for n in range(8)]] * len(
        gathered(0)
    )


def test_saving_at_a_lower_step_than_before_does_not_remove_what_was_just_saved(managed):
    manager = managed(max_to_keep=2)
    save(manager, 10, 20, 5)
    assert manager.steps == [20, 5]


def test_a_step_that_is_saved_again_is_replaced(managed):
    manager = managed(max_to_keep=2)
    save(manager, 1, 2)
    manager.checkpoint.step = 22
    manager.save(2)
    manager.checkpoint.step = 0
    assert manager.restore_or_initialize() == os.path.join(manager.directory, "ckpt-2")
    assert manager.checkpoint.step == 22
    assert manager.steps == [1, 2]


# What is restored


def test_the_newest_is_restored_and_without_any_the_program_begins_anew(managed):
    manager, begun = managed(), []
    assert manager.restore_or_initialize(lambda: begun.append(1)) is None
    assert manager.restore_or_initialize() is None
    assert manager.latest_checkpoint is None
    save(manager, 9, 10, 100)
    manager.checkpoint.step = 0
    manager.checkpoint.weights.assign(np.zeros(3))
    path = os.path.join(manager.directory, "ckpt-100")
    assert manager.restore_or_initialize(lambda: begun.append(2)) == path
    assert manager.latest_checkpoint == mr.latest_checkpoint(manager.directory) == path
    assert content(manager) == (100, [100.0] * 3)
    assert begun == [1]


def test_the_one_saved_last_is_restored_also_after_going_back_to_an_older_one_by_hand(managed):
    manager = managed(max_to_keep=3)
    save(manager, 10, 20, 30)
    manager.checkpoint.restore(os.path.join(manager.directory, "ckpt-20"))
    save(manager, 25)
    assert gathered(manager.steps) == gathered([20, 30, 25]), "nothing goes but what is too old"
    anew = managed()
    assert anew.restore_or_initialize() == os.path.join(manager.directory, "ckpt-25")
    assert anew.latest_checkpoint == mr.latest_checkpoint(manager.directory)
    assert content(anew) == (25, [25.0] * 3)
    save(manager, 20)
    assert gathered(manager.steps) == gathered([30, 25, 20])
    assert managed().restore_or_initialize() == os.path.join(manager.directory, "ckpt-20")


def test_checkpoints_that_do_not_say_when_they_were_saved_are_older_and_go_by_their_steps(
    managed, strategy, monkeypatch
):
    manager = managed()
    with monkeypatch.context() as old:
        old.setattr(index, "_NUMBER", "what earlier versions did not write")
        save(manager, 10, 30, 20)
    assert gathered(manager.steps) == gathered([10, 20, 30])
    assert manager.restore_or_initialize() == os.path.join(manager.directory, "ckpt-30")
    save(manager, 15)
    assert gathered(manager.steps) == gathered([10, 20, 30, 15])
    check_works(strategy)


def test_a_torn_or_corrupt_checkpoint_is_skipped_and_rank_0_says_so(managed, strategy, caplog):
    manager = managed()
    save(manager, 1, 2, 3)
    if strategy.rank == 0:
        with open(os.path.join(manager.directory, "ckpt-3.index"), "r+b") as file:
            file.truncate(100)
        (data,) = (
            n for n in os.listdir(manager.directory) if n.startswith("ckpt-2.") and "data" in n
        )
        with open(os.path.join(manager.directory, data), "r+b") as file:
            file.write(b"\xff")
    gathered(None)
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        assert manager.restore_or_initialize() == os.path.join(manager.directory, "ckpt-1")
    assert content(manager) == (1, [1.0] * 3)
    told = [record.getMessage() for record in caplog.records]
    if strategy.rank:
        assert told == []
    else:
        assert ["ckpt-3.index is torn" in told[0], "is corrupt" in told[1]] == [True, True], told
    check_works(strategy)


TORN = {
    "empty": lambda index: index.write_bytes(b""),
    "cut off": lambda index: index.write_bytes(index.read_bytes()[:60]),
    "a folder": lambda index: (index.unlink(), index.mkdir()),
    "a link to nothing": lambda index: (index.unlink(), index.symlink_to("nowhere")),
}


@pytest.mark.parametrize("how", TORN)
def test_the_newest_is_skipped_with_a_warning_where_its_index_does_not_tell_its_age(
    how, managed, strategy, caplog
):
    manager = managed()
    save(manager, 1, 2, 3)
    if strategy.rank == 0:
        TORN[how](Path(manager.directory, "ckpt-3.index"))
    gathered(None)
    assert manager.steps == [1, 2, 3]
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        assert manager.restore_or_initialize() == os.path.join(manager.directory, "ckpt-2")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (strategy.rank == 0)
    assert all("ckpt-3 is skipped" in text for text in told)
    check_works(strategy)


def test_a_torn_one_keeps_no_whole_one_from_being_kept(managed, strategy):
    manager = managed(max_to_keep=2)
    save(manager, 1, 2)
    if strategy.rank == 0:
        Path(manager.directory, "ckpt-2.index").write_bytes(b"")
    gathered(None)
    save(manager, 3)
    assert gathered(manager.steps) == gathered([1, 3])


def tear(manager, strategy, *steps):
    if strategy.rank == 0:
        for step in steps:
            (data,) = Path(manager.directory).glob(f"ckpt-{step}.*.data-00000-of-*")
            os.truncate(data, 3)
    gathered(None)


def test_where_none_is_whole_that_is_an_error_on_all_and_no_reason_to_begin_anew(
    managed, strategy, caplog
):
    manager, begun = managed(), []
    save(manager, 2, 10, 3)
    tear(manager, strategy, 2, 3, 10)
    manager.checkpoint.step = 0
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        error = raises_everywhere(
            CorruptCheckpointError, lambda: manager.restore_or_initialize(lambda: begun.append(1))
        )
    text = str(error)
    assert f"{manager.directory} has 3 checkpoints, none of them whole. Of the newest, ckpt" in text
    assert f"ckpt-3: {manager.directory}/ckpt-3." in text
    assert "is torn" in text
    assert "move the folder away to begin anew" in text
    assert "older checkpoint" not in text, "there is none"
    assert (begun, manager.checkpoint.step) == ([], 0)
    assert len(caplog.records) == (0 if strategy.rank else 2), "for those with an older one"
    check_works(strategy)
    assert manager.steps == [2, 10, 3]


def test_where_another_job_removes_the_only_one_meanwhile_the_program_begins_anew(
    managed, strategy, monkeypatch
):
    manager, begun = managed(), []
    save(manager, 1)
    tear(manager, strategy, 1)
    restore = manager.checkpoint.restore

    def removed_meanwhile(path, **settings):
        try:
            restore(path, **settings)
        finally:
            gathered(None)
            if strategy.rank == 0:
                os.unlink(f"{path}.index")

    monkeypatch.setitem(vars(manager.checkpoint), "restore", removed_meanwhile)
    assert manager.restore_or_initialize(lambda: begun.append(1)) is None
    assert begun == [1]
    check_works(strategy)


class Refusal:
    """What the system refuses on rank 0, for a moment: files whose names have a pattern in them."""

    def __init__(self, monkeypatch, strategy):
        self._patch, self._is_here = monkeypatch, strategy.rank == 0

    def of_folders(self, code):
        def refuse(folder):
            raise OSError(code, os.strerror(code), folder)

        if self._is_here:
            self._patch.setattr(os, "listdir", refuse)

    def of_files(self, pattern, code):
        def may_open(file, *arguments, **settings):
            if pattern in str(file):
                raise OSError(code, os.strerror(code), file)
            return open(file, *arguments, **settings)

        if self._is_here:
            self._patch.setattr(files, "open", may_open, raising=False)


REFUSED = {
    "the folder": lambda refusal: refusal.of_folders(errno.EMFILE),
    "an index": lambda refusal: refusal.of_files("ckpt-3.index", errno.EACCES),
    "an older index": lambda refusal: refusal.of_files("ckpt-2.index", errno.ESTALE),
    "data": lambda refusal: refusal.of_files("data-", errno.EIO),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_system_refuses_to_read_is_an_error_on_all_and_no_reason_to_begin_anew(
    managed, strategy, monkeypatch, what
):
    manager, begun = managed(), []
    save(manager, 2, 3)
    manager.checkpoint.step = 0
    with monkeypatch.context() as patch:
        REFUSED[what](Refusal(patch, strategy))
        error = raises_everywhere(
            CheckpointError, lambda: manager.restore_or_initialize(lambda: begun.append(1))
        )
    assert "can't be read: " in str(error)
    assert manager.directory in str(error)
    assert not isinstance(error, CorruptCheckpointError)
    assert (begun, manager.checkpoint.step) == ([], 0)
    check_works(strategy)
    assert manager.restore_or_initialize() == os.path.join(manager.directory, "ckpt-3")
    assert content(manager) == (3, [3.0] * 3)


@pytest.mark.parametrize("name", ["afile", "afile/kept"])
def test_a_folder_that_is_a_file_is_an_error_on_all_ranks_and_no_reason_to_begin_anew(
    strategy, shared_folder, name
):
    if strategy.rank == 0:
        (shared_folder / "afile").touch()
    gathered(None)
    folder, begun = shared_folder / name, []
    manager = mr.CheckpointManager(mr.Checkpoint(strategy, step=0), folder)
    error = raises_everywhere(
        CheckpointError, lambda: manager.restore_or_initialize(lambda: begun.append(1))
    )
    assert str(error).startswith(f"{folder} is no folder of checkpoints: Not a directory. Give ")
    assert not begun
    for call in (lambda: mr.latest_checkpoint(folder), lambda: manager.steps):
        assert str(raises_everywhere(CheckpointError, call)) == str(error)
    assert str(folder.parent) in str(raises_everywhere(CheckpointError, lambda: manager.save(1)))
    check_works(strategy)
    assert (shared_folder / "afile").read_bytes() == b""


@pytest.mark.parametrize("what", ["the folder", "an older index"])
def test_what_can_not_be_read_is_an_error_of_the_save_as_it_may_be_newer(
    managed, strategy, monkeypatch, what
):
    manager = managed()
    save(manager, 10, 2, 3)
    names = sorted(os.listdir(manager.directory))
    with monkeypatch.context() as patch:
        REFUSED[what](Refusal(patch, strategy))
        error = raises_everywhere(CheckpointError, lambda: manager.save(1))
    assert "can't be read: " in str(error)
    assert sorted(os.listdir(manager.directory)) == names
    check_works(strategy)
    save(manager, 1)
    assert manager.steps == [10, 2, 3, 1]


def test_an_index_that_only_another_user_may_read_keeps_nobody_from_saving(
    managed, strategy, monkeypatch
):
    manager = managed(max_to_keep=1)
    save(manager, 3)
    with monkeypatch.context() as patch:
        REFUSED["an index"](Refusal(patch, strategy))
        raises_everywhere(CheckpointError, lambda: manager.save(4))
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        save(manager, 4, 5)
    assert manager.steps == [3, 5]
    check_works(strategy)


@pytest.mark.parametrize("name", ["other.index", "ckpt-0.0123456789abcdef.index.new"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink(path, path)])
def test_what_is_no_file_keeps_nobody_from_saving(managed, strategy, name, make):
    manager = managed(max_to_keep=2)
    save(manager, 1)
    if strategy.rank == 0:
        make(os.path.join(manager.directory, name))
    gathered(None)
    save(manager, 2, 3)
    assert manager.steps == [2, 3]
    assert manager.restore_or_initialize() == os.path.join(manager.directory, "ckpt-3")


def test_what_the_system_refuses_to_read_when_all_is_saved_removes_nothing(
    managed, strategy, monkeypatch
):
    manager = managed(max_to_keep=1)
    save(manager, 1)
    put_in_place = files.NewFile.put_in_place
    with monkeypatch.context() as patch:

        def refused_from_then_on(new):
            put_in_place(new)
            Refusal(patch, strategy).of_folders(errno.EMFILE)

        patch.setattr(files.NewFile, "put_in_place", refused_from_then_on)
        save(manager, 2)
    check_works(strategy)
    assert manager.steps == [1, 2]
    save(manager, 3)
    assert manager.steps == [3]


@pytest.fixture
def elsewhere(strategy, shared_folder, monkeypatch):
    """Return a manager, and what has ranks see one folder or another one under its path."""
    needs_two_ranks(strategy)
    arrays = [np.full(3, float(i)) for i in range(strategy.size)]  # each rank writes one
    checkpoint = mr.Checkpoint(strategy, arrays=arrays, step=0)

    def see(name):
        place = shared_folder / name
        place.mkdir(exist_ok=True)
        monkeypatch.chdir(place)
        gathered(None)

    return mr.CheckpointManager(checkpoint, "/proc/self/cwd/kept", max_to_keep=None), see


def test_a_rank_that_sees_another_folder_is_an_error_of_the_save_on_all_and_the_older_one_stays(
    elsewhere, strategy
):
    manager, see = elsewhere
    see("a")
    manager.checkpoint.step = 1
    manager.save(1)
    see("b" if strategy.rank == strategy.size - 1 else "a")
    manager.checkpoint.step = 2
    error = raises_everywhere(CheckpointError, lambda: manager.save(1))
    last = f"data-{strategy.size - 1:05}-of-{strategy.size:05} is not there on rank 0: No such"
    assert last in str(error)
    assert "All ranks must see one folder" in str(error)
    check_works(strategy)
    see("a")
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert manager.checkpoint.step == 1
    assert len(os.listdir(manager.directory)) == 1 + strategy.size


def test_a_rank_that_sees_another_folder_is_an_error_of_the_restore_on_all_and_nothing_is_skipped(
    elsewhere, strategy, caplog
):
    manager, see = elsewhere
    see("a")
    manager.save(1)
    manager.save(2)
    manager.checkpoint.step = 5
    last = strategy.size - 1
    see("b" if strategy.rank == last else "a")
    begun = []
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        error = raises_everywhere(
            CheckpointError, lambda: manager.restore_or_initialize(lambda: begun.append(1))
        )
    assert f"is not there on rank {last}: No such file" in str(error)
    assert (begun, manager.checkpoint.step, caplog.records) == ([], 5, [])
    check_works(strategy)


def test_a_file_that_is_missing_for_all_is_skipped_whichever_rank_would_check_it(
    elsewhere, strategy, caplog
):
    manager, see = elsewhere
    see("a")
    for step in range(strategy.size + 1):
        manager.checkpoint.step = step
        manager.save(step)
    names = os.listdir(manager.directory)
    gathered(None)
    if strategy.rank == 0:
        for step in range(1, strategy.size + 1):
            end = f".data-{step - 1:05}-of-{strategy.size:05}"
            (name,) = (n for n in names if n.startswith(f"ckpt-{step}.") and n.endswith(end))
            os.unlink(os.path.join(manager.directory, name))
    gathered(None)
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        assert manager.restore_or_initialize() == os.path.join(manager.directory, "ckpt-0")
    assert manager.checkpoint.step == 0
    assert len(caplog.records) == (0 if strategy.rank else strategy.size)


@pytest.mark.parametrize("newest", [1, 3])
def test_of_what_another_job_removes_meanwhile_the_newest_that_is_there_is_restored(
    elsewhere, strategy, shared_folder, monkeypatch, newest
):
    manager, see = elsewhere
    see("a")
    for step in (1, 2, 3):
        manager.checkpoint.step = step
        manager.save(step)
    kept, aside = shared_folder / "a" / "kept", shared_folder / "aside"
    gathered(None)

    def move(step, source, target):
        for name in sorted(os.listdir(source), key=lambda name: "data" in name):  # as a job does
            if name.startswith(f"ckpt-{step}."):
                os.rename(source / name, target / name)

    if strategy.rank == 0:
        aside.mkdir()
        move(3, kept, aside)
    gathered(None)

    def once(function, is_now):
        """Have another job go on when rank 0 has seen its files, and before others look."""
        done = []

        def called(*args):
            result = function(*args) if strategy.rank == 0 else None
            if is_now(*args) and not done:
                done.append(gathered(None))
                if strategy.rank == strategy.size - 1:
                    if newest == 3:
                        move(3, aside, kept)
                        move(1, kept, aside)
                    move(2, kept, aside)
                gathered(None)
            return result if strategy.rank == 0 else function(*args)

        return called

    if strategy.rank == 0:
        monkeypatch.setattr(files, "check", once(files.check, lambda path, extents: extents))
    else:
        monkeypatch.setattr(files, "require_here", once(files.require_here, lambda *args: True))
    assert manager.restore_or_initialize() == f"{manager.directory}/ckpt-{newest}"
    assert manager.checkpoint.step == newest
    check_works(strategy)


def test_a_rank_that_does_not_restore_is_told_what_the_others_do(managed, strategy):
    needs_two_ranks(strategy)
    manager = managed()
    call = strategy.barrier if strategy.rank == 0 else manager.restore_or_initialize
    error = raises_everywhere(CollectiveMismatchError, call)
    assert "CheckpointManager.restore_or_initialize" in str(error)
    assert "broadcast_to" not in str(error)
    check_works(strategy)


def test_one_that_is_whole_and_does_not_fit_is_no_reason_to_take_an_older_one(managed, strategy):
    manager = managed()
    save(manager, 1)
    manager.checkpoint.more = 1
    manager.save(2)
    del manager.checkpoint.more
    error = raises_everywhere(CheckpointError, manager.restore_or_initialize)
    assert "not in the program: more" in str(error)
    check_works(strategy)


def test_a_rank_with_a_step_that_is_none_is_an_error_on_all(managed, strategy):
    needs_two_ranks(strategy)
    manager = managed(save_on_signal=True)
    steps = ((-1, ValueError), (2**63, ValueError), (1.5, TypeError), (True, TypeError))
    for step, kind in steps:
        for call in (manager.save, manager.exit_if_signalled):
            mine = step if strategy.rank == strategy.size - 1 else 3
            error = error_of(lambda call=call, mine=mine: call(mine))
            assert set(gathered(type(error))) == {kind}
            assert f"got {step!r}" in str(error)
    check_works(strategy)


def test_a_step_of_more_digits_than_python_writes_is_an_error_on_all(managed, strategy):
    manager = managed(save_on_signal=True)
    for call in (manager.save, manager.exit_if_signalled):
        error = raises_everywhere(ValueError, lambda call=call: call(10**5000))
        assert "step must be from 0 to 9223372036854775807, got a number of 16610 bits" in str(
            error
        )
    save(manager, 2**63 - 1)
    manager.exit_if_signalled(2**63 - 1)
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    check_works(strategy)


def test_only_names_that_a_save_writes_are_steps(managed, strategy):
    manager = managed()
    save(manager, 0, 3)
    if strategy.rank == 0:
        for name in ("0007", "\u0667", "+7", str(2**63), "9" * 200):
            shutil.copy(
                f"{manager.directory}/ckpt-3.index", f"{manager.directory}/ckpt-{name}.index"
            )
    gathered(None)  # all see them
    assert manager.steps == [0, 3]
    assert manager.restore_or_initialize() == os.path.join(manager.directory, "ckpt-3")


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"max_to_keep": 0}, ValueError, "max_to_keep"),
        ({"max_to_keep": True}, TypeError, "max_to_keep"),
        ({"keep_every": 2.0}, TypeError, "keep_every"),
        ({"keep_every": -1}, ValueError, "keep_every"),
        ({"save_on_signal": 1}, TypeError, "save_on_signal"),
    ],
)
def test_settings_that_make_no_sense_are_told_by_name(managed, settings, kind, words):
    with pytest.raises(kind, match=words):
        managed(**settings)


def test_only_a_checkpoint_can_be_managed(shared_folder):
    with pytest.raises(TypeError, match=r"needs a mr\.Checkpoint, got 3"):
        mr.CheckpointManager(3, shared_folder)


@pytest.mark.parametrize("folder", [None, b"folder"])
def test_what_is_no_folder_is_told_by_name(folder):
    with pytest.raises(TypeError, match="directory must be a path, got "):
        mr.latest_checkpoint(folder)
    with pytest.raises(TypeError, match="directory must be a path, got "):
        mr.CheckpointManager(mr.Checkpoint(a=1), folder)


# Signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_any_rank_saves_at_one_step_on_all_and_ends_them(
    managed, strategy, handlers, number, caplog
):
    for culprit in culprits(strategy):
        manager = managed(save_on_signal=True)
        manager.exit_if_signalled(1)
        origin = strategy.engine.layout.rank_of(culprit)
        manager.checkpoint.step = 5
        manager.checkpoint.weights.assign(np.full(3, 5.0))
        if strategy.rank == origin:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # batch systems and launchers may both send one
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mpi_replica"):
            error = error_of(lambda manager=manager: manager.exit_if_signalled(5))
        assert gathered((type(error), error.code)) == [(SystemExit, 75)] * strategy.size
        assert manager.steps == [5]
        told = [record.getMessage() for record in caplog.records]
        name = signal.Signals(number).name
        assert [f"rank {origin} got {name}" in text for text in told] == [True] * (
            strategy.rank == 0
        )
        manager.checkpoint.step = 0
        manager.restore_or_initialize()
        assert content(manager) == (5, [5.0] * 3)
        del manager, error
        gc.collect()  # with the traceback of the error
        os.kill(os.getpid(), number)  # while the program ends, that does nothing
        with subprocess.Popen(["sleep", "60"]) as child:  # but to what it starts
            child.send_signal(number)
        assert child.returncode == -number
        caplog.clear()
        check_works(strategy)


def test_without_save_on_signal_nothing_is_asked_and_signals_are_left_alone(
    managed, strategy, handlers
):
    manager = managed()
    steps = strategy.engine.transport.steps
    manager.exit_if_signalled(1)
    assert strategy.engine.transport.steps == steps
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers


def test_when_no_manager_is_left_a_signal_does_what_it_did_before(managed, handlers):
    seen = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: seen.append(number))
    managers = [managed(save_on_signal=True)]
    preemption.answer()  # a program that has caught its end goes on
    managers.append(managed(save_on_signal=True))
    os.kill(os.getpid(), SIGNALS[0])
    managers.pop()
    os.kill(os.getpid(), SIGNALS[0])
    assert seen == []
    managers.pop()
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert seen == SIGNALS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_process_still_ends_by_the_signal(managed, strategy, handlers):
    manager = managed(save_on_signal=True)
    for number in SIGNALS:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # should it not end
            os.kill(os.getpid(), number)
            while True:
                signal.pause()
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == number
    manager.exit_if_signalled(1)
    check_works(strategy)


def test_ranks_at_other_steps_are_told_so(managed, strategy, handlers):
    needs_two_ranks(strategy)
    manager = managed(save_on_signal=True)
    error = raises_everywhere(
        CollectiveMismatchError, lambda: manager.exit_if_signalled(10 + (strategy.rank == 1))
    )
    assert "rank 1: 11" in str(error)
    check_works(strategy)


def test_a_rank_that_does_not_ask_is_told_what_the_others_do(managed, strategy, handlers):
    needs_two_ranks(strategy)
    manager = managed(save_on_signal=strategy.rank > 0)

    def step():
        manager.exit_if_signalled(1)
        strategy.verify(manager.checkpoint.weights)

    error = raises_everywhere(CollectiveMismatchError, step)
    assert "exit_if_signalled" in str(error)
    assert "verify" in str(error)
    check_works(strategy)


def test_other_threads_and_replicas_are_told_where_to_ask(managed, strategy, handlers):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(error_of(lambda: managed(save_on_signal=True)))
    )
    thread.start()
    thread.join()
    assert isinstance(found[0], ContextError)
    assert "main thread" in str(found[0])
    manager = managed(save_on_signal=True)
    raises_everywhere(ContextError, lambda: strategy.run(lambda: manager.exit_if_signalled(1)))
    check_works(strategy)


def test_an_init_fn_on_one_rank_that_can_not_be_called_is_an_error_on_all(strategy, managed):
    manager = managed()
    init_fn = 5 if strategy.rank == strategy.size - 1 else None
    error = raises_everywhere(TypeError, lambda: manager.restore_or_initialize(init_fn))
    assert str(error) == "init_fn must be callable or None, got 5."
    check_works(strategy)
