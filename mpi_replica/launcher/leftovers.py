"""What jobs whose processes were killed leave on a host: shared memory, and folders of sessions.

The MPI libraries remove their files when a process ends, and SIGKILL lets none of them do so. As
measured with Open MPI 5.0.11 and MPICH 5.0.2, a segment of MPICH stays wherever a rank is killed,
and all of Open MPI where its launcher is.

This file is also run as a script, on every host of a job, and imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator

#: What it prints as a script: so it is known that its host answers.
ANSWER = "the host answers"

_FOLDERS = ("/dev/shm", "/tmp")  # and TMPDIR, but MPICH's launcher takes no other

# Segments of Open MPI have the host in their names, those of MPICH and UCX have not. Of windows, of
# UCX, and open_mpi.0000, by which Open MPI sees that there is room, only those stay whose maker is
# killed within the moment until they lose their names.
# The number of a session is the process of the launcher, or of its helper on another host. A rank
# that finds none any more makes a folder in ompi.HOST.USER, which all jobs of the user share.
# A topology tells ranks that start what the host is made of.
_LEFTOVER = re.compile(
    r"(?:sm_segment|vader_segment|osc_sm|osc_rdma|osc_ucx)\.(?P<host>.+?)\.[0-9a-f.]+"
    r"|open_mpi\.\d{4}|mpich_shm_[0-9a-f]+_\d+|mpich_(?:s_)?shar_tmp\w{6}|ucx_shm_posix_[0-9a-f]+"
    r"|(?:ompi|prted)\.(?P<session>\d+)|ompi\.(?P<host_of_ranks>.+)\.\d+"
    r"|(?P<topology>hydra_hwloc_xmlfile_\w{6})"
)

# A topology is open for moments only, and the folders of ranks are not: who may have made them
# counts, a program or all that have loaded Open MPI.
_MAKERS = {"topology": b"hydra_pmi_proxy", "host_of_ranks": b"libopen-pal"}

# Names of all these, and of the makers, in the paths of what a process holds.
_HELD = re.compile(
    rb"/((?:sm_seg|vader_seg|osc_|open_mpi\.|mpich_s|ucx_shm|hydra_)[\w.-]*|(?:ompi|prted)\.\d+"
    rb"|libopen-pal)"
)

# Processes that a user may not look into, though they are the user's; and they are no ranks.
_HIDDEN = {"sshd", "sshd-session", "(sd-pam)", "ssh-agent"}
_FIRST_PROCESS = "/proc/1"  # neither is this one, which root may not where root has lost rights


def remove_leftovers(since: float) -> list[str]:
    """Removes what dead processes of this user have left on this host.

    A process that makes such a file has it open or mapped from then on. So what is there before
    all processes are looked at, and held by none of them, is of the dead. The parent of this one
    does not count: it is no rank, and the launcher of MPICH where this is a script.

    Some living ones can't be seen from here: in another container that shares the memory, on
    another host that shares the folder. What names another host is theirs. What names none may
    be: so all stays that is older than the caller's job, also what earlier jobs have left.

    Parameters
    ----------
    since : float
        When the caller's job began, as `time.time` tells it: what is older stays.

    Returns
    -------
    list of str
        What was removed. Nothing is where there is no /proc, or a process may not be looked into.
    """
    found = list(_candidates(since))
    held = _held_names() if found else None
    if held is None:
        return []
    removed = []
    for path, match in found:
        if _MAKERS.get(match.lastgroup or "", os.fsencode(match[0])) in held:
            continue
        with contextlib.suppress(OSError):  # another process was faster, or the folder is not ours
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
            removed.append(path)
            if match["host_of_ranks"]:
                for folder in (os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
                    os.rmdir(folder)  # as ranks do with those that are empty
    return removed


def _candidates(since: float) -> Iterator[tuple[str, re.Match[str]]]:
    """Yields paths, and the match of the name: of this user and host, not older than `since`."""
    host = os.uname().nodename
    own = {host, host.partition(".")[0]}
    for folder in {os.path.realpath(os.environ.get("TMPDIR") or _FOLDERS[0]), *_FOLDERS}:
        with contextlib.suppress(OSError):
            for match in map(_LEFTOVER.fullmatch, os.listdir(folder)):
                if match is not None:
                    paths = [os.path.join(folder, match[0])]
                    if match["host_of_ranks"]:
                        paths = glob.glob(f"{glob.escape(paths[0])}/jf.*/*")
                    for path in paths:
                        if _is_dead_if_free(path, match, since) and _hosts(path, match) <= own:
                            yield path, match


def _is_dead_if_free(path: str, match: re.Match[str], since: float) -> bool:
    """Returns whether it is this user's, of the job's time, and no living process's session."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    if status.st_uid != os.geteuid() or status.st_mtime < since:
        return False
    if match["host_of_ranks"] or match["session"]:
        is_alive = match["session"] and _is_alive(f"/proc/{match['session']}")
        return stat.S_ISDIR(status.st_mode) and not is_alive
    return stat.S_ISREG(status.st_mode)


def _hosts(path: str, match: re.Match[str]) -> set[str]:
    """Returns the hosts that it names; an empty name where it should, and does not."""
    text, pattern = "", r"^pmix\.(.+?)\.tool"
    with contextlib.suppress(OSError):
        if match["session"]:
            text = "\n".join(os.listdir(path))
        elif match["topology"]:
            pattern = r'name="HostName" value="([^"]+)"'
            text = _read(path)
        else:
            return {match["host"], match["host_of_ranks"]} - {None}
    return set(re.findall(pattern, text, re.MULTILINE)) or {""}


def _held_names() -> set[bytes] | None:
    """Returns the names of what this user's processes hold; None where that can't be known."""
    held: set[bytes] = set()
    user = os.geteuid()
    folders = set(glob.glob("/proc/[0-9]*")) - {f"/proc/{os.getppid()}"}
    for folder in folders:
        try:
            # What is another user's, only processes of that user or of root can hold.
            if user in (0, os.stat(folder).st_uid):
                # In this order: what is mapped and then closed is found twice, or once.
                held.update(_HELD.findall(b"\n".join(_links(folder))))
                with open(f"{folder}/maps", "rb") as file:
                    held.update(_HELD.findall(file.read()))
        except PermissionError:
            if folder != _FIRST_PROCESS and _read(f"{folder}/comm").strip() not in _HIDDEN:
                return None
        except OSError:
            continue  # it has ended meanwhile
    return held if folders else None


def _links(folder: str) -> Iterator[bytes]:
    """Yields the paths of a process's open files and of its working directory."""
    names = ["cwd"]
    with contextlib.suppress(OSError):
        names += [f"fd/{name}" for name in os.listdir(f"{folder}/fd")]
    for name in names:
        with contextlib.suppress(OSError):
            yield os.readlink(f"{folder}/{name}".encode())


def _is_alive(folder: str) -> bool:
    """Returns whether a process is there, and is more than an entry that nobody has read."""
    state = _read(f"{folder}/stat").rpartition(")")[2].split()[:1]
    return state not in ([], ["Z"], ["X"])


def _read(path: str) -> str:
    """Returns what a file says; nothing where it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    remove_leftovers(float(sys.argv[1]))
    sys.stdout.write(f"{ANSWER}\n")
