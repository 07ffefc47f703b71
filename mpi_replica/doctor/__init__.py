"""Whether a job would run here, and how well: ``python -m mpi_replica doctor``."""

from .check import Check, would_work
from .examination import examine
from .report import text, to_json

__all__ = ["Check", "examine", "text", "to_json", "would_work"]
