"""Several hosts on one machine, as the MPI libraries see it.

Each host has a network interface, a name, processes and shared memory of its own: namespaces of
the kernel. They hang on one process, which ends with the one that made them, however that one
ends; then the kernel takes away the hosts, and all that still runs on them.
"""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HOSTS = ("node1", "node2", "node3")

# Of iproute2 and util-linux.
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv")

_NAMESPACES = ("--net", "--uts", "--ipc", "--mount")

#: What a launcher on the hosts needs in its environment.
ENVIRONMENT = {
    # Each host has this folder for itself: in it the launcher's daemons name files by their process
    # ids, which two hosts may have alike.
    "TMPDIR": "/mnt",
    # A host believes that it has all cores to itself.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

_OPTIONS = {
    "openmpi": [
        *("--prtemca", "plm_ssh_agent", FOLDER / "agent"),
        *("--prtemca", "prte_if_include", "eth0"),
        *("--mca", "btl_tcp_if_include", "eth0"),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm"),
    ],
    "mpich": ["-launcher", "ssh", "-launcher-exec", FOLDER / "agent", "-iface", "eth0"],
}


# What `Hosts.options` says, for launchers that `python -m mpi_replica run` starts, of which tests
# see no option.
VARIABLES = {
    "openmpi": {
        "PRTE_MCA_plm_ssh_agent": str(FOLDER / "agent"),
        "PRTE_MCA_prte_if_include": "eth0",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,self,sm",
    },
    "mpich": {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(FOLDER / "agent"),
        "HYDRA_IFACE": "eth0",
    },
}

# The line of a host in a hostfile, and the option that names the file.
HOSTFILES = {"openmpi": ("{} slots={}", "--hostfile"), "mpich": ("{}:{}", "-f")}


class NoHostsError(Exception):
    """This machine, or this user, can't make hosts; the text says why."""


def write_hostfile(library, file, slots):
    """Write a hostfile; `slots` gives the number of ranks for each name of a host."""
    line, _ = HOSTFILES[library]
    file.write_text("".join(f"{line.format(*host)}\n" for host in slots.items()))


class Hosts:
    """Hosts that are joined by a switch.

    Parameters
    ----------
    pid : int
        The process that holds the namespaces of the switch.
    """

    def __init__(self, pid):
        self._enter = [
            *("nsenter", f"--target={pid}", *_NAMESPACES),
            # Its children are in the namespace of processes, and not itself.
            f"--pid=/proc/{pid}/ns/pid_for_children",
        ]

    def prefix(self, folder):
        """Return a command that becomes a launcher on the switch, with a working directory."""
        # A signal to nsenter ends nsenter alone: what it has started must notice.
        return [*self._enter, "env", f"--chdir={folder}", "setpriv", "--pdeathsig=TERM"]

    def options(self, library, ranks_per_host, hosts=HOSTS):
        """Return the options of a launcher for so many ranks on each of these hosts."""
        slots = ",".join(f"{host}:{ranks_per_host}" for host in hosts)
        where = {
            "openmpi": ["--host", slots, "--map-by", f"ppr:{ranks_per_host}:node:oversubscribe"],
            "mpich": ["-hosts", slots],
        }
        return [str(option) for option in (*_OPTIONS[library], *where[library])]

    def cut(self, host):
        """Pull the cable of a host out of the switch."""
        self._do("ip", "link", "set", host, "down")

    def mend(self, host):
        """Plug the cable of a host in again."""
        self._do("ip", "link", "set", host, "up")

    def slow_down(self, megabits_per_second, delay_milliseconds):
        """Make all links slow, both ways; without the delay where the kernel can't."""
        rate = ["rate", f"{megabits_per_second}mbit"]
        kinds = [
            ["netem", "delay", f"{delay_milliseconds}ms", *rate],
            ["tbf", *rate, "burst", "32kb", "latency", "400ms"],
        ]
        for kind in kinds:
            try:
                for host in HOSTS:
                    self._do("tc", "qdisc", "replace", "dev", host, "root", *kind)
                    inside = ["dev", "eth0", "root", *kind]
                    self._do("tc", "-netns", host, "qdisc", "replace", *inside)
            except subprocess.CalledProcessError as error:
                problem = error.stderr
            else:
                return
        raise NoHostsError(f"the kernel can't make links slow: {problem}")

    def _do(self, *command):
        subprocess.run([*self._enter, *command], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def joined_hosts(kind=Hosts):
    """Make the hosts; they end with the context.

    Parameters
    ----------
    kind : class
        `Hosts`, or one derived of it.

    Raises
    ------
    NoHostsError
        The machine does not let us.
    """
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise NoHostsError(f"hosts need {', '.join(missing)}, of iproute2 and util-linux on Linux")
    if os.geteuid() != 0:
        raise NoHostsError("only root may make networks")
    namespaces = [*_NAMESPACES, "--pid", "--fork", "--kill-child", "--mount-proc"]
    holder = subprocess.Popen(
        ["unshare", *namespaces, "sh", FOLDER / "network.sh", *HOSTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with holder:
        if not holder.stdout.readline():
            _, stderr = holder.communicate()
            raise NoHostsError(f"this machine lets nobody make networks: {stderr}")
        up = [holder.stdout.readline() for _ in (*HOSTS, "agent")]
        if "" in up:
            _, stderr = holder.communicate()
            raise RuntimeError(f"the hosts did not come up: {stderr}")
        yield kind(holder.pid)
