"""What a traced process writes: all of it is read back, whatever ends the process or its disk."""

import concurrent.futures
import contextlib
import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from time import perf_counter_ns

import pytest

from launching import ROOT
from mpi_replica import span
from mpi_replica.ranks.watch import event_log
from mpi_replica.ranks.watch.event_log import (
    BLOCK_HEAD,
    LAST_VARIABLE,
    OF_RANK,
    SPAN_KINDS,
    TRACE_VARIABLE,
    EventKind,
    EventLog,
    folder_of_parts,
    open_log_of_environment,
    pack_event,
)
from mpi_replica.trace.trace_file import merge
from mpi_replica.trace.traced_processes import Membership, read_processes


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "job.json")


def span_of(log, text, number=0):
    name, kind = log.names[text], SPAN_KINDS.index("program")
    return pack_event(EventKind.SPAN, name, OF_RANK, number, number + 1, kind, 0)


def files_of(path):
    return sorted(Path(folder_of_parts(path)).iterdir())


def found_at(path):
    (process,) = read_processes(path)
    return process


def texts_of(process):
    return [process.names[name] for name in process.rows[:, 1].tolist()]


def written_by(program, path):
    """Run a program that traces itself in a process of its own; return what it prints."""
    head = """
        import os, resource, sys
        import mpi_replica as mr
        from mpi_replica.ranks.watch import event_log
        path = sys.argv[1]
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(head) + textwrap.dedent(program), path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout, done.stderr


def test_what_is_written_is_read_back(path):
    log = EventLog(path)
    world = log.new_world(rank=1, size=2)
    log.tell(world=world, name=77)
    events = [(kind, log.names[kind.name], 3, 10, 2**62, 5, -6) for kind in EventKind]
    for event in events:
        log.add(pack_event(*event))
        log.write()
    log.note("größer\nals 1")
    log.close()
    process = found_at(path)
    assert process.pid == os.getpid()
    assert process.clock_ns <= process.end_ns <= perf_counter_ns()
    assert (process.missing_ns, process.last_seconds, process.restart) == (0, None, 0)
    assert process.memberships == {world: Membership(77, 1, 2)}
    assert process.rows[:-1].tolist() == [list(event) for event in events]
    assert texts_of(process) == [*(kind.name for kind in EventKind), "größer\nals 1"]


def test_nothing_is_written_after_the_end(path):
    log = EventLog(path)
    log.close()
    log.add(span_of(log, "late"))
    log.write()
    log.close()
    assert len(found_at(path).rows) == 0


def test_a_process_that_was_killed_has_no_end(path):
    log = EventLog(path)
    log.add(span_of(log, "step"))
    log.write()
    assert found_at(path).end_ns is None
    log.close()


def test_a_file_that_is_cut_at_any_byte_is_the_beginning_of_the_events(path):
    log = EventLog(path)
    first_block = os.path.getsize(*files_of(path))
    world = log.new_world(rank=0, size=1)
    for number in range(3):
        log.add(span_of(log, f"step {number}", number))
        log.write()
    log.tell(world=world, name=1)
    log.close()
    (file,) = files_of(path)
    data, all_texts = file.read_bytes(), texts_of(found_at(path))
    assert len(all_texts) == 3
    counts = []
    for length in range(first_block, len(data)):
        file.write_bytes(data[:length])
        texts = texts_of(found_at(path))
        assert texts == all_texts[: len(texts)]
        counts.append(len(texts))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "damage", [b"\xff" * 30, b"{}" + b" " * 28, b"[]" + b" " * 28], ids=["bytes", "dict", "list"]
)
def test_a_part_that_is_damaged_in_the_middle_is_read_up_to_there_and_the_rest_told(path, damage):
    log = EventLog(path)
    world = log.new_world(rank=0, size=1, name=1)
    ends = []
    for number in range(3):
        log.add(span_of(log, f"step {number} {'x' * 50}", number))
        log.write()
        ends.append(os.path.getsize(*files_of(path)))
    log.tell(world=world, name=1)
    log.close()
    (file,) = files_of(path)
    data, texts = bytearray(file.read_bytes()), texts_of(found_at(path))
    assert merge(path)["missing"] == []
    begin = ends[0] + BLOCK_HEAD.size
    length, _ = BLOCK_HEAD.unpack_from(data, ends[0])
    data[begin : begin + length] = damage.ljust(length)
    file.parent.mkdir()
    file.write_bytes(data)
    process = found_at(path)
    assert (texts_of(process), process.is_damaged) == (texts[:1], True)
    assert merge(path)["missing"] == [f"the rest of {process.label}, whose part is damaged"]


def test_a_process_that_was_killed_before_it_told_who_it_is_is_left_out(path):
    EventLog(path).close()
    (file,) = files_of(path)
    data = file.read_bytes()
    file.with_name("host-1.0.events").write_bytes(data)
    lengths = BLOCK_HEAD.unpack_from(data)
    for cut in range(BLOCK_HEAD.size + sum(lengths)):
        file.write_bytes(data[:cut])
        assert len(read_processes(path)) == 1
    file.with_name("host-1.0.events").unlink()
    with pytest.raises(FileNotFoundError, match="no rank has written"):
        read_processes(path)


def test_the_last_seconds_are_kept_in_two_files_at_most(path):
    seconds = 0.005
    log = EventLog(path, last_seconds=seconds)
    added, files = [], set()
    while len(files) < 6:
        now = perf_counter_ns()
        added.append(now)
        name = log.names[f"step {len(added)}"]
        log.add(pack_event(EventKind.SPAN, name, OF_RANK, now, now, 0, 0))
        log.write()
        files |= set(files_of(path))
        assert len(files_of(path)) <= 2
    least = perf_counter_ns() - seconds * 1e9
    process = found_at(path)
    log.close()
    kept = process.rows[:, 3].tolist()
    assert kept == added[-len(kept) :]
    assert {time for time in added if time >= least} <= set(kept)
    assert texts_of(process)[-1] == f"step {len(added)}"


def test_a_newest_file_without_a_whole_block_takes_no_names_from_the_one_before(path):
    log = EventLog(path, last_seconds=1e-9)
    for number in range(3):
        log.add(span_of(log, f"step {number}"))
        log.write()
    newest = files_of(path)[-1]
    first_block = sum(BLOCK_HEAD.unpack_from(newest.read_bytes())) + BLOCK_HEAD.size
    newest.write_bytes(newest.read_bytes()[: first_block - 1])
    found = texts_of(found_at(path))
    log.close()
    assert found == ["step 2"]


def test_facts_are_in_each_file_of_the_last_seconds(path):
    log = EventLog(path, last_seconds=1e-9)
    world = log.new_world(rank=0, size=1)
    log.tell(world=world, name=5)
    for _ in range(5):
        log.write()
    log.close()
    assert found_at(path).pid == os.getpid()
    assert found_at(path).memberships == {world: Membership(5, 0, 1)}


def test_a_span_that_is_left_after_its_trace_keeps_nothing_of_it(path):
    """As one of a function that reads ahead in a thread of its own."""
    part = span("load")
    for _ in range(2):
        log = event_log.open_log(path)
        with part:
            event_log.close_log(log)
            gone = weakref.ref(log)
            del log
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("kind", ["run", "commit", "recovery", "Input", None])
def test_a_program_has_no_spans_of_the_package_s_own_kinds(kind):
    with pytest.raises(ValueError, match=r"none of \('program', 'input', 'checkpoint'\)"):
        span("step", kind=kind)


@pytest.mark.parametrize("name", [1, None, b"step"])
def test_a_span_has_a_text_as_its_name(name):
    with pytest.raises(TypeError, match="span needs a name, got "):
        span(name)


def test_what_is_not_together_in_time_is_no_span():
    def generator():
        yield

    async def coroutine():
        pass

    async def both():
        yield

    for function in (generator, coroutine, both):
        with pytest.raises(TypeError, match="can't decorate"):
            span("step")(function)


def test_a_full_disk_ends_the_trace_with_one_warning_and_the_process_goes_on(path):
    out, error = written_by(
        """
        log = event_log.open_log(path)
        def write_steps(count):
            for _ in range(count):
                with mr.span("step"):
                    pass
            log.write()
        write_steps(10)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for _ in range(3):
            write_steps(1000)
        event_log.close_log(log)
        print("goes on")
        """,
        path,
    )
    assert out == "goes on\n"
    (line,) = error.splitlines()
    assert "the trace ends here, since it can't be written: " in line
    assert texts_of(found_at(path)) == ["step"] * 10


def test_an_abort_in_the_middle_of_a_write_does_not_wait_for_its_end(path):
    """In the handler of a second Ctrl-C the write is that of the same thread."""
    out, error = written_by(
        """
        import signal

        from mpi_replica.ranks.watch.watcher import watcher

        def abort(*_):
            watcher.write_flight_records("the job is aborted")
            print("has come through")

        signal.signal(signal.SIGINT, abort)
        log = event_log.open_log(path)
        with log._lock:
            signal.raise_signal(signal.SIGINT)
        """,
        path,
    )
    assert (out, error) == ("has come through\n", "")


def test_a_disk_that_is_full_at_the_start_is_an_error(path):
    out, error = written_by(
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            event_log.open_log(path)
        except OSError as error:
            print(error.strerror)
        print(event_log.current)
        """,
        path,
    )
    assert out == "File too large\nNone\n"
    assert error == ""


def test_a_file_that_cannot_be_opened_is_the_error_of_the_system(path):
    name = f"{socket.gethostname()}-{os.getpid()}-0.0.events"
    os.makedirs(Path(folder_of_parts(path)) / name)
    with pytest.raises(IsADirectoryError):
        EventLog(path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        EventLog(str(tmp_path / "file" / "job.json"))


@pytest.mark.parametrize("last", ["0", "-1", "nan", "inf", "long"])
def test_a_variable_that_has_no_meaning_is_named(monkeypatch, path, last):
    monkeypatch.setenv(TRACE_VARIABLE, path)
    monkeypatch.setenv(LAST_VARIABLE, last)
    with pytest.raises(ValueError, match=f"{LAST_VARIABLE}='{last}'"):
        open_log_of_environment()
    assert not os.path.exists(folder_of_parts(path))


def test_a_path_that_cannot_be_written_is_named_with_its_variable(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "file" / "job.json"))
    with pytest.raises(ValueError, match=f"{TRACE_VARIABLE}=.*Not a directory"):
        open_log_of_environment()


def test_of_more_names_than_a_trace_can_have_the_last_ones_share_one(path):
    log = EventLog(path)
    most = 65536
    for number in range(most + 10):
        log.add(span_of(log, f"name {number}"))
        if number == most // 2:
            log.write()
    log.close()
    process = found_at(path)
    texts = texts_of(process)
    assert len(process.names) == most
    assert texts[: most - 1] == [f"name {number}" for number in range(most - 1)]
    assert set(texts[most - 1 :]) == {"(one of more than 65536 names)"}


def test_of_events_that_a_slow_disk_has_no_time_for_the_last_are_kept_and_the_gap_is_told(path):
    log = EventLog(path)
    count, begin = 300_000, perf_counter_ns()
    for number in range(count):  # one of each microsecond
        log.add(span_of(log, "step", begin + number * 1000))
    log.write()
    log.add(span_of(log, "step", begin + count * 1000))
    log.close()
    process = found_at(path)
    numbers = (process.rows[:, 3] - begin) // 1000
    assert numbers.tolist() == list(range(numbers[0], count + 1))
    assert 0 < len(process.rows) < count
    assert process.missing_ns == process.rows[0, 4] - process.clock_ns


def test_where_all_that_wait_are_written_in_time_nothing_is_told_to_be_missing(path):
    log = EventLog(path)
    for _ in range(10):
        for number in range(10_000):
            log.add(span_of(log, "step", number))
        log.write()
    log.close()
    assert len(found_at(path).rows) == 100_000
    assert found_at(path).missing_ns == 0


@pytest.fixture
def many_switches():
    """Let threads take turns as often as they can."""
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(seconds)


@contextlib.contextmanager
def four_threads(work):
    """Let four threads do something at the same time, and meanwhile this one something else."""
    barrier = threading.Barrier(5)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        done = [pool.submit(lambda n: (barrier.wait(), work(n)), thread) for thread in range(4)]
        barrier.wait()
        yield done
    for one in done:
        one.result()


@pytest.mark.usefixtures("many_switches")
def test_nothing_is_lost_of_several_threads_while_another_one_writes(path):
    log, count = EventLog(path), 15_000  # fewer in all than may wait

    def add_events(thread):
        for number in range(count):
            log.add(pack_event(EventKind.SPAN, 0, thread, number, number, 0, 0))

    with four_threads(add_events) as done:
        while not all(one.done() for one in done):
            log.write()
    log.close()
    rows = found_at(path).rows
    for thread in range(4):
        assert rows[rows[:, 2] == thread, 3].tolist() == list(range(count))


@pytest.mark.usefixtures("many_switches")
def test_what_several_threads_name_at_once_has_one_number(path):
    log, count = EventLog(path), 50_000

    def name_all(thread):
        for number in range(count):
            log.names[f"part {number}"]

    with four_threads(name_all):
        pass
    log.close()
    assert [log.names[text] for text in found_at(path).names] == list(range(count + 1))


def test_a_forked_child_writes_nothing(path):
    out, _ = written_by(
        """
        log = event_log.open_log(path)
        with mr.span("of the parent"):
            pass
        child = os.fork()
        with mr.span("of the child" if not child else "of the parent"):
            pass
        if not child:
            sys.exit()  # as a program ends, with what was registered at its end
        print(os.waitpid(child, 0)[1])
        """,
        path,
    )
    assert out == "0\n"
    process = found_at(path)
    assert texts_of(process) == ["of the parent"] * 2
    assert process.end_ns is not None
