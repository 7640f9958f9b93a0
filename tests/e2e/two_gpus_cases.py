"""longhalo train on two GPUs that exchange through NCCL: what a rank that fails leaves, and how soon."""

import os
import re
import shutil
import signal
import subprocess
import time

import tiny_model
from device_cases import CUDA
from harness import GONE_WITHIN_SECONDS
from train_resume_cases import ResumingCase

DEADLINE = 10  # NCCL starts within it
HUNG, STOPPED = 76, 75
FAR = 100_000  # steps: more than any of these jobs takes before it is interrupted


def gpus():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name])
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return len(re.findall("^GPU ", listed, re.MULTILINE))


class TwoGpus(ResumingCase):
    SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": tiny_model.VOCABULARY}

    def setUp(self):
        super().setUp()
        if gpus() < 2:
            self.skipTest(f"it takes two GPUs, and there are {gpus()}")

    def job(self, **train):
        return self.training(model={"path": str(self.own_model(shape=self.SHAPE))},
                             train={"learning_rate": 1e-3, "deterministic": True, **train},
                             run={"deadline_seconds": DEADLINE})

    def long_job(self):
        return self.job(steps=FAR, validate_every=FAR, checkpoint_every=10)

    def interrupted(self, config, interrupt):
        """Begins the job and, in its middle, calls interrupt(run, ranks' process ids); the run when all is gone."""
        run = self.start_training(config, *CUDA)
        run.wait_for(lambda: self.last_step() > 25, "steps", 60)
        pids = run.alive()
        self.assertEqual(len(pids), 2)
        began = time.monotonic()
        interrupt(run, pids)
        run.wait(60)
        run.wait_gone()
        self.assertLess(time.monotonic() - began, DEADLINE + GONE_WITHIN_SECONDS)
        self.assertIn("nccl", run.err)
        return run

    def assert_goes_on(self, config):
        """From the last checkpoint, some steps to an end."""
        saved = max(self.checkpoints())
        shorter = {**config, "train": {**config["train"], "steps": saved + 5, "validate_every": saved + 5}}
        again = self.train_well(self.resuming(shorter), *CUDA)
        self.assertIn(f"step {saved} of {saved + 5}", again.err)
        self.assertEqual([record["step"] for record in self.metrics("step")], list(range(1, saved + 6)))

    def test_a_rank_that_stands_still(self):
        config = self.long_job()
        run = self.interrupted(config, lambda run, pids: os.kill(pids[1], signal.SIGSTOP))
        self.assertEqual(run.code, HUNG, run.err)
        said = re.findall(r"longhalo\[rank (\d)\] error: nothing moves: waited [\d.]+ s for (.*) in operation "
                          r"#(\d+), (.*); step (\d+)", run.err)
        self.assertEqual([rank for rank, *_ in said], ["0"], run.err)
        self.assertGreater(int(said[0][4]), 25)
        self.assert_goes_on(config)

    def test_a_rank_that_is_killed(self):
        config = self.long_job()
        run = self.interrupted(config, lambda run, pids: os.kill(pids[0], signal.SIGKILL))
        self.assertNotEqual(run.code, 0)
        self.assert_goes_on(config)

    def test_a_job_that_is_asked_to_stop(self):
        config = self.long_job()
        run = self.interrupted(config, lambda run, pids: [os.kill(pid, signal.SIGTERM) for pid in pids])
        self.assertEqual(run.code, STOPPED, run.err)
        self.assertEqual(max(self.checkpoints()), self.last_step())
        self.assert_goes_on(config)

    def test_one_gpu_or_two(self):
        config = self.job()
        self.train_well(config, *CUDA)
        two, self.out = self.out, self.dir / "one"
        self.train_well({**config, "output": {"directory": str(self.out)}}, *CUDA, ranks=1)
        self.assert_same_run(two, self.out, delta=2**-7)
