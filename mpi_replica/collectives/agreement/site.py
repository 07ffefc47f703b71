"""Names for places and functions of a program that are the same in every process.

Ranks that are at the same call must find the same name for it, and ranks at different calls
different ones. ``file:line`` alone misses two calls that are swapped through a helper function,
or on one line: the whole chain of frames finds both.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, cast

from ...core.imported_libraries import is_made_by_dynamo
from ...core.scipy_solvers import Solver, solver_of
from ...core.tracebacks import is_of_library, is_of_package

_CACHE = dis.opmap["CACHE"]
_CALL = dis.opmap["CALL"]
# How Python comes by None; the second is of Python 3.15.
_CONSTANTS = frozenset({dis.opmap["LOAD_CONST"], dis.opmap.get("LOAD_COMMON_CONSTANT")})
_WITH_EXCEPT_START = dis.opmap["WITH_EXCEPT_START"]
_PRECALL = dis.opmap.get("PRECALL")  # of Python 3.11

# A proxy that has every attribute wraps something for ever.
_MOST_WRAPPERS = 32


def bytes_of(text: str) -> bytes:
    """Returns bytes that stand for a text, which may be the name of a file that is no UTF-8."""
    return text.encode(errors="surrogatepass")


class CallSite(NamedTuple):
    """Where a program calls a collective."""

    #: Names the chain of calls, the same in every process.
    digest: bytes
    #: "train.py:41" of each frame, the innermost first.
    lines: tuple[str, ...]
    #: The column of each, for two calls on one line.
    columns: tuple[int, ...]
    #: The solver of scipy that has called back, which several replicas can't be in.
    solver: Solver | None = None

    @property
    def line(self) -> str:
        """The innermost "file:line" outside of the package."""
        return self.lines[0] if self.lines else "an unknown place"

    def inside_of(self, outer: CallSite) -> CallSite:
        """Returns the site of a call that stands here, in a function that is called at `outer`."""
        if outer.lines[: len(self.lines)] == self.lines:  # called as it is
            return outer
        digest = hashlib.blake2b(self.digest + outer.digest, digest_size=8).digest()
        lines, columns = self.lines + outer.lines, self.columns + outer.columns
        return CallSite(digest, lines, columns, self.solver or outer.solver)


def sites_apart(sites: Sequence[CallSite]) -> list[str]:
    """Returns all of each site, with the columns in which it differs from others of its lines."""
    texts = []
    for site in sites:
        columns = [other.columns for other in sites if other.lines == site.lines]
        texts.append(
            " called at ".join(
                f"{line} (column {mine})" if len(set(of_frame)) > 1 else line
                for line, mine, *of_frame in zip(site.lines, site.columns, *columns, strict=True)
            )
        )
    return texts


class _Memory(NamedTuple):
    """What was learnt about the code of the program.

    Its keys hold ids of code objects, since hashing a code object hashes its bytes and constants
    each time. The code objects are kept with it, so that an id never comes to mean another one.
    """

    #: None for the package's own, False for a `boundary`.
    codes: dict[int, CodeType | bool | None]
    kept: list[CodeType]
    sites: dict[tuple[int, ...], CallSite]
    places: dict[tuple[int, int], _Place]


_memory = _Memory({}, [], {}, {})
# A program that makes new code all the time must not grow: what was learnt is then forgotten. Who
# is in the middle of `call_site` in another thread goes on with the old one.
_MOST_CODES = 4096

# Libraries whose frames are no part of a site.
_LEFT_OUT = ("torch", "jax", "numpy")

_UNKNOWN = (lambda: None).__code__  # of no frame
_boundaries: set[int] = set()


def boundary(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the package function that calls a user's function: chains of frames end there."""
    _boundaries.add(id(function.__code__))
    return function


def call_site(known: int = 0, until: FrameType | None = None) -> CallSite:
    """Returns the site of the call that the program is in.

    The innermost frames, so many as are `known` to be of the package, are not looked at; nor is
    `until`, and what has called that.

    The chain has every frame from here to the function that was given to ``run`` or
    ``merge_call``; outside of them, to the program itself: the first module from here that is
    ``__main__``. Below it stands what runs the program, which may be a debugger or a profiler on
    one rank alone. Frames of the package are left out, and those of torch and JAX, which call back
    what goes through modules, gradients and traced functions; those of numpy, which asks variables
    for their arrays; and those with which Python starts a thread.
    """
    frame: FrameType | None = sys._getframe(1 + known)
    memory = _memory
    known_code = memory.codes.get
    key: list[int] = []
    append = key.append
    while frame is not None and frame is not until:
        code = frame.f_code
        name = id(code)
        user_code = known_code(name, _UNKNOWN)
        if user_code is _UNKNOWN:
            user_code = _learn_code(memory, code)
        if user_code:
            append(name)
            append(frame.f_lasti)
            if code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                break
        elif user_code is False:
            break
        frame = frame.f_back
    chain = tuple(key)
    site = memory.sites.get(chain)
    return _learn_site(memory, chain) if site is None else site


def site_in_jax() -> CallSite:
    """Returns the site of a call inside of the innermost function that JAX calls to trace it.

    What has called that may be another place each time: JAX keeps what it has traced.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_library(file, "jax") and os.path.basename(file) != "tree_util.py":
            break
        frame = frame.f_back
    return call_site(1, frame)


def _learn_code(memory: _Memory, code: CodeType) -> CodeType | bool | None:
    memory.kept.append(code)
    known: CodeType | bool | None = code
    file = code.co_filename
    if (
        is_of_package(file)
        or file == threading.__file__
        or any([is_of_library(file, name) for name in _LEFT_OUT])
    ):
        known = False if id(code) in _boundaries else None
    memory.codes[id(code)] = known
    return known


def _learn_site(memory: _Memory, key: tuple[int, ...]) -> CallSite:
    global _memory
    digest = hashlib.blake2b(digest_size=8)
    places = []
    seen = set()
    for pair in zip(key[::2], key[1::2], strict=True):
        if pair[0] in seen:  # recursion, of whatever depth
            continue
        seen.add(pair[0])
        place = memory.places.get(pair)
        if place is None:  # a new site shares most of its frames with those before
            # Keys are made of users' code alone.
            place = memory.places[pair] = _place(cast(CodeType, memory.codes[pair[0]]), pair[1])
        digest.update(place.name)
        places.append(place)
    lines = tuple(place.line for place in places)
    solver = next((place.solver for place in places if place.solver), None)
    site = CallSite(digest.digest(), lines, tuple(place.column for place in places), solver)
    memory.sites[key] = site
    if len(memory.kept) + len(memory.sites) > _MOST_CODES:
        _memory = _Memory({}, [], {}, {})
    return site


class _Place(NamedTuple):
    """Where one frame is: a part of a call site."""

    name: bytes
    line: str
    column: int
    #: As `CallSite` has it.
    solver: Solver | None = None


def _place(code: CodeType, offset: int) -> _Place:
    start = start_of_instruction(code, offset)
    file = os.path.basename(code.co_filename)
    positions = list(code.co_positions())
    if is_made_by_dynamo(code):
        # It has others for other shapes; a PRECALL may have the line of what it follows.
        call = start + 4 if code.co_code[start] == _PRECALL else start
        line = positions[call // 2][0]
        return _Place(bytes_of(f"{file}\0{code.co_qualname}\0{line}\0"), f"{file}:{line}", 1)
    position = line, _, column, _ = positions[start // 2]
    # The position tells lambdas and functions of one name apart, where a loop calls them.
    name = f"{file}\0{code.co_qualname}\0{position}\0{_role(code, start, positions)}\0"
    column = (column or 0) + 1  # as editors count
    return _Place(bytes_of(name), f"{file}:{line}", column, solver_of(code))


_Position = tuple[int | None, int | None, int | None, int | None]


def _role(code: CodeType, start: int, positions: Sequence[_Position]) -> str:
    """Returns what tells an instruction from others at the same position of the source.

    Its offset would, but for one thing: Python writes a part of the code several times, for the
    ways on which it comes there. These copies are one place. Of a ``finally`` block and the end of
    a ``with`` there is one for each way out. What ends a function has one for each branch that
    leads there, as both of ``return f(a if b else c)``, which begins anywhere behind the branches:
    so nothing counts that comes before, but what stands at the same position without a gap.
    """
    position = positions[start // 2]
    if None in position:  # Python may be told to leave them out
        return str(start)
    instructions = code.co_code
    starts = [i for i in range(0, len(instructions), 2) if instructions[i] != _CACHE]
    here = starts.index(start)

    def is_at(index: int) -> bool:
        return positions[starts[index] // 2] == position

    with_exits = [i for i in starts if instructions[i] == _WITH_EXCEPT_START]
    if [positions[i // 2] for i in with_exits].count(position) == 1:
        # Python calls `__exit__` with three times None where no exception is under way.
        before = [instructions[starts[i]] for i in range(max(here - 3, 0), here) if is_at(i)]
        if start in with_exits or (len(before) == 3 and _CONSTANTS.issuperset(before)):
            return "exit"
    together = itertools.takewhile(is_at, range(here, -1, -1))
    return repr([(instructions[starts[i]], instructions[starts[i] + 1]) for i in together])


def start_of_instruction(code: CodeType, offset: int) -> int:
    """Returns where the instruction starts that a frame is at.

    Python rewrites code that runs often, and not on all replicas at the same time. ``f_lasti`` may
    then lie in the cache entries behind the instruction, or at the PRECALL that does a CALL's work.
    """
    instructions = code.co_code  # as it was before Python rewrote it

    def start_of(offset: int) -> int:
        while instructions[offset] == _CACHE:
            offset -= 2
        return offset

    start = start_of(offset)
    if instructions[start] == _CALL:
        before = start_of(start - 2)
        if instructions[before] == _PRECALL:
            return before
    return start


class FunctionIdentity(NamedTuple):
    """What a function is, whatever process and object it is in."""

    digest: bytes
    #: "train_step at train.py:12"
    text: str
    #: Why a call of it runs none of its code, and what to do; empty where it does.
    why_lazy: str = ""

    def require_eager(self, what: str) -> None:
        """Raises where a call of it runs none of its code.

        Raises
        ------
        TypeError
            It is a generator function or an async one.
        """
        if self.why_lazy:
            raise TypeError(f"{what} got {self.text}, {self.why_lazy}")


def function_identity(function: Callable[..., Any]) -> FunctionIdentity:
    """Returns the identity of `function`: file base name, qualified name, first line and code.

    `functools.partial` and bound methods are unwrapped: objects differ even inside one rank.
    """
    if type(function) is FunctionType and not hasattr(function, "__wrapped__"):
        return _code_identity(function.__code__)
    for _ in range(_MOST_WRAPPERS):
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__func__"):
            function = function.__func__
        elif hasattr(function, "__wrapped__") and _is_of_no_program(function):
            function = function.__wrapped__
        else:
            break
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        # an object whose class says what a call does
        code = getattr(vars(type(function)).get("__call__"), "__code__", None)
    if isinstance(code, CodeType):
        return _code_identity(code)
    kind = type(function)
    name = getattr(function, "__qualname__", None)
    module = getattr(function, "__module__", None)
    name = name if isinstance(name, str) else kind.__qualname__
    module = module if isinstance(module, str) else kind.__module__
    return FunctionIdentity(bytes_of(f"{module}.{name}"), f"{module}.{name}")


def _is_of_no_program(function: Callable[..., Any]) -> bool:
    """Returns whether it has no code of the program: that of `span`, or none."""
    code = getattr(function, "__code__", None)
    return code is None or is_of_package(code.co_filename)


def _code_identity(code: CodeType) -> FunctionIdentity:
    known = _identities.get(id(code))
    if known is None:
        if len(_identities) >= _MOST_IDENTITIES:
            _identities.clear()
        known = _identities[id(code)] = (code, _identified(code))
    return known[1]


# By ids, as above; an entry keeps its code.
_identities: dict[int, tuple[CodeType, FunctionIdentity]] = {}
_MOST_IDENTITIES = 4096


_WHY_LAZY = {
    inspect.CO_GENERATOR: (
        "which has a yield: a call of it would run none of its code. Return a list instead."
    ),
    inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR: (
        "which is async: a call of it would run none of its code. Pass a function without async,"
        " in which asyncio.run(...) runs it."
    ),
}


def _identified(code: CodeType) -> FunctionIdentity:
    file = os.path.basename(code.co_filename)
    digest = hashlib.blake2b(digest_size=8)
    digest.update(bytes_of(f"{file}\0{code.co_qualname}\0{code.co_firstlineno}\0"))
    _update_with_code(digest, code)
    text = f"{code.co_qualname} at {file}:{code.co_firstlineno}"
    why_lazy = next((why for flag, why in _WHY_LAZY.items() if code.co_flags & flag), "")
    return FunctionIdentity(digest.digest(), text, why_lazy)


def _update_with_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code)
    names = (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    digest.update(bytes_of("\0".join(names)))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _update_with_code(digest, constant)
        elif isinstance(constant, frozenset):  # its order differs between processes
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())
