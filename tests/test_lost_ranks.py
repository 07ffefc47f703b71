"""Jobs that lose ranks at chosen moments, and go on (see the folder losing).

A rank is killed where a call or a step is counted, never after a time: the others are in the call
that a test names, or come to it.
"""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from jobs import run_to_its_end
from launching import ONE_HOST, ROOT, find_interpreter, rank_environment
from mpi_replica.layout import Layout

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

LOSING = ROOT / "tests" / "losing"
NUM_REPLICAS = 5

FEW = ["few", "1MB", "20MB", "all_gather", "merge_call", "reduce", "gather", "Variable", "save"]
CALLS = [*FEW, "next", "run", "read", "assign", "verify", "commit"]
STEP = {"begin": 0, **{name: step for step, name in enumerate(CALLS)}, "end": len(CALLS)}
CHECKPOINT = None


class Job:
    """What becomes of ``every_call.py``.

    Parameters
    ----------
    reproducible : bool
    ranks : int
    *losses
        Each a word for kills.py, the ranks that are lost then, and the step at which the others
        go on.
    spares : int
        How many ranks wait.
    **env
        For the program.
    """

    def __init__(self, reproducible, ranks, *losses, spares=0, **env):
        self.reproducible, self.ranks, self.spares, self.env = reproducible, ranks, spares, env
        self.kills = [kill for kill, *_ in losses]
        self.losses = [tuple(loss) for _, *loss in losses if loss]
        lost = [rank for ranks, _ in self.losses for rank in ranks]
        self.survivors = [rank for rank in range(ranks) if rank not in lost]

    def counts(self):
        """Return how many replicas each rank hosts after each loss."""
        alive = self.ranks
        for ranks, _ in self.losses:
            alive -= len(ranks)
            yield list(Layout.even(NUM_REPLICAS, min(alive, self.ranks - self.spares), 0).counts)


def one(rank, name, moment, step=None):
    """Return the loss of one rank in the call `name`, at its exchange `moment`."""
    return f"{rank}:{name}:{moment}", [rank], STEP[name] if step is None else step


# Each call of the program is met by a loss, mostly of one rank after the other.
JOBS = {
    "in agreements": Job(
        True, 5, one(0, "few", 1), one(3, "gather", 1), one(1, "run", 1), one(4, "verify", 1)
    ),
    "in shared memory": Job(True, 4, one(2, "1MB", 4), one(0, "20MB", 9), one(3, "reduce", 2)),
    "in sums": Job(
        False, 5, one(0, "begin", 4), one(4, "1MB", 2), one(2, "20MB", 5), one(1, "assign", 1)
    ),
    "in gathers": Job(
        False,
        5,
        one(1, "all_gather", 2),
        one(0, "merge_call", 5),
        one(4, "next", 1),
        one(2, "commit", 1),
    ),
    "in what lasts": Job(
        True, 5, one(3, "Variable", 1), one(0, "save", 4), one(2, "commit", 2), one(4, "end", 1)
    ),
    "behind calls": Job(
        True,
        5,
        one(1, "few", "end"),
        one(0, "save", "end"),
        one(4, "read", 1),
        one(2, "commit", "end", 15),
    ),
    "two at once": Job(
        False,
        5,
        ("0+2:gather:2", [0, 2], STEP["gather"]),
        one(4, "commit", 3, 15),
    ),
    "rank and buddy": Job(
        True, 4, ("1+2:verify:1", [1, 2], CHECKPOINT), one(0, "commit", 1), NAMED="1"
    ),
    "while they come together": Job(
        False,
        5,
        ("0:few:1 2:few:3", [0, 2], STEP["few"]),
        one(4, "save", 5),
    ),
    "spares": Job(
        True,
        6,
        ("4@0:few:1",),
        ("1:all_gather:2", [1, 4], STEP["all_gather"]),
        one(3, "save", 1),
        one(0, "end", 1),
        spares=2,
    ),
    "errors caught": Job(False, 4, one(0, "20MB", 3), one(2, "gather", 1), SWALLOW="1"),
}


@pytest.fixture(scope="module", autouse=True)
def openmpi():
    """The only library that goes on without a lost rank."""
    return find_interpreter("openmpi")


def lose(program, ranks, *, succeeds=True, **env):
    """Run a program of the folder, and return what came of it."""
    options = ["--with-ft", "ulfm"]
    return run_to_its_end(
        "openmpi", ranks, [LOSING / program], succeeds=succeeds, env=env, options=options
    )


def told(done, word="TOLD"):
    """What the ranks told: by the number that a rank had at the start."""
    lines = re.findall(rf"^{word} (.*)$", done.stdout, re.MULTILINE)
    return {rank: rest for rank, *rest in map(json.loads, lines)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return what an undisturbed run on one rank tells, by whether it is reproducible."""
    found = {}
    for reproducible in (False, True):
        env = ONE_HOST | {"PYTHONPATH": str(ROOT), "REPRODUCIBLE": str(int(reproducible))}
        env["FOLDER"] = str(tmp_path_factory.mktemp("undisturbed"))
        done = subprocess.run(
            [sys.executable, LOSING / "every_call.py"],
            env=rank_environment(60, env),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        ([found[reproducible]],) = told(done).values()
    return found


@pytest.mark.parametrize("name", JOBS)
def test_losses_change_no_bit_and_are_told(name, tmp_path, undisturbed):
    job = JOBS[name]
    env = {"REPRODUCIBLE": str(int(job.reproducible)), "SPARES": str(job.spares)} | job.env
    done = lose("every_call.py", job.ranks, FOLDER=str(tmp_path), KILLS=" ".join(job.kills), **env)
    waiting = told(done, "SPARE")
    assert sorted({**told(done), **waiting}) == job.survivors, done.stderr
    assert all(result == [None] for result in waiting.values())
    wanted = undisturbed[job.reproducible]
    pids = {rank: pid for rank, (pid,) in told(done, "PID").items()}
    for (of_rank,) in told(done).values():
        for word in ("found", "hash", "step", "result"):
            assert of_rank[word] == wanted[word], word
        losses = of_rank["losses"]
        assert [(loss["ranks"], loss["step"]) for loss in losses] == job.losses
        assert [loss["replicas_per_rank"] for loss in losses] == list(job.counts())
        for loss, text in zip(losses, of_rank["texts"], strict=True):
            assert loss["hosts"] == [socket.gethostname()] * len(loss["ranks"])
            assert loss["pids"] == [pids[rank] for rank in loss["ranks"]]
