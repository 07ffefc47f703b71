"""`python -m mpi_replica run` starts real jobs, with the launcher of each library."""

import contextlib
import fcntl
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import termios
import textwrap

import pytest

from command_line import (
    LIMIT_SECONDS,
    call,
    interrupt_until_it_ends,
    is_running,
    ready,
    started,
    variables,
)
from launching import LIBRARIES, find_interpreter, find_launcher
from mpi_replica.__main__ import main
from mpi_replica.launcher import job as job_module

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

each_library = pytest.mark.parametrize("library", LIBRARIES)

# Needs no MPI, and so starts in a tenth of the time.
HEAD = """
    import os, signal, sys, time
    rank = int(os.environ.get("PMIX_RANK") or os.environ.get("PMI_RANK"))

    def tell(text):  # a whole line at once
        os.write(1, f"{text}\\n".encode())
"""
SHOW = """
    tell(f"{rank} {sys.argv[1:]} {os.environ['OMP_NUM_THREADS']} {os.environ['PYTHONHASHSEED']}"
         f" {os.environ.get('MPI_REPLICA_NUM_REPLICAS')}")
    os.write(2, f"error {rank}\\n".encode())
"""
# Ranks that tell their process ids, and the signals that they get; status 75.
WAIT = """
    def save(number, frame):
        tell(f"saved {rank} {number}")
        os._exit(75)

    for name in sys.argv[1:]:
        signal.signal(getattr(signal, name), save)
    tell(f"ready {os.getpid()}")
    while True:  # pause() would wait for ever behind a signal that comes right before it
        time.sleep(0.1)
"""
SHOW_ARGUMENTS = "import sys; print(sys.argv[1:])"


def written(folder, program):
    file = folder / "train.py"
    file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(program))
    return file


@each_library
def test_ranks_are_started_with_arguments_and_settings_of_their_own(library, tmp_path):
    program = written(tmp_path, SHOW)
    done = call(library, "run", "-n", 3, "--replicas", 6, "--tag", program, "-n", "x", "--tag")
    assert done.returncode == 0, done.stderr
    shown = [f"[{rank}] {rank} ['-n', 'x', '--tag'] 1 0 6" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == shown
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] error {rank}" for rank in range(3)]


@each_library
def test_the_line_of_a_dry_run_does_the_same_in_a_shell(library, tmp_path):
    written(tmp_path, SHOW)
    arguments = ["-n", 2, "--timeout", 60, "-m", "train", "it's", "$HOME"]
    done = call(library, "run", *arguments, cwd=tmp_path)
    dry = call(library, "run", "--dry-run", *arguments, cwd=tmp_path)
    assert len(dry.stdout.splitlines()) == 1
    # Rank 0's output is not there: nothing was started.
    assert "error" not in dry.stderr
    line = subprocess.run(
        ["sh", "-c", dry.stdout],
        env=variables(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert (line.returncode, done.returncode) == (0, 0), line.stderr
    assert sorted(line.stdout.splitlines()) == sorted(done.stdout.splitlines())
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("words", [["-m", "train"], ["-c", SHOW_ARGUMENTS]], ids=["-m", "-c"])
def test_what_stands_behind_two_dashes_is_the_programs(words, tmp_path):
    (tmp_path / "train.py").write_text(SHOW_ARGUMENTS)
    done = call(LIBRARIES[0], "run", "-n", 1, *words, "a", "--", "b", "-n", "--", cwd=tmp_path)
    assert done.stdout.splitlines() == ["['a', '--', 'b', '-n', '--']"], done.stderr


def test_python_with_flags_of_its_own_is_a_program_of_python():
    python = find_interpreter(LIBRARIES[0])
    code = "import sys; print(sys.flags.optimize, sys.warnoptions, sys.argv); raise SystemExit(7)"
    options = ["-n", 1, "--restart-on", "any", "--restarts", 1]
    flags = ["-O", "-W", "error", "-X", "utf8"]
    done = call(LIBRARIES[0], "run", *options, python, *flags, "-c", code, "a")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["1 ['error'] ['-c', 'a']"] * 2, done.stderr


@each_library
@pytest.mark.parametrize(
    ("way", "options"),
    [
        (">/dev/full", []),
        (">/dev/full", ["--tag"]),
        (">/dev/full 2>&1", ["--tag"]),
        (">&-", ["--tag"]),
    ],
)
def test_an_output_that_takes_no_more_ends_no_job(library, way, options, tmp_path):
    program = written(tmp_path, SHOW + "    open(f'done {rank}', 'w').close()")
    command = [find_interpreter(library), "-m", "mpi_replica", "run", *options, "-n", "2", program]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {way}', "sh", *command],
        env=variables(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in tmp_path.glob("done *")) == ["done 0", "done 1"]
    told = [line for line in done.stderr.splitlines() if "mpi_replica run" in line]
    assert len(told) == (way == ">/dev/full"), done.stderr
    assert not told or "stdout takes no more: [Errno 28] No space left" in told[0]


def ended_with(way, arguments, env=None):
    """Return how a command has ended whose output goes another way."""
    command = [sys.executable, "-m", "mpi_replica", *arguments]
    return subprocess.run(
        ["sh", "-c", f'"$@" {way}', "sh", *command],
        env=variables(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


@pytest.mark.parametrize("way", ["2>/dev/full", "2>&-"])
def test_what_can_not_be_told_changes_no_exit_status(way, tmp_path):
    job = ["run", "-n", "1", "--trace", str(tmp_path / "trace.json"), "-c", "raise SystemExit(7)"]
    assert ended_with(way, job).returncode == 7
    done = ended_with(way, ["run", "-n", "1", "absent.py"])
    assert (done.returncode, done.stdout) == (2, "")


# This library is not there, so that the doctor starts no job.
SHOWN = {
    "the line": (["run", "--dry-run", "-n", "2", "-c", "pass"], {}, 0),
    "the report": (["doctor"], {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, 1),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_command_shows_is_told_in_a_line_where_it_can_not_be_written(name):
    arguments, env, _ = SHOWN[name]
    done = ended_with(">/dev/full", arguments, env)
    told = (
        f"mpi_replica {arguments[0]}: {name} can't be written: [Errno 28] No space left on device"
    )
    assert (done.returncode, done.stderr) == (2, f"{told}\n")


@pytest.mark.parametrize("name", SHOWN)
def test_a_reader_who_has_seen_enough_of_it_is_no_error(name):
    arguments, env, status = SHOWN[name]
    source, sink = os.pipe()
    os.close(source)
    command = [sys.executable, "-m", "mpi_replica", *arguments]
    with open(sink, "wb") as writer:
        done = subprocess.run(
            command,
            env=variables(env),
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=LIMIT_SECONDS,
        )
    assert (done.returncode, done.stderr) == (status, b"")


@each_library
def test_ranks_find_each_other(library):
    code = "import mpi_replica as mr; s = mr.MPIStrategy(); print(f'{s.rank} {s.size}\\n', end='')"
    done = call(library, "run", "-n", 2, "-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"]


@pytest.mark.skipif(len(LIBRARIES) < 2, reason="needs both MPI libraries")
def test_mpi4py_loads_the_library_whose_launcher_is_asked_for():
    mpiexec = find_launcher(find_interpreter("mpich"))
    code = "from mpi4py import MPI; name = MPI.Get_library_version()[:5]"
    code += "; print(f'{MPI.COMM_WORLD.size} {name}\\n', end='')"
    done = call("openmpi", "run", "--mpi", mpiexec, "-n", 2, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 MPICH"] * 2


EXITS = [
    ("sys.exit(9 * rank)", 9),
    ("os.kill(os.getpid(), signal.SIGKILL) if rank else signal.pause()", 128 + 9),
    ("sys.exit(2**70)", 255),  # as without ranks
    ("sys.exit(2**32 + 7)", 7),
]


@each_library
@pytest.mark.parametrize(("program", "status"), EXITS)
def test_the_exit_status_is_that_of_the_program(library, program, status, tmp_path):
    done = call(library, "run", "-n", 2, written(tmp_path, f"\n    {program}"))
    assert done.returncode == status, done.stdout + done.stderr


@each_library
@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("raise ValueError", 1)])
def test_a_forked_child_of_a_rank_ends_as_it_would_without_mpi(library, end, status, tmp_path):
    program = f"""
    import atexit
    import mpi_replica as mr

    strategy = mr.MPIStrategy()
    child = os.fork()
    if child == 0:
        atexit.register(tell, f"atexit {{rank}}")
        held = open(f"{{sys.argv[1]}}/{{rank}}", "w")
        held.write(f"of rank {{rank}}")
        {end}
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", rank + 1))
    with open(f"{{sys.argv[1]}}/{{rank}}") as file:
        tell(f"{{ended}} {{strategy.experimental_local_results(total)[0]}} {{file.read()}}")
    """
    done = call(library, "run", "--timeout", 40, "-n", 2, written(tmp_path, program), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [f"atexit {rank}" for rank in range(2)]
    found += [f"{status} 3 of rank {rank}" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted(found)
    assert "Finalize" not in done.stderr


@pytest.mark.skipif("mpich" not in LIBRARIES, reason="it is about MPICH's launcher")
@pytest.mark.parametrize(("program", "status"), EXITS)
def test_so_it_is_where_the_launcher_fails_itself(program, status, tmp_path):
    """That of MPICH does, on busy cores: here one that ends as it does then."""
    launcher = tmp_path / "mpiexec"
    real = find_launcher(find_interpreter("mpich"))
    launcher.write_text(f'#!/bin/sh\n"{real}" "$@" || exit 255\n')
    launcher.chmod(0o755)
    file = written(tmp_path, f"\n    {program}")
    done = call("mpich", "run", "--mpi", launcher, "-n", 2, file)
    assert done.returncode == status, done.stdout + done.stderr


# Open MPI's launcher hands on SIGUSR1, and MPICH's SIGTERM; the others go past it.
HANDED_ON = [
    *(("openmpi", number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)),
    *(("mpich", number) for number in (signal.SIGTERM, signal.SIGUSR2)),
]


@pytest.mark.parametrize(
    ("library", "number"), [(library, n) for library, n in HANDED_ON if library in LIBRARIES]
)
def test_ranks_get_the_signals_and_have_time_to_save(library, number, tmp_path):
    with started(library, "run", "-n", 2, written(tmp_path, WAIT), number.name) as process:
        ready(process)
        process.send_signal(number)
        out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 75, error
    found = sorted(re.findall(r"saved \d \d+", out))
    assert f"saved 0 {int(number)}" in found or f"saved 1 {int(number)}" in found
    if library == "mpich":  # Open MPI ends the others when the first has a status that is not 0
        assert len(found) == 2


def check_ends(library, number, program, *, processes=2):
    """Check that a signal ends a job of two ranks with its status; return what it has told."""
    with started(library, "run", "-n", 2, program) as process:
        pids = ready(process, processes)
        process.send_signal(number)
        _, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + number, error
    assert not any(map(is_running, pids))
    return error


@each_library
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ranks_do_not_catch_ends_them(library, number, tmp_path):
    program = "    signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + WAIT
    check_ends(library, number, written(tmp_path, program))


@each_library
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_program_of_a_script_too(library, number, tmp_path):
    """A shell that waits for a program hands no signal on."""
    script = tmp_path / "job.sh"
    program = "    signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + WAIT
    words = [find_interpreter(library), written(tmp_path, program)]
    script.write_text(f"#!/bin/sh\n{shlex.join(map(str, words))}\necho behind it\n")
    script.chmod(0o755)
    check_ends(library, number, script)


@each_library
def test_a_signal_ends_a_job_of_ranks_whose_own_processes_hold_its_output(library, tmp_path):
    """It is no loss of a rank, and such processes are not left."""
    program = """
    import subprocess
    import mpi_replica as mr
    strategy = mr.MPIStrategy()
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    tell(f"ready {os.getpid()} ready {child.pid}")
    signal.pause()
    """
    error = check_ends(library, signal.SIGTERM, written(tmp_path, program), processes=4)
    assert "lost" not in error


@each_library
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_ranks_that_use_mpi_too(library, number, tmp_path):
    """Libraries below MPI have handlers of their own."""
    program = """
    import mpi4py.MPI
    import mpi_replica as mr
    strategy = mr.MPIStrategy()
    tell(f"ready {os.getpid()}")
    if rank == 0:
        strategy.run(lambda: mr.get_replica_context().barrier())
    signal.pause()
    """
    check_ends(library, number, written(tmp_path, program))


@each_library
def test_ctrl_c_gives_its_status_where_another_rank_waits_in_a_call_of_its_own_to_mpi(
    library, tmp_path
):
    """That one hears of nothing, and is ended by the one that does."""
    program = """
    from mpi4py import MPI
    import mpi_replica as mr
    strategy = mr.MPIStrategy()
    tell(f"ready {os.getpid()}")
    if rank == 0:
        signal.pause()
    MPI.COMM_WORLD.Barrier()
    """
    check_ends(library, signal.SIGINT, written(tmp_path, program))


@each_library
def test_ctrl_c_in_a_terminal_ends_the_job_and_leaves_nothing(library, tmp_path):
    program = "    signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + WAIT
    arguments = ["run", "-n", "2", written(tmp_path, program)]
    main_end, terminal = os.openpty()
    with subprocess.Popen(
        [find_interpreter(library), "-m", "mpi_replica", *arguments],
        env=variables(),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        try:
            pids = ready(process)
            os.write(main_end, b"\x03")
            process.communicate(timeout=LIMIT_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            os.close(main_end)
            os.close(terminal)
    assert process.returncode == 130
    assert not any(map(is_running, pids))


@each_library
def test_the_third_ctrl_c_ends_ranks_that_hear_of_no_signal(library, tmp_path):
    program = """
    for name in ("SIGINT", "SIGTERM"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if rank == 0:  # and what they have started
        child = os.fork()
        if child:
            tell(f"ready {child}")
        else:
            os.setsid()
    """
    with started(library, "run", "-n", 2, written(tmp_path, program + WAIT)) as process:
        pids = ready(process, 4)
        interrupt_until_it_ends(process)
    assert process.returncode == 130
    assert not any(map(is_running, pids))


@each_library
def test_the_end_of_a_job_ends_no_process_that_was_there_before_it(library):
    """Such as the reader of `exec > >(tee log)`; here it writes when all others have ended."""
    program = "import sys; print('from a rank'); sys.exit(3)"
    run = [find_interpreter(library), "-m", "mpi_replica", "run", "-n", "1", "-c", program]
    done = subprocess.run(
        ["bash", "-c", 'exec > >(text=$(cat); echo "read: $text"); exec "$@"', "bash", *run],
        env=variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert (done.returncode, done.stdout) == (3, "read: from a rank\n"), done.stderr


@each_library
def test_a_job_that_runs_too_long_is_ended(library, tmp_path):
    done = call(library, "run", "-n", 2, "--timeout", 0.5, written(tmp_path, WAIT))
    assert done.returncode == 124, done.stderr
    assert "did not end within 0.5 s (--timeout 0.5)" in done.stderr


@pytest.fixture
def narrow_pipe():
    """Give the ends of a pipe for 4096 bytes, to which writing never blocks."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, 4096)
    with open(source, "rb") as reader, open(sink, "wb") as writer:
        yield reader, writer


@each_library
def test_all_output_comes_to_who_reads_slowly_where_writing_must_not_block(
    library, tmp_path, narrow_pipe
):
    reader, writer = narrow_pipe
    line = "x" * 99
    program = written(tmp_path, f"\n    for _ in range(50000):\n        print('{line}')")
    with started(library, "run", "-n", 2, "--tag", program, stdout=writer) as process:
        writer.close()
        text = reader.read().decode()
        error = process.stderr.read()
        assert process.wait(LIMIT_SECONDS) == 0, error
    assert sorted(set(text.splitlines())) == [f"[0] {line}", f"[1] {line}"]
    assert len(text.splitlines()) == 100_000


def test_a_job_whose_output_nobody_reads_is_ended_in_time(narrow_pipe):
    """The one that the launcher starts here takes no time to end."""
    code = """if True:
        import os, sys
        from mpi_replica.launcher.job import Job, Options
        from mpi_replica.launcher.supervisor import start
        endless = "while True: print('x' * 99)"
        words = [sys.executable, "-c", endless]
        job = Job("mpich", words, {}, "", Options(words, timeout_seconds=0.5))
        sys.exit(start(job, os.environ))
    """
    _, writer = narrow_pipe
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, timeout=LIMIT_SECONDS)
    assert done.returncode == 124


# A launcher that has ended while what it has written waits for a reader; then the timeout is over.
HAS_WRITTEN = """if True:
    import os, sys
    from mpi_replica.launcher.job import Job, Options
    from mpi_replica.launcher.supervisor import _Supervisor, start

    def drain(self, current, true=_Supervisor._drain):
        self._steps[:1] = [(0.0, step) for _, step in self._steps[:1]]
        os.write(2, b"ready\\n")
        true(self, current)

    _Supervisor._drain = drain
    words = [sys.executable, "-c", "print('x' * 30000)"]
    options = Options(words, timeout_seconds=1000.0 if sys.argv[1:] == ["--timeout"] else None)
    sys.exit(start(Job("mpich", words, {}, "", options), os.environ))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_job_of_which_output_is_left_that_nobody_reads(number, narrow_pipe):
    _, writer = narrow_pipe
    command = [sys.executable, "-c", HAS_WRITTEN]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline() == "ready\n"
            process.send_signal(number)
            assert process.wait(LIMIT_SECONDS) == 128 + number
        finally:
            process.kill()


def test_so_does_its_timeout(narrow_pipe):
    _, writer = narrow_pipe
    command = [sys.executable, "-c", HAS_WRITTEN, "--timeout"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=LIMIT_SECONDS)
    assert done.returncode == 124, done.stderr


# A launcher of one rank, which writes when that has ended; no time is left to it then, until it has
# been looked at whether it must be ended.
WRITES_LATE = """if True:
    import math, os, sys
    from mpi_replica.launcher import job_start
    from mpi_replica.launcher.job import Job, Options
    from mpi_replica.launcher.program import rank_program
    from mpi_replica.launcher.supervisor import start

    def look(self, true=job_start.JobStart.look):
        found = true(self)
        if self._ranks.last_end < math.inf:
            job_start._SECONDS_TO_END_OTHERS = job_start._SECONDS_TO_END_ITSELF = math.inf
            os.write(2, f"looked{found[0]}\\n".encode())
        return found

    job_start.JobStart.look = look
    job_start._SECONDS_TO_END_OTHERS = job_start._SECONDS_TO_END_ITSELF = 0.0
    kind, program = sys.argv[1:]
    rank = rank_program([sys.executable, "-c", program])
    launcher = f"import subprocess, sys; status = subprocess.run({rank!r}).returncode"
    launcher += "; print('a line\\\\n' * 30000, end='', flush=True); sys.exit(status)"
    words = [sys.executable, "-c", launcher]
    added = {"PMIX_RANK": "0", "PMI_RANK": "0"}
    options = Options(words, restarts=0)
    sys.exit(start(Job(kind, words, added, "", options, is_watched=True), os.environ))
"""


@pytest.mark.parametrize(("program", "status"), [("pass", 0), ("raise SystemExit(3)", 3)])
@each_library
def test_output_that_nobody_reads_for_long_comes_whole_when_it_is_read(
    library, program, status, narrow_pipe
):
    reader, writer = narrow_pipe
    filling = b"x" * 4096
    os.write(writer.fileno(), filling)
    os.set_blocking(writer.fileno(), True)
    command = [sys.executable, "-c", WRITES_LATE, library, program]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE) as process:
        writer.close()
        said = process.stderr.readline()
        text = reader.read()
        error = process.stderr.read()
    assert said == b"looked\n", said + error
    assert (process.returncode, text == filling + b"a line\n" * 30000) == (status, True), error


# Its launcher starts ranks by `start(number)`. No time is left to a job that must be ended; when it
# has been looked at thrice whether it must, since CONDITION holds, `go_on()` returns.
LOOKED_AT = """if True:
    import os, sys
    from mpi_replica.launcher import job_start
    from mpi_replica.launcher.job import Job, Options
    from mpi_replica.launcher.program import rank_program
    from mpi_replica.launcher.supervisor import start

    kind, program, launcher, fifo = sys.argv[1:]
    opened, looks = os.open(fifo, os.O_RDWR), 0

    def look(self, true=job_start.JobStart.look):
        global looks
        ranks = self._ranks
        looks += bool(CONDITION)
        if looks == 3:
            os.write(opened, b"x")
        return true(self)

    job_start.JobStart.look = look
    job_start._SECONDS_TO_END_OTHERS = job_start._SECONDS_TO_COME = 0.0
    rank = rank_program([sys.executable, "-c", f"go_on = open({fifo!r}).read\\n{program}"])
    begin = f"import os, subprocess; go_on = open({fifo!r}).read\\n"
    begin += "def start(number):\\n"
    begin += "    variables = {**os.environ, 'PMIX_RANK': number, 'PMI_RANK': number}\\n"
    begin += f"    return subprocess.Popen({rank!r}, env=variables)\\n"
    words = [sys.executable, "-c", begin + launcher]
    job = Job(kind, words, {}, "", Options(words, restarts=0), num_ranks=2, is_watched=True)
    sys.exit(start(job, os.environ))
"""


def looked_at(folder, condition, *arguments):
    """Run such a job; return how it has ended."""
    os.mkfifo(folder / "fifo")
    code = LOOKED_AT.replace("CONDITION", condition)
    command = [sys.executable, "-c", code, *arguments, folder / "fifo"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)


@each_library
def test_a_rank_has_all_the_time_it_needs_to_end_where_others_have_saved(library, tmp_path):
    program = """
import os, sys
if os.environ["PMIX_RANK"] == "0":
    go_on(1)
    print("written")
sys.exit(75)
"""
    launcher = "for rank in [start('0'), start('1')]: rank.wait()\nraise SystemExit(75)"
    done = looked_at(tmp_path, "ranks.failed", library, program, launcher)
    assert (done.returncode, done.stdout) == (75, "written\n"), done.stderr


@each_library
def test_the_status_is_that_of_a_rank_that_has_failed_where_another_one_has_saved(
    library, tmp_path
):
    program = """
import os, sys
if os.environ["PMIX_RANK"] == "0":
    go_on(1)
    sys.exit(3)
sys.exit(75)
"""
    launcher = "for rank in [start('0'), start('1')]: rank.wait()"
    done = looked_at(tmp_path, "ranks.failed", library, program, launcher)
    assert done.returncode == 3, done.stderr


def test_ranks_of_srun_whose_starts_lie_apart_are_not_taken_for_lost(tmp_path):
    """They are children of a daemon of Slurm, so that nobody sees here whether they are started."""
    launcher = "one = start('0'); go_on(1); other = start('1'); one.wait(); other.wait()"
    done = looked_at(tmp_path, "ranks.ranks and ranks.missing()", "srun", "pass", launcher)
    assert done.returncode == 0, done.stderr


def test_a_job_that_is_ended_while_a_rank_is_still_in_its_end_is_none_that_has_ended_well():
    code = """if True:
        import os, sys
        from mpi_replica.launcher import job_start
        from mpi_replica.launcher.job import Job, Options
        from mpi_replica.launcher.program import rank_program
        from mpi_replica.launcher.supervisor import start
        job_start._SECONDS_TO_END_PROCESSES = 0.0
        program = "import signal; end = type('', (), {'__del__': lambda _, f=signal.pause: f()})()"
        words = rank_program([sys.executable, "-c", program])
        options = Options(words, restarts=0)
        job = Job("mpich", words, {"PMI_RANK": "0"}, "", options, is_watched=True)
        sys.exit(start(job, os.environ))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 137, done.stderr
    assert "all ranks have come to their end, and the process of rank 0 (" in done.stderr


@pytest.mark.skipif("mpich" not in LIBRARIES, reason="Open MPI sets the variable anew")
def test_a_shell_of_slurm_that_looks_like_a_rank_is_no_rank_of_what_is_started_there(tmp_path):
    shell = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "PMIX_RANK": "0"}
    shell |= {"SLURM_STEP_NUM_TASKS": "1", "HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
    arguments = ["run", "-n", 2, "--restarts", 0, written(tmp_path, WAIT), "SIGUSR2"]
    with started("mpich", *arguments, env=shell) as process:
        ready(process)
        process.send_signal(signal.SIGUSR2)
        out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 75, error
    assert sorted(re.findall(r"saved (\d)", out)) == ["0", "1"]


LOST_DAEMON = "PRTE has lost communication with a remote daemon."


@pytest.mark.parametrize(
    ("said", "status", "told"),
    [(LOST_DAEMON, 137, "lost a daemon"), ("", 3, "")],
    ids=["a host is lost", "the program ends"],
)
def test_a_launcher_that_reports_success_hides_no_error(said, status, told):
    """Open MPI's does so where it has lost a daemon, by which ranks may fail, too."""
    code = f"""if True:
        import os, sys
        from mpi_replica.launcher.job import Job, Options
        from mpi_replica.launcher.program import rank_program
        from mpi_replica.launcher.supervisor import start
        rank = rank_program([sys.executable, "-c", "raise SystemExit(3)"])
        ranks = f"subprocess.run({{rank!r}}, env=os.environ | dict(PMIX_RANK='0'))"
        says = "print({said!r}, file=sys.stderr)"
        launcher = f"import os, subprocess, sys; {{ranks}}; {{says}}"
        words = [sys.executable, "-c", launcher]
        options = Options(words, restarts=0)
        job = Job("openmpi", words, {{}}, "", options, num_hosts=2, is_watched=True)
        sys.exit(start(job, os.environ))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == status, done.stderr
    assert told in done.stderr


def test_a_job_of_slurm_has_its_tasks_and_srun_starts_them(tmp_path):
    """Slurm itself is not here: a program in its place tells what it was asked for."""
    (tmp_path / "srun").write_text(
        '#!/bin/sh\n[ "$1" = --mpi=list ] && echo "MPI plugin types are... none pmix_v4" >&2\n'
        'echo "$@"\n'
    )
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3"}
    job |= {"PATH": f"{tmp_path}:{variables()['PATH']}"}
    dry = ["run", "--dry-run", "-c", "pass"]
    line = call("openmpi", *dry, env=job).stdout
    assert f"{tmp_path}/srun --mpi=pmix_v4 " in line
    assert "OMP_NUM_THREADS=3" in line
    assert "--cpus-per-task=3 -n 4 " in line
    # The library's own launcher knows the job, too.
    line = call("openmpi", *dry[:2], "--launcher", "mpiexec", "-n", 2, *dry[2:], env=job).stdout
    assert "bin/mpiexec --bind-to none -n 2 " in line
    # Slurm 22.05 reports success where it can't start a task, as that program does.
    done = call("openmpi", "run", "--restarts", 0, "-c", "pass", env=job)
    assert (done.returncode, " -n 4 " in done.stdout) == (137, True)
    assert "the launcher has ended before its ranks" in done.stderr


MISTAKES = {
    "-n 2, for example": ["-c", "pass"],
    "--help": ["-n", "2"],
    "absent.py": ["-n", "2", "absent.py"],
    "--replicas 2 is less than the 3 ranks": ["-n", "3", "--replicas", "2", "-c", "pass"],
    "--launcher srun": ["-n", "3", "--launcher", "srun", "-c", "pass"],
    "neither openmpi nor mpich": ["-n", "2", "--mpi", "/bin/true", "-c", "pass"],
    "0 is less than 1": ["-n", "0", "-c", "pass"],
    "PMI_RANK='0'": ["-n", "2", "-c", "pass"],
    "the argument ':' would not reach": ["-n", "2", "-c", "pass", "a", ":", "b"],
    "arguments: --absent": ["-n", "2", "--absent", "-c", "pass"],
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_told_before_anything_is_started(text, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", variables({"PMI_RANK": "0"} if "PMI" in text else None))
    monkeypatch.setattr(job_module, "cores", lambda: range(2))
    try:
        status = main(["run", *MISTAKES[text]])
    except SystemExit as end:  # of argparse
        status = end.code
    told = capfd.readouterr()
    assert (status, told.out) == (2, "")
    assert text in told.err


@pytest.mark.parametrize("options", [[], ["--trace", "x"]])
def test_a_working_directory_that_is_gone_is_told(options, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    status = main(["run", "-n", "2", *options, "absent.py"])
    assert (status, capfd.readouterr().err.count("the working directory is gone")) == (2, 1)


def test_a_launcher_of_another_version_is_never_taken(tmp_path):
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 3.1.0'\n")
    other.chmod(0o755)
    done = call("openmpi", "run", "--mpi", other, "-n", 2, "-c", "pass")
    assert done.returncode == 2
    for text in (str(other), "Open MPI 3.1.0", "mpi4py loads Open MPI", "MPI4PY_LIBMPI"):
        assert text in done.stderr


def test_a_timeout_of_a_month_is_one():
    done = call(LIBRARIES[0], "run", "-n", 1, "--timeout", 30 * 24 * 3600, "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_a_terminal_that_is_not_the_one_of_its_session_is_none():
    ends = os.openpty()
    command = [sys.executable, "-m", "mpi_replica", "run", "-n", "1", "-c", "print('ran')"]
    done = subprocess.run(
        command,
        stdin=ends[1],
        capture_output=True,
        text=True,
        env=variables(),
        start_new_session=True,
        timeout=LIMIT_SECONDS,
    )
    for end in ends:
        os.close(end)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_a_launcher_that_can_not_run_here_is_told_with_what_it_says(tmp_path):
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\nprintf -- '---\\n  no such device\\n---\\n' >&2\nexit 1\n")
    launcher.chmod(0o755)
    done = call(LIBRARIES[0], "run", "--mpi", launcher, "-n", 2, "-c", "pass")
    assert done.returncode == 2
    assert "it fails when it is asked for its version (no such device)." in done.stderr


def test_a_launcher_that_the_system_does_not_start_is_told():
    """Arguments that take more room than there is."""
    code = """if True:
        import sys
        from mpi_replica.__main__ import main
        sys.exit(main(["run", "-n", "1", "-c", "pass", *["x" * 100000] * 100]))
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=variables(),
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 2
    wanted = r"mpi_replica run: \S*/mpiexec can't be started: .*too long\.\n"
    assert re.fullmatch(wanted, done.stderr)


PRINTING = {
    "import atexit; print('[hello]', end=''); atexit.register(print, '[bye]')": "mpiexec",
    # It ends where the library is asked for.
    "import os, sys; sys.orig_argv[1] == '-c' and os._exit(0)": "did not say which MPI library",
}


@pytest.mark.parametrize("text", PRINTING)
def test_what_each_python_prints_hides_no_library(text, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(text)
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{variables()['PYTHONPATH']}"}
    done = call(LIBRARIES[0], "run", "--dry-run", "-n", 2, "-c", "pass", env=path)
    assert PRINTING[text] in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["run"]])
def test_help_teaches_the_commands(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--help"])
    told = capsys.readouterr().out
    words = ["-n 4 train.py", "-m package.train", "--timeout", "exit status", "signals"]
    assert all(word in told for word in (words if arguments else ["run"]))


def test_a_dry_run_writes_to_what_a_program_has_put_in_the_place_of_stdout():
    with contextlib.redirect_stdout(io.StringIO()) as written:
        assert main(["run", "--dry-run", "-n", "2", "-c", "pass"]) == 0
    assert written.getvalue().endswith("-c pass\n")
