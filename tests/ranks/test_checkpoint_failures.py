"""Checkpoints that can't be saved or restored: an error on one rank is the same one on all."""

import collections
import copy
import enum
import errno
import logging
import os
import re
import shutil

import numpy as np
import pytest

import mpi_replica as mr
from checkpoints import (
    Stateful,
    content,
    listing,
    on_read,
    program,
    replica_id,
    restored,
    save,
    variable,
)
from everywhere import check_works, gathered, needs_two_ranks, raises_everywhere
from mpi_replica.checkpoint import files, index
from mpi_replica.errors import (
    CheckpointError,
    CollectiveMismatchError,
    ContextError,
    CorruptCheckpointError,
    StructureMismatchError,
)

# What does not fit


def test_strict_names_all_that_does_not_fit_on_all_ranks_and_changes_nothing(strategy, path):
    saved = program(strategy, 7.0)
    saved.more = {"a": 1}
    saved.save(path)
    checkpoint = program(strategy, 1.0)
    checkpoint.kernel = variable(strategy, np.ones((4, 3)))
    checkpoint.nest["bias"] = np.ones(3)
    checkpoint.nest[2][1] = ("text",)
    checkpoint.nest["extra"] = [1]
    checkpoint.learning_rate = 0.5
    checkpoint.optimizer = np.zeros(3)
    seen = repr((np.asarray(checkpoint.kernel), checkpoint.nest, checkpoint.step))
    rng = repr(strategy.rng.bit_generator.state)
    error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    for words in (
        *(str(path), "not in the checkpoint: nest['extra'], learning_rate;", "strict=False"),
        *("not in the program: more;", "kernel is float64[4, 3] here, and float64[3, 4]"),
        *("nest['bias'] is float64[3] here, and", "nest[2][1] is a tuple of 1 here, and 2 items"),
        "optimizer is float64[3] here, and the state of an object in the checkpoint",
    ):
        assert words in str(error), (words, str(error))
    assert repr((np.asarray(checkpoint.kernel), checkpoint.nest, checkpoint.step)) == seen
    assert repr(strategy.rng.bit_generator.state) == rng
    check_works(strategy)


def test_another_byte_order_is_told_as_such(strategy, path):
    save(strategy, path, counts=np.arange(3, dtype=">i4"), pairs=np.zeros(2, "i4,>f4"))
    here = {"counts": np.zeros(3, "<i4"), "pairs": np.zeros(2, "i4,f4")}
    error = raises_everywhere(CheckpointError, lambda: restored(strategy, path, **here))
    assert "counts is int32[3] here, and >i4[3] in the checkpoint" in str(error)
    assert "and [('f0', '<i4'), ('f1', '>f4')][2] in the checkpoint" in str(error)


def test_to_restore_none_says_what_begins_anew(strategy, path):
    checkpoint = program(strategy, 1.0)
    newest = mr.latest_checkpoint(path.parent)
    error = raises_everywhere(TypeError, lambda: checkpoint.restore(newest))
    assert "got None, as latest_checkpoint gives" in str(error)
    check_works(strategy)


def test_a_generator_of_another_kind_is_told_before_anything_is_restored(strategy, path):
    save(strategy, path, step=7, rng=np.random.default_rng(1))
    checkpoint = mr.Checkpoint(strategy, step=1, rng=np.random.Generator(np.random.MT19937(2)))
    wanted = np.random.Generator(np.random.MT19937(2)).random()
    error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    assert "rng draws by MT19937 here, and by PCG64 in the checkpoint" in str(error)
    assert checkpoint.step == 1
    assert checkpoint.rng.random() == wanted
    stateful = {"step": 7, "rng": Stateful(total=1)}
    save(strategy, path, **stateful)
    error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    assert "rng draws by MT19937 here, and by no generator in the checkpoint" in str(error)
    check_works(strategy)


def test_without_strict_what_fits_is_restored_and_rank_0_tells_the_rest(strategy, path, caplog):
    program(strategy, 7.0).save(path)
    checkpoint = program(strategy, 1.0)
    checkpoint.kernel = variable(strategy, np.ones((4, 3)))
    checkpoint.nest["bias"] = bias = np.ones(5, np.float32)
    checkpoint.learning_rate = 0.5
    del checkpoint.optimizer
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        checkpoint.restore(path, strict=False)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (strategy.rank == 0)
    for text in told:
        assert text.startswith(f"{path} is restored but for: not in the checkpoint: learning_rate;")
        assert "not in the program: optimizer; different: " in text
        assert "kernel is float64[4, 3] here" in text
    assert np.asarray(checkpoint.kernel).tolist() == np.ones((4, 3)).tolist()
    assert checkpoint.nest["bias"] is bias
    assert bias.tolist() == [1.0] * 5
    assert checkpoint.learning_rate == 0.5
    assert checkpoint.step == 7
    assert np.asarray(checkpoint.nest["inner"]).tolist() == [7.0, 7.0]
    assert checkpoint.nest[2][1] == ("text", np.float32(7))


def test_what_fits_on_all_ranks_but_one_is_restored_on_none(strategy, path):
    program(strategy, 7.0).save(path)
    last = strategy.size - 1
    checkpoint = program(strategy, 1.0)
    if strategy.rank == last:
        checkpoint.nest["bias"] = np.zeros(9)
    before = content(checkpoint)
    error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    assert "nest['bias'] is float64[9] here" in str(error)
    assert content(checkpoint) == before
    check_works(strategy)


def test_a_file_that_is_missing_or_changed_is_the_same_error_on_all_ranks(strategy, path):
    program(strategy, 7.0).save(path)
    names = listing(path)
    checkpoint = program(strategy, 1.0)
    before = content(checkpoint)
    for name in names:
        file = path.with_name(name)
        whole = gathered(file.read_bytes())[0]
        for changed in (None, whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]):
            if strategy.rank == 0:
                file.unlink(missing_ok=True)
                if changed is not None:
                    file.write_bytes(changed)
            gathered(None)
            error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
            assert str(file) in str(error)
            assert content(checkpoint) == before
        if strategy.rank == 0:
            file.write_bytes(whole)
        gathered(None)
    checkpoint.restore(path)
    assert checkpoint.step == 7
    check_works(strategy)


class Phase(enum.Enum):
    FIRST = enum.auto()
    SECOND = enum.auto()


class Refusing(Stateful):
    """An object that refuses the state of others, where it is told to."""

    def __init__(self, refuses):
        super().__init__(momentum=0)
        self.refuses = refuses

    def load_state_dict(self, state):
        if self.refuses:
            raise ArithmeticError("no such momentum")
        super().load_state_dict(state)


def test_where_an_object_refuses_its_state_no_attribute_and_no_random_number_changes(
    strategy, path
):
    """What comes before it and can be changed is restored, on ranks that did not fail all is."""
    saved = mr.Checkpoint(
        strategy, step=7, first=np.full(3, 7), optimizer=Stateful(momentum=7), last=np.full(3, 7)
    )
    saved.save(path)
    strategy.rng.random()
    generator = repr(strategy.rng.bit_generator.state)
    refusing = Refusing(strategy.rank == strategy.size - 1)
    checkpoint = mr.Checkpoint(
        strategy, step=1, first=np.full(3, 1), optimizer=refusing, last=np.full(3, 1)
    )
    error = raises_everywhere(ArithmeticError, lambda: checkpoint.restore(path))
    assert "no such momentum" in str(error)
    assert checkpoint.step == 1
    assert repr(strategy.rng.bit_generator.state) == generator
    assert checkpoint.first.tolist() == [7, 7, 7]
    assert checkpoint.last.tolist() == [1 if refusing.refuses else 7] * 3
    refusing.refuses = False
    checkpoint.restore(path)
    assert (checkpoint.step, refusing.state, checkpoint.last.tolist()) == (
        *(7, {"momentum": 7}),
        [7, 7, 7],
    )
    check_works(strategy)


# What one rank can't do


class System:
    """The module `os`, with one function that fails, or does more, for some files."""

    def __init__(self, name, pattern, act):
        self._name, self._pattern, self._act = name, pattern, act
        self._files = {}

    def open(self, file, *arguments):
        self._check("open", str(file))
        found = os.open(file, *arguments)
        self._files[found] = str(file)
        return found

    def __getattr__(self, name):
        true = getattr(os, name)

        def call(first, *arguments):
            self._check(name, self._files.get(first, str(first)))
            return true(first, *arguments)

        return call if name in ("write", "fsync", "close", "replace", "unlink") else true

    def _check(self, name, file):
        if name == self._name and self._pattern in file:
            self._act()


def refuse(code):
    def act():
        raise OSError(code, os.strerror(code))

    return act


REFUSED = {
    "disk full, data": ("write", ".data-", errno.ENOSPC, -1),
    "disk full, index": ("write", ".index", errno.ENOSPC, 0),
    "no permission": ("open", ".data-", errno.EACCES, -1),
    "no permission, index": ("open", ".index", errno.EROFS, 0),
    "data do not get to disk": ("fsync", ".data-", errno.EIO, -1),
    "index does not get to disk": ("fsync", ".index", errno.EIO, 0),
    "folder can't be read": ("open", "save", errno.EACCES, 0),
    "no renaming": ("replace", ".index", errno.EACCES, 0),
}


@pytest.mark.usefixtures("few_ranks")
@pytest.mark.parametrize("how", REFUSED)
def test_a_rank_that_cannot_write_is_an_error_on_all_and_the_older_one_stays(
    strategy, path, monkeypatch, how
):
    name, pattern, code, culprit = REFUSED[how]
    path = path.parent / "saved" / "trained"
    program(strategy, 7.0).save(path)
    before = listing(path)
    checkpoint = program(strategy, 8.0)
    with monkeypatch.context() as patch:
        if strategy.rank == culprit % strategy.size:
            pattern = str(path.parent) if pattern == "save" else pattern
            act = refuse(code)
            system = System(name, pattern, act)
            if pattern == str(path.parent):  # the folder itself, and not what is in it
                true = system._check
                system._check = lambda n, file: true(n, file) if file == pattern else None
            patch.setattr(files, "os", system)
        error = raises_everywhere(CheckpointError, lambda: checkpoint.save(path))
    assert str(path.parent) in str(error)
    assert os.strerror(code) in str(error)
    gathered(None)
    assert listing(path) == before
    check_works(strategy)
    again = program(strategy)
    again.restore(path)
    assert content(again) == content(program(strategy, 7.0))
    checkpoint.save(path)
    again.restore(path)
    assert again.step == 8
    assert len(listing(path)) == len(before)


@pytest.mark.parametrize("pattern", [".data-", ".index"])
def test_what_the_system_refuses_is_raised_at_the_line_that_saves(
    strategy, path, monkeypatch, pattern
):
    """The frames behind it are of this package, and of Python's own that it calls."""
    checkpoint = program(strategy, 8.0)
    culprit = strategy.size - 1 if pattern == ".data-" else 0

    def fails():
        checkpoint.save(path)

    with monkeypatch.context() as patch:
        if strategy.rank == culprit:
            patch.setattr(files, "os", System("write", pattern, refuse(errno.ENOSPC)))
        error = raises_everywhere(CheckpointError, fails)
    line = fails.__code__.co_firstlineno + 1
    (origin, *_) = error.__notes__[-1].splitlines()
    assert f"(rank {culprit}) at test_checkpoint_failures.py:{line}" in origin
    check_works(strategy)


@pytest.mark.usefixtures("few_ranks")
def test_a_folder_that_vanishes_while_all_save_is_an_error_on_all(strategy, path, monkeypatch):
    folder = path.parent / "scratch"
    checkpoint = program(strategy, 8.0)

    def vanish():  # at once: others may be about to write in it
        folder.rename(path.parent / "gone")

    with monkeypatch.context() as patch:
        if strategy.rank == strategy.size - 1:
            patch.setattr(files, "os", System("fsync", ".data-", vanish))
        error = raises_everywhere(CheckpointError, lambda: checkpoint.save(folder / "trained"))
    assert str(folder) in str(error)
    assert "No such file" in str(error)
    assert not folder.exists()
    check_works(strategy)
    checkpoint.save(folder / "trained")
    checkpoint.restore(folder / "trained")


def test_a_folder_that_cannot_be_made_is_an_error_on_all(strategy, path):
    if strategy.rank == 0:
        path.write_bytes(b"a file")
    gathered(None)
    error = raises_everywhere(CheckpointError, lambda: save(strategy, path / "b" / "c", a=1))
    assert str(path) in str(error)
    check_works(strategy)


def test_a_read_only_folder_is_an_error_on_all(strategy, path):
    if os.geteuid() == 0:
        pytest.skip("nothing is read-only for root")
    path.parent.chmod(0o555)
    try:
        error = raises_everywhere(CheckpointError, lambda: program(strategy).save(path))
    finally:
        gathered(None)
        path.parent.chmod(0o755)
    assert "Permission denied" in str(error)
    check_works(strategy)


# What the ranks disagree in

ONES, ZEROS = np.ones(3), np.zeros(3)
DIFFERENT = {
    "a shape": ({"w": np.zeros(3)}, {"w": np.zeros(4)}),
    "a dtype": ({"w": np.zeros(3)}, {"w": np.zeros(3, "f4")}),
    "a byte order": ({"w": np.zeros(3, ">f8")}, {"w": np.zeros(3, "<f8")}),
    "the byte order of a field": (
        {"w": np.zeros(3, [("x", ">i2")])},
        {"w": np.zeros(3, [("x", "<i2")])},
    ),
    "the byte order of a field that is an array": (
        {"w": np.zeros(3, [("x", ">i2", 2)])},
        {"w": np.zeros(3, [("x", "<i2", 2)])},
    ),
    "a name": ({"w": 1}, {"v": 1}),
    "an object more": ({"w": 1}, {"w": 1, "x": np.zeros(3)}),
    "a kind": ({"w": np.zeros(())}, {"w": 0.0}),
    "a length": ({"w": [1, 2]}, {"w": [1, 2, 3]}),
    "a key": ({"w": {"a": 1, "b": 2}}, {"w": {"a": 1, "c": 2}}),
    "a key that is no text": ({"w": {1: 0, 2: 0}}, {"w": {1: 0, 3: 0}}),
    "the order of keys": ({"w": {"a": ONES, "b": ZEROS}}, {"w": {"b": ZEROS, "a": ONES}}),
    "the order of numbers": ({"w": {1: ONES, 0: ZEROS}}, {"w": {0: ZEROS, 1: ONES}}),
    "the order of tuples": ({"w": {(1,): ONES, (0,): ZEROS}}, {"w": {(0,): ZEROS, (1,): ONES}}),
    "the order of $": ({"w": {"$1": ONES, "$0": ZEROS}}, {"w": {"$0": ZEROS, "$1": ONES}}),
    "the order in a state": (
        {"w": Stateful(s={1: ONES, 0: ZEROS})},
        {"w": Stateful(s={0: ZEROS, 1: ONES})},
    ),
    "what is counted": ({"w": collections.Counter("ab")}, {"w": collections.Counter("ac")}),
    "the order of counts": ({"w": collections.Counter("ab")}, {"w": collections.Counter("ba")}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_with_different_objects_are_an_error_on_all(strategy, path, what):
    needs_two_ranks(strategy)
    program(strategy, 7.0).save(path)
    before = listing(path)
    mine = DIFFERENT[what][strategy.rank == strategy.size - 1]
    error = raises_everywhere(
        (StructureMismatchError, CollectiveMismatchError), lambda: save(strategy, path, **mine)
    )
    assert "Checkpoint.save" in str(error)
    assert listing(path) == before
    check_works(strategy)


@pytest.mark.parametrize("name", ["save", "restore"])
def test_ranks_with_different_paths_are_an_error_on_all_that_names_both(strategy, path, name):
    needs_two_ranks(strategy)
    own = path.with_name(f"trained-{min(strategy.rank, 1)}")
    before = []
    if name == "restore":
        save(strategy, path, a=1)
        shutil.copy(path.with_name("trained.index"), own.with_name(f"{own.name}.index"))
        before = ["trained-0.index", "trained-1.index", "trained.index"]
    call = {"save": save, "restore": restored}[name]
    error = raises_everywhere(CollectiveMismatchError, lambda: call(strategy, own, a=1))
    assert "trained-0" in str(error)
    assert "trained-1" in str(error)
    assert listing(path) == before
    check_works(strategy)


def test_an_object_that_cannot_be_saved_on_one_rank_is_a_type_error_on_all(strategy, path):
    value = object() if strategy.rank == strategy.size - 1 else 1
    error = raises_everywhere(TypeError, lambda: save(strategy, path, nest={"a": [value]}))
    assert "checkpoint.nest['a'][0]" in str(error)
    assert listing(path) == []
    check_works(strategy)


def test_a_member_of_an_enum_without_texts_or_numbers_is_refused_with_what_to_keep(strategy, path):
    error = raises_everywhere(TypeError, lambda: save(strategy, path, nest={"a": Phase.SECOND}))
    assert "can't hold Phase (checkpoint.nest['a']): of enums it takes" in str(error)
    assert "Keep member.name" in str(error)
    save(strategy, path, phase=Phase.SECOND.name)
    assert Phase[restored(strategy, path, phase="").phase] is Phase.SECOND


def test_a_variable_without_one_value_is_named_and_what_the_error_says_saves_it(strategy, path):
    apart = on_read(strategy, mr.VariableAggregation.NONE)
    strategy.run(lambda: apart.assign(float(replica_id())))
    error = raises_everywhere(ValueError, lambda: save(strategy, path, nest=[apart]))
    assert "can't hold checkpoint.nest[0]: " in str(error)
    assert "save strategy.run(variable.value) in its place" in str(error)
    assert listing(path) == []
    save(strategy, path, nest=[strategy.run(apart.value)])
    strategy.run(lambda: apart.assign(-1.0))
    restored(strategy, path, nest=[apart])
    strategy.run(lambda: np.testing.assert_equal(apart.value(), replica_id()))
    check_works(strategy)


def test_a_variable_whose_value_an_object_can_not_ask_for_is_named_and_what_to_do(strategy, path):
    total = on_read(strategy, mr.VariableAggregation.SUM)
    strategy.run(lambda: total.assign(float(replica_id())))
    model = Stateful(total=total)
    error = raises_everywhere(ValueError, lambda: save(strategy, path, model=model))
    assert "can't hold checkpoint.model.state_dict()['total']: it is synchronized on" in str(error)
    assert "Give the variable to the Checkpoint, too" in str(error)
    assert listing(path) == []
    save(strategy, path, model=model, total=total)
    model = Stateful()
    restored(strategy, path, model=model, total=total)
    count = strategy.num_replicas_in_sync
    assert model.state["total"] == float(total) == count * (count - 1) / 2


LONG = 10**5000  # Python writes no more than 4300 digits
LONG_NUMBERS = {
    "checkpoint.step": {"step": LONG},
    "checkpoint.nest['a'][1]": {"nest": {"a": [0, -LONG]}},
    "the keys of checkpoint.nest": {"nest": {LONG: 0}},
    "checkpoint.optimizer.state_dict()['step']": {"optimizer": Stateful(step=LONG)},
}


@pytest.mark.parametrize("where", LONG_NUMBERS)
def test_an_int_of_too_many_digits_on_one_rank_is_an_error_on_all_before_a_file_is_made(
    strategy, path, where
):
    objects = LONG_NUMBERS[where] if strategy.rank == strategy.size - 1 else {"step": 0}
    folder = path.parent / "not made"
    error = raises_everywhere(ValueError, lambda: save(strategy, folder / "a", **objects))
    assert f"({where})" in str(error)
    assert "4300 digits" in str(error)
    assert not folder.exists()
    check_works(strategy)


CONTAINERS = {
    "list": lambda item: [item],
    "tuple": lambda item: (item, 0),
    "dict": lambda item: {"a": item},
    "dict of tuples": lambda item: {(0, 0): item},
}


def nested(make, levels, item):
    for _ in range(levels):
        item = make(item)
    return item


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("wrap", [lambda nest: nest, lambda nest: Stateful(nest=nest)])
def test_a_nest_is_restored_or_too_deep_on_all_ranks_before_a_file_is_made(
    strategy, path, kind, wrap
):
    def make(levels):
        return wrap(nested(CONTAINERS[kind], levels, strategy.rank))

    save(strategy, path, nest=make(98))
    assert restored(strategy, path, nest=make(98)).nest
    before = listing(path)
    for levels in (103, 330, 3000):
        deep = make(levels if strategy.rank == strategy.size - 1 else 98)
        error = raises_everywhere(ValueError, lambda deep=deep: save(strategy, path, nest=deep))
        assert "nested more than 100 levels deep (" in str(error)
        assert "checkpoint.nest" in str(error)
        assert len(str(error)) < 1000
        assert listing(path) == before
    check_works(strategy)


def test_a_list_that_contains_itself_is_an_error_on_all_that_says_where(strategy, path):
    endless = [variable(strategy, 1.0)]
    endless += [endless, endless]
    error = raises_everywhere(ValueError, lambda: save(strategy, path, nest={"a": endless}))
    assert "(checkpoint.nest['a'][1][1][1]" in str(error)
    assert listing(path) == []
    check_works(strategy)


@pytest.mark.parametrize("call", [save, restored])
def test_what_is_no_path_on_one_rank_is_an_error_on_all_that_names_the_argument(
    strategy, path, call
):
    save(strategy, path, a=1)
    no_path = 5 if strategy.rank == strategy.size - 1 else path
    error = raises_everywhere(TypeError, lambda: call(strategy, no_path, a=1))
    assert str(error) == "path must be a path, got 5. Give a text or a pathlib.Path."
    check_works(strategy)


@pytest.mark.parametrize("call", [save, restored])
@pytest.mark.parametrize(
    ("no_path", "words"),
    [
        ("/", "path must name a checkpoint in a folder, got '/'."),
        ("", "path must name a checkpoint in a folder, got ''."),
        ("a\0b", "path must be a path of files, and 'a\\x00b' has a NUL. Leave it out."),
        ("a\ud800b", "and 'a\\ud800b' has a character that no name can have. Leave it out."),
    ],
)
def test_a_path_that_no_file_can_have_is_an_error_that_says_so(strategy, call, no_path, words):
    error = raises_everywhere(ValueError, lambda: call(strategy, no_path, a=1))
    assert words in str(error)
    check_works(strategy)


def test_a_path_without_a_checkpoint_is_an_error_on_all_that_says_what_to_give_instead(
    strategy, path
):
    save(strategy, path, a=1)
    for wrong, remedy in (
        (path.with_name("mistyped"), "There is no checkpoint of that name on rank 0's host."),
        (path.parent, f"{path.parent} is a folder: restore mr.latest_checkpoint(folder)"),
        (index.index_path(path), f"Leave .index off: the path of a checkpoint is {path}."),
    ):
        error = raises_everywhere(
            CorruptCheckpointError, lambda wrong=wrong: restored(strategy, wrong, a=0)
        )
        missing = f"{index.index_path(wrong)} can't be read: No such file or directory. {remedy}"
        assert str(error).startswith(missing), error
        assert "free space" not in str(error)
    check_works(strategy)


def test_an_index_that_could_not_be_restored_is_not_saved(strategy, path, monkeypatch):
    save(strategy, path, a=1, own=strategy.run(replica_id))
    before = listing(path)
    texts = strategy.run(lambda: f"{replica_id()}" * 1000)
    with monkeypatch.context() as patch:
        patch.setattr(index, "MOST_BYTES", 1000)  # it takes several GiB to write one of 1 GiB
        error = raises_everywhere(CheckpointError, lambda: save(strategy, path, a=2, own=texts))
    assert "and 1000 can be restored" in str(error)
    assert listing(path) == before
    found = restored(strategy, path, a=0, own=strategy.run(lambda: 0))
    assert found.a == 1
    check_works(strategy)


def test_a_path_in_the_place_of_the_strategy_is_told(path):
    with pytest.raises(TypeError, match="the path is given to save and restore"):
        mr.Checkpoint(path, a=1)


def test_saving_on_one_rank_and_restoring_on_others_is_an_error_on_all(strategy, path):
    needs_two_ranks(strategy)
    checkpoint = program(strategy, 1.0)
    checkpoint.save(path)
    call = checkpoint.save if strategy.rank else checkpoint.restore
    error = raises_everywhere(CollectiveMismatchError, lambda: call(path))
    assert "Checkpoint.save" in str(error)
    assert "Checkpoint.restore" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("name", ["save", "restore"])
def test_in_a_replica_it_is_a_context_error(strategy, path, name):
    checkpoint = program(strategy, 1.0)
    checkpoint.save(path)
    error = raises_everywhere(
        ContextError, lambda: strategy.run(lambda: getattr(checkpoint, name)(path))
    )
    assert f"Checkpoint.{name}" in str(error)
    check_works(strategy)


class WithHistory(mr.Checkpoint):
    """A class of a program's own, with what it does not save."""

    epoch = 0

    def __init__(self, strategy, **objects):
        super().__init__(strategy, **objects)
        self._history = []

    @property
    def last(self):
        return self._history[-1]

    @last.setter
    def last(self, value):
        self._history.append(value)


def test_a_class_of_the_programs_own_has_attributes_of_its_own(strategy, path):
    checkpoint = WithHistory(strategy, step=1)
    checkpoint.epoch = 2
    checkpoint.last = 3
    saved = checkpoint.save(path)
    checkpoint.step = checkpoint.epoch = checkpoint.last = 0
    checkpoint.restore(saved)
    assert (checkpoint.step, checkpoint.epoch, checkpoint.last) == (1, 2, 0)


@pytest.mark.parametrize("kind", [mr.Checkpoint, mr.ElasticState])
@pytest.mark.parametrize("name", ["_momentum", "$x", "save", "restore", "strategy", "_objects"])
def test_a_name_that_is_the_checkpoints_own_is_an_error_however_it_is_given(strategy, kind, name):
    with pytest.raises(ValueError, match=r"an object named .* Give it another one\.") as given:
        kind(strategy, **{name: 5, "step": 0})
    checkpoint = kind(strategy, step=0)
    with pytest.raises(ValueError, match=f"named '{re.escape(name)}'") as assigned:
        setattr(checkpoint, name, 5)
    assert str(assigned.value) == str(given.value)
    assert repr(checkpoint) == "<mr.Checkpoint of step>"


@pytest.mark.parametrize("kind", [mr.Checkpoint, mr.ElasticState])
def test_objects_can_be_assigned_removed_and_copied(strategy, path, kind):
    checkpoint = kind(strategy, step=0)
    checkpoint.step += 1
    checkpoint.more = 2
    again = copy.copy(checkpoint)
    again.step, again.other = 5, 3
    del again.more
    assert (repr(again), checkpoint.step) == ("<mr.Checkpoint of step, other>", 1)
    again.save(path)
    again.step = 0
    again.restore(path)
    assert (again.step, again.strategy) == (5, strategy)


def test_a_checkpoint_without_variables_must_be_told_its_strategy(strategy, shared_folder):
    """Each rank would save for itself otherwise, to one path; one rank alone, other numbers."""
    path = shared_folder / "steps"
    lonely = mr.Checkpoint(step=1)
    manager = mr.CheckpointManager(lonely, shared_folder)
    for call in (
        lambda: lonely.save(path),
        lambda: lonely.restore(path),
        lambda: manager.save(1),
        manager.restore_or_initialize,
    ):
        error = raises_everywhere(ContextError, call)
        assert "mr.Checkpoint(strategy" in str(error)
    told = mr.Checkpoint(strategy, step=2)
    told.save(path)
    told.step = 0
    told.restore(path)
    assert told.step == 2
    with strategy.scope():
        lonely.restore(path)
    assert lonely.step == 2
