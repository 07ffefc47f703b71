"""The connections between a launcher and its ranks: real processes, real sockets, real ends."""

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from command_line import is_running, variables
from mpi_replica.launcher.program import rank_program
from mpi_replica.launcher.rank_connections import SAVED, RankConnections
from mpi_replica.ranks.launcher_connection import VARIABLE

LIMIT_SECONDS = 20
LONG_STALL = 600.0

HEAD = """
    import ctypes, os, signal, socket, subprocess, sys, threading, time

    connection = sys.modules["mpi_replica.ranks.launcher_connection"]

    def wait():
        sys.stdin.read(1)
"""


class Launcher:
    """What a launcher does: it waits for ranks, and for their ends."""

    def __init__(self, way, size, stall_seconds):
        self.selector = selectors.PollSelector()
        self.ranks = RankConnections(self.selector, size, way == "TCP", [str(stall_seconds), "0"])
        self.secret, *words = self.ranks.variable[VARIABLE].split()
        self.address = next(one for one in words[2:] if one.startswith(":") == (way == "Unix"))
        if way == "TCP":
            self.address = f"127.0.0.1:{self.address.rpartition(':')[2]}"
        self.variable = {VARIABLE: " ".join([self.secret, *words[:2], self.address])}
        self.processes = []

    def close(self):
        for process in self.processes:
            process.kill()
            process.communicate()
        self.ranks.close()
        self.selector.close()

    def start(self, program, number=0, env=None):
        """Start a rank, and return its process."""
        text = textwrap.dedent(HEAD) + textwrap.dedent(program)
        process = subprocess.Popen(
            rank_program([sys.executable, "-c", text]),
            env=variables({"PMIX_RANK": str(number), "PYTHONUNBUFFERED": ""})
            # From Python 3.12 on who forks is warned of other threads.
            | {"PYTHONWARNINGS": "ignore::DeprecationWarning"}
            | self.variable
            | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def serve_until(self, has_come):
        """Deal with what comes, until this is true."""
        limit = time.monotonic() + LIMIT_SECONDS
        while not has_come():
            assert time.monotonic() < limit, {n: r.facts for n, r in self.ranks.ranks.items()}
            self.serve(0.1)

    def serve(self, seconds):
        for key, _ in self.selector.select(seconds):
            key.data()

    def serve_until_told(self, name, number=0):
        """Return what a rank has told under this name, when it has."""
        self.serve_until(lambda: name in self.facts(number))
        return self.facts(number)[name]

    def serve_until_ended(self, *numbers):
        self.serve_until(lambda: all(self.has_ended(number) for number in numbers))

    def has_ended(self, number):
        return number in self.ranks.ranks and self.ranks.ranks[number].ended_at is not None

    def facts(self, number):
        return self.ranks.ranks[number].facts if number in self.ranks.ranks else {}

    def connect(self):
        """Return the connection of a stranger."""
        host, _, port = self.address.rpartition(":")
        if host:
            return socket.create_connection((host, int(port)), LIMIT_SECONDS)
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(f"\0{port}")
        return stranger


@pytest.fixture
def launch():
    """Make a launcher, on this host or between hosts."""
    with contextlib.ExitStack() as stack:

        def make(way="Unix", size=1, stall_seconds=LONG_STALL):
            launcher = Launcher(way, size, stall_seconds)
            stack.callback(launcher.close)
            return launcher

        yield make


each_way = pytest.mark.parametrize("way", ["Unix", "TCP"])


def until_gone(pid):
    limit = time.monotonic() + LIMIT_SECONDS
    while is_running(pid):
        assert time.monotonic() < limit
        time.sleep(0.01)


@each_way
def test_ranks_that_came_and_were_gone_while_nobody_served_are_read_at_once(way, launch):
    launcher = launch(way, size=3)
    processes = [launcher.start("", number=number) for number in range(3)]
    for process in processes:
        process.communicate()
    assert launcher.ranks.missing() == [0, 1, 2]
    launcher.ranks.read()
    assert launcher.ranks.missing() == []
    assert all(map(launcher.has_ended, range(3)))
    assert launcher.ranks.have_ended_well(is_elastic=False)


@each_way
def test_a_rank_says_who_it_is_and_how_it_has_ended(way, launch):
    launcher = launch(way, size=2)
    assert launcher.ranks.missing() == [0, 1]
    process = launcher.start("wait()", number=1)
    launcher.serve_until(lambda: launcher.ranks.ranks)
    rank = launcher.ranks.ranks[1]
    assert (rank.number, rank.host, rank.pid) == (1, socket.gethostname(), process.pid)
    assert launcher.ranks.missing() == [0]
    process.communicate("x")
    launcher.serve_until_ended(1)
    assert (rank.facts["end"], rank.facts["status"]) == ("done", 0)
    assert not rank.is_lost
    assert not rank.has_failed
    assert launcher.ranks.lost == []
    assert launcher.ranks.last_end == math.inf  # the other may come


ABORTED_AT_EXIT = (
    "import atexit; from mpi_replica.strategy import job_end; atexit.register(job_end.abort, 3)"
)
ENDS = {
    "": ("done", 0, 0),
    "sys.exit()": ("done", 0, 0),
    "sys.exit(3)": ("exit", 3, 3),
    "sys.exit('a reason')": ("exit", 1, 1),
    "raise KeyError(3)": ("error", 1, 1),
    "raise KeyboardInterrupt": ("error", 130, 130),
    "1 +": ("error", 1, 1),
    "import atexit; atexit.register(lambda: 1 / 0)": ("done", 0, 0),
    "threading.Thread(target=lambda: 1 / 0).start()": ("done", 0, 0),
    "sys.stdout.close()": ("done", 0, 0),
    "sys.stdout = sys.stderr = None": ("done", 0, 0),
    "del sys.stdout, sys.stderr": ("done", 0, 0),
    "sys.stdout.detach()": ("error", 120, 120),
    "sys.stdout = type('', (), {'flush': lambda self: 1 / 0})()": ("error", 120, 120),
    "sys.stderr = None; sys.exit('a reason')": ("exit", 1, 1),
    "del sys.stderr; sys.exit('a reason')": ("exit", 1, 1),
    "sys.stderr.close(); sys.exit('a reason')": ("exit", 1, 1),
    "sys.exit(type('', (), {'__str__': lambda self: 1 / 0})())": ("exit", 1, 1),
    "os.chdir('/')": ("done", 0, 0),
    "assert __builtins__ is sys.modules['builtins']": ("done", 0, 0),
    # What it has printed is lost.
    "ends = os.pipe(); os.dup2(ends[1], 1); os.closerange(*ends); os.close(ends[1]); print()": (
        *("error", 120, 120),
    ),
    "os.environ.clear()": ("done", 0, 0),
    "threading.Thread(target=threading.Event().wait, daemon=True).start()": ("done", 0, 0),
    "from mpi_replica.errors import RankLostError; raise RankLostError('x')": ("loss", 1, 1),
    # An error that is its own cause.
    "import mpi_replica\ntry: int('x')\nexcept ValueError as error: raise error from error": (
        *("error", 1, 1),
    ),
    # What was begun can't be ended: the job is aborted at exit. That hides no cause before it.
    ABORTED_AT_EXIT: ("abort", 3, 3),
    f"{ABORTED_AT_EXIT}; sys.exit(4)": ("exit", 4, 3),
    f"{ABORTED_AT_EXIT}; raise KeyError(3)": ("error", 1, 3),
}


@pytest.mark.parametrize("program", ENDS)
def test_no_program_that_python_ends_is_lost(program, launch):
    launcher = launch()
    process = launcher.start(program)
    launcher.serve_until_ended(0)
    facts = launcher.ranks.ranks[0].facts
    assert (facts["end"], facts["status"], process.wait(LIMIT_SECONDS)) == ENDS[program]
    assert launcher.ranks.lost == []
    assert launcher.ranks.last_end < math.inf
    assert launcher.ranks.have_ended_well(is_elastic=False) == (facts["status"] == 0)


DEATHS = {
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "os._exit(3)": 3,
    "ctypes.CDLL(None)._exit(0)": 0,
    "ctypes.CDLL(None)._exit(3)": 3,
    "ctypes.string_at(0)": -signal.SIGSEGV,
    "os.abort()": -signal.SIGABRT,
    "import atexit; atexit.register(os._exit, 3)": 3,
}


@pytest.mark.parametrize("program", DEATHS)
@each_way
def test_a_rank_that_ends_without_a_word_is_lost(program, way, launch):
    launcher = launch(way)
    # No file of its memory where the system writes those.
    process = launcher.start(
        f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n{program}"
    )
    launcher.serve_until_ended(0)
    assert process.wait(LIMIT_SECONDS) == DEATHS[program]
    rank = launcher.ranks.ranks[0]
    assert launcher.ranks.lost == [rank]
    assert launcher.ranks.loss_text() == (
        f"rank 0 ({socket.gethostname()}, pid {process.pid}) was lost: its process ended without a"
        " word"
    )
    assert not launcher.ranks.have_ended_well(is_elastic=False)
    assert not launcher.ranks.have_ended_well(is_elastic=True)  # nobody is left


def test_an_end_that_was_not_waited_for_can_still_be_read(launch):
    """That of a rank, where the launcher of the library has ended just now."""
    launcher = launch()
    process = launcher.start("wait()")
    launcher.serve_until(lambda: launcher.ranks.ranks)
    process.kill()
    process.wait(LIMIT_SECONDS)
    assert launcher.ranks.lost == []
    launcher.ranks.read()
    assert launcher.ranks.loss_text().startswith("rank 0 (")


FORKS = {
    "os.fork": "if os.fork() == 0:\n    wait()\n    os._exit(0)",
    "multiprocessing": (
        "import multiprocessing\n"
        "context = multiprocessing.get_context('fork')\n"
        "child = context.Process(target=os.read, args=(0, 1))\n"
        "child.start()"
    ),
    "subprocess": "subprocess.Popen(['cat'])",
    "all files": "subprocess.Popen(['cat'], close_fds=False)",
}


@pytest.mark.parametrize("fork", FORKS)
def test_no_child_of_a_rank_holds_its_connection_open(fork, launch):
    launcher = launch()
    program = f"{FORKS[fork]}\nconnection.tell(children=open('/proc/self/task/%d/children'"
    program += " % os.getpid()).read())\nos.kill(os.getpid(), signal.SIGKILL)"
    launcher.start(program)
    launcher.serve_until_ended(0)
    assert len(launcher.ranks.lost) == 1
    children = [int(word) for word in launcher.facts(0)["children"].split()]
    try:
        assert len(children) == 1
        assert all(map(is_running, children))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_rank_that_becomes_another_program_is_not_lost(launch):
    launcher = launch()
    process = launcher.start("os.execv(sys.executable, [sys.executable, '-c', 'input()'])")
    launcher.serve_until_ended(0)
    assert is_running(process.pid)
    assert (launcher.ranks.lost, launcher.ranks.loss_text()) == ([], "")
    assert launcher.ranks.last_end == launcher.ranks.last_told_end == math.inf
    # How it ends is not known here.
    assert not launcher.ranks.have_ended_well(is_elastic=False)
    process.communicate("x\n")
    assert process.returncode == 0


FAILED_EXECS = {
    "os.execv('/nowhere', ['x'])": "FileNotFoundError",
    "os.execvp('no-program-of-this-name', ['x'])": "FileNotFoundError",
    "os.execve('/bin/true', ['x'], {'a=b': 'c'})": "ValueError",
}


@pytest.mark.parametrize("call", FAILED_EXECS)
def test_a_rank_that_fails_to_become_another_program_is_one_as_before(call, launch):
    launcher = launch(size=2)
    program = f"""
        try:
            {call}
        except {FAILED_EXECS[call]}:
            connection.tell(went_on=True)
        wait()
    """
    ends, stays = launcher.start(program, 0), launcher.start(program, 1)
    for number in range(2):
        launcher.serve_until_told("went_on", number)
    ends.communicate("x")
    launcher.serve_until_ended(0)
    assert (launcher.facts(0)["end"], launcher.ranks.lost) == ("done", [])
    launcher.ranks.close()
    assert stays.wait(LIMIT_SECONDS) == -signal.SIGKILL


# What __main__ holds goes last where a library has kept that module, as JAX does.
@pytest.mark.parametrize("kept", ["", "sys.kept = sys.modules['__main__']"])
def test_what_a_rank_does_behind_its_last_line_is_not_its_end_yet(kept, launch):
    launcher = launch()
    process = launcher.start(
        f"""
        class AtEnd:
            def __del__(self, wait=sys.stdin.read, write=os.write):
                write(1, b"begins\\n")
                wait(1)
                write(1, b"written")

        kept = AtEnd()
        {kept}
        """
    )
    launcher.serve_until(lambda: launcher.ranks.last_told_end < math.inf)
    assert launcher.facts(0)["end"] == "done"
    assert process.stdout.readline() == "begins\n"
    launcher.serve(0)  # an end of the connection would be there
    assert launcher.ranks.last_end == math.inf
    assert process.communicate("x")[0] == "written"
    launcher.serve_until_ended(0)
    assert launcher.ranks.last_end >= launcher.ranks.last_told_end


def test_a_file_in_the_place_of_a_closed_connection_is_the_programs_own(launch):
    launcher = launch()
    process = launcher.start(
        """
        mine = next(int(fd) for fd in os.listdir("/proc/self/fd")
                    if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"))
        os.close(mine)
        one, other = socket.socketpair()
        assert mine in (one.fileno(), other.fileno())
        connection.tell(here=True)
        if os.fork() == 0:
            one.send(b"child")
            os._exit(0)
        os.wait()
        connection.note_end("done", 0)
        connection.tell_end()
        one.send(b"x")
        assert other.recv(100) == b"childx"
        assert not connection.has_told_end()
        """
    )
    _, error = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, error) == (0, "")


def test_what_a_forked_child_does_is_nothing_of_the_rank(launch):
    launcher = launch()
    process = launcher.start(
        """
        if os.fork() == 0:
            connection.tell(child=True)
            connection.note_end("error", 1)
            connection.tell_end()
            sys.exit(5)
        os.wait()
        """
    )
    launcher.serve_until_ended(0)
    assert process.wait(LIMIT_SECONDS) == 0
    assert "child" not in launcher.facts(0)
    assert launcher.facts(0)["end"] == "done"
    assert launcher.ranks.failed is None


DEAF = """
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    connection.tell(here=True)
"""
STUCK = {
    # Python's lock is held in both.
    "pause": "ctypes.PyDLL(None).pause()",
    "sleep": "ctypes.PyDLL(None).sleep(10000)",
    "a loop": "while True: pass",
    "a stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "a thread": "threading.Thread(target=time.sleep, args=(10000,)).start()",
    "the end": "import atexit; atexit.register(time.sleep, 10000)",
}


@pytest.mark.parametrize("where", STUCK)
@each_way
def test_the_end_of_the_launcher_kills_a_rank_wherever_it_is(where, way, launch):
    launcher = launch(way)
    process = launcher.start(textwrap.dedent(DEAF) + STUCK[where])
    launcher.serve_until_told("here")
    launcher.ranks.close()
    assert process.wait(LIMIT_SECONDS) == -signal.SIGKILL


def test_all_ranks_end_with_their_launcher(launch):
    launcher = launch(size=3)
    processes = [launcher.start("wait()", number) for number in range(3)]
    launcher.serve_until(lambda: not launcher.ranks.missing())
    launcher.ranks.close()
    assert [process.wait(LIMIT_SECONDS) for process in processes] == [-signal.SIGKILL] * 3


# Between connecting and asking for the end.
BETWEEN = """
    import runpy, socket, sys

    def gethostname(read=sys.stdin.read):
        sys.stdout.write("here\\n")
        sys.stdout.flush()
        read(1)
        return "host"

    socket.gethostname = gethostname
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@each_way
def test_a_launcher_that_ends_while_a_rank_connects_kills_it_too(way, launch):
    launcher = launch(way)
    rank = rank_program([sys.executable, "-c", "import time; time.sleep(10000)"])
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BETWEEN), *rank[1:]],
        env=variables({"PMIX_RANK": "0"}) | launcher.variable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    launcher.processes.append(process)
    assert process.stdout.readline() == "here\n"
    launcher.ranks.close()
    process.stdin.write("x")
    process.stdin.close()
    process.stdin = None
    assert process.wait(LIMIT_SECONDS) == -signal.SIGKILL


@each_way
def test_a_rank_lives_on_when_the_launcher_reads_late_whatever_it_has_told(way, launch):
    """The launcher may be stopped, or wait for whoever reads what it writes."""
    launcher = launch(way)
    process = launcher.start(
        """
        wait()
        for number in range(5000):
            connection.tell(number=number, text="x" * 1000)
        os.write(1, b"all\\n")
        wait()
        """
    )
    launcher.serve_until(lambda: launcher.ranks.ranks)
    process.stdin.write("x")
    process.stdin.flush()
    assert process.stdout.readline() == "all\n"
    launcher.serve_until_told("number")
    process.communicate("x")
    launcher.serve_until_ended(0)
    assert launcher.facts(0)["end"] == "done"
    assert process.returncode == 0


STRANGERS = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "a number": b"5\n",
    "a list": b"[]\n",
    "nothing": b"\n",
    "no secret": b"{}\n",
    "not UTF-8": b"\xff\xfe\n",
    "half a line": b'{"secret": ',
    "a wrong secret": b'{"secret": "0123", "rank": 0, "host": "x", "pid": 1}\n',
    "a secret of another kind": b'{"secret": 5, "rank": 0, "host": "x", "pid": 1}\n',
    "a secret not in ASCII": '{"secret": "\u00e9", "rank": 0, "host": "x", "pid": 1}\n'.encode(),
    "a depth": b"[" * 60_000 + b"\n",
    "no end": b"x" * 200_000,
    "a large number": b"1" * 60_000 + b"\n",
}


@pytest.mark.parametrize("text", STRANGERS)
@each_way
def test_who_does_not_know_the_secret_is_turned_away_and_changes_nothing(text, way, launch):
    launcher = launch(way)
    with launcher.connect() as stranger:
        stranger.setblocking(False)
        data = STRANGERS[text]
        with contextlib.suppress(ConnectionError):
            while data:
                with contextlib.suppress(BlockingIOError):
                    data = data[stranger.send(data) :]
                launcher.serve(0.01)
        if text == "half a line":
            stranger.shutdown(socket.SHUT_WR)
        launcher.serve_until(lambda: is_turned_away(stranger))
    assert (launcher.ranks.ranks, launcher.ranks.lost, launcher.ranks.failed) == ({}, [], None)
    assert launcher.ranks.first_at == math.inf
    launcher.start("")
    launcher.serve_until_ended(0)
    assert launcher.ranks.have_ended_well(is_elastic=False)


def is_turned_away(stranger):
    try:
        return stranger.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@each_way
def test_strangers_who_say_nothing_hold_nobody_up(way, launch):
    launcher = launch(way)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(launcher.connect())
            launcher.serve(LIMIT_SECONDS)  # one connection after another
        launcher.start("")
        launcher.serve_until_ended(0)
    assert launcher.ranks.have_ended_well(is_elastic=False)


def test_what_comes_in_pieces_is_put_together(launch):
    launcher = launch()
    with launcher.connect() as rank:
        about = {"secret": launcher.secret, "rank": 0, "host": "x", "pid": 1}
        lines = json.dumps(about) + '\n{"mpi": true}\n{"num_replicas": 4}\n'
        for byte in lines.encode():
            rank.send(bytes([byte]))
            launcher.serve(0.1)
        launcher.serve_until_told("num_replicas")
    assert launcher.ranks.have_all_begun
    assert launcher.ranks.fact("num_replicas") == 4
    assert launcher.ranks.fact("goes_on") is None


def test_a_strategy_of_some_ranks_does_not_change_how_many_replicas_a_job_has(launch):
    launcher = launch()
    launcher.start("connection.tell(num_replicas=4); connection.tell(num_replicas=1, last=True)")
    launcher.serve_until_told("last")
    assert launcher.ranks.fact("num_replicas") == 4


def test_threads_that_tell_at_once_do_not_mix_their_lines(launch):
    launcher = launch()
    launcher.start(
        """
        barrier = threading.Barrier(8)

        def told(name):
            barrier.wait()
            for number in range(4):
                connection.tell(**{name: number})

        threads = [threading.Thread(target=told, args=(f"name{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        """
    )
    launcher.serve_until_ended(0)
    assert launcher.facts(0)["end"] == "done"
    assert [launcher.facts(0)[f"name{i}"] for i in range(8)] == [3] * 8


# An error whose rank is still at work on its end.
FAILS = """
    sys.excepthook = lambda *_: wait()
    raise KeyError("no such row")
"""


def test_a_rank_that_is_lost_after_another_has_begun_to_fail_is_no_loss(launch):
    launcher = launch(size=2)
    failing, other = launcher.start(FAILS, 0), launcher.start("wait()", 1)
    launcher.serve_until_told("begins_end", 0)
    launcher.serve_until(lambda: not launcher.ranks.missing())
    assert "end" not in launcher.facts(0)
    other.kill()
    launcher.serve_until_ended(1)
    assert [rank.number for rank in launcher.ranks.lost] == [1]
    assert launcher.ranks.loss_text() == ""
    failing.communicate("x")
    launcher.serve_until_ended(0)
    assert launcher.ranks.failed.number == 0
    assert launcher.ranks.loss_text() == ""


def test_an_error_comes_before_the_losses_behind_it_also_where_the_launcher_sees_both_late(launch):
    """It reads first from the one that has connected first."""
    launcher = launch(size=3)
    others = [launcher.start("wait()", 1), launcher.start("wait()", 2)]
    launcher.serve_until(lambda: launcher.ranks.missing() == [0])
    failing = launcher.start(
        "    wait()\n" + FAILS.replace("wait()", "os.write(1, b'fails\\n')"), 0
    )
    launcher.serve_until(lambda: not launcher.ranks.missing())
    failing.stdin.write("x")
    failing.stdin.flush()
    assert failing.stdout.readline() == "fails\n"
    for other in others:
        other.kill()
        other.wait(LIMIT_SECONDS)
    launcher.serve_until_ended(0, 1, 2)
    assert len(launcher.ranks.lost) == 2
    assert launcher.ranks.loss_text() == ""


LEFT = """
    from mpi_replica.errors import RankLostError
    error = RankLostError("the program has ended on rank 0")
    error._is_of_program = True
    raise error
"""


def test_the_status_is_that_of_the_rank_that_began_to_fail_first_though_it_takes_longer(launch):
    launcher = launch(size=2)
    first = launcher.start("import atexit\natexit.register(wait)\nsys.exit(5)", 0)
    launcher.serve_until_told("begins_end", 0)
    assert launcher.ranks.status_of_failure == 0
    launcher.start("1 / 0", 1)
    launcher.serve_until_ended(1)
    assert launcher.ranks.failed.number == 1
    assert launcher.ranks.status_of_failure == 5
    first.communicate("x")


def test_the_status_of_one_that_has_failed_comes_before_that_of_one_that_has_saved(launch):
    launcher = launch(size=3)
    saved = launcher.start(f"import atexit\natexit.register(wait)\nsys.exit({SAVED})", 0)
    launcher.serve_until_told("begins_end", 0)
    first = launcher.start("import atexit\natexit.register(wait)\nsys.exit(5)", 1)
    launcher.serve_until_told("begins_end", 1)
    launcher.start("1 / 0", 2)
    launcher.serve_until_ended(2)
    assert launcher.ranks.status_of_failure == 5
    saved.communicate("x")
    first.communicate("x")


def test_it_is_so_where_the_launcher_reads_first_from_one_that_ends_since_another_does(launch):
    launcher = launch(size=2)
    launcher.start(LEFT, 1)
    launcher.serve_until_ended(1)
    assert launcher.ranks.status_of_failure == 1
    assert launcher.ranks.loss_text() == ""
    launcher.start("sys.exit(5)", 0)
    launcher.serve_until_ended(0)
    assert launcher.ranks.failed.number == 1
    assert launcher.ranks.status_of_failure == 5


def test_a_rank_that_is_lost_while_it_ends_by_an_error_is_no_loss(launch):
    launcher = launch(size=2)
    failing = launcher.start(FAILS, 0)
    launcher.serve_until_told("begins_end", 0)
    failing.kill()
    launcher.serve_until_ended(0)
    assert launcher.ranks.loss_text() == ""


def test_an_error_after_a_loss_leaves_it_a_loss(launch):
    launcher = launch(size=2)
    failing, other = launcher.start("wait()\n1 / 0", 0), launcher.start("wait()", 1)
    launcher.serve_until(lambda: not launcher.ranks.missing())
    other.kill()
    launcher.serve_until_ended(1)
    failing.communicate("x")
    launcher.serve_until_ended(0)
    assert launcher.facts(0)["end"] == "error"
    assert launcher.ranks.loss_text().startswith("rank 1 (")


LOST = """
    from mpi_replica.errors import RankLostError
    try:
        raise RankLostError("rank 1 was lost")
    except RankLostError as error:
        raise {} from error
"""


@pytest.mark.parametrize("error", ["error", "RuntimeError('no step')"])
def test_a_rank_that_ends_by_the_loss_of_another_tells_of_it(error, launch):
    launcher = launch(size=2)
    process = launcher.start(
        LOST.format(error).replace("from error", "") if error == "error" else LOST.format(error)
    )
    launcher.serve_until_ended(0)
    assert process.wait(LIMIT_SECONDS) == 1
    assert launcher.facts(0)["end"] == "loss"
    assert (
        launcher.ranks.loss_text() == f"{launcher.ranks.ranks[0]} has ended by the loss of a rank"
    )
    # Where another has failed by itself, that is what the loss comes of.
    launcher.start("1 / 0", 1)
    launcher.serve_until_ended(1)
    assert launcher.ranks.loss_text() == ""


def test_the_first_of_several_lost_ranks_is_named(launch):
    launcher = launch(size=3)
    processes = [launcher.start("wait()", number) for number in range(3)]
    launcher.serve_until(lambda: not launcher.ranks.missing())
    for number in (2, 0, 1):
        processes[number].kill()
        launcher.serve_until_ended(number)
    assert [rank.number for rank in launcher.ranks.lost] == [2, 0, 1]
    assert launcher.ranks.loss_text().startswith("rank 2 (")
    assert launcher.ranks.last_end == launcher.ranks.ranks[1].ended_at


def test_a_rank_that_has_left_at_once_is_named_before_one_that_is_lost_after_it(launch):
    """The library ends the others without a word."""
    launcher = launch(size=3)
    launcher.start("import atexit\nwait()", 0)
    leaves, other = launcher.start("wait()\nos._exit(0)", 1), launcher.start("wait()", 2)
    launcher.serve_until(lambda: not launcher.ranks.missing())
    leaves.stdin.write("x")
    leaves.stdin.flush()
    launcher.serve_until_ended(1)
    assert launcher.ranks.loss_text() == ""
    other.kill()
    launcher.serve_until_ended(2)
    one, two = launcher.ranks.ranks[1], launcher.ranks.ranks[2]
    assert launcher.ranks.loss_text() == (
        f"{one} has left by os._exit(0) while others went on, of which"
        f" {two} was lost: its process ended without a word"
    )


def test_where_all_ranks_were_lost_the_first_is_named_though_others_had_gone_on_without_it(launch):
    launcher = launch(size=2)
    first = launcher.start("connection.tell(here=True)\nwait()", 0)
    launcher.serve_until_told("here", 0)
    last = launcher.start(f"connection.tell(went_on_without=[{first.pid}])\nwait()", 1)
    launcher.serve_until_told("went_on_without", 1)
    first.kill()
    launcher.serve_until_ended(0)
    assert launcher.ranks.loss_text() == ""
    last.kill()
    launcher.serve_until_ended(1)
    assert launcher.ranks.loss_text().startswith("rank 0 (")


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_job_has_ended_well_without_a_lost_rank_only_where_it_goes_on_without(
    is_elastic, goes_on, launch
):
    launcher = launch(size=2)
    lost = launcher.start("os._exit(1)", 0)
    launcher.start(f"connection.tell(went_on_without=[{lost.pid}])" if goes_on else "", 1)
    launcher.serve_until_ended(0, 1)
    assert launcher.ranks.have_ended_well(is_elastic) == (is_elastic and goes_on)


def test_a_rank_that_waits_for_one_that_was_lost_before_is_heard(launch, monkeypatch):
    launcher = launch(size=2)
    waiting, other = launcher.start("wait()", 0), launcher.start("wait()", 1)
    del waiting
    launcher.serve_until(lambda: not launcher.ranks.missing())
    other.kill()
    launcher.serve_until_ended(1)
    lost, rank = launcher.ranks.ranks[1], launcher.ranks.ranks[0]
    assert not launcher.ranks.is_waited_for
    rank.waits_for, rank.waits_at = {lost.pid}, lost.ended_at + 1.0  # the library may still tell it
    assert not launcher.ranks.is_waited_for
    rank.waits_at = lost.ended_at + 3.1
    assert launcher.ranks.is_waited_for
    rank.waits_for = {rank.pid}
    assert not launcher.ranks.is_waited_for


def test_what_a_rank_starts_knows_nothing_of_the_launcher(launch):
    launcher = launch()
    process = launcher.start(
        """
        command = [sys.executable, "-c", "import os; print('MPI_REPLICA_LAUNCHER' in os.environ)"]
        subprocess.run(command, check=True)
        sys.stdout.flush()
        # Also past os.environ.
        ctypes.CDLL(None).system(b'echo "[$MPI_REPLICA_LAUNCHER]"')
        """
    )
    assert process.communicate(timeout=LIMIT_SECONDS)[0].splitlines() == ["False", "[]"]


def test_without_a_launcher_nothing_is_told_and_nothing_is_started(launch):
    launcher = launch()
    process = launcher.start(
        """
        connection.tell(here=True)
        connection.tell_mpi_has_started()
        connection.note_end("error", 3)
        connection.tell_end()
        assert not connection.has_told_end()
        assert threading.active_count() == 1
        files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        # The last was that of listdir; a libffi keeps its own file open.
        assert [file for file in files[3:-1] if "libffi" not in file] == []
        """,
        env={VARIABLE: ""},
    )
    _, error = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, error) == (0, "")


@each_way
def test_a_rank_that_does_not_reach_its_launcher_says_so_and_ends(way, launch):
    launcher = launch(way)
    launcher.ranks.close()
    process = launcher.start("print('not reached')")
    out, error = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, out) == (1, "")
    assert f"can't reach the launcher ({launcher.address}: [Errno " in error
    assert "Traceback" not in error


def test_a_rank_tries_all_addresses_of_its_launcher(launch):
    launcher = launch("TCP")
    port = launcher.address.rpartition(":")[2]
    places = f":mpi_replica-not-here absent.invalid:{port} 127.0.0.1:1 {launcher.address}"
    launcher.start("", env={VARIABLE: f"{launcher.secret} 600 0 {places}"})
    launcher.serve_until_ended(0)
    assert launcher.facts(0)["end"] == "done"


def test_a_rank_tells_where_it_is_until_mpi_has_started(launch):
    launcher = launch(stall_seconds=0.05)
    process = launcher.start(
        """
        def load():
            wait()

        load()
        connection.tell_mpi_has_started()
        """
    )
    place = launcher.serve_until_told("place")
    # The program's frames, and no others.
    assert [line.split(", in ")[1] for line in place.splitlines() if ", in " in line] == [
        "<module>",
        "load",
        "wait",
    ]
    process.communicate("x", timeout=LIMIT_SECONDS)
    launcher.serve_until_ended(0)
    assert launcher.facts(0)["mpi"]


def test_of_a_deep_stack_the_innermost_frames_are_told(launch):
    launcher = launch(stall_seconds=0.05)
    process = launcher.start(
        """
        def load(depth):
            unpack(depth - 1) if depth else wait()

        def unpack(depth):
            load(depth)

        load(300)
        """
    )
    place = launcher.serve_until_told("place")
    frames = [line.split(", in ")[1] for line in place.splitlines() if ", in " in line]
    assert frames == [*["load", "unpack"] * 9, "load", "wait"]
    process.communicate("x", timeout=LIMIT_SECONDS)


def test_what_is_too_much_to_be_told_takes_no_room_from_what_follows(launch):
    launcher = launch()
    launcher.start("connection.tell(text='x' * 70_000); connection.tell(follows=True)")
    assert launcher.serve_until_told("follows")
    assert "text" not in launcher.facts(0)


def test_ranks_that_make_a_strategy_of_all_wait_in_vain_for_one_that_has_ended(launch):
    launcher = launch(size=3)
    for number in (1, 2):
        launcher.start("connection.tell(makes_with=3); wait()", number)
        launcher.serve_until_told("makes_with", number)
    gone = launcher.start("", 0)
    launcher.serve_until_ended(0)
    ended_at = launcher.ranks.ranks[0].ended_at
    assert launcher.ranks.left_alone(math.nextafter(ended_at, 0)) == ""
    assert launcher.ranks.left_alone(ended_at) == (
        f"rank 0 ({socket.gethostname()}, pid {gone.pid}) has come to its end, and ranks 1-2"
        " wait for it to make a strategy. Make the strategy on all ranks"
    )


@pytest.mark.parametrize(
    ("of_others", "of_gone"),
    [
        ("", ""),
        ("connection.tell(makes_with=2)", ""),  # a strategy of theirs
        ("connection.tell_mpi_has_started()", ""),
        ("connection.tell(makes_with=3)", "connection.tell_mpi_has_started()"),  # it made one, too
        ("connection.tell(makes_with=3); sys.exit()", ""),
        ("connection.tell(makes_with=3)", "sys.exit(3)"),  # which ends the job by itself
    ],
)
def test_nobody_waits_in_vain_for_a_rank_that_has_ended_otherwise(of_others, of_gone, launch):
    launcher = launch(size=3)
    for number in (1, 2):
        launcher.start(f"connection.tell(is_there=True); {of_others}\nwait()", number)
        launcher.serve_until_told("end" if "exit" in of_others else "is_there", number)
    launcher.start(of_gone, 0)
    launcher.serve_until_ended(0)
    assert launcher.ranks.left_alone(math.inf) == ""
