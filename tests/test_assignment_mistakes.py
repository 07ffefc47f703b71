"""Assignments that numpy refuses: an error on all ranks, and the strategy works on."""

import functools

import pytest

from jobs import run_job, told
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

MISTAKES = {
    "bools are subtracted": ("True", "assign_sub"),
    "structures are added": ("np.zeros(2, 'f4,i4')", "assign_add"),
}
PLACES = {
    "outside": "assign()",  # of any strategy of the program
    "above": "with strategy.scope(): assign()",
    "in replicas": "strategy.run(assign)",
    "in update": "strategy.extended.update(v, lambda _: assign())",
}


@pytest.fixture(params=LIBRARIES)
def launch(request, tmp_path):
    """Run a program on some ranks, and return what came of it."""
    return functools.partial(run_job, request.param, tmp_path, succeeds=True)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("place", PLACES)
def test_the_strategy_works_on_after_an_assignment_that_numpy_refuses(
    launch, place, mistake, ranks
):
    value, how = MISTAKES[mistake]
    owner = "mr.get_strategy()" if place == "outside" else "strategy"
    done = launch(
        f"""
        with mr.MPIStrategy() as strategy:
            scope = {owner}.scope()
            with scope:
                v = mr.Variable({value})

            def assign():
                v.{how}({value})

            try:
                {PLACES[place]}
            except TypeError:
                tell("TypeError")
            with scope:
                assert float(mr.Variable(1.0)) == 1.0
            check(strategy)
            tell("alive")
        """,
        ranks,
    )
    assert told(done) == [
        f"[{rank}] {text}" for rank in range(ranks) for text in ("TypeError", "alive")
    ]
