"""The pages for users: README.md and those in docs, as the tests read them.

A program is a block of python after a mark. ``<!-- run -->`` ends well, and goes on where the one
above it on the page ended; where its first line names a file, it also runs alone on two ranks.
``<!-- run on 2 ranks -->`` stands alone, ``<!-- recipe -->`` too, on one to three ranks.
``<!-- fails on 2 ranks -->`` does not end well: the block of text behind it is the beginning of its
error. The comment after a print is what it prints. After ``<!-- pytest -->`` stand files
of a project with tests.
"""

import re

from launching import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}

# tests/test_house.py builds a collective from its blocks.
del TEXTS["docs/house.md"]

_BLOCK = re.compile(r"^<!-- ([\w ]+) -->\n```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def programs(*marks, texts=TEXTS):
    """Return the programs behind these marks, by page and first line, in their order."""
    return [
        (page, code)
        for page, text in texts.items()
        for mark, code in _BLOCK.findall(text)
        if mark in marks
    ]


def name_of(code):
    """Return the file that the first line of a program names, or None."""
    found = re.match(r"# ([\w/]+\.py)\n", code)
    return found and found[1]


def needs_arrays(code):
    """Return whether a program needs torch or JAX."""
    return "import torch" in code or "import jax" in code


def written(code, folder):
    """Return the file that the first line names, with the code in it."""
    file = folder / name_of(code)
    file.write_text(code, encoding="utf-8")
    return file


def promised(code):
    """Return what a program prints, by the comments after its prints."""
    texts = re.findall(r"^ *print\(.*\)  # (.*)\n", code, re.MULTILINE)
    assert len(texts) == code.count("print("), code
    return "".join(f"{text}\n" for text in texts)
