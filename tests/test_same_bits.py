"""One program gives the same bits on any ranks of any library, with any pieces and any cores."""

import os
import subprocess
import sys
import textwrap

import pytest

from launching import LIBRARIES, RANKS, ROOT, rank_environment, run_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

# Prints a digest for each number of replicas: of all that came of some steps.
PROGRAM = """
    import os, sys
    if os.environ.get("ON_ONE_CORE"):  # before BLAS counts them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    import hashlib
    import ml_dtypes
    import numpy as np
    import mpi_replica as mr

    kept = hashlib.sha256()

    def keep(name, nest):
        for array in nest if isinstance(nest, (list, tuple)) else [nest]:
            array = np.ascontiguousarray(array)
            kept.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())

    def sums(merged, x):
        return merged.reduce("SUM", x, axis=None)

    def train(strategy):
        with strategy.scope():
            w = mr.Variable(strategy.rng.standard_normal((300, 40), "f4"))
            loss = mr.Variable(
                np.float32(0),
                synchronization=mr.VariableSynchronization.ON_READ,
                aggregation=mr.VariableAggregation.MEAN,
            )

        def step():
            ctx = mr.get_replica_context()
            x = ctx.rng.standard_normal((200, 300), "f4")
            error = x @ w.value() - ctx.rng.standard_normal((200, 40), "f4")
            loss.assign_add(np.vdot(error, error))
            gradient = ctx.all_reduce("MEAN", {"w": x.T @ error, "b": error.sum(0)})
            w.assign_sub(1e-3 * gradient["w"])
            many = [ctx.rng.standard_normal(n * 11, "f4") for n in range(60)]
            many += [error.astype(kind) for kind in ("f2", ml_dtypes.bfloat16, "f8", "c8")]
            large = ctx.rng.standard_normal((401, 503)) * 10.0 ** ctx.rng.integers(-9, 9, 503)
            found = ctx.all_reduce("SUM", [*many, large]), gradient["b"]
            found += ctx.all_reduce("PROD", error), ctx.all_reduce("MAX", error)
            found += ctx.merge_call(sums, ([error[0], large],)), x[0]
            results.append(found)
            return error, x[0]

        for turn in range(2):
            results = []
            errors, rows = strategy.run(step)
            *alike, own = results[0]
            for index, found in enumerate(alike):
                keep(f"results {index} of turn {turn}", found)
            keep("rows", strategy.gather(rows, axis=0))
            keep("errors", strategy.reduce("MEAN", errors, axis=0))
        keep("variables", [w.value(), loss.value()])

    for replicas in (4, 6):
        for pieces in (0, 50_000):
            kept = hashlib.sha256()
            options = mr.CommunicationOptions(reproducible=True, bytes_per_pack=pieces)
            about = {"num_replicas": replicas, "communication_options": options, "seed": 3}
            with mr.MPIStrategy(**about) as strategy:
                train(strategy)
            # one write: ranks share the output
            sys.stdout.write(f"{replicas} {kept.hexdigest()}\\n")
            sys.stdout.flush()
"""

ENVIRONMENT = {"PYTHONPATH": str(ROOT)} | dict.fromkeys(
    ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"]  # unset
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    file = tmp_path_factory.mktemp("program") / "train.py"
    file.write_text(textwrap.dedent(PROGRAM))
    return file


@pytest.fixture(scope="module")
def alone(program):
    """What comes of it on one rank, without MPI."""
    environment = rank_environment(60, ENVIRONMENT)
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = digests(done)
    assert len(found) == 2, found
    return found


def digests(done):
    """Return the digests, by number of replicas."""
    return set(filter(None, done.stdout.splitlines()))


@pytest.mark.parametrize("ranks", [ranks for ranks in RANKS if ranks > 1])
@pytest.mark.parametrize("library", LIBRARIES)
def test_four_and_six_replicas_give_the_bits_that_they_give_on_one_rank(
    library, ranks, program, alone
):
    """Where BLAS may take as many threads as it likes, and where there is one core."""
    environment = ENVIRONMENT | ({"ON_ONE_CORE": "1"} if ranks == 3 else {})
    if not hasattr(os, "sched_setaffinity"):
        environment.pop("ON_ONE_CORE", None)
    done = run_ranks(library, ranks, [program], env=environment)
    assert done.returncode == 0, done.stderr
    assert digests(done) == alone
