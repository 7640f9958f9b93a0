"""The job files of scripts/slurm under a real Slurm: jobs that end well, run out of time, are cancelled, lose a rank or
a node, or were submitted wrongly.

The files are submitted as they are; what sbatch overrides on its command line is what their heads say is to be edited
for a cluster. Jobs have four CPU ranks on two virtual nodes (cluster.py), and the tests run at the same time. A job
that has to be in mid-run when something happens is held there: its ranks are stopped (SIGSTOP), as if they were slow.
"""

import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import tiny_model
from cluster import ROOT, Cluster
from harness import EXECUTABLE, GONE_WITHIN_SECONDS, SOURCE, records_of
from train_resume_cases import ResumingCase

SCRIPTS = SOURCE / "scripts" / "slurm"
PATIENCE_SECONDS = 150
STEPS = 100
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "PREEMPTED")


class Job:
    """One submitted job."""

    def __init__(self, case, number, log):
        self.case, self.number, self.log_file = case, number, log

    def facts(self):
        """{"JobState": ..., "ExitCode": "2:0", "Restarts": ...} as scontrol says them."""
        line = self.case.cluster.output("scontrol", "show", "job", "--oneliner", self.number)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def log(self):
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def wait_for(self, condition, what):
        """Waits for something that happens before the job is over."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not (value := condition()):
            over = self.facts()["JobState"] in OVER
            if over and (value := condition()):
                break
            if over or time.monotonic() > end:
                self.fail(f"no {what}")
            time.sleep(0.1)
        return value

    def wait_for_state(self, state):
        def facts_in_state():
            facts = self.facts()
            return facts if facts["JobState"] == state else None
        return self.wait_for(facts_in_state, f"state {state}")

    def restarts(self):
        return int(self.facts()["Restarts"])

    def wait_for_restart(self, before=0):
        return self.wait_for(lambda: self.restarts() > before, "restart")

    def fail(self, what):
        raise AssertionError(f"job {self.number}: {what}\n{self.facts()}\n--- its log\n{self.log()}"
                             f"\n{self.case.cluster.logs()}")

    def ranks(self):
        """{rank: process id} of those that are there now."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or os.path.realpath(entry / "exe") != os.path.realpath(EXECUTABLE):
                    continue
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            environment = dict(word.split("=", 1) for word in words if "=" in word)
            number = environment.get("SLURM_JOB_ID")
            if "SLURM_ARRAY_JOB_ID" in environment:
                number = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
            if number == self.number:
                found[int(environment["SLURM_PROCID"])] = int(entry.name)
        return found

    def hold(self, when):
        """Stops all ranks as soon as when() holds, which has to be in mid-run, and returns their process ids.

        None when they end before: a busy machine may take longer to start them than they are given.
        """
        pids = self.wait_for(lambda: len(self.ranks()) == 4 and self.ranks(), "ranks")
        end = time.monotonic() + PATIENCE_SECONDS
        while not when():  # looked at more often than wait_for() does: steps take a few hundredths of a second
            if time.monotonic() > end:
                self.fail("was not to be held in time")
            if not all(status_of(pid) for pid in pids.values()):
                return None
            time.sleep(0.01)
        self.stop(pids)
        return pids

    def hold_again(self, pids, when):
        """Lets ranks that are held go on for a few steps at a time until when() holds, and then holds them.

        hold() may look too late on a busy machine: a job of some seconds is then over.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while not when():
            if time.monotonic() > end:
                self.fail("was not to be held again in time")
            self.let_go(pids)
            time.sleep(0.1)
            self.stop(pids)

    def stop(self, pids):
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        self.wait_for(lambda: all(is_stopped(pid) for pid in pids.values()), "stop of its ranks")

    @staticmethod
    def let_go(pids):
        for pid in pids.values():
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass

    def wait_gone(self):
        end = time.monotonic() + GONE_WITHIN_SECONDS
        while self.ranks():
            if time.monotonic() > end:
                self.fail("ranks are left")
            time.sleep(0.05)


def status_of(pid):
    """What /proc says of a process; nothing when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: words.strip() for name, words in (line.split(":", 1) for line in lines)}


def is_stopped(pid):
    return status_of(pid).get("State", "").startswith("T")


def has_got(pid, number):
    """Whether a signal has come to a process that was stopped: it waits there, or Slurm made the process go on."""
    return not is_stopped(pid) or int(status_of(pid).get("ShdPnd", "0"), 16) >> (number - 1) & 1 == 1


class SlurmCase(ResumingCase):

    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster({"test": ["node1", "node2"], "doomed": ["node3", "node4"]})
        cls.addClassCleanup(cls.cluster.stop)
        # In the cluster's own memory: whatever ends this test, no file is left.
        tempfile.tempdir = str(ROOT)
        cls.whole_lock, cls.whole_folder = threading.Lock(), None
        cls.text = ROOT / "text.txt"
        cls.text.write_text(tiny_model.document(600))

    def submit(self, script, *arguments, options=(), environment=None):
        log = self.dir / "%x-%A_%a.log" if "array" in script else self.dir / "%j.log"
        number = self.cluster.output(
            "env", "-C", SOURCE, f"LONGHALO_EXECUTABLE={EXECUTABLE}",
            *(f"{name}={value}" for name, value in (environment or {}).items()),
            "sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=10",
            f"--output={log}", *options, SCRIPTS / script, *arguments).strip()
        return Job(self, number, self.dir / f"{number}.log")

    def submit_training(self, config, **kwargs):
        path = self.write(f"train_{time.monotonic_ns()}.json", json.dumps(config))
        return self.submit("train_1m.sbatch", path, **kwargs)

    def training_job(self):
        """The training that all tests do, each in a folder of its own."""
        job = self.training(train={"steps": STEPS, "validate_every": 50, "checkpoint_every": 15})
        job["input"]["documents"] = [str(self.text)]
        return job

    def assert_ended(self, job, state, *codes, restarted=False):
        facts = job.wait_for_state(state)
        if facts["ExitCode"] not in codes or (facts["Restarts"] != "0") != restarted:
            job.fail(f"ended with {facts['ExitCode']}, not {codes}, after {facts['Restarts']} restarts")
        job.wait_gone()

    def assert_like_whole(self):
        """What stands in self.out is, bit for bit, what the same training leaves that nobody disturbed."""
        with self.whole_lock:
            if type(self).whole_folder is None:
                folder = ROOT / "whole"
                job = self.submit_training({**self.training_job(), "output": {"directory": str(folder)}})
                self.assert_ended(job, "COMPLETED", "0:0")
                type(self).whole_folder = folder
        self.assert_same_run(self.out, self.whole_folder)

    def finish(self, config):
        """Submits a job again that did not come to its end."""
        job = self.submit_training(config)
        self.assert_ended(job, "COMPLETED", "0:0")
        self.assertIn("goes on from", job.log())
        self.assert_like_whole()

    def assert_stopped_in_mid_run(self, job):
        """The last step that was done, of which there is a checkpoint."""
        records = self.metrics("stopped")
        if not records:
            job.fail("did not stop on request")
        stopped = records[-1]["step"]
        self.assertLess(stopped, STEPS, "the job was over before it was stopped")
        self.assertEqual(self.checkpoints()[-1], stopped)
        return stopped

    def has_steps(self, after=0):
        return lambda: self.last_step() > after


class Slurm(SlurmCase):

    def test_infer(self):
        job = self.submit("infer_1m.sbatch", self.write("infer.json", json.dumps(self.config())))
        self.assert_ended(job, "COMPLETED", "0:0")
        records = records_of(self.out)
        run = json.loads((self.out / "log.jsonl").read_text().splitlines()[0])
        self.assertEqual(run["ranks"], 4)
        self.assertEqual(set(run["hosts"]), {"node1", "node2"})
        alone = self.succeed(self.config(output={"directory": str(self.dir / "alone")}), ranks=0)
        self.assertEqual(set(records), set(alone))
        for key, record in alone.items():
            self.assertEqual(records[key].get("answer_ids"), record.get("answer_ids"))

    def test_infer_on_one_node(self):
        """The resources of the file's own head, but for the number of CPUs."""
        config = self.config(tasks=["score"], input={"prompts": None})
        path, log = self.write("infer.json", json.dumps(config)), self.dir / "%j.log"
        number = self.cluster.output("env", "-C", SOURCE, f"LONGHALO_EXECUTABLE={EXECUTABLE}", "sbatch", "--parsable",
                                     "--cpus-per-task=1", f"--output={log}", SCRIPTS / "infer_2gpu.sbatch", path).strip()
        self.assert_ended(Job(self, number, self.dir / f"{number}.log"), "COMPLETED", "0:0")
        self.assertEqual(len(records_of(self.out)), 1)
        run = json.loads((self.out / "log.jsonl").read_text().splitlines()[0])
        self.assertEqual((run["ranks"], len(set(run["hosts"]))), (2, 1))

    def until_warned(self, job, when):
        """Holds a job until Slurm has sent the warning before its time limit and has it queued again."""
        before = 0
        while not (held := job.hold(when)):
            self.assertLess(before, 4, "this machine is too slow for a time limit of a minute")
            job.wait_for_restart(before)
            before = job.restarts()
        job.wait_for(lambda: all(has_got(pid, signal.SIGTERM) for pid in held.values()), "warning")
        job.let_go(held)
        job.wait_for_restart(before)
        self.assertIn("stopped with its state saved; it asks Slurm to be queued again", job.log())

    def test_infer_time_limit(self):
        """The document that is being read is finished; the job that is queued again reads those that are missing."""
        names = [str(self.write(f"document_{index}.txt", tiny_model.document(30, seed=index))) for index in range(30)]
        config = self.config(input={"documents": names}, generate={"max_new_tokens": 200})
        job = self.submit("infer_1m.sbatch", self.write("infer.json", json.dumps(config)),
                          options=["--time=1", "--signal=TERM@30"])
        results = self.out / "results.jsonl"
        self.until_warned(job, lambda: results.exists() and results.stat().st_size > 0)
        before = records_of(self.out)
        self.assertLess(len(before), 3 * len(names), "the job was over before it was stopped")
        self.assertEqual(len(before) % 3, 0, "whole documents")
        self.assert_ended(job, "COMPLETED", "0:0", restarted=True)
        after = records_of(self.out)
        self.assertEqual(len(after), 3 * len(names))
        for key, record in before.items():
            self.assertEqual(after[key], record, "what was finished is kept")

    def test_time_limit(self):
        """The warning before the limit: state saved, queued again, done; not one bit differs from a job in one go."""
        job = self.submit_training(self.training_job(), options=["--time=1", "--signal=TERM@30"])
        self.until_warned(job, self.has_steps())
        stopped = self.assert_stopped_in_mid_run(job)
        self.assert_ended(job, "COMPLETED", "0:0", restarted=True)
        self.assertIn(f"step {stopped} of {STEPS}", job.log())
        self.assert_like_whole()

    def test_chain(self):
        """Jobs that may not be queued again and get no warning: each sees its own end, the next one goes on."""
        config, before_end = self.training_job(), 40
        options = ["--time=1", "--signal=USR1@0", "--no-requeue", "--job-name=chain", "--dependency=singleton"]
        links = [self.submit_training(config, options=options,
                                      environment={"LONGHALO_RUN__STOP_BEFORE_END_SECONDS": before_end})
                 for _ in range(10)]
        before = done = 0
        for _ in range(2):
            while not (held := (link := links[done]).hold(self.has_steps(before))):
                done += 1  # it had no time to begin
                self.assert_ended(link, "FAILED", "75:0")
            done += 1
            end = time.mktime(time.strptime(link.facts()["EndTime"], "%Y-%m-%dT%H:%M:%S"))
            link.wait_for(lambda: time.time() > end - before_end, "end")
            link.let_go(held)
            self.assert_ended(link, "FAILED", "75:0")
            self.assertRegex(link.log(), "the job's time is over in [0-9]+ s")
            self.assertIn("submit it anew", link.log())
            stopped = self.assert_stopped_in_mid_run(link)
            self.assertLess(before, stopped)
            before = stopped
        # How many more it takes is for the machine to say; the first one that does it all leaves nothing for the next.
        ends = []
        while ends[-2:] != ["COMPLETED"] * 2:
            self.assertLess(done, len(links), f"no end of the chain:\n{links[-1].log()}")
            link = links[done]
            done += 1
            link.wait_for(lambda: link.facts()["JobState"] in OVER, "end")
            ends.append(link.facts()["JobState"])
            self.assert_ended(link, ends[-1], "0:0" if ends[-1] == "COMPLETED" else "75:0")
        for link in links[done:]:
            self.cluster.output("scancel", link.number)
        self.assert_like_whole()

    def test_limit_without_a_warning(self):
        """At the limit itself Slurm asks, waits for KillWait and kills: the state is saved, the job not queued again."""
        config = self.training_job()
        job = self.submit_training(config)
        job.hold(self.has_steps())
        self.cluster.output("scontrol", "update", f"JobId={job.number}", "EndTime=now+2")  # not what it was told
        self.assert_ended(job, "TIMEOUT", "0:15")
        self.assert_stopped_in_mid_run(job)
        self.assertNotIn("asks Slurm", job.log())
        self.finish(config)

    def test_saved_and_cancelled(self):
        config = self.training_job()
        job = self.submit_training(config)
        held = job.hold(self.has_steps())
        step = self.last_step()
        self.cluster.output("scancel", "--signal=USR1", job.number)
        job.wait_for(lambda: all(has_got(pid, signal.SIGUSR1) for pid in held.values()), "signal")
        # The others are of steps that the config names.
        job.hold_again(held, lambda: any(s % 15 for s in self.checkpoints()))
        self.assertLessEqual(step, min(s for s in self.checkpoints() if s % 15))
        self.cluster.output("scancel", job.number)  # it continues what is stopped
        self.assert_ended(job, "CANCELLED", "0:15")
        self.assert_stopped_in_mid_run(job)
        time.sleep(15)  # a job that was queued again would run by now
        self.assertEqual(job.facts()["JobState"], "CANCELLED")
        self.finish(config)

    def test_rank_killed(self):
        config = self.training_job()
        job = self.submit_training(config)
        held = job.hold(self.checkpoints)
        os.kill(held[3], signal.SIGKILL)
        job.let_go(held)
        # 128 + the largest signal: KILL's, or that of a rank which wrote to one that was gone.
        self.assert_ended(job, "FAILED", "137:0", "141:0", "143:0")
        self.assertLess(self.last_step(), STEPS, "the job was over before")
        self.assertNotIn("asks Slurm", job.log())
        self.finish(config)

    def test_slurmd_killed(self):
        """Slurm gives the node up and queues the job again; it runs when the node is back."""
        job = self.submit_training(self.training_job(), options=["--partition=doomed"])
        held = job.hold(self.checkpoints)
        self.cluster.kill_slurmd("node4")
        job.wait_for_restart()
        job.let_go(held)
        job.wait_gone()
        self.assertLess(self.last_step(), STEPS, "the job was over before")
        self.cluster.start_slurmd("node4")
        self.assert_ended(job, "COMPLETED", "0:0", restarted=True)
        self.assertIn("goes on from", job.log())
        self.assert_like_whole()

    def refused(self, *words, **kwargs):
        job = self.submit_training(self.training_job(), **kwargs)
        self.assert_ended(job, "FAILED", "2:0")
        for word in words:
            self.assertIn(word, job.log())
        self.assertFalse(self.out.exists())
        return job

    def test_wrong_tasks(self):
        self.refused("3 tasks are spread unevenly over 2 nodes", "--ntasks-per-node", options=["--ntasks=3"])

    def test_without_pmix(self):
        """Each task would be a job of its own."""
        self.refused("pmix_v99", "srun --mpi=list", environment={"LONGHALO_SLURM_MPI": "pmix_v99"})

    def test_doctor(self):
        """Before the job, on its nodes: all ranks have met and see the same disk; a floor that is missed fails it."""
        config = self.write("doctor.json", json.dumps({
            "doctor": {"halo_bytes": 4096, "disk_bytes": 1 << 20}, "activations": {"directory": str(self.dir)},
            "output": {"directory": str(self.out)}}))
        reports = {}
        for floor, state, code in ((0, "COMPLETED", "0:0"), (1e5, "FAILED", "2:0")):
            report = self.dir / f"{state}.json"
            job = self.submit("doctor.sbatch", config, "--json", report, "--set",
                              f"doctor.least_halo_gb_per_second={floor}")
            self.assert_ended(job, state, code)
            self.assertIn("\ndoctor: ", job.log())
            reports[state] = json.loads(report.read_text())
        report = reports["COMPLETED"]
        self.assertEqual((report["ranks"], set(report["hosts"])), (4, {"node1", "node2"}))
        rows = {(row["check"], row["where"]): row for row in report["checks"]}
        self.assertEqual(rows["launch", "job"]["found"], "4 ranks, as Slurm's step has tasks")
        self.assertIn(("halo bandwidth", "between hosts"), rows)
        self.assertEqual([row for row in rows.values() if row["verdict"] == "fail"], [])
        failed = {row["check"] for row in reports["FAILED"]["checks"] if row["verdict"] == "fail"}
        self.assertEqual(failed, {"halo bandwidth"})

    def test_array(self):
        """One of three documents cannot be read: its job says so and fails, the others are done."""
        folder, results = self.dir / "documents", self.dir / "results"
        folder.mkdir()
        names = ["a plain one.txt", "broken.txt", "it's: [another], one.txt"]
        for index, name in enumerate(names):
            (folder / name).write_text(tiny_model.document(40, seed=index))
        (folder / names[1]).write_bytes(b"")
        config = self.config(input={"documents": None})
        config["output"] = None
        array = self.submit("infer_array.sbatch", self.write("array.json", json.dumps(config)), folder, results,
                            options=["--nodes=1", "--array=1-4%3"])
        jobs = [Job(self, f"{array.number}_{k}", self.dir / f"longhalo-array-{array.number}_{k}.log")
                for k in range(1, 5)]
        for job, name in zip(jobs, names):
            broken = name == "broken.txt"
            self.assert_ended(job, "FAILED" if broken else "COMPLETED", "2:0" if broken else "0:0")
            self.assertIn(str(folder / name), job.log())
            self.assertIn(name, job.log())
            if not broken:
                self.assertEqual({document for document, _, _ in records_of(results / name)}, {str(folder / name)})
        self.assertIn("empty", jobs[1].log())
        self.assertFalse((results / "broken.txt" / "results.jsonl").exists())
        self.assert_ended(jobs[3], "FAILED", "2:0")
        self.assertIn("there is no file 4", jobs[3].log())
