"""The strategy: its face, its start and its end."""
