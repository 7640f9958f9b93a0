# shellcheck shell=sh
# Sourced by what starts a test of virtual hosts, with PYTHON SCRIPT ARGUMENTS as its own: the test runs in namespaces
# of its own (processes, mounts, network, host name, shared memory). Nothing of it has a name outside, and the kernel
# ends whatever is left when this process ends, however that comes about. Exit code 77: skipped, with a reason.
skip() {
  echo "skipped: $*"
  exit 77
}

# need_programs PACKAGES PROGRAM...
need_programs() {
  packages=$1
  shift
  for program in "$@"; do
    command -v "$program" >/dev/null || skip "there is no $program; scripts/setup.sh installs $packages"
  done
}

# run_in_namespaces DEVICES COMMAND...: where DEVICES, further arguments of `ip`, can be made beside bridges and veth.
run_in_namespaces() {
  devices=$1
  shift
  in_namespaces="unshare --fork --kill-child --pid --mount-proc --mount --net --uts --ipc"
  $in_namespaces sh -c "ip link add bridge0 type bridge && ip link add veth0 type veth peer name veth1 && ip $devices" \
    >/dev/null 2>&1 || skip "namespaces with network devices of their own are not permitted here (unshare --net, as root)"
  exec $in_namespaces "$@"
}

test -x "$1" || skip "there is no Python at $1; scripts/setup.sh makes it"
PATH=$PATH:/usr/sbin:/sbin
export PATH
