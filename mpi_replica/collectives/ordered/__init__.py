"""Reductions in one order over the replicas: with the same bits in every layout."""
