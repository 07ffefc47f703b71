"""Input: `Dataset` is the source of batches, `DistributedDataset` what the replicas get."""

from ..core.doors import publish
from .dataset import Dataset
from .distributed_dataset import DistributedDataset
from .elements import ArraySpec
from .function_contexts import InputContext, ValueContext
from .iterator import DistributedIterator
from .plans.dataset_plan import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from .plans.function_calls import AUTOTUNE

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "ValueContext",
]

publish(__name__, ArraySpec, Dataset)
publish("mpi_replica", DistributedDataset, DistributedIterator, InputContext, ValueContext)
