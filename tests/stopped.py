"""Run a program, in which a rank gets a signal at one of its agreements.

    stopped.py RANK AGREEMENT SIGNAL PROGRAM...

The first agreement is number 1: with 0 none gets one.
"""

import os
import runpy
import sys

from mpi_replica.collectives.agreement.agreement import Agreement

rank, at, number = map(int, sys.argv[1:4])
calls = 0


def agree(self, *arguments, true=Agreement.agree, **settings):
    global calls
    calls += 1
    if calls == at and self._transport.rank == rank:
        os.kill(os.getpid(), number)
    return true(self, *arguments, **settings)


Agreement.agree = agree
sys.argv = sys.argv[4:]
runpy.run_path(sys.argv[0], run_name="__main__")
