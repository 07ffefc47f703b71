"""The tests in tests/ranks, on several ranks, with each MPI library."""

import re

import pytest

from launching import LIBRARIES, ONE_HOST, RANKS, run_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks(library, ranks):
    done = run_ranks(
        library,
        ranks,
        # The cache is one folder, which all ranks would write.
        ["-m", "pytest", "--only-mpi", "--color=no", "-p", "no:cacheprovider", "tests/ranks"],
        timeout_seconds=600,
        env=ONE_HOST,
    )
    wrong = []
    if done.returncode != 0:
        wrong.append(f"return code {done.returncode}")
    # pytest also returns 0 when all tests are skipped.
    summaries = re.findall(r"^=* ?(?:.*, )?(\d+) passed.* in [\d.]+s", done.stdout, re.MULTILINE)
    if len(summaries) != 1:
        wrong.append(f"{len(summaries)} reports of tests that passed, where rank 0 writes one")
    # From pytest-mpi. Ranks that a launcher of another library started are each alone.
    if f"size: {ranks}\n" not in done.stdout:
        wrong.append(f"no world of size {ranks}")
    if wrong:
        pytest.fail(f"{'; '.join(wrong)}\n{done.stdout}\n{done.stderr}", pytrace=False)
