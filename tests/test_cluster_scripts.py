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
LOSING = ROOT / "tests" / "losing" / "once.py"
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


# It tells which types of MPI it speaks; else the library's launcher starts what follows -n. A host
# whose name is in the file "silent" can't be reached. What watches the first host is started where
# the file "watched" is there.
SRUN = """
[[ $1 == --mpi=list ]] && exec echo "MPI plugin types are... none pmix pmi2" >&2
for word; do
    [[ $word == --nodelist=* ]] && nodes=${word#*=}
done
for node in $(cat silent 2>/dev/null); do
    if [[ ,${nodes-$node}, == *,$node,* ]]; then
        echo "srun: error: Unable to contact $node" >&2
        exit 1
    fi
done
if [[ $* == *--no-kill* ]]; then
    [[ -e watched ]] || exit 0
    while [[ $1 == --* ]]; do shift; done
    exec "$@"
fi
is_question=$([[ $1 == --mpi=none ]] && echo yes)
while [[ $1 != -n ]]; do shift; done
[[ $is_question ]] && exec "${@:3}"
exec mpiexec "$@"
"""
SCONTROL = """
[[ $* == "show hostnames node[1-2]" ]] && printf 'node1\\nnode2\\n'
[[ $* == "show hostnames node2" ]] && echo node2
[[ $1 != requeue || ! -e watched ]] || kill "$PPID"
"""
SLURM = {"SLURM_JOB_ID": 4711, "SLURM_NTASKS": RANK_COUNT, "SLURM_CPUS_PER_TASK": 1}
TWO_HOSTS = SLURM | {"SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "node[1-2]"}
TWO_HOSTS |= {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": 2, "SLURMD_NODENAME": "node1"}


@pytest.fixture
def slurm(cluster):
    cluster.install(LIBRARIES[0])
    cluster.command("srun", SRUN)
    cluster.command("scontrol", SCONTROL)
    return cluster


def starts(calls):
    """Return the calls of srun that start ranks."""
    return [call for call in calls if re.match("srun --mpi=(pmix|pmi2) ", call)]


@pytest.mark.parametrize("who", ["rank", "script"])
def test_a_slurm_job_that_gets_a_signal_is_requeued_and_goes_on(slurm, who):
    def signal_script(job):
        assert job.stdout.readline() == "waits for a signal\n"
        job.send_signal(signal.SIGUSR1)

    job = ["slurm.sbatch", PROGRAM, slurm.kept, who]
    meanwhile = signal_script if who == "script" else None
    status, out, calls = slurm.run(*job, **SLURM, meanwhile=meanwhile)
    assert (status, out) == (0, ""), slurm.errors
    assert calls[-1] == "scontrol requeue 4711"
    (call,) = starts(calls)
    assert " --kill-on-bad-exit=0 " in call
    assert f" --cpus-per-task=1 -n {RANK_COUNT} " in call

    status, out, calls = slurm.run(*job, **SLURM)
    assert (status, out) == (0, WENT_ON), slurm.errors
    assert len(starts(calls)) == 1
    assert "scontrol requeue 4711" not in calls


@pytest.mark.skipif(RANK_COUNT < 2, reason="MPI_REPLICA_RANKS allows one rank")
@pytest.mark.parametrize(("silent", "left"), [("", 2), ("node2\n", 1)])
def test_a_slurm_job_that_loses_a_rank_goes_on_by_the_nodes_that_answer(slurm, silent, left):
    job = ["slurm.sbatch", LOSING]
    status, undisturbed, _ = slurm.run(*job, slurm.submitted / "undisturbed", **TWO_HOSTS)
    assert (status, undisturbed[:15]) == (0, "2 of 2 ranks: [")

    status, out, calls = slurm.run(
        *job, slurm.kept, slurm.submitted / "silent", silent, **TWO_HOSTS
    )
    assert (status, out) == (0, undisturbed.replace("2", str(left), 1)), slurm.errors
    first, second = starts(calls)
    assert "--nodelist" not in first
    assert ("--nodes=1 --nodelist=node1 " in second) == (left == 1)
    assert ("node2 left out" in slurm.errors) == (left == 1)
    assert "scontrol requeue 4711" not in calls


@pytest.mark.skipif(RANK_COUNT < 2, reason="MPI_REPLICA_RANKS allows one rank")
def test_a_slurm_job_that_gets_its_signal_while_it_is_started_again_is_requeued(slurm):
    """There are no ranks that could save: what there is was saved before."""

    def signal_script(job):
        for line in job.stderr:
            if "Start 2 of at most 4 follows" in line:
                job.send_signal(signal.SIGUSR1)
                break

    job = ["slurm.sbatch", LOSING, slurm.kept, slurm.submitted / "mark"]
    status, _, calls = slurm.run(*job, **SLURM, meanwhile=signal_script)
    assert status == 0, slurm.errors
    assert calls[-1] == "scontrol requeue 4711"
    assert len(starts(calls)) == 1


def test_a_slurm_job_that_has_lost_its_first_node_is_requeued_by_another_one(slurm):
    """Slurm 22.05 takes such a node out of the job, and lets the job go on without its script."""
    slurm.command("sleep", "exec /bin/sleep 0.1")
    # At first Slurm does not answer, then all nodes are there.
    slurm.command(
        "squeue",
        """
        echo >>asked
        case $(wc -l <asked) in 1) exit 1 ;; 2) echo "node[1-2]" ;; *) echo node2 ;; esac
        """,
    )
    (slurm.submitted / "watched").touch()
    status, _, calls = slurm.run("slurm.sbatch", "-c", "import time; time.sleep(5)", **TWO_HOSTS)
    assert status == 0, slurm.errors
    (watch,) = [call for call in calls if " --no-kill " in call]
    assert " --overlap " in watch
    assert " --exclude=node1 --nodes=1 --ntasks=1 " in watch
    assert calls.count("squeue --noheader --jobs=4711 --format=%N") == 3
    assert calls.count("scontrol requeue 4711") == 1


@pytest.mark.parametrize("ended", ["sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_slurm_job_that_ends_in_another_way_is_not_requeued(slurm, ended):
    one = SLURM | {"SLURM_NTASKS": 1}
    status, _, calls = slurm.run("slurm.sbatch", "-c", f"import os, sys; {ended}", **one)
    is_killed = "kill" in ended
    assert status == (137 if is_killed else 3), slurm.errors
    assert len(starts(calls)) == (3 if is_killed else 1)  # three quick deaths are enough
    assert "scontrol requeue 4711" not in calls


def test_a_slurm_job_that_can_not_be_requeued_fails(slurm):
    slurm.command("scontrol", "exit 2")
    saved = SLURM | {"SLURM_NTASKS": 1}
    assert slurm.run("slurm.sbatch", "-c", "import sys; sys.exit(75)", **saved)[0] == 2


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
    name, _, before = options["signal"].partition("@")
    assert name == "B:USR1"  # to the script, which also has ranks that are started by mpiexec
    assert "no-kill" in options
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


@pytest.mark.parametrize("ended", ["sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_pbs_job_that_ends_in_another_way_is_not_submitted_again(cluster, hosts, ended):
    cluster.install(LIBRARIES[-1])
    cluster.command("qsub")
    (cluster.submitted / "a.py").write_text(f"import os, sys\nprint('starts')\n{ended}\n")
    hosts.write_text("localhost\n")
    status, _, calls = cluster.run("pbs.sh", PROGRAM="a.py --flag", PBS_NODEFILE=hosts)
    assert status == (137 if "kill" in ended else 3), cluster.errors
    assert calls == []


@pytest.mark.skipif(RANK_COUNT < 2, reason="MPI_REPLICA_RANKS allows one rank")
def test_a_pbs_job_that_loses_a_rank_goes_on(cluster, hosts):
    cluster.install(LIBRARIES[-1])
    cluster.command("qsub")
    outs = []
    for words in ("undisturbed", f"lost {cluster.submitted / 'mark'}"):
        given = {"PROGRAM": f"{LOSING} {words}", "PBS_NODEFILE": hosts}
        status, out, calls = cluster.run("pbs.sh", **given)
        assert (status, calls) == (0, []), cluster.errors
        outs.append(out)
    assert outs[0].startswith("2 of 2 ranks: [")
    assert outs[1].endswith(outs[0])  # MPICH's launcher tells of the loss before
    assert "Start 2 of at most 4" in cluster.errors


def test_a_pbs_job_that_can_not_be_submitted_again_fails(cluster, hosts):
    cluster.install(LIBRARIES[-1])
    cluster.command("qsub", "exit 3")
    (cluster.submitted / "a.py").write_text("import sys\nsys.exit(75)\n")
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
    assert {"-r y", "-W tolerate_node_failures=all"} <= set(options)


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
    assert arguments[:5] == ["launch", "python", "-m", "mpi_replica", "run"]
    assert {"--hostfile=/etc/mpi/hostfile", "--restarts=3"} <= set(arguments)
    ranks = int(arguments[arguments.index("-n") + 1])
    assert ranks == spec["slotsPerWorker"] * worker["replicas"]
    assert {"name": "OMP_NUM_THREADS", "value": "1"} in container["env"]
    script = Path(arguments[arguments.index("-n") + 2])
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
