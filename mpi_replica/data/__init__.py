"""Input: `Dataset` is the source of batches, `DistributedDataset` what the replicas get."""

from .dataset import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, ArraySpec, Dataset
from .distributed_dataset import DistributedDataset
from .function_contexts import InputContext, ValueContext
from .iterator import DistributedIterator
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
