"""What collectives take on networks that are not here: latency and bandwidth, after LogGP.

A message of b bytes takes L + 2 o + b G (Alexandrov, Ionescu, Schauser and Scheiman, "LogGP",
SPAA 1995). The first two are the latency that benchmarks tell, half of the time there and back;
G is one over the bandwidth. What an operation takes of both with p ranks is that of the algorithms
that MPI libraries use (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 2005), the fastest of them. Every rank is on a host of its own, ranks
begin at once, and additions take no time: it is the same work with and without this runtime.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """What was measured between two hosts.

    Attributes
    ----------
    name : str
    latency_seconds : float
        Of a message of one byte.
    bandwidth : float
        Bytes in a second, of large messages.
    source : str
        Who measured it.
    """

    name: str
    latency_seconds: float
    bandwidth: float
    source: str


NETWORKS = (
    Network(
        "InfiniBand HDR",
        1.2e-6,
        24e9,
        "Azure HBv3, docs.azure.cn/en-us/virtual-machines/hbv3-performance",
    ),
    Network(
        "Cray Aries",
        1.3e-6,
        9.6e9,
        "Piz Daint, osu_latency and osu_bw, github.com/reframe-hpc/reframe/pull/1232",
    ),
    Network(
        "AWS EFA",
        9.9e-6,
        5.8e9,
        "hpc6a, osu_latency, github.com/aws/aws-parallelcluster/issues/6449",
    ),
    Network(
        "Gigabit Ethernet",
        24.6e-6,
        0.116e9,
        "MPICH, OSU, gist.github.com/jfgrimm/3af692a5475bdd4ed836b5a18197a209",
    ),
)


# The ways of each operation: how many latencies, and how many bytes behind one another, for
# `ranks` ranks each of which gives `sent` bytes.


def _all_gather(sent, ranks):
    others = (ranks - 1) * sent
    yield _doublings(ranks), others  # recursive doubling, or Bruck's
    yield ranks - 1, others  # a ring


def _all_reduce(sent, ranks):
    yield _doublings(ranks), _doublings(ranks) * sent  # recursive doubling
    yield 2 * _doublings(ranks), 2 * sent * (ranks - 1) / ranks  # Rabenseifner's


def _all_to_all(sent, ranks):
    yield ranks - 1, sent * (ranks - 1) / ranks  # pairs


def _barrier(sent, ranks):
    yield _doublings(ranks), 0  # dissemination


def _doublings(ranks):
    return math.ceil(math.log2(ranks))


_WAYS = {
    "Allgather": _all_gather,
    "Allgatherv": _all_gather,
    "Allreduce": _all_reduce,
    "Alltoallv": _all_to_all,
    "Barrier": _barrier,
}


def seconds(network, operation, sent_bytes, ranks):
    """Return what an operation takes on a network.

    Parameters
    ----------
    network : Network
    operation : str
        The name of the MPI call.
    sent_bytes : float
        What a rank gives.
    ranks : int
        At least two.
    """
    return min(
        latencies * network.latency_seconds + moved / network.bandwidth
        for latencies, moved in _WAYS[operation](sent_bytes, ranks)
    )
