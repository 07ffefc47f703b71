"""The files of a checkpoint: arrays of every kind, and files that are torn, changed or hostile."""

import errno
import fcntl
import gc
import json
import os
import pickle
import re
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpi_replica as mr
from checkpoints import Stateful
from mpi_replica.checkpoint import files
from mpi_replica.checkpoint.index import index_path, unpacked
from mpi_replica.errors import CheckpointError, CorruptCheckpointError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trained"


def read_only(array):
    array.flags.writeable = False
    return array


MANY = 9 << 20  # bytes: more than two of the blocks in which files are written and read

ARRAYS = {
    "0-d": np.array(2.5),
    "empty": np.zeros((0, 4)),
    "no bytes": np.zeros(3, "S0"),
    "read-only": read_only(np.arange(5)),
    "Fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "strided": np.arange(40)[3:35:3],
    "backwards": np.arange(12).reshape(3, 4)[::-1, ::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "unaligned": np.frombuffer(bytes(range(25)), "<f8", 3, offset=1),
    "a field": np.zeros(4, "i1,f8")["f1"],
    "big-endian": np.arange(6, dtype=">f4"),
    "bfloat16": np.arange(6).astype(ml_dtypes.bfloat16),
    "float8": np.arange(6).astype(ml_dtypes.float8_e4m3fn),
    "int4": np.arange(6).astype(ml_dtypes.int4),
    "strings": np.array([["a", "größe"], ["", "\0b"]]),
    "dates": np.array(["2026-01-01", "NaT"], "M8[s]"),
    "longdouble": np.arange(3, dtype=np.longdouble) / 3,
    "structured": np.ones(3, np.dtype("i1,f8,U3", align=True)),
    "structured, strided": np.ones((4, 4), np.dtype("i1,f8", align=True))[::2, ::3],
    "NaN with bits": np.array([0x7FF80000DEADBEEF, 0xFFF0000000000001], "u8").view("f8"),
    "large": np.arange(MANY // 4, dtype="f4"),
    "large, Fortran": np.arange(MANY // 4, dtype="f4").reshape(3, -1).T,
    "large matrix, Fortran": np.arange(MANY // 4, dtype="f4").reshape(3, -1).T.view(np.matrix),
    "large rows": np.arange(MANY // 4, dtype="f4").reshape(-1, 1, 2)[::-1].reshape(2, -1)[:, ::2],
    "one large row": np.arange(MANY // 2, dtype="f4").reshape(1, -1)[:, ::2],
    "large items": np.array([b"a" * (5 << 20), b"b\0c", b""])[::-1],
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_comes_back_with_its_dtype_shape_and_bits(path, kind):
    array = ARRAYS[kind]
    mr.Checkpoint(mr.get_strategy(), w=array).save(path)
    writable, other = np.zeros(array.shape, array.dtype), np.zeros(array.shape, array.dtype, "F")
    for live in (writable, other, read_only(np.zeros(array.shape, array.dtype))):
        checkpoint = mr.Checkpoint(mr.get_strategy(), w=live)
        checkpoint.restore(path)
        found = checkpoint.w
        assert (found is live) == live.flags.writeable
        assert found is live or found.flags.fnc == array.flags.fnc
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        if array.dtype.fields is None:  # what is between fields is nobody's
            assert found.tobytes() == array.tobytes()
        else:
            np.testing.assert_array_equal(found, array)


def test_memory_stays_small_whatever_the_layout(path):
    """Some MiB beside the array, which is copied nowhere as a whole."""
    array = np.zeros((5000, 1000)).T
    tracemalloc.start()
    try:
        mr.Checkpoint(mr.get_strategy(), w=array).save(path)
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        mr.Checkpoint(mr.get_strategy(), w=array).restore(path)
        restoring = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert array.nbytes == 40_000_000
    assert saving < 16 << 20
    assert restoring < 16 << 20


def objects(step=0):
    """Some of each kind, small."""
    return {
        "step": step,
        "weights": {"w": np.arange(4.0) + step, 3: (np.int8([step, -step]), "text")},
        "optimizer": Stateful(momentum=np.full(3, step, ">i2"), name=("adam", step)),
    }


def content(checkpoint):
    """All that is in it, as text: compared before and after."""
    state = checkpoint.optimizer.state
    return repr((checkpoint.step, checkpoint.weights, state["momentum"], state["name"]))


def make_checkpoint(path, step=7):
    checkpoint = mr.Checkpoint(mr.get_strategy(), **objects(step))
    checkpoint.save(path)
    return content(checkpoint)


def refused(path, named=None):
    """Check that the checkpoint can't be restored, and that nothing changes; return the text."""
    checkpoint = mr.Checkpoint(mr.get_strategy(), **objects())
    before, rng = content(checkpoint), mr.get_strategy().rng.bit_generator.state
    text = ""
    for strict in (True, False):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.restore(path, strict=strict)
        text = str(caught.value)
        assert str(named or path.parent) in text
    assert content(checkpoint) == before
    assert mr.get_strategy().rng.bit_generator.state == rng
    return text


def data_file(path):
    (found,) = path.parent.glob("*.data-*")
    return found


def test_a_checkpoint_has_an_index_and_a_data_file(path):
    saved = make_checkpoint(path)
    assert sorted(os.listdir(path.parent)) == [data_file(path).name, "trained.index"]
    checkpoint = mr.Checkpoint(mr.get_strategy(), **objects())
    checkpoint.restore(path)
    assert content(checkpoint) == saved


def test_folders_that_are_missing_are_made(tmp_path):
    saved = make_checkpoint(tmp_path / "a" / "b c" / "größe [1]*")
    checkpoint = mr.Checkpoint(mr.get_strategy(), **objects())
    checkpoint.restore(tmp_path / "a" / "b c" / "größe [1]*")
    assert content(checkpoint) == saved


def test_a_missing_checkpoint_is_an_error_that_names_the_index(path):
    assert "No such file" in refused(path, index_path(path))
    make_checkpoint(path)
    os.unlink(data_file(path))
    refused(path)


@pytest.mark.parametrize("name", ["save", "_objects", "$array", "$x"])
def test_a_name_that_the_checkpoint_needs_is_refused_before_anything_is_saved(name):
    with pytest.raises(ValueError, match=rf"named '{re.escape(name)}'.* Give it another one\."):
        mr.Checkpoint(mr.get_strategy(), **{name: 1})


def test_saving_twice_leaves_exactly_the_new_files(path):
    make_checkpoint(path)
    first = data_file(path).name
    make_checkpoint(path.with_name("trained-2"))
    saved = make_checkpoint(path, 8)
    now = {file.name for file in path.parent.glob("trained.*")}
    assert len(now) == 2
    assert first not in now
    assert len(list(path.parent.glob("trained-2.*"))) == 2
    checkpoint = mr.Checkpoint(mr.get_strategy(), **objects())
    checkpoint.restore(path)
    assert content(checkpoint) == saved


def test_what_a_save_that_was_killed_has_left_is_removed_by_the_next(path):
    make_checkpoint(path)
    left = [f"trained.{i:016x}.data-{i:05}-of-00003" for i in range(3)]
    left += ["trained.0000000000000001.index.new", "trained.0000000000000007.index.new"]
    others = ["trained.data-00000-of-00001", "trained.index.old", "trained.00.data-0-of-1", "other"]
    for name in [*left, *others]:
        path.with_name(name).write_bytes(b"torn")
    make_checkpoint(path)
    found = set(os.listdir(path.parent))
    assert found == {"trained.index", data_file_of_index(path), *others}


def saved_by_manager(path):
    checkpoint = mr.Checkpoint(mr.get_strategy(), w=np.zeros(3))
    mr.CheckpointManager(checkpoint, path.parent).save(3)


@pytest.mark.parametrize(
    ("save", "name"),
    [(make_checkpoint, "trained"), (saved_by_manager, "ckpt-3"), (saved_by_manager, "ckpt-2")],
    ids=["to its path", "to its step", "to another step"],
)
def test_what_a_save_that_was_killed_has_left_takes_no_room_from_the_next(
    path, monkeypatch, save, name
):
    save(path)
    ends = ("data-00000-of-00001", "index.new")
    left = [path.with_name(f"{name}.{7:016x}.{end}") for end in ends]
    for file in left:
        file.write_bytes(b"torn")
    true = os.write

    def write(file, data):
        if any(file.exists() for file in left):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(file, data)

    monkeypatch.setattr(os, "write", write)
    save(path)
    assert not any(file.exists() for file in left)


@pytest.mark.parametrize(
    ("name", "code"),
    [("lockf", errno.ENOLCK), ("lockf", errno.EAGAIN), ("open", errno.EACCES)],
    ids=["no locks", "locked", "of another user"],
)
def test_what_may_belong_to_a_save_that_goes_on_stays(path, monkeypatch, name, code):
    """What belongs to none since its index was replaced goes also there."""
    make_checkpoint(path)
    left = {f"trained.{1:016x}.{end}" for end in ("data-00000-of-00001", "index.new")}
    for each in left:
        path.with_name(each).touch()
    module = {"lockf": fcntl, "open": os}[name]
    true = getattr(module, name)

    def refuse(*arguments):
        if name == "open" and os.path.basename(arguments[0]) not in left:
            return true(*arguments)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        make_checkpoint(path)
    assert set(os.listdir(path.parent)) == {"trained.index", data_file_of_index(path), *left}
    make_checkpoint(path)
    assert set(os.listdir(path.parent)) == {"trained.index", data_file_of_index(path)}


@pytest.mark.parametrize("name", ["folder", "another name of it"])
def test_what_another_thread_of_the_process_is_saving_into_the_folder_stays(
    tmp_path, monkeypatch, name
):
    """A lock of the file system tells it from other processes only."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "another name of it").symlink_to("folder")
    other = threading.Thread(target=save_one, args=(tmp_path / name, 2))
    true = os.write

    def write(file, data):
        if not other.ident:
            other.start()
            other.join()
        return true(file, data)

    monkeypatch.setattr(os, "write", write)
    save_one(tmp_path / "folder", 1)
    for step in (1, 2):
        found = mr.Checkpoint(mr.get_strategy(), w=np.zeros(3))
        found.restore(tmp_path / "folder" / f"ckpt-{step}")
        assert found.w.tolist() == [step] * 3


def save_one(folder, step):
    with mr.MPIStrategy() as strategy:
        checkpoint = mr.Checkpoint(strategy, w=np.full(3, float(step)))
        mr.CheckpointManager(checkpoint, folder).save(step)


def test_what_a_save_that_was_given_up_has_left_goes_with_the_next_of_its_process(path):
    given_up = files.NewFile(index_path(path), f"{1:016x}")
    left = files.beside(index_path(path), f"{1:016x}")
    make_checkpoint(path)
    assert left.exists()
    del given_up
    gc.collect()
    make_checkpoint(path)
    assert not left.exists()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of other threads
@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_forked_child_removes_what_its_parent_was_saving_once_that_is_given_up(path, is_given_up):
    saving = [files.NewFile(index_path(path), f"{1:016x}")]
    left = files.beside(index_path(path), f"{1:016x}")
    goes_on, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)  # so that it ends with its parent
        os.read(goes_on, 1)  # to its end
        os._exit(files.remove_abandoned(left))
    assert not files.remove_abandoned(left)
    if is_given_up:
        saving.clear()
        gc.collect()
    os.close(tell)
    os.close(goes_on)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == is_given_up
    assert left.exists() != is_given_up


@pytest.mark.parametrize("how", ["a folder", "torn"])
def test_beside_an_index_that_cannot_be_read_what_it_may_refer_to_stays(path, how):
    manager = mr.CheckpointManager(mr.Checkpoint(mr.get_strategy(), w=np.zeros(3)), path.parent)
    for step in (1, 2):
        manager.save(step)
    one = path.with_name("ckpt-1")
    own, index = data_file_of_index(one), index_path(one)
    other = f"ckpt-1.{1:016x}.data-00000-of-00001"
    path.with_name(other).touch()
    whole = index.read_bytes()
    index.unlink()
    if how == "a folder":
        index.mkdir()
    else:
        index.write_bytes(whole[:-1])
    manager.save(3)
    names = {name for name in os.listdir(path.parent) if name.startswith("ckpt-1.")}
    assert names == {"ckpt-1.index", own} | ({other} if how == "a folder" else set())


def test_a_checkpoint_without_arrays_leaves_nothing_of_one_with_arrays(path):
    make_checkpoint(path)
    mr.Checkpoint(mr.get_strategy(), step=1).save(path)
    assert os.listdir(path.parent) == ["trained.index"]


def data_file_of_index(path):
    (found,) = unpacked(index_path(path).read_bytes(), index_path(path)).files()
    return found


# Torn and corrupt


def test_every_bit_of_the_arrays_counts(path):
    make_checkpoint(path)
    file = data_file(path)
    whole = file.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="corrupt") as caught:
            mr.Checkpoint(mr.get_strategy(), **objects()).restore(path)
        assert str(file) in str(caught.value)
    refused(path, file)


def test_a_file_that_changes_after_it_was_checked_is_an_error_that_names_it(path):
    array = np.arange(1000)
    (extent,) = files.write_new(path, [array])
    os.utime(path, ns=(0, 0))
    checked = files.check(path, [extent])
    found = np.zeros_like(array)
    files.read_into(path, extent, found, checked)
    assert found.tolist() == array.tolist()
    with open(path, "r+b") as file:
        file.write(b"changed")
    with pytest.raises(CorruptCheckpointError, match="checksum") as caught:
        files.read_into(path, extent, found, checked)
    assert str(path) in str(caught.value)


def test_a_data_file_that_is_too_short_is_an_error_that_names_it(path):
    make_checkpoint(path)
    file = data_file(path)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="torn") as caught:
            mr.Checkpoint(mr.get_strategy(), **objects()).restore(path)
        assert str(file) in str(caught.value)
    refused(path, file)


def test_every_bit_of_the_index_counts(path):
    make_checkpoint(path)
    index = index_path(path)
    whole = index.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            with pytest.raises(CheckpointError, match="torn or corrupt") as caught:
                unpacked(bytes(flipped), index)
            assert str(index) in str(caught.value)
    index.write_bytes(flipped)
    refused(path, index)


def test_an_index_that_is_too_short_or_too_long_is_an_error_that_names_it(path):
    make_checkpoint(path)
    index = index_path(path)
    whole = index.read_bytes()
    for changed in [*(whole[:n] for n in range(len(whole))), whole + b"\n", whole + whole]:
        with pytest.raises(CheckpointError, match="torn or corrupt") as caught:
            unpacked(changed, index)
        assert str(index) in str(caught.value)
    index.write_bytes(whole[:-20])
    refused(path, index)


def test_a_folder_in_place_of_a_file_is_an_error_that_names_it(path):
    make_checkpoint(path)
    for file in (data_file(path), index_path(path)):
        file.unlink()
        file.mkdir()
        refused(path, file)


# Hostile


class Bomb:
    """Its pickle makes a file when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("find", [index_path, data_file])
def test_a_pickle_in_place_of_a_file_is_never_run(path, find):
    make_checkpoint(path)
    mark = path.parent / "ran"
    file = find(path)
    bomb = pickle.dumps(Bomb(mark))
    line = b"%s\n%08x\n" % (bomb, zlib.crc32(bomb))
    array = np.array([Bomb(mark)], object)
    for data in (bomb, bomb * 10, line, array.dumps(), b"\x93NUMPY" + bomb):
        file.write_bytes(data)
        refused(path, file)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()


def change_index(path, change):
    """Change what the index says; its checksum fits."""
    index = index_path(path)
    told = json.loads(index.read_bytes().partition(b"\n")[0])
    line = json.dumps(change(told)).encode()
    index.write_bytes(b"%s\n%08x\n" % (line, zlib.crc32(line)))


def record(**changes):
    """Change the record of the first array, by the position of what is changed."""
    places = {"dtype": 0, "shape": 1, "file": 2, "offset": 3, "size": 4, "crc": 5, "order": 6}

    def change(told):
        for name, value in changes.items():
            place = places[name]  # the last one may be left out
            told["arrays"]["0"][place : place + 1] = [value]
        return told

    return change


def entry(name, value):
    return lambda told: {**told, name: value}


def state(value):
    """Change one of the saved objects."""
    return lambda told: {**told, "state": {**told["state"], "step": value}}


def of_ranks(**changes):
    return lambda told: {**told, "of_ranks": [{**told["of_ranks"][0], **changes}]}


FILES = ["/etc/passwd", "../secret", "..", ".", "", "a/b", "a\0b", "\ud800", 3, None, ["a"]]
GENERATOR = {"bit_generator": "PCG64", "state": {"state": 1, "inc": 1}}
HOSTILE = {
    **{f"file {name!r}": record(file=name) for name in FILES},
    "no such file": record(file="trained.other"),
    "negative offset": record(offset=-8),
    "offset past the end": record(offset=1 << 40),
    "offset past all files": record(offset=(1 << 63) - 8),
    "no offset": record(offset=None),
    "negative size": record(size=-32),
    "negative shape": record(shape=[-2, -2]),
    "size that does not fit": record(size=40),
    "shape that does not fit": record(shape=[5]),
    "enormous": record(shape=[1 << 50], size=1 << 53),
    "enormous shape without items": record(shape=[1 << 60, 1 << 60, 0], size=0),
    "shape beyond all": record(shape=[1 << 70], size=1 << 73),
    "many dimensions": record(shape=[1] * 70, size=8),
    "shape of infinities": record(shape=[float("inf")]),
    "shape of texts": record(shape=["four"]),
    "no shape": record(shape=None),
    "crc of another kind": record(crc="0"),
    "order of another kind": record(order="K"),
    "no order": record(order=None),
    "order of a list": record(order=["F"]),
    "dtype of objects": record(dtype="|O", size=32),
    "dtype of texts of any size": record(dtype="T"),
    "dtype of objects in fields": record(dtype=[["a", "|O", [], 0, None], 8]),
    "dtype of another kind": record(dtype={"a": 1}),
    "dtype that is a function": record(dtype="finfo"),
    "dtype that is a module": record(dtype="__loader__"),
    "a record too short": lambda told: {**told, "arrays": {"0": ["<f8", [4]]}},
    "arrays are a list": entry("arrays", []),
    "arrays are missing": entry("arrays", {}),
    "state is a number": entry("state", 3),
    "state is None": entry("state", None),
    "an array that is not there": state({"$array": "9"}),
    "an array without a name": state({"$array": None}),
    "an array by a list": state({"$array": ["0"]}),
    "a scalar by a nest": state({"$scalar": {"$array": "0"}}),
    "a tuple of a number": state({"$tuple": 3}),
    "a dict of a number": state({"$dict": 3}),
    "a dict without values": state({"$dict": [["a"]]}),
    "a key that is a list": state({"$dict": [[[1], 2]]}),
    "a key that is an array": state({"$dict": [[{"$array": "0"}, 2]]}),
    "a tensor without a library": state({"$tensor": "0"}),
    "a tensor of a library without a name": state({"$tensor": [["torch"], "0"]}),
    "a tensor that is not there": state({"$tensor": ["torch", "9"]}),
    "a module of a number": state({"$module": 3}),
    "an optimizer without shapes": state({"$optimizer": [{}]}),
    "objects of an array that is not there": state({"$alike": {"$array": "9"}}),
    "a kind that nobody knows": state({"$later": [1]}),
    "a dict with a key of no dict": state({"a": 1, "$tuple": [1]}),
    "a counter of a number": state({"$counter": 3}),
    "bytes that are none": state({"$bytes": "%%%"}),
    "bytes of a number": state({"$bytes": 3}),
    "complex of three": state({"$complex": [1, 2, 3]}),
    "complex of a text": state({"$complex": ["1", "__import__('os')"]}),
    "no ranks": entry("of_ranks", []),
    "ranks are a number": entry("of_ranks", 3),
    "ranks are texts": entry("of_ranks", ["ab"]),
    "no seed": of_ranks(seed=None),
    "a seed below zero": of_ranks(seed=-1, shared=GENERATOR),
    "a generator of nothing": of_ranks(shared={}),
    "a generator of texts": of_ranks(shared={**GENERATOR, "state": "os.system"}),
    "a generator of another kind": of_ranks(shared={**GENERATOR, "bit_generator": "MT19937"}),
    "replicas are a list": of_ranks(replicas=[1]),
    "a replica of no number": of_ranks(replicas={"one": GENERATOR}),
    "a generator without numbers": of_ranks(replicas={"0": {**GENERATOR, "state": {}}}),
    "infinitely many replicas": entry("num_replicas", float("inf")),
    "no number of replicas": entry("num_replicas", None),
    "another format": entry("format", "tar"),
    "a list": lambda told: [told],
    "a text": lambda told: "format",
    "nothing": lambda told: None,
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_index_is_an_error_that_names_a_file(path, how):
    make_checkpoint(path)
    change_index(path, HOSTILE[how])
    refused(path)
    saved = make_checkpoint(path)  # and nothing is broken
    checkpoint = mr.Checkpoint(mr.get_strategy(), **objects())
    checkpoint.restore(path)
    assert content(checkpoint) == saved


def test_an_array_of_an_unknown_library_imports_nothing(path):
    """Importing some module runs code."""
    make_checkpoint(path)
    change_index(path, state({"$state": {"$tensor": ["antigravity", "0"]}}))
    checkpoint = mr.Checkpoint(mr.get_strategy(), step=Stateful())
    with pytest.raises(CheckpointError, match="step can't be restored: it has an array of antig"):
        checkpoint.restore(path, strict=False)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"", b"1" * 9000])
def test_an_index_of_garbage_is_an_error_that_names_it(path, line):
    make_checkpoint(path)
    index_path(path).write_bytes(b"%s\n%08x\n" % (line, zlib.crc32(line)))
    refused(path, index_path(path))


def test_a_link_where_the_index_is_written_first_is_not_followed(tmp_path, monkeypatch):
    """In a folder of several users another one may have made it, who has guessed its name."""
    path, theirs = tmp_path / "trained", tmp_path / "theirs"
    theirs.write_text("keep")
    link = tmp_path / f"trained.{bytes(8).hex()}.index.new"
    link.symlink_to(theirs)
    with monkeypatch.context() as patch:
        patch.setattr(os, "urandom", bytes)
        with pytest.raises(CheckpointError, match="exists") as caught:
            make_checkpoint(path)
    assert str(link) in str(caught.value)
    before = make_checkpoint(path)
    assert theirs.read_text() == "keep"
    assert not index_path(path).is_symlink()
    checkpoint = mr.Checkpoint(mr.get_strategy(), **objects())
    checkpoint.restore(path)
    assert content(checkpoint) == before


@pytest.mark.parametrize("version", [1, 2])
def test_a_checkpoint_of_a_version_before_is_read(path, version):
    before = make_checkpoint(path)
    change_index(path, lambda told: {**told, "version": version})
    checkpoint = mr.Checkpoint(mr.get_strategy(), **objects())
    checkpoint.restore(path)
    assert content(checkpoint) == before


@pytest.mark.parametrize("version", [0, 4, "1", None, [1]])
def test_another_version_says_what_to_use(path, version):
    make_checkpoint(path)
    change_index(path, lambda told: {"format": told["format"], "version": version})
    text = refused(path, index_path(path))
    assert f"version {version!r}" in text
    assert "wrote it" in text


def test_an_index_larger_than_it_can_be_is_not_read(path):
    path.write_bytes(bytes(1001))
    with pytest.raises(CheckpointError, match="too large"):
        files.read_small(path, 1000)
    assert files.read_small(path, 1001) == bytes(1001)


def test_a_file_that_is_there_is_never_written_over(path):
    path.write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="exists"):
        files.write_new(path, [np.zeros(3)])
    assert path.read_bytes() == b"precious"
