"""Jobs on several hosts over networks that are slow, lose frames or break (network.py makes them): the same results as
on one host, or an end in time that names who was cut off.

The ranks have the CPU and one host each unless a test says otherwise. Jobs in which something is cut are slow enough, by
a delay of the network, that it happens in mid-run.
"""

import json
import os
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import h5py
import yaml

import tiny_model
from harness import Run
from network import Network
from train_resume_cases import ResumingCase

ROOT = Path("/run/longhalo_network")  # in a tmpfs over /run in this mount namespace alone
HUNG = 76
DEADLINE = 4
STEPS = 24
# Of a bad line: a step of training waits for some tens of messages, one after the other.
BAD = {"delay": 0.003, "jitter": 0.002, "loss": 0.01}
BAD_RATE = 50e6


class NetworkCase(ResumingCase):

    @classmethod
    def setUpClass(cls):
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        ROOT.mkdir()
        # In memory: whatever ends this test, no file is left, and process numbers of this namespace are nobody else's.
        tempfile.tempdir = os.environ["TMPDIR"] = str(ROOT)
        cls.whole_lock, cls.whole_folder = threading.Lock(), None
        cls.text = ROOT / "text.txt"
        cls.text.write_text(tiny_model.document(1500))

    def network(self, hosts=3, rate=None, **faults):
        network = Network(self.dir / "network", [f"node{index + 1}" for index in range(hosts)])
        self.addCleanup(network.stop)
        for host in network.hosts:
            network.order(host=host, rate=rate)
        network.order(**faults)
        return network

    def training_job(self, deadline=60):
        """The training that all tests do, each in a folder of its own."""
        job = self.training(train={"steps": STEPS, "sequence_tokens": 400, "validate_every": 12, "checkpoint_every": 3},
                            run={"deadline_seconds": deadline})
        job["input"]["documents"] = [str(self.text)]
        return job

    def start_on(self, network, job, *options):
        """Starts a training job on all hosts and returns when it is in mid-run."""
        run = self.start_training(job, ranks=0, before=network.launcher(1, *options))
        run.wait_for(lambda: self.last_step() > 6, "steps")
        return run

    def train_on(self, network, job):
        return self.train_well(job, ranks=0, before=network.launcher())

    def assert_like_whole(self):
        """What stands in self.out is, bit for bit, what as many ranks of this host leave, without a network."""
        with self.whole_lock:
            if type(self).whole_folder is None:
                folder = ROOT / "whole"
                self.train_well({**self.training_job(), "output": {"directory": str(folder)}}, ranks=3)
                type(self).whole_folder = folder
        self.assert_same_run(self.out, self.whole_folder)
        self.assertEqual(self.checkpoints(), self.checkpoints(self.whole_folder))
        last = self.checkpoint(STEPS), self.checkpoint(STEPS, self.whole_folder)
        self.assertEqual(*[sorted(path.name for path in folder.iterdir()) for folder in last])
        for part in last[0].glob("optimizer_*.h5"):
            with h5py.File(part) as one, h5py.File(last[1] / part.name) as other:
                self.assert_same_arrays(one, other)

    def assert_same_arrays(self, one, other):
        self.assertEqual(set(one), set(other))
        for name, value in one.items():
            if isinstance(value, h5py.Group):
                self.assert_same_arrays(value, other[name])
            else:
                self.assertEqual(value[()].tobytes(), other[name][()].tobytes(), name)


class Networks(NetworkCase):

    def test_infer(self):
        """Two hosts with two ranks each, over a line that loses frames: the answers of four ranks on one host."""
        network = self.network(hosts=2, rate=BAD_RATE, **{**BAD, "loss": 0.03})  # there are few messages
        self.document.write_text(tiny_model.document(300))
        records = self.succeed(self.config(), ranks=0, before=network.launcher(2))
        run = json.loads((self.out / "log.jsonl").read_text().splitlines()[0])
        self.assertEqual(run["hosts"], ["node1", "node1", "node2", "node2"])
        self.assertGreater(network.order()["lost"], 0)
        near = self.dir / "near"
        alone = self.succeed(self.config(output={"directory": str(near)}), ranks=4)
        self.assertEqual(set(records), set(alone))
        for key, record in alone.items():
            self.assertEqual({**records[key], "figures": None}, {**record, "figures": None})
            if "arrays" in record:
                with h5py.File(self.out / records[key]["arrays"]) as one, h5py.File(near / record["arrays"]) as other:
                    self.assert_same_arrays(one, other)

    def test_train(self):
        network = self.network(rate=BAD_RATE, **BAD)
        self.train_on(network, self.training_job())
        self.assertGreater(network.order()["lost"], 10)
        self.assert_like_whole()

    def test_interruption(self):
        """A link that is back before the deadline: the job stands still, and goes on as if nothing had been."""
        network = self.network(delay=0.003)
        run = self.start_on(network, self.training_job())
        network.cut("node2")
        time.sleep(0.2)  # for what was on its way
        before = self.last_step()
        time.sleep(1.3)
        self.assertLessEqual(self.last_step(), before + 1, "it went on without the link")
        self.assertLess(before, STEPS - 1)
        network.mend("node2")
        run.wait()
        self.assertEqual(run.code, 0, run.err)
        self.assertNotIn("nothing moves", run.err)
        self.assert_like_whole()

    def hang(self, run, began):
        """Waits for the end of a job that is cut somewhere. What each rank's message says of its host and network."""
        run.wait(60)
        self.assertLess(time.monotonic() - began, DEADLINE + 15)  # of which the launcher takes some
        self.assertEqual(run.code, HUNG, run.err)
        self.assertEqual(run.alive(), [])
        self.assertLess(self.last_step(), STEPS, "the job was over before")
        # A rank that is slow to speak may have been told to end by then; it says the same.
        said = re.findall(r"\[rank (\d)\] error: (?:nothing moves|told to end).* step \d+.*\n"
                          r"  where:  rank (\d) on host (\w+)\n  network: (.*)\n", run.err)
        for rank, again, host, _ in said:
            self.assertEqual((rank, host), (again, f"node{int(rank) + 1}"))
        return {int(rank): network for rank, _, _, network in said}

    def test_link_cut(self):
        """The job ends at the deadline and says who is cut off; when the link is back it goes on, to the same end."""
        network = self.network(delay=0.003)
        job = self.training_job(DEADLINE)
        run = self.start_on(network, job)
        network.cut("node2")
        said = self.hang(run, time.monotonic())
        self.assertEqual(set(said), {0, 1, 2}, run.err)
        silent = r"no answer by TCP from node2 \(rank 1\) for \d[\d.]* s"
        self.assertRegex(said[0], rf"^{silent}; node3 \(rank 2\) answers$")
        self.assertRegex(said[2], rf"^{silent}; node1 \(rank 0\) answers$")
        self.assertRegex(said[1], r"^no answer by TCP from node1 \(rank 0\) for .* s, node3 \(rank 2\) for .* s$")
        saved = self.checkpoints()[-1]
        network.mend("node2")
        again = self.train_on(network, self.resuming(job))
        self.assertIn(f"step {saved} of {STEPS}", again.err)
        self.assert_like_whole()

    def test_pair_cut(self):
        """Two hosts that do not hear each other while a third hears both."""
        network = self.network(delay=0.003)
        run = self.start_on(network, self.training_job(DEADLINE))
        network.order(pair=["node2", "node3"], joined=False)
        said = self.hang(run, time.monotonic())
        self.assertEqual(set(said), {0, 1, 2}, run.err)
        self.assertEqual(said[0], "node2 (rank 1), node3 (rank 2) answer by TCP")
        self.assertRegex(said[1], r"^no answer by TCP from node3 \(rank 2\) for .*; node1 \(rank 0\) answers$")
        self.assertRegex(said[2], r"^no answer by TCP from node2 \(rank 1\) for .*; node1 \(rank 0\) answers$")

    def test_one_way(self):
        """A host that hears the others but is not heard, as behind a broken transmitter: the others name it."""
        network = self.network(delay=0.003)
        run = self.start_on(network, self.training_job(DEADLINE))
        network.order(host="node3", sends=False)
        said = self.hang(run, time.monotonic())
        self.assertRegex(said[0], r"^no answer by TCP from node3 \(rank 2\) for .*; node2 \(rank 1\) answers$")
        self.assertRegex(said[1], r"^no answer by TCP from node3 \(rank 2\) for .*; node1 \(rank 0\) answers$")

    def test_pair_never_joined(self):
        """Two hosts that cannot reach each other when MPI starts, as behind a firewall."""
        network = self.network()
        network.order(pair=["node2", "node3"], joined=False)
        deadline = 2 * DEADLINE  # Open MPI takes 3 s to give a connection up
        run = self.train(self.training_job(deadline), ranks=0, before=network.launcher())
        self.assertLess(run.seconds, deadline + 20)
        self.assertEqual(run.code, HUNG, run.err)
        self.assertEqual(run.alive(), [])
        self.assertIn("the start of MPI; before the first step", run.err)
        for host in network.hosts:
            self.assertIn(f"on host {host}", run.err)
        # Open MPI's own words: nobody else knows yet who the others are.
        ends = re.search(r"Local host: node([23])\n(?:.*\n)*?.*connect\(\) to ([\d.]+):", run.err)
        self.assertTrue(ends, run.err)
        other = {"2": "node3", "3": "node2"}[ends[1]]
        self.assertEqual(ends[2], network.address(other, "data0"))

    def test_host_vanishes(self):
        """mpirun finds it out first, when it is told to look often enough; the hosts that are left can finish it."""
        network = self.network(delay=0.003)
        job = self.training_job(2 * DEADLINE)
        run = self.start_on(network, job, "--mca", "oob_tcp_keepalive_time", "1", "--mca", "oob_tcp_keepalive_intvl",
                            "1", "--mca", "oob_tcp_keepalive_probes", "2")
        lost = [pid for pid in run.alive() if self.is_on(network, "node3", pid)]
        self.assertEqual(len(lost), 1)
        network.vanish("node3")
        began = time.monotonic()
        run.wait(60)
        self.assertLess(time.monotonic() - began, 2 * DEADLINE + 15)
        self.assertNotIn(run.code, (0, 75), run.err)
        self.assertRegex(run.err, r"lost communication with a remote daemon.*\n(?:.*\n)*?.*Remote daemon: .* on node node3")
        # Also those of the host that nobody reaches: its daemon, or the rank's own watchdog.
        while left := run.alive(any_program=True):
            self.assertLess(time.monotonic() - began, 2 * DEADLINE + 15, f"processes are left: {left}")
            time.sleep(0.05)
        self.assertLess(self.last_step(), STEPS, "the job was over before")
        network.leave("node3")
        self.train_on(network, self.resuming(job))
        self.assertEqual([record["step"] for record in self.metrics("step")], list(range(1, STEPS + 1)))
        self.assertEqual(self.metrics("run")[-1]["ranks"], 2)

    def is_on(self, network, host, pid):
        return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/proc/{network.holders[host].pid}/ns/net").st_ino


class SlowLink(NetworkCase):
    """By itself: the rates of the other links are those of a machine that is not busy with other tests."""

    def test_doctor_finds_it(self):
        """One host's link is slower than the floor: its pairs are below, and it is named."""
        network = self.network(delay=0.001, rate=BAD_RATE)
        slow, floor = 50e-6, 80e-6  # GB/s
        network.order(host="node3", rate=8e9 * slow)
        report_file = self.dir / "report.json"
        settings = {"doctor": {"halo_bytes": 4096, "disk_bytes": 1 << 20, "nvml": "libno-such-nvml.so",
                               "sysfs": str(self.dir), "least_halo_gb_per_second": floor},
                    "activations": {"directory": str(self.dir)}}
        config = self.write("doctor.yaml", yaml.safe_dump(settings))
        run = Run(["doctor", "--config", config, "--json", report_file], ranks=0, before=network.launcher()).wait(60)
        self.assertEqual(run.code, 2, run.out + run.err)
        report = json.loads(report_file.read_text())
        (row,) = [row for row in report["checks"] if row["check"] == "halo bandwidth"]
        self.assertEqual((row["where"], row["verdict"]), ("between hosts", "fail"))
        self.assertIn("2 of 3 pairs below", row["found"])
        self.assertRegex(row["found"], r"slowest .*, ranks [01] and 2 \(node[12] and node3\)")
        self.assertIn("the slowest host on average is node3", row["remedy"])
        rates = report["halo"]["gb_per_second"]
        # No faster than the link, which carries headers too; the pair without node3 has no part in it.
        for rate in (rates[0][2], rates[1][2]):
            self.assertLess(rate, slow)
        self.assertGreater(rates[0][1], floor)
        self.assertGreater(report["halo"]["latency_seconds"][0][1], 0.001)
