"""A program that skips a step at any error, also at that of a loss, as one skips a bad batch."""

import dying

import mpi_replica as mr

strategy = mr.MPIStrategy(num_replicas=5)
dying.watch_exchanges(strategy)
state = mr.ElasticState(strategy, step=0, total=0.0)


def total():
    return mr.get_replica_context().all_reduce("SUM", 1.0)


def train():
    while state.step < 8:
        try:
            if state.step == 5:
                dying.enter("step5")
            values = strategy.run(total)
            state.total += strategy.experimental_local_results(values)[0]
            state.step += 1
            state.commit()
        except Exception:
            continue


strategy.run_elastic(train, state)
dying.tell("TOLD", state.step, float(state.total))
