"""Replica <-> rank arithmetic."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mpi_replica.core.layout import Layout, compressed, shares

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple)


@given(COUNTS)
def test_replicas_stand_in_contiguous_blocks_in_rank_order(counts):
    layouts = [Layout(counts, rank) for rank in range(len(counts))]
    assert sum((layout.local_replica_ids for layout in layouts), ()) == layouts[0].all_replica_ids
    assert layouts[0].all_replica_ids == tuple(range(sum(counts)))
    for rank, layout in enumerate(layouts):
        assert layout.size == len(counts)
        assert layout.num_replicas == sum(counts)
        assert len(layout.local_replica_ids) == counts[rank]
        assert {layout.rank_of(i) for i in layout.local_replica_ids} == {rank}


@given(st.integers(1, 8), st.integers(0, 20))
def test_even_blocks_differ_by_at_most_one(size, more):
    layouts = [Layout.even(size + more, size, rank) for rank in range(size)]
    counts = layouts[0].counts
    assert all(layout.counts == counts for layout in layouts)
    assert sum(counts) == size + more
    assert max(counts) - min(counts) <= 1


def test_an_id_that_no_replica_has_is_an_index_error():
    with pytest.raises(IndexError):
        Layout((2, 2), 0).rank_of(4)


def test_replicas_are_described_with_their_ranks():
    layout = Layout((2, 1, 3), 0)
    assert layout.describe([0]) == "replica 0 (rank 0)"
    assert layout.describe([5, 2, 0, 1]) == "replicas 0-2, 5 (ranks 0-2)"
    assert layout.describe([3, 5]) == "replicas 3, 5 (rank 2)"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([4], "4"), ([1, 2], "1-2"), ([0, 2, 3, 4, 9], "0, 2-4, 9")]
)
def test_runs_of_numbers_are_written_short(numbers, text):
    assert compressed(numbers) == text


def test_of_many_runs_the_first_are_written_and_how_many_numbers_follow():
    odd = list(range(1, 64, 2))
    assert compressed(odd[:16]) == ", ".join(map(str, odd[:16]))
    assert compressed(odd) == f"{compressed(odd[:16])} and 16 more"
    assert compressed([*odd[:16], 100, 101, 102]) == f"{compressed(odd[:16])} and 3 more"


def test_decision_11_ten_rows_over_four_replicas_are_3_3_3_1():
    assert [s.stop - s.start for s in shares(10, 4)] == [3, 3, 3, 1]


@given(st.integers(0, 50), st.integers(1, 9))
def test_decision_11_chunks_hold_n_over_r_rounded_up_and_trailing_ones_may_be_empty(rows, replicas):
    parts = shares(rows, replicas)
    chunk = -(-rows // replicas)
    assert len(parts) == replicas
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    sizes = [part.stop - part.start for part in parts]
    assert all(size >= 0 for size in sizes)
    full = rows // chunk if chunk else 0
    assert sizes[:full] == [chunk] * full
    assert sum(sizes[full + 1 :]) == 0
