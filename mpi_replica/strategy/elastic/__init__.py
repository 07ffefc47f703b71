"""Going on without a lost rank: its replicas move, and the work goes on at the last commit."""
