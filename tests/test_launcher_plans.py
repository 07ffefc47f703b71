"""What `python -m mpi_replica run` makes of options and environments: nothing is started here."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_replica.__main__ import main
from mpi_replica.errors import LaunchError
from mpi_replica.launcher.batch_system import (
    BatchAllocation,
    read_allocation,
)
from mpi_replica.launcher.commands import Request, command, question, shell_line
from mpi_replica.launcher.elasticity import (
    check_elastic,
    elastic_settings,
)
from mpi_replica.launcher.host_slots import HostSlots
from mpi_replica.launcher.library import Library
from mpi_replica.launcher.output import MPICH_MARK, DeathNotice, Tags
from mpi_replica.launcher.program import is_of_python, program_command, rank_program
from mpi_replica.launcher.settings import Host, for_other_hosts, settings
from mpi_replica.ranks.launch import launcher_variable

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
STEP = SLURM | {"SLURM_STEP_ID": "0"}
# The shell of salloc, as Slurm 22.05 starts it on a host of the job.
SALLOC = SLURM | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, BatchAllocation()),
        ({"SLURM_NTASKS": "4"}, BatchAllocation()),  # left over in a shell: there is no job
        (SLURM, BatchAllocation("slurm", None, 2)),
        (SLURM | {"SLURM_NTASKS": "8"}, BatchAllocation("slurm", 8, 2)),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "3"}, BatchAllocation("slurm", 6, 2)),
        (
            SLURM | {"SLURM_NTASKS_PER_NODE": "3", "SLURM_NTASKS": "5"},
            BatchAllocation("slurm", 5, 2),
        ),
        (
            SLURM | {"SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "6"},
            BatchAllocation("slurm", 2, 2, cores_per_task=6),
        ),
        # A shell that `srun --pty` started has a step of one process around it.
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
            BatchAllocation("slurm", None, 2, is_in_step=True),
        ),
        # The shell of salloc is a step with a number of Slurm's own.
        (SALLOC, BatchAllocation("slurm", 4, 2)),
    ],
)
def test_an_allocation_is_read_from_the_environment(environ, expected):
    assert read_allocation(environ) == expected


def test_one_of_several_processes_of_srun_starts_no_job_of_its_own():
    with pytest.raises(LaunchError, match="SLURM_STEP_NUM_TASKS=4"):
        read_allocation(STEP | {"SLURM_STEP_NUM_TASKS": "4"})


@pytest.mark.parametrize(
    ("environ", "is_rank"),
    [
        ({}, False),
        ({"PMI_RANK": "0"}, True),
        (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, True),
        # Shells to start jobs from: of srun --pty, of salloc, and a batch script.
        (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, False),
        (SALLOC, False),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False),
        # mpirun in a job of Slurm: its daemons are a step with a process for each host.
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "4"}, True),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "4", "PMI_RANK": "1"}, True),
        # The same from the shell of salloc, and a launcher of PMIx that is no library's own.
        (SALLOC | {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, True),
        (SALLOC | {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-n1-7@1"}, True),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "FLUX_TASK_RANK": "0"}, True),
    ],
)
def test_a_rank_is_told_from_a_shell_of_the_batch_system(environ, is_rank):
    assert (launcher_variable(environ) is not None) == is_rank


def test_pbs_lists_a_host_for_each_rank(tmp_path):
    file = tmp_path / "nodes"
    file.write_text("n1\nn1\nn2\n")
    assert read_allocation({"PBS_NODEFILE": str(file)}) == BatchAllocation("pbs", 3, 2)
    with pytest.raises(LaunchError, match="absent"):
        read_allocation({"PBS_NODEFILE": str(tmp_path / "absent")})


ROOT_SETTINGS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
CROWDED = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
CROWDED_IN_4 = {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}


def threads(number):
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(number)) | {"PYTHONHASHSEED": "0"}


@pytest.mark.parametrize(
    ("library", "ranks", "cores", "more", "expected"),
    [
        ("mpich", 2, 8, {}, threads(4)),
        ("mpich", 9, 8, {}, threads(1)),
        ("openmpi", 2, 8, {}, threads(4)),
        ("openmpi", 3, 8, {}, threads(2)),
        # Open MPI counts cores, of which there may be half as many as the system says.
        ("openmpi", 5, 8, {}, CROWDED | threads(1)),
        ("openmpi", 9, 8, {}, CROWDED | YIELD | threads(1)),
        ("openmpi", 5, 8, {"version": (4, 1, 4)}, CROWDED_IN_4 | threads(1)),
        # Too many ranks for what a batch system gave are a mistake that Open MPI shall tell.
        ("openmpi", 9, 8, {"is_allocated": True}, YIELD | threads(1)),
        ("openmpi", 8, 8, {"hosts": 4}, threads(4)),
        ("openmpi", 2, 8, {"cores_per_rank": 1}, threads(1)),
        ("mpich", 2, 2, {"replicas": 6}, threads(1) | {"MPI_REPLICA_NUM_REPLICAS": "6"}),
        ("mpich", 2, 2, {"spares": 1}, threads(1) | {"MPI_REPLICA_SPARES": "1"}),
        ("srun", 4, 2, {"cores_per_rank": 3}, threads(3)),
    ],
)
def test_each_library_gets_the_settings_that_it_needs(library, ranks, cores, more, expected):
    assert settings(library, ranks, Host(cores), {}, **more) == expected
    as_root = settings(library, ranks, Host(cores, is_root=True), {}, **more)
    assert as_root == expected | (ROOT_SETTINGS if library == "openmpi" else {})


def test_what_the_user_has_set_is_left_alone():
    mine = {"OMP_NUM_THREADS": "3", "PYTHONHASHSEED": "5", "MPI_REPLICA_NUM_REPLICAS": "2"}
    mine |= YIELD | ROOT_SETTINGS
    added = settings("openmpi", 4, Host(2, is_root=True), mine)
    assert not added.keys() & mine.keys()
    # What is asked for on the command line is newer.
    assert settings("mpich", 4, Host(2), mine, replicas=8)["MPI_REPLICA_NUM_REPLICAS"] == "8"


def test_threads_of_blas_that_are_asked_for_win_over_cores_and_are_no_fewer_for_a_layout():
    asked = {"MPI_REPLICA_BLAS_THREADS": "3"}
    for ranks in (1, 2, 9):
        assert settings("mpich", ranks, Host(8), asked) == threads(3)
    # Reproducible strategies have 1 unless asked: a number of this layout would change their bits.
    assert not asked.keys() & settings("mpich", 2, Host(8), {}).keys()
    # What the user has set for a library goes on to it.
    mine = {"OMP_NUM_THREADS": "5", "OPENBLAS_NUM_THREADS": "6", "MKL_NUM_THREADS": "7"}
    assert settings("mpich", 2, Host(8), asked | mine) == {"PYTHONHASHSEED": "0"}
    # Which a library would let its own variable win over.
    for cores_per_rank in (None, 2):
        added = settings(
            "mpich", 2, Host(8), {"OMP_NUM_THREADS": "1"}, cores_per_rank=cores_per_rank
        )
        assert {**threads(1), **added} == threads(1)
    # A list, for regions within each other, and what is no number of threads.
    for text, number in (("2,1", 2), ("0", 4), ("many", 4)):
        added = settings("mpich", 2, Host(8), {"OMP_NUM_THREADS": text})
        assert {**threads(number), **added} == threads(number)
    with pytest.raises(LaunchError, match="MPI_REPLICA_BLAS_THREADS='many'"):
        settings("mpich", 2, Host(8), {"MPI_REPLICA_BLAS_THREADS": "many"})


def test_other_hosts_get_the_variables_of_the_job_and_no_others():
    environ = {"HOME": "/", "PYTHONPATH": "a", "MPI_REPLICA_WATCH": "0", "OMPI_MCA_pml": "ob1"}
    names = for_other_hosts({"MPI4PY_LIBMPI": "b", **threads(1)}, environ)
    assert names == sorted(["MPI4PY_LIBMPI", *threads(1), "MPI_REPLICA_WATCH", "PYTHONPATH"])


PROGRAM = ["python", "a.py"]
TWO_HOSTS = [HostSlots("n1", 2), HostSlots("n3", 1)]
ONE_UNKNOWN = [HostSlots("n1", 2), HostSlots("n3")]


@pytest.mark.parametrize(
    ("launcher", "version", "request_", "expected"),
    [
        ("openmpi", (5, 0, 11), {}, "x --bind-to none -n 2"),
        ("openmpi", (5, 0, 11), {"tag": "own"}, "x --output rank --bind-to none -n 2"),
        ("openmpi", (4, 1, 4), {"tag": "marked"}, "x --tag-output --bind-to none -n 2"),
        ("openmpi", (5, 0), {"bind": "socket"}, "x --bind-to package:overload-allowed -n 2"),
        ("openmpi", (4, 1), {"bind": "socket"}, "x --bind-to socket:overload-allowed -n 2"),
        ("openmpi", (5, 0), {"bind": "none"}, "x --bind-to none -n 2"),
        ("openmpi", (5, 0), {"is_elastic": True}, "x --with-ft ulfm --bind-to none -n 2"),
        (
            "openmpi",
            (5, 0),
            {"hostfile": "h", "exported": ["A", "B"]},
            "x --hostfile h --bind-to none -x A -x B -n 2",
        ),
        ("mpich", (5, 0), {}, "x -n 2"),
        ("mpich", (5, 0), {"tag": "own", "bind": "core"}, "x -prepend-rank -bind-to core -n 2"),
        ("mpich", (5, 0), {"tag": "marked"}, f"x -prepend-pattern {MPICH_MARK} -n 2"),
        ("mpich", (5, 0), {"hostfile": "h", "exported": ["A"]}, "x -f h -n 2"),
        # Hosts that are given win over a hostfile, which names one that is lost.
        (
            "openmpi",
            (5, 0),
            {"hostfile": "h", "hosts": TWO_HOSTS},
            "x --host n1:2,n3:1 --bind-to none -n 2",
        ),
        ("openmpi", (4, 1), {"hosts": ONE_UNKNOWN}, "x --host n1:2,n3:* --bind-to none -n 2"),
        ("mpich", (5, 0), {"hostfile": "h", "hosts": TWO_HOSTS}, "x -hosts n1:2,n3:1 -n 2"),
        ("mpich", (5, 0), {"hosts": ONE_UNKNOWN}, "x -hosts n1:2,n3 -n 2"),
    ],
)
def test_each_launcher_is_told_in_its_own_words(launcher, version, request_, expected):
    words = command(launcher, version, "x", Request(2, PROGRAM, **request_))
    assert words == [*expected.split(" "), *PROGRAM]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({}, ""),
        ({"is_in_step": True}, "--overlap"),
        ({"cores_per_task": 6}, "--cpus-per-task=6"),
        ({"bind": "core", "tag": "own"}, "--cpu-bind=cores --label"),
    ],
)
def test_srun_behaves_like_mpirun(request_, expected):
    words = command("srun", (), "srun", Request(4, PROGRAM, mpi_type="pmix_v4", **request_))
    usual = "srun --mpi=pmix_v4 --input=0 --quit-on-interrupt --export=ALL"
    usual += " --kill-on-bad-exit"
    assert words == [*usual.split(), *expected.split(), "-n", "4", *PROGRAM]


@pytest.mark.parametrize(
    ("ranks", "hosts", "expected"),
    [
        (3, TWO_HOSTS, "--nodes=2 --nodelist=n1,n1,n3 --distribution=arbitrary"),
        # It refuses a list with more entries than ranks.
        (2, TWO_HOSTS, "--nodes=1 --nodelist=n1,n1 --distribution=arbitrary"),
        # As many ranks as slots do not say where: it goes by cores.
        (4, TWO_HOSTS, "--nodes=2 --nodelist=n1,n3"),
        (3, ONE_UNKNOWN, "--nodes=2 --nodelist=n1,n3"),
    ],
)
def test_srun_is_told_the_host_of_each_rank_and_waits_for_no_lost_step(ranks, hosts, expected):
    request = Request(ranks, PROGRAM, mpi_type="pmi2", hosts=hosts)
    words = command("srun", (), "srun", request)
    usual = "srun --mpi=pmi2 --input=0 --quit-on-interrupt --export=ALL"
    usual += " --kill-on-bad-exit"
    assert words == [*f"{usual} {expected} --overlap -n {ranks}".split(), *PROGRAM]


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "srun"])
def test_a_host_is_asked_alone_by_its_launcher(launcher):
    words = question(launcher, (5, 0), "x", "n3", PROGRAM)
    assert words[-len(PROGRAM) - 2 :] == ["-n", "1", *PROGRAM]
    assert {"n3:1", "--nodelist=n3"} & set(words)


@pytest.mark.parametrize("version", ["5.0.0", "5.0.11", "6.0.0rc1"])
def test_open_mpi_from_5_on_can_lose_ranks(version):
    check_elastic(Library("openmpi", version))


@pytest.mark.parametrize("library", [Library("openmpi", "4.1.6"), Library("mpich", "5.0.2")])
def test_what_can_not_lose_a_rank_is_told_with_what_to_do(library):
    with pytest.raises(LaunchError, match=rf"(?s){library}.*Open MPI 5.*checkpoints"):
        check_elastic(library)


def test_an_elastic_job_sends_by_what_can_lose_a_rank():
    wanted = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_async_mpi_finalize": "1"}
    assert elastic_settings({}) == elastic_settings({"OMPI_MCA_pml": ""}) == wanted
    assert elastic_settings(wanted | {"OMPI_MCA_async_mpi_finalize": "0"}) == {}
    for other in ("ucx", "^ucx", "cm,ob1"):
        with pytest.raises(LaunchError, match="OMPI_MCA_pml"):
            elastic_settings({"OMPI_MCA_pml": other})


def test_no_module_of_python_is_hidden_by_those_beside_the_script_that_ranks_run():
    """Python puts the folder of a script before its own."""
    script = Path(rank_program([sys.executable, "train.py"])[1])
    beside = {path.stem for path in script.parent.iterdir()}
    assert "rank_program" in beside
    assert not (beside - {"__main__"}) & sys.stdlib_module_names


@pytest.mark.parametrize("flags", ["-u", "-OO", "-W error", "-Werror", "-bX dev", "-X dev -I -u"])
@pytest.mark.parametrize("program", ["train.py -x", "-m train -u", "-c pass", "folder -"])
def test_flags_of_python_stand_before_what_ranks_run(flags, program):
    flags, program = flags.split(), program.split()
    command = [sys.executable, *flags, *program]
    assert is_of_python(command)
    found = rank_program(command)
    place = 1 + len(flags)
    assert found[place].endswith("rank_program.py")
    assert [*found[:place], *found[place + 1 :]] == command


@pytest.mark.parametrize(
    "words", ["", "-u", "-X", "-", "-m", "-V", "-i train.py", "-x train.py", "-um a"]
)
def test_python_without_a_script_and_flags_that_change_what_it_runs_are_other_programs(words):
    assert not is_of_python([sys.executable, *words.split()])
    assert not is_of_python(["python", "-u", "train.py"])  # another one, for all we know


def test_python_by_another_name_is_the_same_only_in_its_own_environment(tmp_path):
    here, elsewhere = (tmp_path / name for name in ("here", "elsewhere"))
    for folder in (here, elsewhere):
        folder.mkdir()
        for name in ("python", "python3"):
            (folder / name).symlink_to(sys.executable)
    (here / "other").write_text("#!/bin/sh\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", str(here / "python"))
        patched.chdir(tmp_path)
        for name in ("here/python", "here/python3", "./here/../here/python3"):
            assert is_of_python([name, "train.py"])
        for name in ("here/other", "here/absent", "elsewhere/python", "elsewhere/python3"):
            assert not is_of_python([name, "train.py"])


def test_the_line_for_a_shell_is_quoted():
    line = shell_line({"A": "b c"}, ["x", "-n", "2", "it's"], 1.5)
    assert line == "A='b c' timeout --kill-after=10 1.5 x -n 2 'it'\"'\"'s'"


def test_a_program_is_found_before_it_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text("")
    (tmp_path / "simulate").write_text("#!/bin/sh\n")
    (tmp_path / "simulate").chmod(0o755)
    python = sys.executable
    for words, expected in [
        (["train.py", "-n", "3"], [python, "train.py", "-n", "3"]),
        (["-m", "json.tool", "-h"], [python, "-m", "json.tool", "-h"]),
        (["-m", "unittest", "-h"], [python, "-m", "unittest", "-h"]),
        (["-c", "pass"], [python, "-c", "pass"]),
        (["pack"], [python, "pack"]),
        (["simulate", "a"], ["./simulate", "a"]),
        (["./simulate"], ["./simulate"]),
        (["sh", "-c", "true"], [shutil.which("sh"), "-c", "true"]),
    ]:
        found = program_command(words)
        assert found == expected or (found[1:] == expected[1:] and found[0].endswith("/sh"))
    for words in (["absent.py"], ["./absent"], ["folder"], ["-m", "json.absent"], ["-m", "absent"]):
        with pytest.raises(LaunchError, match=words[-1].strip("./")):
            program_command(words)


@pytest.mark.parametrize("name", ["email", "xml.dom"])
def test_a_package_that_is_no_program_is_told_before_ranks_are_started(name):
    with pytest.raises(LaunchError, match=f"the package '{name}' has no __main__.py"):
        program_command(["-m", name])


def test_a_script_behind_python_is_looked_for_before_ranks_are_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.pyc").write_text("")
    os.mkfifo(tmp_path / "pipe")
    python = sys.executable
    for words in (["train.py"], ["-u", "train.py"], ["pack"], ["pipe"], ["-c", "pass"], ["-"]):
        assert program_command([python, *words]) == [python, *words]
    for words in (["absent.py", "-x"], ["-uW", "error", "absent.py"], ["folder"], ["folder/a.py"]):
        name = next(word for word in words if word.startswith(("absent", "folder")))
        with pytest.raises(LaunchError, match=name):
            program_command([python, *words])


def test_a_script_that_can_not_be_read_is_told_before_ranks_are_started(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    script.chmod(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    if user == 0:  # who may read all
        os.seteuid(65534)
    try:
        with pytest.raises(LaunchError, match=r"can't read the script 'train.py'.*denied"):
            program_command(["train.py"])
    finally:
        os.seteuid(user)


def test_a_rank_whose_host_lacks_the_script_ends_as_python_does(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("absent.py", "folder"):
        command = [sys.executable, name]
        wanted, found = (
            subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
            for words in (command, rank_program(command))
        )
        assert found.returncode == wanted.returncode
        assert "__main__" in found.stderr if name == "folder" else found.stderr == wanted.stderr
        assert found.stderr.count("\n") == 1


def test_a_module_is_looked_for_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "starts_mpi"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "train.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert program_command(["-m", "starts_mpi.train"])[1:] == ["-m", "starts_mpi.train"]


MARKS = {
    "openmpi": lambda rank: b"[%d]<stdout>: " % rank,
    "mpich": lambda rank: MPICH_MARK.replace("%r", str(rank)).encode(),
    "srun": lambda rank: b"%d: " % rank,
}
LINES = st.lists(
    st.tuples(st.integers(0, 12), st.text("ab[]<>: 1\x1b", max_size=6).map(str.encode)), max_size=8
)


@pytest.mark.parametrize("launcher", MARKS)
@given(lines=LINES, cuts=st.lists(st.integers(0, 200)))
def test_tags_look_the_same_wherever_the_output_is_cut(launcher, lines, cuts):
    text = b"".join(MARKS[launcher](rank) + line + b"\n" for rank, line in lines)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    tags = Tags(launcher)
    told = [tags.feed(text[a:b]) for a, b in itertools.pairwise(ends)] + [tags.end()]
    assert b"".join(told) == b"".join(b"[%d] %s\n" % line for line in lines)


def test_lines_that_a_launcher_has_mixed_are_put_together():
    mark = MARKS["mpich"]
    tags = Tags("mpich")
    text = mark(0) + b"hel" + mark(1) + b"one" + mark(0) + b"lo\n" + mark(1) + b"!\nits own\n"
    assert tags.feed(text) == b"[0] hello\n[1] one!\nits own\n"
    assert tags.feed(mark(0) + b"no end" + mark(1) + b"10 %\r20 %") == b"[1] 10 %\r"
    assert tags.end() == b"[0] no end\n[1] 20 %\n"


def test_a_status_that_equals_the_signal_of_another_text_stays():
    notice = DeathNotice()
    notice.feed(b"a program prints (signal 9)\n")
    assert notice.status(9) == 9


@given(cut=st.integers(0, 200))
def test_a_daemon_that_is_lost_is_noticed_wherever_the_output_is_cut(cut):
    text = (
        b"----\nRTE has lost communication with a remote daemon.\n\n  HNP daemon   : [prterun-0]\n"
    )
    notice = DeathNotice()
    notice.feed(b"a program prints lost communication\n")
    assert not notice.has_lost_daemon
    notice.feed(text[:cut])
    notice.feed(text[cut:])
    assert notice.has_lost_daemon


@pytest.mark.parametrize("command", ["run", "doctor", "trace job.json"])
def test_an_option_that_a_command_does_not_have_is_told_with_the_usage_of_that(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), "--foo"])
    told = capsys.readouterr().err
    assert f"usage: python -m mpi_replica {command.split()[0]} " in told
    assert "unrecognized arguments: --foo" in told
