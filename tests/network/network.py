"""Hosts of their own on this machine, with two networks as a cluster has them, and mpirun over them.

A host is a network namespace with a host name, /dev/shm and /etc/hosts of its own; the file system is shared, as a
cluster's is. `eth0` is for management (mpirun and its daemons): a pair of virtual Ethernet devices to a bridge. `data0`
is for the ranks' messages: a TAP device, whose other end switch.py holds. Daemons are started by a launch agent that
does what ssh would do. To be used within run_network_test.sh, in whose namespaces nothing outlives the test.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness import MPIEXEC

HERE = Path(__file__).resolve().parent
# A host is a process that holds its namespaces. Devices come from outside, when it waits for them.
HOST = """
hostname "$1"
for value in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 >$value; done
ip link set lo up
mount -t tmpfs none /dev/shm
mount --bind "$2/hosts" /etc/hosts
touch "$2/$1.waiting"
while ! ip address add "$3/24" dev eth0 2>/dev/null; do sleep 0.01; done
while ! ip address add "$4/24" dev data0 2>/dev/null; do sleep 0.01; done
ip link set data0 mtu 9000
ip link set eth0 up
ip link set data0 up
touch "$2/$1.up"
exec sleep infinity
"""
# What a launcher of daemons needs to be: AGENT HOST COMMAND... As with ssh, the environment stays here.
AGENT = """#!/bin/sh
host=$1
shift
exec nsenter --target="$(cat '{folder}'/"$host.pid")" --uts --net --mount --ipc \\
  env -i PATH="$PATH" HOME=/ LONGHALO_TEST_RUN="$LONGHALO_TEST_RUN" sh -c "$*"
"""
_numbers = iter(range(1, 250))
_numbers_lock = threading.Lock()


class Network:
    """Up when the object is there, and without faults; `stop()` ends it."""

    def __init__(self, folder, hosts, seed=1):
        """`folder` is for its files; `hosts` are names, of which mpirun is started on the first."""
        with _numbers_lock:
            self.number = next(_numbers)
        self.folder, self.hosts, self.processes = Path(folder), list(hosts), []
        self.hosts_in_use = list(hosts)
        self.folder.mkdir()
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
            f"{self.address(host, 'eth0')} {host}\n" for host in self.hosts))
        self.agent = self.folder / "agent.sh"
        self.agent.write_text(AGENT.format(folder=self.folder))
        self.agent.chmod(0o755)
        self._run("ip", "link", "add", self._bridge(), "type", "bridge")
        self._run("ip", "link", "set", self._bridge(), "up")
        self.holders = {host: self._make_host(host) for host in self.hosts}
        ports = {"hosts": {host: holder.pid for host, holder in self.holders.items()}, "device": "data0", "seed": seed}
        self.switch = subprocess.Popen([sys.executable, HERE / "switch.py", json.dumps(ports)], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True)
        self.processes.append(self.switch)
        for host in self.hosts:
            self._wait_for(self.folder / f"{host}.up")

    def address(self, host, device):
        return f"10.{77 if device == 'eth0' else 78}.{self.number}.{self.hosts.index(host) + 1}"

    def order(self, **order):
        """Tells the switch something; it is in force when this returns. The frames carried and lost so far."""
        self.switch.stdin.write(json.dumps(order) + "\n")
        self.switch.stdin.flush()
        return json.loads(self.switch.stdout.readline())

    def cut(self, host):
        """The host's data link."""
        self.order(host=host, sends=False, receives=False)

    def mend(self, host):
        self.order(host=host, sends=True, receives=True)

    def vanish(self, host):
        """Neither network has the host any more."""
        self._run("ip", "link", "set", self._cable(host), "nomaster")
        self.cut(host)

    def leave(self, host):
        """Jobs to come do without the host."""
        self.hosts_in_use.remove(host)

    def launcher(self, ranks_per_host=1, *options):
        """mpirun on the first host, with what a user of two networks tells it; what it starts is to follow."""
        settings = {"btl": "self,tcp", "btl_tcp_if_include": "data0", "oob_tcp_if_include": "eth0",
                    "plm_rsh_agent": self.agent, "orte_tmpdir_base": self.folder}
        line = ["nsenter", f"--target={self.holders[self.hosts[0]].pid}", "--uts", "--net", "--mount", "--ipc", MPIEXEC,
                "--oversubscribe", "--bind-to", "none", "-x", "OMP_NUM_THREADS",
                "--host", ",".join(f"{host}:{ranks_per_host}" for host in self.hosts_in_use), *options]
        for name, value in settings.items():
            line += ["--mca", name, value]
        return [str(word) for word in line]

    def stop(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.switch.stdin.close()
        self.switch.stdout.close()
        self._run("ip", "link", "delete", self._bridge())

    def _make_host(self, host):
        holder = subprocess.Popen(["unshare", "--uts", "--net", "--mount", "--ipc", "sh", "-ec", HOST, "sh", host,
                                   self.folder, self.address(host, "eth0"), self.address(host, "data0")],
                                  stdin=subprocess.DEVNULL, cwd="/")
        self.processes.append(holder)
        (self.folder / f"{host}.pid").write_text(str(holder.pid))
        self._wait_for(self.folder / f"{host}.waiting")
        self._run("ip", "link", "add", self._cable(host), "type", "veth", "peer", "name", "eth0", "netns", holder.pid)
        self._run("ip", "link", "set", self._cable(host), "master", self._bridge(), "up")
        return holder

    def _bridge(self):
        return f"bridge{self.number}"

    def _cable(self, host):
        return f"cable{self.number}.{self.hosts.index(host)}"

    @staticmethod
    def _wait_for(path, timeout=10):
        end = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > end:
                raise AssertionError(f"no {path.name}")
            time.sleep(0.01)

    @staticmethod
    def _run(*command):
        subprocess.run([str(c) for c in command], check=True)
