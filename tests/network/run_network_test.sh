#!/bin/sh
# run_network_test.sh PYTHON SCRIPT ARGUMENTS: runs a test of several virtual hosts, in namespaces of its own (processes,
# mounts, network, host name, shared memory). Nothing of it has a name outside, and the kernel ends whatever is left when
# this process ends, however that comes about. Exit code 77: skipped, with a reason.
skip() {
  echo "skipped: $*"
  exit 77
}
test -x "$1" || skip "there is no Python at $1; scripts/setup.sh makes it"
PATH=$PATH:/usr/sbin:/sbin
export PATH
for program in ip unshare nsenter; do
  command -v $program >/dev/null || skip "there is no $program; scripts/setup.sh installs iproute2"
done
test -c /dev/net/tun || skip "there is no /dev/net/tun, by which programs make network devices (modprobe tun)"
in_namespaces="unshare --fork --kill-child --pid --mount-proc --mount --net --uts --ipc"
$in_namespaces sh -c 'ip link add bridge0 type bridge && ip link add veth0 type veth peer name veth1 &&
                      ip tuntap add dev tap0 mode tap' 2>/dev/null ||
  skip "namespaces with network devices of their own are not permitted here (unshare --net, as root)"
exec $in_namespaces "$@"
