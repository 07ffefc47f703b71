"""all_reduce of arrays, as it is written with mpi4py: by an expert, and by everybody.

Three contracts tell where the sums go:

* *fresh*: to memory that the call makes, as with ``ctx.all_reduce("SUM", value)``;
* *kept*: to given arrays, as with ``out=``;
* *in place*: to the arrays of the value itself, as with ``out=value``.

An expert lets no message be so large that it leaves the processor's cache, and copies small
arrays only. How large pieces should be, and whether one is better copied first and then reduced in
place, depends on the library and on the machine. All that is tried, and the best is what counts.
What can be prepared is prepared once: buffers, views, bounds of pieces.

A way is a call without arguments that returns the sums, flat or in the shapes of the value.
"""

import numpy as np

FRESH, KEPT, IN_PLACE = "fresh", "kept", "in place"
CONTRACTS = (FRESH, KEPT, IN_PLACE)

_PIECES = tuple(1 << power for power in (18, 19, 20, 21, 22, 24))  # 256 KiB ... 16 MiB
_SMALL_BYTES = 1 << 16


def expert_ways(world, contract, leaves, results):
    """Return the ways that are worth a trial, by name.

    Parameters
    ----------
    world : World
    contract : str
        One of `CONTRACTS`.
    leaves : list of numpy.ndarray
        This rank's contribution: C-contiguous arrays of one dtype.
    results : list of numpy.ndarray or None
        Where the sums go; None for fresh ones.
    """
    whole = sum(leaf.nbytes for leaf in leaves)
    if len(leaves) == 1 and whole <= _PIECES[0]:
        return {"by hand, one message": _one_message(world, contract, leaves[0], results)}
    has_large = any(leaf.nbytes >= _SMALL_BYTES for leaf in leaves)
    ways = {}
    for size in sorted({min(size, whole) for size in _PIECES}):
        pieces = "one piece" if size == whole else pieces_of(size)
        for copies_first in (False, True) if has_large and contract != IN_PLACE else (False,):
            plan = _Plan(world, leaves, size, contract == IN_PLACE, copies_first)
            name = f"by hand, {pieces}{', copied first' * copies_first}"
            if contract != FRESH:
                ways[name] = plan.to_given(results)
                continue
            ways[name] = plan.to_fresh_arrays
            if len(leaves) > 1:
                ways[f"{name}, one buffer"] = plan.to_fresh_buffer
    return ways


def pieces_of(size_bytes):
    """Return the words for pieces of this size."""
    return f"{size_bytes / (1 << 20):.3g} MiB pieces"


def naive_way(world, contract, leaves, results):
    """Return the way that is written first, and its name."""
    if len(leaves) == 1:
        return "naive: one Allreduce", _one_message(world, contract, leaves[0], results)
    allreduce, op = world.comm.Allreduce, world.mpi.SUM

    def packed():
        send = np.concatenate([leaf.reshape(-1) for leaf in leaves])
        receive = np.empty_like(send)
        allreduce(send, receive, op)
        sums, start = [], 0
        for index, leaf in enumerate(leaves):
            part = receive[start : start + leaf.size].reshape(leaf.shape)
            if results is None:
                sums.append(part.copy())
            else:
                results[index][...] = part
            start += leaf.size
        return sums or results

    return "naive: pack, one Allreduce, unpack", packed


def memcpy_way(contract, leaves, results):
    """Return what copies the value once, which is the floor: fresh or to kept arrays."""
    if contract == FRESH:
        return lambda: [leaf.copy() for leaf in leaves]
    places = [np.empty_like(leaf) for leaf in leaves] if contract == IN_PLACE else results

    def copied():
        for leaf, place in zip(leaves, places, strict=True):
            np.copyto(place, leaf)
        return places

    return copied


def _one_message(world, contract, leaf, results):
    allreduce, op, empty = world.comm.Allreduce, world.mpi.SUM, np.empty
    shape, dtype = leaf.shape, leaf.dtype
    if contract == FRESH:

        def fresh():
            result = empty(shape, dtype)
            allreduce(leaf, result, op)
            return [result]

        return fresh
    send = world.mpi.IN_PLACE if contract == IN_PLACE else leaf

    def given():
        allreduce(send, results[0], op)
        return results

    return given


class _Plan:
    """Large arrays in pieces, straight from value to sum; small ones together in packs."""

    def __init__(self, world, leaves, piece_bytes, is_in_place, copies_first):
        self._allreduce, self._op = world.comm.Allreduce, world.mpi.SUM
        self._in_place = world.mpi.IN_PLACE
        self._is_in_place, self._copies_first = is_in_place, copies_first
        self._shapes, self._dtype = [leaf.shape for leaf in leaves], leaves[0].dtype
        self._flat = [leaf.reshape(-1) for leaf in leaves]
        piece = piece_bytes // self._dtype.itemsize
        # By index of the array: its pieces.
        self._large = {
            index: [slice(start, start + piece) for start in range(0, flat.size, piece)]
            for index, flat in enumerate(self._flat)
            if flat.nbytes >= _SMALL_BYTES or len(leaves) == 1
        }
        small = [index for index in range(len(leaves)) if index not in self._large]
        self._packs = [_Pack(self._flat, indices) for indices in self._shared_out(small, piece)]

    def _shared_out(self, indices, most):
        """Yield lists of arrays that have so many items together at most."""
        pack, length = [], 0
        for index in indices:
            length += self._flat[index].size
            if pack and length > most:
                yield pack
                pack, length = [], self._flat[index].size
            pack.append(index)
        if pack:
            yield pack

    def to_given(self, results):
        """Return the way to these arrays, which are those of the value where it is in place."""
        sums = [result.reshape(-1) for result in results]
        moves, places = self._moves(sums), self._places(sums)

        def call():
            self._reduce_packs(places)
            self._reduce(moves)
            return results

        return call

    def to_fresh_arrays(self):
        """Return fresh arrays."""
        results = [np.empty(shape, self._dtype) for shape in self._shapes]
        sums = [result.reshape(-1) for result in results]
        self._reduce_packs(self._places(sums))
        self._reduce(self._moves(sums))
        return results

    def to_fresh_buffer(self):
        """Return views of one fresh buffer: packs need not be unpacked."""
        buffer = np.empty(sum(flat.size for flat in self._flat), self._dtype)
        sums, start = [None] * len(self._flat), 0
        for pack in self._packs:
            total = buffer[start : start + pack.buffer.size]
            start += pack.buffer.size
            np.concatenate(pack.parts, out=total)
            self._allreduce(self._in_place, total, self._op)
            for index, place in pack.places:
                sums[index] = total[place]
        for index in self._large:
            stop = start + self._flat[index].size
            sums[index] = buffer[start:stop]
            start = stop
        self._reduce(self._moves(sums))
        return [total.reshape(shape) for total, shape in zip(sums, self._shapes, strict=True)]

    def _moves(self, sums):
        """Return the pieces of large arrays, and where their sums go."""
        return [
            (self._flat[index][piece], sums[index][piece])
            for index, pieces in self._large.items()
            for piece in pieces
        ]

    def _places(self, sums):
        """Return each pack, and where the sums in it go."""
        return [
            (pack, [(sums[index], pack.buffer[place]) for index, place in pack.places])
            for pack in self._packs
        ]

    def _reduce_packs(self, packs):
        copyto = np.copyto
        for pack, places in packs:
            np.concatenate(pack.parts, out=pack.buffer)
            self._allreduce(self._in_place, pack.buffer, self._op)
            for total, part in places:
                copyto(total, part)

    def _reduce(self, moves):
        allreduce, op, in_place, copyto = self._allreduce, self._op, self._in_place, np.copyto
        if self._is_in_place:
            for _, total in moves:
                allreduce(in_place, total, op)
        elif self._copies_first:
            for value, total in moves:
                copyto(total, value)
                allreduce(in_place, total, op)
        else:
            for value, total in moves:
                allreduce(value, total, op)


class _Pack:
    """Small arrays that travel together, and where each lies in the buffer."""

    def __init__(self, flat, indices):
        self.parts = [flat[index] for index in indices]
        ends = np.cumsum([part.size for part in self.parts]).tolist()
        starts = [0, *ends[:-1]]
        self.places = list(zip(indices, map(slice, starts, ends), strict=True))
        self.buffer = np.empty(ends[-1], flat[0].dtype)
