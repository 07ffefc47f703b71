"""Who runs: the replicas of a rank, what they call, and the variables that they share."""
