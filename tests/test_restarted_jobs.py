"""Jobs that lose ranks, from the first moment of `python -m mpi_replica run` to its last."""

import contextlib
import os
import re
import signal
import sys
import textwrap
import time

import pytest

from command_line import LIMIT_SECONDS, call, is_running, ready, started
from launching import LIBRARIES, find_launcher
from mpi_replica.launcher.processes import descendants, ranks_below

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

each_library = pytest.mark.parametrize("library", LIBRARIES)

# Of the two, Open MPI alone goes on without a lost rank.
JOBS = [
    *((library, ()) for library in LIBRARIES),
    *((library, ("--elastic",)) for library in LIBRARIES if library == "openmpi"),
]


def of_jobs(jobs):
    return pytest.mark.parametrize(
        ("library", "options"), jobs, ids=[" ".join((name, *options)) for name, options in jobs]
    )


# Where both are alike, a plain job of Open MPI does what one of MPICH does.
each_job = of_jobs([one for one in JOBS if one != ("openmpi", ()) or LIBRARIES == ["openmpi"]])
only_elastic = pytest.mark.skipif("openmpi" not in LIBRARIES, reason="Open MPI alone has ULFM")

# Needs no MPI, and so starts in a tenth of the time.
HEAD = """
    import ctypes, os, signal, sys
    rank = int(os.environ.get("PMIX_RANK") or os.environ.get("PMI_RANK"))
    start = int(os.environ.get("MPI_REPLICA_RESTART", "0"))

    def tell(text):  # a whole line at once; MPICH's launcher writes to the same place
        os.write(1, f"> {text}\\n".encode())

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def wait():
        tell(f"ready {os.getpid()}")
        while True:
            signal.pause()
"""
TOLD = """
    tell(f"rank {rank} of start {start}")
"""


TELLS_FOR_EVER = """
    while True:
        tell("x" * 200)
"""


def written(folder, program):
    file = folder / "train.py"
    file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(program))
    return file


def told(out):
    """Return what the ranks have told, sorted."""
    return sorted(re.findall("^> (.*)", out, re.MULTILINE))


def texts_of_starts(done):
    """Return what is told before each start of a job but its first."""
    return re.findall(r"^mpi_replica run: .*(?= Start \d of at most)", done.stderr, re.MULTILINE)


def until_told(process, text):
    """Return what `run` has written, to the line with this text."""
    lines = []
    while not lines or text not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    return "".join(lines)


def until_gone(pids):
    limit = time.monotonic() + LIMIT_SECONDS
    while any(map(is_running, pids)):
        assert time.monotonic() < limit, [pid for pid in pids if is_running(pid)]
        time.sleep(0.01)


def until_ranks_are_started(run):
    """Return the launcher of the process `run`, which is there now."""
    limit = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < limit:
        for pid in descendants(run):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
                if "rank_program.py" in file.read():
                    return pid
    raise AssertionError("no launcher was started")


# The moment of a loss --------------------------------------------------------------------------


@each_job
def test_a_rank_that_is_killed_before_mpi_has_started_costs_a_start_and_no_more(
    library, options, tmp_path
):
    """The others wait in the start of MPI, which no library would end."""
    program = """
    if start == 0 and rank == 1:
        die()
    import mpi_replica as mr
    with mr.MPIStrategy() as strategy:
        tell(f"rank {rank} of {strategy.size} in start {start}")
    """
    done = call(library, "run", *options, "-n", 3, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [f"rank {rank} of 3 in start 1" for rank in range(3)]
    # MPICH's launcher ends the others at once: one of them may be seen first.
    (text,) = texts_of_starts(done)
    lost = r"rank \d \(\S+, pid \d+\) was lost: its process ended without a word\."
    assert re.search(lost, text)
    assert "Start 2 of at most 4 follows in 1 s." in done.stderr


@each_job
def test_a_job_whose_reader_has_ended_is_not_started_again(library, options, tmp_path):
    """As `| head` does: the next start would write to nobody, too."""
    program = written(tmp_path, TELLS_FOR_EVER)
    reader, writer = os.pipe()
    words = ("run", *options, "--restarts", 2, "-n", 2, program)
    with started(library, *words, stdout=writer) as process:
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        error = process.stderr.read()
        assert process.wait(LIMIT_SECONDS) == 128 + signal.SIGPIPE, error
    assert "what read its output has ended, as `| head` does: the job was ended." in error
    assert "Start 2" not in error


@each_job
def test_a_rank_that_is_killed_before_it_could_connect_costs_a_start(library, options, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "if '1' in (os.environ.get('PMIX_RANK'), os.environ.get('PMI_RANK')):\n"
        "    if os.environ['MPI_REPLICA_LAUNCHER'].split()[2] == '0':  # the first start\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH') or os.getcwd()}"
    program = "\n    if start == 0:\n        signal.pause()" + TOLD
    file = written(tmp_path, program)
    done = call(library, "run", *options, "-n", 2, file, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == ["rank 0 of start 1", "rank 1 of start 1"]


BETWEEN = """
    import mpi_replica as mr
    strategy = mr.MPIStrategy()
    if start == 0 and rank == 1:
        die()
    found = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
    tell(f"{strategy.experimental_local_results(found)[0]} in start {start}")
"""


@each_job
def test_a_loss_between_the_strategy_and_training_is_started_again_where_asked(
    library, options, tmp_path
):
    done = call(library, "run", *options, "--restarts", 1, "-n", 2, written(tmp_path, BETWEEN))
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == ["2.0 in start 1"] * 2
    assert "Start 2 of at most 2 follows in 1 s." in done.stderr


def test_a_loss_after_the_strategy_is_not_repeated_unasked(tmp_path):
    done = call(LIBRARIES[0], "run", "-n", 2, written(tmp_path, BETWEEN))
    assert done.returncode not in (0, 2), done.stderr
    assert told(done.stdout) == []
    assert texts_of_starts(done) == []
    assert "The job is not started again: what it has done would be done twice." in done.stderr


# It is hashed what came of all steps, and in which start and from which step each rank began.
TRAIN = """
    import hashlib
    import numpy as np
    import mpi_replica as mr

    strategy = mr.MPIStrategy(
        num_replicas=6, communication_options=mr.CommunicationOptions(reproducible=True)
    )
    with strategy.scope():
        weights = mr.Variable(np.zeros(5))
    kind = mr.ElasticState if "elastic" in sys.argv else mr.Checkpoint
    state = kind(strategy, step=0, weights=weights)
    manager = mr.CheckpointManager(state, sys.argv[1])

    def step():
        ctx = mr.get_replica_context()
        weights.assign_add(ctx.all_reduce("SUM", ctx.rng.normal(size=5)))

    def train():
        while state.step < 6:
            strategy.run(step)
            state.step += 1
            lose()
            if kind is mr.ElasticState:
                state.commit()
            if state.step % 2 == 0:
                manager.save(state.step)

    def main():
        manager.restore_or_initialize()
        first = state.step
        if kind is mr.ElasticState:
            strategy.run_elastic(train, state)
        else:
            train()
        found = hashlib.sha256(np.asarray(weights.value()).tobytes()).hexdigest()
        tell(f"{found} from {first} in start {start} of {strategy.size}")
"""
UNDISTURBED = TRAIN + "    lose = lambda: None\n    main()\n"


def losing(way, condition):
    return TRAIN + (
        f"    def lose():\n        if state.step == 5 and {condition}:\n            {way}\n"
        "    main()\n"
    )


@pytest.fixture(scope="module")
def undisturbed_hash(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = call(LIBRARIES[0], "run", "-n", 2, written(folder, UNDISTURBED), folder)
    assert done.returncode == 0, done.stderr
    (line,) = set(told(done.stdout))
    return line.split()[0]


@each_library
def test_training_with_checkpoints_goes_on_where_it_was_to_the_same_end(
    library, tmp_path, undisturbed_hash
):
    program = losing("die()", "start == 0 and rank == 1")
    done = call(library, "run", "-n", 2, written(tmp_path, program), tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [f"{undisturbed_hash} from 4 in start 1 of 2"] * 2
    assert len(texts_of_starts(done)) == 1


ELASTIC = ["run", "--elastic", "-n", 3]


@only_elastic
@pytest.mark.parametrize(
    ("way", "starts"), [("os._exit(3)", 0), ("ctypes.CDLL(None)._exit(3)", 1), ("die()", 0)]
)
def test_no_rank_that_leaves_an_elastic_job_is_waited_for_for_ever(
    way, starts, tmp_path, undisturbed_hash
):
    """Of `_exit` Open MPI tells nobody: the job is started again."""
    file = written(tmp_path, losing(way, "start == 0 and rank == 1"))
    stall = {"MPI_REPLICA_STALL_SECONDS": "1"}
    done = call("openmpi", *ELASTIC, file, tmp_path / "saved", "elastic", env=stall)
    assert done.returncode == 0, done.stderr
    first, size = (4, 3) if starts else (0, 2)
    line = f"{undisturbed_hash} from {first} in start {starts} of {size}"
    assert told(done.stdout) == [line] * size
    assert len(texts_of_starts(done)) == starts


@only_elastic
def test_an_elastic_job_that_has_lost_all_its_ranks_goes_on_from_its_checkpoint(
    tmp_path, undisturbed_hash
):
    file = written(tmp_path, losing("die()", "start == 0"))
    done = call("openmpi", *ELASTIC, file, tmp_path / "saved", "elastic")
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [f"{undisturbed_hash} from 4 in start 1 of 3"] * 3
    assert "all ranks were lost. The first one: rank " in texts_of_starts(done)[0]


@each_job
def test_a_launcher_that_is_killed_is_a_loss(library, options, tmp_path):
    program = "\n    if start == 0:\n        wait()" + TOLD
    with started(library, "run", *options, "-n", 2, written(tmp_path, program)) as process:
        pids = ready(process)
        launcher = descendants(process.pid)[0]
        assert launcher not in pids
        os.kill(launcher, signal.SIGKILL)
        out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, error
    assert told(out) == ["rank 0 of start 1", "rank 1 of start 1"]
    assert "Start 2 of at most 4 follows in 1 s." in error
    assert not any(map(is_running, pids))


# What is no loss -------------------------------------------------------------------------------


@each_library
def test_a_program_that_ends_by_itself_on_one_rank_is_not_started_again(library, tmp_path):
    program = TOLD + "    if rank == 1:\n        raise KeyError('no such row')\n"
    program += "    signal.pause()\n"
    done = call(library, "run", "--restarts", 3, "-n", 2, written(tmp_path, program))
    assert done.returncode == 1, done.stderr
    assert set(told(done.stdout)) <= {"rank 0 of start 0", "rank 1 of start 0"}
    assert "Start 2" not in done.stderr


@each_job
def test_a_program_that_ends_by_itself_on_all_ranks_is_not_started_again(
    library, options, tmp_path
):
    file = written(tmp_path, TOLD + "    sys.exit(3)\n")
    done = call(library, "run", *options, "--restarts", 3, "-n", 2, file)
    assert done.returncode == 3, done.stderr
    assert set(told(done.stdout)) <= {"rank 0 of start 0", "rank 1 of start 0"}
    assert "Start 2" not in done.stderr


@each_job
def test_an_error_in_training_is_not_started_again(library, options, tmp_path):
    """Also where the others raise RankLostError, since the rank that has failed is no more."""
    file = written(tmp_path, losing("raise KeyError('no such row')", "rank == 1"))
    kind = ["elastic"] if options else []
    options = [*options, "--restarts", 3, "-n", 3]
    done = call(library, "run", *options, file, tmp_path / "saved", *kind)
    assert done.returncode == 1, done.stderr
    assert "KeyError: 'no such row'" in done.stderr
    assert "Start 2" not in done.stderr


@only_elastic
def test_an_error_behind_a_loss_that_cost_nothing_is_not_started_again(tmp_path):
    program = (
        TRAIN
        + """
    def lose():
        if rank == 2 and state.step == 2:
            die()
        if state.step == 5:
            raise KeyError("no such row")
    main()
    """
    )
    file = written(tmp_path, program)
    done = call("openmpi", *ELASTIC, "--restarts", 3, file, tmp_path / "saved", "elastic")
    assert done.returncode == 1, done.stderr
    assert "goes on at step" in done.stderr
    assert "KeyError: 'no such row'" in done.stderr
    assert "Start 2" not in done.stderr


ELASTIC_PROGRAM = """
    import mpi_replica as mr

    strategy = mr.MPIStrategy(num_replicas=3, spares=SPARES)
    state = mr.ElasticState(strategy, step=0)

    def train():
        while state.step < 3:
            state.step += 1
            state.commit()
            at(state.step)

"""


@only_elastic
def test_a_call_of_run_elastic_that_fails_on_all_ranks_counts_on_all(tmp_path):
    program = (
        ELASTIC_PROGRAM.replace("SPARES", "0")
        + """
    def at(step):
        if rank == 2 and step == 2:
            die()

    try:
        strategy.run_elastic(train, None if rank == 1 else state)
    except TypeError:
        strategy.run_elastic(train, state)
        tell(f"step {state.step} of {strategy.size}")
    """
    )
    done = call("openmpi", *ELASTIC, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == ["step 3 of 2"] * 2


@only_elastic
def test_a_spare_ends_as_a_program_that_ends_itself_in_training(tmp_path):
    program = (
        ELASTIC_PROGRAM.replace("SPARES", "1")
        + """
    at = lambda step: sys.exit()
    strategy.run_elastic(train, state)
    """
    )
    done = call("openmpi", *ELASTIC, written(tmp_path, program))
    assert done.returncode == 0, done.stderr


@only_elastic
def test_a_spare_that_calls_run_elastic_more_often_than_the_others_is_an_error(tmp_path):
    program = (
        ELASTIC_PROGRAM.replace("SPARES", "1")
        + """
    at = lambda step: None
    while state.step < 3:  # which that of a spare never is
        strategy.run_elastic(train, state)
    """
    )
    done = call("openmpi", *ELASTIC, written(tmp_path, program))
    assert done.returncode == 1, done.stderr
    text = "RankLostError: this spare was not needed, and the program has ended elsewhere"
    assert done.stderr.count(text) == 1


@each_job
def test_a_program_that_ends_well_too_early_on_one_rank_is_not_started_again(
    library, options, tmp_path
):
    """The others raise RankLostError, but nothing was lost."""
    program = """
    import mpi_replica as mr

    strategy = mr.MPIStrategy()
    tell(f"rank {rank} of start {start}")
    if rank == 2:
        sys.exit(0)
    strategy.barrier()
    """
    options = [*options, "--restarts", 3, "-n", 3]
    done = call(library, "run", *options, written(tmp_path, program))
    assert done.returncode == 1, done.stderr
    assert "RankLostError: the program has ended on replica 2 (rank 2)" in done.stderr
    assert told(done.stdout) == [f"rank {rank} of start 0" for rank in range(3)]
    assert "Start 2" not in done.stderr


def test_an_error_is_started_again_where_that_is_asked_for(tmp_path):
    program = TOLD + "    if start == 0 and rank == 1:\n        sys.exit(3)\n"
    options = ["--restarts", 1, "--restart-on", "any", "-n", 2]
    done = call(LIBRARIES[0], "run", *options, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert set(told(done.stdout)) >= {"rank 0 of start 1", "rank 1 of start 1"}
    assert "the program has ended with status 3. Start 2 of at most 2" in done.stderr


@each_job
def test_a_rank_that_dies_after_its_end_does_not_change_how_the_job_has_ended(
    library, options, tmp_path
):
    """In the end of MPI, after all that Python does at exit."""
    program = """
    import resource
    import mpi_replica as mr

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with mr.MPIStrategy() as strategy:
        strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
    tell(f"rank {rank} of start {start}")
    if rank == 1:
        abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p)
        assert ctypes.pythonapi.Py_AtExit(abort) == 0
    """
    done = call(library, "run", *options, "--restarts", 1, "-n", 2, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == ["rank 0 of start 0", "rank 1 of start 0"]


def test_a_rank_that_dies_before_its_end_is_lost_however_late(tmp_path):
    program = TOLD + "    if start == 0 and rank == 1:\n        import atexit\n"
    program += "        atexit.register(die)\n"
    done = call(LIBRARIES[0], "run", "-n", 2, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert set(told(done.stdout)) >= {"rank 0 of start 1", "rank 1 of start 1"}


# When it is given up ---------------------------------------------------------------------------


def test_a_job_that_dies_at_once_three_times_is_given_up_with_the_causes(tmp_path):
    program = "\n    if rank == 1:\n        die()\n    signal.pause()\n"
    done = call(LIBRARIES[0], "run", "--restarts", 9, "-n", 2, written(tmp_path, program))
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert re.findall(r"follows in (\d) s", done.stderr) == ["1", "2"]
    assert re.findall(r"^  (\d)\. rank \d \(", done.stderr, re.MULTILINE) == ["1", "2", "3"]
    assert "3 times in a row it has died within 10 s of its start." in done.stderr


def test_no_restarts_means_none(tmp_path):
    program = TOLD + "    die() if rank else signal.pause()\n"
    done = call(LIBRARIES[0], "run", "--restarts", 0, "-n", 2, written(tmp_path, program))
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "Start 2" not in done.stderr


def test_the_timeout_is_that_of_all_starts_together(tmp_path):
    """Each one for itself is far from it."""
    program = "\n    die() if rank else signal.pause()\n"
    options = ["--timeout", 2, "--restarts", 9, "-n", 2]
    done = call(LIBRARIES[0], "run", *options, written(tmp_path, program))
    assert done.returncode == 124, done.stderr
    assert "given up" not in done.stderr


def test_a_timeout_in_the_pause_between_two_starts_is_told(tmp_path):
    """The second pause takes 2 s: a machine on which two starts take as long is in a start then."""
    options = ["--timeout", 3.5, "--restarts", 9, "-n", 2]
    done = call(LIBRARIES[0], "run", *options, written(tmp_path, "\n    die()\n"))
    assert done.returncode == 124, done.stderr
    assert done.stderr.count("the job did not end within 3.5 s (--timeout 3.5): ") == 1


@pytest.mark.skipif("openmpi" not in LIBRARIES, reason="it is Open MPI's launcher")
@pytest.mark.parametrize("failing", [1, 9])
def test_a_launcher_of_open_mpi_that_can_not_begin_is_started_once_more(failing, tmp_path):
    """A network interface went while it listed them; or it is told what it does not know."""
    launcher, starts = tmp_path / "mpiexec", tmp_path / "starts"
    launcher.write_text(
        f"""#!/bin/sh
        [ "$1" = --version ] || echo >> {starts}
        if [ "$1" = --version ] || [ $(wc -l < {starts}) -gt {failing} ]; then
            exec {find_launcher(sys.executable)} "$@"
        fi
        exit 213
        """
    )
    launcher.chmod(0o755)
    done = call("openmpi", "run", "--mpi", launcher, "-n", 2, written(tmp_path, TOLD))
    assert starts.read_text() == "\n\n"
    ran = ["rank 0 of start 1", "rank 1 of start 1"]
    assert (done.returncode, told(done.stdout)) == ((0, ran) if failing == 1 else (213, []))
    wanted = ["the launcher has ended with status 213, before a rank has begun."]
    assert [text.partition(": ")[2] for text in texts_of_starts(done)] == wanted


# Signals ---------------------------------------------------------------------------------------

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_in_the_pause_between_two_starts_ends_the_job(number, tmp_path):
    program = "\n    wait() if start else die()\n"
    options = ["--restarts", 5, "-n", 2]
    with started(LIBRARIES[0], "run", *options, written(tmp_path, program)) as process:
        until_told(process, "Start 2 of at most 6 follows in 1 s.")
        process.send_signal(number)
        out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + number, error
    assert told(out) == []


@pytest.mark.parametrize("number", SIGNALS[:2], ids=lambda number: number.name)
@each_library
def test_a_signal_in_a_start_after_a_loss_ends_the_job(library, number, tmp_path):
    program = """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wait() if start else die()
    """
    options = ["--restarts", 5, "-n", 2]
    with started(library, "run", *options, written(tmp_path, program)) as process:
        pids = ready(process)
        process.send_signal(number)
        _, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + number, error
    assert "Start 3" not in error
    assert not any(map(is_running, pids))


@each_library
def test_a_signal_while_ranks_wait_in_the_start_of_mpi_ends_the_job(library, tmp_path):
    program = """
    tell(f"ready {os.getpid()}")
    if rank == 1:
        signal.pause()
    import mpi_replica as mr
    mr.MPIStrategy()
    """
    with started(library, "run", "-n", 2, written(tmp_path, program)) as process:
        pids = ready(process)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, error
    assert not any(map(is_running, pids))


DEAF = """
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    tell(f"ready {os.getpid()}")
    ctypes.PyDLL(None).sleep(10000)
"""


@each_job
def test_nothing_is_left_of_a_job_whose_run_is_killed(library, options, tmp_path):
    """Also ranks that hear of no signal, and do not give away Python's lock."""
    with started(library, "run", *options, "-n", 2, written(tmp_path, DEAF)) as process:
        pids = ready(process)
        pids += [pid for pid in descendants(process.pid) if pid not in pids]
        process.kill()
        with contextlib.ExitStack() as stack:
            for pid in pids:
                stack.callback(lambda pid=pid: is_running(pid) and os.kill(pid, signal.SIGKILL))
            until_gone(pids)


@each_library
def test_a_job_that_comes_to_its_end_while_run_gets_no_cpu_is_not_started_again(library):
    """As on a busy machine: `run` sees its ranks when the launcher has ended, and not before."""
    command = ["run", "--restarts", 3, "-n", 3, "-c", "print('ran', flush=True)"]
    with started(library, *command) as process:
        with contextlib.ExitStack() as stack:
            launcher = until_ranks_are_started(process.pid)
            process.send_signal(signal.SIGSTOP)
            stack.callback(process.send_signal, signal.SIGCONT)
            until_gone([launcher])
        out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, out, error) == (0, "ran\n" * 3, "")


@pytest.mark.parametrize("library", [LIBRARIES[0]])
def test_a_job_whose_output_nobody_reads_is_started_again_behind_a_loss(library, tmp_path):
    # More than the pipe, `run` and the launcher's pipe take together, 64 kB each: so the launcher
    # can't end by itself. At 300 kB MPICH's lets the rank wait.
    full = tmp_path / "full"
    program = f"""
    import pathlib, time
    full = pathlib.Path({str(full)!r})
    if start == 0:
        if rank == 1:
            while not full.exists():
                time.sleep(0.01)
            die()
        for _ in range(2500):
            tell("x" * 97)
        full.touch()
        while True:
            tell("x" * 97)
    os.write(2, b"begins\\n")
    tell(f"rank {{rank}}")
    """
    source, sink = os.pipe()
    options = ["--tag", "--restarts", 1, "-n", 2]
    with (
        open(source) as reader,
        started(library, "run", *options, written(tmp_path, program), stdout=sink) as process,
    ):
        os.close(sink)
        until_told(process, "begins")
        out = reader.read()
        assert process.wait(LIMIT_SECONDS) == 0, process.stderr.read()
    assert sorted(re.findall(r"> (rank \d)\n", out)) == ["rank 0", "rank 1"]


# What is told ----------------------------------------------------------------------------------


@each_library
def test_a_rank_that_others_wait_for_in_the_start_of_mpi_is_told_with_its_place(library, tmp_path):
    program = """
    def load():
        signal.pause()

    if rank == 1:
        load()
    import mpi_replica as mr
    mr.MPIStrategy()
    """
    file = written(tmp_path, program)
    environment = {"MPI_REPLICA_STALL_SECONDS": "1"}
    with started(library, "run", "-n", 2, file, env=environment) as process:
        text = until_told(process, "in load")
        (pid,) = map(int, re.findall(r"rank 1 \(\S+, pid (\d+)\) is at", text))
        assert pid in ranks_below(process.pid)
    assert "mpi_replica run: rank 0 waits in the start of MPI for others." in text
    assert re.search(r'train.py", line \d+, in load$', text, re.MULTILINE)
    assert "rank_program.py" not in text


@each_library
@pytest.mark.parametrize(
    ("begin", "waits"),
    [
        ("", "MPI can't start without it on rank 0"),
        # The end of MPI waits for the other ranks, too.
        ("from mpi4py import MPI", "rank 0 waits for it to make a strategy"),
    ],
    ids=["in the start of MPI", "behind it"],
)
def test_a_rank_that_ends_while_others_wait_for_it_to_make_a_strategy_ends_the_job(
    library, begin, waits, tmp_path
):
    """As where rank 0 alone makes the strategy: no start after this one comes further."""
    program = f"""
    {begin}
    import mpi_replica as mr
    if rank == 0:
        mr.MPIStrategy()
    """
    done = call(library, "run", "-n", 2, written(tmp_path, program))
    assert done.returncode == 1
    end = r"rank 1 \(\S+, pid \d+\) has come to its end, and "
    assert re.search(f"{end}{waits}. Make the strategy on all ranks: the job", done.stderr)
    assert "Start 2" not in done.stderr
    assert "was lost" not in done.stderr


@each_library
def test_ranks_that_make_a_strategy_of_theirs_go_on_without_one_that_has_ended(library, tmp_path):
    program = """
    import time
    from mpi4py import MPI
    import mpi_replica as mr
    world = MPI.COMM_WORLD
    part = world.Split(world.rank == 0)
    if world.rank:
        time.sleep(3)  # longer than the launcher lets a job be that one rank has left
        with mr.MPIStrategy(part) as strategy:
            tell(f"{strategy.num_replicas_in_sync} replicas")
    """
    done = call(library, "run", "-n", 3, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == ["2 replicas"] * 2


@each_library
def test_a_program_of_another_kind_runs_as_before_and_is_not_started_again(library, tmp_path):
    # It does not end before both have written: once in ten times MPICH's launcher breaks on ranks
    # that end while it is still about to start others.
    end = tmp_path / "end"
    script = tmp_path / "train.sh"
    script.write_text(
        f"echo ready $$\nuntil [ -e '{end}' ]; do sleep 0.01; done\n"
        "[ $PMI_RANK$PMIX_RANK = 0 ] || exit 5\n"
    )
    run = library, "run", "-n", 2, "/bin/sh", script
    with started(*run) as process:
        os.kill(ready(process)[1], signal.SIGKILL)
        _, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + signal.SIGKILL, error
    assert "Start 2" not in error
    with started(*run) as process:
        ready(process)
        end.touch()
        out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 5, error
    assert "mpi_replica run:" not in error
    assert out == ""  # but for the lines that were read


@pytest.mark.parametrize("option", ["--restarts 1", "--restart-on any"])
def test_restarts_of_a_program_of_another_kind_are_refused_before_anything_is_started(
    option, tmp_path
):
    script = tmp_path / "train.sh"
    script.write_text("echo one\n")
    done = call(LIBRARIES[0], "run", *option.split(), "-n", 2, "/bin/sh", script)
    assert (done.returncode, done.stdout) == (2, "")
    name = option.removesuffix(" 1")
    assert f"{name} starts programs of Python, and '/bin/sh' is another one" in done.stderr
