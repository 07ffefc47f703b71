"""Agreement, and the collectives that rest on it."""
