"""Whether a job would run here, and how well: ``python -m mpi_replica doctor``."""

from .checks import Check, text, to_json, would_work
from .examination import examine

__all__ = ["Check", "examine", "text", "to_json", "would_work"]
