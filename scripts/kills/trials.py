"""One trial: the job on some ranks, some of which are killed, and what must come out."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from kills.moments import Kill

__all__ = ["LIMIT_SECONDS", "Outcome", "Trial", "problems", "run", "run_alone"]

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_SECONDS = 60
_PATHS = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
_POLL_SECONDS = 0.002
# For the ranks to write their stacks, and for the launcher to end them.
_SECONDS_TO_WRITE, _SECONDS_TO_END = 3, 10


@dataclass(frozen=True)
class Trial:
    """A job and who is killed when."""

    ranks: int
    spares: int
    #: On each rank that does not wait.
    replicas_per_rank: int
    kills: tuple[Kill, ...] = ()
    #: Ranks that are killed from outside, and how many seconds after the begin.
    shots: tuple[tuple[int, float], ...] = ()

    @property
    def replicas(self):
        """How many there are on all ranks together."""
        return (self.ranks - self.spares) * self.replicas_per_rank

    def __str__(self):
        kills = " ".join(map(str, self.kills))
        shots = " ".join(f"{rank}@{seconds:.3f}s" for rank, seconds in self.shots)
        where = f"{self.ranks} ranks ({self.spares} of them spares), {self.replicas} replicas"
        return f"{where}: {kills} {shots}".strip()


@dataclass(frozen=True)
class Outcome:
    """What came of a trial."""

    trial: Trial
    status: int
    #: What each rank told that came to its end, by its number.
    results: dict
    #: The ranks that died, and when.
    killed: dict
    #: Whether the launcher has started any rank.
    has_begun: bool
    is_hung: bool
    #: All that was printed, with the stacks of all ranks where it hung.
    output: str

    @property
    def losses(self):
        """What the ranks that are left tell of losses."""
        return next((told["losses"] for told in self.results.values()), [])

    @property
    def seconds(self):
        """How long `run_elastic` took."""
        return max((told["seconds"] for told in self.results.values()), default=float("nan"))


def run_alone(python, folder, replicas, environment):
    """Return the hash of an undisturbed job of one process.

    Parameters
    ----------
    python : str
        The interpreter.
    folder : Path
        An empty one.
    replicas : int
    environment : mapping
        Environment variables.
    """
    command = [python, "-m", "kills.job", folder, "--replicas", str(replicas)]
    variables = {**environment, "PYTHONPATH": _PATHS, "MPI_REPLICA_TRANSPORT": "single"}
    subprocess.run(command, env=variables, check=True, timeout=LIMIT_SECONDS)
    return _told(folder, "result")[0]["hash"]


def run(python, folder, trial, environment):
    """Return the outcome of a trial; parameters as for `run_alone`."""
    command = [Path(python).with_name("mpiexec"), "--with-ft", "ulfm", "-n", str(trial.ranks)]
    command += [python, "-m", "kills.job", folder]
    command += ["--replicas", str(trial.replicas), "--spares", str(trial.spares)]
    if trial.kills:
        command += ["--kills", *map(str, trial.kills)]
    log = folder / "output"
    with (
        log.open("a") as file,
        subprocess.Popen(
            command,
            env={**environment, "PYTHONPATH": _PATHS},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all that is in it can be ended
        ) as launcher,
        contextlib.ExitStack() as files,
    ):
        processes = {}
        try:
            is_hung = not _await_end(launcher, folder, trial, processes, files)
            if is_hung:
                _show_stacks(processes, log)
        finally:
            _end(launcher, processes)
    killed = {rank: text for rank, text in _told(folder, "killed").items()}
    return Outcome(
        trial,
        launcher.returncode,
        _told(folder, "result"),
        killed,
        bool(_told(folder, "pid")),
        is_hung,
        log.read_text(errors="replace"),
    )


def _told(folder, kind):
    """Return what ranks have written, by rank."""
    texts = {int(file.name[-1]): file.read_text() for file in sorted(folder.glob(f"{kind}-?"))}
    return {rank: json.loads(text) if kind == "result" else text for rank, text in texts.items()}


def _await_end(launcher, folder, trial, processes, files):
    """Wait for the end of a job, and shoot whom the trial names; return whether it came in time.

    `processes` gets a descriptor of each rank's process: unlike its number it is never another's.
    """
    limit = time.monotonic() + LIMIT_SECONDS
    shots, begin = sorted(trial.shots, key=lambda shot: shot[1]), None
    while launcher.poll() is None:
        if begin is None:
            for rank, pid in _told(folder, "pid").items():
                if rank not in processes:
                    with contextlib.suppress(ProcessLookupError):
                        processes[rank] = os.pidfd_open(int(pid))
                        files.callback(os.close, processes[rank])
            if len(_told(folder, "ready")) == trial.ranks:
                begin = time.monotonic()
        while begin and shots and time.monotonic() - begin >= shots[0][1]:
            rank, seconds = shots.pop(0)
            if _send(processes.get(rank), signal.SIGKILL):
                (folder / f"killed-{rank}").write_text(f"from outside after {seconds:.3f} s")
        if time.monotonic() > limit:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _send(process, number):
    """Send a signal to a process; return whether there was one."""
    if process is None:
        return False
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    return True


def _show_stacks(processes, log):
    """Have all ranks write to the log where they are: in Python, and in MPI where gdb is there."""
    for process in processes.values():
        _send(process, signal.SIGUSR2)
    time.sleep(_SECONDS_TO_WRITE)
    if shutil.which("gdb") is None:
        return
    for rank, process in processes.items():
        about = Path(f"/proc/self/fdinfo/{process}").read_text()
        pid = next(line.split()[1] for line in about.splitlines() if line.startswith("Pid:"))
        if int(pid) > 0:
            command = ["gdb", "-p", pid, "-batch", "-ex", "thread apply all bt 20"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            with log.open("a") as file:
                file.write(f"rank {rank}, pid {pid}:\n{done.stdout}\n")


def _end(launcher, processes):
    """End what is left of a job."""
    if launcher.poll() is None:
        launcher.terminate()  # a launcher that is asked to end takes its ranks with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    for process in processes.values():
        _send(process, signal.SIGKILL)
    launcher.wait()


def problems(outcome, wanted):
    """Return in words what is wrong with an outcome, whose hash should be `wanted`."""
    if outcome.is_hung:
        return [f"did not end within {LIMIT_SECONDS} s"]
    found = []
    if outcome.status:
        found.append(f"exit status {outcome.status}")
    missing = set(range(outcome.trial.ranks)) - set(outcome.results) - set(outcome.killed)
    if missing:
        found.append(f"ranks {sorted(missing)} came to no end")
    hashes = {told["hash"] for told in outcome.results.values()} - {None}
    if hashes != {wanted} and not missing:
        found.append(f"wrong hashes {sorted(hashes)}, not {wanted}")
    every = [told["losses"] for told in outcome.results.values() if told["hash"]]
    lost = {rank for losses in every for loss in losses for rank in loss["ranks"]}
    if lost - set(outcome.killed):
        found.append(f"ranks {sorted(lost - set(outcome.killed))} were lost, but not killed")
    if any(
        [loss["ranks"] for loss in losses] != [loss["ranks"] for loss in every[0]]
        for losses in every
    ):
        found.append("the ranks tell of different losses")
    return found
