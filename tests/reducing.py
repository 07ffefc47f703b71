"""How tests on several ranks reduce contributions: those of contributions.py."""

import hypothesis.strategies as st

import mpi_replica as mr
from contributions import LAYOUTS, OF_OP, Leaf, build, check_everywhere, nests, reduced


def reduce_everywhere(strategy, op, make, options=None):
    """What each local replica gets; `make(replica_id)` is its contribution."""

    def step():
        ctx = mr.get_replica_context()
        return ctx.all_reduce(op, make(ctx.replica_id_in_sync_group), options)

    return strategy.experimental_local_results(strategy.run(step))


def contribution(nest, replica):
    """What a replica contributes to the reduction of a nest of `Leaf`."""
    return build(nest, lambda leaf: leaf.of(replica))


def reference(strategy, op, nest):
    """What the reduction of a nest of `Leaf` must give."""
    replicas = range(strategy.num_replicas_in_sync)
    return build(nest, lambda leaf: reduced(op, [leaf.of(i) for i in replicas]))


def check_reduce(strategy, op, nest, **options):
    """Check the result for a nest of `Leaf`."""
    results = reduce_everywhere(
        strategy, op, lambda i: contribution(nest, i), mr.CommunicationOptions(**options)
    )
    check_everywhere(results, reference(strategy, op, nest))


ANY_SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def calls(draw, kinds=(Leaf,), shapes=ANY_SHAPES):
    """Draw an op and a nest of leaves that it has a meaning for."""
    op = draw(st.sampled_from(sorted(OF_OP)))
    leaves = st.builds(
        lambda kind, *fields: kind(*fields),
        st.sampled_from(kinds),
        st.sampled_from(OF_OP[op]),
        shapes,
        st.integers(0, 99),
        st.integers(0, len(LAYOUTS) - 1),
    )
    return op, draw(nests(leaves) | st.tuples(leaves, nests(leaves), leaves))
