"""Batch scripts for Slurm, PBS and Kubernetes: each runs to its end, on stand-ins for a cluster."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launching import (
    LIBRARIES,
    RANKS,
    ROOT,
    find_interpreter,
    find_launcher,
    rank_environment,
)
from mpi_replica.ranks.launch import launcher_variable

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

SCRIPTS = ROOT / "scripts"
RANK_COUNT = min(2, max(RANKS))

PROGRAM = ROOT / "tests" / "goes_on.py"
WENT_ON = f"went on {RANK_COUNT} 1 0\n"


class Cluster:
    """A folder from which a user submits, and commands that stand in for those of a cluster."""

    def __init__(self, folder):
        self.submitted = folder / "submitted"
        self.commands = self.submitted / ".venv" / "bin"
        self.commands.mkdir(parents=True)
        self.calls = folder / "calls"
        self.kept = folder / "kept"

    def command(self, name, body=""):
        """Have a command do something else; what it is called with is kept."""
        record = f'echo "{name} $*" >>{self.calls}'
        (self.commands / name).write_text(f"#!/usr/bin/env bash\n{record}\n{body}\n")
        (self.commands / name).chmod(0o755)

    def install(self, library):
        """Have the Python and the mpiexec of a library."""
        python = find_interpreter(library)
        for name, target in (("python", python), ("mpiexec", find_launcher(python))):
            (self.commands / name).write_text(f'#!/usr/bin/env bash\nexec {target} "$@"\n')
            (self.commands / name).chmod(0o755)

    def run(self, script, *arguments, meanwhile=None, **variables):
        """Run a batch script; return its status, its output, and the calls of commands."""
        self.calls.write_text("")
        paths = {"PYTHONPATH": ROOT, "PBS_O_WORKDIR": self.submitted}
        variables = {name: str(value) for name, value in (paths | variables).items()}
        with subprocess.Popen(
            ["bash", SCRIPTS / script, *map(str, arguments)],
            cwd=self.submitted,
            env=rank_environment(60, variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            try:
                if meanwhile is not None:
                    meanwhile(job)
                out, self.errors = job.communicate(timeout=90)
            finally:
                job.terminate()
        return job.returncode, out, self.calls.read_text().splitlines()


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


SLURM = {"SLURM_JOB_ID": 4711, "SLURM_NTASKS": RANK_COUNT, "SLURM_CPUS_PER_TASK": 1}


def test_a_slurm_job_whose_rank_gets_a_signal_is_requeued_and_goes_on(cluster):
    cluster.install(LIBRARIES[0])
    # What follows srun's own options is what each rank runs.
    options = 'while [[ $1 == --* ]]; do shift; done\nexec mpiexec -n "$SLURM_NTASKS" "$@"'
    cluster.command("srun", options)
    cluster.command("scontrol")
    job = ["slurm.sbatch", PROGRAM, cluster.kept, "rank"]

    status, out, calls = cluster.run(*job, **SLURM)
    assert (status, out) == (0, ""), cluster.errors
    assert calls[1:] == ["scontrol requeue 4711"]

    status, out, calls = cluster.run(*job, **SLURM)
    assert (status, out) == (0, WENT_ON), cluster.errors
    assert len(calls) == 1


@pytest.mark.parametrize("ended", [0, 1, 137])
def test_a_slurm_job_that_ends_in_another_way_is_not_requeued(cluster, ended):
    cluster.command("srun", f"exit {ended}")
    cluster.command("scontrol")
    status, _, calls = cluster.run("slurm.sbatch", "a.py", "--flag", **SLURM)
    assert status == ended
    (call,) = calls
    assert call.startswith("srun --mpi=pmix --cpus-per-task=1 ")
    assert call.endswith(" python a.py --flag")


def test_a_slurm_job_that_can_not_be_requeued_fails(cluster):
    cluster.command("srun", "exit 75")
    cluster.command("scontrol", "exit 2")
    assert cluster.run("slurm.sbatch", "a.py", **SLURM)[0] == 2


def options_of(script, mark):
    """Return what a batch system reads at the top of a script, before its first command."""
    head, _, _ = (SCRIPTS / script).read_text().partition("\nset ")
    return re.findall(rf"^#{mark} (\S.*)$", head, re.MULTILINE)


def seconds(text):
    hours, minutes, rest = map(int, text.split(":"))
    return 3600 * hours + 60 * minutes + rest


def test_slurm_signals_the_ranks_before_the_time_limit_and_may_requeue():
    options = dict(
        text.removeprefix("--").partition("=")[::2] for text in options_of("slurm.sbatch", "SBATCH")
    )
    name, _, before = options["signal"].partition("@")  # with B: the script alone would get it
    assert getattr(signal, f"SIG{name}") == signal.SIGUSR1
    assert 60 < int(before) < seconds(options["time"])
    assert "requeue" in options
    assert options["open-mode"] == "append"  # what was printed before is kept
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) == 8


@pytest.fixture
def hosts(tmp_path):
    """Return a file as PBS writes it: the host of each rank."""
    file = tmp_path / "hosts"
    file.write_text("localhost\n" * RANK_COUNT)
    return file


def signal_timeout(job):
    """Send the signal that `timeout` sends later on; to it, which passes it on at once."""
    assert job.stdout.readline() == "waits for a signal\n"
    (child,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    assert Path(f"/proc/{child}/comm").read_text() == "timeout\n"
    os.kill(int(child), signal.SIGUSR1)


def test_a_pbs_job_that_gets_a_signal_is_submitted_again_and_goes_on(cluster, hosts):
    cluster.install(LIBRARIES[-1])
    cluster.command("qsub")
    given = {"PROGRAM": f"{PROGRAM} {cluster.kept} timeout", "PBS_NODEFILE": hosts}

    status, out, calls = cluster.run("pbs.sh", meanwhile=signal_timeout, **given)
    assert (status, out) == (0, ""), cluster.errors
    assert calls == ["qsub -v PROGRAM scripts/pbs.sh"]

    status, out, calls = cluster.run("pbs.sh", **given)
    assert (status, out) == (0, WENT_ON), cluster.errors
    assert calls == []


@pytest.mark.parametrize("ended", [0, 1, 137])
def test_a_pbs_job_that_ends_in_another_way_is_not_submitted_again(cluster, hosts, ended):
    cluster.command("mpiexec", f"exit {ended}")
    cluster.command("qsub")
    status, _, calls = cluster.run("pbs.sh", PROGRAM="a.py --flag", PBS_NODEFILE=hosts)
    assert status == ended
    (call,) = calls
    assert call.startswith(f"mpiexec -n {RANK_COUNT} -hostfile {hosts} env OMP_NUM_THREADS=1 ")
    assert call.endswith(" python a.py --flag")


def test_a_pbs_job_that_can_not_be_submitted_again_fails(cluster, hosts):
    cluster.command("mpiexec", "exit 75")
    cluster.command("qsub", "exit 3")
    assert cluster.run("pbs.sh", PROGRAM="a.py", PBS_NODEFILE=hosts)[0] == 3


def test_a_pbs_job_without_a_program_says_what_is_missing(cluster, hosts):
    cluster.command("mpiexec")
    status, _, calls = cluster.run("pbs.sh", PBS_NODEFILE=hosts)
    assert status != 0
    assert calls == []
    assert "PROGRAM: is not set" in cluster.errors


def test_pbs_signals_before_the_walltime():
    options = options_of("pbs.sh", "PBS")
    (walltime,) = [text.partition("walltime=")[2] for text in options if "walltime=" in text]
    (after,) = re.findall(r"SAVE_AFTER_SECONDS:-(\d+)", (SCRIPTS / "pbs.sh").read_text())
    assert 60 < seconds(walltime) - int(after) < 600
    assert "-r y" in options


def test_the_kubernetes_job_restores_after_it_was_stopped():
    """Fields of MPIJob in kubeflow.org/v2beta1."""
    job = yaml.safe_load((SCRIPTS / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert spec["sshAuthMountPath"] == "/home/mpiuser/.ssh"
    assert spec["runPolicy"]["backoffLimit"] > 1
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    assert launcher["replicas"] == 1
    assert launcher["restartPolicy"] == "OnFailure"  # status 75 starts it again

    pod = launcher["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 30
    (container,) = pod["containers"]
    arguments = container["args"]
    assert "command" not in container  # the image's entry point runs
    assert arguments[:4] == ["launch", "mpirun", "--hostfile", "/etc/mpi/hostfile"]
    ranks = int(arguments[arguments.index("-n") + 1])
    assert ranks == spec["slotsPerWorker"] * worker["replicas"]
    assert "OMP_NUM_THREADS=1" in arguments
    script = Path(arguments[arguments.index("python") + 1])
    assert (ROOT / script.relative_to("/opt/mpi_replica")).is_file()
    (kept,) = [text for text in arguments if text.startswith("--checkpoint-dir=")]

    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == ["worker"]
    assert container["readinessProbe"]["tcpSocket"]["port"] == 2222
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert str(Path(kept.partition("=")[2]).parent) in mounts
    for role in (launcher, worker):
        (container,) = role["template"]["spec"]["containers"]
        assert container["securityContext"]["runAsUser"] == 1000


# What Slurm and PBS set: in a step that srun has started, and in the script of a job.
SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
}
LAUNCHED = [
    SLURM_STEP | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"},  # --mpi=pmix
    SLURM_STEP | {"PMI_RANK": "1", "PMI_SIZE": "4"},  # --mpi=pmi2
    SLURM_STEP,  # --mpi=none
    {"PBS_NODEFILE": "/var/spool/pbs/aux/7", "PMI_RANK": "1", "PMI_SIZE": "4"},  # mpiexec in PBS
]
NOT_LAUNCHED = [
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    {"PBS_JOBID": "7", "PBS_NODEFILE": "/var/spool/pbs/aux/7", "PBS_NUM_PPN": "4"},
]


def test_ranks_that_a_batch_system_has_started_are_told_from_its_script():
    assert all(launcher_variable(variables) for variables in LAUNCHED)
    assert not any(launcher_variable(variables) for variables in NOT_LAUNCHED)


@pytest.mark.parametrize("variables", LAUNCHED[1:3])
def test_srun_of_a_type_that_the_library_does_not_speak_is_a_launch_error(variables):
    """Four processes, each of which sees a world of one, would do the same work four times."""
    python = find_interpreter("openmpi")
    done = subprocess.run(
        [python, "-c", "import mpi_replica as mr; mr.MPIStrategy()"],
        env=rank_environment(60, {"PYTHONPATH": str(ROOT)} | variables),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "LaunchError: 4 processes were started" in done.stderr
    assert "srun --mpi=list" in done.stderr


def test_a_batch_script_without_a_launcher_is_one_process():
    program = "import mpi_replica as mr; print(mr.MPIStrategy().size)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=rank_environment(60, {"PYTHONPATH": str(ROOT)} | NOT_LAUNCHED[0] | NOT_LAUNCHED[1]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "1\n", done.stderr
