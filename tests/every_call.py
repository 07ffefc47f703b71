"""One call of every kind, and more of those that go several ways, in a `World`: see world.py.

Each performs the call, the replicas with different data, and compares the results with numpy.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import mpi_replica as mr
from contributions import Leaf, arrays_in, check, gathered, reduced
from mpi_replica.checkpoint.any_signal import AnySignal
from mpi_replica.checkpoint.comparison import Comparison
from mpi_replica.checkpoint.encoder import Encoder
from mpi_replica.checkpoint.restore import Restoring
from mpi_replica.checkpoint.save import Own, Saving
from mpi_replica.collectives.agreement.site import CallSite, function_identity
from mpi_replica.collectives.barrier import BarrierCall
from mpi_replica.collectives.broadcast import Broadcast
from mpi_replica.collectives.equal_everywhere import EqualEverywhere
from mpi_replica.collectives.gather import AllGather
from mpi_replica.collectives.merge import MergeCall
from mpi_replica.collectives.objects import ObjectGather
from mpi_replica.collectives.reduce import AllReduce
from mpi_replica.collectives.verify import Verification
from mpi_replica.core import nest
from mpi_replica.core.indexed_slices import IndexedSlices
from mpi_replica.data.next_step import NextStep
from mpi_replica.data.step_reader import Step
from mpi_replica.replicas.returned_values import RunEnd
from mpi_replica.replicas.storage import Storage, StorageWriting
from mpi_replica.strategy.elastic.buddies import buddy_of
from mpi_replica.strategy.elastic.commit import Committing
from mpi_replica.strategy.elastic.snapshot import ReplicaPart, SharedPart, Snapshot

SITE = CallSite(b"a place", ("train.py:1",), (1,))
OPTIONS = mr.CommunicationOptions()
MIB = 1 << 20


class Plain(Leaf):
    """A leaf whose results can take its place."""

    def of(self, replica):
        return self.values(self.dtype, self.shape_of(replica), self.number, replica)


@dataclasses.dataclass
class Thing:
    """An object that only pickle knows, and a checkpoint, and numpy."""

    number: int

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]

    def __array__(self, dtype=None, copy=None):
        return np.full(3, float(self.number))


class Things(Leaf):
    """A leaf that numpy takes for an array."""

    def of(self, replica):
        return self.dtype(replica)


def replicas_of(world):
    return range(world.layouts[0].num_replicas)


def check_apart(results):
    """Check that replicas can write into their results."""
    owned = [array for array in arrays_in(results) if array.size]
    assert not any(
        np.shares_memory(one, other) for at, one in enumerate(owned) for other in owned[:at]
    )


# Of floats, beside integers.
NOTHING = [Leaf(dtype, (0,)) for dtype in ("f4", "f8", "c8", "c16")]


def all_reduce(op, *leaves, out="", **options):
    """`leaves` are of each replica; `out`: nothing, "apart", or "in place"."""
    options = mr.CommunicationOptions(**options)

    def call(world):
        expected = [reduced(op, [leaf.of(i) for i in replicas_of(world)]) for leaf in leaves]

        def one(replica):
            value = [leaf.of(replica) for leaf in leaves]
            apart = [np.full_like(np.asarray(result), 3) for result in expected]
            into = {"": None, "apart": apart, "in place": value}[out]
            flat, structure = nest.flatten(value)
            return AllReduce(SITE, options, "all_reduce", op, [flat], structure, into)

        answers = world.perform(lambda layout: [one(i) for i in layout.local_replica_ids])
        results = [result for of_rank in answers for result in of_rank]
        for result in results:
            check(result, [np.asarray(one) for one in expected] if out else expected)
        check_apart(results)

    return call


def reduce(op, leaf):
    """From above: a rank has the rows of all of its replicas."""

    def call(world):
        structure = nest.flatten(None)[1]
        (found, *others) = world.perform(
            lambda layout: AllReduce(
                SITE,
                OPTIONS,
                "reduce",
                op,
                [[leaf.of(i)] for i in layout.local_replica_ids],
                structure,
                finish=lambda results: results[0],
            )
        )
        for one in (found, *others):
            check(one[0], reduced(op, [leaf.of(i) for i in replicas_of(world)]))

    return call


def assign_sum(shape):
    """A variable that sums what the replicas assign."""

    def call(world):
        leaf, structure = Leaf("f8", shape), nest.flatten(None)[1]
        storages = [Storage("v", {None: np.zeros(shape)}, quietly) for _ in world.ranks]

        def one(layout, replica):
            writing = StorageWriting(storages[layout.rank], [None], "assign")
            given = [[leaf.of(replica)]]
            return AllReduce(
                SITE, OPTIONS, "assign", "SUM", given, structure, detail="v", writing=writing
            )

        world.perform(lambda layout: [one(layout, i) for i in layout.local_replica_ids])
        for storage in storages:
            expected = reduced("SUM", [leaf.of(i) for i in replicas_of(world)])
            np.testing.assert_array_equal(storage.any_array, expected)

    return call


def quietly(function, *args):
    return function(*args)


def all_gather(axis, *leaves):
    def call(world):
        def one(replica):
            flat, structure = nest.flatten([leaf.of(replica) for leaf in leaves])
            return AllGather(SITE, OPTIONS, "all_gather", axis, [flat], structure)

        answers = world.perform(lambda layout: [one(i) for i in layout.local_replica_ids])
        results = [result for of_rank in answers for result in of_rank]
        for result in results:
            expected = [gathered_things(leaf, world, axis) for leaf in leaves]
            check(result, expected)
        check_apart(results)

    return call


def gathered_things(leaf, world, axis):
    return gathered([np.asarray(leaf.of(i)) for i in replicas_of(world)], axis)


def gather(leaf):
    def call(world):
        def one(layout):
            rows = [[leaf.of(i)] for i in layout.local_replica_ids]
            return AllGather(SITE, OPTIONS, "gather", 0, rows, nest.flatten(None)[1])

        for answers in world.perform(one):
            check(answers[0], gathered([leaf.of(i) for i in replicas_of(world)], 0))

    return call


def broadcast(value_of):
    def call(world):
        answers = world.perform(
            lambda layout: Broadcast(
                SITE, OPTIONS, "broadcast_to", "", value_of(layout.rank), compared=False
            )
        )
        for answer in answers:
            np.testing.assert_equal(answer, [value_of(0)])

    return call


def assign_first(how, old, value_of):
    """A variable that takes the value of the first replica."""

    def call(world):
        storages = [Storage("v", {None: old.copy()}, quietly) for _ in world.ranks]

        def one(layout, replica):
            value = storages[layout.rank].fitting("v", how, value_of(replica))
            return Broadcast(
                SITE,
                OPTIONS,
                "assign",
                "v",
                value,
                compared=False,
                writing=StorageWriting(storages[layout.rank], [None], how),
            )

        world.perform(lambda layout: [one(layout, i) for i in layout.local_replica_ids])
        alone = Storage("v", {None: old.copy()}, quietly)
        alone.write(None, how, alone.fitting("v", how, value_of(0)))
        for storage in storages:
            np.testing.assert_array_equal(storage.any_array, alone.any_array)

    return call


def equal_everywhere(world, value_of=lambda replica: 3.0, held_bytes=8, check=True):
    """An assignment of one value everywhere; returns the variable of each rank."""
    storages = [Storage("v", {None: np.zeros(2)}, quietly) for _ in world.ranks]

    def one(layout, replica):
        write = functools.partial(storages[layout.rank].write_for_now, None, "assign")
        value = np.full(2, value_of(replica))
        return EqualEverywhere(SITE, OPTIONS, "assign", "v", value, "Don't.", write, held_bytes)

    world.perform(lambda layout: [one(layout, i) for i in layout.local_replica_ids])
    for storage in storages if check else ():
        np.testing.assert_array_equal(storage.any_array, np.full(2, value_of(0)))
    return storages


class Asked(Exception):
    """A function of the program that waits for another call."""

    def __init__(self, call):
        super().__init__()
        self.call = call


class Asking:
    """What a `MergeCall` knows of its engine: that gives the column that was looked at."""

    def __init__(self, layout):
        self.layout = layout
        self.column = None

    def check_thread(self, kind):
        pass

    def cross_replica(self, call):
        if self.column is None:
            raise Asked(call)
        return self.column


def merge_call(value_of, looks=False):
    def call(world):
        engines = [Asking(layout) for layout in world.layouts]

        def one(layout, i):
            args, engine = (value_of(i), i), engines[layout.rank]
            return MergeCall(SITE, OPTIONS, print, args, {}, lambda _: None, i, engine)

        answers = world.perform(lambda layout: [one(layout, i) for i in layout.local_replica_ids])
        given = [args for ((_, args, _),) in answers]
        if looks and len(world.ranks) > 1:

            def look(layout):
                try:
                    given[layout.rank][0].values  # noqa: B018 - a collective call
                except Asked as asked:
                    return asked.call

            for engine, (column,) in zip(engines, world.perform(look), strict=True):
                engine.column = column
        for value, number in given:
            np.testing.assert_equal(list(value.values), [value_of(i) for i in replicas_of(world)])
            assert number.values == tuple(replicas_of(world))

    return call


def gather_objects(value_of):
    def call(world):
        def one(layout):
            ids, count = layout.local_replica_ids, layout.num_replicas
            components = mr.PerReplica([value_of(i) for i in ids], ids, count)
            return ObjectGather(SITE, OPTIONS, [components], layout)

        for answers in world.perform(one):
            assert answers == [tuple([value_of(i)] for i in replicas_of(world))]

    return call


def verify(value_of):
    """Compare what each replica has, and what each rank has."""

    def call(world):
        def one(layout):
            ids, count = layout.local_replica_ids, layout.num_replicas
            components = mr.PerReplica([value_of(i) for i in ids], ids, count)
            value = {"a": components, "b": value_of(ids[0]), "c": "the same"}
            return Verification(SITE, OPTIONS, value, "", lambda leaf: None, layout)

        assert world.perform(one) == [[None] for _ in world.ranks]

    return call


def barrier(world):
    assert world.perform(lambda _: BarrierCall(SITE, OPTIONS, "barrier")) == [[None]] * len(
        world.ranks
    )


def next_step(
    has_input, taken=lambda rank: 2, text=lambda rank: "rows", ends=lambda rank: 0, nothing=None
):
    """Each rank has its batches, or none if `has_input` says so."""
    nothing = nothing or {"rows": np.empty(0)}

    def call(world):
        def one(layout):
            mine = [np.full(2, i) for i in layout.local_replica_ids]
            is_there = has_input(layout.rank)
            return NextStep(
                SITE,
                OPTIONS,
                Step(mine, 2 * len(mine), ends(layout.rank)) if is_there else None,
                dict.fromkeys(layout.local_replica_ids, nothing) if is_there else {},
                taken(layout.rank),
                text(layout.rank),
                [""] if is_there else [],
                is_global=False,
                needs_all=False,
            )

        answers = world.perform(one)
        some_have = any(map(has_input, world.ranks))
        for layout, [(values, forms)] in zip(world.layouts, answers, strict=True):
            ids = layout.local_replica_ids
            expected = [np.full(2, i) for i in ids]
            if not has_input(layout.rank):
                expected = [nothing] * len(ids)
            np.testing.assert_equal(values, expected if some_have else None)
            np.testing.assert_equal(forms, dict.fromkeys(ids, nothing) if some_have else {})

    return call


def saved_and_restored(world, make=Thing):
    """Save on all ranks, and restore what was saved."""

    def objects(number):
        return {"w": np.full(200_000, 0.5 * number), "step": number, "thing": make(number)}

    def generators(rank):
        return {"seed": rank, "shared": None, "replicas": {}}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "trained"

        def save(layout):
            encoder = Encoder(lambda value: value)
            state = {name: encoder.encode(value, name) for name, value in objects(7).items()}
            own = Own(generators(layout.rank), {}, {})
            return Saving(SITE, OPTIONS, path, state, encoder.arrays, own)

        world.perform(save)
        restored = {}

        def restore(layout):
            mine = objects(0)
            return Restoring(
                SITE,
                OPTIONS,
                path,
                lambda index, read: Comparison(index, mine, read, layout),
                lambda index, values: restored.update({layout.rank: (index.of_ranks, values)}),
                layout.rank == 0,
            )

        world.perform(restore)
        own = [generators(rank) for rank in world.ranks]
        for rank in world.ranks:
            np.testing.assert_equal(restored[rank], (own, objects(7)))


def stop(world):
    """A signal has come to the last rank."""
    last = world.ranks[-1]
    answers = world.perform(lambda layout: AnySignal(SITE, OPTIONS, 7, 15 * (layout.rank == last)))
    assert answers == [[(last, 15)] for _ in world.ranks]


def commit(own_of):
    """`own_of`: what belongs to a replica; on all of them something, or nothing."""

    def call(world):
        shared, has_state = SharedPart({}, {}, {}, {}, {}), not own_of(0).is_empty

        def one(layout):
            own = {i: own_of(i) for i in layout.local_replica_ids}
            return Committing(SITE, OPTIONS, ["x"], Snapshot(shared, own, {}))

        answers = world.perform(one)
        for layout, (guarded,) in zip(world.layouts, answers, strict=True):
            kept = []
            if has_state and layout.size > 1:
                hosts = world.groups[0].hosts
                buddies = [r for r in world.ranks if buddy_of(r, hosts) == layout.rank]
                kept = [i for rank in buddies for i in layout.replica_ids(rank)]
            np.testing.assert_equal(guarded.kept(), {i: own_of(i) for i in kept})
            assert guarded.empty == frozenset([] if has_state else replicas_of(world))

    return call


def end_of_run(world):
    def step():
        pass

    def one(layout, replica):
        strategy = SimpleNamespace(
            name_of_variable=lambda leaf: None, num_replicas_in_sync=layout.num_replicas
        )
        value = [1.0, None, replica]
        return RunEnd(SITE, OPTIONS, function_identity(step), strategy, value, replica)

    answers = world.perform(lambda layout: [one(layout, i) for i in layout.local_replica_ids])
    kinds = ("value", "none", "value")
    assert answers == [[kinds] * layout.counts[layout.rank] for layout in world.layouts]


ROWS = IndexedSlices(np.ones((2, 3)), np.array([0, 2]), (4, 3))
ORDERED = {"reproducible": True}
BY_WINDOW = {"implementation": "SHARED_MEMORY"}
MANY = [Leaf("f8", (k % 5,), k) for k in range(9)]
CALLS = {
    "all_reduce in the header": all_reduce("SUM", Leaf("f8", (3,)), Leaf("i4", ())),
    "all_reduce in the header, MIN": all_reduce("MIN", Leaf("f4", (3,)), Leaf("bool", (2,))),
    "all_reduce in the header, out": all_reduce("MEAN", Plain("i8", (3,)), out="apart"),
    "all_reduce in the header, in place": all_reduce("PROD", Plain("f8", (3,)), out="in place"),
    "all_reduce in the header, narrow": all_reduce("SUM", Leaf("float16", (5,))),
    "all_reduce of a message": all_reduce("SUM", Leaf("bfloat16", (700,)), Leaf("float16", ())),
    "all_reduce of a pack": all_reduce("MEAN", Leaf("f4", (3000,)), Leaf("i8", (9,)), *MANY),
    "all_reduce of a pack, out": all_reduce("SUM", Plain("f4", (3000,)), out="apart"),
    "all_reduce in pieces": all_reduce(
        "SUM", Leaf("f8", (20_000,)), Leaf("c8", (9, 99)), bytes_per_pack=1 << 14
    ),
    "all_reduce of a stream": all_reduce("MEAN", Leaf("f4", (700, 900))),
    "all_reduce of a stream in large pages": all_reduce("SUM", Leaf("f4", (1 << 20,))),
    "all_reduce of a stream, out": all_reduce("SUM", Plain("f8", (150_000,)), out="apart"),
    "all_reduce of a stream, in place": all_reduce("SUM", Plain("f8", (150_000,)), out="in place"),
    "all_reduce of integers": all_reduce("MEAN", Leaf("i4", (150_000,))),
    "all_reduce of nothing": all_reduce("SUM", Leaf("f8", (0, 3)), Leaf("f8", (9000,))),
    "all_reduce of nothing of many dtypes": all_reduce(
        "SUM", *(Leaf(f"{kind}{size}", (0,)) for kind in "iu" for size in (1, 2, 4, 8)), *NOTHING
    ),
    "all_reduce, MAX": all_reduce("MAX", Leaf("f8", (40_000,)), Leaf("i2", (9000,))),
    "all_reduce, MIN in place": all_reduce("MIN", Plain("f4", (90_000,)), out="in place"),
    "all_reduce, narrow": all_reduce("MEAN", Leaf("float16", (40_000,)), Leaf("bfloat16", (9,))),
    "all_reduce, narrow in place": all_reduce("SUM", Plain("bfloat16", (700_000,)), out="in place"),
    "ordered, in the header": all_reduce("SUM", Leaf("f8", (1,)), **ORDERED),
    "ordered, in a message": all_reduce("MEAN", Leaf("f8", (700,)), Leaf("i8", (3,)), **ORDERED),
    "ordered, by a window": all_reduce(
        "SUM", Leaf("f8", (300_000,)), Leaf("f4", (9000,)), Leaf("float16", (80_000,)), **BY_WINDOW
    ),
    "ordered, by a window, in place": all_reduce(
        "SUM", Plain("f8", (150_000,)), out="in place", **BY_WINDOW
    ),
    "ordered": all_reduce(
        "MEAN", Leaf("f8", (300_000,)), Leaf("f4", (9000,)), Leaf("float16", (80_000,)), **ORDERED
    ),
    "ordered, in one piece": all_reduce("SUM", Leaf("f4", (300, 300)), **ORDERED),
    "ordered, in place": all_reduce("SUM", Plain("f8", (150_000,)), out="in place", **ORDERED),
    "ordered, by Alltoallv": all_reduce(
        "PROD", Leaf("f8", (300_000,)), Leaf("float16", (9000,)), implementation="ALLTOALL"
    ),
    "ordered, by Alltoallv, out": all_reduce(
        "MEAN", Plain("f4", (150_000,)), out="apart", implementation="ALLTOALL"
    ),
    "reduce": reduce("SUM", Leaf("f8", (9000,))),
    "assign of a sum": assign_sum((2,)),
    "assign of a large sum": assign_sum((9000,)),
    "all_gather in the header": all_gather(0, Leaf("f8", (2,)), Leaf("U", (1,))),
    "all_gather of uneven leaves": all_gather(
        0, Leaf("f8", (0, 3), axis=0, extents=(400, 7, 0)), Leaf("S", (9,)), Leaf("f4", (700, 2))
    ),
    "all_gather of large leaves": all_gather(0, Leaf("f8", (90_000,)), Leaf("i2", (400_000,))),
    "all_gather along another axis": all_gather(
        1,
        Leaf("f8", (4, 0), axis=1, extents=(50_000, 3)),
        Leaf("f4", (900, 70)),
        Leaf("i8", (2, 9)),
    ),
    "all_gather of many leaves": all_gather(0, *[Leaf("i4", (9,), k) for k in range(30)]),
    "gather": gather(Leaf("f8", (9000, 3))),
    "broadcast": broadcast(float),
    "broadcast of more": broadcast(lambda rank: bytes([65 + rank]) * 5000),
    "broadcast of much": broadcast(lambda rank: np.full(400_000, rank)),
    "broadcast of an object": broadcast(lambda rank: [Thing(rank), Thing(9)]),
    "broadcast of large arrays beside an object": broadcast(
        lambda rank: [np.full((90, 100), rank), Thing(rank), np.full(20_000, 0.5, order="F")]
    ),
    "assign of the first": assign_first("assign_add", np.ones(3), lambda i: np.full(3, 1.0 + i)),
    "assign of rows": assign_first("scatter_add", np.ones((4, 3)), lambda _: ROWS),
    "assign of the same": equal_everywhere,
    "assign of the same, and much": functools.partial(equal_everywhere, held_bytes=1 << 25),
    "merge_call": merge_call(float),
    "merge_call of an object": merge_call(Thing),
    "merge_call of more": merge_call(lambda i: np.full(2000, i)),
    "merge_call of much": merge_call(lambda i: bytes([i]) * (MIB + 9)),
    "merge_call that looks": merge_call(lambda i: np.full(90_000 + i, i), looks=True),
    "gather_objects": gather_objects(Thing),
    "gather_objects of much": gather_objects(lambda i: bytes([i]) * (MIB + 9)),
    "verify": verify(lambda i: np.ones((400, 30)).T),
    "barrier": barrier,
    "next": next_step(lambda rank: True),
    "next, where a rank has ended": next_step(lambda rank: rank == 0),
    "next, at the end": next_step(lambda rank: False),
    "save and restore": saved_and_restored,
    "exit_if_signalled": stop,
    "commit": commit(lambda i: ReplicaPart({"x": i}, {"a": np.full(5000, i)})),
    "commit of nothing": commit(lambda i: ReplicaPart({}, {})),
    "end of a run": end_of_run,
}
