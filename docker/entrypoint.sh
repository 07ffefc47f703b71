#!/usr/bin/env bash
# The entry point of the image.
#
#   entrypoint.sh worker              serve the ranks that an mpirun elsewhere starts here, by ssh
#   entrypoint.sh launch mpirun ...   run mpirun; a SIGTERM has the ranks save, see exit_if_signalled
#   entrypoint.sh COMMAND ...         run a command; with MPI_WORKERS=NAME its mpirun starts ranks on
#                                     all hosts of that name, MPI_SLOTS on each
set -euo pipefail

keys=$HOME/.ssh

# make_key: one key for all containers that share the folder. The first of them makes it.
make_key() {
    local lock
    [[ -w $keys ]] || return 0 # the MPI operator has put keys there
    exec {lock}>"$keys/.lock"
    flock "$lock"
    if [[ ! -e $keys/authorized_keys ]]; then
        rm -f "$keys"/id_ed25519* # of a container that was stopped in here
        ssh-keygen -q -t ed25519 -N '' -C mpi_replica -f "$keys/id_ed25519"
        cp "$keys/id_ed25519.pub" "$keys/authorized_keys.new"
        mv "$keys/authorized_keys.new" "$keys/authorized_keys"
    fi
    exec {lock}>&-
}

# write_ssh_files: how ssh knows the other hosts, and how sshd lets them in. All hosts have the same
# key, as users and as hosts: who has it is one of them.
write_ssh_files() {
    local public
    for public in "$keys"/id_*.pub; do
        [[ -r $public ]] || return 0
        break
    done
    echo "* $(cut -d ' ' -f 1,2 "$public")" >"$HOME/.known_hosts"
    # StrictModes: the files of the MPI operator belong to root, in a folder that others may write.
    # SetEnv: what sshd starts does not get the environment of the container.
    cat >"$HOME/.sshd_config" <<END
Port 2222
HostKey ${public%.pub}
PidFile none
AuthorizedKeysFile $keys/authorized_keys
StrictModes no
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowUsers $(id -un)
DisableForwarding yes
PermitUserRC no
SetEnv PATH=$PATH PYTHONHASHSEED=0 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
END
}

# write_hostfile NAME SLOTS: a line for each address of a name in the network of the containers.
write_hostfile() {
    getent ahostsv4 "$1" | awk -v slots="$2" '{print $1 " slots=" slots}' | sort -u -V
}

# launch mpirun ...: Open MPI's mpirun ends its ranks at SIGTERM, by which a container is told to
# end, and hands SIGUSR1 on.
launch() {
    local launcher status has_signal=
    trap 'has_signal=1; kill -USR1 "$!"' TERM # before it starts: the signal may come at once
    "$@" &
    launcher=$!
    while :; do
        status=0
        wait "$launcher" || status=$?
        # A signal ends the wait, too; the next one gives the status, also of what has ended since.
        [[ $has_signal ]] || return "$status"
        has_signal=
    done
}

main() {
    if [[ $1 == worker || ${MPI_WORKERS:-} ]]; then
        make_key
    fi
    write_ssh_files
    if [[ ${MPI_WORKERS:-} ]]; then
        write_hostfile "$MPI_WORKERS" "${MPI_SLOTS:-1}" >"$HOME/hostfile"
        export PRTE_MCA_prte_default_hostfile=$HOME/hostfile
    fi
    case $1 in
    worker) exec /usr/sbin/sshd -D -e -f "$HOME/.sshd_config" ;;
    launch) launch "${@:2}" ;;
    *) exec "$@" ;;
    esac
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then # a test reads the functions alone
    main "$@"
fi
