"""Ranks that were started apart, or find other files on their host than rank 0 on its own: refused by all, before work."""

import json
import os
import shutil
import unittest

import tiny_model
from disk_full_cases import may_mount
from harness import EXECUTABLE, MPIEXEC, Run, files_below, records_of, shared_model
from train_cases import TrainingCase


@unittest.skipUnless(may_mount(), "mounts in a private namespace are not permitted here (unshare -m, as root)")
class UnlikeHosts(TrainingCase):
    """Rank 1 is on a host of its own, as far as its mounts go."""

    def run_with(self, on_second, subcommand, config, **kwargs):
        path = self.write(f"{subcommand}{len(list(self.dir.iterdir()))}.json", json.dumps(config))
        here = [EXECUTABLE, subcommand, "--config", str(path)]
        return Run([subcommand, "--config", path], ranks=0,
                   before=[MPIEXEC, "--oversubscribe", "--bind-to", "none", "-n", "1", *here, ":", "-n", "1",
                           "unshare", "-m", "sh", "-ec", f'{on_second}; exec "$@"', "sh"], **kwargs).wait()

    def refused(self, on_second, subcommand, config, *words, **kwargs):
        run = self.run_with(on_second, subcommand, config, **kwargs)
        self.assert_refused(run, *words)
        for file in ("results.jsonl", "metrics.jsonl", "checkpoints", "model"):
            self.assertFalse((self.out / file).exists(), file)

    def jobs_with(self, model):
        model = {"path": str(model)}
        return ("infer", self.config(model=model)), ("train", self.training(model=model, train={"steps": 2}))

    def other_model(self, change):
        """An own model, and a mount of another one over it."""
        model, other = self.own_model(), self.dir / "other"
        shutil.copytree(model, other)
        change(other)
        return model, f"mount --bind {other} {model}"

    def test_the_same_on_both(self):
        """The others fail for what differs alone: copies of one model may lie on each host."""
        model, mount = self.other_model(lambda folder: os.utime(folder / "config.json", (1, 1)))
        for subcommand, job in self.jobs_with(model):
            run = self.run_with(mount, subcommand, job)
            self.assertEqual(run.code, 0, run.err)

    def test_other_numbers_of_the_model(self):
        """The same arrays, which are another function: nothing but a comparison tells."""
        def change(folder):
            (folder / "config.json").write_text(json.dumps({**tiny_model.CONFIG, "rope_theta": 500.0}))
        model, mount = self.other_model(change)
        for subcommand, job in self.jobs_with(model):
            self.refused(mount, subcommand, job, '"rope_theta":500.0', '"rope_theta":10000.0', model / "config.json",
                         "rank:   1 on host")

    def test_other_weights(self):
        def change(folder):
            tensors = tiny_model.tensors()
            name = "model.layers.1.mlp.down_proj.weight"
            kind, shape, data = tensors[name]
            tensors[name] = (kind, shape, data[:-1] + bytes([data[-1] ^ 1]))
            tiny_model.write_safetensors(folder / "model.safetensors", tensors)
        model, mount = self.other_model(change)
        for subcommand, job in self.jobs_with(model):
            self.refused(mount, subcommand, job, "the fingerprint of the weights", model, "the same model")

    def test_other_tokens_to_train_on(self):
        files = []
        for name, change in (("tokens.h5", 0), ("other.h5", 1)):
            files.append(self.dir / name)
            tiny_model.write_tokens(files[-1], shared_model(), [[1 + (7 * i + change * (i == 250)) % 300
                                                                 for i in range(300)] for _ in range(4)])
        job = self.training(train={"steps": 2, "validation_share": 0})
        job["input"] = {"tokens": str(files[0])}
        self.refused(f"mount --bind {files[1]} {files[0]}", "train", job, "the fingerprint of the tokens", files[0])

    def test_other_settings(self):
        """Whatever the other host's environment says, rank 0's settings are everybody's."""
        job = self.config(tasks=["score"])
        here = next(iter(self.succeed(job).values()))
        self.out = self.dir / "out2"
        run = self.run_with("export LONGHALO_ATTENTION__WINDOW=9 LONGHALO_TASKS=[embed]", "infer",
                            {**job, "output": {"directory": str(self.out)}})
        self.assertEqual(run.code, 0, run.err)
        (there,) = records_of(self.out).values()
        self.assertEqual((there["task"], there["perplexity"]), (here["task"], here["perplexity"]))

    def test_an_output_folder_that_is_private(self):
        """Each rank writes its part of a checkpoint there: not after hours, at the first one, is that to be found."""
        self.out.mkdir()
        self.refused(f"mount -t tmpfs none {self.out}", "train", self.training(), "does not see what rank 0 writes",
                     self.out, "shared file system")
        self.assertEqual(files_below(self.out), {})

    def test_an_output_folder_that_is_relative_to_another(self):
        """Where a host has no such working folder, srun starts its ranks in /tmp."""
        self.refused("cd /tmp", "train", self.training(output={"directory": "out"}), "does not see what rank 0 writes",
                     f"this relative path starts at {self.dir}", cwd=self.dir)


class StartedApart(TrainingCase):

    def test_ranks_that_do_not_know_each_other(self):
        """Another MPI's mpirun starts as many jobs as there were to be ranks, each alone."""
        train = self.write("train.json", json.dumps(self.training()))
        infer = self.write("infer.json", json.dumps(self.config()))
        for variable in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
            for line in (["infer", "--config", infer], ["train", "--config", train], ["bench", "copy"]):
                run = Run(line, ranks=0, environment={variable: "4"}).wait()
                self.assert_refused(run, "MPI sees 1 rank", f"4, as {variable} says", "the mpirun of the MPI")
        self.assertFalse(self.out.exists())

    def test_another_working_folder(self):
        """srun --chdir and mpirun -wdir start ranks elsewhere: the message says where a relative path began."""
        elsewhere = self.dir / "elsewhere"
        elsewhere.mkdir()
        config = self.config(input={"documents": ["document.txt"]})
        for line in (["--config", "job.json"], ["--config", self.write("job.json", json.dumps(config))],
                     ["--config", self.write("other.json", json.dumps(self.config(model={"path": "model"})))]):
            run = Run(["infer", *line], cwd=elsewhere).wait()
            self.assert_refused(run, f"this relative path starts at {elsewhere}")
