"""Whether a job is started again: what `Restarts` says of each start that has ended by a loss."""

import pytest

from mpi_replica.launcher.restarts import Outcome, Restarts

LONG, QUICK = 60.0, 9.9
LOSS = "rank 1 was lost"

# The program goes on from its last checkpoint.
GOES_ON = Outcome(137, LONG, LOSS, has_package=True, num_replicas=2, goes_on=True)
# It has trained, and has no checkpoints.
HAS_TRAINED = GOES_ON._replace(goes_on=False)
# The package was imported, and no strategy was made.
BEGINS = HAS_TRAINED._replace(num_replicas=None)
# The package was not even imported.
WITHOUT_PACKAGE = Outcome(137, 59.9, LOSS)


def pauses(restarts, outcomes):
    """Return the pause after each of these starts, None where there is none."""
    return [restarts.pause_seconds(outcome)[0] for outcome in outcomes]


@pytest.mark.parametrize("outcome", [GOES_ON, BEGINS, WITHOUT_PACKAGE])
def test_by_default_a_job_is_started_three_times_more_where_that_repeats_little(outcome):
    assert pauses(Restarts(), [outcome] * 4) == [1.0, 2.0, 4.0, None]


@pytest.mark.parametrize("outcome", [HAS_TRAINED, HAS_TRAINED._replace(seconds=1.0)])
def test_by_default_a_job_that_would_do_twice_what_it_has_done_is_not_started_again(outcome):
    seconds, text = Restarts().pause_seconds(outcome)
    assert seconds is None
    for words in (LOSS, "would be done twice", "restore_or_initialize", "--restarts N"):
        assert words in text


def test_a_program_without_the_package_has_done_something_after_a_minute():
    restarts = Restarts()
    assert restarts.pause_seconds(WITHOUT_PACKAGE)[0] == 1.0
    seconds, text = restarts.pause_seconds(WITHOUT_PACKAGE._replace(seconds=60.0))
    assert (seconds, "would be done twice" in text) == (None, True)


def test_a_program_that_has_the_package_but_no_strategy_has_done_nothing_however_long_it_took():
    assert Restarts().pause_seconds(BEGINS._replace(seconds=3600.0))[0] == 1.0


def test_what_is_asked_for_counts_also_where_it_repeats_much():
    assert pauses(Restarts(2), [HAS_TRAINED] * 3) == [1.0, 2.0, None]


def test_the_last_text_says_that_all_starts_were_used_up():
    restarts = Restarts(1)
    assert restarts.pause_seconds(GOES_ON)[1] == f"{LOSS}. Start 2 of at most 2 follows in 1 s."
    seconds, text = restarts.pause_seconds(GOES_ON)
    assert seconds is None
    assert text == f"{LOSS}. It was started 2 times (--restarts 1)."


def test_no_restarts_at_all_tells_the_loss_and_no_more():
    assert Restarts(0).pause_seconds(GOES_ON) == (None, f"{LOSS}.")


def test_the_count_is_how_often_the_job_was_started_again():
    restarts = Restarts(2)
    counts = [restarts.count]
    for _ in range(3):
        restarts.pause_seconds(GOES_ON)
        counts.append(restarts.count)
    assert counts == [0, 1, 2, 2]


def test_the_pauses_grow_up_to_half_a_minute():
    expected = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]
    assert pauses(Restarts(7), [GOES_ON] * 8) == expected


@pytest.mark.parametrize("most", [None, 3, 100])
@pytest.mark.parametrize("outcome", [GOES_ON, BEGINS, WITHOUT_PACKAGE])
def test_three_quick_deaths_in_a_row_are_given_up_with_the_cause_of_each(most, outcome):
    restarts = Restarts(most)
    quick = [outcome._replace(seconds=QUICK, loss=f"rank {n} was lost") for n in range(3)]
    assert pauses(restarts, quick[:2]) == [1.0, 2.0]
    seconds, text = restarts.pause_seconds(quick[2])
    assert seconds is None
    assert text.splitlines() == [
        "the job is given up: 3 times in a row it has died within 10 s of its start.",
        *(f"  {n + 1}. rank {n} was lost" for n in range(3)),
    ]


def test_a_start_that_lived_longer_ends_the_row_of_quick_deaths():
    restarts = Restarts(100)
    quick, longer = GOES_ON._replace(seconds=QUICK), GOES_ON._replace(seconds=10.0)
    row = [quick, quick, longer, quick, quick]
    assert None not in pauses(restarts, row)
    assert "given up" in restarts.pause_seconds(quick)[1]


def test_the_advice_comes_before_the_row_of_quick_deaths():
    restarts = Restarts()
    quick = [one._replace(seconds=QUICK) for one in (BEGINS, BEGINS, HAS_TRAINED)]
    assert pauses(restarts, quick[:2]) == [1.0, 2.0]
    assert "would be done twice" in restarts.pause_seconds(quick[2])[1]


@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("status", [1, 3, 143])
def test_a_program_that_has_ended_by_itself_is_not_started_again(most, status):
    ended = GOES_ON._replace(status=status, loss="")
    assert Restarts(most).pause_seconds(ended) == (None, "")


@pytest.mark.parametrize("after_errors", [False, True])
@pytest.mark.parametrize("loss", ["", LOSS])
def test_a_job_that_has_ended_well_is_not_started_again(after_errors, loss):
    restarts = Restarts(5, after_errors=after_errors)
    assert restarts.pause_seconds(GOES_ON._replace(status=0, loss=loss)) == (None, "")
    assert restarts.count == 0


def test_errors_count_as_losses_where_that_is_asked_for():
    restarts = Restarts(5, after_errors=True)
    failed = GOES_ON._replace(status=3, loss="")
    seconds, text = restarts.pause_seconds(failed)
    assert seconds == 1.0
    assert text.startswith("the program has ended with status 3. Start 2 of at most 6 ")
    assert restarts.pause_seconds(GOES_ON)[1].startswith(LOSS)


def test_errors_of_a_program_without_checkpoints_are_not_repeated_unasked():
    failed = HAS_TRAINED._replace(status=1, loss="")
    seconds, text = Restarts(after_errors=True).pause_seconds(failed)
    assert seconds is None
    assert text.startswith("the program has ended with status 1. The job is not started again")
