"""Ranks come together, and rank 0 meets a loss again and again, before the others have a world."""

import dying

from mpi_replica.ranks.launch import open_survivors

NUM_FAILURES = 100

survivors = open_survivors()
attempts = 0


def met_at_first(method):
    """Do on rank 0 as after a loss, so many times, as soon as it has the new world."""

    def call():
        global attempts
        attempts += 1
        if dying.first_rank == 0 and attempts <= NUM_FAILURES:
            survivors.revoke()
            survivors._world.Barrier()
        return method()

    return call


survivors._mpi.Get_processor_name = met_at_first(survivors._mpi.Get_processor_name)
transport = survivors.come_together(lambda made: made)
dying.tell("TOLD", len(transport.all_gather_bytes(b"here")))
