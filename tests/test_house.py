"""docs/house.md: what it builds works, and the files that it names are there."""

import re
import shutil

import pytest

from launching import LIBRARIES, ROOT, run_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

PAGE = (ROOT / "docs/house.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_collective_that_the_page_adds_works_on_three_ranks(library, tmp_path):
    kind, method, program = re.findall(r"^```python\n(.*?)^```\n", PAGE, re.MULTILINE | re.DOTALL)
    package = tmp_path / "mpi_replica"
    shutil.copytree(ROOT / "mpi_replica", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "collectives/replica_broadcast.py").write_text(kind, encoding="utf-8")
    context = package / "replicas/replica_context.py"
    text = context.read_text(encoding="utf-8")
    place = "    def _components(self"
    assert text.count(place) == 1
    text = text.replace(place, f"{method}\n{place}")
    first = "from ..collectives.reduce import"
    assert text.count(first) == 1
    line = "from ..collectives.replica_broadcast import ReplicaBroadcast\n"
    context.write_text(text.replace(first, line + first), encoding="utf-8")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = run_ranks(library, 3, [tmp_path / "train.py"], env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_the_files_that_the_page_names_are_there():
    names = set(re.findall(r"`([\w/]+\.py)`", PAGE)) - {"collectives/replica_broadcast.py"}
    files = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")]
    assert [name for name in names if not any(f"/{f}".endswith(f"/{name}") for f in files)] == []


def test_the_methods_that_the_page_names_are_there():
    methods = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE))
    texts = [path.read_text("utf-8") for path in (ROOT / "mpi_replica").rglob("*.py")]
    missing = {
        (kind, name)
        for kind, name in methods
        if not any(
            re.search(rf"^class {kind}\b", text, re.MULTILINE)
            and re.search(rf"\bdef {name}\b|\bself\.{name}\b", text)
            for text in texts
        )
    }
    assert len(methods) > 5
    assert missing == set()
