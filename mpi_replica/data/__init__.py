"""Input: `Dataset` is the source of batches, `DistributedDataset` what the replicas get."""

from .contexts import InputContext, ValueContext
from .distributed import DistributedDataset
from .iterating import DistributedIterator
from .plans.calls import AUTOTUNE
from .source import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, ArraySpec, Dataset

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
