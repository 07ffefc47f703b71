"""The transport of one rank keeps the contract."""

from mpi_replica.ranks.single import SingleTransport
from transport_contract import TransportContract


class TestSingle(TransportContract):
    def make(self):
        return SingleTransport()
