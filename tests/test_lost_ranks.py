"""Jobs that lose ranks at chosen moments, and go on (see the folder losing).

A rank is killed where a call or a step is counted, never after a time: the others are in the call
that a test names, or come to it.
"""

import json
import re
import socket
import subprocess
import sys

import pytest

from jobs import run_to_its_end
from launching import ROOT, find_interpreter, rank_environment
from mpi_replica.core.layout import Layout

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

LOSING = ROOT / "tests" / "losing"
NUM_REPLICAS = 5

FEW = ["few", "1MB", "6MB", "all_gather", "merge_call", "reduce", "gather", "Variable", "save"]
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
        Each a word for dying.py, the ranks that are lost then, and the step at which the others
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
    "in shared memory": Job(True, 4, one(2, "1MB", 4), one(0, "6MB", 9), one(3, "reduce", 2)),
    "in sums": Job(
        False, 5, one(0, "begin", 4), one(4, "1MB", 2), one(2, "6MB", 5), one(1, "assign", 1)
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
    "right behind a loss": Job(
        False, 4, one(0, "few", 1), one(2, "few", 5), one(3, "verify", 1), SWALLOW="other"
    ),
    "errors caught": Job(False, 4, one(0, "6MB", 3), one(2, "gather", 1), SWALLOW="1"),
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
        env = {"PYTHONPATH": str(ROOT), "REPRODUCIBLE": str(int(reproducible))}
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
        for loss in losses:
            assert loss["hosts"] == [socket.gethostname()] * len(loss["ranks"])
            assert loss["pids"] == [pids[rank] for rank in loss["ranks"]]
    check_log(done, job, pids)


def check_log(done, job, pids):
    """Check that each loss was logged once, and the sum of them at the end."""
    logged = re.findall(
        r"^lost (.*); goes on at (.*) after [\d.]+ s, with replicas", done.stderr, re.M
    )
    assert logged == [
        (
            ", ".join(f"rank {r} (host {socket.gethostname()}, pid {pids[r]})" for r in ranks),
            "the last checkpoint" if step is CHECKPOINT else f"step {step}",
        )
        for ranks, step in job.losses
    ]
    assert done.stderr.count("ended without ranks") == 1


# How jobs end


def test_a_strategy_comes_together_although_ranks_die_at_the_start():
    done = lose("at_the_start.py", 6)
    found = {rank: of_rank for rank, (of_rank,) in told(done).items()}
    assert sorted(found) == [2, 5], done.stderr
    assert all(of_rank["total"] == 6.0 for of_rank in found.values())
    assert all(of_rank["losses"] == [[4]] for of_rank in found.values())
    assert [found[rank]["replicas"] for rank in (2, 5)] == [
        [[0, 1], [0, 1, 2]],
        [[4, 5], [3, 4, 5]],
    ]


def test_a_rank_that_meets_a_loss_before_the_others_have_a_world_ends_none_of_them():
    assert told(lose("woken_early.py", 3)) == {0: [3], 1: [3], 2: [3]}


def test_ranks_that_come_together_go_on_where_a_further_loss_is_met_by_one_of_them_alone():
    found = told(lose("not_made_everywhere.py", 4, CASE="split"))
    assert found == {rank: [3, [2]] for rank in (0, 1, 3)}


def test_an_error_of_one_rank_while_ranks_come_together_ends_the_job_and_is_printed():
    done = lose("not_made_everywhere.py", 4, succeeds=False, CASE="memory")
    assert told(done) == {}
    assert done.stderr.count("MemoryError: no memory for headers") == 1


def test_an_exchange_that_another_rank_ends_gives_no_wrong_data():
    assert told(lose("ended_exchanges.py", 3)) == {0: [0], 1: [0], 2: [0]}


def test_an_exchange_in_which_a_rank_is_lost_gives_no_wrong_data():
    assert told(lose("lost_in_an_exchange.py", 3)) == {1: ["a loss"], 2: ["a loss"]}


def test_a_rank_that_is_lost_while_ranks_tell_who_they_are_ends_no_job():
    found = told(lose("lost_while_they_meet.py", 6))
    assert found == {rank: [3, [[0, 3]]] for rank in (1, 4, 5)}


def test_whatever_exchange_is_begun_behind_a_loss_is_that_loss():
    assert told(lose("begun_late.py", 2)) == {0: [[True] * 4], 1: [[True] * 4]}


MISTAKES = {
    "rank": "ValueError: the mistake",
    "replica": "ValueError: the mistake",
    "exit": "RankLostError: the program has ended on",
    "early": "CollectiveMismatchError: replicas are at different calls",
    "again": "CollectiveMismatchError: ",
}
MISTAKE_BEHIND_A_LOSS = {"late": "ValueError: the mistake"}
MISTAKES_AT_THE_BEGIN = {
    "outside": "CollectiveMismatchError: replicas are at different calls",
    "object": "TypeError: ",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_after_a_loss_ends_the_job_as_always(mistake):
    done = lose("own_errors.py", 3, succeeds=False, MISTAKE=mistake, KILLS="1:step2:0")
    assert "lost rank 1" in done.stderr
    assert len(re.findall(rf"^(mpi_replica.errors.)?{MISTAKES[mistake]}", done.stderr, re.M)) == 1
    assert "NOT REACHED" not in done.stdout


@pytest.mark.parametrize(
    ("ranks", "mistake", "kills"),
    [
        *((3, mistake, "1@2:step5:0") for mistake in MISTAKES),
        *((3, mistake, "1:step5:0") for mistake in ("rank", "exit", "late")),
        *((4, mistake, "1@2:step5:0") for mistake in ("rank", "exit")),
    ],
)
def test_a_mistake_at_the_time_of_a_loss_ends_the_job_as_always(ranks, mistake, kills):
    spares = str(ranks - 3)
    done = lose("own_errors.py", ranks, succeeds=False, MISTAKE=mistake, KILLS=kills, SPARES=spares)
    text = (MISTAKES | MISTAKE_BEHIND_A_LOSS)[mistake]
    assert len(re.findall(rf"^(mpi_replica.errors.)?{text}", done.stderr, re.M)) == 1
    assert "NOT REACHED" not in done.stdout


@pytest.mark.parametrize(
    ("mistake", "wanted", "other"),
    [
        ("rank", ["ValueError", "the mistake"], "RankLostError"),
        ("exit", ["SystemExit", "3"], "RankLostError"),
        ("again", ["CollectiveMismatchError", ...], "CollectiveMismatchError"),
    ],
)
@pytest.mark.parametrize("kills", ["1:step5:0", "1@2:step5:0"])
def test_a_mistake_at_the_time_of_a_loss_may_be_caught_on_each_rank(kills, mistake, wanted, other):
    # What is in flight can't be waited for: the job is aborted at its end.
    done = lose("own_errors.py", 3, succeeds=None, MISTAKE=mistake, KILLS=kills, CAUGHT="1")
    found = told(done)
    assert sorted(found) == [0, 2], done.stderr
    assert [found[2][0], ... if wanted[1] is ... else found[2][1]] == wanted
    assert found[0][0] == other
    if other == "RankLostError":
        # It may have come to its end before the loss has reached it.
        assert re.match(r"the program has ended on (replica 4 \()?rank 2", found[0][1])


@pytest.mark.parametrize("mistake", ["once", "merge_fn"])
def test_a_mistake_that_meets_a_loss_while_it_is_told_is_printed_and_done_again(mistake):
    done = lose("own_errors.py", 3, MISTAKE=mistake, KILLS="1@2:once:0")
    assert "lost rank 1" in done.stderr
    assert len(re.findall("^  ValueError: the mistake", done.stderr, re.M)) == 1
    assert "goes back to the last commit because of a loss" in done.stderr


def test_a_program_that_catches_the_error_of_a_loss_in_a_loop_goes_on_without_the_rank():
    """As one that skips a bad batch at any error: no call can succeed until it lets one pass."""
    done = lose("swallowed.py", 3, KILLS="1:step5:1")
    assert told(done) == {0: [8, 40.0], 2: [8, 40.0]}
    assert "lost rank 1" in done.stderr
    assert "the program has caught RankLostError of 100 calls and goes on" in done.stderr


@pytest.mark.parametrize("mistake", MISTAKES | MISTAKES_AT_THE_BEGIN)
def test_a_mistake_ends_a_job_that_would_go_on_without_a_rank(mistake):
    done = lose("own_errors.py", 3, succeeds=False, MISTAKE=mistake)
    text = (MISTAKES | MISTAKES_AT_THE_BEGIN)[mistake]
    assert len(re.findall(rf"^(mpi_replica.errors.)?{text}", done.stderr, re.M)) == 1
    assert "lost rank" not in done.stderr
    assert "NOT REACHED" not in done.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mistake_before_run_elastic_leaves_no_spare_waiting(ranks):
    done = lose("own_errors.py", ranks, succeeds=False, MISTAKE="at once", SPARES="1")
    assert len(re.findall("^ValueError: the mistake", done.stderr, re.M)) == 1
    assert "NOT REACHED" not in done.stdout


def test_what_was_made_before_a_loss_is_an_error_when_it_is_used():
    done = lose("not_any_more.py", 3, CASE="values", KILLS="1:step2:1")
    found = {rank: of_rank for rank, (of_rank,) in told(done).items()}
    assert sorted(found) == [0, 2], done.stderr
    for errors, (kept, shown, still_there) in found.values():
        assert len(errors) == 19
        for use, text in errors.items():
            assert "was made before a rank was lost" in text, use
            assert "hold it in the mr.ElasticState" in text, use
        assert kept == [10, 10]
        assert "made before a rank was lost" in shown
        assert still_there == [10, 10]


@pytest.mark.parametrize(
    ("case", "kills", "words", "advice"),
    [
        ("gone", "1+2:step2:1", "replica 2 is gone", "Give the state a mr.CheckpointManager"),
        ("unsaved", "0+1:step2:1", "replicas 0-1 is gone", "no checkpoint was saved before"),
        ("torn", "0+1:step2:1", "replicas 0-1 is gone", "has 1 checkpoint, which is not whole"),
        ("beginning", "1:beginning:1", "replica 2 is gone", "Give the state a mr.Checkpoint"),
        ("drawn", "1:beginning:3", "replica 2 is gone", "Give the state a mr.Checkpoint"),
    ],
)
def test_what_nobody_has_any_more_ends_the_job_with_an_error(case, kills, words, advice, tmp_path):
    folder = str(tmp_path)
    done = lose("not_any_more.py", 4, succeeds=False, CASE=case, KILLS=kills, FOLDER=folder)
    assert told(done) == {}
    (text,) = re.findall(r"^mpi_replica.errors.RankLostError: (.*)$", done.stderr, re.M)
    assert f"what belonged to {words}" in text
    assert advice in text
    assert "goes on" not in done.stderr
    if case in ("unsaved", "torn"):
        assert re.search(
            r"^lost rank 0 \(.*\), rank 1 \(.*\), and what belonged to replicas 0-1: looks for the"
            r" last checkpoint\.$",
            done.stderr,
            re.M,
        )
    was_kept = "beginning" not in kills
    assert ("the ranks that hosted and that kept it were lost together" in text) == was_kept
    assert ("was lost before it was committed, and nobody kept a copy yet" in text) != was_kept


def test_a_spare_that_is_left_alone_has_no_state_to_go_on_with():
    done = lose("names_of_one_object.py", 2, succeeds=None, SPARES="1")  # mpirun says 0
    text = "gone: all ranks that hosted replicas were lost, and spares keep no copies. Give the"
    assert re.search(rf"^mpi_replica.errors.RankLostError: .* {text} state", done.stderr, re.M)


def test_what_can_not_be_loaded_after_a_loss_ends_the_job_with_an_error():
    """A commit loads nothing: there it would be the error of one rank alone."""
    # Of its status nothing is said: that too is up to what mpirun makes of MPI_Abort.
    done = lose("not_any_more.py", 3, succeeds=None, CASE="unloadable", KILLS="1:step2:1")
    assert told(done) == {}
    assert {0, 2} <= told(done, "STEP2").keys(), done.stderr
    assert done.stderr.count("MemoryError: no memory for the copies") == 1
    assert done.stderr.count("goes on at") == 0


def test_a_replica_to_which_nothing_belongs_is_not_lost_with_one_that_has_something():
    found = told(lose("not_any_more.py", 3, CASE="partly", KILLS="1:step2:1"))
    assert found == {0: [[{}, 0]], 2: [[{}, 0]]}


def test_a_replica_that_had_nothing_at_the_begin_is_not_lost_where_another_one_had_something():
    found = told(lose("not_any_more.py", 4, CASE="drawn", KILLS="3:beginning:3"))
    assert found == {rank: [[{}, 0]] for rank in range(3)}


def test_a_spare_that_is_needed_in_a_later_call_is_in_that_call():
    found = told(lose("calls_in_a_row.py", 4))
    assert found == {3: [[[3.0, 6.0, 9.0], [[0], [1], [2]]]]}


def test_a_spare_that_waits_on_knows_who_hosts_replicas_as_the_others_do():
    found = told(lose("waiting_on.py", 5))
    alike = [[[2, 2, 1]], "<MPIStrategy: 5 replicas on 3 ranks>"]
    assert found == {
        1: [[3, 1], [3, 0], [0, 1], *alike],
        2: [[3, 2], [3, 1], [2, 3], *alike],
        3: [[3, 3], [3, 2], [4], *alike],
        4: [[3, 4], [3, 3], [], *alike],
    }


@pytest.mark.parametrize("case", ["unknown", "met"])
def test_a_recovery_that_waits_for_a_rank_reports_where_it_is_and_that_the_lost_one_has_died(case):
    done = lose("held_up.py", 3, CASE=case, MPI_REPLICA_STALL_SECONDS="1")
    assert told(done) == {0: [3], 2: [3]}
    text, pids = told(done, "REPORT")[2]
    first, *lines = text.splitlines()
    assert re.fullmatch(r"the recovery from a loss has waited [\d.]+ s\.", first)
    host = socket.gethostname()
    assert lines[:2] == [
        "  waiting: replica 3 (rank 2)",
        f"  lost: replica 2 (rank 1, host {host}, pid {pids[1]}): its process has died",
    ]
    assert lines[2].startswith(
        f"  missing: replicas 0-1 (rank 0, host {host}, pid {pids[0]}), last"
    )
    assert "    world.recv(source=2)" in text
    assert re.findall("kill -9 .*", text) == [f"kill -9 {pids[0]} on {host}"]


def test_ranks_that_can_not_go_on_after_a_loss_wait_no_more():
    """Their program may catch it, and save: what waits on is reported, and ended by others."""
    done = lose("failed_recovery.py", 4, succeeds=False)
    assert told(done) == {0: [True, False], 1: [True, False]}


def test_who_waits_for_a_spare_at_the_end_says_so(tmp_path):
    done = lose("late_spare.py", 3, FOLDER=str(tmp_path), MPI_REPLICA_STALL_SECONDS="0.5")
    assert told(done) == {0: [True], 1: [True], 2: [True]}


def test_a_variable_that_the_checkpoint_lacks_is_an_error_until_it_is_assigned(tmp_path):
    arguments = {"KILLS": "0+1:step4:1", "FOLDER": str(tmp_path / "lost")}
    done = lose("not_in_the_checkpoint.py", 4, succeeds=False, CASE="read", **arguments)
    assert re.search(r"RankLostError: variable 1 'pace' has no .* Hold it in the mr.E", done.stderr)
    assigned = told(lose("not_in_the_checkpoint.py", 4, CASE="assigned", **arguments))
    undisturbed = told(
        lose("not_in_the_checkpoint.py", 4, CASE="assigned", KILLS="", FOLDER=str(tmp_path / "all"))
    )
    assert sorted(assigned) == [2, 3]
    assert assigned[2] == assigned[3] == undisturbed[2]


def test_a_loss_outside_of_run_elastic_ends_the_job_with_an_error_that_names_it():
    done = lose("not_any_more.py", 4, succeeds=False, CASE="outside", KILLS="1:beginning:1")
    assert told(done) == {}
    texts = re.findall(r"^mpi_replica.errors.RankLostError: (.*)$", done.stderr, re.M)
    assert texts
    for text in texts:
        assert "train inside of run_elastic" in text
        assert re.match(r"rank 1 \(pid \d+ on .*\) has died|a rank has died", text)


def test_a_loss_that_another_strategy_meets_in_run_elastic_says_that_it_is_not_made_anew():
    done = lose("own_errors.py", 3, succeeds=False, MISTAKE="another", KILLS="1:step5:0")
    assert re.search(r"^mpi_replica.errors.RankLostError: .* not made anew", done.stderr, re.M)
    assert "NOT REACHED" not in done.stdout


def test_ranks_agree_on_what_all_of_them_say_while_their_watchers_look_for_messages():
    """Open MPI 5.0.11 gave 0 where all had said 1, now and then."""
    found = told(lose("agreed_words.py", 3))
    assert found == {rank: [[1], [3]] for rank in range(3)}


@pytest.mark.parametrize("spares", [0, 1])
def test_names_hold_one_object_behind_a_loss_where_they_did_at_the_commit(spares):
    found = told(lose("names_of_one_object.py", 3, SPARES=str(spares)))
    steps = [[step + 2.0] * 3 + [max(0.0, step - 1.0)] * 2 + [0.0] for step in range(4)]
    assert found == {1: [steps], 2: [steps]}


@pytest.mark.parametrize("imports", ["mpi4py.MPI mpi_replica", "mpi_replica mpi4py.MPI"])
def test_the_end_of_mpi_waits_for_no_fence_of_all_whatever_is_imported_first(imports):
    """Where one was killed Open MPI 5.0.11 came to no end behind it, now and then."""
    assert told(lose("end_of_mpi.py", 2, IMPORTS=imports)) == {0: [True], 1: [True]}


@pytest.mark.parametrize("file", ["test_elastic.py", "test_failures.py"])
def test_ranks_agree_with_fault_tolerance_as_without(file):
    settings = ["-q", "-o", "faulthandler_timeout=60", "-p", "no:cacheprovider", "--only-mpi"]
    done = run_to_its_end(
        "openmpi",
        3,
        ["-m", "pytest", *settings, ROOT / "tests" / "ranks" / file],
        succeeds=True,
        options=["--with-ft", "ulfm"],
    )
    assert " passed" in done.stdout
