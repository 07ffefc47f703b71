"""One rank of a job under a debugger, a profiler or a measure of coverage, and the others not.

People profile one rank. What stands around its program is no part of the program.
"""

import textwrap

import pytest

from jobs import HEAD, run_to_its_end
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

# A call above the replicas and one in them, and those that find their own site.
PROGRAM = """
    def main():
        with mr.MPIStrategy() as strategy:
            check(strategy)
            with strategy.scope():
                weights = mr.Variable(np.zeros(2) + rank)
            assert strategy.reduce("SUM", strategy.run(total), axis=None) == 4.0
            strategy.verify({"weights": weights})
        tell("well")

    main()
"""

# It runs a program as runners do that a site's configuration puts before it.
RUNNER = """
    import runpy, sys

    def run():
        runpy.run_path(sys.argv[1], run_name="__main__")

    run()
"""

# Rank 0 becomes the program under the wrapper that is given, all others become the program.
START = """
    import os, sys

    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    wrapper = sys.argv[1:] if rank == "0" else []
    os.execv(sys.executable, [sys.executable, *wrapper, "train.py"])
"""

WRAPPERS = {
    "cProfile": ["-m", "cProfile", "-o", "profile"],
    "pdb": ["-m", "pdb", "-c", "continue", "-c", "quit"],
    "coverage": ["-m", "coverage", "run", "--data-file", "coverage"],
    "a runner": ["runner.py"],
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_one_rank_may_run_under_a_wrapper(library, wrapper, tmp_path):
    for name, text in (("train", HEAD), ("runner", RUNNER), ("start", START)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    with open(tmp_path / "train.py", "a") as file:
        file.write(textwrap.dedent(PROGRAM))
    run_to_its_end(library, 2, ["start.py", *WRAPPERS[wrapper]], succeeds=True, cwd=tmp_path)
    told = [file.read_text() for file in sorted(tmp_path.glob("told-*"))]
    assert told == ["[0] well\n", "[1] well\n"]
