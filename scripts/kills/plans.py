"""Whom a trial kills, and when: drawn at random, the same for a seed and a number."""

import random

from kills.moments import Kill
from kills.trials import Trial

__all__ = ["KINDS", "LAYOUTS", "planned"]

#: Ranks, how many of them wait, replicas on each of the others.
LAYOUTS = [
    (2, 0, 1),
    (2, 0, 3),
    (2, 1, 2),
    (3, 0, 1),
    (3, 0, 2),
    (3, 1, 1),
    (4, 0, 1),
    (4, 0, 2),
    (4, 1, 2),
    (5, 0, 1),
    (5, 2, 1),
    (6, 0, 1),
    (6, 0, 3),
    (6, 2, 2),
]

# Later, the others may have agreed already that the strategy is made, and what comes between that
# and run_elastic is not promised to outlive a loss.
_MAKING_EVENTS = 3
# Events of a recovery: how many there are depends on what it meets.
_RECOVERY_EVENTS = 20
_AT_THE_END = "at the end"


def planned(seed, number, counts, seconds):
    """Return a trial, and what kind it is of.

    Parameters
    ----------
    seed, number : int
        Of all trials, and of this one.
    counts : mapping
        Of each layout, how many events an undisturbed job has in each phase.
    seconds : mapping
        Of each layout, how long an undisturbed job takes.
    """
    draw = random.Random(f"{seed} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    layout = draw.choice([layout for layout in LAYOUTS if layout[0] >= _LEAST_RANKS.get(kind, 2)])
    ranks = draw.sample(range(layout[0]), layout[0])
    active = layout[0] - layout[1]
    # One is left; at the end one that has the state, since spares may have been sent home.
    left = next(rank for rank in ranks if rank < active) if kind == _AT_THE_END else ranks[0]
    ranks.remove(left)
    found = KINDS[kind](draw, ranks, counts[layout])
    shots = []
    if kind in ("from outside", "pairs from outside"):
        shots = [(rank, share * seconds[layout]) for rank, share in found]
        found = []
    return Trial(*layout, kills=tuple(found), shots=tuple(shots)), kind


def _moment(draw, rank, counts, phase="any"):
    return Kill(rank, phase, draw.randint(1, counts[phase]))


def _pair(draw, ranks, counts, phase="any"):
    """Kill two at the same moment, one of which keeps the copies of the other one, mostly."""
    first = ranks[0]
    others = [rank for rank in ranks if abs(rank - first) == 1] or ranks[1:]
    count = draw.randint(1, counts[phase])
    return [Kill(rank, phase, count) for rank in (first, draw.choice(others))]


def _anywhere(draw, ranks, counts):
    return [_moment(draw, rank, counts) for rank in ranks[: draw.randint(1, 2)]]


def _within(phase):
    def kills(draw, ranks, counts):
        if len(ranks) > 1 and draw.random() < 0.4:
            return _pair(draw, ranks, counts, phase)
        return [_moment(draw, rank, counts, phase) for rank in ranks[: draw.randint(1, 2)]]

    return kills


def _in_recovery(draw, ranks, counts):
    first, *others = ranks
    later = [
        Kill(rank, "recover", draw.randint(1, _RECOVERY_EVENTS))
        for rank in others[: draw.randint(1, 3)]
    ]
    return [_moment(draw, first, counts), *later]


def _in_making(draw, ranks, counts):
    kills = [
        Kill(rank, "make", draw.randint(1, _MAKING_EVENTS)) for rank in ranks[: draw.randint(1, 2)]
    ]
    return [*kills, *(_moment(draw, rank, counts) for rank in ranks[2:3])]


def _in_restoring(draw, ranks, counts):
    later = [
        Kill(rank, draw.choice(["restore", "recover"]), draw.randint(1, _RECOVERY_EVENTS))
        for rank in ranks
    ]
    pair = _pair(draw, ranks, counts)
    return [*pair, *(kill for kill in later if kill.rank not in {one.rank for one in pair})][:4]


def _one_by_one(draw, ranks, counts):
    return [_moment(draw, rank, counts) for rank in ranks]


def _with_delay(draw, ranks, counts):
    return [
        Kill(rank, "any", draw.randint(1, counts["any"]), draw.uniform(0, 5))
        for rank in ranks[: draw.randint(1, 3)]
    ]


def _from_outside(draw, ranks, counts):
    return [(rank, draw.random()) for rank in ranks[: draw.randint(1, len(ranks))]]


def _pairs_from_outside(draw, ranks, counts):
    shots = []
    while ranks:
        share = draw.random()
        shots += [(rank, share) for rank in ranks[:2]]
        ranks = ranks[2:]
    return shots[: draw.choice([2, 4])]


#: What draws the kills of each kind of trial, given `random.Random`, whom it may kill, and how many
#: events there are.
KINDS = {
    "anywhere": _anywhere,
    "in a pair": _pair,
    "in commits": _within("commit"),
    "in recoveries": _in_recovery,
    "in saves": _within("save"),
    "in making": _in_making,
    "at the begin": _within("begin"),
    "in shared memory": _within("window"),
    "from outside": _from_outside,
    "one by one": _one_by_one,
    _AT_THE_END: _within("end"),
    "in restoring": _in_restoring,
    "within calls": _with_delay,
    "pairs from outside": _pairs_from_outside,
}

# Of all ranks, the waiting ones, too.
_LEAST_RANKS = {
    "in a pair": 3,
    "in shared memory": 4,  # two that host replicas share none, and of three one may wait
    "in recoveries": 3,
    "in restoring": 4,
    "one by one": 3,
    "pairs from outside": 3,
}
