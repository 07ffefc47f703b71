"""The programs in README.md run, and print what stands beside them.

A program is a block of python after a mark: ``<!-- run -->`` ends well, and goes on where the one
above it ended; so does ``<!-- run on 2 ranks -->``, alone. ``<!-- fails on 2 ranks -->`` does not.
The comment after a print is what it prints. The block of text behind a program that fails is the
beginning of its error. After ``<!-- pytest on 2 ranks -->`` stand files of a project with tests.
"""

import re

import pytest

from launching import LIBRARIES, ONE_HOST, ROOT, run_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAM = re.compile(r"^<!-- run -->\n```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
ON_RANKS = re.compile(r"^<!-- run on 2 ranks -->\n```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
MISTAKE = re.compile(
    r"^<!-- fails on 2 ranks -->\n```python\n(.*?)^```\n\n```text\n(.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)
TEST_FILE = re.compile(
    r"^<!-- pytest on 2 ranks -->\n```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL
)
PROGRAMS = PROGRAM.findall(README)
PROGRAMS_ON_RANKS = [PROGRAMS[0], *ON_RANKS.findall(README)]
MISTAKES = MISTAKE.findall(README)
TEST_FILES = TEST_FILE.findall(README)


def promised(code):
    """Return what a program prints, by the comments after its prints."""
    texts = re.findall(r"^ *print\(.*\)  # (.*)\n", code, re.MULTILINE)
    assert len(texts) == code.count("print("), code
    return "".join(f"{text}\n" for text in texts)


def written(code, folder):
    """Return the file that the first line names, with the code in it."""
    file = folder / re.match(r"# (\w+\.py)\n", code)[1]
    file.write_text(code, encoding="utf-8")
    return file


def run_on_two_ranks(code, folder, library):
    """Run a program, in the file that its first line names, with the library's own settings."""
    env = dict.fromkeys(ONE_HOST)
    return run_ranks(library, 2, [written(code, folder)], cwd=folder, env=env)


def words(text):
    return " ".join(text.split())


def test_every_block_of_python_is_tried():
    found = len(PROGRAMS + PROGRAMS_ON_RANKS[1:]) + len(MISTAKES) + len(TEST_FILES)
    assert found == README.count("```python") == README.count("<!--")
    assert PROGRAMS
    assert MISTAKES
    assert len(TEST_FILES) == 2


def test_programs_print_what_is_shown_in_one_process(capsys):
    names = {}  # each program goes on where the one above it ended
    for code in PROGRAMS:
        exec(compile(code, "README.md", "exec"), names)
        assert capsys.readouterr().out == promised(code) != ""


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("code", PROGRAMS_ON_RANKS, ids=lambda code: code.partition("\n")[0])
def test_programs_that_are_files_print_the_same_on_two_ranks(code, library, tmp_path):
    done = run_on_two_ranks(code, tmp_path, library)
    assert (done.returncode, done.stdout) == (0, promised(code)), done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("code", PROGRAMS_ON_RANKS, ids=lambda code: code.partition("\n")[0])
def test_programs_that_are_files_print_the_same_in_one_process(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == promised(code)


@pytest.mark.parametrize(("code", "error"), MISTAKES)
def test_a_mistake_gives_the_error_that_is_shown(code, error, tmp_path):
    done = run_on_two_ranks(code, tmp_path, LIBRARIES[0])
    assert done.returncode != 0
    # One rank reports what all of them raised.
    assert words(done.stderr).count(words(error)) == 1, done.stderr


def test_the_tests_pass_that_are_shown(tmp_path):
    for code in TEST_FILES:
        written(code, tmp_path)
    done = run_ranks(LIBRARIES[0], 2, ["-m", "pytest"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
