"""A program that is killed while it saves: the older checkpoint restores, or the new one, whole.

Killed before, in and after every call that changes files, each counted. To be killed after one is
to be killed before the next; in one is half of the bytes written, or after it for other calls.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import mpi_replica as mr
from jobs import run_job
from launching import LIBRARIES, ROOT
from mpi_replica.checkpoint.index import unpacked

pytestmark = pytest.mark.mpi_skip  # it starts processes itself

# It forks for each place where to die: a process without other threads, so not that of the tests.
HEAD = r"""
import fcntl, json, os, shutil, signal, sys
from pathlib import Path
import numpy as np
import mpi_replica as mr
from mpi_replica.checkpoint import files
from mpi_replica.checkpoint.index import unpacked
from mpi_replica.errors import CheckpointError

files._BLOCK_BYTES = 64  # so that an array takes several writes
OLD, NEW = 1, 2
CALLS = ("open", "write", "fsync", "replace", "close", "unlink", "mkdir")
folder = Path(sys.argv[1])

def checkpoint(step=0):
    weights = np.arange(40.0).reshape(5, 8).T * step
    return mr.Checkpoint(step=step, weights=weights, other=[np.full(step + 1, step), "x" * step])

def save(path, step, manager=None):
    "Save at a path; with the settings of a manager in the folder of the path."
    mr.get_strategy().rng.bit_generator.state = {
        "bit_generator": "PCG64", "state": {"state": step, "inc": 1}, "has_uint32": 0, "uinteger": 0
    }
    if manager is None:
        checkpoint(step).save(path)
    else:
        mr.CheckpointManager(checkpoint(step), path.parent, **manager).save(step)

def restored(path):
    "The step of the checkpoint that is there, all of it; 0 where there is none."
    index = path.with_name(path.name + ".index")
    found = mr.Checkpoint(step=0, weights=np.zeros((8, 5)), other=None)
    try:
        found.restore(path, strict=False)
    except CheckpointError as error:
        assert not index.exists() and "No such file" in str(error), error
        return 0
    wanted = checkpoint(found.step)
    np.testing.assert_array_equal(found.weights, wanted.weights)
    assert repr(found.other) == repr(None)  # a list does not fit there
    found = checkpoint(found.step)
    found.weights[...] = found.other[0][...] = -1
    found.restore(path)
    np.testing.assert_array_equal(found.weights, wanted.weights)
    assert repr(found.other) == repr(wanted.other)
    assert mr.get_strategy().rng.bit_generator.state["state"]["state"] == found.step
    return found.step

def of_checkpoints(folder):
    "The files of the checkpoints that are there."
    found = set()
    for index in folder.glob("*.index"):
        found |= {index.name, *unpacked(index.read_bytes(), index).files()}
    return found

def wrap(counted):
    "Let each call that changes files go through `counted`."
    for module, name in [*((os, name) for name in CALLS), (fcntl, "lockf")]:
        def call(*arguments, true=getattr(module, name), name=name, **settings):
            return counted(name, true, arguments, settings)
        setattr(module, name, call)
"""

FORKED = r"""
os.fsync = lambda file: None  # slow, and the system outlives the process; it counts as a call

def do_at(at, how, act):
    "Call `act` at call number `at`: before it, or in it."
    seen = 0
    def counted(name, true, arguments, settings):
        nonlocal seen
        is_it, seen = seen == at, seen + 1
        if is_it and how == "before":
            act()
        if is_it and how == "in" and name == "write":
            file, data = arguments
            true(file, data[: len(data) // 2])
            act()
        try:
            return true(*arguments, **settings)
        finally:  # also after one that failed, as making a folder that is there
            if is_it and how == "in":
                act()
    wrap(counted)

def fork(path, step, at, how, number, manager=None):
    "Let a child save, which sends itself a signal at call `at`; return its id."
    child = os.fork()
    if child == 0:
        try:
            do_at(at, how, lambda: os.kill(os.getpid(), number))
            save(path, step, manager)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child

def attempt(path, step, at, how, manager=None):
    "Let a child save, which dies at call `at`; return whether it came to its end before."
    _, status = os.waitpid(fork(path, step, at, how, signal.SIGKILL, manager), 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0
"""

KILLED = r"""
has_older = sys.argv[2] == "older"
inner = "checkpoints" if has_older else "deep/checkpoints"
if has_older:
    (folder / "pristine").mkdir()
    save(folder / "pristine" / "trained", OLD)
outcomes = []
for how in ("before", "in"):
    at = 0
    while True:
        place = folder / f"{how}-{at}"
        place.mkdir()
        path = place / inner / "trained"
        if has_older:
            shutil.copytree(folder / "pristine", path.parent)
        has_ended = attempt(path, NEW, at, how)
        outcomes.append([how, at, has_ended, restored(path)])
        if how == "in":
            save(path, 3)  # as if nothing had happened, and nothing of it is left
            assert restored(path) == 3
            names = os.listdir(path.parent)
            assert len(names) == 2 and "trained.index" in names, names
        shutil.rmtree(place)
        if has_ended:
            break
        at += 1
print(json.dumps(outcomes))
"""

MANAGED = r"""
manager = {"max_to_keep": 2}
mark = "0123456789abcdef"
others = {  # what is nobody's, another checkpoint's, and what another save has left
    *("notes", f"ckpt-2.{mark}.data-00000-of-00001.kept", f"ckpt-2.{mark}", "ckpt-2.index.old"),
    *(f"ckpt-best.{mark}.data-00000-of-00001", f"ckpt-best.{mark}.index.new"),
    f"ckpt-2.{mark}.{mark}.data-00000-of-00001",
}
kept = []
for how in ("before", "in"):
    at, has_ended = 0, False
    while not has_ended:
        place = folder / f"{how}-{at}"
        place.mkdir()
        for name in others:
            (place / name).touch()
        for step in (1, 2):
            save(place / "any", step, manager)
        has_ended = attempt(place / "any", 3, at, how, manager)
        save(place / "any", 4, manager)
        names = set(os.listdir(place))
        assert names == of_checkpoints(place) | others, (how, at, names)
        kept.append(sorted(index.name for index in place.glob("*.index")))
        for step in (int(name[5]) for name in kept[-1]):
            assert restored(place / f"ckpt-{step}") == step
        at += 1
print(json.dumps(kept))
"""

PAUSED = r"""
names, manager = ["trained"], None
if sys.argv[2] == "a manager":
    names, manager = ["ckpt-1", "ckpt-2", "ckpt-3"], {"max_to_keep": None}
at, has_ended = 0, False
while not has_ended:
    place = folder / f"{at}"
    place.mkdir()
    path = place / "trained"
    save(path, 1, manager)
    child = fork(path, NEW, at, "before", signal.SIGSTOP, manager)
    _, status = os.waitpid(child, os.WUNTRACED)
    has_ended = os.WIFEXITED(status)
    save(path, 3, manager)
    if not has_ended:
        os.kill(child, signal.SIGCONT)
        _, status = os.waitpid(child, 0)
    assert status == 0, (at, status)
    found = [restored(place / name) for name in names]
    assert found in ([1, 2, 3], [2], [3]), (at, found)
    assert set(os.listdir(place)) == of_checkpoints(place), (at, os.listdir(place))
    at += 1
print(json.dumps(at))
"""

TRACED = r"""
path = folder / "trained"
save(path, OLD)
calls, events = [], []

def counted(name, true, arguments, settings):
    result = None
    try:
        result = true(*arguments, **settings)
        return result
    finally:
        calls.append([name, str(arguments[0]), str(result)])

def hook(event, arguments):
    if event == "open" and arguments[1] in ("r", "rb"):
        return  # it is read
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate",
                 "os.link", "os.symlink", "os.chmod", "shutil.move", "shutil.copyfile"):
        if str(folder) in str(arguments[0]):
            events.append(event)

wrap(counted)
sys.addaudithook(hook)
save(path, NEW)
print(json.dumps([calls, events]))
"""


def run(program, *arguments):
    """Run a program without MPI; return what it printed, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "MPI_REPLICA_TRANSPORT": "single"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("before", ["older", "none"])
def test_killed_at_any_call_the_older_checkpoint_restores_or_the_new_one(tmp_path, before):
    outcomes = run(FORKED + KILLED, tmp_path, before)
    older = 1 if before == "older" else 0
    for how in ("before", "in"):
        found = [step for name, _, _, step in outcomes if name == how]
        ended = [has_ended for name, _, has_ended, _ in outcomes if name == how]
        assert len(found) > 15
        assert ended == [False] * (len(ended) - 1) + [True]
        # It is the older one up to some call, and the new one from there on.
        place = found.index(2)
        assert found == [older] * place + [2] * (len(found) - place)
        assert place > 10


def test_what_a_manager_leaves_that_is_killed_goes_with_its_next_save(tmp_path):
    """Whatever its step, and also where it was killed while it removed what is too old."""
    kept = run(FORKED + MANAGED, tmp_path)
    assert len(kept) > 30
    assert sorted(map(list, set(map(tuple, kept)))) == [
        ["ckpt-2.index", "ckpt-4.index"],
        ["ckpt-3.index", "ckpt-4.index"],
    ]


@pytest.mark.parametrize("where", ["one path", "a manager"])
def test_a_save_that_goes_on_keeps_its_files_while_another_job_saves_beside_it(tmp_path, where):
    """It stops at any call that changes files, another one saves, and it comes to its end."""
    assert run(FORKED + PAUSED, tmp_path, where) > 15


def test_all_that_an_index_refers_to_is_on_disk_before_it_takes_its_place(tmp_path):
    """And the index lasts before the older files go: also where the machine loses power."""
    calls, events = run(TRACED, tmp_path)
    opened, steps = {}, []
    for name, first, result in calls:
        if name == "open":
            opened[result] = first
        file = opened[first] if name in ("write", "fsync", "close") else first
        kind = "data" if ".data-" in file else "index" if ".index" in file else "folder"
        if name in ("write", "fsync", "replace", "unlink") and [name, kind] not in steps[-1:]:
            steps.append([name, kind])
    assert steps == [
        *(["write", "data"], ["fsync", "data"], ["write", "index"], ["fsync", "index"]),
        *(["fsync", "folder"], ["replace", "index"], ["fsync", "folder"], ["unlink", "data"]),
    ]
    # The system was asked to change nothing beside.
    asked = {"open": "open", "os.rename": "replace", "os.remove": "unlink", "os.mkdir": "mkdir"}
    names = [name for name, *_ in calls if name in asked.values()]
    assert sorted(asked[event] for event in events) == sorted(names)


PLACES = [("write", 1, 1), ("replace", 0, 1)]


@pytest.mark.parametrize(("library", "place"), list(zip(LIBRARIES, PLACES, strict=False)), ids=str)
def test_a_rank_that_is_killed_while_all_save_leaves_the_older_checkpoint(tmp_path, library, place):
    name, killed, step = place
    run_job(
        library,
        tmp_path,
        f"""
        path = os.path.join({str(tmp_path)!r}, "trained")
        strategy = mr.MPIStrategy()
        with strategy.scope():
            v = mr.Variable(np.arange(1000.0))
            checkpoint = mr.Checkpoint(step=1, v=v, w=np.full(1000, 1), x=np.full(10, 1))
            checkpoint.save(path)
            true = os.{name}

            def die(*arguments):
                if rank == {killed}:
                    os.kill(os.getpid(), signal.SIGKILL)
                return true(*arguments)

            os.{name} = die
            v.assign(2.0 * v)
            checkpoint.step, checkpoint.w, checkpoint.x = 2, np.full(1000, 2), np.full(10, 2)
            checkpoint.save(path)
            tell("saved")
        """,
    )
    assert not list(tmp_path.glob("told-*"))
    path = tmp_path / "trained"
    found = mr.Checkpoint(
        mr.get_strategy(), step=0, v=np.zeros(1000), w=np.zeros(1000, int), x=np.zeros(10, int)
    )
    found.restore(path)
    assert found.step == step
    assert found.w.tolist() == [step] * 1000
    np.testing.assert_array_equal(found.v, np.arange(1000.0) * step)
    assert len(list(tmp_path.glob("trained.*.data-*"))) > 2
    found.save(path)
    assert len(list(tmp_path.glob("trained.*"))) == 2


MOMENTS = [("fsync", 1, 1), ("fsync", 0, 2), ("replace", 0, 1)]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_job_that_goes_on_after_a_kill_saves_once_and_nothing_is_left(tmp_path, library, moment):
    """Killed with data on disk, with an index that is not in place, and before it would be."""
    name, killed, count = moment
    kept = tmp_path / "kept"
    program = f"""
        strategy = mr.MPIStrategy()
        checkpoint = mr.Checkpoint(strategy, step=0, w=np.zeros(1000), x=np.zeros(10))
        manager = mr.CheckpointManager(checkpoint, {str(kept)!r})
        if manager.restore_or_initialize() is None:
            manager.save(1)
            true, calls = os.{name}, []

            def die(*arguments):
                calls.append(arguments)
                if rank == {killed} and len(calls) == {count}:
                    os.kill(os.getpid(), signal.SIGKILL)
                return true(*arguments)

            os.{name} = die
            manager.save(2)
        manager.save(3)
        strategy.close()
        tell(f"saved {{manager.steps}}")
    """
    run_job(library, tmp_path, program)
    left = {name for name in os.listdir(kept) if not name.startswith("ckpt-1.")}
    assert left
    done = run_job(library, tmp_path, program, succeeds=True)
    assert set(done.told) == {"[0] saved [1, 3]\n", "[1] saved [1, 3]\n"}
    assert not left & set(os.listdir(kept))
    wanted = set()
    for index in kept.glob("*.index"):
        wanted |= {index.name, *unpacked(index.read_bytes(), index).files()}
    assert set(os.listdir(kept)) == wanted
