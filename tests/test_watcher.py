"""The thread that watches: it goes on whatever fails, and writes one text for a rank.

On ranks of MPI: see test_watch.py.
"""

import logging
import threading
from collections import deque

import pytest

from channels import Post, World
from mpi_replica.watch.watcher import Watcher


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
            watcher.add(world.channels[0], "n")
        assert handler.has_come.wait(30)
    finally:
        logger.removeHandler(handler)
    failed = [text for text in handler.texts if "failed" in text]
    assert len(failed) == 1
    assert "stall reports" in failed[0]
