"""Training that stops and goes on: by signals, on the same ranks bit for bit, on others closely."""

import json
import os
import shutil
import signal

import h5py
import numpy as np

import tiny_model
from harness import files_below
from train_cases import TrainingCase

# What a record says of the mathematics; times and memory differ from run to run.
EXACT = ("loss", "cross_entropy", "gradient_norm", "learning_rate", "counted_tokens", "sequences", "skipped_steps")
# Of jobs that are stopped by a signal: some seconds.
STEPS = 400


class ResumingCase(TrainingCase):

    def checkpoints(self, folder=None):
        """Steps of the checkpoints with a manifest."""
        found = (folder or self.out).glob("checkpoints/step_*/manifest.json")
        return sorted(int(path.parent.name.removeprefix("step_")) for path in found)

    def checkpoint(self, step, folder=None):
        return (folder or self.out) / "checkpoints" / f"step_{step:06d}"

    def resuming(self, config):
        return {**config, "output": {**config["output"], "if_exists": "resume"}}

    def last_step(self):
        path = self.out / "metrics.jsonl"
        lines = path.read_bytes()[-5000:].splitlines() if path.exists() else []
        steps = [record["step"] for record in map(_record, lines) if record.get("event") == "step"]
        return max(steps, default=0)

    def assert_same_run(self, folder, other, delta=0.0):
        """Every step once, with the same numbers; without `delta` to the last bit, and the same model."""
        for event, keys in (("step", EXACT), ("validation", ("cross_entropy",))):
            ones, others = self.metrics(event, folder), self.metrics(event, other)
            self.assertEqual([r["step"] for r in ones], [r["step"] for r in others])
            for one, two in zip(ones, others):
                for key in keys:
                    if delta == 0:
                        self.assertEqual(one[key], two[key], f"{key} of step {one['step']}")
                    else:
                        self.assertAlmostEqual(one[key], two[key], delta=delta * abs(two[key]))
        if delta == 0:
            models = [(f / "model" / "model.safetensors").read_bytes() for f in (folder, other)]
            self.assertTrue(models[0] == models[1], "the models differ")


def _record(line):
    try:
        return json.loads(line)
    except ValueError:  # half a line: it is being written
        return {}


class TrainStopped(ResumingCase):
    """Signals in mid-job."""

    def long_training(self, **train):
        """Steps that compute more than they wait for messages, which takes long on a busy machine."""
        job = self.training(train={"steps": STEPS, "sequence_tokens": 1000, "validate_every": 150,
                                   "validation_share": 0.3, "checkpoint_every": 100, **train})
        (self.dir / "text.txt").write_text(tiny_model.document(3000))
        return job

    def stopped(self, config, send):
        before = self.last_step()
        run = self.start_training(config)
        run.wait_for(lambda: self.last_step() > before + 10, "steps")
        pids = run.alive()
        self.assertEqual(len(pids), 2)
        send(run, pids)
        run.wait()
        self.assertEqual(run.code, 75, run.err)
        self.assertEqual(run.alive(), [])
        self.assertEqual(run.err.count("stopped on request after step"), 1, run.err)
        self.assertNotIn(" error: ", run.err)
        stopped = self.metrics("stopped")[-1]["step"]
        self.assertEqual(stopped, self.last_step())
        self.assertLess(stopped, STEPS, "the job was over before it was stopped")
        self.assertEqual(self.checkpoints()[-1], stopped)
        return stopped

    def test_stopped_and_resumed_is_one_run(self):
        """SIGTERM to one rank only, then SIGUSR2 to the other; in the end nothing tells that it was two stops."""
        config = self.long_training()
        first = self.stopped(config, lambda run, pids: os.kill(pids[1], signal.SIGTERM))
        second = self.stopped(self.resuming(config), lambda run, pids: os.kill(pids[0], signal.SIGUSR2))
        self.assertGreater(second, first)
        run = self.train_well(self.resuming(config))
        self.assertIn(f"step {second} of {STEPS}", run.err)
        parts, self.out = self.out, self.dir / "whole"
        self.train_well({**config, "output": {"directory": str(self.out)}})
        self.assert_same_run(parts, self.out)
        self.assertEqual(len(self.checkpoints(parts)), 2)
        self.assertEqual(self.metrics("run", parts)[-1]["resumed_step"], second)

    def test_launcher_passes_the_signal_on(self):
        self.stopped(self.long_training(), lambda run, pids: run.process.send_signal(signal.SIGUSR2))

    def test_saved_on_request_and_gone_on(self):
        config = self.long_training(checkpoint_every=0)
        run = self.start_training(config)
        run.wait_for(lambda: self.last_step() > 10, "steps")
        self.assertEqual(self.checkpoints(), [])
        os.kill(run.alive()[1], signal.SIGUSR1)
        run.wait_for(lambda: self.checkpoints(), "checkpoint")
        saved = self.checkpoints()[0]
        self.assertLess(saved, STEPS)
        run.wait()
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(self.checkpoints(), [saved, STEPS])


class TrainResumed(ResumingCase):
    """Jobs that go on from a checkpoint in the middle: later ones are taken away."""

    def setUp(self):
        super().setUp()
        self.job = self.training(train={"steps": 30, "checkpoint_every": 10, "checkpoint_keep": 3})

    def back_to(self, step):
        for later in self.checkpoints():
            if later > step:
                shutil.rmtree(self.checkpoint(later))

    def test_on_other_ranks(self):
        """2, then 3, then 1 ranks, beside 2 all the way, which also go back once: that must change no bit."""
        self.train_well(self.job)
        self.assertEqual(self.checkpoints(), [10, 20, 30])
        whole, self.out = self.out, self.dir / "parts"
        shutil.copytree(whole, self.out)
        job = self.resuming({**self.job, "output": {"directory": str(self.out)}})
        self.back_to(10)
        run = self.train_well(job)
        self.assertIn("written by 2 ranks: step 10 of 30", run.err)
        self.assert_same_run(self.out, whole)
        for ranks, before, step in ((3, 2, 10), (1, 3, 20)):
            self.back_to(step)
            run = self.train_well(job, ranks=ranks)
            self.assertIn(f"written by {before} ranks: step {step} of 30", run.err)
        self.assert_same_run(self.out, whole, delta=1e-5)
        for part in self.checkpoint(20).glob("optimizer_*.h5"):
            with h5py.File(part) as file:
                for bucket in file.values():
                    begin, end, total = bucket["range"][:]
                    self.assertLessEqual(end, total)
                    for array in ("master", "first_moment", "second_moment"):
                        self.assertEqual(bucket[array].shape, (end - begin,))
                        self.assertTrue(np.isfinite(bucket[array][:]).all())

    def test_a_checkpoint_is_a_model(self):
        self.train_well(self.job)
        scored = self.succeed(self.config(model={"path": str(self.checkpoint(20))}, tasks=["score"],
                                          input={"prompts": None}, output={"directory": str(self.dir / "scores")}))
        self.assertEqual(len(scored), 1)

    def test_a_finished_job_has_nothing_to_do(self):
        self.train_well(self.job)
        before = (self.out / "model" / "model.safetensors").read_bytes()
        shutil.rmtree(self.out / "model")
        self.train_well(self.resuming(self.job))
        self.assertEqual((self.out / "model" / "model.safetensors").read_bytes(), before)
        self.assertEqual([r["step"] for r in self.metrics("step")], list(range(1, 31)))
        # More steps are another matter: the learning rate falls anew, the job goes on.
        more = {**self.job, "train": {**self.job["train"], "steps": 35}}
        run = self.train_well(self.resuming(more))
        self.assertIn("train.steps was 30, is 35", run.err)
        # Fewer cannot be had any more.
        before = files_below(self.out)
        fewer = {**self.job, "train": {**self.job["train"], "steps": 34}}
        self.assert_refused(self.train(self.resuming(fewer)), "of step 35, beyond train.steps, which is 34")
        self.assert_untouched(before)
        self.assertEqual([r["step"] for r in self.metrics("step")], list(range(1, 36)))

    def test_without_a_checkpoint_it_begins(self):
        run = self.train_well(self.resuming(self.job))
        self.assertNotIn("goes on from", run.err)
        self.assertEqual(self.checkpoints(), [10, 20, 30])
        # Records of a job that was killed before its first checkpoint are taken back.
        shutil.rmtree(self.out / "checkpoints")
        self.train_well(self.resuming(self.job))
        self.assertEqual([r["step"] for r in self.metrics("step")], list(range(1, 31)))

    def test_of_another_job_is_refused(self):
        self.train_well(self.job)
        shutil.rmtree(self.checkpoint(30))  # so that there are records which a resumed job would take back
        before = files_below(self.out)

        def refused(*words, **train):
            job = self.resuming({**self.job, "train": {**self.job["train"], **train}})
            self.assert_refused(self.train(job), "another training job", *words)
            self.assert_untouched(before)

        refused("train.seed was 0, is 1", seed=1)
        refused("train.sequence_tokens was 160, is 120", "train.validation_share was 0.2, is 0.1", sequence_tokens=120,
                validation_share=0.1)
        # The same arrays, which are another function.
        model = self.own_model(shape={"rope_theta": 500.0})
        job = self.resuming({**self.job, "model": {"path": str(model)}})
        self.assert_refused(self.train(job), "another training job", '"rope_theta":10000.0', '"rope_theta":500.0')
        self.assert_untouched(before)
        # It would be without effect: the weights that go on have their own.
        job = self.resuming({**self.job, "attention": {**self.job["attention"], "landmark_bias": -1}})
        self.assert_refused(self.train(job), "another training job", 'attention.landmark_bias was "auto", is -1')
        self.assert_untouched(before)
        (self.dir / "text.txt").write_text("Another text. " * 400)
        refused("the training data was")

    def assert_untouched(self, before):
        now = files_below(self.out)
        for files in (before, now):
            files.pop("log.jsonl", None)  # of all runs, the refused ones too
        self.assertEqual(now, before)

    def test_a_run_is_not_written_over(self):
        self.train_well(self.job)
        (self.out / "metrics.jsonl").unlink()  # the checkpoints alone are a run too
        self.assert_refused(self.train(self.job), "an earlier training run", "if_exists: resume")
        replaced = {**self.job, "train": {**self.job["train"], "steps": 5},
                    "output": {**self.job["output"], "if_exists": "replace"}}
        before = files_below(self.out)
        broken = self.own_model()
        (broken / "model.safetensors").write_bytes(b"no weights")
        self.assert_refused(self.train({**replaced, "model": {"path": str(broken)}}), "model.safetensors")
        self.assert_untouched(before)
        self.train_well(replaced)
        self.assertEqual(self.checkpoints(), [5])
        self.assertEqual([r["step"] for r in self.metrics("step")], list(range(1, 6)))

    def test_metrics_that_are_no_file(self):
        """A pipe there would be waited for without end."""
        self.train_well(self.job)
        self.back_to(20)
        metrics = self.out / "metrics.jsonl"
        lines = metrics.read_bytes().splitlines(keepends=True)
        for make, words in ((os.mkfifo, "pipe"), (os.mkdir, "directory")):
            metrics.unlink()
            make(metrics)
            self.assert_refused(self.train(self.resuming(self.job)), "metrics.jsonl", words)
            os.rmdir(metrics) if metrics.is_dir() else metrics.unlink()
            metrics.write_bytes(b"".join(lines))
        # What is no record is dropped, and said.
        metrics.write_bytes(b"".join(lines[:5]) + b"\xff[[[ damaged\n" + b"".join(lines[5:]) + b'{"event":"st')
        run = self.train_well(self.resuming(self.job))
        self.assertIn("2 damaged lines dropped", run.err)
        self.assertEqual([r["step"] for r in self.metrics("step")], list(range(1, 31)))

    def test_the_model_it_started_from_is_not_written_over(self):
        self.train_well(self.job)
        for model in (self.out / "model", self.checkpoint(10), self.out / "model" / ".." / "model"):
            for mode in ("replace", "resume"):
                before = files_below(self.out)
                job = {**self.job, "model": {"path": str(model)}, "output": {**self.job["output"], "if_exists": mode}}
                self.assert_refused(self.train(job), "model.path", "choose another output.directory")
                self.assert_untouched(before)

    def test_a_model_folder_holds_one_model(self):
        """Files of another model that an earlier job left would be taken for this one's."""
        self.train_well(self.job)
        for name in ("tokenizer.model", "chat_template.jinja", "generation_config.json", "model.safetensors.index.json"):
            (self.out / "model" / name).write_text("of another model")
        (self.out / "model" / "README.md").write_text("a user's own")
        self.train_well({**self.job, "output": {**self.job["output"], "if_exists": "replace"}})
        self.assertEqual(sorted(p.name for p in (self.out / "model").iterdir()),
                         ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])

    def test_two_jobs_do_not_share_a_folder(self):
        long = self.training(train={"steps": 100000})
        run = self.start_training(long)
        run.wait_for(lambda: self.last_step() > 10, "steps")
        self.assert_refused(self.train(self.resuming(long)), "another job is writing into this folder")
        shutil.rmtree(self.out / "checkpoints", ignore_errors=True)  # another folder of them changes nothing
        self.assert_refused(self.train(self.resuming(long)), "another job is writing into this folder", self.out)
        os.kill(run.alive()[0], signal.SIGTERM)
        run.wait()
        self.assertEqual(run.code, 75, run.err)

    def test_a_training_and_a_reading_do_not_share_a_folder(self):
        training = self.training(train={"steps": 100000})
        run = self.start_training(training)
        run.wait_for(lambda: self.last_step() > 10, "steps")
        self.assert_refused(self.infer(self.config()), "another job is writing into this folder", self.out)
        self.assertEqual(list(self.out.glob("results*")), [])
        os.kill(run.alive()[0], signal.SIGTERM)
        run.wait()
        self.assertEqual(run.code, 75, run.err)
        self.assertEqual([p.name for p in self.out.rglob("*.lock")], [])

        self.document.write_text(tiny_model.document(40000))
        self.out = self.dir / "reading"
        run = self.start(self.config())
        run.wait_for((self.out / ".longhalo.lock").exists, "reading")
        there = set(self.out.iterdir())
        again = self.training(output={"directory": str(self.out)})
        self.assert_refused(self.train(again), "another job is writing into this folder", self.out)
        self.assertLessEqual({p.name for p in set(self.out.iterdir()) - there}, {"log.jsonl", "metrics.prom"})  # its own
        self.assertEqual(len(run.alive()), 2, "the reading goes on")

    def test_several_jobs_started_at_once(self):
        runs = [self.start_training(self.training(train={"steps": 200, "checkpoint_every": 50})) for _ in range(3)]
        for run in runs:
            run.wait(120)
        self.assertEqual(sorted(run.code for run in runs), [0, 2, 2], [run.err for run in runs])
        for run in runs:
            self.assertEqual(run.alive(), [])
            if run.code == 2:
                self.assertRegex(run.err, "another job is writing into this folder|an earlier training run")
        self.assertEqual([r["step"] for r in self.metrics("step")], list(range(1, 201)))
        self.assertEqual(self.checkpoints(), [150, 200])
