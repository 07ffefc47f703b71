"""What is printed of an error that nobody catches ends where the program's code does."""

import re
import subprocess
import sys
import textwrap

import pytest

from launching import LIBRARIES, ROOT, rank_environment, run_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

SUM_ON_ONE_REPLICA = """
    import mpi_replica as mr

    def step():
        ctx = mr.get_replica_context()
        if ctx.replica_id_in_sync_group == 0:
            ctx.all_reduce("MAX", 1.0)
        return ctx.all_reduce("SUM", 1.0)

    mr.MPIStrategy(num_replicas=2).run(step)
"""
# In a comprehension of Python 3.11 there would be a frame more.
BAD_ARGUMENT = """
    import mpi_replica as mr

    def step():
        return mr.get_replica_context().all_reduce("SUMM", 1.0)

    mr.MPIStrategy(num_replicas=2).run(step)
"""
OWN_ERROR_BEHIND_ANOTHER = """
    import mpi_replica as mr

    def step():
        try:
            mr.get_replica_context().all_reduce("SUMM", 1.0)
        except ValueError as error:
            raise RuntimeError("not this time") from error

    mr.MPIStrategy(num_replicas=2).run(step)
"""
OWN_ERROR_BEHIND_HUNDREDS = """
    import mpi_replica as mr

    def step():
        last = None
        for i in range(600):
            try:
                raise ValueError(f"try {i}") from last
            except ValueError as error:
                last = error
        raise RuntimeError("given up") from last

    mr.MPIStrategy(num_replicas=2).run(step)
"""
OF_OUR_MAKING = """
    import mpi_replica as mr
    from mpi_replica.collectives import reduce

    reduce.inline = None
    vars(reduce).update({name: None for name, value in vars(reduce).items() if callable(value)
                         and getattr(value, "__module__", "").endswith("inline")})

    def step():
        return mr.get_replica_context().all_reduce("SUM", 1.0)

    mr.MPIStrategy(num_replicas=2).run(step)
"""
LEFT_OUT = re.compile(
    r"\(\d+ frames inside mpi_replica are left out: MPI_REPLICA_FULL_TRACEBACK=1 shows them\)"
)


def frames(text):
    """Return file and function of each frame of the tracebacks."""
    return re.findall(r'^ *File "(.*?)", line \d+, in (\S+)$', text, re.MULTILINE)


def run(folder, program, **env):
    file = folder / "train.py"
    file.write_text(textwrap.dedent(program))
    env = rank_environment(60, {"PYTHONPATH": str(ROOT)} | env)
    command = [sys.executable, file]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("program", [SUM_ON_ONE_REPLICA, BAD_ARGUMENT])
def test_of_a_mistake_the_frames_of_the_program_are_shown_and_one_line_more(program, tmp_path):
    text = run(tmp_path, program)
    file = str(tmp_path / "train.py")
    assert frames(text) == [(file, "<module>"), (file, "step")]
    assert len(LEFT_OUT.findall(text)) == 1
    assert text.rstrip().endswith("shows them)")


def test_errors_behind_an_error_end_in_the_program_too(tmp_path):
    text = run(tmp_path, OWN_ERROR_BEHIND_ANOTHER)
    file = str(tmp_path / "train.py")
    assert frames(text) == [(file, "step"), (file, "<module>"), (file, "step")]
    assert "The above exception was the direct cause" in text


def test_hundreds_of_errors_behind_an_error_are_all_printed(tmp_path):
    text = run(tmp_path, OWN_ERROR_BEHIND_HUNDREDS)
    assert "RecursionError" not in text
    assert text.count("The above exception was the direct cause") == 600
    assert len(LEFT_OUT.findall(text)) == 1


@pytest.mark.parametrize("program", [SUM_ON_ONE_REPLICA, BAD_ARGUMENT])
def test_a_variable_shows_all_frames(program, tmp_path):
    text = run(tmp_path, program, MPI_REPLICA_FULL_TRACEBACK="1")
    assert any("mpi_replica" in file for file, _ in frames(text))
    assert not LEFT_OUT.search(text)


def test_an_error_of_this_package_shows_all_frames(tmp_path):
    text = run(tmp_path, OF_OUR_MAKING)
    assert "TypeError: 'NoneType' object is not callable" in text
    assert any(name == "prepare" for _, name in frames(text))
    assert not LEFT_OUT.search(text)


def test_an_error_that_is_caught_keeps_all_frames(tmp_path):
    program = f"{SUM_ON_ONE_REPLICA}".replace(
        "    mr.MPIStrategy(num_replicas=2).run(step)",
        """
    import sys, traceback
    try:
        mr.MPIStrategy(num_replicas=2).run(step)
    except mr.errors.CollectiveMismatchError:
        traceback.print_exc()
        sys.exit(1)
""",
    )
    assert any("mpi_replica" in file for file, _ in frames(run(tmp_path, program)))


def test_a_hook_of_the_program_is_left_in_its_place(tmp_path):
    hook = (
        "import sys\n    sys.excepthook = lambda *found: print(found[0].__name__, file=sys.stderr)"
    )
    assert run(tmp_path, f"\n    {hook}{BAD_ARGUMENT}") == "ValueError\n"


@pytest.mark.parametrize("library", LIBRARIES)
def test_on_ranks_one_of_them_prints_the_frames_of_the_program(library, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(SUM_ON_ONE_REPLICA))
    done = run_ranks(library, 2, [file], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert frames(done.stderr) == [(str(file), "<module>"), (str(file), "step")]
    assert len(LEFT_OUT.findall(done.stderr)) == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_where_no_strategy_can_be_made_each_rank_prints_the_frames_of_the_program(
    library, tmp_path
):
    file = tmp_path / "train.py"
    file.write_text("import mpi_replica as mr\nmr.MPIStrategy(num_replicas=-1)\n")
    done = run_ranks(library, 2, [file], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert set(frames(done.stderr)) == {(str(file), "<module>")}
    assert "ValueError: num_replicas must be at least 1, got -1." in done.stderr


def test_who_prints_an_error_is_no_business_of_a_process_of_the_same_id_elsewhere():
    """As the first processes of two containers are."""
    own_ids = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*own_ids, "true"], capture_output=True).returncode:
        pytest.skip("no process ids of their own can be had here")
    marks = """if True:
        import os, pickle, sys
        from mpi_replica.core.exceptions import is_reported_here, mark_reporter
        error = ValueError("no rows")
        mark_reporter(error, False)
        assert is_reported_here(pickle.loads(pickle.dumps(error))) is False
        sys.stdout.buffer.write(pickle.dumps((os.getpid(), error)))
    """
    asks = """if True:
        import os, pickle, sys
        from mpi_replica.core.exceptions import is_reported_here
        pid, error = pickle.load(sys.stdin.buffer)
        print(pid == os.getpid(), is_reported_here(error))
    """
    answer = b""
    for program in (marks, asks):
        command = [*own_ids, sys.executable, "-c", program]
        answer = subprocess.run(
            command, cwd=ROOT, input=answer, stdout=subprocess.PIPE, check=True
        ).stdout
    assert answer.split() == [b"True", b"None"]
