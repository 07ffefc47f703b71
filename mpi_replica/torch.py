"""What is for torch alone. Importing it imports torch; ``mr.torch`` is imported when looked at."""

from .core.doors import publish
from .replicas.torch_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

publish(__name__, SyncBatchNorm, convert_sync_batchnorm)
