"""`python -m mpi_replica run --elastic`: jobs whose ranks are killed, and how they end."""

import os
import re
import signal
import subprocess
import textwrap
import zipfile

import pytest

from command_line import LIMIT_SECONDS, call, is_running, started, variables
from launching import LIBRARIES, find_interpreter

pytestmark = [
    pytest.mark.mpi_skip,  # it starts ranks itself
    pytest.mark.skipif("openmpi" not in LIBRARIES, reason="of the two, Open MPI alone has ULFM"),
]

HEAD = """
    import os, signal, sys, time
    import numpy as np
    import mpi_replica as mr

    strategy = mr.MPIStrategy(num_replicas=6)
    first_rank = strategy.rank
    state = mr.ElasticState(strategy, step=0, total=0.0)

    def tell(text):  # a whole line at once
        os.write(1, f"{text}\\n".encode())

    def step():
        i = mr.get_replica_context().replica_id_in_sync_group
        return mr.get_replica_context().all_reduce("SUM", float(i))

    def train(at_step_5=lambda: None):
        while state.step < 10:
            if state.step == 5:
                at_step_5()
            state.total += strategy.experimental_local_results(strategy.run(step))[0]
            state.step += 1
            state.commit()

    def die_on(*ranks):
        if first_rank in ranks:
            os.kill(os.getpid(), signal.SIGKILL)
"""
# One at least of the ranks that are left still works when another one has ended.
TRAIN = """
    strategy.run_elastic(lambda: train(lambda: die_on(*map(int, sys.argv[1:]))), state)
    time.sleep(0.2 * first_rank)
    print(f"rank {first_rank} of {strategy.size} has {state.total}")
"""


def written(folder, program, head=HEAD):
    file = folder / "train.py"
    file.write_text(textwrap.dedent(head) + textwrap.dedent(program))
    return file


def elastic(*arguments, **settings):
    return call("openmpi", "run", "--elastic", *arguments, **settings)


@pytest.mark.parametrize(
    ("lost", "on_loss", "status"),
    [
        ([], "ok", 0),
        ([], "warn-status", 0),
        ([0], "ok", 0),
        ([1], "warn-status", 76),
        ([0, 2], "warn-status", 76),
    ],
)
def test_the_status_tells_of_a_loss_only_where_that_is_asked_for(lost, on_loss, status, tmp_path):
    done = elastic("--on-loss", on_loss, "-n", 3, written(tmp_path, TRAIN), *lost)
    assert done.returncode == status, done.stderr
    left = [rank for rank in range(3) if rank not in lost]
    # What the last one writes is there, too.
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of {len(left)} has 150.0" for rank in left
    ]
    assert ("lost rank" in done.stderr) == bool(lost)


@pytest.mark.parametrize("failing", [0, 2])
def test_the_status_of_a_rank_that_fails_after_a_loss_is_not_hidden(failing, tmp_path):
    program = TRAIN + f"    sys.exit(3 if first_rank == {failing} else 0)\n"
    done = elastic("--on-loss", "warn-status", "-n", 3, written(tmp_path, program), 1)
    assert done.returncode == 3, done.stderr
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("on_loss", ["ok", "warn-status"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_lost_behind_run_elastic_is_told_and_no_success(lost, on_loss, tmp_path):
    """Nobody goes on for it with what it would have done there, as writing the result."""
    program = f"""
    strategy.run_elastic(lambda: train(lambda: None), state)
    if first_rank == {lost}:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = elastic("--on-loss", on_loss, "-n", 2, written(tmp_path, program))
    assert done.returncode == 137, done.stderr
    assert f"rank {lost} (" in done.stderr
    assert "was lost: its process ended without a word" in done.stderr


def test_a_rank_that_exits_while_others_train_gives_the_job_its_status(tmp_path):
    """The others end by an error of theirs, and mostly before that one has come to its end."""
    program = """
    strategy.run_elastic(lambda: train(lambda: first_rank == 1 and sys.exit(5)), state)
    """
    done = elastic("-n", 3, written(tmp_path, program))
    assert done.returncode == 5, done.stderr
    assert "the program has ended on" in done.stderr


def test_a_call_of_mpi4py_that_meets_a_loss_goes_on_by_a_barrier_of_the_strategy(tmp_path):
    program = """
    from mpi4py import MPI

    def with_own_calls():
        world = strategy.communicator.Dup()

        def meet():
            die_on(1)
            try:
                world.Barrier()
            except MPI.Exception as error:
                tell(f"caught {error.Get_error_class() == MPI.ERR_PROC_FAILED}")
                strategy.barrier()
                tell("not reached")

        train(meet)
        tell(f"{world.Get_size()} ranks have {state.total}")

    strategy.run_elastic(with_own_calls, state)
    """
    done = elastic("-n", 3, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["2 ranks have 150.0"] * 2 + ["caught True"] * 2


def test_an_error_after_a_loss_ends_the_job(tmp_path):
    program = """
    def fail():
        die_on(1)
        if strategy.losses:
            raise KeyError("no such row")
    strategy.run_elastic(lambda: train(fail), state)
    """
    done = elastic("-n", 3, written(tmp_path, program))
    assert done.returncode == 1, done.stderr
    assert "KeyError: 'no such row'" in done.stderr
    assert "rank_program.py" not in done.stderr


@pytest.mark.parametrize("on_loss", ["ok", "warn-status"])
def test_a_job_that_loses_all_its_ranks_has_failed(on_loss, tmp_path):
    program = written(tmp_path, TRAIN)
    done = elastic("--on-loss", on_loss, "-n", 3, program, 0, 1, 2)
    assert done.returncode == 1, done.stderr
    assert "all ranks were lost" in done.stderr
    assert "has 150.0" not in done.stdout


WAIT = """
    tell(f"ready {os.getpid()}")
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_that_ends_all_ranks_is_the_status(number, tmp_path):
    program = written(tmp_path, "    signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + WAIT)
    with started("openmpi", "run", "--elastic", "-n", 2, program) as process:
        pids = [int(re.match(r"ready (\d+)", process.stdout.readline())[1]) for _ in range(2)]
        process.send_signal(number)
        _, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + number, error
    assert not any(map(is_running, pids))


def test_a_job_that_runs_too_long_is_ended(tmp_path):
    done = elastic("-n", 2, "--timeout", 3, written(tmp_path, WAIT))
    assert done.returncode == 124, done.stderr


def test_a_spare_takes_the_place_of_a_lost_rank(tmp_path):
    program = """
    strategy.run_elastic(lambda: train(lambda: die_on(0)), state)
    tell(f"{first_rank} {strategy.local_replica_ids} {state.total}")
    """
    done = elastic("-n", 3, "--spares", 1, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1 (0, 1, 2) 150.0", "2 (3, 4, 5) 150.0"]


def test_a_spare_that_dies_while_it_waits_is_not_needed_for_a_good_end(tmp_path):
    """The others never meet it: a job that was done was done again, or ended with 137."""
    program = """
    import pathlib, threading

    pid, dies = pathlib.Path(sys.argv[1], "pid"), pathlib.Path(sys.argv[1], "dies")
    def die_when_asked():
        while not dies.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    def ask():
        if first_rank == 0:
            while not pid.exists():
                time.sleep(0.001)
            dies.touch()
            while pathlib.Path("/proc", pid.read_text()).exists():
                time.sleep(0.001)
    if not strategy.local_replica_ids:
        threading.Thread(target=die_when_asked, daemon=True).start()
        pid.with_suffix(".new").write_text(str(os.getpid()))
        pid.with_suffix(".new").rename(pid)
    strategy.run_elastic(lambda: train(ask), state)
    tell(f"{first_rank} {state.total}")
    """
    file = written(tmp_path, program)
    done = elastic("-n", 3, "--spares", 1, "--restarts", 1, file, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 150.0", "1 150.0"]
    assert "lost rank 2, which waited as a spare" in done.stderr


def test_a_spare_that_is_not_traced_works_on_with_ranks_that_are(tmp_path):
    program = """
    import contextlib

    is_traced = bool(strategy.local_replica_ids)
    traced = strategy.trace(sys.argv[1]) if is_traced else contextlib.nullcontext()
    with contextlib.suppress(KeyError), traced:
        strategy.run_elastic(lambda: train(lambda: die_on(0)), state)
        tell(f"{first_rank} {is_traced} {state.total}")
        raise KeyError("the spare has no trace to end")
    """
    file = tmp_path / "trace.json"
    done = elastic("-n", 3, "--spares", 1, written(tmp_path, program), file)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1 True 150.0", "2 False 150.0"]
    assert call("openmpi", "trace", file).returncode == 0
    assert "run_elastic" in file.read_text()


@pytest.mark.parametrize("iterator", ["iter(data)", "state.iterator"])
def test_a_spare_knows_what_is_made_between_two_calls_by_the_numbers_of_the_others(
    iterator, tmp_path
):
    """They have made more, in the first call, and the spare comes in in the second one."""
    program = f"""
    rows = mr.data.Dataset.range(48).batch(6)
    made = []

    def before():
        with strategy.scope():
            made.append(mr.Variable(1.0))
        made.append(strategy.experimental_distribute_dataset(rows))
        made.append(next(iter(made[1])))
        strategy.run(step)

    def train():
        iterator = {iterator}
        while state.step < 6:
            batch = next(iterator)
            if state.step == 3:
                die_on(0)
            strategy.run(add, args=(batch,))
            state.step += 1
            if state.step % 2 == 0:
                state.commit()

    def add(batch):
        total.assign_add(mr.get_replica_context().all_reduce("SUM", float(batch.sum())))

    strategy.run_elastic(before, mr.ElasticState(strategy))
    with strategy.scope():
        total = mr.Variable(0.0)
    data = strategy.experimental_distribute_dataset(rows)
    state = mr.ElasticState(strategy, step=0, iterator=iter(data))
    strategy.run_elastic(train, state)
    tell(f"{{first_rank}} {{float(total)}}")
    """
    done = elastic("-n", 3, "--spares", 1, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1 630.0", "2 630.0"]


@pytest.mark.parametrize("spares", [0, 1])
def test_what_was_of_replicas_at_the_commit_comes_back_whatever_stands_there_now(spares, tmp_path):
    program = """
    def own():
        return 10 * mr.get_replica_context().replica_id_in_sync_group

    def train():
        while state.step < 4:
            state.kept, state.now = [], strategy.run(own)
            if state.step == 3:
                die_on(0)
            if strategy.losses and not told:
                told.append(strategy.reduce("SUM", before[0], axis=None))
            state.kept, state.now = [strategy.run(own)], None
            state.step += 1
            state.commit()

    def recovering():
        before[:] = state.kept
        train()

    told, before = [], []
    state = mr.ElasticState(strategy, step=0, kept=[], now=None)
    strategy.run_elastic(recovering, state)
    tell(f"{first_rank} {state.now} {told} {strategy.reduce('SUM', state.kept[0], axis=None)}")
    """
    done = elastic("-n", 3, "--spares", spares, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{i} None [np.int64(150)] 150" for i in (1, 2)]


@pytest.mark.parametrize("spares", [0, 1])
def test_a_variable_that_the_state_no_longer_holds_is_in_it_again_after_a_loss(spares, tmp_path):
    """Whether or not something else refers to it when the loss comes."""
    program = """
    with strategy.scope():
        weights, other = mr.Variable(0.0), mr.Variable(0.0)
        state = mr.ElasticState(step=0, weights=weights, best=weights, only=mr.Variable(0.0))

    def add():
        weights.assign_add(mr.get_replica_context().all_reduce("SUM", 1.0))

    def train():
        found = [type(state.only).__name__, state.weights is weights, state.best is weights]
        while state.step < 6:
            strategy.run(add)
            other.assign_add(1.0)
            state.step += 1
            if state.step <= 2:
                state.only.assign_add(3.0)
                state.commit()
                found.append(float(state.only))
            else:
                state.weights, state.best, state.only = None, other, None
            if state.step == 4:
                die_on(1)
        return [*found, float(weights), float(other)]

    def begun():
        if strategy.losses:
            assert float(state.only) == 6.0
        return train()

    tell(f"{first_rank} {strategy.run_elastic(begun, state)}")
    """
    done = elastic("-n", 3, "--spares", spares, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    ended_with = "['Variable', True, True, 36.0, 6.0]"
    assert sorted(done.stdout.splitlines()) == [f"{i} {ended_with}" for i in (0, 2)]


@pytest.mark.parametrize("spares", [0, 1])
def test_named_tuples_are_such_after_a_loss_on_a_spare_too(spares, tmp_path):
    program = """
    import collections

    Row = collections.namedtuple("Row", "step loss")
    state = mr.ElasticState(strategy, step=0, best=None, rows=[], seen={})

    def train():
        while state.step < 4:
            total = strategy.experimental_local_results(strategy.run(step))[0]
            state.step += 1
            state.best = Row(state.step, total)
            state.rows.append(state.best)
            state.seen = collections.defaultdict(int, state.seen)
            state.seen[state.step] += 1
            state.commit()
            if state.step == 2:
                state.best = state.seen = None
                state.rows.clear()
                die_on(1)
        return float(sum(row.loss for row in state.rows)), type(state.seen).__name__

    tell(f"{first_rank} {strategy.run_elastic(train, state)}")
    """
    done = elastic("-n", 3, "--spares", spares, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{i} (60.0, 'defaultdict')" for i in (0, 2)]


def test_a_layer_that_has_made_its_weights_since_the_commit_does_not_keep_them(tmp_path):
    program = """
    weights = []

    def add():
        weights[0].assign_add(mr.get_replica_context().all_reduce("SUM", 1.0))

    def train():
        if not weights:
            with strategy.scope():
                weights.append(mr.Variable(0.0, name="weights"))
        elif "again" in sys.argv:
            weights[0].assign(0.0)
        for _ in range(3):
            strategy.run(add)
            state.step += 1
            if state.step == 2:
                die_on(1)
        return float(weights[0])

    tell(f"{first_rank} {strategy.run_elastic(train, state)}")
    """
    done = elastic("-n", 3, written(tmp_path, program))
    assert done.returncode == 1, done.stderr
    assert "RankLostError: variable 0 'weights' has no value any more" in done.stderr
    assert done.stdout == ""
    done = elastic("-n", 3, written(tmp_path, program), "again")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 18.0", "2 18.0"]


@pytest.mark.parametrize("dying", [0, 1])
def test_a_spare_reads_iterators_of_replicas_as_the_rank_that_had_them(dying, tmp_path):
    """They can't be read again after an error, nor ahead: no rank goes on with other rows."""
    program = f"""
    class Batches:
        def __init__(self, replica_id):
            self.replica_id, self.left = replica_id, 5

        def __iter__(self):
            return self

        def __next__(self):
            self.left -= 1
            if self.left == 2 and self.replica_id == 4:
                raise OSError("once")
            return np.full(1, self.left)

    def made(own, ahead=0):
        options = mr.InputOptions(
            experimental_replication_mode=mr.InputReplicationMode.PER_REPLICA,
            experimental_per_replica_buffer_size=ahead,
        )
        return strategy.distribute_datasets_from_function(own, options)

    data = made(lambda context: Batches(context.input_pipeline_id))
    ahead = made(lambda context: Batches(0) if strategy.losses else [np.ones(1)], 1)

    def train():
        strategy.run(step)
        die_on({dying})
        strategy.run(step)
        told, iterator = [], iter(data)
        for _ in range(4):
            try:
                next(iterator)
                told.append("read")
            except (OSError, RuntimeError) as error:
                told.append(type(error).__name__)
        try:
            next(iter(ahead))
        except ValueError as error:
            told.append(" ".join(str(error).split()[:4]))
        return told

    told = strategy.run_elastic(train, state)
    tell(f"{{first_rank}} {{' '.join(told)}}")
    """
    done = elastic("-n", 3, "--spares", 1, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    text = "read read OSError RuntimeError experimental_per_replica_buffer_size=1 can't be had"
    assert sorted(done.stdout.splitlines()) == [f"{rank} {text}" for rank in (1 - dying, 2)]


@pytest.mark.parametrize("spares", [0, 1])
def test_an_iterator_in_the_place_of_one_that_was_read_is_an_error_on_all_ranks(spares, tmp_path):
    """It would give the first rows again, in an iteration that has others on other ranks."""
    program = """
    options = mr.InputOptions(
        experimental_replication_mode=mr.InputReplicationMode.PER_REPLICA,
    )
    data = strategy.distribute_datasets_from_function(
        lambda context: iter([np.full(1, i) for i in range(9)]), options
    )

    def train():
        for _ in range(2):
            list(zip(range(3), data))
            state.step += 1
            state.commit()
            if state.step == 1:
                strategy.run(step)
                die_on(0)
                strategy.run(step)

    try:
        strategy.run_elastic(train, state)
    except RuntimeError as error:
        tell(f"{first_rank} {error}")
    """
    done = elastic("-n", 3, "--spares", spares, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    told = sorted(done.stdout.splitlines())
    assert [line.split()[0] for line in told] == ["1", "2"]
    assert all("an iterator that a lost rank has read from" in line for line in told)


@pytest.mark.parametrize("spares", [0, 1])
def test_datasets_that_are_not_distributed_begin_the_same_epochs_after_a_loss(spares, tmp_path):
    """Each of several that read alike, above the replicas and in each of them."""
    program = """
    def made(context=None):
        return mr.data.Dataset.range(60).shuffle(seed=1).batch(30)

    def before():
        return made(), strategy.distribute_datasets_from_function(made)

    def epoch(number):
        return [rows.tolist() for _, rows in made().batches(epoch=number)]

    def next_of(dataset):
        return [rows.tolist() for rows in dataset]

    def in_replica():
        context = mr.get_replica_context()
        i = context.replica_id_in_sync_group
        if state.step == 0:
            for _ in range(i):
                iter(one)
        return context.all_reduce("SUM", float(next_of(one) != epoch(i + state.step)))

    def train():
        while state.step < 5:
            assert next_of(one) == epoch(state.step)
            assert next_of(other) == epoch(state.step + 1)
            if state.step in (2, 3):
                die_on(state.step - 2)
            assert strategy.experimental_local_results(strategy.run(in_replica))[0] == 0
            state.step += 1
            state.commit()

    strategy.run_elastic(before, mr.ElasticState(strategy))
    data = strategy.distribute_datasets_from_function(made)
    one, other = made(), made()
    next_of(other)
    strategy.run_elastic(train, state)
    tell(f"{first_rank} {state.step}")
    """
    done = elastic("-n", 4, "--spares", spares, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["2 5", "3 5"]


def test_datasets_begin_anew_where_a_checkpoint_is_gone_back_to(tmp_path):
    program = """
    data = mr.data.Dataset.range(60).shuffle(seed=1).batch(60)
    own = strategy.experimental_distribute_values_from_function(lambda context: np.zeros(1))
    state = mr.ElasticState(strategy, own=own)
    manager = mr.CheckpointManager(state, sys.argv[1])

    def train():
        (rows,) = data
        assert rows.tolist() == next(data.batches(epoch=0))[1].tolist()
        manager.save(1)
        state.commit()
        strategy.run(step)
        die_on(0, 1)
        strategy.run(step)

    strategy.run_elastic(train, state)
    """
    done = elastic("-n", 3, "--spares", 1, written(tmp_path, program), tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert "the last checkpoint" in done.stderr


@pytest.mark.parametrize("alone", [0, 2])
def test_datasets_go_back_though_a_rank_alone_has_made_another_one(alone, tmp_path):
    program = f"""
    rows = mr.data.Dataset.range(24).batch(6)
    if strategy.rank == {alone}:
        len(strategy.experimental_distribute_dataset(rows))
    strategy.run(step)
    data = strategy.experimental_distribute_dataset(rows)
    kept = []

    def train():
        for batch in data:
            if state.step in (2, 3):
                die_on(state.step - 1)
            rows_here = strategy.gather(batch, axis=0).tolist()
            if strategy.losses and not kept:  # named as `data`, but for the loss
                strategy.run(step)
                kept.append(strategy.experimental_distribute_dataset(rows))
                next(iter(kept[0]))
            tell(f"{{first_rank}} {{rows_here}}")
            state.step += 1
            state.commit()

    strategy.run_elastic(train, state)
    """
    done = elastic("-n", 3, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    told = [line[2:] for line in done.stdout.splitlines() if line[0] == "0"]
    assert told == [f"{list(range(i, i + 6))}" for i in range(0, 24, 6)]


@pytest.mark.parametrize("known", ["drawn", "restored", "none"])
def test_random_numbers_that_a_rank_alone_had_drawn_before_training_do_not_begin_anew(
    known, tmp_path
):
    """Rank 0 kills it before it can have heard from it; nothing of its own replicas was drawn."""
    program = """
    def draw_in_replica_5():
        context = mr.get_replica_context()
        if context.replica_id_in_sync_group == 5:
            context.rng.random()

    if sys.argv[1] == "drawn":
        strategy.run(draw_in_replica_5)
    if sys.argv[1] == "restored":
        path = sys.argv[2]
        with mr.MPIStrategy(num_replicas=6) as other:
            other.run(draw_in_replica_5)
            mr.Checkpoint(other).save(path)
        mr.Checkpoint(strategy).restore(path)
    if first_rank == 0:
        os.kill(strategy.survivors.members[1].pid, signal.SIGKILL)
    strategy.run_elastic(train, state)
    tell(state.total)
    """
    done = elastic("-n", 2, written(tmp_path, program), known, tmp_path / "saved")
    if known == "none":
        assert (done.returncode, done.stdout) == (0, "150.0\n"), done.stderr
    else:
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert "RankLostError: what belonged to replicas 3-5 is gone" in done.stderr


def test_a_dataset_goes_on_behind_the_iterator_of_a_checkpoint(tmp_path):
    """All copies of what belongs to replicas are lost, so that the checkpoint is gone back to."""
    program = """
    data = strategy.experimental_distribute_dataset(
        mr.data.Dataset.range(12).shuffle(seed=1).batch(6)
    )
    list(data)
    own = strategy.experimental_distribute_values_from_function(lambda context: np.zeros(1))
    state = mr.ElasticState(strategy, step=0, iterator=iter(data), own=own)
    manager = mr.CheckpointManager(state, sys.argv[1])

    def epoch(steps):
        return [strategy.gather(batch, axis=0).tolist() for batch in steps]

    def train():
        if not strategy.losses:
            next(state.iterator)
            manager.save(1)
            wanted = epoch(state.iterator), epoch(data)
            tell(wanted)
            strategy.run(step)
            die_on(0, 1)
        tell((epoch(state.iterator), epoch(data)))
        strategy.run(step)

    strategy.run_elastic(train, state)
    """
    done = elastic("-n", 3, written(tmp_path, program), tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert "the last checkpoint" in done.stderr
    assert len(set(done.stdout.splitlines())) == 1


def test_a_job_that_has_gone_back_to_a_checkpoint_is_not_begun_anew_from_its_beginning(tmp_path):
    """It restores nothing at its begin: what it has done would be done twice."""
    program = """
    own = strategy.experimental_distribute_values_from_function(lambda context: np.zeros(1))
    state = mr.ElasticState(strategy, step=0, own=own)
    manager = mr.CheckpointManager(state, sys.argv[1])
    tell("begins")

    def train():
        if strategy.losses:
            tell(f"goes on at {state.step}")
            die_on(0)
        state.step = 2
        manager.save(state.step)
        if first_rank == 0:  # the others wait for it
            for member in strategy.survivors.members[1:]:
                os.kill(member.pid, signal.SIGKILL)
        strategy.run(step)

    strategy.run_elastic(train, state)
    """
    done = elastic("-n", 3, written(tmp_path, program), tmp_path / "saved")
    assert done.returncode not in (0, 2), done.stderr
    assert sorted(done.stdout.splitlines()) == [*["begins"] * 3, "goes on at 2"]
    assert "not started again: what it has done would be done twice" in done.stderr


def test_the_end_of_a_call_names_the_losses_of_that_call_alone(tmp_path):
    program = """
    for lost in ([3], [], [1], []):
        state = mr.ElasticState(strategy, step=0, total=0.0)
        strategy.run_elastic(lambda: train(lambda: die_on(*lost)), state)
    """
    done = elastic("-n", 5, "--spares", 1, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"^ended without (.*);", done.stderr, re.M)
    assert ends == ["rank 3, lost in 1 event", "rank 1, lost in 1 event"]


def test_a_spare_gets_objects_of_replicas_where_a_checkpoint_is_gone_back_to(tmp_path):
    program = """
    class Counter:
        count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    def own(make):
        return strategy.experimental_distribute_values_from_function(make)

    counters, numbers = own(lambda context: Counter()), own(lambda context: np.zeros(1))
    state = mr.ElasticState(strategy, counters={"of replicas": counters}, numbers=numbers)
    manager = mr.CheckpointManager(state, sys.argv[1])

    def count(counter):
        counter.count += 1
        return mr.get_replica_context().all_reduce("SUM", counter.count)

    def train():
        counters = state.counters["of replicas"]
        if strategy.losses:
            total = strategy.run(count, args=(counters,))
            totals = [*map(int, strategy.experimental_local_results(total))]
            tell(f"{first_rank} {totals}")
            return
        strategy.run(count, args=(counters,))
        manager.save(1)
        strategy.run(count, args=(counters,))
        state.commit()
        die_on(0, 1)
        strategy.run(step)

    strategy.run_elastic(train, state)
    """
    done = elastic("-n", 4, "--spares", 1, written(tmp_path, program), tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert "the last checkpoint" in done.stderr
    told = [f"{rank} [12, 12, 12]" for rank in (2, 3)]
    assert sorted(done.stdout.splitlines()) == told


def test_ranks_go_on_in_one_iteration_wherever_an_iterator_still_lives(tmp_path):
    """What is in a cycle lives until its rank collects the garbage, as rank 0 alone does here."""
    program = """
    import gc

    data = strategy.experimental_distribute_dataset(mr.data.Dataset.range(24).batch(6))

    class Fetching:
        def __init__(self):
            self.iterator = iter(data)
            self.take = self.fetch

        def fetch(self):
            return next(self.iterator)

    def train():
        while state.step < 4:
            if state.step == 2:
                die_on(2)
            Fetching().take()
            if first_rank == 0:
                gc.collect()
            state.step += 1
            state.commit()

    gc.disable()
    strategy.run_elastic(train, state)
    tell(f"{strategy.size} ranks have {state.step} steps")
    """
    done = elastic("-n", 3, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 ranks have 4 steps"] * 2


def test_a_stopped_rank_can_be_killed_as_the_report_says_and_the_others_go_on(tmp_path):
    program = """
    def stop():
        if first_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    strategy.run_elastic(lambda: train(stop), state)
    tell(f"{first_rank} {state.total}")
    """
    arguments = ["run", "--elastic", "--timeout", 30, "-n", 3, written(tmp_path, program)]
    environment = {"MPI_REPLICA_STALL_SECONDS": "1"}
    with started("openmpi", *arguments, env=environment) as process:
        for line in process.stderr:
            if found := re.search(r"to go on without it: kill -9 (\d+) on \S+$", line):
                os.kill(int(found[1]), signal.SIGKILL)
                break
        assert found, "no report said how to go on"
        out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, error
    assert sorted(out.splitlines()) == ["0 150.0", "2 150.0"]
    assert f"lost rank 1 (host {os.uname().nodename}, pid {found[1]})" in error


# What a program sees of how it was started.
SHOW = """
import os, sys, threading
main = sys.modules["__main__"]
spec = main.__spec__
print(__name__, main.__dict__ is globals(), spec and spec.name, __package__)
print(globals().get("__file__"), sys.argv, sys.path[0])
print(sys._getframe().f_code.co_filename)
def typed(x: int): pass
print(typed.__annotations__)
threading.Timer(0.2, print, ["a thread ends"]).start()
"""
ENDS = {
    "end": "",
    "exit": "sys.exit()",
    "number": "sys.exit(7)",
    "text": "sys.exit('a reason')",
    "error": "def f(): raise KeyError(3)\nf()",
    "no syntax": "1 +",
}


def by_python(*words, cwd):
    """Return what came of the program without `run`."""
    command = [find_interpreter("openmpi"), *words]
    return subprocess.run(command, cwd=cwd, env=variables(), capture_output=True, text=True)


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_python_would_end_it(end, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SHOW + ENDS[end] + "\n")
    plain = by_python("train.py", "a", cwd=tmp_path)
    found = elastic("-n", 1, "train.py", "a", cwd=tmp_path)
    assert found.returncode == plain.returncode, found.stderr
    assert found.stdout == plain.stdout
    for text in ("Traceback", "line 12", "KeyError: 3", "a reason", "SyntaxError"):
        assert (text in found.stderr) == (text in plain.stderr)
    assert "rank_program.py" not in found.stderr


@pytest.mark.parametrize("kind", ["script", "module", "package", "text", "folder", "archive"])
def test_a_program_is_started_as_python_would_start_it(kind, tmp_path):
    inner = tmp_path / "inner"
    (inner / "pack").mkdir(parents=True)
    for name in ("train.py", "__main__.py", "pack/__init__.py", "pack/__main__.py"):
        (inner / name).write_text("" if "init" in name else SHOW)
    with zipfile.ZipFile(tmp_path / "train.pyz", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    words = {
        "script": ["inner/train.py"],
        "module": ["-m", "inner.train"],
        "package": ["-m", "inner.pack"],
        "text": ["-c", SHOW],
        "folder": ["inner"],
        "archive": ["train.pyz"],
    }[kind]
    plain = by_python(*words, "a", cwd=tmp_path)
    found = elastic("-n", 1, *words, "a", cwd=tmp_path)
    assert (found.returncode, plain.returncode) == (0, 0), found.stderr
    assert found.stdout == plain.stdout
    assert found.stdout.count("\n") == 5
    assert "{'x': <class 'int'>}" in found.stdout


def test_a_program_can_start_processes_of_its_own(tmp_path):
    program = """
    import multiprocessing, os, sys

    class Row:
        pass

    def double(row):
        return type(row).__qualname__ + "!"

    if __name__ == "__main__":
        for method in ("spawn", "fork"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(pool.map(double, [Row()]))
        if os.fork() == 0:
            sys.exit(5)  # the end of a child is not that of the rank
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    done = elastic("-n", 1, written(tmp_path, program, head=""))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['Row!']", "['Row!']", "5"]


def test_a_program_without_mpi_ends_well():
    done = elastic("-n", 2, "-c", "print('one')")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one\none\n"


def test_the_line_of_a_dry_run_has_what_the_library_needs(tmp_path):
    file = written(tmp_path, TRAIN)
    line = elastic("--dry-run", "-n", 3, "--spares", 1, file).stdout
    assert re.search(r"bin/mpiexec --with-ft ulfm .*-n 3 \S+/python\S* \S+/train.py$", line)
    assert "OMPI_MCA_async_mpi_finalize=1 " in line
    assert "MPI_REPLICA_SPARES=1 " in line


MISTAKES = {
    "--elastic can't be had with MPICH": (["--elastic", "--mpi", "mpich"], {}),
    "OMPI_MCA_pml='ucx' is set": (["--elastic"], {"OMPI_MCA_pml": "ucx"}),
    "--spares 1 is for jobs": (["--spares", "1"], {}),
    "--on-loss warn-status is for": (["--on-loss", "warn-status"], {}),
    "--spares 3 leaves none": (["--elastic", "--spares", "3"], {}),
    "less than the 2 ranks": (["--elastic", "--spares", "1", "--replicas", "1"], {}),
    "can't be had with --launcher srun": (["--elastic", "--launcher", "srun"], {}),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_what_does_not_fit_is_told_before_anything_is_started(text):
    arguments, environment = MISTAKES[text]
    if "MPICH" in text and "mpich" not in LIBRARIES:
        pytest.skip("needs MPICH")
    library = "mpich" if "MPICH" in text else "openmpi"
    done = call(library, "run", "-n", 3, *arguments, "-c", "print(1)", env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_a_program_that_is_not_of_python_is_refused():
    done = elastic("-n", 2, "sh", "-c", "true")
    assert done.returncode == 2
    assert "--elastic starts programs of Python" in done.stderr


def test_srun_does_not_start_a_job_that_can_lose_ranks(tmp_path):
    """Slurm itself is not here: a program in its place would start the ranks of another job."""
    (tmp_path / "srun").write_text("#!/bin/sh\necho 'MPI plugin types are... pmix_v4' >&2\n")
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert f"{tmp_path}/srun " in call("openmpi", "run", "--dry-run", "-c", "pass", env=job).stdout
    line = elastic("--dry-run", "-c", "pass", env=job).stdout
    assert "bin/mpiexec --with-ft ulfm --bind-to none -n 4 " in line
