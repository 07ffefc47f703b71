"""Starting a program on several ranks: the library's own launcher, told what it needs."""

from .batch_system import read_allocation
from .elasticity import RANKS_LOST
from .job import Job, Options, plan
from .library import find_launcher, find_library
from .supervisor import start

__all__ = [
    "RANKS_LOST",
    "Job",
    "Options",
    "find_launcher",
    "find_library",
    "plan",
    "read_allocation",
    "start",
]
