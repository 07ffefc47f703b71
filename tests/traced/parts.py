"""Parts of a program that are traced, and some that can't be (see tests/test_traced_jobs.py).

Run with a folder for the traces, and for what each rank tells.
"""

import json
import os
import sys
from pathlib import Path

import mpi_replica as mr

folder = Path(sys.argv[1])
strategy = mr.MPIStrategy(replicas_per_rank=2)
rank = strategy.rank
shared = mr.span("shared")


@mr.span("add up")
def add_up():
    mr.get_replica_context().all_reduce("SUM", 1.0)


def work():
    for _ in range(5):
        strategy.run(add_up)


def fail():
    work()
    raise KeyError("no such row")


def wait_in_one_span():
    """Be in one and the same span on all replicas, and twice on each."""

    def step():
        context = mr.get_replica_context()
        with shared:
            context.all_reduce("SUM", 1.0)
            with shared:
                context.all_reduce("SUM", 1.0)
            with mr.span(f"end of {context.replica_id_in_sync_group}"):
                pass

    strategy.run(step)


def move():
    work()
    os.chdir("/")


def traced(path, body=work):
    """Return kind and text of what came up, or None; the strategy works on in any case."""
    found = None
    try:
        with strategy.trace(path), mr.span("all of it"):
            body()
    except Exception as error:
        found = [type(error).__name__, str(error)]
    work()
    return found


os.chdir(folder)
(folder / "of parts").mkdir(exist_ok=True)
told = {
    "first": traced(folder / "first.json"),
    "second": traced("second.json.gz"),
    "below a file": traced(Path(__file__, "trace.json")),
    "a folder": traced(folder / "of parts"),
    "another on each rank": traced(f"{rank}.json"),
    "failed": traced("failed.json", fail),
    "failed at first": traced("again.json", fail),
    "again": traced("again.json"),
    "of replicas": traced("replicas.json", wait_in_one_span),
}
if rank == 1:
    os.chdir("/proc")
told["below a file on one rank"] = traced("alone.json")
os.chdir(folder)
told["moved"] = traced("moved.json", move)
told["last"] = traced(folder / "last.json")
(folder / f"told-{rank}.json").write_text(json.dumps(told))
