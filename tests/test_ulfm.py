"""What is asked of an MPI library where ranks may have died; what it does then: test_lost_ranks."""

import threading

import numpy as np
import pytest

from mpi_replica.ranks.transport import Mailbox
from mpi_replica.ranks.ulfm import begin_to_agree, shrink

pytestmark = pytest.mark.mpi_skip


class Communicator:
    """Tells, for each call, whether another thread could use a mailbox meanwhile."""

    def Iagree(self, words):
        return words.tolist(), can_be_taken_elsewhere(Mailbox.lock)

    def Shrink(self):
        return "the living", can_be_taken_elsewhere(Mailbox.lock)


def can_be_taken_elsewhere(lock):
    found = []

    def take():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def test_no_other_thread_uses_a_mailbox_while_ranks_begin_to_agree():
    assert begin_to_agree(Communicator(), np.array([3], np.int32)) == ([3], False)
    assert shrink(Communicator()) == ("the living", False)
    assert can_be_taken_elsewhere(Mailbox.lock)
