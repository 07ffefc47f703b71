"""One trace of several hosts, of which one has a clock that is hours ahead and runs too fast."""

import json

import numpy as np
import pytest

import trace_format
from hosts.namespaces import HOSTS, write_hostfile
from launching import LIBRARIES, ROOT

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself


@pytest.mark.parametrize("library", LIBRARIES)
def test_clocks_of_hosts_come_out_within_the_bound_that_is_told(library, network, tmp_path):
    path = tmp_path / "trace.json.gz"
    write_hostfile(library, tmp_path / "hosts", dict.fromkeys(HOSTS, 1))
    words = ["--hostfile", tmp_path / "hosts", "-n", len(HOSTS), "--trace", path]
    words += [ROOT / "tests" / "traced" / "late.py", tmp_path]
    done = network.run_command(library, *words)
    assert done.returncode == 0, done.stderr
    trace = trace_format.read(path)
    trace_format.check(trace)
    told = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("told-*.json"))]
    trace_format.check_clocks(trace, np.array(told))
    ranks = trace_format.summary(trace)["ranks"]
    assert [rank["name"].partition("(")[2].partition(",")[0] for rank in ranks] == [*HOSTS]
