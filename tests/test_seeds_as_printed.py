"""The examples of the seed documents as they are printed, on one rank with two replicas.

`mr` stands for tf.distribute, numpy for tf, and leaves print as numpy prints them. What a page
says in words is in tests/ranks/test_seed_*.py.
"""

import contextlib
import doctest
import io
import textwrap

import numpy as np
import pytest

import mpi_replica as mr

REPLICA_CONTEXT = {
    "ReplicaContext": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> def func():
        ...     replica_context = mr.get_replica_context()
        ...     return replica_context.replica_id_in_sync_group
        >>> strategy.run(func)
        PerReplica:{
          0: 0,
          1: 1
        }
        """,
    "all_gather, a single tensor": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> def gather_value():
        ...     ctx = mr.get_replica_context()
        ...     local_value = np.array([1, 2, 3])
        ...     return ctx.all_gather(local_value, axis=0)
        >>> result = strategy.run(gather_value)
        >>> result
        PerReplica:{
          0: array([1, 2, 3, 1, 2, 3]),
          1: array([1, 2, 3, 1, 2, 3])
        }
        >>> strategy.experimental_local_results(result)
        (array([1, 2, 3, 1, 2, 3]), array([1, 2, 3, 1, 2, 3]))
        """,
    "all_gather, the dtype of the page": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> def gather_value():
        ...     ctx = mr.get_replica_context()
        ...     local_value = np.array([1, 2, 3], dtype=np.int32)
        ...     return ctx.all_gather(local_value, axis=0)
        >>> strategy.run(gather_value)
        PerReplica:{
          0: array([1, 2, 3, 1, 2, 3], dtype=int32),
          1: array([1, 2, 3, 1, 2, 3], dtype=int32)
        }
        """,
    # One page prints a tuple of one list for the local results, of PerReplica. That is how older
    # versions did it; the other page and tf today have a list for each replica.
    "all_gather, a list": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> def gather_nest():
        ...     ctx = mr.get_replica_context()
        ...     value_1 = np.array([1, 2, 3])
        ...     value_2 = np.array([[1, 2], [3, 4]])
        ...     # all_gather a nest of `mr.DistributedValues`
        ...     return ctx.all_gather([value_1, value_2], axis=0)
        >>> result = strategy.run(gather_nest)
        >>> result
        [PerReplica:{
          0: array([1, 2, 3, 1, 2, 3]),
          1: array([1, 2, 3, 1, 2, 3])
        }, PerReplica:{
          0: array([[1, 2],
               [3, 4],
               [1, 2],
               [3, 4]]),
          1: array([[1, 2],
               [3, 4],
               [1, 2],
               [3, 4]])
        }]
        >>> strategy.experimental_local_results(result)
        ([array([1, 2, 3, 1, 2, 3]), array([[1, 2],
               [3, 4],
               [1, 2],
               [3, 4]])], [array([1, 2, 3, 1, 2, 3]), array([[1, 2],
               [3, 4],
               [1, 2],
               [3, 4]])])
        """,
    # The page prints 'a': [1, 2], a misprint.
    "all_gather, different shapes": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> values = [
        ...     {'a': np.array([0]), 'b': np.array([[0, 1]])},
        ...     {'a': np.array([1]), 'b': np.array([[2, 3], [4, 5]])},
        ... ]
        >>> def gather_dict():
        ...     ctx = mr.get_replica_context()
        ...     return ctx.all_gather(values[ctx.replica_id_in_sync_group], axis=0)
        >>> first, second = strategy.experimental_local_results(strategy.run(gather_dict))
        >>> first
        {'a': array([0, 1]), 'b': array([[0, 1],
               [2, 3],
               [4, 5]])}
        >>> repr(second) == repr(first)
        True
        """,
    "all_gather, different shapes, with the lists of the page": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> values = [{'a': [0], 'b': [[0, 1]]}, {'a': [1], 'b': [[2, 3], [4, 5]]}]
        >>> def gather_dict():
        ...     ctx = mr.get_replica_context()
        ...     return ctx.all_gather(values[ctx.replica_id_in_sync_group], axis=0)
        >>> try:
        ...     strategy.run(gather_dict)
        ... except ValueError as error:
        ...     print(str(error).replace('; ', ';\\n'))
        all_gather got a scalar for value['a'][0]: 0. Only arrays can be concatenated;
        write np.array([0]).
        """,
    "all_reduce": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> def step_fn():
        ...     ctx = mr.get_replica_context()
        ...     value = np.float32(1.)
        ...     return ctx.all_reduce(mr.ReduceOp.SUM, value)
        >>> strategy.experimental_local_results(strategy.run(step_fn))
        (np.float32(2.0), np.float32(2.0))
        """,
    "all_reduce, a list": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> def step_fn():
        ...     ctx = mr.get_replica_context()
        ...     value1 = np.float32(1.)
        ...     value2 = np.float32(2.)
        ...     return ctx.all_reduce(mr.ReduceOp.SUM, [value1, value2])
        >>> strategy.run(step_fn)
        [PerReplica:{
          0: np.float32(2.0),
          1: np.float32(2.0)
        }, PerReplica:{
          0: np.float32(4.0),
          1: np.float32(4.0)
        }]
        >>> strategy.experimental_local_results(strategy.run(step_fn))
        ([np.float32(2.0), np.float32(4.0)], [np.float32(2.0), np.float32(4.0)])
        """,
    "all_reduce, example with two replicas": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> values = [{'a': 1, 'b': [40, 1]}, {'a': 3, 'b': [2, 98]}]
        >>> def step_fn(reduce_op):
        ...     ctx = mr.get_replica_context()
        ...     return ctx.all_reduce(reduce_op, values[ctx.replica_id_in_sync_group])
        >>> strategy.experimental_local_results(strategy.run(step_fn, (mr.ReduceOp.SUM,)))[1]
        {'a': np.int64(4), 'b': [np.int64(42), np.int64(99)]}
        >>> strategy.experimental_local_results(strategy.run(step_fn, (mr.ReduceOp.MEAN,)))[1]
        {'a': np.float64(2.0), 'b': [np.float64(21.0), np.float64(49.5)]}
        """,
    "all_reduce, example with two replicas and arrays": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> values = [{'a': 1, 'b': np.array([40, 1])}, {'a': 3, 'b': np.array([2, 98])}]
        >>> def step_fn(reduce_op):
        ...     ctx = mr.get_replica_context()
        ...     return ctx.all_reduce(reduce_op, values[ctx.replica_id_in_sync_group])
        >>> strategy.experimental_local_results(strategy.run(step_fn, (mr.ReduceOp.SUM,)))[0]
        {'a': np.int64(4), 'b': array([42, 99])}
        >>> strategy.experimental_local_results(strategy.run(step_fn, (mr.ReduceOp.MEAN,)))[0]
        {'a': np.float64(2.0), 'b': array([21. , 49.5])}
        """,
    "merge_call, inside a distributed scope": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> def merge_fn(strategy, value, name):
        ...     print(value)
        ...     print(name)
        ...     return strategy.reduce('SUM', value, axis=None), name
        >>> def step_fn():
        ...     ctx = mr.get_replica_context()
        ...     i = ctx.replica_id_in_sync_group
        ...     return ctx.merge_call(merge_fn, args=(3 + i,), kwargs={'name': f'replica {i}'})
        >>> strategy.run(step_fn)
        PerReplica:{
          0: 3,
          1: 4
        }
        PerReplica:{
          0: replica 0,
          1: replica 1
        }
        (PerReplica:{
          0: np.int64(7),
          1: np.int64(7)
        }, PerReplica:{
          0: 'replica 0',
          1: 'replica 1'
        })
        """,
    "merge_call, not inside a distributed scope": """
        >>> def merge_fn(strategy, x, y):
        ...     return strategy is mr.get_strategy(), mr.in_cross_replica_context(), x, y
        >>> mr.get_replica_context().merge_call(merge_fn, args=(1,), kwargs={'y': 2})
        (True, True, 1, 2)
        """,
}

DISTRIBUTED_VALUES = {
    "1. created from a DistributedDataset": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> dataset = mr.data.Dataset.from_tensor_slices([5., 6., 7., 8.]).batch(2)
        >>> dataset_iterator = iter(strategy.experimental_distribute_dataset(dataset))
        >>> distributed_values = next(dataset_iterator)
        >>> distributed_values
        PerReplica:{
          0: array([5.]),
          1: array([6.])
        }
        """,
    "2. returned by run": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> def run():
        ...     ctx = mr.get_replica_context()
        ...     return ctx.replica_id_in_sync_group
        >>> distributed_values = strategy.run(run)
        >>> distributed_values
        PerReplica:{
          0: 0,
          1: 1
        }
        """,
    "3. as input into run": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> dataset = mr.data.Dataset.from_tensor_slices([5., 6., 7., 8.]).batch(2)
        >>> dataset_iterator = iter(strategy.experimental_distribute_dataset(dataset))
        >>> distributed_values = next(dataset_iterator)
        >>> def run(input):
        ...     return input + 1.0
        >>> updated_value = strategy.run(run, args=(distributed_values,))
        >>> updated_value
        PerReplica:{
          0: array([6.]),
          1: array([7.])
        }
        """,
    "4. as input into reduce": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> dataset = mr.data.Dataset.from_tensor_slices([5., 6., 7., 8.]).batch(2)
        >>> dataset_iterator = iter(strategy.experimental_distribute_dataset(dataset))
        >>> distributed_values = next(dataset_iterator)
        >>> reduced_value = strategy.reduce(mr.ReduceOp.SUM,
        ...                                 distributed_values,
        ...                                 axis = 0)
        >>> reduced_value
        np.float64(11.0)
        """,
    "5. how to inspect per-replica values locally": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> dataset = mr.data.Dataset.from_tensor_slices([5., 6., 7., 8.]).batch(2)
        >>> dataset_iterator = iter(strategy.experimental_distribute_dataset(dataset))
        >>> distributed_values = next(dataset_iterator)
        >>> per_replica_values = strategy.experimental_local_results(
        ...     distributed_values)
        >>> per_replica_values
        (array([5.]), array([6.]))
        """,
    "the dtype of the page": """
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> rows = np.array([5., 6., 7., 8.], dtype=np.float32)
        >>> dataset = mr.data.Dataset.from_tensor_slices(rows).batch(2)
        >>> dataset_iterator = iter(strategy.experimental_distribute_dataset(dataset))
        >>> distributed_values = next(dataset_iterator)
        >>> distributed_values
        PerReplica:{
          0: array([5.], dtype=float32),
          1: array([6.], dtype=float32)
        }
        >>> strategy.reduce(mr.ReduceOp.SUM, distributed_values, axis=0)
        np.float32(11.0)
        """,
}


def assert_as_printed(transcript):
    """Run a transcript of the interpreter; it must print what stands there."""
    if differences := differences_from(transcript):
        pytest.fail(differences)


def differences_from(transcript):
    names = {"mr": mr, "np": np}
    text = textwrap.dedent(transcript)
    test = doctest.DocTestParser().get_doctest(text, names, "example", "seeds", 0)
    assert test.examples
    found = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(test, out=found.write)
    return found.getvalue()


@pytest.mark.parametrize("heading", REPLICA_CONTEXT)
def test_replica_context(heading):
    assert_as_printed(REPLICA_CONTEXT[heading])


@pytest.mark.parametrize("heading", DISTRIBUTED_VALUES)
def test_distributed_values(heading):
    assert_as_printed(DISTRIBUTED_VALUES[heading])


def test_print_shows_components_as_print_does_and_repr_as_repr_does():
    value = mr.MPIStrategy(num_replicas=2).run(lambda: np.float32(1.5))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        print(value)  # noqa: T201
    assert shown.getvalue() == "PerReplica:{\n  0: 1.5,\n  1: 1.5\n}\n"
    assert repr(value) == "PerReplica:{\n  0: np.float32(1.5),\n  1: np.float32(1.5)\n}"


def test_the_comparison_sees_a_difference_of_one_character():
    transcript = """
        >>> mr.PerReplica([5.0, 6.0])
        PerReplica:{
          0: 5.0,
          1: 6
        }
        """
    assert "1: 6.0" in differences_from(transcript)
