"""A host that the others can't reach any more, in the middle of a job."""

import re
import socket

import pytest

from hosts.namespaces import FOLDER, HOSTS
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

PATIENCE_SECONDS = 60


class Lines:
    """A line to each rank of a job, which shows the end of its process, too."""

    def __init__(self, path, ranks):
        self._ranks = ranks
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(ranks)
        self._lines = []
        self.told = []

    def wait_for_all(self):
        """Return when all ranks wait for the cut."""
        self._listener.settimeout(PATIENCE_SECONDS)
        for _ in range(self._ranks):
            line, _ = self._listener.accept()
            line.settimeout(PATIENCE_SECONDS)
            self._lines.append(line)
        for line in self._lines:
            assert line.recv(6) == b"ready\n"

    def let_go_on(self):
        """Return when the processes of all ranks have ended, with `told` by each."""
        for line in self._lines:
            line.sendall(b"x")
        for line in self._lines:
            with line.makefile() as text:  # up to its end
                self.told.append(text.read())

    def close(self):
        for one in (self._listener, *self._lines):
            one.close()


@pytest.mark.parametrize(("where", "ranks_per_host"), [("call", 1), ("call", 2), ("data", 1)])
@pytest.mark.parametrize("library", LIBRARIES)
def test_with_a_timeout_every_rank_ends_with_the_error_on_both_sides_of_a_cut(
    library, where, ranks_per_host, network, tmp_path
):
    """The `mpirun` of Open MPI itself ends when the link is back."""
    ranks = ranks_per_host * len(HOSTS)
    lines = Lines(tmp_path / "socket", ranks)

    def cut(launcher):
        lines.wait_for_all()
        network.cut("node2")
        lines.let_go_on()
        network.mend("node2")

    try:
        done = network.run_on_hosts(
            library,
            ranks_per_host,
            [FOLDER / "lost_link.py", tmp_path / "socket", where, "2"],
            meanwhile=cut,
            mostly_waiting=True,
        )
    finally:
        lines.close()
    assert done.returncode != 0
    for rank, text in enumerate(sorted(lines.told)):
        assert text.startswith(f"rank {rank} CollectiveTimeoutError: all_reduce(SUM, float64"), text
        missing = re.findall(
            r"missing: .* \(rank (\d), host (\S+), pid \d+\) does not answer:"
            r" the process is stopped, its host can't be reached,",
            text,
        )
        is_cut_off = [HOSTS[other // ranks_per_host] == "node2" for other in range(ranks)]
        lost = [other for other in range(ranks) if is_cut_off[other] != is_cut_off[rank]]
        assert missing == [(str(other), HOSTS[other // ranks_per_host]) for other in lost], text
