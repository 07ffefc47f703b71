"""The programs on the pages for users run, and print what stands beside them: see pages.py."""

import re

import pytest

from launching import LIBRARIES, ONE_HOST, RANKS, ROOT, run_ranks
from pages import TEXTS, name_of, needs_arrays, programs, promised, written

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

ON_TWO_RANKS = [
    *((page, code) for page, code in programs("run") if name_of(code)),
    *programs("run on 2 ranks"),
]
RECIPES = programs("recipe")
MISTAKES = re.findall(
    r"^<!-- fails on 2 ranks -->\n```python\n(.*?)^```\n\n```text\n(.*?)^```\n",
    "\n".join(TEXTS.values()),
    re.MULTILINE | re.DOTALL,
)
TEST_FILES = programs("pytest")
MARKS = ("run", "run on 2 ranks", "recipe", "fails on 2 ranks", "pytest")


def by_name(programs):
    return [pytest.param(page, code, id=f"{page}: {name_of(code)}") for page, code in programs]


def run_on_ranks(library, ranks, code, folder):
    """Run a program in its file, with the library's own settings."""
    env = dict.fromkeys(ONE_HOST)
    file, arrays = written(code, folder), needs_arrays(code)
    return run_ranks(library, ranks, [file], cwd=folder, env=env, arrays=arrays)


def words(text):
    return " ".join(text.split())


def test_every_block_of_python_is_tried():
    for page, text in TEXTS.items():
        found = programs(*MARKS, texts={page: text})
        assert len(found) == text.count("```python") == text.count("<!--"), page
    assert len(MISTAKES) == len(programs("fails on 2 ranks")) > 0
    assert len(TEST_FILES) > 0


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in programs("run")))
def test_programs_print_what_is_shown_in_one_process(page, capsys):
    names = {}  # each program goes on where the one above it ended
    for code in [code for of_page, code in programs("run") if of_page == page]:
        exec(compile(code, page, "exec"), names)
        assert capsys.readouterr().out == promised(code) != ""


# What imports torch or JAX, which takes seconds, with one of the libraries.
@pytest.mark.parametrize(
    ("page", "code", "library"),
    [
        pytest.param(page, code, library, id=f"{page}: {name_of(code)}-{library}")
        for page, code in ON_TWO_RANKS
        for library in (LIBRARIES[-1:] if needs_arrays(code) else LIBRARIES)
    ],
)
def test_programs_that_are_files_print_the_same_on_two_ranks(page, code, library, tmp_path):
    done = run_on_ranks(library, 2, code, tmp_path)
    assert (done.returncode, done.stdout) == (0, promised(code)), done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(("page", "code"), by_name(ON_TWO_RANKS))
def test_programs_that_are_files_print_the_same_in_one_process(page, code, capsys):
    for name in ("torch", "jax"):
        if f"import {name}" in code:
            pytest.importorskip(name, reason=f"{name} is not installed")
    exec(compile(code, page, "exec"), {})
    assert capsys.readouterr().out == promised(code)


# What imports torch or JAX is on 2 ranks only in the programs above.
@pytest.mark.parametrize(
    ("page", "code", "ranks"),
    [
        pytest.param(page, code, ranks, id=f"{page}: {name_of(code)}-{ranks}")
        for page, code in RECIPES
        for ranks in ((1, 3) if needs_arrays(code) else (1, 2, 3))
        if ranks in RANKS
    ],
)
def test_a_recipe_prints_what_it_says_on_any_ranks(page, code, ranks, tmp_path):
    library = LIBRARIES[ranks % len(LIBRARIES)]
    done = run_on_ranks(library, ranks, code, tmp_path)
    assert (done.returncode, done.stdout) == (0, promised(code)), done.stderr


def test_the_sweep_goes_on_where_it_was_ended_on_another_number_of_ranks(tmp_path):
    (code,) = [code for _, code in RECIPES if name_of(code) == "sweep.py"]
    save = "        manager.save(kept.done)\n"
    assert code.count(save) == 1
    ended = run_on_ranks(
        LIBRARIES[0], 2, code.replace(save, f"{save}        raise OSError\n"), tmp_path
    )
    assert (ended.returncode != 0, ended.stdout) == (True, "")
    done = run_on_ranks(LIBRARIES[0], 3, code.replace("np.sin(x)", "np.sin(x) / 2"), tmp_path)
    # Of the first eight points, which the first job has computed.
    assert (done.returncode, done.stdout) == (0, "21 0.8910065241883678\n"), done.stderr


def test_a_recipe_has_at_most_forty_lines():
    assert [name_of(code) for _, code in RECIPES if code.count("\n") > 40] == []


@pytest.mark.parametrize(("code", "error"), MISTAKES)
def test_a_mistake_gives_the_error_that_is_shown(code, error, tmp_path):
    done = run_on_ranks(LIBRARIES[0], 2, code, tmp_path)
    assert done.returncode != 0
    # One rank reports what all of them raised.
    assert words(done.stderr).count(words(error)) == 1, done.stderr


@pytest.mark.parametrize("ranks", [ranks for ranks in (1, 2, 3) if ranks in RANKS])
@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in TEST_FILES))
def test_the_tests_pass_that_are_shown(page, ranks, tmp_path):
    for code in [code for of_page, code in TEST_FILES if of_page == page]:
        written(code, tmp_path)
    done = run_ranks(LIBRARIES[ranks % len(LIBRARIES)], ranks, ["-m", "pytest"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


def test_the_first_page_is_short():
    assert (ROOT / "README.md").stat().st_size <= 10_000


def slug(heading):
    """Return how a link names a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXTS[page]):
        name, _, place = link.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        headings = []
        if place and file.is_file():
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
        if not file.is_file() or (place and place not in map(slug, headings)):
            broken.append(link)
    assert broken == []


def test_every_page_is_linked_from_the_first_one():
    linked = re.findall(r"\]\((docs/\w+(?:-\w+)*\.md)", TEXTS["README.md"])
    assert {page for page in TEXTS if page.startswith("docs/")} <= set(linked)
