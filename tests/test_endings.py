"""Programs whose ranks end at different places (DESIGN.md section 8)."""

import code
import os
import signal
import sys
import textwrap

import pytest

from launching import LIBRARIES, ROOT, run_ranks
from mpi_replica.ranks import early_end

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself


@pytest.fixture(params=LIBRARIES)
def launch(request, tmp_path):
    """Run a program, on two ranks or more."""

    def run(program, ranks=2, **settings):
        file = tmp_path / "train.py"
        file.write_text("import mpi_replica as mr\n" + textwrap.dedent(program))
        environment = {"PYTHONPATH": str(ROOT)}
        settings = {"timeout_seconds": 60, "env": environment, **settings}
        return run_ranks(request.param, ranks, [file], **settings)

    return run


def test_a_rank_that_ends_with_two_strategies_leaves_both_at_once(launch):
    done = launch(
        """
        one, other = mr.MPIStrategy(), mr.MPIStrategy()
        if one.rank == 1:
            other.run(lambda: None)
        """
    )
    assert done.returncode == 1
    assert "RankLostError: the program has ended on replica 0 (rank 0)" in done.stderr


def test_an_agreed_error_that_one_rank_alone_does_not_catch_is_printed_there(launch):
    done = launch(
        """
        strategy = mr.MPIStrategy()
        def step():
            raise ValueError("from both replicas")
        try:
            strategy.run(step)
        except ValueError:
            if strategy.rank == 1:
                raise
        strategy.run(lambda: None)
        """
    )
    assert done.returncode == 1
    assert "ValueError: from both replicas" in done.stderr
    assert "RankLostError: the program has ended on replica 1 (rank 1)" in done.stderr


@pytest.mark.parametrize(
    "batch", ["{'ab'[strategy.rank]: [1.0, 2.0]}", "[1.0] * (2 + strategy.rank)"]
)
def test_input_that_differs_between_ranks_ends_the_job_with_one_traceback(launch, batch):
    done = launch(
        f"""
        strategy = mr.MPIStrategy()
        batch = mr.data.Dataset.from_tensor_slices({batch}).batch(4)
        for _ in strategy.experimental_distribute_dataset([*batch]):
            pass
        """
    )
    assert done.returncode == 1
    assert "StructureMismatchError" in done.stderr
    assert done.stderr.count("Traceback") == 1


WIDE = "from mpi_replica.collectives.agreement import agreement; agreement._ALLGATHER_RANKS = 1"
OTHER_VALUE = (
    "v.assign_add(float(strategy.rank))",
    "ValueError: update(assign_add to variable 0 'Variable') at train.py:8: the values differ"
    " between replica 0 (rank 0) and replica 1 (rank 1). What update writes must be the same",
)
ONE_ALONE = (
    "v.assign(1.0) if strategy.rank else None",
    "replicas are at different calls. replica 0 (rank 0): no such call; replica 1 (rank 1):"
    " update(assign to variable 0 'Variable') at train.py:8. All replicas must make",
)
# Another step of input on one rank alone leaves nothing behind.
ALIKE = ("v.assign(1.0); strategy.rank or next(iter(dataset))", "")


@pytest.mark.parametrize(
    ("way", "last", "told"),
    [("", *OTHER_VALUE), (WIDE, *OTHER_VALUE), ("", *ONE_ALONE), ("", *ALIKE)],
)
def test_what_ranks_assign_at_last_is_compared_where_the_program_ends(launch, way, last, told):
    done = launch(
        f"""
        {way}
        strategy = mr.MPIStrategy()
        with strategy.scope():
            v = mr.Variable(0.0)
        dataset = strategy.experimental_distribute_dataset(mr.data.Dataset.range(4).batch(2))
        def last(v): {last}
        strategy.extended.update(v, last)
        print("done", flush=True)
        """
    )
    assert done.stdout.count("done") == 2, done.stderr
    assert done.returncode == (1 if told else 0), done.stderr
    assert told in done.stderr
    assert done.stderr.count("Error: ") == bool(told)


BY_ALARM = (128 + signal.SIGALRM, signal.SIGALRM)  # as Open MPI's launcher tells it, and MPICH's
BEGIN_MPI = "from mpi4py import MPI; rank = MPI.COMM_WORLD.rank"
# Where MPI has not begun Open MPI's launcher ends the job with the first process that fails.
NO_MPI_YET = "import os; rank = int(os.environ['PMI_RANK'])"
BEGINS = [("openmpi", BEGIN_MPI), ("mpich", BEGIN_MPI), ("mpich", NO_MPI_YET)]
BEGINS = [(library, begin) for library, begin in BEGINS if library in LIBRARIES]


@pytest.mark.parametrize(("launch", "begin"), BEGINS, indirect=["launch"])
def test_a_rank_that_fails_before_it_makes_a_strategy_ends_the_job(launch, begin, tmp_path):
    """When it has come to its own end: its files have all that it wrote."""
    done = launch(
        f"""
        {begin}
        if rank == 1:
            print("before")
            log = open({str(tmp_path / "log")!r}, "w")
            log.write("kept")
            raise ValueError("no input here")
        mr.MPIStrategy()
        print("never")
        """,
        mostly_waiting=True,
    )
    assert done.returncode in ((1,) if begin == NO_MPI_YET else BY_ALARM)
    assert (tmp_path / "log").read_text() == "kept"
    assert done.stdout.startswith("before\n")
    assert "never" not in done.stdout
    assert done.stderr.count("Traceback") == 1
    assert "ValueError: no input here" in done.stderr


@pytest.mark.parametrize(("launch", "begin"), BEGINS, indirect=["launch"])
def test_where_all_ranks_fail_before_they_make_a_strategy_all_say_why(launch, begin):
    done = launch(
        f"""
        {begin}
        raise ValueError(f"no input on rank {{rank}}")
        """
    )
    assert done.returncode == 1
    assert "ValueError: no input on rank 0" in done.stderr
    assert "ValueError: no input on rank 1" in done.stderr
    assert "MPI_Abort" not in done.stderr


def test_what_a_console_has_caught_has_not_ended_the_program(monkeypatch, capsys):
    """It leaves its traceback in sys, as pytest does."""
    monkeypatch.setattr(sys, "last_traceback", None, raising=False)
    console = code.InteractiveConsole(vars(sys.modules["__main__"]))
    console.push("1 / 0")
    assert sys.last_type is ZeroDivisionError
    assert not early_end._has_failed()


# Hooks of the program's own, set before it makes a strategy.
OWN_HOOKS = """
import sys, threading
sys.excepthook = lambda kind, error, trace: print(f"own hook: {error}", flush=True)
threading.excepthook = lambda given: print(f"own hook of threads: {given.exc_value}", flush=True)
strategy = mr.MPIStrategy()
strategy.barrier()

def fail(text):
    raise ValueError(text)

def in_a_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()
"""


def test_a_hook_of_the_program_is_called_on_each_rank_and_the_job_ends(launch):
    done = launch(OWN_HOOKS + "strategy.run(fail, ('no rows',))")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["own hook: no rows"] * 2
    assert "Traceback" not in done.stderr


def test_so_it_is_where_one_rank_alone_fails(launch):
    done = launch(
        OWN_HOOKS
        + """
if strategy.rank == 1:
    fail("no rows")
strategy.barrier()
"""
    )
    assert done.returncode == 1
    mine, others = sorted(done.stdout.splitlines())
    assert mine == "own hook: no rows"
    assert others.startswith("own hook: the program has ended on replica 1 (rank 1)")
    assert "ended with ValueError: no rows" in others


def test_a_hook_that_fails_does_not_hide_the_error(launch):
    done = launch(
        OWN_HOOKS.replace("print", "fail")
        + """
if strategy.rank == 1:
    fail("no rows")
strategy.barrier()
"""
    )
    assert done.returncode == 1
    assert "TypeError: fail() got an unexpected keyword argument 'flush'" in done.stderr
    assert "ValueError: no rows" in done.stderr


def test_an_error_of_a_thread_that_makes_no_collectives_ends_nothing(launch):
    done = launch(OWN_HOOKS + "in_a_thread(fail, 'no server')\nstrategy.barrier()\nprint('on')")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["on"] * 2 + ["own hook of threads: no server"] * 2


def test_nor_does_it_before_the_strategy_is_used(launch):
    done = launch(
        OWN_HOOKS
        + """
other = mr.MPIStrategy()
in_a_thread(fail, "no server")
other.barrier()
print("on")
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on\n") == 2


def test_a_thread_that_makes_collectives_ends_the_job_behind_the_hook_of_the_program(launch):
    done = launch(
        OWN_HOOKS
        + """
def train():
    mr.MPIStrategy().barrier()
    if strategy.rank == 1:
        fail("no rows")
    threading.Event().wait()

in_a_thread(train)
"""
    )
    assert done.returncode == 1
    assert "own hook of threads: no rows" in done.stdout


@pytest.mark.parametrize("hook", ["own", "Python's"])
def test_a_hook_that_the_program_calls_for_an_error_that_it_has_caught_ends_nothing(launch, hook):
    """As a console does, and a loop of events."""
    done = launch(
        (OWN_HOOKS if hook == "own" else OWN_HOOKS.replace("sys.excepthook = ", "_ = "))
        + """
if strategy.rank == 1:
    try:
        fail("no rows")
    except ValueError:
        sys.excepthook(*sys.exc_info())
in_a_thread(lambda: sys.excepthook(KeyError, KeyError("x"), None))
strategy.barrier()
print("on")
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on\n") == 2
    assert "no rows" in (done.stdout if hook == "own" else done.stderr)


def test_what_runs_a_program_may_call_the_hook_for_it(launch):
    """As `coverage run` does: the program runs no more then."""
    done = launch(
        """
        import sys, types

        def run(program):
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                exec(program, vars(module))
            except Exception as error:
                sys.excepthook(type(error), error, error.__traceback__)
                sys.exit(1)

        run('''if True:
            import mpi_replica as mr
            from mpi4py import MPI
            strategy = mr.MPIStrategy()
            if strategy.rank == 1:
                raise ValueError("no rows")
            MPI.COMM_WORLD.recv()
        ''')
        """
    )
    assert done.returncode == 1
    assert "ValueError: no rows" in done.stderr


def test_a_thread_that_ends_by_sys_exit_ends_nothing_else(launch):
    done = launch(
        """
        import sys, threading
        strategy = mr.MPIStrategy()
        thread = threading.Thread(target=sys.exit)
        thread.start()
        thread.join()
        total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1))
        print(strategy.experimental_local_results(total))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(np.int64(2),)") == 2


def test_a_strategy_whose_thread_has_ended_on_one_rank_ends_with_the_program(launch):
    done = launch(
        """
        import threading
        from mpi4py import MPI

        def train():
            options = mr.CommunicationOptions(name="the same from anywhere")
            strategy = mr.MPIStrategy()
            total = strategy.run(
                lambda: mr.get_replica_context().all_reduce("SUM", 1), options=options
            )
            print(strategy.experimental_local_results(total))

        if MPI.COMM_WORLD.rank == 0:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
        else:
            train()
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(np.int64(2),)") == 2


@pytest.mark.skipif("mpich" not in LIBRARIES, reason="Open MPI has as many as memory holds")
def test_where_mpich_has_no_more_communicators_an_error_says_to_close_strategies(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("import mpi_replica as mr\nmade = [mr.MPIStrategy() for _ in range(1100)]\n")
    done = run_ranks("mpich", 2, [file], timeout_seconds=60, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert "Too many communicators" in done.stderr
    assert "Close those that are not used any more" in done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("way", ["subprocess", "fork"])
def test_a_process_that_a_rank_starts_can_not_be_the_rank(library, way, tmp_path):
    """A second process of a rank ended both by a segmentation fault."""
    file = tmp_path / "train.py"
    file.write_text(
        textwrap.dedent(
            f"""
            import os, subprocess, sys
            import mpi_replica as mr

            strategy = mr.MPIStrategy()
            program = "import mpi_replica as mr; mr.MPIStrategy()"
            if {way == "subprocess"}:
                done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE)
                print(done.stderr.decode())
            elif os.fork() == 0:
                try:
                    mr.MPIStrategy()
                except mr.errors.LaunchError as error:
                    line = "LaunchError: " + str(error) + "\\n"
                    os.write(1, line.encode())  # whole: print writes it in parts
                os._exit(0)
            else:
                os.wait()
            strategy.barrier()
            """
        )
    )
    done = run_ranks(library, 2, [file], timeout_seconds=60, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    what = "was started by" if way == "subprocess" else "is a fork of"
    assert done.stdout.count(f"LaunchError: this process {what} process") == 2


def test_a_rank_that_waits_long_for_others_to_make_a_strategy_says_so(launch, tmp_path):
    fifo = tmp_path / "reported"
    os.mkfifo(fifo)
    done = launch(
        f"""
        import logging, os
        from mpi4py import MPI

        class Reports(logging.Handler):
            def emit(self, record):
                print(record.getMessage(), flush=True)
                open({str(fifo)!r}, "w").close()

        os.environ["MPI_REPLICA_STALL_SECONDS"] = "0.1"
        if MPI.COMM_WORLD.rank == 1:
            open({str(fifo)!r}).close()  # until rank 0 has reported
            os.environ["MPI_REPLICA_STALL_SECONDS"] = "1000"
        else:
            logging.getLogger("mpi_replica").addHandler(Reports())
        strategy = mr.MPIStrategy()
        """
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("rank 0 of 2 has waited 0.1 s to make a strategy at train.py:")
    assert "Make it on all of them" in line


def test_a_program_that_ends_while_others_make_a_strategy_ends_with_them(launch):
    done = launch(
        """
        from mpi4py import MPI

        strategy = mr.MPIStrategy()
        if MPI.COMM_WORLD.rank == 1:
            mr.MPIStrategy()
        """
    )
    assert done.returncode != 0
    assert "the job ends: strategies wait for each other, for ever. replica 0" in done.stderr
    assert "replicas: the end of the program; replica 1 (rank 1) of a strategy" in done.stderr


def test_a_rank_whose_program_has_ended_tells_for_whom_it_waits(launch):
    """As behind `sys.exit` on one rank, while the other one waits for it in MPI."""
    done = launch(
        """
        import logging, os, sys
        from mpi4py import MPI
        world = MPI.COMM_WORLD

        class Reports(logging.Handler):
            def emit(self, record):
                print(record.getMessage())
                world.send(None, 1)

        os.environ["MPI_REPLICA_STALL_SECONDS"] = "0.2"
        strategy, other = mr.MPIStrategy(), mr.MPIStrategy()
        strategy.run(lambda: None)
        if world.rank == 0:
            logging.getLogger("mpi_replica").addHandler(Reports())
            sys.exit("no data")
        world.recv(source=0)  # for ever
        """
    )
    assert done.stderr.splitlines()[0] == "no data"
    head, waiting, missing, *lines = done.stdout.splitlines()
    assert head.startswith("the end of the program has waited 0.")
    assert waiting == "  waiting: replica 0 (rank 0)"
    assert missing.startswith("  missing: replica 1 (rank 1, host ")
    assert "world.recv(source=0)  # for ever" in "".join(lines)


# A timeout that is caught, behind which the program goes on.
CAUGHT_TIMEOUT = """
import os, sys, threading
sys.stderr = STDERR
options = mr.CommunicationOptions(timeout_seconds=0.3)
strategy = mr.MPIStrategy(communication_options=options)
try:
    if strategy.rank == 0:
        strategy.gather_objects(0)
    else:
        threading.Event().wait()  # until the other rank ends the job
except mr.errors.CollectiveTimeoutError:
    print("caught")
"""


def test_a_program_that_goes_on_behind_a_timeout_ends_with_what_ended_its_strategy(launch):
    done = launch(CAUGHT_TIMEOUT.replace("STDERR", "sys.stderr"))
    assert done.returncode == 1, done.stderr
    assert done.stdout == "caught\n"
    line = "[rank 0 of 2] the job ends, since a strategy can't be used any more: CollectiveTimeout"
    assert done.stderr.count(line) == 1, done.stderr


def test_a_timeout_that_is_not_caught_is_told_once(launch):
    done = launch(
        """
        options = mr.CommunicationOptions(timeout_seconds=0.3)
        strategy = mr.MPIStrategy(communication_options=options)
        if strategy.rank == 0:
            strategy.gather_objects(0)
        import threading
        threading.Event().wait()  # until the other rank ends the job
        """
    )
    assert done.returncode == 1, done.stderr
    assert "CollectiveTimeoutError: " in done.stderr
    assert "the job ends" not in done.stderr


@pytest.mark.parametrize("stderr", ["None", "open(os.devnull, 'w'); sys.stderr.close()"])
def test_a_job_ends_and_says_why_where_the_program_has_no_stderr(stderr, launch):
    done = launch(CAUGHT_TIMEOUT.replace("STDERR", stderr))
    assert done.returncode == 1, done.stderr
    line = "[rank 0 of 2] the job ends, since a strategy can't be used any more: CollectiveTimeout"
    assert done.stderr.count(line) == 1, done.stderr


def test_an_error_in_a_thread_ends_the_job_also_where_stderr_has_no_flush(launch):
    done = launch(
        """
        import sys, threading

        class Log:
            def write(self, text):
                print(text, end="", flush=True)

        sys.stderr = Log()

        def work():
            strategy = mr.MPIStrategy()
            strategy.barrier()
            if strategy.rank == 0:
                raise ValueError("of rank 0 alone")
            strategy.barrier()

        threading.Thread(target=work, daemon=True).start()
        threading.Event().wait()  # the main thread has work of its own
        """
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("ValueError: of rank 0 alone") == 1, done.stdout


INTERRUPTED_IN_THE_LAST_EXCHANGE = """
        import os, signal, threading
        strategy = mr.MPIStrategy()
        exchange = strategy.engine.transport.exchange
        def interrupted(*args):
            if strategy.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return exchange(*args)
        strategy.engine.transport.exchange = interrupted
        strategy.run(lambda: None)
"""


def test_an_interrupt_that_came_in_the_last_exchange_is_not_lost(launch):
    done = launch(INTERRUPTED_IN_THE_LAST_EXCHANGE)
    assert done.returncode == 130, done.stderr


def test_an_interrupt_that_came_in_the_last_exchange_comes_up_where_no_call_follows(launch):
    done = launch(
        INTERRUPTED_IN_THE_LAST_EXCHANGE
        + """
        strategy.engine.transport.exchange = exchange
        if strategy.rank == 1:
            try:
                threading.Event().wait(60)
                print("it was lost")
            except KeyboardInterrupt:
                print("it came up")
        """
    )
    assert (done.returncode, done.stdout) == (0, "it came up\n"), done.stderr


def test_what_a_signal_handler_raises_in_an_exchange_ends_the_wait_of_all_ranks(launch):
    """As the time limits of pytest-timeout and batch scripts do."""
    done = launch(
        """
        import os, signal
        strategy = mr.MPIStrategy()
        world = strategy.communicator  # MPI's own, for messages beside the strategy
        strategy.run(lambda: None)

        class LimitError(Exception):
            pass

        def handler(number, frame):
            raise LimitError("two minutes")

        signal.signal(signal.SIGALRM, handler)
        if strategy.rank == 1:
            world.recv(source=0)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
        except (LimitError, mr.errors.RankLostError) as error:
            print(f"{strategy.rank} {error}", flush=True)
        if strategy.rank == 0:
            world.send("go on", 1)
        """
    )
    assert done.returncode != 0
    assert "0 two minutes" in done.stdout
    assert "1 replica 0 (rank 0) left all_reduce(SUM, float64[]) at train.py:" in done.stdout


def test_a_rank_that_can_not_tell_that_it_ends_ends_the_job(launch):
    """The others would wait for it for ever."""
    done = launch(
        """
        strategy = mr.MPIStrategy()
        strategy.run(lambda: None)
        if strategy.rank == 1:
            def fails(*args):
                raise OSError("the network is gone")
            strategy.engine.transport.begin_exchange = fails
        """
    )
    assert done.returncode == 1
    assert done.stderr.count("OSError: the network is gone") == 1


def test_a_program_may_end_mpi_before_it_ends(launch):
    done = launch(
        """
        from mpi4py import MPI

        strategies = mr.MPIStrategy(num_replicas=3), mr.MPIStrategy(MPI.COMM_SELF), mr.MPIStrategy()
        for strategy in strategies:
            strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
        MPI.Finalize()
        for strategy in strategies:
            try:
                strategy.run(lambda: None)
            except mr.errors.ContextError as error:
                assert "MPI.Finalize()" in str(error), error
                print("told")
            strategy.close()
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("told") == 6
    assert done.stderr == ""


def test_ranks_that_wait_for_one_that_ends_mpi_are_told(launch):
    done = launch(
        """
        from mpi4py import MPI

        strategy = mr.MPIStrategy()
        if strategy.rank == 0:
            MPI.Finalize()
        else:
            try:
                strategy.run(lambda: None)
            except mr.errors.RankLostError as error:
                print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "the program has ended on replica 0 (rank 0)" in done.stdout


# Where a signal comes while a strategy is closed: when all have agreed to it.
CLOSING = {
    "BLAS gets its threads back": ("strategy", "_release_blas"),
    "the call is answered": ("CloseCall", "answer"),
    "the engine is removed": ("job_end", "remove_engine"),
    "the watcher ends": ("threading.Thread", "join"),
}


@pytest.mark.parametrize("place", CLOSING)
@pytest.mark.parametrize(
    ("number", "handler", "raised"),
    [
        ("SIGINT", "signal.default_int_handler", "KeyboardInterrupt"),
        ("SIGTERM", "lambda *_: sys.exit(3)", "SystemExit"),
    ],
)
def test_a_strategy_that_all_close_is_closed_also_where_a_signal_comes(
    launch, number, handler, raised, place
):
    """The others have freed its communicator, and would not answer any more."""
    owner, name = CLOSING[place]
    done = launch(
        f"""
        import signal, sys, threading
        from mpi_replica.collectives.barrier import CloseCall
        from mpi_replica.strategy import job_end
        options = mr.CommunicationOptions(reproducible=True)
        strategy = mr.MPIStrategy(communication_options=options)
        strategy.barrier()
        signal.signal(signal.{number}, {handler})
        original = {owner}.{name}
        def interrupted(*arguments):
            {owner}.{name} = original
            signal.raise_signal(signal.{number})
            return original(*arguments)
        if strategy.rank == 1:
            {owner}.{name} = interrupted
        try:
            strategy.close()
        except BaseException as error:
            print(type(error).__name__, flush=True)
        strategy.close()
        try:
            strategy.barrier()
        except mr.errors.ContextError as error:
            assert "the strategy is closed" in str(error)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{raised}\n", "")


# Where a rank is that waits for the others at its end when a signal comes.
WAITING = {"it sleeps": "sleep", "it looks at the clock": "monotonic", "it asks": "_leaving"}


@pytest.mark.parametrize("place", WAITING)
def test_what_a_signals_handler_raises_at_the_end_of_a_rank_comes_up_when_all_have_ended(
    launch, place
):
    """Torn off, its message would have kept all others at their end (MPICH, three ranks)."""
    done = launch(
        f"""
        import functools, pathlib, signal, sys, time
        import mpi_replica.strategy.job_end as job_end
        strategy = mr.MPIStrategy()
        came = pathlib.Path(__file__).parent / "came"
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
        turns = 0
        def interrupt():
            global turns
            turns += 1
            if turns == 3:
                came.touch()
                signal.raise_signal(signal.SIGTERM)
        def interrupted(original):
            @functools.wraps(original)
            def call(*arguments, **options):
                interrupt()
                result = original(*arguments, **options)
                return asked(result) if "{WAITING[place]}" == "_leaving" else result
            return call
        def asked(wait):
            while True:
                interrupt()
                try:
                    next(wait)
                except StopIteration:
                    return
                yield
        if strategy.rank == 0:
            job_end.{WAITING[place]} = interrupted(job_end.{WAITING[place]})
        while strategy.rank and not came.exists():
            time.sleep(0.001)
        """,
        ranks=3,
    )
    assert done.returncode == 0
    assert done.stderr.count("SystemExit: asked to end") == 1
