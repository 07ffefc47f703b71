"""datasets: input by mr.data, row by row, beside loops over numpy's arrays.

By hand, each rank takes the rows of its half of each batch, calls the same functions for them, and
stacks what they give: without specs, errors that name the row, or a place to go on from.
"""

import numpy as np

import mpi_replica as mr

from .launching import Launch

_ROWS, _BATCH = 10_000, 100
_FEATURES = 20


def launches(settings):
    """Return what to start for one library."""
    for ranks in settings.ranks or [2]:
        arguments = {"rows": _ROWS // 10 if settings.quick else _ROWS}
        arguments["batches"] = settings.repeat or (3 if settings.quick else 30)
        yield Launch("epochs", ranks, arguments, limit_seconds=600)


def epochs(world, rows, batches):
    """Measure an epoch of each pipeline."""
    table = _Table(world, rows)
    with mr.MPIStrategy() as strategy:
        for name, (dataset, by_hand) in table.pipelines().items():
            distributed = strategy.experimental_distribute_dataset(dataset)
            for ours, theirs in zip(distributed, by_hand(), strict=True):
                same = all(
                    map(np.array_equal, strategy.experimental_local_results(ours)[0], theirs)
                )
                world.require(same, name)

            def ours(distributed=distributed):
                for _ in distributed:
                    pass

            def loop(by_hand=by_hand):
                for _ in by_hand():
                    pass

            what = f"{name}, {rows} rows"
            by_rows = world.repeated(ours)
            yield world.beside_best(what, by_rows, {"a loop": loop}, {}, batches)


def _scaled(features, label):
    return features * 2, label


def _is_even(features, label):
    return label % 2 == 0


class _Table:
    """Features and labels of a world's ranks, and pipelines of their rows."""

    def __init__(self, world, rows):
        self._features = np.random.default_rng(0).normal(size=(rows, _FEATURES))
        self._labels = np.arange(rows)
        self._share = slice(
            world.rank * _BATCH // world.size, (world.rank + 1) * _BATCH // world.size
        )

    def pipelines(self):
        """Return by name a dataset, and what iterates the same batches of this rank by hand."""
        rows = mr.data.Dataset.from_tensor_slices((self._features, self._labels))
        generated = mr.data.Dataset.from_generator(self._rows)
        read = mr.data.Dataset.from_source(_Source(self._features, self._labels))
        return {
            "slices, batch": (rows.batch(_BATCH), self._sliced),
            "slices, map, batch": (rows.map(_scaled).batch(_BATCH), self._mapped),
            "slices, filter, batch": (rows.filter(_is_even).batch(_BATCH), self._filtered),
            "rows of a source, batch": (read.batch(_BATCH), self._read),
            "generator, batch": (generated.batch(_BATCH), self._streamed),
        }

    def _rows(self):
        return zip(self._features, self._labels, strict=True)

    def _starts(self):
        return range(0, len(self._labels), _BATCH)

    def _mine(self, start):
        return range(start + self._share.start, start + self._share.stop)

    def _sliced(self):
        for start in self._starts():
            mine = self._mine(start)
            rows = slice(mine.start, mine.stop)
            yield self._features[rows], self._labels[rows]

    def _mapped(self):
        for start in self._starts():
            yield _stacked([_scaled(self._features[i], self._labels[i]) for i in self._mine(start)])

    def _read(self):
        for start in self._starts():
            yield _stacked([(self._features[i], self._labels[i]) for i in self._mine(start)])

    def _streamed(self):
        return self._batches(self._rows())

    def _filtered(self):
        return self._batches(row for row in self._rows() if _is_even(*row))

    def _batches(self, rows):
        while batch := [row for _, row in zip(range(_BATCH), rows, strict=False)]:
            features, labels = _stacked(batch)
            yield features[self._share], labels[self._share]


def _stacked(rows):
    features, labels = zip(*rows, strict=True)
    return np.stack(features), np.array(labels)


class _Source:
    """An object whose rows are reached by number."""

    def __init__(self, features, labels):
        self._features, self._labels = features, labels

    def __len__(self):
        return len(self._labels)

    def __getitem__(self, row):
        return self._features[row], self._labels[row]
