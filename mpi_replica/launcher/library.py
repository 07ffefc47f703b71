"""Which MPI library mpi4py loads, and the launcher that belongs to it.

A launcher of another library starts ranks that each see a world of one. So the library is asked
for, in a process of its own, and a launcher is taken only when it says that it is the library's.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..core.exceptions import LaunchError
from ..ranks.launch import INSTALL_ADVICE
from .processes import ask

_LIBRARY = "MPI4PY_LIBMPI"
_NAMES = {"openmpi": "Open MPI", "mpich": "MPICH"}
_SECONDS = 60

# What stands before the version, of a library or of a launcher.
_BEGINNINGS_OF_VERSIONS = {
    "openmpi": r"Open MPI v|\((?:Open MPI|OpenRTE)\) ",
    "mpich": r"\AMPICH Version:\s*|HYDRA build details:\s*Version:\s*",
}

# MPI itself is not started. Where there is no /proc the library's file stays unknown.
_PROBE = """
import json, mpi4py, os
mpi4py.rc.initialize = False
from mpi4py import MPI
try:
    with open("/proc/self/maps", "rb") as file:
        lines = [os.fsdecode(line) for line in file]
    paths = [line.split(None, 5)[5].strip() for line in lines if "/libmpi" in line]
except OSError:
    paths = []
print("\\nmpi_replica:", json.dumps([MPI.Get_library_version(), sorted(set(paths), key=len)[:1]]))
"""


class Library(NamedTuple):
    """An MPI library, as mpi4py loads it."""

    #: ``openmpi`` or ``mpich``.
    kind: str
    #: Such as ``5.0.11``.
    version: str
    #: Its file; empty where the system does not tell.
    path: str = ""

    def __str__(self) -> str:
        where = f" ({self.path})" if self.path else ""
        return f"{_NAMES[self.kind]} {self.version}{where}"


class Launcher(NamedTuple):
    """An ``mpiexec`` and the library that it belongs to."""

    library: Library
    path: str
    #: Variables by which mpi4py loads that library; none where it does so anyway.
    environment: Mapping[str, str]

    @property
    def version(self) -> tuple[int, ...]:
        """The version as numbers."""
        return tuple(int(part) for part in re.findall(r"\d+", self.library.version))


def kind_and_version(text: str) -> tuple[str, str] | None:
    r"""Returns both from the text of ``MPI_Get_library_version``, or of ``mpiexec --version``.

    Examples
    --------
    >>> kind_and_version("Open MPI v5.0.11, package: Open MPI user@localhost Distribution")
    ('openmpi', '5.0.11')
    >>> kind_and_version("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25")
    ('mpich', '5.0.2')
    >>> kind_and_version("Intel(R) MPI Library 2021.10 for Linux* OS") is None
    True
    >>> kind_and_version("mpirun (Open MPI) 5.0.11")
    ('openmpi', '5.0.11')
    >>> kind_and_version("HYDRA build details:\n    Version:           5.0.2\n")
    ('mpich', '5.0.2')
    """
    for kind, beginning in _BEGINNINGS_OF_VERSIONS.items():
        if match := re.search(rf"(?:{beginning})(\d[\w.]*)", text):
            return kind, match[1]
    return None


def find_library(environ: Mapping[str, str]) -> Library:
    """Returns the library that mpi4py loads in a process with these environment variables.

    Raises
    ------
    LaunchError
        It loads none, or one whose launcher is not known here.
    """
    try:
        done = ask([sys.executable, "-c", _PROBE], environ, _SECONDS)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"mpi4py has not loaded its MPI library within {_SECONDS} s. Look whether the file"
            " system that holds it answers, or name another library with --mpi."
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise LaunchError(f"mpi4py finds no MPI library: {last}. {INSTALL_ADVICE}")
    # What every process of this Python prints may stand before it and behind it.
    answers = re.findall(r"^mpi_replica: (.*)", done.stdout, re.MULTILINE)
    if not answers:
        raise LaunchError(
            f"{sys.executable} did not say which MPI library mpi4py loads, but {done.stdout!r}."
            " Look for what prints, or ends it, at its start, such as a sitecustomize.py."
        )
    text, paths = json.loads(answers[-1])
    known = kind_and_version(text)
    if known is None:
        first = text.strip().splitlines()[0]
        raise LaunchError(
            f"mpi4py loads {first!r}, whose launcher is not known here: only Open MPI and MPICH"
            " are. Start the program with the mpirun of that library."
        )
    return Library(*known, *paths)


def find_launcher(environ: Mapping[str, str], wanted: str | None = None) -> Launcher:
    """Returns the launcher of the library that mpi4py loads, never another one's.

    Parameters
    ----------
    environ : mapping
        Environment variables.
    wanted : str, optional
        ``openmpi``, ``mpich`` or the path of an ``mpiexec``. Where mpi4py would load another
        library, it is told to load that one.

    Raises
    ------
    LaunchError
        There is no library or no launcher, or none that belong together.
    """
    if wanted is None:
        return _launcher_of(find_library(environ), environ)
    if wanted in _NAMES:
        return _of_kind(wanted, environ)
    return _at_path(wanted, environ)


def _launcher_of(library: Library, environ: Mapping[str, str]) -> Launcher:
    others = []
    for path in _launchers(library.kind, library.path, environ):
        version = _version_of(path, environ)
        if version == (library.kind, library.version):
            return Launcher(library, path, {})
        what = version if isinstance(version, str) else f"is of {_words(version)}"
        others.append(f"{path} {what}")
    candidates = "; ".join(others) or "there is no mpiexec at all"
    raise LaunchError(
        f"mpi4py loads {library}, and its launcher was not found: {candidates}. A launcher of"
        " another library starts ranks that each see a world of one. Put the right mpiexec on the"
        f" PATH (load its module), name it with --mpi PATH, or set {_LIBRARY} to the libmpi.so of"
        " the launcher that is there. Where one fails, mend what it says: HOME is unset, say."
    )


def _of_kind(kind: str, environ: Mapping[str, str]) -> Launcher:
    try:
        library = find_library(environ)
        if library.kind == kind:
            return _launcher_of(library, environ)
        problem = f"mpi4py loads {library}"
    except LaunchError as error:
        problem = str(error)
    for path in _launchers(kind, "", environ):
        version = _version_of(path, environ)
        if version[0] == kind:
            return _at_path(path, environ)
    raise LaunchError(
        f"{_NAMES[kind]} was asked for (--mpi {kind}), but {problem}, and no mpiexec of"
        f" {_NAMES[kind]} is beside {sys.executable} or on the PATH. Name it with --mpi PATH, or"
        " use the Python environment in which that library is installed."
    )


def _at_path(path: str, environ: Mapping[str, str]) -> Launcher:
    version = _version_of(path, environ)
    if isinstance(version, str):
        raise LaunchError(
            f"--mpi {path!r} is neither openmpi nor mpich, nor the path of an mpiexec of one of"
            f" them that runs here: it {version}."
        )
    # What mpi4py loads anyway comes first, then what is installed with this launcher.
    tried = []
    for file in ("", *_libraries_beside(path)):
        added = {_LIBRARY: file} if file else {}
        try:
            library = find_library({**environ, **added})
        except LaunchError as error:
            tried.append(str(error))
            continue
        if (library.kind, library.version) == version:
            return Launcher(library, path, added)
        tried.append(f"mpi4py loads {library}")
    raise LaunchError(
        f"{path} is the launcher of {_words(version)}, but {tried[0]}. Set {_LIBRARY} to the"
        " libmpi.so that belongs to the launcher, or leave --mpi out."
    )


def _launchers(kind: str, library: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the paths of launchers: beside the library, beside Python, and on the path."""
    names = ["mpiexec", f"mpiexec.{kind}", "mpirun"]
    folders = [parent / "bin" for parent in list(Path(library).parents)[:5]] if library else []
    folders.append(Path(sys.prefix) / "bin")
    folders += [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    found = (shutil.which(name, path=str(folder)) for folder in folders for name in names)
    return list(dict.fromkeys(filter(None, found)))


def _libraries_beside(launcher: str) -> Iterator[str]:
    """Yields the files of MPI libraries that are installed where a launcher is."""
    for start in dict.fromkeys([os.path.abspath(launcher), os.path.realpath(launcher)]):
        prefix = Path(start).parent.parent
        for pattern in ("lib/libmpi*.so.*", "lib64/libmpi*.so.*", "lib/*-linux-*/libmpi*.so.*"):
            for path in sorted(glob.glob(str(prefix / pattern))):
                # That for the common ABI has another interface, and others another language.
                if re.fullmatch(r"libmpi(ch)?\.so\.\d+", os.path.basename(path)):
                    yield path


def _version_of(launcher: str, environ: Mapping[str, str]) -> tuple[str, str] | str:
    """Returns kind and version of a launcher's library; why not, where it says no known one."""
    try:
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = ask([launcher, "--version"], {**environ, **as_root})
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"can't be asked for its version: {error}"
    if version := kind_and_version(done.stdout):
        return version
    if done.returncode == 0:
        return "is of an unknown kind"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip("- ")]  # no rulers
    what = said[0] if said else f"status {done.returncode}"
    return f"fails when it is asked for its version ({what})"


def _words(version: tuple[str, str]) -> str:
    return f"{_NAMES[version[0]]} {version[1]}"
