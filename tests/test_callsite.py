"""Call sites and identities of functions (DESIGN.md section 6, decisions 13 and 18)."""

import argparse
import ast
import collections
import configparser
import dis
import functools
import operator
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import textwrap
import threading
import types
import zipfile

import numpy as np
import pytest

from mpi_replica.collectives.agreement import site as callsite
from mpi_replica.collectives.agreement.site import (
    call_site,
    function_identity,
    sites_apart,
    start_of_instruction,
)
from mpi_replica.replicas.merge_fn import invoke_merge_fn


def site():
    return call_site().digest


def test_every_turn_of_a_loop_is_one_call():
    sites = []
    for _ in range(3):
        sites.append(site())
    assert len(set(sites)) == 1


def test_every_turn_of_a_comprehension_is_one_call():
    assert len({site() for _ in range(3)}) == 1
    assert len(set(map(lambda _: site(), range(3)))) == 1


def test_frames_of_numpy_are_no_part_of_a_site():
    sites = []

    class Asked:
        def __array__(self, dtype=None, copy=None):
            sites.append(call_site())
            return np.zeros(3)

    line, _ = call_site().lines[0], np.mean(Asked())
    assert sites[0].lines[1] == line
    assert not any(line.startswith(("_methods.py", "fromnumeric.py")) for line in sites[0].lines)
    first, second = np.mean(Asked()), np.sum(Asked())
    assert first == second == 0.0
    assert len({site.digest for site in sites}) == 3


def test_two_lines_are_two_calls():
    first = site()
    second = site()
    assert first != second


def test_two_calls_on_one_line_differ():
    first, second = site(), site()
    assert first != second


def test_two_calls_through_one_helper_differ():
    def helper():
        return site()

    first = helper()
    second = helper()
    assert first != second


def test_two_calls_through_helpers_of_helpers_differ():
    def inner():
        return site()

    def outer():
        return inner()

    first, second = outer(), outer()
    assert first != second


def test_two_calls_through_one_lambda_differ():
    through = lambda: site()  # noqa: E731
    first, second = through(), through()
    assert first != second


def test_two_lambdas_on_one_line_differ_also_where_one_loop_calls_them():
    first, second = [call() for call in (lambda: site(), lambda: site())]
    assert first != second


def test_two_functions_of_one_name_differ_also_where_one_loop_calls_them():
    def make(is_first):
        if is_first:

            def step():
                return site()
        else:

            def step():
                return site()

        return step

    first, second = [call() for call in (make(True), make(False))]
    assert first != second


def test_recursion_is_one_call_whatever_its_depth():
    def down(depth):
        return site() if depth == 0 else down(depth - 1)

    assert len({down(depth) for depth in (1, 2, 7)}) == 1


def test_mutual_recursion_is_one_call_whatever_its_depth():
    def even(depth):
        return site() if depth == 0 else odd(depth - 1)

    def odd(depth):
        return even(depth - 1)

    assert len({even(depth) for depth in (2, 4, 8)}) == 1


def fails(is_to):
    if is_to:
        raise ZeroDivisionError


def in_finally(is_to):
    sites = []
    try:
        try:
            fails(is_to)
        finally:
            sites.append([site(), [site() for _ in range(1)]])
    except ZeroDivisionError:
        pass
    return sites


def in_nested_finally(is_to):
    sites = []
    try:
        try:
            fails(is_to)
        finally:
            try:
                sites.append(0)
            finally:
                sites.append(site())
                with Exits(sites):
                    sites.append(1)
    except ZeroDivisionError:
        pass
    return sites


def in_finally_after_return(is_to):
    sites = []

    def step():
        try:
            if is_to:
                return
            sites.append(0)
        finally:
            sites.append(site())

    step()
    return sites[-1]


class Exits:
    def __init__(self, sites):
        self.sites = sites

    def __enter__(self):
        pass

    def __exit__(self, *error):
        self.sites.append(site())
        return True


def at_the_end_of_with(is_to):
    sites = []
    with Exits(sites):
        fails(is_to)
    return sites


def at_the_end_of_with_after_return(is_to):
    sites = []

    def step():
        with Exits(sites):
            if is_to:
                return
            fails(False)

    step()
    return sites


def at_the_end_of_with_after_return_of_a_value(is_to):
    sites = []

    def step():
        with Exits(sites):
            if is_to:
                return str(sites)
            fails(False)
        return None

    step()
    return sites


def of_a_value_that_was_chosen(is_to):
    def step():
        return site_with(0 if is_to else fails(False))

    return step()


def of_a_value_that_was_chosen_at_the_end(is_to):
    sites = []

    def step():
        sites.append(site_with(0 if is_to else fails(False)))

    step()
    return sites


def of_a_value_by_name_that_was_chosen(is_to):
    def step():
        return site_with(1, *(), value=is_to or fails(False))

    return step()


def site_with(*args, **kwargs):
    return call_site().digest


@pytest.mark.parametrize(
    "way",
    [
        in_finally,
        in_nested_finally,
        in_finally_after_return,
        at_the_end_of_with,
        at_the_end_of_with_after_return,
        at_the_end_of_with_after_return_of_a_value,
        of_a_value_that_was_chosen,
        of_a_value_that_was_chosen_at_the_end,
        of_a_value_by_name_that_was_chosen,
    ],
)
def test_a_place_is_one_call_on_all_ways_on_which_python_comes_there(way):
    """Its code stands several times: for the way with an exception, and for each return."""
    first, second = [way(is_to) for is_to in (False, True)]
    assert first == second


def test_the_ends_of_two_withs_of_one_statement_differ():
    sites = []
    with Exits(sites), Exits(sites):
        fails(True)
    assert len(set(sites)) == len(sites) == 2


def test_what_a_with_calls_are_three_calls():
    sites = []

    class Makes(Exits):
        def __init__(self, sites):
            super().__init__(sites)
            sites.append(site())

        def __enter__(self):
            self.sites.append(site())

    with Makes(sites):
        pass
    assert len(set(sites)) == len(sites) == 3


CALLS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}


def positions_of_calls(tree):
    """Return those at which a program calls once: no ``with`` and no decorator calls there, too."""
    calls, others = set(), set()
    for node in ast.walk(tree):
        several = [item.context_expr for item in getattr(node, "items", ())]
        several += getattr(node, "decorator_list", [])
        others.update(map(position_of, several))
        if isinstance(node, ast.Call):
            calls.add(position_of(node))
    return calls - others


def position_of(node):
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def codes_in(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


@pytest.mark.parametrize(
    "module", [argparse, ast, configparser, dis, shutil, subprocess, tarfile, zipfile]
)
def test_every_call_of_a_program_has_one_name_however_often_python_has_written_it(module):
    """Some have up to five copies, others in each version of Python."""
    source = pathlib.Path(module.__file__).read_text(encoding="utf-8")
    positions = positions_of_calls(ast.parse(source))
    names = collections.defaultdict(set)
    for code in codes_in(compile(source, module.__file__, "exec")):
        for each in dis.get_instructions(code):
            position = tuple(each.positions)
            if each.opname in CALLS and position in positions:
                names[code, position].add(callsite._place(code, each.offset).name)
    assert len(names) > 100
    assert {position: found for position, found in names.items() if len(found) > 1} == {}


class Compares:
    def __init__(self, sites):
        self.sites = sites

    def __lt__(self, other):
        self.sites.append(site())
        return True


def test_two_calls_at_one_position_differ():
    sites = []
    x = y = z = Compares(sites)
    is_in_order = x < y < z  # no assert, which pytest would write anew
    assert is_in_order
    assert len(set(sites)) == 2


def test_two_calls_differ_where_all_positions_are_the_same():
    """As in code that a program has generated, or where Python leaves them out."""
    tree = ast.parse("first, second = site(), site()\nthird = site()")
    for node in ast.walk(tree):
        for name in ("lineno", "end_lineno"):
            if hasattr(node, name):
                setattr(node, name, 1)
        for name in ("col_offset", "end_col_offset"):
            if hasattr(node, name):
                setattr(node, name, 0)
    names = {"site": site}
    exec(compile(tree, "generated.py", "exec"), names)
    assert len({names["first"], names["second"], names["third"]}) == 3


def test_two_calls_differ_where_python_leaves_positions_out(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "from mpi_replica.collectives.agreement.site import call_site\n"
        "first, second = call_site().digest, call_site().digest\n"
        "assert first != second\n"
    )
    subprocess.run([sys.executable, "-X", "no_debug_ranges", file], check=True)


def test_the_chain_ends_at_the_program():
    """Below it stands what runs it: a debugger or a profiler, on one rank perhaps."""
    names = {"__name__": "__main__", "call_site": call_site}
    exec(compile("found = call_site()", "train.py", "exec"), names)
    assert names["found"].lines == ("train.py:1",)


def test_modules_that_the_program_imports_do_not_end_the_chain():
    names = {"__name__": "model", "call_site": call_site}
    exec(compile("found = call_site()", "model.py", "exec"), names)
    assert names["found"].lines[0] == "model.py:1"
    assert names["found"].lines[1].startswith("test_callsite.py:")


def test_a_program_that_makes_new_code_all_the_time_does_not_grow():
    def kept():
        return len(callsite._memory.kept) + len(callsite._memory.sites)

    source = "def step():\n    return site()\n"
    first = None
    for _ in range(callsite._MOST_CODES):
        names = {"site": site}
        exec(compile(source, "generated.py", "exec"), names)
        found = names["step"]()
        first = first or found
        assert found == first  # also where what was known is forgotten
        assert kept() <= callsite._MOST_CODES


def test_frames_of_the_package_do_not_count():
    """A release of the package on one rank may have another frame more."""

    def merge_fn(strategy):
        return call_site()

    through = invoke_merge_fn(merge_fn, None, (), {})
    assert [line.partition(":")[0] for line in through.lines] == ["test_callsite.py"]


def test_frames_that_start_a_thread_do_not_count():
    found = []

    def train():
        found.append(call_site())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found[0].lines == (f"test_callsite.py:{train.__code__.co_firstlineno + 1}",)


def test_the_chain_ends_at_the_function_given_to_merge_call():
    def merge_fn(strategy):
        return site()

    here = invoke_merge_fn(merge_fn, None, (), {})
    there = invoke_merge_fn(merge_fn, None, (), {})
    assert here == there


def test_a_site_tells_file_and_line_of_every_frame():
    def helper():
        return call_site()

    found = helper()
    line = sys._getframe().f_lineno - 1
    first = helper.__code__.co_firstlineno + 1
    assert found.line == f"test_callsite.py:{first}"
    assert found.lines[:2] == (f"test_callsite.py:{first}", f"test_callsite.py:{line}")
    (text,) = sites_apart([found])
    assert text.startswith(f"test_callsite.py:{first} called at test_callsite.py:{line}")


@pytest.mark.parametrize("code", [dis.get_instructions.__code__, argparse.Action.__init__.__code__])
def test_a_frame_is_at_the_start_of_an_instruction_wherever_in_it_python_is(code):
    """In its cache entries, for example; `dis` tells where it starts."""
    start, name = 0, ""
    starts = {each.offset: each.opname for each in dis.get_instructions(code)}
    for offset in range(0, len(code.co_code), 2):
        if offset in starts:
            if (name, starts[offset]) != ("PRECALL", "CALL"):  # the two are one call
                start = offset
            name = starts[offset]
        assert start_of_instruction(code, offset) == start


def test_generators_and_threads_of_calls_have_a_site():
    def generate():
        yield site()
        yield site()

    first, second = generate()
    assert first != second


def test_sites_and_identities_are_the_same_in_every_process(tmp_path):
    """Another folder, hash seed and import order: the ranks of a job compare what they find."""
    program = """
        import sys
        if sys.argv[1] == "b":
            import asyncio, decimal  # moves what comes after in memory
        from mpi_replica.collectives.agreement.site import call_site, function_identity

        def helper(scale=2):
            return call_site()

        def merge_fn(strategy, value):
            names = {"alpha", "beta", "gamma"}
            return value in {"x", "y", "z"} and [name for name in sorted(names)]

        print(helper().digest.hex(), (lambda: helper())().digest.hex())
        print(function_identity(merge_fn).digest.hex(), function_identity(merge_fn).text)
        print(function_identity(lambda s, x: x in ("a", 1.5, None)).digest.hex())
    """
    outputs = set()
    for folder, seed in (("a", "1"), ("b", "2")):
        file = tmp_path / folder / "train.py"
        file.parent.mkdir()
        file.write_text(textwrap.dedent(program))
        done = subprocess.run(
            [sys.executable, file, folder],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert "merge_fn at train.py:10" in outputs.pop()


def same(one, other):
    return function_identity(one).digest == function_identity(other).digest


def test_a_function_is_itself_whichever_object_it_is():
    """Objects differ even inside one rank (decision 18)."""

    def make(captured):
        def merge_fn(strategy, value):
            return value + captured

        return merge_fn

    assert make(1) is not make(2)
    assert same(make(1), make(2))


def test_two_functions_of_equal_code_on_two_lines_differ():
    def first(strategy, value):
        return value

    def second(strategy, value):
        return value

    second.__code__ = second.__code__.replace(co_qualname=first.__code__.co_qualname)
    assert not same(first, second)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda s, x: x + 1, lambda s, x: x - 1),
        (lambda s, x: x + 1, lambda s, x: x + 2),
        (lambda s, x: x + 1, lambda s, x: x + 1.0),
        (lambda s, x: x.sum(), lambda s, x: x.mean()),
        (lambda s, x: [y + 1 for y in x], lambda s, x: [y + 2 for y in x]),
        (lambda s, x: (lambda: 1)(), lambda s, x: (lambda: 2)()),
    ],
)
def test_two_lambdas_on_one_line_differ_by_their_code(one, other):
    assert not same(one, other)


def test_two_lambdas_on_one_line_differ_by_what_they_capture_by_name():
    def add(x):
        return x + 1

    def double(x):
        return 2 * x

    one, other = (lambda s, x: add(x)), (lambda s, x: double(x))
    assert not same(one, other)


def test_partial_and_bound_methods_are_unwrapped():
    class Model:
        def __init__(self, rate):
            self.rate = rate

        def merge(self, strategy, value):
            return value * self.rate

        @classmethod
        def of_class(cls, strategy):
            return cls

        @staticmethod
        def plain(strategy):
            return None

    def merge_fn(strategy, value, rate):
        return value * rate

    assert same(functools.partial(merge_fn, rate=1), functools.partial(merge_fn, rate=2))
    assert same(functools.partial(functools.partial(merge_fn), rate=1), merge_fn)
    assert same(Model(1).merge, Model(2).merge)
    assert same(functools.partial(Model(1).merge), Model.merge)
    assert same(Model(1).of_class, Model.of_class)
    assert not same(Model(1).merge, Model(1).plain)


def test_callable_objects_are_their_class():
    class Add:
        def __init__(self, by):
            self.by = by

        def __call__(self, strategy, value):
            return value + self.by

    class Subtract:
        def __call__(self, strategy, value):
            return value

    assert same(Add(1), Add(2))
    assert not same(Add(1), Subtract())


def test_wrapped_functions_are_told_apart():
    @functools.cache
    def one(strategy):
        return 1

    @functools.cache
    def other(strategy):
        return 2

    assert same(one, one)
    assert not same(one, other)


def test_builtin_functions_have_an_identity():
    assert same(max, max)
    assert not same(max, min)
    assert not same(operator.add, operator.sub)


def test_an_identity_tells_name_file_and_line():
    def merge_fn(strategy):
        return strategy

    line = merge_fn.__code__.co_firstlineno
    assert function_identity(merge_fn).text.endswith(f"merge_fn at test_callsite.py:{line}")


class Proxy:
    """Has every attribute, as proxies and recorders of calls do."""

    def __getattr__(self, name):
        return Proxy()


def test_a_file_whose_name_is_no_utf_8_has_call_sites_and_functions():
    names = {"call_site": call_site}
    for file in ("tr\udce4in.py", "tr\udcf6in.py"):
        exec(compile("def f(strategy): return call_site()", file, "exec"), names)
        names[file] = names["f"]
    one, other = names["tr\udce4in.py"], names["tr\udcf6in.py"]
    assert not same(one, other)
    assert function_identity(one).text == "f at tr\udce4in.py:1"
    sites = one(None), other(None)
    assert sites[0].digest != sites[1].digest
    assert sites[0].line == "tr\udce4in.py:1"


class CallableProxy(Proxy):
    def __call__(self, strategy):
        return None


class InheritingProxy(CallableProxy):
    def __getattr__(self, name):
        return self


@pytest.mark.parametrize("kind", [CallableProxy, InheritingProxy])
def test_a_proxy_that_has_every_attribute_has_an_identity(kind):
    """One without an address in it, which would differ between ranks."""
    assert same(kind(), kind())
    assert " at 0x" not in function_identity(kind()).text


def test_functions_that_wrap_each_other_have_an_identity():
    one, other = functools.partial(max), functools.partial(min)
    one.__wrapped__ = other
    assert same(one, max)

    class Round:
        def __init__(self):
            self.__wrapped__ = self

        def __call__(self, strategy):
            return None

    assert same(Round(), Round())
