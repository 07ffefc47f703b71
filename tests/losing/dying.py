"""Ranks that die at a chosen moment, as the programs of this folder are told in the environment.

``KILLS`` has words such as ``2:all_gather:1``: rank 2, as it was numbered at the start, dies in
what the program calls ``all_gather``, when it comes to the first exchange of it with other ranks.
With 0 it dies before, and with ``end`` behind the last one. ``2+4`` are killed together by rank 2,
``4@2`` is rank 4 alone, killed by rank 2.
"""

import contextlib
import json
import os
import signal
import sys

first_rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))

_EXCHANGES = ("exchange", "begin_exchange", "maximum", "all_gather_bytes", "all_gather_blocks")
_EXCHANGES += ("all_reduce", "all_to_all", "open_shared_memory", "barrier", "pass_on", "agree")

_name, _count = "", 0
_pids = {first_rank: os.getpid()}


def _read(words):
    """Return whom this rank kills, by name and moment."""
    mine = {}
    for who, name, moment in (word.split(":") for word in words):
        victims, _, killer = who.partition("@")
        ranks = [int(rank) for rank in victims.split("+")]
        if int(killer or ranks[0]) == first_rank:
            mine[name, moment] = sorted(ranks, key=lambda rank: rank == first_rank)
    return mine


_mine = _read(os.environ.get("KILLS", "").split())


def enter(name):
    """Count the exchanges of `name` from now on."""
    global _name, _count
    _name, _count = name, 0
    _pass("0")


@contextlib.contextmanager
def during(name):
    """Count the exchanges of what is done inside."""
    enter(name)
    yield
    _pass("end")
    enter("")


def _pass(moment):
    for rank in _mine.pop((_name, moment), []):
        os.kill(_pids[rank], signal.SIGKILL)


def watch_exchanges(strategy):
    """Have ranks die at exchanges, too."""
    if strategy.survivors is None:
        return
    _pids.update({member.first_rank: member.pid for member in strategy.survivors.members})
    from mpi_replica.ranks.mpi import MPITransport  # starts MPI

    def counted(method):
        def call(self, *arguments, **settings):
            global _count
            _count += 1
            _pass(str(_count))
            return method(self, *arguments, **settings)

        return call

    for name in _EXCHANGES:
        setattr(MPITransport, name, counted(getattr(MPITransport, name)))


def tell(word, *values):
    """Write something for the test that reads the output."""
    sys.stdout.write(f"{word} {json.dumps([first_rank, *values])}\n")
    sys.stdout.flush()
