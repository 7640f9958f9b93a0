"""Signals in the first moments of a job: while libraries load, MPI starts, the config and the model are read."""

import json
import os
import random
import signal
import time

import tiny_model
from harness import Run, records_of
from train_resume_cases import ResumingCase

MOMENTS = 6  # for each command
# What it takes to read the model and to come to the first step, and some more.
LATEST_SECONDS = 1.5


def holds_back(pid, number):
    """Whether the process lets this signal wait."""
    try:
        with open(f"/proc/{pid}/status") as status:
            (line,) = [line for line in status if line.startswith("SigBlk:")]
        return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:  # gone
        return False


class FirstMoments(ResumingCase):
    """A job that hears a signal before it can do anything about it does so as soon as it can."""

    def started(self, command, config):
        """A run of which all ranks are there and have come as far as to hold signals back, which is before main()."""
        run = self.start(config, ranks=2) if command == "infer" else self.start_training(config, ranks=2)
        return run, run.wait_for(
            lambda: len(pids := run.alive()) == 2 and all(holds_back(p, signal.SIGTERM) for p in pids) and pids,
            "rank that holds signals back")

    def stops(self, command, config):
        generator = random.Random()
        for moment in range(MOMENTS):
            sent = (signal.SIGTERM, signal.SIGUSR2)[moment % 2]
            # The shortest ones are the most telling: the first is as early as a test can be.
            after = LATEST_SECONDS * (moment / (MOMENTS - 1)) ** 2
            run, pids = self.started(command, config)
            time.sleep(after)
            # One that goes on is no reason to stop, wherever it comes.
            os.kill(pids[moment % 2], signal.SIGUSR1)
            os.kill(generator.choice(pids), sent)
            run.wait()
            self.assertEqual(run.code, 75, f"{sent.name} after {after:.2f} s:\n{run.err}")
            self.assertEqual(run.err.count("stopped on request after"), 1, run.err)
            run.wait_gone()

    def test_training(self):
        self.stops("train", self.resuming(self.training(train={
            "steps": 1000000, "schedule": "warmup_stable_decay", "log_every": 100, "checkpoint_every": 0})))

    def test_reading(self):
        names = [str(self.write(f"{i}.txt", tiny_model.document(10))) for i in range(100)]
        config = self.config(input={"documents": names, "prompts": ["What?"]}, generate={"max_new_tokens": 3000},
                             output={"if_exists": "replace"})
        self.stops("infer", config)

    def test_saving_is_no_reason_to_stop(self):
        config = self.training(train={"steps": 5})
        run, pids = self.started("train", config)
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        run.wait()
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual([r["step"] for r in self.metrics("step")], list(range(1, 6)))

    def test_a_config_that_does_not_come(self):
        """A pipe that nobody writes is waited for, which is said, until the job is asked to stop."""
        pipe = self.dir / "pipe"
        os.mkfifo(pipe)
        for command, ranks in (("infer", 0), ("train", 2)):
            run = Run([command, "--config", pipe], ranks=ranks)
            run.wait_for(lambda: f"waiting for what somebody is to write into {pipe}" in run.so_far(), "word of the wait")
            for pid in run.alive():
                os.kill(pid, signal.SIGTERM)
            run.wait()
            self.assertEqual(run.code, 75, run.err)
            self.assertEqual(run.err.count(f"stopped on request while waiting for {pipe}"), 1, run.err)
            self.assertNotIn(" error: ", run.err)
            run.wait_gone()

    def test_a_config_from_a_pipe(self):
        """It may come late, and in parts."""
        pipe = self.dir / "pipe"
        os.mkfifo(pipe)
        run = Run(["infer", "--config", pipe])
        with open(pipe, "w") as file:  # waits for the reader
            text = json.dumps(self.config(tasks=["score"]))
            file.write(text[:50])
            file.flush()
            time.sleep(0.5)
            file.write(text[50:])
        run.wait()
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(len(records_of(self.out)), 1)

    def test_other_commands_can_be_ended(self):
        """They have no state to save: a signal ends them at any moment, as it ends any program."""
        for after in (0, 0.05, 0.3):
            run = Run(["doctor", "--set", f"output.directory={self.out}"], ranks=0)
            (pid,) = run.wait_for(run.alive, "process")
            time.sleep(after)
            os.kill(pid, signal.SIGTERM)
            run.wait()
            self.assertEqual(run.code, -signal.SIGTERM, run.err)


class TimeLimit(ResumingCase):
    """A job whose end nobody can read has to be asked to stop."""

    def test_that_is_no_time(self):
        """Is no reason to refuse a job, but is said once: it will not stop in time by itself."""
        no_time = {"SLURM_JOB_END_TIME": "in an hour"}
        reading = self.config(output={"directory": str(self.dir / "read")})
        for run in (self.infer(reading, environment=no_time),
                    self.train_well(self.training(train={"steps": 2}), environment=no_time)):
            self.assertEqual(run.code, 0, run.err)
            self.assertEqual(run.err.count("warning: SLURM_JOB_END_TIME is 'in an hour', no seconds"), 1, run.err)
