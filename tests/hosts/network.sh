#!/bin/sh
# network.sh NAME...: hosts of these names, and the switch between them, on which mpiexec runs.
#
# The first process in namespaces of its own (namespaces.py): what is made here no other process of
# the machine sees, and the kernel takes all of it away when this process ends. It ends with stdin.
set -e

# Files that all hosts see, beside those of the machine, and folders that each one has for itself.
mount -t tmpfs tmpfs /run
own_folders='mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /mnt'
eval "$own_folders"
mkdir /run/netns # where ip keeps the names of networks

# become HOST COMMAND: be the first process of a host. Processes of two hosts may have one number,
# and can't map the same memory.
become() {
    exec ip netns exec "$1" unshare --uts --ipc --mount --pid --fork --mount-proc sh -c '
        set -e
        hostname "$0"
        eval "$1; $2"' "$1" "$own_folders" "$2"
}

ip link set lo up
ip link add eth0 type bridge # by the name that the interfaces of the hosts have
ip netns add probe
ip link add probe type veth peer name eth0 netns probe
(become probe true)
ip netns delete probe
echo "the machine lets us"

hostname switch
ip address add 10.0.0.100/24 dev eth0
ip link set eth0 up
{
    cat /etc/hosts
    echo "10.0.0.100 switch"
} >/run/hosts
mount --bind /run/hosts /etc/hosts

number=0
for name in "$@"; do
    number=$((number + 1))
    echo "10.0.0.$number $name" >>/run/hosts
    ip netns add "$name"
    ip link add "$name" type veth peer name eth0 netns "$name"
    ip link set "$name" master eth0 up
    ip -n "$name" link set lo up
    ip -n "$name" address add "10.0.0.$number/24" dev eth0
    ip -n "$name" link set eth0 up
    # Its first process waits for those that have lost their parents, as that of a machine does.
    become "$name" 'echo "$0 is up"; while :; do sleep 1000 & wait "$!"; done' &
    echo $! >"/run/$name.pid"
done
echo "the agent knows all hosts"
read -r _
