"""Reductions in one order over the replicas, whatever the layout."""
