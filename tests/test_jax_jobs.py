"""Jobs with compiled functions of JAX: what ends them, and what they can't be begun with."""

import textwrap

import pytest

from launching import LIBRARIES, ROOT, run_ranks

pytestmark = [
    pytest.mark.mpi_skip,  # it starts ranks itself
    pytest.mark.skipif("openmpi" not in LIBRARIES, reason="not asked for"),
]

# XLA has threads of its own for what takes some tenths of a second.
COMPILED = """
    import os, signal, sys
    import jax, jax.numpy as jnp, numpy as np
    import mpi_replica as mr

    matrix = np.random.default_rng(0).random((500, 500), np.float32)

    @jax.jit
    def summed(matrix, x):
        for _ in range(6):
            matrix = jnp.tanh(matrix @ matrix / 500)
        return mr.get_replica_context().all_reduce("SUM", x + 0 * matrix[0, :3])

    def step():
        return summed(jnp.asarray(matrix), jnp.ones(3))
"""

TWO_RANKS = """
    strategy = mr.MPIStrategy()

    def run(k):
        if strategy.rank == 1 and k == 2:
            {ends}
        return step()

    for k in range(3):
        strategy.run(run, args=(k,))
    print("has not ended")
"""

ELASTIC = """
    strategy = mr.MPIStrategy(num_replicas=4)
    state = mr.ElasticState(strategy, step=0, total=jnp.zeros(3))

    def train():
        while state.step < 6:
            if state.step == 3 and strategy.size == 3 and strategy.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state.total += strategy.experimental_local_results(strategy.run(step))[0]
            state.step += 1
            state.commit()

    strategy.run_elastic(train, state)
    print("total", np.asarray(state.total), "on", strategy.size)
"""


def job(code, ranks, folder, begin=COMPILED, **settings):
    file = folder / "job.py"
    file.write_text(textwrap.dedent(begin) + textwrap.dedent(code))
    environment = {"PYTHONPATH": str(ROOT)}
    return run_ranks("openmpi", ranks, [file], env=environment, arrays=True, **settings)


STARTED_BEFORE = """
    jnp.ones(2) + 1  # a device, for all replicas
    strategy = mr.MPIStrategy(num_replicas=2)
    print(strategy.run(lambda: float(jnp.ones(2).sum())))  # without a collective inside
    for backend in ("cpu", "gpu"):
        jax.default_backend = lambda: backend  # as where there is one
        try:
            strategy.run(step)
        except mr.errors.ContextError as error:
            print(error)
    print(strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1)))
"""


def test_replicas_that_share_a_device_are_told_what_to_write(tmp_path):
    done = job(STARTED_BEFORE, 1, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "share a device" in done.stdout
    assert "\n    jax.config.update('jax_num_cpu_devices', N)\n" in done.stdout
    assert "\n    jax.config.update('jax_platforms', 'cpu')\n" in done.stdout
    assert done.stdout.count("0: 2") == 2  # before and behind it


MORE_THAN_ARE_ASKED_FOR = """
    strategy = mr.MPIStrategy(num_replicas=65)
    try:
        strategy.run(step)
    except mr.errors.ContextError as error:
        print(error)
"""


def test_more_replicas_than_devices_are_asked_for_are_told_so(tmp_path):
    done = job(MORE_THAN_ARE_ASKED_FOR, 1, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "JAX has 64, the most that a strategy asks for" in done.stdout
    assert "had started" not in done.stdout
    assert "\n    jax.config.update('jax_num_cpu_devices', N)\n" in done.stdout


IMPORTED_IN_A_STEP = """
    import numpy as np
    import mpi_replica as mr

    strategy = mr.MPIStrategy()

    def step():
        import jax

        all_reduce = mr.get_replica_context().all_reduce
        return float(jax.jit(lambda x: x * all_reduce("SUM", np.float32(1)))(np.float32(1)))

    try:
        strategy.run(step)
    except mr.errors.ContextError as error:
        print(error)
    print(strategy.reduce("SUM", strategy.run(lambda: 1), axis=None))
"""


USER_CONTEXT = """
    import jax
    import mpi_replica as mr

    scale = jax.make_user_context(1.0)
    scaled = jax.jit(lambda x: x * scale.value)
    strategy = mr.MPIStrategy(num_replicas=3)
    with scale(3.0):
        found = strategy.run(lambda: float(scaled(1.0)))
    print("found", strategy.gather_objects(found))
"""


def test_a_user_context_that_the_first_run_finds_holds_on_each_replica(tmp_path):
    done = job(USER_CONTEXT, 2, tmp_path, begin="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("found (3.0, 3.0, 3.0)") == 2


def test_a_library_that_a_step_imports_keeps_no_result_in_what_it_traces(tmp_path):
    done = job(IMPORTED_IN_A_STEP, 2, tmp_path, begin="")
    assert done.stdout.count("with values that JAX does not trace") == 2, done
    assert done.stdout.splitlines().count("2") == 2


INTERRUPTED = """
    import threading

    strategy = mr.MPIStrategy(num_replicas={replicas})
    is_due, is_wanted = threading.Event(), [False]

    def send():
        while True:
            is_due.wait()
            is_due.clear()
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()

    def noted(x):
        if is_wanted[0]:
            is_wanted[0] = False
            is_due.set()
        return x

    @jax.jit
    def interrupted(x):
        return summed(jnp.asarray(matrix), jax.pure_callback(noted, jax.typeof(x), x))

    for k in range(10):
        is_wanted[0] = bool(k % 2)
        try:
            found = strategy.run(lambda: float(interrupted(jnp.ones(3))[0]))
            if k % 2:  # on a busy machine it comes now
                threading.Event().wait(60)
            print(set(strategy.experimental_local_results(found)))
        except KeyboardInterrupt:
            print("interrupted")
"""


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ctrl_c_comes_up_as_such_wherever_a_compiled_function_is(replicas, tmp_path):
    done = job(INTERRUPTED.format(replicas=replicas), 1, tmp_path)
    assert done.stdout.splitlines() == [f"{{{replicas}.0}}", "interrupted"] * 5, done.stderr


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        ("os.kill(os.getpid(), signal.SIGTERM)", None),
        ("sys.exit(3)", 3),
        ("raise KeyError('mine')", 1),
    ],
)
def test_a_job_ends_when_a_rank_does_while_others_wait_in_a_compiled_function(
    ends, status, tmp_path
):
    done = job(TWO_RANKS.format(ends=ends), 2, tmp_path)
    assert done.returncode != 0
    assert status in (None, done.returncode)
    assert "has not ended" not in done.stdout


def test_compiled_functions_go_on_without_a_rank_that_is_lost(tmp_path):
    """And the replicas that moved here have devices of their own."""
    done = job(ELASTIC, 3, tmp_path, options=["--with-ft", "ulfm"])
    assert done.stdout.splitlines() == ["total [24. 24. 24.] on 2"] * 2, done.stderr
