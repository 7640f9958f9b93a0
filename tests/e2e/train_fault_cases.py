"""Training under faults: kills, damaged checkpoints, full disks, folders that vanish, numbers that are none.

After each of them the last good checkpoint is there, and a job that goes on from it does what an undisturbed one does.
"""

import json
import os
import random
import shutil
import signal
import time
import unittest
from pathlib import Path

import numpy as np

import tiny_model
from disk_full_cases import IN_A_MOUNT, make_read_only, may_mount
from train_resume_cases import ResumingCase

# Enough for every run of the tests; fifty, as scripts/soak.sh does faults by the hundred, when checkpoints change.
KILLS = int(os.environ.get("LONGHALO_TESTS_KILLS", 12))


def on_a_disk_in_memory(case):
    """A killed process loses nothing that the kernel holds, so a disk in memory shows the same and is quick."""
    if os.access("/dev/shm", os.W_OK):
        case.out = Path("/dev/shm") / case.dir.name
        case.addCleanup(shutil.rmtree, case.out, ignore_errors=True)


class TrainKilled(ResumingCase):

    def test_while_checkpoints_are_written(self):
        """kill -9 of one rank at random moments of a job that always writes a checkpoint, and on from what is left."""
        on_a_disk_in_memory(self)
        job = self.training(train={"steps": 1000000, "schedule": "warmup_stable_decay", "validation_share": 0,
                                   "checkpoint_every": 1})
        generator = random.Random()
        last = 0
        for _ in range(KILLS):
            run = self.start_training(self.resuming(job))
            run.wait_for(lambda: (self.checkpoints() or [0])[-1] > last, "checkpoint after those that were there")
            pids = run.alive()
            time.sleep(generator.uniform(0, 0.1))
            os.kill(generator.choice(pids), signal.SIGKILL)
            run.wait()
            self.assertNotIn(run.code, (0, 75))
            run.wait_gone()
            kept = self.checkpoints()
            self.assertGreater(kept[-1], last, "what was committed stays")
            self.assertNotIn("cannot be used", run.err, "nothing half-written is taken for a checkpoint")
            last = kept[-1]
        print(f"{KILLS} kills, {last} steps")
        run = self.start_training(self.resuming(job))
        run.wait_for(lambda: "goes on from" in run.so_far() and self.last_step() > last, "steps")
        os.kill(run.alive()[0], signal.SIGTERM)
        run.wait()
        self.assertEqual(run.code, 75, run.err)
        steps = {r["step"]: r["loss"] for r in self.metrics("step")}
        self.assertEqual(list(steps), list(range(1, len(steps) + 1)), "every step is recorded once")
        # The same job in one go: not one bit of its losses may differ.
        self.out = self.out.with_name(self.out.name + "_whole")
        self.addCleanup(shutil.rmtree, self.out, ignore_errors=True)
        whole = {**job, "output": {"directory": str(self.out)}, "train": {**job["train"], "checkpoint_every": 0}}
        run = self.start_training(whole)
        run.wait_for(lambda: self.last_step() >= len(steps), "steps of the undisturbed job", timeout=60)
        os.kill(run.alive()[0], signal.SIGTERM)
        run.wait()
        undisturbed = {r["step"]: r["loss"] for r in self.metrics("step")}
        self.assertEqual(steps, {step: undisturbed[step] for step in steps})

    def test_stopped_while_a_checkpoint_is_written(self):
        job = self.training(train={"steps": 1000000, "schedule": "warmup_stable_decay", "checkpoint_every": 1})
        run = self.start_training(job)
        run.wait_for(lambda: self.checkpoints(), "checkpoint")
        os.kill(run.alive()[0], signal.SIGTERM)
        run.wait()
        self.assertEqual(run.code, 75, run.err)
        self.assertEqual(self.checkpoints()[-1], self.last_step())


class TrainFaults(ResumingCase):

    def setUp(self):
        super().setUp()
        self.job = self.training(train={"steps": 30, "checkpoint_every": 10, "checkpoint_keep": 3})

    def after_damage(self, damage, *words):
        """A whole run; damage(folder of the newest checkpoint); the resumed job does the last steps again."""
        self.train_well(self.job)
        whole = self.dir / "whole"
        shutil.copytree(self.out, whole)
        damage(self.checkpoint(30))
        run = self.train_well(self.resuming(self.job))
        for word in ("step_000030 cannot be used", "step 20 of 30", *words):
            self.assertIn(word, run.err)
        self.assert_same_run(self.out, whole)
        self.assertEqual(self.checkpoints(), [10, 20, 30])

    def damage(self, name, change):
        def apply(folder):
            (path,) = folder.glob(name)
            path.write_bytes(change(path.read_bytes()))
        return apply

    @staticmethod
    def flipped(contents):
        at = random.randrange(len(contents))
        return contents[:at] + bytes([contents[at] ^ 1 << random.randrange(8)]) + contents[at + 1:]

    @staticmethod
    def truncated(contents):
        return contents[: random.randrange(len(contents))]

    @staticmethod
    def of_json(change):
        """A change that a reader of JSON sees: not of the line's end behind it, nor of e to E in a number."""
        def apply(contents):
            while True:
                changed = change(contents)
                try:
                    if json.loads(changed) == json.loads(contents):
                        continue
                except ValueError:
                    pass
                return changed
        return apply

    def test_flipped_weights(self):
        self.after_damage(self.damage("model.safetensors", self.flipped), "model.safetensors")

    def test_truncated_weights(self):
        self.after_damage(self.damage("model.safetensors", self.truncated), "model.safetensors")

    def test_flipped_optimizer(self):
        self.after_damage(self.damage("optimizer_00002_of_00002.h5", self.flipped), "optimizer_00002_of_00002.h5")

    def test_truncated_optimizer(self):
        self.after_damage(self.damage("optimizer_00001_of_00002.h5", self.truncated), "optimizer_00001_of_00002.h5")

    def test_flipped_manifest(self):
        self.after_damage(self.damage("manifest.json", self.of_json(self.flipped)), "manifest.json")

    def test_truncated_manifest(self):
        self.after_damage(self.damage("manifest.json", self.of_json(self.truncated)), "manifest.json")

    def test_missing_part(self):
        self.after_damage(lambda folder: (folder / "optimizer_00001_of_00002.h5").unlink(), "optimizer_00001_of_00002.h5")

    def test_all_damaged(self):
        """To begin anew is then for the user to say."""
        self.train_well(self.job)
        for step in self.checkpoints():
            self.damage("model.safetensors", self.flipped)(self.checkpoint(step))
        run = self.train(self.resuming(self.job))
        self.assert_refused(run, "no checkpoint in this folder can be used", "step_000010", "step_000020", "step_000030")
        self.assertEqual(self.checkpoints(), [10, 20, 30])

    def test_folder_removed(self):
        job = self.training(train={"steps": 800, "validate_every": 800, "checkpoint_every": 20})
        run = self.start_training(job)
        run.wait_for(lambda: self.checkpoints(), "checkpoint")
        shutil.rmtree(self.out / "checkpoints", ignore_errors=True)
        removed_at = self.last_step()
        run.wait()
        self.assertEqual(run.code, 0, run.err)
        self.assertLess(removed_at, 760, "the folder was removed too late to tell")
        self.assertEqual(self.checkpoints(), [780, 800])
        self.train_well(self.resuming({**job, "train": {**job["train"], "steps": 810}}))

    def test_nobody_reads_the_log_any_more(self):
        """`longhalo train ... 2>&1 | head`, or a terminal that went away: what is said is lost, the job is not."""
        job = self.training(train={"steps": 40, "validate_every": 5})
        run = self.start_training(job, ranks=0, before=["bash", "-c", '"$@" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}', "bash"])
        run.wait()
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(len(run.out.splitlines()), 1)
        self.assertEqual([record["step"] for record in self.metrics("step")], list(range(1, 41)))
        self.assertTrue((self.out / "model" / "model.safetensors").exists())

    def test_output_removed(self):
        """All of it, by somebody who cleans up: the job goes on, and the next checkpoint makes the folder anew."""
        job = self.training(train={"steps": 200, "validate_every": 200, "checkpoint_every": 40})
        run = self.start_training(job)
        run.wait_for(lambda: self.last_step() > 2, "steps")
        shutil.rmtree(self.out, ignore_errors=True)
        run.wait()
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("metrics.jsonl was removed", run.err)
        self.assertEqual(self.checkpoints()[-1], 200)
        steps = [record["step"] for record in self.metrics("step")]
        self.assertEqual(steps, list(range(steps[0], 201)))
        self.train_well(self.resuming({**job, "train": {**job["train"], "steps": 210}}))

    def test_model_folder_changed(self):
        """What the trained model has of it beside weights was read at the start."""
        model = self.own_model()
        job = self.training(model={"path": str(model)}, train={"steps": 150, "validate_every": 150})
        before = {name: (model / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
        run = self.start_training(job)
        run.wait_for(lambda: self.last_step() > 2, "steps")
        (model / "tokenizer.json").write_text("{}")
        (model / "config.json").write_text(json.dumps({**tiny_model.CONFIG, "rope_theta": 77.0}))
        (model / "tokenizer_config.json").unlink()
        self.assertLess(self.last_step(), 140, "the job was over before")
        run.wait()
        self.assertEqual(run.code, 0, run.err)
        for folder in (self.out / "model", self.checkpoint(150)):
            self.assertEqual({name: (folder / name).read_bytes() for name in before}, before)
            self.assertEqual(json.loads((folder / "config.json").read_text())["rope_theta"], 10000.0)

    def test_not_finite(self):
        """A word of probability 0: each step that has to foresee it is skipped by all ranks, and only those.

        It stands in the last rank's shard: the other rank's own loss is finite.
        """
        untied = {"tie_word_embeddings": False}
        model, token = self.own_model(shape=untied), tiny_model.VOCABULARY - 1
        contents = tiny_model.tensors("F32", config=untied)

        def change(name, source, how):
            kind, shape, data = contents[source]
            values = np.frombuffer(data, np.float32).reshape(shape).copy()
            how(values)
            contents[name] = (kind, shape, values.tobytes())

        # Dimension 0 of the residual stream is positive and no layer changes it by much: the word's score overflows.
        def head(values):
            values[:, 0] = 0
            values[token, 0] = -3e38

        change("model.norm.weight", "model.norm.weight", lambda values: values[:1].fill(100))
        change("lm_head.weight", "model.embed_tokens.weight", head)
        change("model.embed_tokens.weight", "model.embed_tokens.weight", lambda values: values[:, 0].fill(4))
        for layer in range(2):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                name = f"model.layers.{layer}.{name}.weight"
                change(name, name, lambda values: values[0].fill(0))
        tiny_model.write_safetensors(model / "model.safetensors", contents)
        tokens = self.dir / "tokens.h5"
        tiny_model.write_tokens(tokens, model, [[token if (d, i) == (3, 190) else 1 + (7 * i + d) % 300
                                                 for i in range(200)] for d in range(6)])
        job = self.config(model={"path": str(model)}, input={"documents": None, "prompts": None, "tokens": str(tokens)},
                          tasks=[], train={"steps": 18, "sequence_tokens": 200, "learning_rate": 1e-3, "packing":
                                           "one_document", "checkpoint_every": 1, "checkpoint_keep": 2})
        self.train_well(job)
        steps = self.metrics("step")
        skipped = [s["step"] for s in steps if s["skipped"]]
        self.assertEqual(len(skipped), 3, "the document is read once in each of three epochs")
        self.assertEqual(steps[-1]["skipped_steps"], 3)
        for step in steps:
            self.assertEqual(step["loss"] is None, step["skipped"])
        model = Path(self.out / "model" / "model.safetensors").read_bytes()
        # Without patience the job stops at the first one, and the checkpoint before it stays as it is.
        kept = self.out
        self.out = self.dir / "impatient"
        job = {**job, "output": {"directory": str(self.out)}, "train": {**job["train"], "most_skipped": 0}}
        self.assert_refused(self.train(job), "not finite", f"up to step {skipped[0]}")
        good = skipped[0] - 1
        self.assertEqual(self.checkpoints()[-1:], [good] if good else [])
        self.assertFalse((self.out / "model").exists())
        before = {p.name: p.read_bytes() for p in self.checkpoint(good).iterdir()} if good else {}
        self.assert_refused(self.train(self.resuming(job)), "not finite", f"up to step {skipped[0]}")
        if good:
            self.assertEqual({p.name: p.read_bytes() for p in self.checkpoint(good).iterdir()}, before)
        # With it the job goes on from there to the same end.
        self.train_well(self.resuming({**job, "train": {**job["train"], "most_skipped": 5}}))
        self.assertEqual((self.out / "model" / "model.safetensors").read_bytes(), model)
        self.assertEqual([s["loss"] for s in self.metrics("step")], [s["loss"] for s in self.metrics("step", kept)])


@unittest.skipUnless(may_mount(), "a tmpfs in a private mount namespace is not permitted here (unshare -m, as root)")
class TrainFullDisk(ResumingCase):

    def test_full_after_one_checkpoint(self):
        """Room for one checkpoint, not for two: the job goes on, says so, and ends with an error; the one is good."""
        mount, kept = self.dir / "mount", self.dir / "kept"
        mount.mkdir()
        kept.mkdir()
        self.out = mount / "out"
        job = self.training(train={"steps": 30, "checkpoint_every": 10})
        before = ["unshare", "-m", "sh", "-c", IN_A_MOUNT, "sh", mount, "size=1700k", kept, "rw"]
        run = self.train(job, before=[str(word) for word in before])
        self.assert_refused(run, "bytes needed", "free")
        self.assertIn("there is no checkpoint of step 20, the job goes on", run.err)
        self.out = kept / "out"
        self.assertEqual(self.checkpoints(), [10])
        self.assertEqual([r["step"] for r in self.metrics("checkpoint_failed")], [20])
        self.assertTrue((self.out / "model" / "model.safetensors").exists(), "there was room for the model")
        self.assertEqual([p.name for p in self.out.rglob("*.tmp.*")], [])
        # Where there is room, it goes on from the one that is there.
        parts, self.out = self.out, self.dir / "whole"
        whole = {**job, "output": {"directory": str(self.out)}}
        self.train_well(whole)
        run = self.train_well(self.resuming({**job, "output": {"directory": str(parts)}}))
        self.assertIn("step 10 of 30", run.err)
        self.assert_same_run(parts, self.out)

    def test_read_only(self):
        run = self.train(self.training(), before=["unshare", "-m", "sh", "-ec", "mkdir $0; mount -t tmpfs -o ro t $0; "
                                                  'exec "$@"', str(self.out)])
        self.assert_refused(run, self.out, "ead-only file system")

    def test_read_only_from_the_middle_on(self):
        """No checkpoint can be written any more: said each time, and at the end an error; the last good one is used."""
        job = self.training(train={"steps": 4000, "validate_every": 4000, "checkpoint_every": 20})
        run = self.start_training(job, before=["unshare", "-m"])
        run.wait_for(self.checkpoints, "checkpoint")
        make_read_only(run, self.out)
        kept = self.checkpoints()
        run.wait_for(lambda: "the job goes on: " in run.so_far(), "warning")
        os.kill(run.alive()[1], signal.SIGTERM)
        run.wait()
        run.seconds = 0
        self.assert_refused(run, "ead-only file system", self.out / "checkpoints")
        self.assertEqual(self.checkpoints(), kept)
        again = self.train_well(self.resuming({**job, "train": {**job["train"], "steps": kept[-1] + 10}}))
        self.assertIn(f"step {kept[-1]} of", again.err)
