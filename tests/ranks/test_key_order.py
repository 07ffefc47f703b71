"""What is made of the dicts of replicas has its keys in one order, the same on all ranks.

A program that goes through them, and makes a collective call for each value, adds up what belongs
together.
"""

import random
from collections import OrderedDict, defaultdict

import hypothesis.strategies as st
import pytest
from hypothesis import given

import mpi_replica as mr
from everywhere import gathered, holds_everywhere


class OwnDict(dict):
    pass


MAKERS = (dict, OwnDict, lambda items: defaultdict(list, items), OrderedDict)
LEAVES = st.integers(0, 9).map(float)
NESTS = st.recursive(
    LEAVES,
    lambda nests: st.one_of(
        st.lists(nests, min_size=1, max_size=3),
        st.tuples(nests, nests),
        st.tuples(st.sampled_from(MAKERS), st.dictionaries(st.sampled_from("abcde"), nests)).map(
            lambda pair: pair[0](sorted(pair[1].items()))
        ),
    ),
    max_leaves=8,
)


def filled_anew(value, draw):
    """Return `value` with the keys of its dicts in other orders; that of an OrderedDict tells."""
    if isinstance(value, OrderedDict):
        return OrderedDict((key, filled_anew(item, draw)) for key, item in value.items())
    if isinstance(value, dict):
        items = [(key, filled_anew(item, draw)) for key, item in value.items()]
        draw.shuffle(items)
        return defaultdict(list, items) if type(value) is defaultdict else type(value)(items)
    if isinstance(value, (list, tuple)):
        return type(value)(filled_anew(item, draw) for item in value)
    return value


def orders(value):
    """Return the keys of all dicts in `value`, in the order in which they come."""
    if isinstance(value, dict):
        return [list(value), *(orders(value[key]) for key in sorted(value))]
    if isinstance(value, (list, tuple)):
        return [orders(item) for item in value]
    return []


def in_order(value):
    """Return what `orders` gives where all keys are sorted but those of OrderedDicts."""
    return orders(filled_anew(value, Sorting()))


class Sorting:
    """Stands for a generator that leaves sorted items as they are."""

    def shuffle(self, items):
        items.sort(key=lambda item: item[0])


def of_replica(value, seeds):
    replica = mr.get_replica_context().replica_id_in_sync_group
    return filled_anew(value, random.Random(seeds[replica % len(seeds)]))


def check(strategy, value, seeds, found):
    """Check the order of keys that the program has found."""
    number = strategy.num_replicas_in_sync
    given = [filled_anew(value, random.Random(seeds[i % len(seeds)])) for i in range(number)]
    each = [orders(one) for one in given]
    expected = each[0] if all(one == each[0] for one in each) else in_order(value)
    assert orders(found) == expected


@pytest.mark.parametrize("to_merge_fn", [False, True], ids=["run", "merge_call"])
@given(value=NESTS, seeds=st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_keys_come_as_all_replicas_have_filled_them_or_in_sorted_order(
    strategy, value, seeds, to_merge_fn
):
    seen = []

    def step():
        own = of_replica(value, seeds)
        if not to_merge_fn:
            return own
        return mr.get_replica_context().merge_call(lambda _, x: seen.append(x), (own,))

    result = strategy.run(step)
    holds_everywhere(lambda: check(strategy, value, seeds, seen[0] if to_merge_fn else result))


def test_a_loop_over_what_run_returned_adds_up_what_belongs_together(strategy):
    number = strategy.num_replicas_in_sync

    def step():
        if mr.get_replica_context().replica_id_in_sync_group % 2:
            return {"loss": 1.0, "steps": 10.0}
        return {"steps": 10.0, "loss": 1.0}

    logs = strategy.run(step)
    sums = {key: strategy.reduce("SUM", value, axis=None) for key, value in logs.items()}
    assert sums == {"loss": number, "steps": 10 * number}


def test_a_loop_over_an_argument_of_merge_fn_adds_up_what_belongs_together(strategy):
    number = strategy.num_replicas_in_sync

    def merge(strategy, logs, **more):
        named = {**logs, **more}
        return {key: strategy.reduce("SUM", value, axis=None) for key, value in named.items()}

    def step():
        ctx = mr.get_replica_context()
        logs, more = {"loss": 1.0, "steps": 10.0}, {"b": 2.0, "a": 3.0}
        if ctx.replica_id_in_sync_group % 2:
            logs, more = (dict(reversed(one.items())) for one in (logs, more))
        return ctx.merge_call(merge, (logs,), more)

    sums = {"loss": number, "steps": 10 * number, "a": 3 * number, "b": 2 * number}
    local = strategy.experimental_local_results(strategy.run(step))
    assert gathered([one for one in local if one != sums]) == [[]] * len(gathered(0))


def test_lists_of_dicts_in_several_orders_are_told_apart(strategy):
    """Written without brackets these two had one text."""

    def filled(is_turned):
        return {"b": 100.0, "a": 1.0} if is_turned else {"a": 1.0, "b": 100.0}

    def step():
        is_first = mr.get_replica_context().replica_id_in_sync_group == 0
        return [[filled(False), filled(is_first)], [filled(not is_first), filled(False)]]

    count = strategy.num_replicas_in_sync
    for row in strategy.run(step):
        for found in row:
            sums = {key: strategy.reduce("SUM", value, None) for key, value in found.items()}
            assert sums == {"a": count, "b": 100.0 * count}


def test_a_loop_over_what_a_value_fn_has_made_adds_up_what_belongs_together(strategy):
    def value_fn(context):
        filled = {"b": 100.0, "a": 1.0}
        return filled if context.replica_id_in_sync_group % 2 else dict(reversed(filled.items()))

    made = strategy.experimental_distribute_values_from_function(value_fn)
    sums = {key: strategy.reduce("SUM", value, None) for key, value in made.items()}
    count = strategy.num_replicas_in_sync
    assert sums == {"a": count, "b": 100.0 * count}
