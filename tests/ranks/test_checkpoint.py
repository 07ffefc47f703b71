"""Checkpoints on ranks: saved by all, restored on any layout, an error on one is one on all."""

import errno
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    gathered,
    holds_everywhere,
    needs_two_ranks,
    raises_everywhere,
)
from mpi_replica import VariableAggregation as Aggregation
from mpi_replica.checkpoint import files
from mpi_replica.errors import (
    CheckpointError,
    CollectiveMismatchError,
    ContextError,
    StructureMismatchError,
)

SUM, MEAN, FIRST = Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA
ON_READ = mr.VariableSynchronization.ON_READ


@pytest.fixture
def path(tmp_path):
    """Where all ranks save: in a folder of rank 0."""
    return Path(gathered(str(tmp_path))[0]) / "trained"


@pytest.fixture
def world():
    from mpi4py import MPI  # starts MPI, so not when this file is imported

    return MPI.COMM_WORLD


def on_other_layouts(world, check):
    """Call `check` with strategies of other numbers of replicas and ranks, in all parts at once.

    It must make no calls of all ranks.
    """

    def checked(strategy):
        with strategy:
            check(strategy)

    def check_all():
        checked(mr.MPIStrategy(num_replicas=world.size + 3))
        for is_here in (world.rank == 0, world.rank % 2 == 0, world.rank < world.size - 1):
            part = world.Split(is_here)
            checked(mr.MPIStrategy(part, num_replicas=5))
            part.Free()

    holds_everywhere(check_all)


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


class Stateful:
    """An object with state, which counts how often it was loaded."""

    def __init__(self, **state):
        self.state = state
        self.loads = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
        self.loads += 1


def variable(strategy, value, **settings):
    with strategy.scope():
        return mr.Variable(value, **settings)


def on_read(strategy, aggregation, value=0.0):
    return variable(strategy, value, synchronization=ON_READ, aggregation=aggregation)


def program(strategy, fill=0.0):
    """The objects of a program; what `fill` gives tells their states apart."""
    return mr.Checkpoint(
        step=int(fill),
        kernel=variable(strategy, np.arange(12.0).reshape(3, 4) * fill),
        nest={
            "bias": np.full(3, fill, ">f4"),
            2: [np.full((2, 3), int(fill), order="F"), ("text", np.float32(fill))],
            "inner": variable(strategy, np.full(2, fill)),
        },
        optimizer=Stateful(momentum=np.full(5, fill), name=("sgd", int(fill))),
        mirrored=mr.Mirrored(np.float64(fill)),
    )


def content(checkpoint):
    """All that is in it, as text."""
    kernel, nest = np.asarray(checkpoint.kernel), checkpoint.nest
    state = checkpoint.optimizer.state
    rest = (checkpoint.step, kernel, nest["bias"], nest[2], np.asarray(nest["inner"]))
    return repr((*rest, state["momentum"], state["name"], checkpoint.mirrored.value))


def save(strategy, path, **objects):
    """Save; the objects need have no variable, which would tell the strategy."""
    with strategy.scope():
        mr.Checkpoint(**objects).save(path)


def restored(strategy, path, **objects):
    checkpoint = mr.Checkpoint(**objects)
    with strategy.scope():
        checkpoint.restore(path)
    return checkpoint


def listing(path):
    """The files in the folder of a checkpoint, as rank 0 sees them, on all ranks."""
    names = gathered(sorted(os.listdir(path.parent)) if path.parent.is_dir() else [])
    return names[0]


# On any layout


def test_what_was_saved_is_restored_on_any_number_of_ranks_and_replicas(strategy, world, path):
    saved = program(strategy, 7.0)
    wanted = content(saved)
    assert saved.save(path) == str(path)

    def check(other):
        checkpoint = program(other)
        kernel, bias, optimizer = checkpoint.kernel, checkpoint.nest["bias"], checkpoint.optimizer
        checkpoint.restore(path)
        assert content(checkpoint) == wanted
        assert checkpoint.kernel is kernel
        assert checkpoint.nest["bias"] is bias
        assert checkpoint.optimizer is optimizer
        assert optimizer.loads == 1
        seen = other.run(lambda: np.asarray(checkpoint.kernel).sum())
        assert set(other.experimental_local_results(seen)) == {66 * 7.0}

    on_other_layouts(world, check)
    again = program(strategy)
    again.restore(path)
    assert content(again) == wanted


def test_each_array_is_written_once_and_each_rank_writes_about_as_much(strategy, path):
    arrays = [np.full(1000, i, "i8") for i in range(2 * strategy.size)]
    v = variable(strategy, np.arange(500.0))
    mr.Checkpoint(arrays=arrays, v=v).save(path)
    sizes = [os.path.getsize(file) for file in path.parent.glob("trained.*.data-*")]
    assert len(sizes) == strategy.size
    assert sum(sizes) == sum(array.nbytes for array in arrays) + 4000
    assert max(sizes) - min(sizes) <= 8000


def test_nothing_but_numbers_and_texts_needs_no_data_file(strategy, path):
    save(strategy, path, step=3, name="trained", nothing={})
    assert listing(path) == ["trained.index"]
    checkpoint = restored(strategy, path, step=0, name="", nothing={})
    assert (checkpoint.step, checkpoint.name, checkpoint.nothing) == (3, "trained", {})
    save(strategy, path)
    restored(strategy, path)


def test_where_the_ranks_have_other_numbers_those_of_rank_0_are_saved(strategy, path):
    save(strategy, path, step=5 + strategy.rank)
    assert gathered(restored(strategy, path, step=0).step) == [5] * strategy.size


def test_saving_over_the_checkpoint_of_other_ranks_leaves_exactly_the_new_files(
    strategy, world, path
):
    program(strategy, 1.0).save(path)
    first = listing(path)
    program(strategy, 2.0).save(path)
    assert len(listing(path)) == len(first)
    assert set(first) & set(listing(path)) == {"trained.index"}
    part = world.Split(world.rank == 0)
    with mr.MPIStrategy(part) as alone:
        if world.rank == 0:
            program(alone, 3.0).save(path)
    part.Free()
    assert len(listing(path)) == 2
    checkpoint = program(strategy)
    checkpoint.restore(path)
    assert checkpoint.step == 3


# Variables synchronized on read


def test_a_sum_on_read_is_saved_summed_and_restored_in_parts(strategy, world, path):
    def make(strategy):
        return {"float": on_read(strategy, SUM), "int": on_read(strategy, SUM, 0)}

    counts = make(strategy)
    strategy.run(lambda: counts["float"].assign(replica_id() + 0.25))
    strategy.run(lambda: counts["int"].assign(3 * replica_id() + 1))
    n = strategy.num_replicas_in_sync
    totals = n * (n - 1) / 2 + 0.25 * n, 3 * n * (n - 1) // 2 + n
    mr.Checkpoint(counts=counts).save(path)

    def check(other):
        counts = make(other)
        mr.Checkpoint(counts=counts).restore(path)
        assert (float(counts["float"]), int(counts["int"])) == pytest.approx(totals)
        parts = other.run(lambda: (float(counts["float"]), int(counts["int"])))
        local = other.experimental_local_results(parts)
        assert all(
            part == pytest.approx(totals[0] / other.num_replicas_in_sync) for part, _ in local
        )
        assert all(count - totals[1] // other.num_replicas_in_sync in (0, 1) for _, count in local)
        other.run(lambda: counts["int"].assign_add(1))
        assert int(counts["int"]) == totals[1] + other.num_replicas_in_sync

    on_other_layouts(world, check)


def test_a_mean_and_the_first_on_read_are_saved_as_they_read_from_above(strategy, world, path):
    def make(strategy):
        return {"mean": on_read(strategy, MEAN), "first": on_read(strategy, FIRST)}

    variables = make(strategy)
    strategy.run(lambda: variables["mean"].assign(replica_id() + 1.0))
    strategy.run(lambda: variables["first"].assign(replica_id() + 10.0))
    mean = (strategy.num_replicas_in_sync + 1) / 2
    mr.Checkpoint(**variables).save(path)

    def check(other):
        variables = make(other)
        mr.Checkpoint(**variables).restore(path)
        seen = other.run(lambda: (float(variables["mean"]), float(variables["first"])))
        assert set(other.experimental_local_results(seen)) == {(mean, 10.0)}
        assert (float(variables["mean"]), float(variables["first"])) == (mean, 10.0)

    on_other_layouts(world, check)


def test_saving_changes_no_component(strategy, path):
    total = on_read(strategy, SUM)
    strategy.run(lambda: total.assign(replica_id() + 1.0))
    mr.Checkpoint(total=total).save(path)
    own = strategy.run(lambda: float(total)).values
    assert list(own) == [i + 1.0 for i in strategy.local_replica_ids]


# Random numbers


def draws(strategy):
    """The next numbers of each local replica, by its id, and of the strategy."""
    seen = strategy.run(lambda: (replica_id(), mr.get_replica_context().rng.random()))
    return dict(strategy.experimental_local_results(seen)), strategy.rng.random()


def test_random_numbers_go_on_as_if_never_stopped(strategy, world, path):
    draws(strategy)
    strategy.rng.integers(10, dtype=np.int32)  # half of a word is left
    save(strategy, path)
    of_ranks = gathered(draws(strategy))
    wanted = {i: x for of_rank, _ in of_ranks for i, x in of_rank.items()}
    shared = of_ranks[0][1]
    restored(strategy, path)
    assert draws(strategy) == (of_ranks[strategy.rank][0], shared)

    def check(other):
        restored(other, path)
        own, of_strategy = draws(other)
        assert of_strategy == shared
        known = {i: x for i, x in own.items() if i in wanted}
        assert known == {i: wanted[i] for i in known}
        # Replicas beyond those that saved begin with the seed, and apart from all others.
        assert len(set(own.values()) | set(wanted.values())) == len(set(own) | set(wanted))

    on_other_layouts(world, check)


def test_generators_that_nobody_asked_for_begin_with_the_seed(strategy, path):
    save(strategy, path)
    wanted = draws(strategy)
    restored(strategy, path)
    assert draws(strategy) == wanted


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


def test_without_strict_what_fits_is_restored(strategy, path):
    program(strategy, 7.0).save(path)
    checkpoint = program(strategy, 1.0)
    checkpoint.kernel = variable(strategy, np.ones((4, 3)))
    checkpoint.nest["bias"] = bias = np.ones(5, np.float32)
    checkpoint.learning_rate = 0.5
    del checkpoint.optimizer
    checkpoint.restore(path, strict=False)
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

DIFFERENT = {
    "a shape": ({"w": np.zeros(3)}, {"w": np.zeros(4)}),
    "a dtype": ({"w": np.zeros(3)}, {"w": np.zeros(3, "f4")}),
    "a name": ({"w": 1}, {"v": 1}),
    "an object more": ({"w": 1}, {"w": 1, "x": np.zeros(3)}),
    "a kind": ({"w": np.zeros(())}, {"w": 0.0}),
    "a length": ({"w": [1, 2]}, {"w": [1, 2, 3]}),
    "a key": ({"w": {"a": 1, "b": 2}}, {"w": {"a": 1, "c": 2}}),
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
    ids = strategy.run(replica_id)
    error = raises_everywhere(TypeError, lambda: save(strategy, path, ids=ids))
    assert "PerReplica" in str(error)
    check_works(strategy)


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


# Cost


def test_memory_stays_small_beside_the_state(strategy, path):
    """Some MiB, whatever the layout of the arrays; a variable is read before it is replaced."""
    state = {"v": variable(strategy, np.zeros(2_000_000)), "w": np.zeros((4000, 500)).T}
    checkpoint = mr.Checkpoint(**state)
    tracemalloc.start()
    try:
        checkpoint.save(path)
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        with strategy.scope():
            mr.Checkpoint(w=state["w"]).restore(path, strict=False)
        restoring = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert saving < 12 << 20
    assert restoring < 12 << 20
