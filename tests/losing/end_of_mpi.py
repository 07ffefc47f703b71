"""Each rank tells whether the end of Open MPI leaves out the fence of all, as the library has it.

Environment variables
---------------------
IMPORTS
    Modules, in the order in which they are imported.
"""

import ctypes
import importlib
import os
import sys

import dying

for name in os.environ["IMPORTS"].split():
    importlib.import_module(name)

strategy = sys.modules["mpi_replica"].MPIStrategy()
paths = sys.modules["mpi_replica.ranks.loaded_libraries"].loaded_libraries()
(library,) = (ctypes.CDLL(path) for path in paths if "/libmpi.so" in path)
dying.tell("TOLD", ctypes.c_bool.in_dll(library, "ompi_async_mpi_finalize").value)
