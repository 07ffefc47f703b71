"""The thread that watches: it goes on whatever fails, and writes one text for a rank.

On ranks of MPI: see test_watch.py.
"""

import itertools
import logging
import os
import sys
import threading
import time
from collections import deque

import pytest

from mpi_replica.ranks.watch import recorder
from mpi_replica.ranks.watch.watcher import Watcher
from watches import Post, World

REASON = "a test ends"


@pytest.fixture
def watcher():
    watcher = Watcher()
    yield watcher
    watcher.stop()


class Log(logging.Handler):
    """Keeps what is logged, and knows when a text has come."""

    def __init__(self, text):
        super().__init__()
        self.text = text
        self.texts = []
        self.has_come = threading.Event()

    def emit(self, record):
        self.texts.append(record.getMessage())
        if self.text in self.texts[-1]:
            self.has_come.set()


def test_the_watch_goes_on_where_a_message_of_a_strategy_can_not_be_sent(watcher, monkeypatch):
    """It searches for cycles through both strategies, first."""

    class Broken(Post):
        def send(self, rank, data):
            raise RuntimeError("no MPI")

    broken, other = World(2), World(2)
    broken.transports[0].mailbox = Broken(0, [deque(), deque()])
    monkeypatch.setenv("MPI_REPLICA_STALL_SECONDS", "2")
    later = World(2)
    handler, logger = Log("call of rank 0 has waited"), logging.getLogger("mpi_replica")
    logger.addHandler(handler)
    try:
        for world in (broken, other, later):
            world.begin(0)
            watcher.add(world.watches[0], "n")
        assert handler.has_come.wait(30)
    finally:
        logger.removeHandler(handler)
    failed = [text for text in handler.texts if "failed" in text]
    assert len(failed) == 1
    assert "stall reports" in failed[0]


def test_a_job_is_aborted_where_nothing_can_be_written(watcher, monkeypatch):
    world = World(2)
    watcher.add(world.watches[0], "n")
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", closed)
    watcher.write_flight_records(REASON)  # what aborts comes after it


def test_a_job_is_aborted_where_it_can_not_be_logged_why_nothing_is_written(watcher):
    class Closed(Log):
        def emit(self, record):
            super().emit(record)
            raise ValueError("I/O operation on closed file")

    world = World(2)
    world.watches[0].here = lambda: 1 / 0
    watcher.add(world.watches[0], "n")
    handler, logger = Closed("has failed"), logging.getLogger("mpi_replica")
    logger.addHandler(handler)
    try:
        watcher.write_flight_records(REASON)
    finally:
        logger.removeHandler(handler)
    assert handler.has_come.is_set()


def test_calls_in_a_file_whose_name_is_no_utf_8_are_written(watcher, monkeypatch, tmp_path):
    world = World(2)
    watcher.add(world.watches[1], "n")
    world.watches[1].recorder.begin("barrier() at tr\udce4in.py:1", None)
    monkeypatch.setenv("MPI_REPLICA_FLIGHT_FOLDER", str(tmp_path))
    watcher.write_flight_records(REASON)
    assert r"barrier() at tr\udce4in.py:1" in (tmp_path / "flight-rank-1.txt").read_text("utf-8")


def test_a_call_has_one_time_in_all_that_a_rank_writes(watcher, monkeypatch, tmp_path, capsys):
    """Also where the thread that writes is kept from a core, between its looks at two clocks."""
    for _ in range(2):
        world = World(2)
        watcher.add(world.watches[1], "n")
        for number in range(4):
            world.watches[1].recorder.begin(f"call {number}", None)
            world.watches[1].recorder.end()
    clock, delays = time.time_ns, itertools.count(10**9, 10**9)
    monkeypatch.setattr(recorder, "time_ns", lambda: clock() + next(delays))
    monkeypatch.setenv("MPI_REPLICA_FLIGHT_FOLDER", str(tmp_path))
    watcher.write_flight_records(REASON)
    calls = (tmp_path / "flight-rank-1.txt").read_text().splitlines()
    assert len(calls) == 8
    assert [line.strip() for line in capsys.readouterr().err.splitlines()[-8:]] == calls


def test_a_rank_writes_one_text_about_all_of_its_strategies(watcher, capsys):
    """About where it is and its last calls, the oldest first, in whatever strategy."""
    for number in range(12):
        world = World(2)
        world.begin(1)
        if number % 4:  # of the others something is in flight for ever
            world.end(1)
        world.watches[1].recorder.end()
        watcher.add(world.watches[1], "n")
    world.watches[1].recorder.begin("the last call", None)
    world.watches[1].recorder.end()
    watcher.write_flight_records(REASON)
    text = capsys.readouterr().err
    assert text.count(REASON) == text.count("its last calls") == 1
    assert text.startswith(f"[rank 1 of 2] {REASON}: it is at\n")
    assert "watcher.write_flight_records(REASON)\n" in text  # where this thread is
    calls = [line.split()[1:-2] for line in text.splitlines() if line.endswith(" ms")]
    assert calls == [["call", "of", "rank", "1,"]] * 7 + [["the", "last", "call,"]]


def test_threads_with_strategies_of_their_own_write_each_where_it_is(watcher, capsys):
    worlds = [World(2) for _ in range(3)]
    is_over = threading.Event()
    waiting = threading.Thread(target=is_over.wait)
    waiting.start()
    try:
        ended = 0
        for world, ident in zip(worlds, (threading.get_ident(), waiting.ident, ended), strict=True):
            world.watches[0].thread = lambda ident=ident: ident
            watcher.add(world.watches[0], "n")
        worlds[1].begin(0)
        watcher.write_flight_records(REASON)
    finally:
        is_over.set()
        waiting.join()
    text = capsys.readouterr().err
    assert text.count(REASON) == 2
    assert text.count(f"{REASON}: it is at\n") == 1
    assert text.count(f"{REASON}: it waits in the last of these calls\n") == 1
