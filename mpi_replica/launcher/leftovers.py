"""What jobs whose processes were killed leave on a host: shared memory, and folders of sessions.

The MPI libraries remove their files when a process ends, and SIGKILL lets none of them do so. As
measured with Open MPI 5.0.11 and MPICH 5.0.2, a segment of MPICH stays wherever a rank is killed,
and all of Open MPI where its launcher is.

This file imports nothing of the package: it also runs where that is not loaded yet.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator

_SHARED_MEMORY = "/dev/shm"
_TEMPORARY = "/tmp"  # MPICH's launcher takes no other

# What has no host in its name is of MPICH and UCX, or tries whether there is room. Segments of
# windows, and of UCX, stay where a process is killed just while it makes one.
_SEGMENT = (
    r"(?:sm_segment|vader_segment|osc_sm|osc_rdma|osc_ucx)\.(?P<host>.+?)\.[0-9a-f.]+"
    r"|open_mpi\.\d{4}|mpich_shm_[0-9a-f]+_\d+|mpich_(?:s_)?shar_tmp\w{6}|ucx_shm_posix_[0-9a-f]+"
)
# The number is that of the launcher, or of its helper on another host. In ompi.HOST.USER it would
# be the user's, whose jobs all have this folder.
_SESSION = r"(?:ompi|prted)\.(?P<pid>\d+)"
# What the host is made of, for ranks that start. It is open for moments: its maker counts.
_TOPOLOGY = r"hydra_hwloc_xmlfile_\w{6}"
_TOPOLOGY_MAKER = b"hydra_pmi_proxy"

# Names of all these, and of the maker, in the paths of what a process holds.
_HELD = re.compile(
    rb"/((?:sm_seg|vader_seg|osc_|open_mpi\.|mpich_s|ucx_shm|hydra_)[\w.-]*|(?:ompi|prted)\.\d+)"
)

# Processes that a user may not look into, though they are the user's; and they are no ranks.
_HIDDEN = {"sshd", "sshd-session", "(sd-pam)", "ssh-agent"}
_FIRST_PROCESS = "/proc/1"  # neither is this one, which root may not where root has lost rights


def remove_leftovers(since: float) -> list[str]:
    """Removes what dead processes of this user have left on this host.

    A process that makes such a file has it open or mapped from then on. So what is there before
    all processes are looked at, and held by none of them, is of the dead.

    Some living ones can't be seen from here: in another container that shares the memory, on
    another host that shares the folder. What names another host is theirs. What names none is
    kept where it is older than the job of the caller: an older job's segment would not be told
    from that of a job that runs on, in another container.

    Parameters
    ----------
    since : float
        When the caller's job began, as `time.time` tells it: what is older stays.

    Returns
    -------
    list of str
        What was removed. Nothing is where there is no /proc, or a process may not be looked into.
    """
    hosts = {os.uname().nodename, os.uname().nodename.partition(".")[0]}
    found = list(_candidates(hosts, since))
    held = _held_names() if found else None
    if held is None:
        return []
    removed = []
    for path in found:
        name = os.path.basename(path)
        if name.encode() in held:
            continue
        if re.fullmatch(_TOPOLOGY, name) and _TOPOLOGY_MAKER in held:
            continue
        with contextlib.suppress(OSError):  # another process was faster, or the folder is not ours
            if re.fullmatch(_SESSION, name):
                shutil.rmtree(path)
            else:
                os.unlink(path)
            removed.append(path)
    return removed


def _candidates(hosts: set[str], since: float) -> Iterator[str]:
    """Yields what has a known name, is of this user and host, and is not older than `since`."""
    for path, match in _entries(_SHARED_MEMORY, _SEGMENT, stat.S_ISREG, since):
        if match["host"] is None or match["host"] in hosts:
            yield path
    for folder in {_TEMPORARY, os.path.realpath(os.environ.get("TMPDIR") or _TEMPORARY)}:
        for path, match in _entries(folder, _SESSION, stat.S_ISDIR, since):
            if not os.path.exists(f"/proc/{match['pid']}") and _hosts_of_session(path) <= hosts:
                yield path
        for path, _ in _entries(folder, _TOPOLOGY, stat.S_ISREG, since):
            if _host_of_topology(path) in hosts:
                yield path


def _entries(
    folder: str, pattern: str, is_kind: Callable[[int], bool], since: float
) -> Iterator[tuple[str, re.Match[str]]]:
    """Yields the paths of this user's entries of a folder, with the match of their names."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            match = re.fullmatch(pattern, name)
            if match is None:
                continue
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                is_mine = status.st_uid == os.geteuid() and is_kind(status.st_mode)
                if is_mine and status.st_mtime >= since:
                    yield path, match


def _hosts_of_session(path: str) -> set[str]:
    """Returns the hosts that a session's folder names; an empty name where it can't be told."""
    names = []
    with contextlib.suppress(OSError):
        names = os.listdir(path)
    matches = [re.fullmatch(r"pmix\.(.+?)\.tool.*", name) for name in names]
    return {match[1] for match in matches if match is not None} or {""}


def _host_of_topology(path: str) -> str:
    """Returns the host that a file of MPICH's launcher describes; empty where it does not tell."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            match = re.search(r'name="HostName" value="([^"]+)"', file.read())
    except OSError:
        return ""
    return "" if match is None else match[1]


def _held_names() -> set[bytes] | None:
    """Returns the names of what this user's processes hold; None where that can't be known."""
    held: set[bytes] = set()
    user = os.geteuid()
    folders = glob.glob("/proc/[0-9]*")
    for folder in folders:
        try:
            # What is another user's, only processes of that user or of root can hold.
            if user in (0, os.stat(folder).st_uid):
                # In this order: what is mapped and then closed is found twice, or once.
                held.update(_HELD.findall(b"\n".join(_links(folder))))
                with open(f"{folder}/maps", "rb") as file:
                    held.update(_HELD.findall(file.read()))
        except PermissionError:
            if folder != _FIRST_PROCESS and _name_of(folder) not in _HIDDEN:
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


def _name_of(folder: str) -> str:
    try:
        with open(f"{folder}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""
