"""Notes of a rank: what not all ranks have counted alike is taken back alike."""

import hypothesis.strategies as st
from hypothesis import given

from mpi_replica.collectives.agreement.notes import Notes
from mpi_replica.collectives.agreement.site import CallSite
from mpi_replica.collectives.agreement.stand import Note

NOWHERE = CallSite(b"", (), ())


class Rank:
    """Counts by name, as iterators count their steps."""

    def __init__(self):
        self.notes = Notes()
        self.counts = dict.fromkeys("ab", 0)

    def count(self, name, batch=""):
        before = self.counts[name]
        self.counts[name] = before + 1
        note = Note(name, NOWHERE, before + 1, "", "ValueError", batch)
        self.notes.count(note, before, lambda least: self.counts.update({name: least}))


def ranks_that(agreed, *parts):
    """One rank for each part: all have counted `agreed` before the last header, then its part."""
    ranks = [Rank() for _ in parts]
    for rank, part in zip(ranks, parts, strict=True):
        for name in agreed:
            rank.count(name)
        rank.notes.drop()
        for name in part:
            rank.count(name)
    return ranks


names = st.lists(st.sampled_from("ab"), max_size=6)


@given(names, st.lists(names, min_size=1, max_size=4))
def test_after_an_error_each_count_is_the_least_of_all_ranks(agreed, parts):
    ranks = ranks_that(agreed, *parts)
    least = {name: min(rank.counts[name] for rank in ranks) for name in "ab"}
    reports = [rank.notes.all for rank in ranks]
    for rank in ranks:
        rank.notes.undo(reports)
    assert [rank.counts for rank in ranks] == [least] * len(ranks)


@given(
    st.integers(0, 2), st.lists(st.lists(st.sampled_from("xy"), max_size=5), min_size=1, max_size=4)
)
def test_after_an_error_each_count_is_the_last_one_up_to_which_all_batches_are_alike(
    agreed, batches
):
    ranks = ranks_that("a" * agreed, *([] for _ in batches))
    for rank, mine in zip(ranks, batches, strict=True):
        for batch in mine:
            rank.count("a", batch)
    alike = 0
    while all(mine[alike : alike + 1] == batches[0][alike : alike + 1] != [] for mine in batches):
        alike += 1
    reports = [rank.notes.all for rank in ranks]
    is_error = len(set(reports)) > 1  # else there is nothing to take back
    for rank in ranks:
        rank.notes.undo(reports)
    expected = agreed + (alike if is_error else len(batches[0]))
    assert [rank.counts["a"] for rank in ranks] == [expected] * len(ranks)


@given(names, names)
def test_ranks_that_count_alike_have_the_same_chain(agreed, part):
    one, other = ranks_that(agreed, part, part)
    assert one.notes.chain == other.notes.chain
    assert bool(one.notes.chain) == bool(part)
    other.count("a")
    assert one.notes.chain != other.notes.chain


def test_a_count_that_goes_on_is_one_note():
    (rank,) = ranks_that("", "a" * 100)
    assert [note.digest for note in rank.notes.all] == [100]


def test_counts_of_one_name_are_those_of_their_owners():
    """Two iterators that stand in the same epoch, of which one rank took another step."""
    ranks, counts = [Notes(), Notes()], [{1: 0, 2: 0}, {1: 0, 2: 0}]
    for notes, of_owners, steps in zip(ranks, counts, ([1, 1, 2, 1], [1, 2]), strict=True):
        for owner in steps:
            before = of_owners[owner]
            of_owners[owner] = before + 1

            def go_back(least, of_owners=of_owners, owner=owner):
                of_owners[owner] = least

            notes.count(Note("a", NOWHERE, before + 1, "", "ValueError"), before, go_back, owner)
    reports = [notes.all for notes in ranks]
    assert len(set(reports)) == 2
    for notes in ranks:
        notes.undo(reports)
    assert counts == [{1: 1, 2: 1}] * 2
