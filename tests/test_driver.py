"""What becomes of an error in the driver of calls: one rank, the other does what this one does."""

import contextlib
import dis
import pickle
import signal
import sys
import threading
import traceback
import types
import weakref

import numpy as np
import pytest

import mpi_replica as mr
from every_call import OPTIONS, SITE
from everywhere import error_of
from mpi_replica.collectives.agreement import agreement as agreement_module
from mpi_replica.collectives.agreement import call as call_module
from mpi_replica.collectives.agreement import driver as driver_module
from mpi_replica.collectives.agreement import header_sizes as header_sizes_module
from mpi_replica.collectives.agreement.agreement import Agreement
from mpi_replica.collectives.agreement.call import Call
from mpi_replica.collectives.agreement.driver import Driver
from mpi_replica.collectives.agreement.header import REPORTS, state_of_words, states
from mpi_replica.collectives.agreement.header_sizes import HeaderSizes
from mpi_replica.collectives.agreement.stand import Report
from mpi_replica.collectives.agreement.steps import Agree, Barrier
from mpi_replica.collectives.barrier import BarrierCall
from mpi_replica.collectives.broadcast import Broadcast
from mpi_replica.collectives.reduce import AllReduce
from mpi_replica.core import nest
from mpi_replica.core.layout import Layout
from mpi_replica.errors import CollectiveTimeoutError, ContextError
from mpi_replica.ranks import HEADER_BYTES, WaitGivenUpError
from mpi_replica.ranks.interrupts import gate
from mpi_replica.ranks.single import SingleTransport
from mpi_replica.ranks.transport import LARGER_HEADER_BYTES


class Twin(SingleTransport):
    """Two ranks, of which the other one does what this one does; but it has no errors.

    `sent` is what was sent here: headers, states where only these are compared, and the names of
    other exchanges. `fails` maps the number of an exchange to an error in it, and `refuses` to one
    in whose place nothing is sent.
    """

    def __init__(self):
        super().__init__()
        self.size, self.hosts, self.pids = 2, self.hosts * 2, self.pids * 2
        self.headers = {
            size: np.zeros(2 * size, np.uint8) for size in (HEADER_BYTES, *LARGER_HEADER_BYTES)
        }
        self.sent = []
        #: The bytes of headers, by the numbers of their exchanges.
        self.sizes = {}
        self.fails, self.refuses = {}, {}

    def begin(self, what):
        if len(self.sent) in self.refuses:
            raise self.refuses.pop(len(self.sent))
        self.is_in_flight = True
        self.steps += 1
        self.sent.append(what)
        if len(self.sent) - 1 in self.fails:
            raise self.fails[len(self.sent) - 1]
        self.is_in_flight = False
        self.steps_ended = self.steps

    def exchange(self, header, size_bytes=HEADER_BYTES, rest=b""):
        header += rest
        self.sizes[len(self.sent)] = size_bytes
        for rank in range(2):
            place = self.headers[size_bytes][rank * size_bytes :][: len(header)]
            place[:] = np.frombuffer(header, np.uint8)
        self.begin(header)

    def maximum(self, words):
        self.begin(state_of_words(words))
        return words

    def all_gather_bytes(self, data):
        self.begin("texts")
        return [data, other_report(data)]

    def all_gather_blocks(self, send, receive, counts):
        receive[:] = np.tile(receive[: counts[0]] if send is None else send, 2)
        self.begin("blocks")

    def broadcast(self, data, root):
        self.begin("broadcast")

    def all_reduce(self, send, receive, op):
        np.add(*[receive if send is None else send] * 2, out=receive)
        self.begin("reduction")

    def barrier(self):
        self.begin("barrier")

    @property
    def has_told(self):
        """Whether the other rank was told of an error here."""
        heads = [one for one in self.sent if isinstance(one, bytes)]
        told = [states(one, len(one))[0] for one in heads]
        return REPORTS in told or REPORTS in self.sent


def other_report(data):
    """Return what the other rank tells where this one tells `data`."""
    if not data.startswith(b"\x80"):
        return data
    report = pickle.loads(data)
    assert isinstance(report, Report)
    (stand,) = report.stands
    stand = stand._replace(replica_ids=(1,), status="calls", error=None)
    return pickle.dumps(report._replace(stands=(stand,)), 5)


@pytest.fixture
def transport():
    return Twin()


@pytest.fixture
def driver(transport):
    return driver_of(transport)


def driver_of(transport, *, is_wide=False):
    layout = Layout((1, 1), 0)
    agreement = Agreement(transport, layout)
    if is_wide:  # as with more ranks than see all headers
        agreement._wide = True
        agreement.sizes = HeaderSizes(transport.headers, carries_payload=False)
    driver = Driver(transport, layout, agreement, agreement.recorder)
    driver.thread = threading.get_ident()
    return driver


def reduction(length):
    value, structure = np.full(length, 1.5), nest.flatten(None)[1]
    return of_replica(AllReduce(SITE, OPTIONS, "all_reduce", "SUM", [[value]], structure))


def of_replica(call):
    call.replica_ids = (0,)
    return call


CALLS = {
    "header": lambda: reduction(3),
    "pieces": lambda: reduction(600_000),
    "memory beside a pickle": lambda: of_replica(
        Broadcast(SITE, OPTIONS, "broadcast_to", "", np.ones((2, 9000)), compared=False)
    ),
    "agreements": lambda: of_replica(
        Broadcast(SITE, OPTIONS, "broadcast_to", "", bytes(2 << 20), compared=False)
    ),
}


def check_works(driver):
    (found,) = driver.perform([reduction(3)])
    np.testing.assert_array_equal(found, np.full(3, 3.0))


def check_is_over(driver, error):
    assert driver.agreement.final is error
    assert error_of(lambda: driver.perform([reduction(3)])) is error


def check_open(driver, depth):
    """Check that Ctrl-C comes through, and that another thread may make a call."""
    assert gate.depth == depth
    taken = []
    thread = threading.Thread(target=lambda: taken.append(driver._lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert taken == [True]
    driver._lock = threading.RLock()


class Limit(Exception):
    """Raised by a handler of a signal."""


MODULES = (agreement_module, call_module, driver_module, header_sizes_module)
FILES = {module.__file__ for module in MODULES}
# Python looks for signals behind these: at the beginning of a function, and behind a call.
LOOKS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW"}


def may_raise(code, offset, following):
    """Return whether a handler can raise behind the instruction at `offset`.

    It counts as raised there. Here it is raised where the next one begins: only where the same
    ``except`` and ``finally`` hold.
    """
    if dis.opname[code.co_code[offset]] not in LOOKS:
        return False
    entries = dis._parse_exception_table(code)
    handlers = [
        next((entry.target for entry in entries if entry.start <= at < entry.end), None)
        for at in (offset, following)
    ]
    return handlers[0] == handlers[1]


class Halt(BaseException):
    """The same, of one that ends the program."""


def interrupted(do, number, kind=Limit):
    """Do it, and raise a `kind` where Python looks for signals for the n-th time in FILES.

    Returns the error that came of it, and whether it was raised.
    """
    before, count = {}, 0

    def look(frame, offset):
        nonlocal count
        last, before[frame] = before.get(frame), offset
        count += last is not None and may_raise(frame.f_code, last, offset)
        if count == number:
            count += 1
            raise kind

    with at_each_instruction(look):
        error = error_of(do)
    return error, count > number


@contextlib.contextmanager
def at_each_instruction(look):
    """Call ``look(frame, offset)`` before each instruction in FILES, until it raises."""
    if sys.version_info < (3, 12):

        def trace(frame, event, argument):
            if frame.f_code.co_filename not in FILES:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                look(frame, frame.f_lasti)
            return trace

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)
        return
    # A tracer gets no instructions of code that has run without one.
    tool, event = sys.monitoring.DEBUGGER_ID, sys.monitoring.events.INSTRUCTION
    codes = [code for module in MODULES for code in codes_in(module)]
    sys.monitoring.use_tool_id(tool, __name__)
    sys.monitoring.register_callback(tool, event, lambda _, at: look(sys._getframe(1), at))
    for code in codes:
        sys.monitoring.set_local_events(tool, code, event)
    try:
        yield
    finally:
        for code in codes:
            sys.monitoring.set_local_events(tool, code, 0)
        sys.monitoring.register_callback(tool, event, None)
        sys.monitoring.free_tool_id(tool)


def codes_in(module):
    """Yield the code of the functions that a module defines."""
    found = list(vars(module).values())
    while found:
        one = found.pop()
        if isinstance(one, types.CodeType):
            yield one
            found += one.co_consts
        elif isinstance(one, types.FunctionType) and one.__module__ == module.__name__:
            found.append(one.__code__)
        elif isinstance(one, property):
            found.append(one.fget)
        elif isinstance(one, type) and one.__module__ == module.__name__:
            found += vars(one).values()


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_that_raises_in_a_call_leaves_all_ranks_knowing(name):
    """Told to all; or the strategy is over here; or the call had ended on all ranks."""
    whole = Twin()
    driver_of(whole).perform([CALLS[name]()])
    seen = set()
    for number in range(1, 1000):
        transport, call, depth = Twin(), CALLS[name](), gate.depth
        driver = driver_of(transport)
        error, was_raised = interrupted(lambda d=driver, c=call: d.perform([c]), number)
        check_open(driver, depth)
        if not was_raised:
            assert error is None
            break
        assert type(error) is Limit, number
        if driver.agreement.final is not None:
            seen.add("over")
            check_is_over(driver, error)
            continue
        seen.add("told" if transport.has_told else "own")
        assert transport.has_told or transport.sent == whole.sent, (number, transport.sent)
        check_works(driver)
    assert seen == {"over", "told", "own"}


NESTED = {
    "a call": lambda driver: driver.perform([reduction(2)]),
    "a mistake": lambda driver: driver.report_failure([reduction(2)], OSError()),
    "the end of replicas": lambda driver: driver.report([], {}, reduction(2)),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("name", CALLS)
def test_what_interrupts_a_call_can_make_none_and_the_call_goes_on(driver, transport, name, nested):
    """As a handler of a signal, or a `__del__`, which come anywhere: both use the same memory."""
    begin, errors = transport.begin, []

    def interrupted_begin(what):
        begin(what)
        errors.append(error_of(lambda: NESTED[nested](driver)))

    transport.begin = interrupted_begin
    driver.perform([CALLS[name]()])
    sent = len(transport.sent)
    assert {type(error) for error in errors} == {ContextError}
    assert {"in the middle of" in str(error) for error in errors} == {True}
    transport.begin = begin
    check_works(driver)
    assert (len(errors), transport.has_told) == (sent, False)


def test_what_interrupts_the_report_of_a_mistake_can_make_no_call_either(driver, transport):
    begin, errors = transport.begin, []

    def interrupted_begin(what):
        begin(what)
        errors.append(error_of(lambda: driver.perform([reduction(2)])))

    transport.begin = interrupted_begin
    error = OSError()
    assert error_of(lambda: driver.report_failure([reduction(3)], error)) is error
    transport.begin = begin
    check_works(driver)
    assert {type(one) for one in errors} == {ContextError}


@pytest.mark.parametrize("fails", [False, True])
def test_a_handler_that_raises_what_is_no_exception_leaves_a_call_that_can_be_made_again(fails):
    """All ranks are told; or nobody knows of the call; or it had ended; or the strategy is over."""
    seen = set()
    for number in range(1, 2000):
        transport, depth = Twin(), gate.depth
        driver = driver_of(transport)
        step = Agree(failing(ValueError("told"))) if fails else Agree(lambda: (b"", None))
        call = Steps(Agree(lambda: (b"", None)), step)
        error, was_raised = interrupted(lambda d=driver, c=call: d.perform([c]), number, Halt)
        check_open(driver, depth)
        if not was_raised:
            break
        assert type(error) is Halt or transport.has_told, number
        if driver.agreement.final is not None:
            seen.add("over")
            check_is_over(driver, error)
            continue
        seen.add("told" if transport.has_told else len(transport.sent))
        check_works(driver)
    assert seen == {"over", "told", 0} | (set() if fails else {3})


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_handler_that_raises_in_a_call_leaves_headers_as_large_as_those_of_others(before):
    """Which do all calls as if nothing had come up, to the exchange in which they hear of it."""
    whole = Twin()
    driver = driver_of(whole)
    for _ in range(before + 2):
        driver.perform([reduction(100)])
    assert set(list(whole.sizes.values())[:2]) == {HEADER_BYTES}
    assert all(size > HEADER_BYTES for size in list(whole.sizes.values())[2:])
    for number in range(1, 1000):
        transport = Twin()
        driver = driver_of(transport)
        for _ in range(before):
            driver.perform([reduction(100)])
        call = reduction(100)
        _, was_raised = interrupted(lambda d=driver, c=call: d.perform([c]), number)
        if driver.agreement.final is not None:
            continue
        driver.perform([reduction(100)])
        has_told = False
        for at, size in transport.sizes.items():
            assert size == (HEADER_BYTES if has_told else whole.sizes[at]), (number, at)
            has_told = has_told or states(transport.sent[at], 1 << 20) == [REPORTS]
        if not was_raised:
            break
    else:
        pytest.fail("it never ended")


@pytest.mark.parametrize("does", ["report", "report from a call"])
def test_a_handler_that_raises_where_an_error_is_told_leaves_all_ranks_knowing(does):
    seen = set()
    first = 2 if does == "report" else 1  # where it begins nothing is known yet
    for number in range(first, 1000):
        transport, depth = Twin(), gate.depth
        driver, told = driver_of(transport), ValueError("what is told")
        call = Unprepared(told) if does == "report from a call" else Call(SITE, OPTIONS)
        call.replica_ids = (0,)

        def do(driver=driver, call=call, told=told):
            if isinstance(call, Unprepared):
                driver.perform([call])
            driver.report_failure([call], told)

        error, was_raised = interrupted(do, number)
        check_open(driver, depth)
        if not was_raised:
            assert error is told
            break
        if driver.agreement.final is not None:
            seen.add("over")
            check_is_over(driver, error)
            continue
        seen.add(type(error))
        assert transport.has_told, number
        check_works(driver)
    assert seen == {"over", Limit}


class Unprepared(Call):
    """A call that fails before its header."""

    kind = "unprepared"

    def __init__(self, told):
        super().__init__(SITE, OPTIONS)
        self.told = told
        self.identify(None)

    def prepare(self, group, calls):
        raise self.told


class Steps(Call):
    """A call of given steps."""

    kind = "steps"

    def __init__(self, *steps):
        super().__init__(SITE, OPTIONS)
        self.replica_ids = (0,)
        self.wanted = steps
        self.identify(None)

    def steps(self, group, calls, prepared):
        yield from self.wanted


@pytest.mark.parametrize("name", ["pieces", "agreements"])
def test_an_exchange_that_fails_ends_the_strategy_with_its_error(driver, transport, name):
    transport.fails[2] = error = OSError("the network is down")
    assert error_of(lambda: driver.perform([CALLS[name]()])) is error
    check_open(driver, 0)
    check_is_over(driver, error)
    assert not transport.has_told


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(("name", "count"), [("header", 1), ("pieces", 1), ("agreements", 3)])
def test_a_header_that_can_not_be_sent_is_an_error_on_all_ranks(name, count, is_wide):
    """At each agreement of a call; and the next call works."""
    whole = Twin()
    driver_of(whole, is_wide=is_wide).perform([CALLS[name]()])
    kind = int if is_wide else bytes
    agreements = [at for at, one in enumerate(whole.sent) if isinstance(one, kind)]
    assert len(agreements) == count
    for number in agreements:
        transport = Twin()
        driver, error = driver_of(transport, is_wide=is_wide), OSError("no route")
        transport.refuses[number] = error
        assert error_of(lambda d=driver: d.perform([CALLS[name]()])) is error
        assert transport.has_told
        check_works(driver)


class NothingTravels(Steps):
    """A call that has no header."""

    def prepare(self, group, calls):
        return None


@pytest.mark.parametrize("kind", [Steps, NothingTravels])
@pytest.mark.parametrize("way", ["closed", "broken"])
def test_calls_that_are_refused_keep_only_what_the_last_one_held(driver, transport, way, kind):
    """Although all of them raise one error; and where that came up first is still seen."""
    if way == "closed":
        driver.agreement.close()
    else:
        transport.fails[0] = OSError("the network is down")
        error_of(lambda: driver.perform([Steps()]))
    alive = []

    def refused():
        held = Steps()  # anything of the program
        alive.append(weakref.ref(held))
        driver.perform([kind()])

    for _ in range(5):
        assert error_of(refused) is driver.agreement.final
    assert [one() is not None for one in alive] == [False] * 4 + [True]
    frames = traceback.extract_tb(driver.agreement.final.__traceback__)
    assert [frame.name for frame in frames].count("refused") == 1
    assert ("begin" in [frame.name for frame in frames]) == (way == "broken")


def test_a_header_that_fails_ends_the_strategy_with_its_error(driver, transport):
    transport.fails[0] = error = OSError("the network is down")
    assert error_of(lambda: driver.perform([reduction(3)])) is error
    check_is_over(driver, error)
    (note,) = error.__notes__  # it comes again at the next call, which has done nothing wrong
    assert note.startswith("it came up in the middle of all_reduce")
    assert "make a new strategy on all ranks" in note


def test_a_wait_that_is_given_up_is_the_timeout_error(driver, transport):
    transport.fails[2] = WaitGivenUpError()
    call = CALLS["pieces"]()
    call.options = mr.CommunicationOptions(timeout_seconds=7)
    error = error_of(lambda: driver.perform([call]))
    assert type(error) is CollectiveTimeoutError
    assert "waited 7 s" in str(error)
    check_open(driver, 0)
    check_is_over(driver, error)


def test_the_limit_of_a_wait_is_that_of_the_call_and_ends_with_it(driver, transport, monkeypatch):
    limits = []
    monkeypatch.setattr(transport, "barrier", lambda: limits.append(transport.timeout_seconds))
    monkeypatch.setattr(
        transport,
        "exchange",
        lambda *header: (
            limits.append(transport.timeout_seconds),
            Twin.exchange(transport, *header),
        ),
    )
    call = Steps(Barrier())
    call.options = mr.CommunicationOptions(timeout_seconds=7)
    driver.perform([call])
    assert transport.timeout_seconds is None
    assert type(error_of(lambda: driver.report_failure([call], OSError()))) is OSError
    assert transport.timeout_seconds is None
    driver.perform([Steps(Barrier())])
    assert limits == [7, 7, 7, None, None]


def test_an_interrupt_that_is_held_comes_at_the_next_call(driver, transport, monkeypatch):
    """On all ranks; and that one works on."""
    gate.install(lambda status: None)
    interrupting = Steps(Barrier())
    monkeypatch.setattr(transport, "barrier", lambda: signal.raise_signal(signal.SIGINT))
    driver.perform([interrupting])
    assert type(error_of(lambda: driver.perform([reduction(3)]))) is KeyboardInterrupt
    assert transport.has_told
    check_works(driver)


def failing(error):
    def prepare():
        raise error

    return prepare


def test_what_is_no_exception_is_told_where_the_others_wait_at_a_second_header(driver, transport):
    """This rank may make the call again, and its first header would meet their second one."""
    error = SystemExit(3)
    assert error_of(lambda: driver.perform([Steps(Agree(failing(error)))])) is error
    assert transport.has_told
    check_works(driver)


def test_what_was_done_is_undone_where_the_ranks_agree_that_it_failed(driver, transport):
    undone, error = [], ValueError("no place on the disk")
    steps = Agree(failing(error), lambda: undone.append(len(transport.sent)))
    assert error_of(lambda: driver.perform([Steps(steps)])) is error
    assert undone == [len(transport.sent)]  # when all ranks know
    assert transport.has_told
    check_works(driver)


def test_nothing_is_undone_where_the_strategy_is_over(driver, transport):
    transport.fails[1] = error = OSError("the network is down")
    steps = Agree(lambda: (b"", None), lambda: pytest.fail("undone"))
    assert error_of(lambda: driver.perform([Steps(steps)])) is error
    check_is_over(driver, error)


def test_nothing_is_undone_behind_an_agreement(driver):
    steps = [Agree(lambda: (b"", None), lambda: pytest.fail("undone")), Agree(failing(OSError()))]
    assert type(error_of(lambda: driver.perform([Steps(*steps)]))) is OSError
    check_works(driver)


def test_an_error_in_a_run_that_is_over_is_told_to_nobody(driver, transport):
    """The others do not answer any more."""

    class Run:
        ordinal, doom, a_replica_failed = 1, ValueError("the run has failed"), True

    driver.agreement.runs.append(Run())
    call = of_replica(BarrierCall(SITE, OPTIONS, "barrier"))
    error = error_of(lambda: driver.report_failure([call], ValueError()))
    assert type(error) is mr.errors.ReplicaStopped
    assert transport.sent == []
