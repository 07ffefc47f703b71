"""What killed jobs leave on a host is removed, and nothing that somebody may still need."""

import contextlib
import inspect
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import LIBRARIES, ROOT, find_interpreter, find_launcher, rank_environment, room_for
from mpi_replica.launcher import leftovers
from mpi_replica.launcher.leftovers import ANSWER, remove_leftovers
from mpi_replica.launcher.program import leftovers_program

pytestmark = [
    pytest.mark.mpi_skip,  # it starts ranks itself
    pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="there is no /proc"),
]

FOLDER = Path("/dev/shm")
HOST = os.uname().nodename
SEGMENTS = [
    "sm_segment.{host}.0.{random}.1",
    "vader_segment.{host}.0.{random}.1",
    "osc_sm.{host}.{random}.0.4",
    "osc_rdma.{host}.{random}.4.0",
    "mpich_shm_{random}_0",
    "mpich_shar_tmp{random:.6}",
    "ucx_shm_posix_{random}",
]

# Makes a file, as the MPI libraries do, and ends with its standard input.
MAKER = """
import mmap, os, sys
path, way = sys.argv[1:]
file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
if way == "mapped":
    memory = mmap.mmap(file, 4096)
    os.close(file)
elif way == "as working directory":
    os.chdir(os.path.dirname(path))
    os.close(file)
print("made", flush=True)
sys.stdin.read()
"""

# Follows the text of the file under test.
BESIDE_A_HIDDEN_PROCESS = """
import subprocess, sys
path = sys.argv[1]
open(path, "w").close()
since = os.stat(path).st_mtime
hide = "import ctypes, sys; ctypes.CDLL(None).prctl(4, 0); print(flush=True); sys.stdin.read()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
with subprocess.Popen([sys.executable, "-c", hide], **pipes) as process:
    process.stdout.readline()
    remove_leftovers(since)
    print(os.path.exists(path))
    process.stdin.close()
remove_leftovers(since)
print(os.path.exists(path))
"""

# Other jobs of this machine can't be seen from there, but in /tmp, where they name another host.
ALONE = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
ALONE += ["sh", "-c", 'hostname alone && mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]

RANK = """
import os, signal
from mpi4py import MPI
window = MPI.Win.Allocate_shared(1 << 16, 1, comm=MPI.COMM_WORLD)
MPI.COMM_WORLD.Barrier()
os.write(1, f"{os.getpid()}\\n".encode())
signal.pause()
"""

# Starts MPI when the launcher is gone.
LATE_RANK = """
import os, signal, time
launcher = os.getppid()
os.write(1, f"{os.getpid()}\\n".encode())
while os.getppid() == launcher:
    time.sleep(0.01)
from mpi4py import MPI
os.kill(os.getpid(), signal.SIGKILL)
"""

# Kills a part of a job, and when that has had its effect all the rest, as the launcher does it.
KILLED_JOB = """
import contextlib, glob, os, signal, subprocess, sys, time
from mpi_replica.launcher.leftovers import remove_leftovers
from mpi_replica.launcher.processes import descendants

def kill(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

def left():
    found = os.listdir("/dev/shm") + os.listdir(os.environ["TMPDIR"])
    for path in glob.glob("/tmp/hydra_hwloc_xmlfile_*"):
        with contextlib.suppress(FileNotFoundError), open(path) as file:  # another job may end now
            text = file.read()
            if '"HostName" value="alone"' in text:
                found.append(text)
    return found

who, *command = sys.argv[1:]
since = time.time()
launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
ranks = [int(launcher.stdout.readline()) for _ in range(2)]
if who == "all":
    kill(descendants(os.getpid()))
else:
    kill(ranks[:1] if who == "a rank" else [launcher.pid])
launcher.wait()
if who == "the launcher, before MPI has started":
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
while processes := descendants(os.getpid()):
    kill(processes)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)
print([text[:40] for text in left()])
remove_leftovers(since)
print([text[:40] for text in left()])
"""


@pytest.fixture
def since():
    """When the test began: what older jobs have left on this machine is not its business."""
    return time.time() - 0.1  # the clock of files is some milliseconds behind


@pytest.fixture
def segment():
    """A function that returns the path of a segment; nothing is there after the test."""
    paths = []

    def path_of(pattern="mpich_shm_{random}_0", host=HOST):
        paths.append(FOLDER / pattern.format(host=host, random=secrets.token_hex(4)))
        return paths[-1]

    yield path_of
    for path in paths:
        path.unlink(missing_ok=True)


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A function that makes the folder of a session, and returns its path."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def folder_of(pid, host=HOST, helper="ompi"):
        folder = tmp_path / f"{helper}.{pid}"
        (folder / "1" / "0").mkdir(parents=True)
        (folder / "hwloc.sm").touch()
        (folder / f"pmix.{host}.tool.{pid}").touch()
        return folder

    return folder_of


@contextlib.contextmanager
def living(*command):
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "made\n"
        yield process


def number_of_the_dead():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def require_namespaces():
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make namespaces")


@pytest.mark.parametrize("pattern", SEGMENTS)
def test_a_segment_that_nobody_holds_is_removed(segment, pattern, since):
    path = segment(pattern)
    path.touch()
    remove_leftovers(since)
    assert not path.exists()


@pytest.mark.parametrize("way", ["open", "mapped"])
@pytest.mark.parametrize("pattern", SEGMENTS)
def test_a_segment_stays_until_the_process_that_holds_it_is_dead(segment, pattern, way, since):
    path = segment(pattern)
    with living(sys.executable, "-c", MAKER, str(path), way) as maker:
        assert str(path) not in remove_leftovers(since)
        assert path.exists()
        maker.kill()
        maker.wait()
        remove_leftovers(since)
        assert not path.exists()


def test_what_is_older_than_the_job_stays(segment, session, since):
    file, folder = segment(), session(number_of_the_dead())
    file.touch()
    for path in (file, folder):
        os.utime(path, (since - 1, since - 1))
    remove_leftovers(since)
    assert file.exists()
    assert folder.exists()
    for path in (file, folder):
        os.utime(path, (since + 0.05, since + 0.05))
    remove_leftovers(since)
    assert not file.exists()
    assert not folder.exists()


def test_what_names_another_host_stays(segment, session, since):
    paths = [segment("sm_segment.{host}.0.{random}.1", "elsewhere")]
    paths[0].touch()
    number = number_of_the_dead()
    paths += [session(number, "elsewhere"), session(number, helper="prted")]
    (paths[-1] / "pmix.elsewhere.tool.7").touch()  # two hosts share a folder of one name
    remove_leftovers(since)
    assert all(path.exists() for path in paths)


def test_what_the_libraries_did_not_make_stays(segment, session, tmp_path, since):
    file, link = segment("{random}"), segment()
    folder = segment()
    file.touch()
    link.symlink_to(file)
    folder.mkdir()
    others = [tmp_path / "ompi", tmp_path / "ompi.7.1", tmp_path / f"ompi.{HOST}.0"]
    others.append(tmp_path / f"ompi.{number_of_the_dead()}")  # which nothing says is a session
    for other in others:
        other.mkdir()
    remove_leftovers(since)
    assert link.is_symlink()
    assert all(path.exists() for path in (file, folder, *others))
    folder.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_what_belongs_to_another_user_stays(segment, session, since):
    paths = [segment(), session(number_of_the_dead())]
    paths[0].touch()
    for path in paths:
        os.chown(path, 65534, 65534)
    remove_leftovers(since)
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("helper", ["ompi", "prted"])
def test_the_folder_of_a_session_is_removed_when_its_process_is_dead(session, helper, since):
    living_one = session(os.getpid(), helper=helper)
    dead_one = session(number_of_the_dead(), helper=helper)
    assert remove_leftovers(since).count(str(dead_one)) == 1
    assert living_one.exists()
    assert not dead_one.exists()


def test_folders_of_ranks_without_a_launcher_stay_where_their_library_is_loaded(
    tmp_path, monkeypatch, since
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / f"ompi.{HOST}.{os.geteuid()}" / "jf.0" / "7" / "1"
    folder.mkdir(parents=True)
    with living(sys.executable, "-c", MAKER, str(tmp_path / "libopen-pal.so.80"), "mapped"):
        remove_leftovers(since)
    assert folder.exists()


@pytest.mark.parametrize("way", ["open", "mapped", "as working directory"])
def test_the_folder_of_a_session_stays_while_somebody_is_in_it(session, way, since):
    folder = session(number_of_the_dead())
    file = folder / "1" / "0" / "jobdata"
    with living(sys.executable, "-c", MAKER, str(file), way):
        remove_leftovers(since)
        assert file.exists()
    remove_leftovers(since)
    assert not folder.exists()


def test_what_describes_a_host_stays_while_a_launcher_of_mpich_lives(tmp_path, monkeypatch, since):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = tmp_path / "hydra_hwloc_xmlfile_AbCdEf"
    file.write_text(f'<info name="HostName" value="{HOST}"/>')
    launcher = shutil.copy(shutil.which("cat"), tmp_path / "hydra_pmi_proxy")
    with subprocess.Popen([launcher], stdin=subprocess.PIPE) as process:
        remove_leftovers(since)
        process.stdin.close()
    assert file.exists()


def test_as_a_script_it_answers_and_does_not_count_the_launcher_that_waits_for_that(tmp_path):
    require_namespaces()
    launcher = shutil.copy(shutil.which("sh"), tmp_path / "hydra_pmi_proxy")
    file = tmp_path / "hydra_hwloc_xmlfile_AbCdEf"
    file.write_text('<info name="HostName" value="alone"/>')
    program = shlex.join([*leftovers_program(), str(os.stat(file).st_mtime)])
    done = subprocess.run(
        [*ALONE, launcher, "-c", f"{program}; exit"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"{ANSWER}\n", "")
    assert not file.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start another user's processes")
def test_all_stays_while_a_process_of_the_user_may_not_be_looked_into(segment):
    path = segment()
    functions = inspect.getsource(leftovers).partition("\nif __name__")[0]
    python = shutil.which("python3", path=os.defpath) or sys.executable
    command = [python, "-c", functions + BESIDE_A_HIDDEN_PROCESS, path]
    settings = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **settings)
    except PermissionError:
        pytest.skip(f"another user may not run {python}")
    assert (done.stdout, done.stderr) == ("True\nFalse\n", "")


BEFORE_MPI = "the launcher, before MPI has started"


@pytest.mark.parametrize("who", ["a rank", "the launcher", BEFORE_MPI, "all"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_is_left_of_a_killed_job(library, who, tmp_path):
    require_namespaces()
    python = find_interpreter(library)
    job = [find_launcher(python), "-n", "2", python, "-c", LATE_RANK if who == BEFORE_MPI else RANK]
    environment = rank_environment(60, {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)})
    command = [*ALONE, sys.executable, "-c", KILLED_JOB, who, *job]
    with room_for(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=90)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    if (library, who) != ("mpich", BEFORE_MPI):  # it makes nothing then
        assert before != "[]" or who == "a rank"  # Open MPI then removes all of it
    assert after == "[]"
