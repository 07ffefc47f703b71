"""Modules of torch in a job that loses ranks: what they learn has the same bits."""

import json
import re

import pytest

from jobs import run_to_its_end
from launching import LIBRARIES, ROOT

pytestmark = [
    pytest.mark.mpi_skip,  # it starts ranks itself
    pytest.mark.skipif("openmpi" not in LIBRARIES, reason="of the two, Open MPI alone has ULFM"),
]


def found(ranks, **env):
    """What each rank that is left has found: hash of the weights, draws, number of losses."""
    done = run_to_its_end(
        "openmpi",
        ranks,
        [ROOT / "tests" / "losing" / "torch_modules.py"],
        succeeds=True,
        env=env,
        options=["--with-ft", "ulfm"],
        arrays=True,
    )
    lines = re.findall(r"^TOLD (.*)$", done.stdout, re.MULTILINE)
    return {rank: tuple(map(repr, of_rank)) for rank, of_rank in map(json.loads, lines)}


@pytest.fixture(scope="module")
def undisturbed():
    return found(1)[0][:2]


@pytest.mark.parametrize(
    ("ranks", "left", "losses", "env"),
    [
        (3, {2}, 2, {"KILLS": "0:step2:1 1:step4:1"}),
        (3, {1, 2}, 1, {"KILLS": "0:step1:2", "SPARES": "1"}),
    ],
    ids=["one after the other", "a spare takes its place"],
)
def test_what_modules_of_replicas_learn_has_the_same_bits_after_a_loss(
    ranks, left, losses, env, undisturbed
):
    of_ranks = found(ranks, **env)
    assert set(of_ranks) == left
    for *same, count in of_ranks.values():
        assert tuple(same) == undisturbed
        assert count == str(losses)


def test_modules_of_replicas_go_back_to_a_checkpoint(tmp_path, undisturbed):
    """Rank 1 keeps the copies for rank 0, and dies with it."""
    of_ranks = found(4, KILLS="0+1:step4:1", FOLDER=str(tmp_path))
    assert set(of_ranks) == {2, 3}
    for *same, _ in of_ranks.values():
        assert tuple(same) == undisturbed
