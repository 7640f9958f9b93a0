#!/bin/sh
# run_network_test.sh PYTHON SCRIPT ARGUMENTS: runs a test of several virtual hosts. Exit code 77: skipped, with a reason.
. "$(dirname "$0")/../support/namespaces.sh"
need_programs iproute2 ip unshare nsenter
test -c /dev/net/tun || skip "there is no /dev/net/tun, by which programs make network devices (modprobe tun)"
run_in_namespaces "tuntap add dev tap0 mode tap" "$@"
