"""Three calls of run_elastic, in each of which the lowest rank dies at once; the last one waits.

Each call adds 3.0 to a variable, whoever is left.
"""

import os
import signal

import dying

import mpi_replica as mr

strategy = mr.MPIStrategy(num_replicas=4, spares=1)
with strategy.scope():
    total = mr.Variable(0.0)
totals = []
for call in range(3):
    state = mr.ElasticState(strategy, step=0)

    def train(call=call, state=state):
        if dying.first_rank == call:
            os.kill(os.getpid(), signal.SIGKILL)
        while state.step < 3:
            strategy.run(lambda: total.assign_add(1.0))
            state.step += 1
            state.commit()

    strategy.run_elastic(train, state)
    totals.append(float(total))
dying.tell("TOLD", [totals, [loss.ranks for loss in strategy.losses]])
strategy.close()
