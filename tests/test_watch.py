"""Ranks that do not come: stall reports, timeouts, cycles of waits (issue 3, DESIGN.md section 6).

One launch for each library and number of ranks runs many situations (see the folder watched); each
test looks at one of them.
"""

import functools
import gc
import json
import logging
import os
import re
import threading
from pathlib import Path

import pytest

import mpi_replica as mr
from jobs import run_job, run_to_its_end, told
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

WATCHED = Path(__file__).parent / "watched"

# By number of ranks. The culprit is the first rank, a middle one or the last.
SITUATIONS = {
    "stalls.py": {
        2: ["waits, first"],
        3: [
            *("waits, last", "loops", "stopped, first", "holds the GIL", "lock", "late replica"),
            *("fork", "come and go", "waits, once more"),
        ],
        4: ["waits, middle"],
    },
    "finals.py": {
        2: ["timeout, first", "both over the world, first"],
        3: [
            *("timeout, last", "timeout, raised", "both over the world, last"),
            *("a part of the world", "a ring", "left by an error", "a new one, last"),
            *("failure after a header", "failure after data", "no memory"),
        ],
        4: ["timeout, middle", "both over the world, middle", "a new one, middle"],
    },
}


@pytest.fixture(scope="module", params=LIBRARIES)
def runs(request, tmp_path_factory):
    """Give what came of a program of `WATCHED` on so many ranks: the first time it is run."""
    known = {}

    def run_once(name, ranks, *, succeeds):
        if (name, ranks) not in known:
            folder = tmp_path_factory.mktemp("run")
            file = folder / "found.json"
            known[name, ranks] = None  # so that a launch that fails is not tried again
            environment = {
                "SITUATIONS": ";".join(SITUATIONS[name][ranks]),
                "MPI_REPLICA_STALL_SECONDS": "1" if name == "stalls.py" else None,
                "MPI_REPLICA_FLIGHT_FOLDER": str(folder),
            }
            arguments = [WATCHED / name, file]
            done = run_to_its_end(
                request.param,
                ranks,
                arguments,
                succeeds=succeeds,
                env=environment,
                mostly_waiting=True,
            )
            assert file.exists(), done.stderr
            done.found, done.pids = json.loads(file.read_text())
            done.flights = [file.read_text() for file in sorted(folder.glob("flight-rank-*.txt"))]
            known[name, ranks] = done
        if known[name, ranks] is None:
            pytest.fail(f"{name} failed before, see above")
        return known[name, ranks]

    return run_once


@pytest.fixture
def stalls(runs):
    return lambda ranks=3: runs("stalls.py", ranks, succeeds=True)


@pytest.fixture
def finals(runs):
    return lambda ranks=3: runs("finals.py", ranks, succeeds=False)


@pytest.fixture(params=LIBRARIES)
def launch(request, tmp_path):
    """Run a program on some ranks, and return what came of it."""
    return functools.partial(run_job, request.param, tmp_path)


def place(name, mark):
    """Return the place of the line of a program that ends with a comment."""
    lines = (WATCHED / name).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return f"{name}:{number}"


def reports_of(done, situation, reporter, number=1):
    """Return the reports of a situation: one rank has logged them all."""
    of_ranks = done.found[situation]
    lengths = [number if rank == reporter else 0 for rank in range(len(of_ranks))]
    assert [len(texts) for texts in of_ranks] == lengths
    return of_ranks[reporter]


def check_head(text, seconds):
    """Check the first line of a report; return the others."""
    head, *lines = text.splitlines()
    call, _, waited = head.partition(" has waited ")
    assert call == f"all_reduce(SUM, float64[]) at {place('stalls.py', 'they wait')}"
    assert float(waited.removesuffix(" s.")) >= seconds
    return lines


def check_missing(done, lines, waiting, replicas, rank, mark):
    """Check who waits, who is missing, and at which line of the program it is."""
    assert lines[0] == f"  waiting: {waiting}"
    last = r"last call run\(total at stalls.py:\d+, value\) at stalls.py:\d+, [\d.]+ s ago"
    assert re.fullmatch(
        rf"  missing: {replicas} \(rank {rank}, host \S+, pid {done.pids[rank]}\), {last};"
        r" it is now at",
        lines[1],
    )
    end = lines.index("    its last calls:")
    number = place("stalls.py", mark).partition(":")[2]
    assert f'stalls.py", line {number}, in ' in lines[end - 2]
    assert lines[end - 1].endswith(f"# {mark}")


@pytest.mark.parametrize(
    ("ranks", "situation", "reporter", "waiting", "replicas", "culprit"),
    [
        (2, "waits, first", 1, "replicas 2-3 (rank 1)", "replicas 0-1", 0),
        (4, "waits, middle", 0, "replicas 0-1, 3 (ranks 0-1, 3)", "replica 2", 2),
        (3, "waits, once more", 1, "replicas 1-2 (ranks 1-2)", "replica 0", 0),
    ],
)
def test_a_rank_outside_of_any_collective_is_reported_once_with_its_stack(
    stalls, ranks, situation, reporter, waiting, replicas, culprit
):
    """By the lowest rank that waits; "once more" is after 50 strategies have come and gone."""
    done = stalls(ranks)
    (text,) = reports_of(done, situation, reporter)
    lines = check_head(text, 1)
    check_missing(done, lines, waiting, replicas, culprit, "late: it waits")


def test_it_is_reported_again_at_twice_the_limit(stalls):
    texts = reports_of(stalls(), "waits, last", reporter=0, number=2)
    for text, seconds in zip(texts, (1, 2), strict=True):
        lines, waiting = check_head(text, seconds), "replicas 0-1 (ranks 0-1)"
        check_missing(stalls(), lines, waiting, "replica 2", 2, "late: it waits")


def test_a_rank_that_loops_in_python_is_reported_with_its_stack(stalls):
    (text,) = reports_of(stalls(), "loops", reporter=0)
    lines, waiting = check_head(text, 1), "replicas 0-1, 4-5 (ranks 0, 2)"
    check_missing(stalls(), lines, waiting, "replicas 2-3", 1, "late: it loops")


@pytest.mark.parametrize(
    ("situation", "reporter", "waiting", "rank"),
    [
        ("stopped, first", 1, "replicas 1-2 (ranks 1-2)", 0),
        ("holds the GIL", 0, "replicas 0, 2 (ranks 0, 2)", 1),
    ],
)
def test_a_rank_that_can_not_answer_is_reported_as_such(stalls, situation, reporter, waiting, rank):
    (text,) = reports_of(stalls(), situation, reporter)
    first, second = check_head(text, 1)
    assert first == f"  waiting: {waiting}"
    assert re.fullmatch(
        rf"  missing: replica {rank} \(rank {rank}, host \S+, pid {stalls().pids[rank]}\)"
        r" does not answer: the process is stopped, its host can't be reached, or C code in it"
        r" holds the GIL",
        second,
    )


def test_a_replica_that_waits_for_a_lock_of_another_one_of_its_rank_is_recognised(stalls):
    """By the ranks that wait for it: its own rank leaves that to them."""
    for text in reports_of(stalls(), "lock", reporter=0, number=2):
        lines, waiting = check_head(text, 1), "replicas 0-4 (ranks 0-2)"
        check_missing(stalls(), lines, waiting, "replica 5", 2, "late: it wants the lock")
        assert lines[-1].startswith("    It waits for a lock, while replica 4 of the same rank")


def test_of_two_replicas_of_a_rank_the_late_one_is_missing(stalls):
    (text,) = reports_of(stalls(), "late replica", reporter=1)
    lines, waiting = check_head(text, 1), "replicas 0, 2-5 (ranks 0-2)"
    check_missing(stalls(), lines, waiting, "replica 1", 0, "late: it waits")


def test_a_forked_child_has_no_watcher_and_gives_the_signal_back(stalls):
    assert stalls().found["fork"] == [[], [], []]


def test_the_watcher_is_there_while_there_are_strategies(stalls):
    for names in stalls().found["come and go"]:
        first, *during, last = names
        assert (first, last) == ([], [])
        assert set(map(tuple, during)) == {("mpi_replica watch",)}


@pytest.mark.parametrize("ranks", SITUATIONS["stalls.py"])
def test_each_report_is_written_once_and_nothing_else(stalls, ranks):
    """Where nobody listens to the logger; also where a strategy is not closed."""
    done = stalls(ranks)
    found = [texts for name, texts in done.found.items() if name != "come and go"]
    reports = [text for of_ranks in found for texts in of_ranks for text in texts]
    assert sorted(done.stderr.splitlines()) == sorted("\n".join(reports).splitlines())


class Reports(logging.Handler):
    """What is logged, and what is done after the second report."""

    def __init__(self, then):
        super().__init__()
        self.texts = []
        self.then = then

    def emit(self, record):
        self.texts.append(record.getMessage())
        if len(self.texts) == 2:
            self.then()


def test_a_lock_of_another_replica_is_recognised_where_there_is_no_other_rank(monkeypatch):
    """Without mpiexec; the report comes again."""
    monkeypatch.setenv("MPI_REPLICA_STALL_SECONDS", "0.05")
    monkeypatch.setenv("MPI_REPLICA_TRANSPORT", "single")
    lock = threading.Lock()
    reports = Reports(lock.release)

    def step():
        context = mr.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            lock.acquire()
        else:
            with lock:
                pass
        return context.all_reduce("SUM", 1.0)

    logger = logging.getLogger("mpi_replica")
    logger.addHandler(reports)
    try:
        with mr.MPIStrategy(num_replicas=2) as strategy:
            totals = strategy.experimental_local_results(strategy.run(step))
    finally:
        logger.removeHandler(reports)
    assert totals == (2.0, 2.0)
    assert len(reports.texts) == 2
    for text in reports.texts:
        head, waiting, missing, *lines = text.splitlines()
        assert re.match(r"all_reduce\(SUM, float64\[\]\) at test_watch.py:\d+ has waited", head)
        assert waiting == "  waiting: replica 0 (rank 0)"
        assert missing.startswith("  missing: replica 1 (rank 0, host ")
        assert f"pid {os.getpid()}), no call so far; it is now at" in missing
        assert lines[-2] == "      with lock:"
        assert lines[-1].startswith("    It waits for a lock, while replica 0 of the same rank")
    assert not strategy.engine.watch.is_watched


def test_a_strategy_of_one_rank_that_an_error_has_left_is_watched_no_more(monkeypatch):
    monkeypatch.setenv("MPI_REPLICA_TRANSPORT", "single")
    strategy = mr.MPIStrategy(num_replicas=2)
    assert strategy.engine.watch.is_watched

    def leave():
        with strategy:
            raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        leave()
    assert not strategy.engine.watch.is_watched


@pytest.mark.parametrize(
    ("ranks", "situation", "waiting", "missing"),
    [
        (2, "timeout, first", "replica 1 (rank 1)", r"replica 0 \(rank 0,"),
        (3, "timeout, last", "replicas 0-3 (ranks 0-1)", r"replicas 4-5 \(rank 2,"),
        (4, "timeout, middle", "replicas 0-1, 3 (ranks 0-1, 3)", r"replica 2 \(rank 2,"),
    ],
)
def test_a_timeout_is_the_same_error_on_all_ranks_with_the_report(
    finals, ranks, situation, waiting, missing
):
    """Also on the late one when it comes; and for every later call."""
    of_ranks = finals(ranks).found[situation]
    ((kind, text),) = {(kind, text) for kind, text, _ in of_ranks}
    assert kind == "CollectiveTimeoutError"
    head, first, second, *lines = text.splitlines()
    timed = f"all_reduce(SUM, float64[], with a timeout) at {place('finals.py', 'timed')}"
    assert head == f"{timed} has waited 1.0 s."
    assert first == f"  waiting: {waiting}"
    assert re.match(f"  missing: {missing}", second)
    assert any(line.endswith("# late") for line in lines)
    assert lines[-1].startswith("The strategy can't be used any more")
    assert [again for _, _, again in of_ranks] == [[True, True, True]] * ranks


def test_an_error_that_the_others_do_not_come_to_hear_is_told_by_the_timeout_and_is_its_cause(
    finals,
):
    *others, (kind, text, again, cause) = finals().found["timeout, raised"]
    assert [one[:3] for one in others] == [[kind, text, again]] * 2
    assert {one[3] for one in others} == {"None"}
    assert (kind, cause, again) == ("CollectiveTimeoutError", "OSError('no halo')", [True])
    head, first, second, third, *_ = text.splitlines()
    assert head.startswith("run(error_beyond_the_timeout.<locals>.step at finals.py:")
    assert first == "  waiting: replica 2 (rank 2)"
    place_of_error = place("finals.py", "raised")
    assert second == f"  raised: OSError: no halo, by replica 2 (rank 2) at {place_of_error}"
    assert third.startswith("  missing: replica 0 (rank 0,")


@pytest.mark.parametrize(
    ("ranks", "situation", "calls"),
    [
        (2, "both over the world, first", ["first", "second"]),
        (3, "both over the world, last", ["first", "second"]),
        (3, "a part of the world", ["first", "second"]),
        (3, "a ring", ["first", "second", "third"]),
        (4, "both over the world, middle", ["first", "second"]),
        (3, "left by an error", ["first", "second"]),
        (3, "a new one, last", ["first", "new"]),
        (4, "a new one, middle", ["first", "new"]),
    ],
)
def test_ranks_that_wait_for_each_other_in_several_strategies_get_one_error(
    finals, ranks, situation, calls
):
    """With all call sites; final for each of the strategies."""
    of_ranks = finals(ranks).found[situation]
    ((kind, text),) = {(kind, text) for kind, text, _ in of_ranks}
    assert kind == "CollectiveMismatchError"
    assert text.startswith("strategies wait for each other, for ever. replica")
    for call in calls:
        assert text.count(f" at {place('finals.py', call)}") == 1
    assert text.count(" of a strategy of ") == len(calls)
    assert all(all(again) for _, _, again in of_ranks)


@pytest.mark.parametrize(
    ("situation", "error", "call"),
    [
        ("failure after a header", "OSError: the network is gone", "large"),
        ("failure after data", "OSError: the network is gone", "large"),
        ("no memory", "MemoryError: there is none", "gather"),
    ],
)
def test_what_fails_once_all_have_agreed_is_final_on_all_ranks(finals, situation, error, call):
    """It can't be told in the call itself, as it can before (see test_transport_errors.py)."""
    *others, last = finals().found[situation]
    assert last == [*error.split(": "), [True]]
    ((kind, text),) = {(kind, text) for kind, text, _ in others}
    assert kind == "RankLostError"
    assert text.startswith("replica 2 (rank 2) left all_")
    assert f" at {place('finals.py', call)} halfway, by {error}. The strategy can't be" in text
    assert [again for _, _, again in others] == [[True], [True]]


@pytest.mark.parametrize("ranks", SITUATIONS["finals.py"])
def test_every_rank_writes_its_flight_record_when_the_job_is_aborted(finals, ranks):
    """The last calls to stderr; all of them into the folder that the environment names."""
    done = finals(ranks)
    for rank in range(ranks):
        head = f"[rank {rank} of {ranks}] the job is aborted: it is at\n"
        assert done.stderr.count(head) == 1
        # those of the last strategy behind others, as of one that was left by an error
        calls = [line.partition(" ")[2] for line in done.flights[rank].splitlines()[-20:]]
        run, reduce = "run(first_call at ", "all_reduce(SUM, float64[]) at finals.py:"
        assert [call.startswith((reduce, run)[i % 2]) for i, call in enumerate(calls)] == [
            True
        ] * 20
        assert done.flights[rank].splitlines()[-1] in done.stderr
    assert len(done.flights) == ranks


def test_a_signal_to_one_rank_has_every_rank_write_where_it_is(launch):
    """Once, also inside a call of MPI that is the program's own, and where it has the signal."""
    done = launch(
        """
        import threading, time

        mine = lambda *_: tell("mine")
        if rank == 1:
            signal.signal(signal.SIGUSR2, mine)
        strategy = mr.MPIStrategy()
        check(strategy)
        pids = world.allgather(os.getpid())

        class Stderr:  # it lets rank 0 know
            def write(self, text):
                sys.__stderr__.write(text)
                if "SIGUSR2" in text:
                    world.send(None, 0, 7)

            def flush(self):
                sys.__stderr__.flush()

        def tell_when_it_waits():
            while not strategy.engine.watch.is_waiting:
                time.sleep(0.001)
            world.send(None, 0, 6)

        sys.stderr = Stderr()
        if rank == 0:
            for _ in range(2):
                world.recv(tag=6)
            os.kill(pids[2], signal.SIGUSR2)
            for _ in range(3):
                world.recv(tag=7)
            world.send(None, 1, 8)
        elif rank == 1:
            world.send(None, 0, 6) or world.recv(tag=8)  # until rank 0 goes on
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signal.getsignal(signal.SIGUSR2) is mine
        else:
            threading.Thread(target=tell_when_it_waits).start()
        check(strategy)
        """,
        3,
        succeeds=True,
    )
    assert told(done) == ["[1] mine"]
    texts = dict(re.findall(r"^\[rank (\d) of 3\] SIGUSR2: (.*(?:\n  .*)*)", done.stderr, re.M))
    assert sorted(texts) == ["0", "1", "2"]
    assert done.stderr.count("SIGUSR2") == 3 + texts["0"].count("SIGUSR2")
    assert texts["1"].startswith("it is at\n")
    assert "world.recv(tag=8)  # until rank 0 goes on\n" in texts["1"]
    assert texts["2"].startswith("it waits in the last of these calls\n")
    assert re.search(r"all_reduce\(SUM, float64\[\]\) at train.py:\d+, not ended", texts["2"])


def test_without_a_watcher_on_one_rank_there_is_none_and_a_timeout_is_local(launch):
    done = launch(
        """
        if rank == 1:
            os.environ["MPI_REPLICA_WATCH"] = "0"
        options = mr.CommunicationOptions(timeout_seconds=1)

        def timed():
            return mr.get_replica_context().all_reduce("SUM", 1.0, options)

        strategy = mr.MPIStrategy()
        tell(strategy.engine.transport.mailbox)
        check(strategy)
        if rank == 0:
            try:
                strategy.run(timed)
            except mr.errors.CollectiveTimeoutError as error:
                tell(error)
            world.send(None, 1)
        else:
            world.recv()
        """,
        env={"MPI_REPLICA_STALL_SECONDS": "0.1"},
    )
    first, text, second = told(done)
    assert (first, second) == ("[0] None", "[1] None")
    assert re.match(
        r"\[0\] all_reduce\(SUM, float64\[\], with a timeout\) at train.py:\d+ has", text
    )
    assert "has waited 1 s for the other ranks (replica 0 (rank 0) waits)" in text
    assert "missing" not in text
    assert "Without a watcher on every rank it is not known who is missing" in done.stderr


def test_a_strategy_that_is_dropped_without_being_closed_is_watched_no_more():
    before = set(threading.enumerate())
    strategy = mr.MPIStrategy(num_replicas=2)
    strategy.run(lambda: None)
    watch = strategy.engine.watch
    assert watch.is_watched
    del strategy
    gc.collect()
    assert not watch.is_watched
    assert not set(threading.enumerate()) - before
