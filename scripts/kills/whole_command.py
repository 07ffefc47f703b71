"""One trial of the whole command: a job of `run --restarts`, killed at anything below the command.

The job runs on hosts of its own (tests/hosts), which end with the trial. Processes of it are known
by an environment variable that all of them inherit from the command.
"""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hosts.namespaces import (
    ENVIRONMENT,
    FOLDER,
    HOSTS,
    VARIABLES,
    joined_hosts,
    write_hostfile,
)
from kills.trials import ROOT

__all__ = ["LIMIT_SECONDS", "REPLICAS", "Layout", "Outcome", "Shot", "Trial", "planned", "run"]

REPLICAS = 6
LIMIT_SECONDS = 90
# By then the last process has gone, also on a host that has lost its daemon.
_SECONDS_TO_GO = 10
_SECONDS_TO_WRITE = 3
_POLL_SECONDS = 0.01
# How long a kill is put off while there is no process below the command.
_MOST_SECONDS_LATER = 0.5

# Each host has one of its own.
_TEMPORARY = "/mnt"

_MARK = "MPI_REPLICA_CHAOS"
_RANK_VARIABLES = (b"PMIX_RANK=", b"PMI_RANK=")
# A job is given up that dies so often in a row within some seconds.
_MOST_QUICK_DEATHS = 3
_RESTARTED = re.compile(r"Start \d+ of at most \d+ follows")

# What Open MPI's mpiexec is before it becomes prterun.
_BECOMES = {"ompirun_wrapper": "mpiexec"}

# On one host a job starts sooner without the transports for several.
_ONE_HOST = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class Layout(NamedTuple):
    """How a job is started."""

    library: str
    is_elastic: bool
    hosts: int
    ranks: int

    def __str__(self):
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        elastic = " --elastic" * self.is_elastic
        return f"{self.library}{elastic}, {self.ranks} ranks on {where}"


LAYOUTS = [
    Layout(library, is_elastic, hosts, ranks)
    for library, is_elastic in (("openmpi", False), ("openmpi", True), ("mpich", False))
    for hosts, ranks in ((1, 2), (1, 4), (3, 5))
]


class Shot(NamedTuple):
    """A kill: when, since the begin or the last one, and by which number the victim is drawn."""

    seconds: float
    seed: int
    #: What is killed, as soon as it is there; empty: what the number says.
    kind: str = ""


class Victim(NamedTuple):
    """A process of the job."""

    kind: str
    pid: int
    name: str

    def __str__(self):
        return f"{self.kind} (pid {self.pid}: {self.name})"


class Trial(NamedTuple):
    """A job and its kills."""

    layout: Layout
    shots: tuple[Shot, ...] = ()

    def __str__(self):
        return f"{self.layout}: {', '.join(f'{shot.seconds:.3f} s' for shot in self.shots)}"


@dataclass
class Outcome:
    """What came of a trial."""

    trial: Trial
    status: int | None = None
    seconds: float = 0.0
    #: The victims, and how many seconds after the begin each one died.
    killed: list = field(default_factory=list)
    hashes: set = field(default_factory=set)
    restarts: int = 0
    #: What was still there when the command had ended, and how long the last process took to go.
    processes: list = field(default_factory=list)
    seconds_to_go: float = 0.0
    files: list = field(default_factory=list)
    output: str = ""

    @property
    def is_hung(self):
        """Whether it has not ended in time."""
        return self.status is None

    def kinds_of_files(self):
        """Return the names of what was left, without random parts and what is in folders."""
        tops = {re.match(r"(/dev/shm|/mnt)/[^/ ]*", name)[0] for name in self.files}
        return {re.sub(r"[0-9a-f]{4,}|[0-9]+|(?<=_)\w{6}$", "#", name) for name in tops}

    def problems(self, wanted):
        """Return in words what is wrong, where the hash should be `wanted`."""
        if self.is_hung:
            return [f"hangs: no end within {LIMIT_SECONDS} s"]
        found = [f"exit status {self.status}"] if self.status else []
        if not self.status and self.hashes != {wanted}:
            found.append(f"wrong hashes {sorted(self.hashes)}, not {wanted}")
        if self.processes:
            found.append(f"processes left over: {', '.join(map(str, self.processes))}")
        if self.files:
            found.append(f"files left over: {', '.join(self.files)}")
        return found


def planned(seed, number, libraries, has_hosts, seconds):
    """Return a trial.

    Parameters
    ----------
    seed, number : int
        Of all trials, and of this one.
    libraries : sequence of str
    has_hosts : bool
        Whether every third trial is on several hosts.
    seconds : callable
        Returns how long an undisturbed job of a layout takes.
    """
    draw = random.Random(f"{seed} {number}")
    is_on_hosts = has_hosts and number % 3 == 2
    layout = draw.choice(
        [one for one in LAYOUTS if one.library in libraries and (one.hosts > 1) == is_on_hosts]
    )
    longest = 1.2 * seconds(layout)
    shots = [Shot(draw.uniform(0, longest), draw.getrandbits(32))]
    for _ in range(draw.choice([0, 1, 1, 2])):
        # Sometimes at once, so that both are lost together.
        later = draw.uniform(0, 0.05 if draw.random() < 0.25 else longest)
        shots.append(Shot(later, draw.getrandbits(32)))
    return Trial(layout, tuple(shots))


def run(python, folder, trial):
    """Return the outcome of a trial.

    Parameters
    ----------
    python : str
        The interpreter beside which the library is installed.
    folder : Path
        An empty one.
    trial : Trial

    Raises
    ------
    hosts.namespaces.NoHostsError
        This machine, or this user, can't make hosts.
    """
    log = folder / "output"
    outcome = Outcome(trial)
    begin = time.monotonic()
    with joined_hosts() as network, log.open("w") as file:
        words, added = _command(python, folder, trial.layout, network)
        with subprocess.Popen(
            words,
            env={**os.environ, **added, "TMPDIR": _TEMPORARY},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as command:
            try:
                _watch(command, folder.name, trial, outcome, log)
                outcome.seconds = time.monotonic() - begin
                outcome.status = command.poll()
                if outcome.is_hung:
                    _show(folder.name, log)
                else:
                    outcome.processes, outcome.seconds_to_go = _left_over(folder.name)
                    outcome.files = _files(network)
            finally:
                for process in _processes(folder.name):
                    _kill(process)
                command.kill()
    outcome.output = log.read_text(errors="replace")
    outcome.restarts = len(_RESTARTED.findall(outcome.output))
    told = [json.loads(file.read_text()) for file in folder.glob("result-*") if not file.suffix]
    outcome.hashes = {one["hash"] for one in told} - {None}
    return outcome


def _command(python, folder, layout, network):
    """Return the command of a trial, and what it needs in its environment."""
    words = [python, "-m", "mpi_replica", "run", "--restarts", "9", "-n", str(layout.ranks)]
    words += ["--elastic"] * layout.is_elastic
    added = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))}
    if layout.hosts > 1:
        write_hostfile(layout.library, folder / "hosts", dict.fromkeys(HOSTS[: layout.hosts], 2))
        words += ["--hostfile", str(folder / "hosts")]
        added |= ENVIRONMENT | VARIABLES[layout.library]
    else:
        added |= _ONE_HOST
    words += ["-m", "kills.restarted_job", str(folder), "--replicas", str(REPLICAS)]
    words = ["env", f"--chdir={ROOT}", f"{_MARK}={folder.name}", *words]
    if layout.hosts == 1:  # which has shared memory of its own, where nobody else leaves files
        words = [str(FOLDER / "agent"), HOSTS[0], shlex.join(words)]
    return [*network.prefix(ROOT), *words], added


def _watch(command, mark, trial, outcome, log):
    """Wait for the end of the command, and kill what the trial says."""
    begin = last = time.monotonic()
    shots = list(trial.shots)
    while command.poll() is None and time.monotonic() < begin + LIMIT_SECONDS:
        now = time.monotonic()
        if not shots or now < last + shots[0].seconds:
            time.sleep(_POLL_SECONDS)
            continue
        starts = 1 + len(_RESTARTED.findall(log.read_text(errors="replace")))
        if len(outcome.killed) >= 2 and starts >= _MOST_QUICK_DEATHS:
            break  # it would be given up, and rightly
        draw = random.Random(shots[0].seed)
        victims = _victims(mark)
        kinds = {victim.kind for victim in victims}
        if not kinds:  # somewhat later: not the first one that comes, again and again
            later = now - last + draw.uniform(0, _MOST_SECONDS_LATER)
            shots[0] = shots[0]._replace(seconds=later, seed=draw.getrandbits(32))
            continue
        kind = shots[0].kind or draw.choice(sorted(kinds))
        if kind not in kinds:
            continue
        victim = draw.choice([victim for victim in victims if victim.kind == kind])
        if _kill(victim.pid):
            last = now
            del shots[0]
            outcome.killed.append((victim, now - begin))
            time.sleep(_POLL_SECONDS)  # for it to end
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(max(0.0, begin + LIMIT_SECONDS - time.monotonic()))


def _kill(pid):
    """Kill a process; return whether it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _read(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def _processes(mark):
    """Return the processes of a trial; those that have ended, and were not waited for, are none."""
    variable = f"{_MARK}={mark}".encode()
    numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in numbers if variable in _read(pid, "environ").split(b"\0")]


def _victims(mark):
    """Return the processes of a trial, but for the command itself."""
    found = []
    for pid in _processes(mark):
        words = _read(pid, "cmdline").decode(errors="replace").split("\0")
        is_command = words[1:4] == ["-m", "mpi_replica", "run"] or words[0] == "env"
        if words[0] and not is_command:
            found.append(Victim(_kind(pid, words), pid, " ".join(words[:9])))
    return found


def _kind(pid, words):
    name = _read(pid, "comm").decode(errors="replace").strip()
    if name.startswith("python"):
        variables = _read(pid, "environ").split(b"\0")
        is_rank = any(text.startswith(_RANK_VARIABLES) for text in variables)
        return "rank" if is_rank else "question"
    if "--version" in words:
        return "question"
    if name in ("sh", "nsenter", "agent"):
        return "agent of a host"
    return _BECOMES.get(name, name)


def _left_over(mark):
    """Return the processes that do not go by themselves, and when the last one went."""
    begin = time.monotonic()
    while victims := _victims(mark):
        if time.monotonic() > begin + _SECONDS_TO_GO:
            return victims, _SECONDS_TO_GO
        time.sleep(0.05)
    return [], time.monotonic() - begin


def _files(network):
    """Return the files that were left in shared memory and in TMPDIR, on all hosts.

    What MPICH's launcher leaves in /tmp is not seen: all hosts have it, and other jobs write there.
    """
    found = []
    look = ["find", "/dev/shm", _TEMPORARY, "-mindepth", "1"]
    for host in ("switch", *HOSTS):
        words = look if host == "switch" else [FOLDER / "agent", host, shlex.join(look)]
        done = subprocess.run(
            [*network.prefix(ROOT), *words], capture_output=True, text=True, check=True
        )
        found += [f"{line} ({host})" for line in done.stdout.splitlines()]
    return found


def _show(mark, log):
    """Write to the log what hangs, and where its ranks are."""
    victims = _processes(mark)
    with log.open("a") as file:
        columns = "pid,ppid,stat,wchan:24,etimes,args"
        command = ["ps", "-ww", "-o", columns, "-p", ",".join(map(str, victims)) or "1"]
        subprocess.run(command, stdout=file, check=False)
    for victim in _victims(mark):
        if victim.kind == "rank":
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGUSR2)
    time.sleep(_SECONDS_TO_WRITE)
