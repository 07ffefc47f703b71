"""The arguments of functions that make values and datasets: for whom they make them."""

from __future__ import annotations

import dataclasses

from ..core.argument_checks import integer


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """For which replica a value is made (`tf.distribute.experimental.ValueContext`).

    Parameters
    ----------
    replica_id_in_sync_group : int, default 0
        The id of the replica.
    num_replicas_in_sync : int, default 1
        How many replicas there are.

    Examples
    --------
    >>> print(mr.ValueContext(1, 4))
    mr.ValueContext(replica id 1, total replicas in sync: 4)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"mr.ValueContext(replica id {self.replica_id_in_sync_group}, total replicas in sync:"
            f" {self.num_replicas_in_sync})"
        )


@dataclasses.dataclass(frozen=True)
class InputContext:
    """For which input pipeline a dataset is made (`tf.distribute.InputContext`).

    Parameters
    ----------
    num_input_pipelines : int, default 1
        How many datasets are made: one for each rank, or for each replica.
    input_pipeline_id : int, default 0
        Which of them this is.
    num_replicas_in_sync : int, default 1
        How many replicas there are.

    Examples
    --------
    >>> context = mr.InputContext(num_input_pipelines=2, input_pipeline_id=1)
    >>> dataset = mr.data.Dataset.range(5)
    >>> mine = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    >>> [int(number) for number in mine]
    [1, 3]
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the part of a global batch that each replica gets.

        Parameters
        ----------
        global_batch_size : int
            Rows of all replicas together.

        Returns
        -------
        int
            Rows of each replica.

        Raises
        ------
        TypeError
            It is no integer.
        ValueError
            It can't be divided evenly.

        Notes
        -----
        Counterpart of ``tf.distribute.InputContext.get_per_replica_batch_size``.

        Examples
        --------
        >>> InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(12)
        3
        """
        global_batch_size = integer("global_batch_size", global_batch_size)
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"global_batch_size {global_batch_size!r} is not divisible by the"
                f" {self.num_replicas_in_sync} replicas. Choose a multiple of them."
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"mr.InputContext(input pipeline id {self.input_pipeline_id}, total:"
            f" {self.num_input_pipelines})"
        )
