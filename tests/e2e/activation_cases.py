"""Activation checkpointing through whole jobs: the same numbers whatever keeps the activations, plans, and what happens
when the disk that holds them is damaged, full, or littered by jobs that died."""

import ctypes
import fcntl
import os
import random
import re
import signal
import unittest
from pathlib import Path

import h5py

from disk_full_cases import may_mount
from train_cases import TrainingCase

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


def layers_of(file):
    """{layer: (offset, bytes)} of an activation file."""
    with h5py.File(file, "r", locking=False) as f:
        return {int(name.removeprefix("layer_")): (group["x"].id.get_offset(), group["x"].id.get_storage_size())
                for name, group in f["step_state"].items()}


def files_in(folder):
    return sorted(Path(folder).glob("longhalo-activations@*/activations.h5"))


class ActivationCase(TrainingCase):

    def setUp(self):
        super().setUp()
        self.scratch = self.dir / "scratch"
        self.scratch.mkdir()

    def keeping(self, store, every=1, train=None, **sections):
        """A job that keeps its activations so."""
        activations = {"store": store, "every": every}
        if store == "nvme":
            activations["directory"] = str(self.scratch)
        return self.training(activations=activations, train={"validation_share": 0, **(train or {})}, **sections)

    def endless(self, **sections):
        return self.keeping("nvme", train={"steps": 10_000_000, "learning_rate": 1e-5, "log_every": 1000}, **sections)

    def wait_for_files(self, run, count=2, folder=None):
        """The activation files of a job that is under way: they are written when the first steps are."""
        def written():
            try:
                files = files_in(folder or self.scratch)
                return files if len(files) == count and all(layers_of(f) for f in files) else None
            except (OSError, KeyError):  # not laid out yet
                return None
        return run.wait_for(written, "activation files", 60)


class ScratchFolder(ActivationCase):
    """A folder that cannot be used is a fault of jobs that need it, and of their plans; of no others."""

    def lock(self):
        return self.scratch / f".longhalo-activations.{os.geteuid()}.lock"

    def unusable(self):
        """(name, what makes it so, words of the refusal)"""
        yield "no folder", lambda: (self.scratch.rmdir(), self.scratch.write_text("")), "cannot be made: a file of that name"
        yield "no lock", lambda: self.lock().symlink_to("nowhere"), "a link has the name of the file by which jobs keep out"
        yield "no room", lambda: setattr(self, "scratch", Path("/proc/none")), "cannot be made"  # that has no room either
        yield "no place", lambda: (self.scratch.rmdir(), self.scratch.symlink_to("nowhere")), "is a link that leads nowhere"

    def message(self, run):
        self.assert_refused(run)
        return run.err[run.err.index(" error: "):].split("\n---")[0]  # the launcher's own words follow

    def test_a_job_that_needs_it_is_refused_and_so_is_its_plan(self):
        for name, spoil, words in self.unusable():
            with self.subTest(name):
                self.scratch = self.dir / name.replace(" ", "_")
                self.scratch.mkdir()
                spoil()
                job = self.keeping("nvme", train={"steps": 2})
                message = self.message(self.train(job))
                self.assertIn(words, message)
                self.assertIn(str(self.scratch), message)
                plan = self.train(job, "--plan")
                self.assertEqual(self.message(plan), message)
                self.assertIn("activations: nvme, every 1", plan.out)
                self.assertFalse(self.out.exists(), "nothing is made for a job that cannot be")

    def test_a_job_that_needs_none_does_not_ask(self):
        for name, spoil, _ in self.unusable():
            with self.subTest(name):
                self.scratch = self.dir / name.replace(" ", "_")
                self.scratch.mkdir()
                spoil()
                self.out = self.dir / f"out_{name.replace(' ', '_')}"
                job = self.keeping("auto", train={"steps": 2}, output={"directory": str(self.out)})
                job["activations"]["directory"] = str(self.scratch)
                plan = self.train(job, "--plan")
                self.assertEqual(plan.code, 0, plan.err)
                self.train_well(job)

    def test_a_lock_that_another_process_holds_is_waited_for_by_none_that_needs_no_disk(self):
        with open(self.lock(), "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            job = self.keeping("auto", train={"steps": 2})
            job["activations"]["directory"] = str(self.scratch)
            run = self.train_well(job)
        self.assertLess(run.seconds, 60, "as long as the lock would be waited for")

    def test_one_that_is_yet_to_be_made(self):
        self.scratch = self.dir / "node" / "local"
        job = self.keeping("nvme", train={"steps": 2})
        plan = self.train(job, "--plan")
        self.assertEqual(plan.code, 0, plan.err)
        self.assertFalse(self.scratch.parent.exists())
        self.train_well(job)
        self.assertEqual(list(self.scratch.iterdir()), [])


class Activations(ActivationCase):

    def test_all_stores_give_the_same_numbers(self):
        runs = {}
        for store, every in (("off", 1), ("device", 1), ("host", 2), ("nvme", 1), ("nvme", 2), ("auto", 4)):
            self.out = self.dir / f"{store}{every}"
            self.train_well(self.keeping(store, every, output={"directory": str(self.out)},
                                         train={"steps": 4, "accumulation": 2}))
            runs[store, every] = [(s["loss"], s["gradient_norm"]) for s in self.metrics("step")]
            self.assertEqual(len(runs[store, every]), 4)
        for numbers in runs.values():
            self.assertEqual(numbers, runs["off", 1])
        self.assertEqual(list(self.scratch.iterdir()), [])

    def test_plan_prints_and_runs_nothing(self):
        for store, place in (("auto", "off"), ("nvme", "nvme")):
            run = self.train(self.keeping(store, train={"checkpoint_keep": 3}), "--plan")
            self.assertEqual(run.code, 0, run.err)
            self.assertIn(f"activations: {place}, every 1", run.out)
            items = re.findall(r"^  (.+?) +([\d.]+) MB", run.out, re.M)
            self.assertLessEqual({"weights", "gradients", "a rank in all", "disk: activations", "disk: job checkpoints",
                                  "disk: trained model"}, {name for name, _ in items})
            self.assertRegex(run.out, rf"disk: job checkpoints +[\d.]+ MB  of all ranks together, in {self.out}/checkpoints, "
                                      r"which has [\d.]+ MB free")
            self.assertFalse(self.out.exists())
            self.assertEqual(list(self.scratch.iterdir()), [])

    def test_what_does_not_fit_is_refused_with_the_setting_that_would(self):
        # 2^31 tokens: more than any machine has, with every store.
        huge = {"sequence_tokens": 2**31}
        for store in ("auto", "off", "device", "nvme"):
            run = self.train(self.keeping(store, train=huge), "--plan")
            self.assert_refused(run, "a training step needs", "train.sequence_tokens", "activations.store")
            self.assertIn("does not fit", run.out)
        run = self.train(self.keeping("auto", train={**huge, "packing": "one_document"}))
        self.assert_refused(run, "a training step needs")
        self.assertFalse(self.out.exists(), "no folder is made for a job that cannot be")
        run = self.train(self.keeping("off", 2))
        self.assert_refused(run, "activations.every 2", "has no effect with activations.store")
        run = self.train(self.training(activations={"store": "host", "directory": "/tmp"}))
        self.assert_refused(run, "activations.directory", "has no effect")

    def test_a_flipped_bit_stops_the_job(self):
        run = self.start_training(self.endless())
        generator = random.Random(os.urandom(8))
        files = self.wait_for_files(run)
        victim = files[generator.randrange(2)]
        layers = layers_of(victim)
        layer = generator.choice(sorted(layers))
        offset, size = layers[layer]
        # Each step rewrites the layer: a bit is changed until that happens between writing and reading.
        with open(victim, "r+b", buffering=0) as file:
            def flip():
                at = offset + generator.randrange(size)
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << generator.randrange(8)]), at)
            run.wait_for_end(flip)
        run.wait()
        self.assert_refused_late(run, victim, f"of layer {layer} are not those that were written", "checksum differs",
                                 "checkpoint")
        self.assertFalse((self.out / "model").exists())
        self.assertEqual(files_in(self.scratch), [], "a job that ends in an error clears its scratch folder")

    def assert_refused_late(self, run, *words):
        """As assert_refused, of a job that has run for a while."""
        run.seconds = 0
        self.assert_refused(run, *words)

    def test_folders_of_dead_jobs_go_those_of_live_jobs_stay(self):
        live = self.start_training(self.endless(output={"directory": str(self.dir / "live")}))
        kept = self.wait_for_files(live)
        dead = self.start_training(self.endless(output={"directory": str(self.dir / "dead")}))
        both = self.wait_for_files(dead, 4)
        for pid in dead.alive():
            os.kill(pid, signal.SIGKILL)
        dead.wait()
        dead.wait_gone()
        self.assertEqual(files_in(self.scratch), both, "nobody could clear up after a kill")

        run = self.train_well(self.keeping("nvme", train={"steps": 2}))
        self.assertEqual(run.err.count("which a job that is gone had left"), 2, run.err)
        self.assertEqual(files_in(self.scratch), kept)
        for pid in live.alive():
            os.kill(pid, signal.SIGTERM)
        live.wait()
        self.assertEqual(live.code, 75, live.err)
        self.assertEqual(files_in(self.scratch), [])


@unittest.skipUnless(may_mount(), "a tmpfs in a private mount namespace is not permitted here (unshare -m, as root)")
class ActivationsOnFullDisk(ActivationCase):
    """The scratch folder is a small file system that only the job sees."""

    def start_within(self, size, config):
        script = 'mount -t tmpfs -o "size=$1" tmpfs "$2" || exit 90; shift 2; exec "$@"'
        return self.start_training(config, before=["unshare", "-m", "sh", "-c", script, "sh", size, str(self.scratch)])

    def test_full_at_the_start(self):
        run = self.start_within("1m", self.endless()).wait()
        self.assert_refused(run, "of disk, but", self.scratch, "activations.store: device")
        self.assertFalse((self.out / "model").exists())

    def test_auto_takes_what_there_is(self):
        config = self.keeping("auto", every=2, train={"steps": 2})
        config["activations"]["directory"] = str(self.scratch)
        run = self.start_within("64k", config).wait()
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("activations: device", run.err)

    def test_full_in_the_middle(self):
        """The file is reserved at the start, so somebody has to take the space away: a hole in its place, and a filler."""
        run = self.start_within("16m", self.endless())
        pid = run.wait_for(lambda: next(iter(run.alive()), None), "rank", 30)
        inside = Path(f"/proc/{pid}/root{self.scratch}")
        files = self.wait_for_files(run, folder=inside)
        with open(files[0], "r+b") as file, open(inside / "filler", "wb", buffering=0) as filler:
            libc = ctypes.CDLL(None, use_errno=True)
            zeros = bytes(1 << 16)

            def take_space():
                for offset, size in layers_of(files[0]).values():
                    libc.fallocate64(file.fileno(), _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size))
                try:
                    for _ in range(256):
                        filler.write(zeros)
                except OSError:
                    pass
            run.wait_for_end(take_space)
        run.wait()
        run.seconds = 0
        # The next write finds no room, unless what was written before was to be read first.
        self.assert_refused(run, files[0].relative_to(inside))
        self.assertRegex(run.err, "error: (No space left|.*No space left|bytes .* are not those that were written)")
        self.assertFalse((self.out / "model").exists())
