"""Waits that are given up, one situation after the other (see tests/test_watch.py).

Run with the path of a file for what came of it, and the names of the situations in the
environment. The strategies can't be used any more, so that the job ends with an abort.
"""

import json
import os
import sys

import numpy as np
from mpi4py import MPI

import mpi_replica as mr

world = MPI.COMM_WORLD
rank = world.rank
GO_ON = 7  # a tag


def first_call():
    return mr.get_replica_context().all_reduce("SUM", 1.0)  # first


def second_call():
    return mr.get_replica_context().all_reduce("MAX", 2.0)  # second


def third_call():
    return mr.get_replica_context().all_gather(np.ones(3), axis=0)  # third


def large_call():
    return mr.get_replica_context().all_reduce("SUM", np.ones(9000))  # large


def gather_call():
    return mr.get_replica_context().all_gather(np.ones(900), axis=0)  # gather


def timed_call():
    options = mr.CommunicationOptions(timeout_seconds=1)
    return mr.get_replica_context().all_reduce("SUM", 1.0, options)  # timed


def error_of(call):
    try:
        call()
    except Exception as error:
        return error
    return None


def told(error, *again):
    """Return what a rank tells of an error, and whether each of the calls raises it again."""
    kind, text = type(error).__name__, str(error)
    return kind, text, [repr(error_of(call)) == repr(error) for call in again]


def late_beyond_the_timeout(culprit, replicas_per_rank=1):
    strategy = mr.MPIStrategy(replicas_per_rank=replicas_per_rank)
    strategy.run(first_call)
    world.Barrier()
    if rank == culprit:
        world.recv(tag=GO_ON)  # late
    error = error_of(lambda: strategy.run(timed_call))
    if rank == (1 if culprit == 0 else 0):
        world.send(None, culprit, GO_ON)
    found = told(
        error,
        lambda: strategy.run(timed_call),
        lambda: strategy.run(int),
        lambda: strategy.extended.broadcast_to(rank),
    )
    strategy.close()
    return found


def error_beyond_the_timeout(culprit):
    """A replica has raised while another one does not come, as where it waits for the first."""
    options = mr.CommunicationOptions(timeout_seconds=1)
    strategy = mr.MPIStrategy(communication_options=options)
    strategy.run(first_call)

    def step():
        if rank == culprit:
            raise OSError("no halo")  # raised
        world.recv(tag=GO_ON)

    error = error_of(lambda: strategy.run(step))
    if rank == culprit:
        for other in range(world.size):
            if other != culprit:
                world.send(None, other, GO_ON)
    found = told(error, lambda: strategy.run(first_call))
    strategy.close()
    return *found, repr(error.__cause__)


def failure_after(method):
    """An exchange of the last rank fails when it has been made: the others can't know."""
    strategy = mr.MPIStrategy()
    strategy.run(first_call)
    if rank == last:
        transport = strategy.engine.transport
        made = getattr(transport, method)

        def fails(*args):
            made(*args)
            raise OSError("the network is gone")

        setattr(transport, method, fails)
    found = told(error_of(lambda: strategy.run(large_call)), lambda: strategy.run(large_call))
    strategy.close()
    return found


def no_memory():
    """The last rank has none, not even what it has laid by, when all have agreed to a call."""
    strategy = mr.MPIStrategy()
    strategy.run(first_call)
    made, empty = strategy.engine.transport.exchange, np.empty

    def fails(*args, **kwargs):
        raise MemoryError("there is none")

    def exchange(*args):
        headers = made(*args)
        np.empty = fails
        return headers

    if rank == last:
        strategy.engine.transport.exchange = exchange
    error = error_of(lambda: strategy.run(gather_call))
    np.empty = empty
    found = told(error, lambda: strategy.run(gather_call))
    strategy.close()
    return found


def in_another_order(strategies, order):
    """Call the collectives of strategies, by their names, in an order of this rank's own."""
    calls = {"one": first_call, "two": second_call, "three": third_call}
    world.Barrier()

    def call_all():
        for name in order:
            strategies[name].run(calls[name])

    error = error_of(call_all)
    again = [lambda one=one: one.run(first_call) for one in strategies.values()]
    found = told(error, *again)
    for one in strategies.values():
        one.close()
    return found


def both_over_the_world(culprit):
    strategies = {"one": mr.MPIStrategy(), "two": mr.MPIStrategy(replicas_per_rank=2)}
    order = ["two", "one"] if rank == culprit else ["one", "two"]
    return in_another_order(strategies, order)


def a_part_of_the_world(culprit):
    """The second strategy is over the culprit and one other rank."""
    other = (culprit + 1) % world.size
    strategies = {"one": mr.MPIStrategy()}
    if rank in (culprit, other):
        part = world.Create_group(world.group.Incl(sorted([culprit, other])))
        strategies["two"] = mr.MPIStrategy(part)
    order = ["two", "one"] if rank == culprit else [*strategies]
    return in_another_order(strategies, order)


def a_ring():
    """Each rank waits for the next one, in a strategy of the two of them."""
    pairs = {"one": (0, 1), "two": (1, 2), "three": (0, 2)}
    strategies = {}
    for name, pair in pairs.items():
        if rank in pair:
            strategies[name] = mr.MPIStrategy(world.Create_group(world.group.Incl(pair)))
    order = [["one", "three"], ["two", "one"], ["three", "two"]][rank]
    return in_another_order(strategies, order)


def others_make_one(culprit):
    """The others make a strategy over the world while one rank waits for them in another one."""
    strategy = mr.MPIStrategy()
    strategy.run(first_call)
    error = error_of(lambda: strategy.run(first_call)) if rank == culprit else None
    new = mr.MPIStrategy()  # new
    assert new.run(first_call).values[0] == world.size
    found = told(error or error_of(strategy.barrier), lambda: strategy.run(first_call))
    strategy.close()
    new.close()
    return found


def left_by_an_error(culprit):
    """One rank leaves a strategy by an error, and goes on with another one."""
    outer = mr.MPIStrategy()

    def trial():
        with mr.MPIStrategy() as strategy:
            strategy.run(second_call)
            if rank == culprit:
                raise OSError("no data")
            strategy.run(first_call)

    error = error_of(trial)
    if rank == culprit:
        error = error_of(lambda: outer.run(second_call))
    found = told(error, lambda: outer.run(first_call))
    outer.close()
    return found


last, middle = world.size - 1, world.size // 2
SITUATIONS = {
    "timeout, first": lambda: late_beyond_the_timeout(0),
    "timeout, middle": lambda: late_beyond_the_timeout(middle),
    "timeout, last": lambda: late_beyond_the_timeout(last, replicas_per_rank=2),
    "timeout, raised": lambda: error_beyond_the_timeout(last),
    "both over the world, first": lambda: both_over_the_world(0),
    "both over the world, middle": lambda: both_over_the_world(middle),
    "both over the world, last": lambda: both_over_the_world(last),
    "a part of the world": lambda: a_part_of_the_world(last),
    "a ring": a_ring,
    "a new one, last": lambda: others_make_one(last),
    "a new one, middle": lambda: others_make_one(middle),
    "left by an error": lambda: left_by_an_error(last),
    "failure after a header": lambda: failure_after("exchange"),
    "failure after data": lambda: failure_after("all_reduce"),
    "no memory": no_memory,
}

found = {}
for name in os.environ["SITUATIONS"].split(";"):
    found[name] = world.allgather(SITUATIONS[name]())
unclosed = mr.MPIStrategy()
for _ in range(10):
    unclosed.run(first_call)
pids = world.allgather(os.getpid())
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump((found, pids), file)
world.Barrier()
