"""Arrays of other libraries as leaves: taken as they are, and given back as the same kind."""

import functools

import numpy as np
import pytest

import mpi_replica as mr
from array_kinds import LIBRARIES, Library
from everywhere import check_works, needs_two_replicas, raises_everywhere
from mpi_replica.core.array_libraries import to_numpy
from mpi_replica.errors import StructureMismatchError
from on_a_device import in_memory_of_the_host


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def results(strategy, fn):
    return strategy.experimental_local_results(strategy.run(fn))


@pytest.fixture(params=LIBRARIES)
def library(request):
    return Library(request.param)


def test_parameters_and_modules_that_read_alike_are_no_keys_on_any_layout(strategy):
    """Gradients by parameter, say: which is which can't be told on another rank."""
    torch = pytest.importorskip("torch")
    parameter, module = torch.nn.Parameter(torch.ones(2)), torch.nn.ReLU()
    for keys in ([parameter], [module, torch.nn.ReLU()]):

        def step(keys=keys):
            return mr.get_replica_context().all_reduce("SUM", dict.fromkeys(keys, 1.0))

        raises_everywhere(StructureMismatchError, lambda step=step: strategy.run(step))
        check_works(strategy)
    total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", {module: 1.0}))
    for found in strategy.experimental_local_results(total):
        assert found == {module: strategy.num_replicas_in_sync}


@pytest.mark.parametrize("wrap", [lambda x: x, mr.Mirrored], ids=["plain", "mirrored"])
@pytest.mark.parametrize("is_narrow", [False, True], ids=["float32", "bfloat16"])
def test_a_value_of_all_replicas_is_reduced_along_an_axis_as_one_of_each(
    strategy, library, wrap, is_narrow
):
    rows = library.array([1.0, 2.0])
    rows = library.as_bfloat16(rows) if is_narrow else rows
    if library.name == "torch":
        rows.requires_grad_()
    mean = strategy.reduce("MEAN", wrap(rows), axis=0)
    own = strategy.reduce("MEAN", strategy.run(lambda: rows), axis=0)
    assert type(mean) is type(own)
    assert (mean.dtype, float(mean)) == (own.dtype, 1.5)


@pytest.mark.parametrize("size", [3, 100_000])
def test_all_reduce_takes_and_gives_back_arrays_of_the_library(strategy, library, size):
    count = strategy.num_replicas_in_sync
    base = np.arange(size, dtype="f4") % 100

    def step():
        mine = library.array(base + replica_id())
        context = mr.get_replica_context()
        found = context.all_reduce("SUM", {"a": mine, "b": base, "c": mine[:0]})
        return found, context.all_reduce("MAX", mine[0]), context.all_reduce("MEAN", [mine])

    for found, largest, (mean,) in results(strategy, step):
        total = count * base + count * (count - 1) / 2
        library.holds(found["a"], total)
        library.holds(found["c"], [])
        library.holds(largest, count - 1)
        library.holds(mean, (total / count).astype("f4"))
        assert type(found["b"]) is np.ndarray


def test_each_replica_may_write_into_what_it_got(strategy, library):
    library.needs_writable_arrays()

    def step():
        context = mr.get_replica_context()
        found = context.all_reduce("SUM", library.array(np.ones(20_000)))
        rows = context.all_gather(library.array([[1.0]]), axis=0)
        for array in (found, rows):
            array += 1 + replica_id()
        return found, rows

    count = strategy.num_replicas_in_sync
    for i, (found, rows) in zip(strategy.local_replica_ids, results(strategy, step), strict=True):
        library.holds(found, np.full(20_000, count + 1 + i))
        library.holds(rows, np.full((count, 1), 2 + i))


def test_all_gather_of_uneven_rows_gives_back_arrays_of_the_library(strategy, library):
    def step():
        i = replica_id()
        return mr.get_replica_context().all_gather(library.array(np.full((i, 2), i)), axis=0)

    expected = np.concatenate([np.full((i, 2), i) for i in range(strategy.num_replicas_in_sync)])
    for found in results(strategy, step):
        library.holds(found, expected)


def test_reduce_and_gather_in_cross_replica_context_give_back_arrays_of_the_library(
    strategy, library
):
    count = strategy.num_replicas_in_sync
    values = strategy.run(lambda: library.array([[replica_id(), 1.0]]))
    library.holds(strategy.reduce("SUM", values, axis=None), [[count * (count - 1) / 2, count]])
    library.holds(strategy.reduce("MEAN", values, axis=0), [(count - 1) / 2, 1.0])
    library.holds(strategy.gather(values, axis=0), [[i, 1.0] for i in range(count)])
    largest = strategy.extended.reduce_to("MAX", values, 0)
    if strategy.rank == 0:
        library.holds(largest, [[count - 1, 1.0]])


def test_bfloat16_stays_bfloat16(strategy, library):
    one = library.as_bfloat16(library.array([1.0]))

    def step():
        mine = library.as_bfloat16(library.array([1.0, replica_id()]))
        return mr.get_replica_context().all_reduce("SUM", mine)

    count = strategy.num_replicas_in_sync
    for found in results(strategy, step):
        assert found.dtype == one.dtype
        np.testing.assert_array_equal(library.as_float32(found), [count, count * (count - 1) / 2])


def test_means_over_the_global_batch_are_arrays_of_the_library(strategy, library):
    def step():
        sums = [library.array([6.0, replica_id()]), library.array([3], np.int32)]
        return mr.mean_over_global_batch(sums, 2)

    count = strategy.num_replicas_in_sync
    for floats, integers in results(strategy, step):
        library.holds(floats, np.array([3.0, (count - 1) / 4], "f4"))
        library.holds(integers, [1.5])


def test_replicas_may_mix_libraries_and_each_gets_its_own_kind(strategy, library):
    def step():
        mine = np.ones(5, "f4")
        if replica_id() % 2:
            mine = library.array(mine)
        return type(mine), mr.get_replica_context().all_reduce("SUM", mine)

    for kind, found in results(strategy, step):
        assert isinstance(found, kind)
        found = library.as_numpy(found) if kind is library.type else found
        np.testing.assert_array_equal(found, np.full(5, strategy.num_replicas_in_sync))


def test_a_variable_takes_values_of_the_library(strategy, library):
    with strategy.scope():
        v = mr.Variable(library.array([1.0, 2.0]), aggregation=mr.VariableAggregation.SUM)
    strategy.run(lambda: v.assign_add(library.array([1.0, 0.0])))
    np.testing.assert_array_equal(v.numpy(), [1.0 + strategy.num_replicas_in_sync, 2.0])


@in_memory_of_the_host
def test_arrays_in_the_memory_of_the_host_are_not_copied(library):
    array = library.array(np.arange(10_000))
    assert np.shares_memory(to_numpy(array), np.asarray(array))


def test_other_shapes_are_the_same_error_as_of_numpy(strategy, library):
    needs_two_replicas(strategy)

    def step():
        mr.get_replica_context().all_reduce("SUM", library.array(np.ones(1 + replica_id() % 2)))

    error = raises_everywhere(StructureMismatchError, lambda: strategy.run(step))
    assert "float32[1]" in str(error)
    assert "float32[2]" in str(error)
    check_works(strategy)


def test_torch_tensors_that_need_gradients_are_reduced_like_others(strategy):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def step():
        weight = torch.ones(3, requires_grad=True)
        (weight * 2 * (1 + replica_id())).sum().backward()
        context = mr.get_replica_context()
        return context.all_reduce("SUM", weight), context.all_reduce("SUM", weight.grad)

    count = strategy.num_replicas_in_sync
    for value, gradient in results(strategy, step):
        assert value.requires_grad
        np.testing.assert_array_equal(value.detach(), np.full(3, count))
        np.testing.assert_array_equal(gradient, np.full(3, count * (count + 1)))


def gradient_of_an_embedding(torch):
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3, 1])).sum().backward()
    return table.weight.grad


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch: some kinds are on trial, or going
def test_torch_tensors_that_have_no_numpy_array_say_what_to_do(strategy):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for wrong, words in (
        (lambda: torch.ones(2, 2).to_sparse(), "(tensor.to_dense())."),
        (lambda: gradient_of_an_embedding(torch), "or reduce its rows: mr.IndexedSlices(g."),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.ones(4).to(torch.float8_e5m2), "float8_e5m2"),
        (lambda: torch.ones(4).to(torch.complex32), "torch.complex64"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dequantize"),
        (lambda: torch.masked.masked_tensor(torch.ones(2), torch.arange(2) > 0), "the mask"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind()"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "unbind()"),
    ):

        def step(wrong=wrong):
            mr.get_replica_context().all_reduce("SUM", wrong())

        def gather(wrong=wrong):
            mr.get_replica_context().all_gather(wrong(), axis=0)

        for call in (step, gather):
            error = raises_everywhere(TypeError, lambda call=call: strategy.run(call))
            assert words in str(error)
    check_works(strategy)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 3)])
def test_the_average_loss_is_computed_by_torch_itself_and_can_be_differentiated(
    strategy, given, shape
):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    count = strategy.num_replicas_in_sync
    rows = count * shape[0]

    def step():
        factor = torch.tensor(1.0 + replica_id(), requires_grad=True)
        losses = factor * torch.ones(shape)
        weights = np.full(shape[:1], 2.0, "f4")
        mean = mr.compute_average_loss(losses, weights, rows if given else None)
        mean.backward()
        return mean.detach(), factor.grad, losses.numel()

    for i, (mean, gradient, number) in zip(
        strategy.local_replica_ids, results(strategy, step), strict=True
    ):
        assert mean.dtype == torch.float32
        np.testing.assert_allclose(mean, 2 * (1 + i) * number / rows)
        np.testing.assert_allclose(gradient, 2 * number / rows)


def test_results_have_the_precision_that_the_replica_asks_jax_for(strategy):
    """Its options are those of a thread, and another one performs calls of several replicas."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    count = strategy.num_replicas_in_sync

    def step():
        context = mr.get_replica_context()
        with jax.enable_x64(True):
            total = context.all_reduce("SUM", jax.numpy.int64(2**40 + 1))
            mean = context.all_reduce("MEAN", {"x": jax.numpy.float64(0.1)})["x"]
            rows = context.all_gather(jax.numpy.arange(2) + 2**40 * replica_id(), axis=0)
        narrow = context.all_reduce("SUM", jax.numpy.ones(2))
        return int(total), float(mean), rows.tolist(), narrow.dtype

    every = [2**40 * i + row for i in range(count) for row in range(2)]
    for found in results(strategy, step):
        assert found == (count * (2**40 + 1), pytest.approx(0.1, rel=1e-15), every, np.float32)
    assert (jax.numpy.ones(2) * 2).dtype == np.float32


@pytest.mark.parametrize("is_round_run", [True, False])
def test_results_are_of_the_inference_mode_in_which_the_replica_asks_for_them(
    strategy, is_round_run
):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def step():
        context, found = mr.get_replica_context(), []
        for is_inference in (False, True):
            with torch.inference_mode(is_inference):
                one = torch.full((replica_id() + 1, 1), 2.0)
                total = context.all_reduce("SUM", torch.ones(2))
                mixed = context.all_reduce("MEAN", {"x": torch.ones(2), "y": np.ones(2)})["x"]
                rows = context.all_gather(one, axis=0)
            found.append([total.is_inference(), mixed.is_inference(), rows.is_inference()])
        return found

    with torch.inference_mode(is_round_run):
        for found in results(strategy, step):
            assert found == [[False] * 3, [True] * 3]


def test_the_average_loss_is_computed_where_jax_traces_if_the_batch_size_is_given(strategy):
    jax = pytest.importorskip("jax", reason="jax is not installed")

    def loss(factor, weights=None, rows=8):
        return mr.compute_average_loss(factor * jax.numpy.arange(4.0), weights, rows)

    def step():
        mine = 1.0 + replica_id()
        return jax.value_and_grad(loss)(mine), jax.grad(loss)(mine, np.array([0, 0, 0, 1.0]))

    for i, ((mean, slope), weighted) in zip(
        strategy.local_replica_ids, results(strategy, step), strict=True
    ):
        assert (float(mean), float(slope), float(weighted)) == (0.75 * (1 + i), 0.75, 3 / 8)
    error = raises_everywhere(
        TypeError, lambda: strategy.run(lambda: jax.grad(lambda x: loss(x, None, None))(1.0))
    )
    assert "global_batch_size" in str(error)
    check_works(strategy)


def test_average_losses_keep_their_dtype_and_narrow_floats_add_up_in_float32(strategy, library):
    if library.name in ("array_api_strict", "cupy"):
        pytest.skip("the array API has no float16")
    for kind, weight in (("float32", 0.5), ("float16", 1), ("float16", None), ("float64", 2)):
        losses = library.array(np.full(4, 60000, kind))
        mean = 60000.0 * (1 if weight is None else weight)
        average = functools.partial(mr.compute_average_loss, losses, weight, 4)
        for found in results(strategy, average):
            assert (found.dtype, float(found)) == (losses.dtype, mean)


@pytest.mark.parametrize("weight", [2, np.full(4, 2, np.int8)], ids=repr)
def test_weighted_losses_of_integers_do_not_wrap_around(strategy, library, weight):
    losses = library.array(np.full(4, 100, np.int8))
    for found in results(strategy, lambda: mr.compute_average_loss(losses, weight, 4)):
        assert float(found) == 200.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_average_losses_of_narrow_floats_are_divided_by_many_rows(strategy, library, dtype):
    if library.name in ("array_api_strict", "cupy"):
        pytest.skip("the array API has no narrow floats")
    losses = library.array([3.0, 1000.0])
    kind = getattr(library.numpy_like, dtype)
    losses = losses.to(kind) if library.name == "torch" else losses.astype(kind)
    for found in results(strategy, lambda: mr.compute_average_loss(losses, None, 100_001)):
        assert found.dtype == kind
        np.testing.assert_allclose(float(found), float(losses.sum()) / 100_001, rtol=0.01)


class OnADevice:
    """An array in the memory of a device: DLPack gives it to those who ask for it on the host."""

    def __init__(self, values):
        self.values = values

    def __array_namespace__(self):
        raise AssertionError("only its values are wanted")

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, dl_device, **wishes):
        assert dl_device == (1, 0)
        return self.values.__dlpack__()


def test_arrays_of_a_device_are_asked_for_by_dlpack_as_arrays_of_the_host():
    values = np.arange(3.0)
    np.testing.assert_array_equal(to_numpy(OnADevice(values)), values)
