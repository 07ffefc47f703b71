"""Whether a job would run here, and how well: ``python -m mpi_replica doctor``."""
