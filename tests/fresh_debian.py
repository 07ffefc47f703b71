"""A fresh Debian, to install in what a test needs.

Environment variables
---------------------
MPI_REPLICA_TEST_ROOT
    A folder that ``debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates
    bookworm FOLDER`` has made. It stays as it is. Without it, or without root, tests are skipped.
"""

import faulthandler
import os
import subprocess
from pathlib import Path

import pytest

__all__ = ["ROOT_PATH", "FreshDebian"]

ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LIMIT_SECONDS = 570

# Runs a line of bash as a user in a fresh Debian. What it writes goes to a folder beside it.
ENTER = """
set -euo pipefail
fresh=$1 folder=$2 user=$3 line=$4 root=$2/root shared=("${@:5}")
mkdir -p "$folder"/{written,work,root}
mount -t overlay overlay -o "lowerdir=$fresh,upperdir=$folder/written,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for file in /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt; do
    mkdir -p "$root${file%/*}"
    touch "$root$file"
    mount --bind "$file" "$root$file"
done
for path in "${shared[@]}"; do
    mkdir -p "$root$path"
    mount --rbind "$path" "$root$path"
done
ip link set lo up
exec chroot --userspec="$user" "$root" bash -c "$line"
"""


class FreshDebian:
    """A copy of the fresh Debian, which keeps what is written in it.

    Parameters
    ----------
    folder : path
        Where it is written.
    shared : sequence of path
        Folders of this machine that it has, too, at the same paths.
    """

    def __init__(self, folder, shared=()):
        self._fresh = os.environ.get("MPI_REPLICA_TEST_ROOT")
        if not self._fresh:
            pytest.skip("MPI_REPLICA_TEST_ROOT names no fresh Debian to install in")
        if os.geteuid() != 0:
            pytest.skip("only root may enter a fresh Debian")
        self._folder = folder
        self._shared = shared

    def path(self, path):
        """Return where a file lies that is written to this absolute path."""
        return self._folder / "written" / Path(path).relative_to("/")

    def run(self, line, *, user="0:0", has_network=False, variables=None):
        """Run a line of bash; without the network its host has only itself, and a name of its own.

        All that it leaves running ends with it.
        """
        faulthandler.cancel_dump_traceback_later()  # pytest's limit is too short
        spaces = ["--mount", "--pid", "--uts", "--fork", "--kill-child"]
        if not has_network:
            spaces.append("--net")
        enter = ["bash", "-c", ENTER, "enter", self._fresh, self._folder, user, line]
        return subprocess.run(
            ["unshare", *spaces, *enter, *map(str, self._shared)],
            env={"HOME": "/root", "PATH": ROOT_PATH} | (variables or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
        )
