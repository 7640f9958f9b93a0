"""Which device a job computes on, and whole jobs on the GPU beside the same jobs on the CPU.

cli_test.py runs everything with LONGHALO_RUN__DEVICE=cpu; what is asked here goes by --set, which beats it.
"""

import json
import os
import re

import h5py
import numpy as np

import tiny_model
from harness import Case, Run, records_of

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
CUDA = ("--set", "run.device=cuda")


class DeviceSetting(Case):
    """What run.device, run.precision and the memory of the machine allow."""

    def test_cuda_without_gpu(self):
        run = self.infer(self.config(), *CUDA, environment=NO_GPU)
        self.assert_refused(run, "run.device is cuda, but there is no GPU", "run.device: cpu", "LONGHALO_CUDA=ON")
        self.assertFalse((self.out / "results.jsonl").exists() and (self.out / "results.jsonl").read_text())

    def test_eight_bits_without_gpu(self):
        for precision in ("fp8", "int8"):
            run = self.infer(self.config(), "--set", "run.device=auto", "--set", f"run.precision={precision}",
                             environment=NO_GPU)
            self.assert_refused(run, "the CPU computes in fp32 alone", "run.precision")

    def test_auto_without_gpu_is_the_cpu_and_says_so(self):
        run = self.infer(self.config(tasks=["score"]), "--set", "run.device=auto", environment=NO_GPU)
        self.assertEqual(run.code, 0, run.err)
        self.assertRegex(run.err, r"computing on the CPU in fp32 \(run\.device auto\): \S")
        header = json.loads((self.out / "log.jsonl").read_text().splitlines()[0])
        self.assertEqual(header["devices"], ["CPU", "CPU"])
        self.assertEqual(header["precision"], "fp32")
        self.assertIn("host memory", header["transport"])

    def test_more_than_memory_is_said_before_the_run(self):
        """1.6 TB of residual stream: by item, and what would fit."""
        run = Run(["bench", "prefill", "--tokens", 100_000_000, "--window", 64, "--stride", 0, "--set",
                   "model.weights=random", *shape(layers=1, hidden=4096, ffn=64, heads=1, kv_heads=1, head_dim=64,
                                                  vocabulary=400)]).wait(120)
        self.assert_refused(run, "residual stream 8", "keys and values of a layer", "weights", "but host ")
        ranks = int(re.search(r"use (\d+) ranks", run.err).group(1))
        tokens = int(re.search(r"at most about (\d+) tokens", run.err).group(1))
        self.assertGreater(ranks, 2)
        self.assertTrue(0 < tokens < 100_000_000)


def shape(**sizes):
    return [word for key, value in sizes.items() for word in ("--set", f"model.shape.{key}={value}")]


class OneGpu:
    """What cases have that run on one GPU; they are skipped where there is none."""

    ONE_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": tiny_model.VOCABULARY}

    def setUp(self):
        super().setUp()
        trial = Run(["bench", "layer", "--tokens", 64, "--repeats", 1, "--set", "model.weights=random", *CUDA],
                    ranks=1).wait(120)
        reason = re.search(r"there is no GPU\n  where:  (.*)", trial.err)
        if reason:
            self.skipTest(f"no GPU: {reason.group(1)}")


class InferGpu(OneGpu, Case):
    """On the GPU, which two ranks share: the same job on the CPU is the judge."""

    def on_gpu(self, config, *more, ranks=2):
        run = self.infer(config, *CUDA, "--set", "run.share_gpus=true", *more, ranks=ranks, environment=self.ONE_GPU,
                         timeout=120)
        self.assertEqual(run.code, 0, run.err)
        return run, records_of(config["output"]["directory"])

    def arrays(self, folder, records):
        found = {}
        for record in records.values():
            if record["task"] != "generate":
                with h5py.File(folder / record["arrays"]) as file:
                    found.update({name: file[name][:] for name in file})
        return found

    def test_agrees_with_the_cpu(self):
        model = self.own_model(shape=self.SHAPE)
        config = self.config(model={"path": str(model)}, embed={"chunk_tokens": 32})
        on_cpu = self.succeed(config)
        cpu = self.arrays(self.out, on_cpu)
        for precision, tolerance in (("bf16", 2**-5), ("fp8", 2**-2), ("int8", 2**-3)):  # nats, a mean over tokens
            out = self.dir / precision
            config["output"]["directory"] = str(out)
            run, records = self.on_gpu(config, "--set", f"run.precision={precision}")
            if precision != "bf16" and "compute capability" in run.err and run.code:
                continue
            self.assertEqual(records.keys(), on_cpu.keys())
            gpu = self.arrays(out, records)
            np.testing.assert_array_equal(gpu["tokens"], cpu["tokens"])
            difference = gpu["scores"][1:] - cpu["scores"][1:]
            self.assertLess(np.mean(np.abs(difference)), tolerance)
            if precision == "bf16":
                norm = np.linalg.norm(cpu["embeddings"])
                self.assertLess(np.linalg.norm(gpu["embeddings"] - cpu["embeddings"]) / norm, 2**-5)
            for record in records.values():
                self.assertGreater(record["figures"]["peak_device_memory_bytes"], 1 << 20)
            header = json.loads((out / "log.jsonl").read_text().splitlines()[0])
            self.assertEqual(len(header["devices"]), 2)
            self.assertNotIn("CPU", header["devices"])
            self.assertEqual(header["precision"], precision)
            self.assertIn("staged", header["transport"])

    def test_auto_takes_the_gpu(self):
        config = self.config(model={"path": str(self.own_model(shape=self.SHAPE))}, tasks=["score"])
        run = self.infer(config, "--set", "run.device=auto", ranks=1, environment=self.ONE_GPU)
        self.assertEqual(run.code, 0, run.err)
        self.assertRegex(run.err, r"computing on .* in bf16, which every rank has \(run\.device auto\)")

    def test_results_of_the_cpu_are_not_resumed_on_the_gpu(self):
        """Records of two precisions would mix."""
        config = self.config(model={"path": str(self.own_model(shape=self.SHAPE))}, tasks=["score"])
        self.succeed(config, ranks=1)
        config["tasks"] = ["score", "embed"]
        config["output"]["if_exists"] = "resume"
        self.assert_refused(self.infer(config, *CUDA, ranks=1), "other settings")

    def test_head_dimension(self):
        run = self.infer(self.config(), *CUDA, ranks=1)
        self.assert_refused(run, "a head dimension of 16", "64 and 128", "run.device: cpu")
        auto = self.infer(self.config(tasks=["score"]), "--set", "run.device=auto", ranks=1)
        self.assertEqual(auto.code, 0, auto.err)
        self.assertIn("run.device auto is the CPU here, although there are GPUs", auto.err)

    def test_more_than_memory_is_said_before_the_run(self):
        run = Run(["bench", "prefill", "--tokens", 50_000_000, "--window", 64, "--stride", 16, *CUDA, "--set",
                   "model.weights=random", *shape(layers=1, hidden=8192, ffn=64, heads=1, kv_heads=1, head_dim=64,
                                                  vocabulary=400)], ranks=1).wait(120)
        self.assert_refused(run, "residual stream 819200 MB", "GPU 0", "ranks, each with as much memory", "at most about")

    def test_ranks_that_would_share_a_gpu(self):
        run = self.infer(self.config(model={"path": str(self.own_model(shape=self.SHAPE))}), *CUDA,
                         environment=self.ONE_GPU)
        self.assert_refused(run, "run.share_gpus")
