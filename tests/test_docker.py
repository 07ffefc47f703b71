"""The image in docker/: its entry point, and what is written in Dockerfile and compose.yaml.

What Docker would do is done in a copy of a fresh Debian, where there is one: see fresh_debian.py.
It takes a network and a minute or two.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fresh_debian import ROOT_PATH, FreshDebian
from launching import ROOT

pytestmark = pytest.mark.mpi_skip  # it starts programs that must not be ranks themselves

DOCKER = ROOT / "docker"
ENTRYPOINT = DOCKER / "entrypoint.sh"
IN_IMAGE = Path("/opt/mpi_replica")  # the checkout


def instructions():
    """Return (instruction, arguments) of the lines of the Dockerfile."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def in_checkout(path):
    """Return the file of the checkout that has this path in the image."""
    return ROOT / Path(path).relative_to(IN_IMAGE)


def test_the_image_runs_as_a_user_and_all_its_programs_are_there():
    said = dict(instructions())
    assert said["FROM"].startswith("python:3.")
    assert "-slim" in said["FROM"]
    assert said["COPY"] == f". {IN_IMAGE}"
    assert said["USER"].split(":")[0] == "1000"  # a number: Kubernetes can't look a name up
    assert "ADD" not in said
    assert "EXPOSE" not in said
    tini, separator, entrypoint = json.loads(said["ENTRYPOINT"])
    assert (tini, separator) == ("/usr/bin/tini", "--")
    (demo,) = json.loads(said["CMD"])
    for program in (said["RUN"], entrypoint, demo):
        assert os.access(in_checkout(program), os.X_OK), program
    order = [instruction for instruction, _ in instructions()]
    assert order.index("RUN") < order.index("USER")  # it installs as root


def test_only_what_is_installed_goes_into_the_image():
    kept = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in kept
    allowed = {ROOT / line[1:] for line in kept if line.startswith("!")}
    needed = {DOCKER / "install.sh", ENTRYPOINT, ROOT / "scripts", ROOT / "mpi_replica"}
    assert needed <= allowed
    assert all(path.exists() for path in allowed)
    assert not any(path.name.startswith(".") for path in allowed)


def test_the_cluster_of_containers_publishes_nothing_and_shares_only_keys():
    said = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    head, worker = said["services"]["head"], said["services"]["worker"]
    assert set(said["services"]) == {"head", "worker"}
    for host in (head, worker):
        assert "ports" not in host
        assert host["volumes"] == ["keys:/home/mpiuser/.ssh"]
        assert host["networks"] == ["ranks"]
        assert host["cap_drop"] == ["ALL"]
        assert (DOCKER / host["build"]["context"] / host["build"]["dockerfile"]).is_file()
    assert said["networks"] == {"ranks": {"internal": True}}
    assert worker["command"] == ["worker"]
    assert head["depends_on"] == {"worker": {"condition": "service_healthy"}}
    assert "/2222" in worker["healthcheck"]["test"][-1]
    (demo,) = head["command"]
    assert "-n 4 " in in_checkout(demo).read_text()
    assert head["environment"]["MPI_WORKERS"] == "worker"
    assert worker["deploy"]["replicas"] * int(head["environment"]["MPI_SLOTS"]) == 4


def shell(home, line, **variables):
    """Start a line of bash that may call the functions of the entry point."""
    paths = {"HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", "-c", f"source {shlex.quote(str(ENTRYPOINT))}\n{line}"],
        env=paths | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Return what it prints, if it ends well."""
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    return out


@pytest.fixture
def home(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ssh").mkdir(mode=0o700)
    return tmp_path


def write_getent(home, body):
    file = home / "bin" / "getent"
    file.write_text(f"#!/usr/bin/env bash\n{body}\n")
    file.chmod(0o755)


def test_the_hostfile_has_each_host_of_the_network_once_in_order(home):
    lines = ["172.18.0.10 STREAM worker", "172.18.0.10 DGRAM", "172.18.0.3 STREAM worker"]
    write_getent(home, f'[[ "$*" == "ahostsv4 worker" ]] && printf "%s\\n" {shlex.join(lines)}')
    out = finish(shell(home, "write_hostfile worker 2"))
    assert out == "172.18.0.3 slots=2\n172.18.0.10 slots=2\n"


def test_a_name_without_hosts_is_an_error(home):
    write_getent(home, "exit 2")
    process = shell(home, "main true", MPI_WORKERS="worker")
    process.communicate(timeout=30)
    assert process.returncode == 2


def needs(program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt-get install openssh-client")


def test_containers_that_start_at_once_make_one_key(home):
    needs("ssh-keygen")
    for process in [shell(home, "make_key") for _ in range(4)]:
        finish(process)
    public = (home / ".ssh" / "id_ed25519.pub").read_text()
    assert (home / ".ssh" / "authorized_keys").read_text() == public
    made = {path.name for path in (home / ".ssh").iterdir()}
    assert made == {".lock", "authorized_keys", "id_ed25519", "id_ed25519.pub"}

    finish(shell(home, "make_key"))
    assert (home / ".ssh" / "id_ed25519.pub").read_text() == public


def test_hosts_are_known_and_let_in_by_the_key_alone(home):
    needs("ssh-keygen")
    finish(shell(home, "make_key; write_ssh_files"))
    kind, key, _ = (home / ".ssh" / "id_ed25519.pub").read_text().split()
    assert (home / ".known_hosts").read_text() == f"* {kind} {key}\n"
    lines = (home / ".sshd_config").read_text().splitlines()
    options = dict(line.split(maxsplit=1) for line in lines)
    assert options["Port"] == "2222"
    assert options["HostKey"] == str(home / ".ssh" / "id_ed25519")
    assert options["AuthorizedKeysFile"] == str(home / ".ssh" / "authorized_keys")
    assert options["AuthenticationMethods"] == "publickey"
    assert options["PasswordAuthentication"] == "no"
    assert options["KbdInteractiveAuthentication"] == "no"
    assert options["DisableForwarding"] == "yes"


def test_keys_of_the_mpi_operator_are_taken_as_they_are(home):
    """It mounts id_rsa, id_rsa.pub and authorized_keys, of whatever kind the key is."""
    for name in ("id_rsa.pub", "authorized_keys"):
        (home / ".ssh" / name).write_text("ecdsa-sha2-nistp521 AAAA comment\n")
    finish(shell(home, "write_ssh_files"))
    assert (home / ".known_hosts").read_text() == "* ecdsa-sha2-nistp521 AAAA\n"
    assert f"HostKey {home}/.ssh/id_rsa\n" in (home / ".sshd_config").read_text()


# It ends as a program does whose ranks have saved.
WAITS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("waits for a signal", flush=True)
signal.sigwait([signal.SIGUSR1])
raise SystemExit(75)
"""


def test_a_container_that_is_to_end_has_its_ranks_save(home):
    with subprocess.Popen(
        ["bash", ENTRYPOINT, "launch", sys.executable, "-c", WAITS],
        env=os.environ | {"HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    ) as container:
        assert container.stdout.readline() == "waits for a signal\n"
        container.send_signal(signal.SIGTERM)
        assert container.wait(timeout=30) == 75


@pytest.mark.parametrize("status", [0, 3])
def test_a_container_ends_with_the_status_of_its_program(home, status):
    for mode in ("launch", "env"):
        command = ["bash", ENTRYPOINT, mode, "bash", "-c", f"exit {status}"]
        done = subprocess.run(command, env=os.environ | {"HOME": str(home)}, timeout=30)
        assert done.returncode == status


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Return a function that runs a line of bash in what Docker would build."""
    debian = FreshDebian(tmp_path_factory.mktemp("image"))
    said = dict(instructions())
    checkout = debian.path(IN_IMAGE)
    for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):
            (checkout / line[1:]).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / line[1:]).is_dir() else shutil.copy2
            copy(ROOT / line[1:], checkout / line[1:])
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = debian.run(said["RUN"], has_network=True, variables=pip)
    assert done.returncode == 0, done.stderr

    set_in_image = dict(item.split("=", 1) for item in shlex.split(said["ENV"]))
    set_in_image["PATH"] = set_in_image["PATH"].replace("$PATH", ROOT_PATH)
    set_in_image["HOME"] = "/home/mpiuser"

    def run_as_user(line):
        done = debian.run(f"cd; {line}", user=said["USER"], variables=set_in_image)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run_as_user


START = " ".join(json.loads(dict(instructions())["ENTRYPOINT"]))


def test_no_key_is_in_the_image_and_a_program_can_not_change_it(image):
    out, _ = image(f"ls -A ~/.ssh /etc/ssh; id -u; test -w {IN_IMAGE}/scripts/demo || echo kept")
    assert out.splitlines()[0].startswith("/etc/ssh")
    assert "ssh_host" not in out
    assert "id_" not in out
    assert out.endswith("\n1000\nkept\n")


def test_the_demo_runs_in_the_image_as_it_is(image):
    out, errors = image(f"{START} /opt/mpi_replica/scripts/demo --epochs 2")
    assert "test accuracy 0." in out
    assert "installing" not in errors


def test_a_host_lets_in_who_has_the_key_and_nobody_else(image):
    out, errors = image(
        f"""
        {START} worker 2>/dev/null & server=$!
        until [[ -e ~/.sshd_config ]]; do :; done
        ssh -o ConnectionAttempts=20 127.0.0.1 'id -un; command -v python; echo $OMP_NUM_THREADS'
        ssh -o IdentitiesOnly=yes -i /dev/null 127.0.0.1 true || echo refused $?
        ssh -o UserKnownHostsFile=/dev/null 127.0.0.1 true || echo unknown $?
        kill $server
        """
    )
    expected = ["mpiuser", f"{IN_IMAGE}/.venv/bin/python", "1", "refused 255", "unknown 255"]
    assert out.splitlines() == expected, errors
