"""Ranks that are late on purpose, by clocks that are wrong (see tests/test_traced_jobs.py).

Run with a folder for what each rank tells. Odd ranks have another clock than the others: hours
ahead, and 100 ppm too fast. In three of four steps rank 1 is late, otherwise rank 2.
"""

import json
import os
import sys
import time
from pathlib import Path

rank = int(os.environ.get("PMIX_RANK") or os.environ["PMI_RANK"])
true_ns = time.perf_counter_ns


def wrong_ns():
    now = true_ns()
    return now + now // 10_000 + 5 * 3600 * 10**9


if rank % 2:
    time.perf_counter_ns = wrong_ns

import mpi_replica as mr  # noqa: E402

NUM_STEPS = 32
LATE_NS = 20_000_000
marks = []


def be_late():
    until = true_ns() + LATE_NS
    while true_ns() < until:  # it is here
        pass


def step(number):
    if rank == (2 if number % 4 == 3 else 1):
        be_late()
    before = true_ns()
    with mr.span("mark"):
        marks.append((before, true_ns()))
    mr.get_replica_context().all_reduce("SUM", 1.0)  # they wait here


with mr.MPIStrategy() as strategy:
    strategy.barrier()
    for number in range(NUM_STEPS):
        strategy.run(step, args=(number,))
Path(sys.argv[1], f"told-{rank}.json").write_text(json.dumps(marks))
