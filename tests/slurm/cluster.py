"""A Slurm cluster of virtual nodes on this machine: munged, slurmctld and a slurmd for each node.

Every node has a host name, a network address and a /dev/shm of its own, so that ranks on different nodes reach each
other by TCP alone; the file system is shared, as a cluster's is. Daemons write to a folder in memory. To be used within
run_slurm_test.sh, which gives this process the namespaces in which it is alone.

What makes Slurm 22.05 quick and what does not, all of it seen here:
- Time limits are whole minutes and looked at every 30 s (a constant of slurmctld). A warning (--signal=TERM@N) is sent
  at the first look after the limit - N - 30 s: with --time=1 and N of 30 or more at the first look, 0 to 30 s after the
  job began. SIGCONT is sent before it, so a stopped job hears it.
- A requeued job waits for cred_expire + 1 s. Below some 10 s the launch of a step fails on a busy machine, which takes
  longer to look at the credential than it is good for.
- A node is down when slurmd has not answered for SlurmdTimeout, which is looked at every third of it.
"""

import os
import stat
import subprocess
import time
from pathlib import Path

ROOT = Path("/run/longhalo_slurm")  # in a tmpfs that is mounted over /run in this mount namespace alone
HEAD_ADDRESS = "10.77.0.100"
CPUS = GPUS = 128  # of each virtual node; nothing is ever run on these GPUs
CONFIG = f"""
ClusterName=longhalo
SlurmctldHost=head
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={ROOT}/munge/socket,cred_expire=12
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
StateSaveLocation={ROOT}/state
SlurmctldPidFile={ROOT}/slurmctld.pid
SlurmctldLogFile={ROOT}/slurmctld.log
SlurmdPidFile={ROOT}/%n/slurmd.pid
SlurmdLogFile={ROOT}/%n/slurmd.log
SlurmdSpoolDir={ROOT}/%n/spool
TmpFS={ROOT}/%n/tmp
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0
GresTypes=gpu
KillWait=20
SlurmdTimeout=6
MessageTimeout=20
ReturnToService=2
MinJobAge=3600
NodeName=DEFAULT CPUs={CPUS} Gres=gpu:{GPUS} State=UNKNOWN
"""
# A node: a host name, a network device, a /dev/shm, and a process that holds them.
NODE = """
hostname "$1"
ip link set lo up
mount -t tmpfs none /dev/shm
touch "$2/waiting"
while ! ip address add "$3/24" dev eth0 2>/dev/null; do sleep 0.01; done
ip link set eth0 up
touch "$2/up"
exec sleep infinity
"""


class Cluster:
    """Starts with the object; `stop()` ends it (and the end of the PID namespace what that leaves)."""

    def __init__(self, groups):
        """`groups` names the nodes of each partition: {"test": ["node1", "node2"]}; the first one is the default."""
        self.environment = {**os.environ, "SLURM_CONF": str(ROOT / "slurm.conf")}
        self.nodes = [node for nodes in groups.values() for node in nodes]
        self.daemons, self.holders = {}, {}
        self._run("mount", "-t", "tmpfs", "-o", "mode=755", "none", "/run")
        for folder in ["munge", "state"] + [f"{node}/{part}" for node in self.nodes for part in ("spool", "tmp")]:
            (ROOT / folder).mkdir(parents=True)
        self._write_files(groups)
        self._make_network()
        munge = ROOT / "munge"
        self._start("munged", "munged", "--foreground", f"--socket={munge}/socket", f"--key-file={munge}/key",
                    f"--log-file={munge}/log", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed")
        self._wait_for(lambda: (munge / "socket").exists(), "munged")
        self._start("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self._make_node(node)
            self.start_slurmd(node)
        self.wait_for_nodes()

    def _write_files(self, groups):
        key = ROOT / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        config = CONFIG + "".join(f"NodeName={node}\n" for node in self.nodes)
        for index, (name, nodes) in enumerate(groups.items()):
            config += f"PartitionName={name} Nodes={','.join(nodes)} Default={'NO' if index else 'YES'} State=UP\n"
        (ROOT / "slurm.conf").write_text(config)
        # To Slurm a GPU is a device file. It counts them and tells a job which are its own.
        for index in range(GPUS):
            os.mknod(ROOT / f"gpu{index}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # another /dev/null
        (ROOT / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={ROOT}/gpu[0-{GPUS - 1}]\n")
        addresses = {"localhost": "127.0.0.1", "head": HEAD_ADDRESS, **{n: self._address(n) for n in self.nodes}}
        (ROOT / "hosts").write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))

    def _make_network(self):
        self._run("mount", "--bind", ROOT / "hosts", "/etc/hosts")
        self._run("hostname", "head")
        for words in ("link set lo up", "link add bridge0 type bridge", f"address add {HEAD_ADDRESS}/24 dev bridge0",
                      "link set bridge0 up"):
            self._run("ip", *words.split())

    def _address(self, node):
        return f"10.77.0.{self.nodes.index(node) + 1}"

    def _make_node(self, node):
        folder = ROOT / node
        self.holders[node] = self._start(f"{node}.host", "unshare", "--uts", "--net", "--mount", "--ipc",
                                         "sh", "-c", NODE, "sh", node, folder, self._address(node))
        self._wait_for((folder / "waiting").exists, node)
        link = f"link{self.nodes.index(node)}"
        self._run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.holders[node].pid)
        self._run("ip", "link", "set", link, "master", "bridge0", "up")
        self._wait_for((folder / "up").exists, node)

    def start_slurmd(self, node):
        self._start(node, "nsenter", f"--target={self.holders[node].pid}", "--uts", "--net", "--mount", "--ipc",
                    "slurmd", "-D", "-N", node)

    def kill_slurmd(self, node):
        """Without a word to anybody. The job steps of the node live on, as they do on a real one."""
        self.daemons[node].kill()
        self.daemons[node].wait()

    def wait_for_nodes(self, nodes=None):
        wanted = set(nodes or self.nodes)

        def up():
            lines = self.output("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
            return wanted <= {name for name, state in map(str.split, lines) if state in ("idle", "mix", "alloc")}
        self._wait_for(up, "nodes", timeout=30)

    def stop(self):
        for daemon in self.daemons.values():
            daemon.kill()
        for daemon in self.daemons.values():
            daemon.wait()

    def output(self, *command):
        """Standard output of a command of Slurm's, which has to work."""
        done = subprocess.run([str(c) for c in command], env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout

    def logs(self):
        """The end of what the daemons say, for a test that failed."""
        text = ""
        for path in [ROOT / "slurmctld.log", *(ROOT / node / "slurmd.log" for node in self.nodes)]:
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            text += f"--- {path}\n" + "\n".join(lines[-40:]) + "\n"
        return text

    def _start(self, name, *command):
        with open(ROOT / f"{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen([str(c) for c in command], env=self.environment, stdout=out,
                                                  stderr=out, stdin=subprocess.DEVNULL, cwd="/")
        return self.daemons[name]

    def _wait_for(self, condition, what, timeout=10):
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"no {what}:\n{self.logs()}")
            time.sleep(0.02)

    @staticmethod
    def _run(*command):
        subprocess.run([str(c) for c in command], check=True)
