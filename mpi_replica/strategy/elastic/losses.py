"""What is said of lost ranks: a record and a line for each loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...core.layout import Layout, compressed
from ...ranks.survivors import Member


@dataclasses.dataclass(frozen=True)
class Loss:
    """Ranks that were lost together, and how the others went on.

    Parameters
    ----------
    ranks : tuple of int
        The lost ones, as they were numbered when the strategy was made.
    hosts : tuple of str
        The host of each.
    pids : tuple of int
        The process id of each.
    step : int or None
        Where the others went on: the ``step`` of the state, or else how many commits there were.
        None where the last checkpoint was restored, and on a spare that waits on.
    seconds : float
        From when this rank met the loss until the state was put back. What was done since the last
        commit is done again beside.
    replicas_per_rank : tuple of int
        How many replicas each rank hosts from then on, without those that wait as spares.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    step: int | None
    seconds: float
    replicas_per_rank: tuple[int, ...]

    @classmethod
    def of_members(
        cls, lost: Sequence[Member], step: int | None, seconds: float, layout: Layout
    ) -> Loss:
        """Returns the loss of some members of the world."""
        ranks, hosts, pids = zip(*lost, strict=True) if lost else ((), (), ())
        return cls(ranks, hosts, pids, step, seconds, layout.hosting_counts)

    @property
    def what(self) -> str:
        """What was lost, without how the others went on."""
        processes = ", ".join(
            f"rank {rank} (host {host}, pid {pid})"
            for rank, host, pid in zip(self.ranks, self.hosts, self.pids, strict=True)
        )
        return f"lost {processes or 'a rank that came back into no world'}"

    def __str__(self) -> str:
        where = "the last checkpoint" if self.step is None else f"step {self.step}"
        return (
            f"{self.what}; goes on at {where} after {self.seconds:.3f} s, with"
            f" {new_layout_text(self.replicas_per_rank)}."
        )


def new_layout_text(replicas_per_rank: Sequence[int]) -> str:
    """Returns which replicas are on which rank, in words.

    Examples
    --------
    >>> new_layout_text((2, 1))
    'replicas 0-1 on rank 0, 2 on rank 1'
    """
    layout = Layout(tuple(replicas_per_rank), 0)
    texts = [
        f"{compressed(layout.replica_ids(rank))} on rank {rank}" for rank in range(layout.size)
    ]
    return f"replica{'s' * (layout.num_replicas > 1)} {', '.join(texts)}"
