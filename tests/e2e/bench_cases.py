"""`longhalo bench` in small: tables for people, JSON for programs, sound arithmetic, and refusals that say why."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys

import numpy as np

from harness import EXECUTABLE, SOURCE, Case, Run


class BenchCase(Case):
    """Runs benchmarks and checks what all of them promise."""

    def bench(self, *arguments, ranks=2, repeats=2, environment=None):
        path = self.dir / "bench.json"
        run = Run(["bench", *arguments, "--repeats", repeats, "--json", path], ranks=ranks,
                  environment=environment).wait(120)
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(run.alive(), [])
        result = json.loads(path.read_text())
        for key, value in result.items():
            if key == "benchmark":
                self.assertTrue(run.out.startswith(value + "\n"), run.out)
                continue
            self.assertRegex(run.out, rf"(?m)^  {key} ")
            if isinstance(value, list):
                self.assertRegex(run.out, rf"(?m)^  {key} +{len(value)} below")
        return result

    def assert_row(self, row, **expected):
        """The keys and values of one row of a table, and times that are times."""
        for key, value in expected.items():
            self.assertEqual(row[key], value, row)
        self.assertGreater(row["min_seconds"], 0)
        self.assertLessEqual(row["min_seconds"], row["median_seconds"])

    def assert_near(self, value, expected):
        self.assertAlmostEqual(value / expected, 1, places=9)


class Bench(BenchCase):
    """On the CPU; the environment of these tests says run.device: cpu."""

    def test_attention(self):
        result = self.bench("attention", "--tokens", 300, "--window", 64, "--stride", 16, "--heads", 4, "--kv-heads", 2,
                            "--head-dim", 16)
        self.assertEqual((result["tokens"], result["ranks"]), (300, 2))
        self.assert_near(result["attention_over_matmul"], result["attention_gflops"] / result["matmul_gflops"])
        self.assertLess(result["relative_error"], 1e-5)
        pairs = sum(min(i + 1, 64) + max(0, (i - 64) // 16 + 1) for i in range(300))
        self.assert_near(result["attention_gflops"] * result["median_seconds"], 4 * 16 * 4 * pairs / 1e9)

    def test_attention_of_a_later_shard(self):
        result = self.bench("attention", "--tokens", 100, "--first-query", 5000, "--window", 64, "--stride", 16,
                            "--heads", 2, "--kv-heads", 1, "--head-dim", 8)
        self.assertLess(result["relative_error"], 1e-5)
        pairs = sum(64 + (i - 64) // 16 + 1 for i in range(5000, 5100))
        self.assert_near(result["attention_gflops"] * result["median_seconds"], 4 * 8 * 2 * pairs / 1e9)

    def test_attention_backward_is_for_gpus(self):
        run = Run(["bench", "attention", "--tokens", 64, "--backward", "true"]).wait(60)
        self.assert_refused(run, "on CUDA only", "bench.backward")

    def test_gemm(self):
        result = self.bench("gemm", "--tokens", 33, "--outputs", 48, "--inputs", 70)
        (row,) = result["products"]
        self.assert_row(row, precision="fp32", rows=33, outputs=48, inputs=70)
        self.assert_near(row["tflops"] * row["median_seconds"], 2 * 33 * 48 * 70 / 1e12)
        self.assert_near(row["matmul_percent"], 100 * row["tflops"] / result["matmul_tflops"])
        self.assertLess(row["relative_error"], 1e-5)

    def test_gemm_of_nothing_in_particular(self):
        result = self.bench("gemm", ranks=1)
        self.assertGreater(result["matmul_tflops"], 0)
        self.assertNotIn("products", result)
        run = Run(["bench", "gemm", "--help"], ranks=0).wait()
        self.assertIn("Matrix products of an 8B layer (on CUDA), or of one shape", run.out)

    def test_json_through_a_link(self):
        """A link, as to another disk, stays one: the report is where it leads, though none was there yet."""
        (self.dir / "far").mkdir()
        (self.dir / "bench.json").symlink_to("far/report.json")
        for _ in range(2):
            result = self.bench("copy", "--bytes", 100001, ranks=1)
            self.assertTrue((self.dir / "bench.json").is_symlink())
            self.assertEqual(json.loads((self.dir / "far" / "report.json").read_text()), result)
        self.assertEqual([p.name for p in (self.dir / "far").iterdir()], ["report.json"])

    def test_copy(self):
        result = self.bench("copy", "--bytes", 100001)
        (row,) = result["copies"]  # one thread a rank
        self.assert_row(row, copy="host to host", threads=1, bytes_moved=200002)
        self.assert_near(row["gb_per_second"] * row["median_seconds"], 200002 / 1e9)

    def test_copy_by_threads(self):
        result = self.bench("copy", "--bytes", 1000003, "--set", "run.threads=3", ranks=1)
        self.assertEqual([row["threads"] for row in result["copies"]], [1, 3])

    def test_halo(self):
        for ranks in (2, 3):
            result = self.bench("halo", "--bytes", 5000, ranks=ranks)
            self.assertEqual(result["ranks"], ranks)
            self.assertEqual([row["bytes"] for row in result["messages"]], [8, 32, 128, 512, 2048, 5000])
            for row in result["messages"]:
                self.assert_row(row, transport="mpi, host memory")
                self.assert_near(row["gb_per_second"] * row["median_seconds"], row["bytes"] / 1e9)

    def test_prefill(self):
        shape = {"layers": 2, "hidden": 48, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocabulary": 400}
        sets = [word for key, value in shape.items() for word in ("--set", f"model.shape.{key}={value}")]
        result = self.bench("prefill", "--tokens", 300, "--window", 64, "--stride", 16, "--set", "model.weights=random",
                            *sets)
        self.assertLess(result["relative_error"], 1e-5)
        self.assertGreater(result["time_over_products"], 0)
        self.assertEqual(result["halo_bytes"], 2 * 2 * 64 * 2 * 16 * 4)

    def test_step(self):
        shape = {"layers": 3, "hidden": 48, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocabulary": 400}
        sets = [word for key, value in shape.items() for word in ("--set", f"model.shape.{key}={value}")]
        for store, every in (("off", 1), ("nvme", 2)):
            more = ["--directory", self.dir] if store == "nvme" else []
            result = self.bench("step", "--tokens", 300, "--window", 64, "--stride", 16, "--set",
                                "model.weights=random", "--store", store, "--every", every, *more, *sets)
            self.assertEqual((result["activations"], result["every"], result["ranks"]), (store, every, 2))
            self.assertLess(result["gradient_error"], 1e-2)
            layer = 48 * (2 * 64 + 2 * 32 + 3 * 96)
            self.assert_near(result["products_gflop"], 6 * 300 * (3 * layer + 48 * 400) / 1e9)
            self.assert_near(result["mfu"] * result["time_over_products"], 1)
            self.assertEqual(result["recomputed_gflop"] > 0, store == "nvme")
            # Three steps store the inputs of layers 0 and 2.
            self.assertEqual(result["stored_bytes"], 3 * 2 * 300 * 48 * 4 if store == "nvme" else 0)
            phases = {row["phase"]: row for row in result["phases"]}
            self.assertGreater(phases["backward"]["mean"], phases["exposed_halo"]["mean"])

    def test_storage(self):
        result = self.bench("storage", "--bytes", 3_000_000, "--directory", self.dir)
        self.assertEqual(result["wrong_bytes"], 0)
        self.assertLessEqual(result["bytes"], 3_000_000)
        self.assertGreater(result["bytes"], 2_900_000)
        self.assertEqual(len(result["rates"]), 4)
        for row in result["rates"]:
            self.assertLessEqual(row["min_seconds"], row["median_seconds"])
            self.assert_near(row["gb_per_second"] * row["median_seconds"], 2 * result["bytes"] / 1e9)
        self.assertEqual([p.name for p in self.dir.iterdir() if "longhalo-" in p.name], [], "not its lock either")


class BenchRefusals(Case):
    """What cannot be measured is refused with words, on any machine."""

    def refused(self, *arguments, words, ranks=2, environment=None):
        run = Run(["bench", *arguments], ranks=ranks, environment=environment).wait()
        self.assert_refused(run, *words)

    def test_more_than_memory(self):
        """2.5 PB: more than a process can address, whatever the machine promises."""
        run = Run(["bench", "attention", "--tokens", 1 << 40]).wait()
        self.assertEqual(run.code, 2, run.err)
        self.assertIn("out of host memory", run.err)
        self.assertEqual(run.alive(), [])

    def test_messages_or_a_store_larger_than_memory(self):
        """Said before anything is taken, by the option, with what there is."""
        # 1 TiB: two of eight layers and buffers of the store; what two ranks send, receive and compare; from and to.
        for name, ranks, gigabytes in (("storage", 1, 275), ("halo", 2, 3298), ("copy", 1, 2199)):
            run = Run(["bench", name, "--bytes", 1 << 40], ranks=ranks).wait()
            self.assert_refused(run, "bench.bytes 1099511627776 (--bytes) asks for ", "MB of host memory", "there are ",
                                "make bench.bytes smaller")
            asked, there = map(int, re.search(r"asks for (\d+) MB .* there are (\d+) MB", run.err).groups())
            self.assertEqual(asked // 1000, gigabytes, run.err)
            self.assertLess(there, asked)

    def test_threads_in_doubt(self):
        """One warning for all ranks, with what OMP_NUM_THREADS says and what there is."""
        cores = len(os.sched_getaffinity(0))
        for value, words in (("0", "OMP_NUM_THREADS='0' is no number of threads"), ("few", "OMP_NUM_THREADS='few' is no"),
                             (str(cores + 3), f"the {cores + 3} threads of a rank take turns on {cores} core"), ("1", None)):
            run = Run(["bench", "copy", "--bytes", 100, "--repeats", 1], environment={"OMP_NUM_THREADS": value}).wait()
            self.assertEqual(run.code, 0, run.err)
            self.assertEqual(run.err.count("warning: "), 0 if words is None else 1, run.err)
            if words is not None:
                self.assertIn(words, run.err)
                self.assertIn("(2 of 2 ranks)", run.err)
                self.assertIn("run.threads", run.err)

    def test_head_dimension(self):
        self.refused("attention", "--tokens", 64, "--head-dim", 20, words=("bench.head_dim 20", "multiple of 8"))

    def test_json_that_cannot_be_written(self):
        path = self.dir / "no_folder" / "bench.json"
        self.refused("attention", "--tokens", 64, "--window", 32, "--stride", 8, "--repeats", 1, "--json", path,
                     words=(path,))

    def test_full_standard_output(self):
        """What was measured is in the report, although nobody can see the table."""
        path = self.dir / "bench.json"
        words = ["sh", "-c", '"$@" >/dev/full', "sh", EXECUTABLE, "bench", "copy", "--bytes", "100", "--json", path]
        run = subprocess.run(words, capture_output=True, text=True, timeout=60)
        self.assertEqual(run.returncode, 2, run.stderr)
        self.assertIn("standard output cannot be written", run.stderr)
        self.assertEqual(len(json.loads(path.read_text())["copies"][0]), 6)

    def test_json_in_place_of_another_file(self):
        """A config named by mistake stays as it is, and nothing is measured."""
        config = self.write("job.yaml", "attention: {window: 32, landmark_stride: 8}\n")
        run = Run(["bench", "attention", "--config", config, "--tokens", 64, "--json", config]).wait()
        self.assert_refused(run, "no report of longhalo", config, "name another file")
        self.assertEqual(run.out, "")
        self.assertEqual(config.read_text(), "attention: {window: 32, landmark_stride: 8}\n")

    def test_no_gpu(self):
        self.refused("gemm", "--set", "run.device=cuda", environment={"CUDA_VISIBLE_DEVICES": ""},
                     words=("run.device is cuda, but there is no GPU", "run.device: cpu"))

    def test_precision_without_gpu(self):
        self.refused("gemm", "--precision", "bf16", "--set", "run.device=auto",
                     environment={"CUDA_VISIBLE_DEVICES": ""}, words=("fp32 alone", "run.precision"))

    def test_precision_beside_the_cpu(self):
        self.refused("gemm", "--precision", "fp8", "--set", "run.device=cpu", words=("run.precision", "run.device"))

    def test_transport_beside_the_cpu(self):
        self.refused("halo", "--transport", "staged", "--set", "run.device=cpu", words=("run.transport", "run.device"))

    def test_halo_alone(self):
        self.refused("halo", words=("at least two ranks",), ranks=1)

    def test_half_a_product(self):
        self.refused("gemm", "--outputs", 64, words=("bench.outputs 64", "bench.inputs 0"))


class BenchGpu(BenchCase):
    """On the GPU. The ranks share one, so that any machine that has one will do."""

    CUDA = ("--set", "run.device=cuda", "--set", "run.share_gpus=true")
    ONE_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    PRODUCT = ("gemm", "--tokens", 256, "--outputs", 128, "--inputs", 384)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        trial = Run(["bench", *cls.PRODUCT, "--repeats", 1, "--precision", "bf16", *cls.CUDA], ranks=1).wait(120)
        reason = re.search(r"there is no GPU\n  where:  (.*)", trial.err)
        cls.no_gpu = reason.group(1) if reason else ""

    def setUp(self):
        super().setUp()
        if self.no_gpu:
            self.skipTest(f"no GPU: {self.no_gpu}")

    def cuda(self, *arguments, **kwargs):
        return self.bench(*arguments, *self.CUDA, environment=self.ONE_GPU, **kwargs)

    def assert_rates(self, result):
        self.assertGreater(result["matmul_tflops"], 1)
        self.assertGreater(result["copy_gb_per_second"], 10)

    def test_attention(self):
        result = self.cuda("attention", "--tokens", 1000, "--first-query", 3000, "--window", 500, "--stride", 50,
                           "--heads", 6, "--kv-heads", 2, "--head-dim", 64, "--kernel", "all", ranks=1)
        self.assert_rates(result)
        kernels = [row["kernel"] for row in result["kernels"]]
        self.assertIn(kernels, (["portable"], ["hopper", "portable"]))
        pairs = sum(500 + (i - 500) // 50 + 1 for i in range(3000, 4000))
        self.assert_near(result["useful_tflop"], 4 * 64 * 6 * pairs / 1e12)
        for row in result["kernels"]:
            self.assert_row(row)
            self.assert_near(row["useful_tflops"] * row["median_seconds"], result["useful_tflop"])
            self.assert_near(row["matmul_percent"], 100 * row["useful_tflops"] / result["matmul_tflops"])
            self.assertLess(row["relative_error"], 5e-3)

    def test_attention_backward(self):
        result = self.cuda("attention", "--tokens", 1000, "--window", 300, "--stride", 50, "--heads", 4, "--kv-heads", 2,
                           "--head-dim", 128, "--kernel", "all", "--backward", "true", ranks=1)
        rows = {row["kernel"]: row for row in result["kernels"]}
        wanted = ["portable", "portable backward"]
        if "hopper" in rows:
            wanted += ["hopper", "hopper backward", "hopper backward, deterministic"]
        self.assertCountEqual(rows, wanted)
        for name, row in rows.items():
            self.assert_row(row)
            work = result["useful_tflop"] * (2.5 if "backward" in name else 1)
            self.assert_near(row["useful_tflops"] * row["median_seconds"], work)
            self.assertLess(row["relative_error"], 1e-2)

    def test_attention_of_four_bands(self):
        result = self.cuda("attention", "--tokens", 4096, "--bands",
                           "[[1, 0, 256], [16, 256, 1024], [64, 1024, 2048], [128, 2048, inf]]", "--heads", 4,
                           "--kv-heads", 4, "--head-dim", 128, ranks=1)
        (row,) = result["kernels"]
        self.assertLess(row["relative_error"], 5e-3)

    def test_attention_of_a_head_dimension_that_it_has_not(self):
        run = Run(["bench", "attention", "--tokens", 64, "--head-dim", 32, *self.CUDA]).wait(60)
        self.assert_refused(run, "head dimension 64 or 128", "bench.head_dim 32")

    def test_step(self):
        shape = {"layers": 3, "hidden": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocabulary": 400}
        sets = [word for key, value in shape.items() for word in ("--set", f"model.shape.{key}={value}")]
        results = []
        for store, every in (("device", 1), ("host", 1.5), ("nvme", 1)):
            more = ["--directory", self.dir] if store == "nvme" else []
            result = self.cuda("step", "--tokens", 700, "--window", 100, "--stride", 32, "--set",
                               "model.weights=random", "--store", store, "--every", every, *more, *sets)
            self.assertGreater(result["planned_mb"], result["device_peak_mb"])
            self.assert_rates(result)
            self.assertEqual((result["activations"], result["every"], result["ranks"]), (store, every, 2))
            self.assertGreater(result["hardware_utilisation"], result["mfu"])
            phases = {row["phase"]: row["mean"] for row in result["phases"]}
            self.assertLess(phases["forward"] + phases["loss"] + phases["backward"], 2 * result["median_seconds"])
            results.append(result)
        self.assertLess(abs(results[0]["loss"] - math.log(400)), 1)
        for other in results[1:]:  # the fastest products are chosen anew, and add in other orders
            self.assertLess(abs(other["loss"] - results[0]["loss"]), 0.01)

    def test_gemm(self):
        result = self.cuda(*self.PRODUCT, ranks=1)
        self.assert_rates(result)
        self.assertIn([row["precision"] for row in result["products"]], (["bf16"], ["bf16", "fp8"], ["bf16", "fp8", "int8"]))
        for row in result["products"]:
            self.assert_row(row, rows=256, outputs=128, inputs=384)
            self.assert_near(row["tflops"] * row["median_seconds"], 2 * 256 * 128 * 384 / 1e12)
            self.assertLess(row["relative_error"], 1e-2)

    def test_gemm_of_inputs_that_int8_does_not_take(self):
        sizes = ["gemm", "--tokens", 64, "--outputs", 128, "--inputs", 48]
        result = self.cuda(*sizes, ranks=1)
        self.assertIn([row["precision"] for row in result["products"]], (["bf16"], ["bf16", "fp8"]))
        run = Run(["bench", *sizes, "--precision", "int8", "--set", "run.device=cuda"], ranks=1,
                  environment=self.ONE_GPU).wait(60)
        self.assert_refused(run, "multiples of 64", "bench.inputs 48", "--precision bf16")

    def test_copy(self):
        result = self.cuda("copy", "--bytes", 64 << 20, ranks=1)
        moved = {row["copy"]: row["bytes_moved"] for row in result["copies"]}
        self.assertEqual(moved, {"device to device": 128 << 20, "host to device, pinned": 64 << 20,
                                 "device to host, pinned": 64 << 20, "both ways at once, pinned": 128 << 20})
        for row in result["copies"]:
            self.assert_row(row)
            self.assert_near(row["gb_per_second"] * row["median_seconds"], row["bytes_moved"] / 1e9)

    def test_halo(self):
        result = self.cuda("halo", "--bytes", 100000)
        staged = [row for row in result["messages"] if row["transport"] == "staged"]
        self.assertEqual([row["bytes"] for row in staged], [8, 32, 128, 512, 2048, 8192, 32768, 100000])
        for row in result["messages"]:
            self.assert_row(row)
            self.assert_near(row["gb_per_second"] * row["median_seconds"], row["bytes"] / 1e9)
        self.assertIn("no_nccl", result, "NCCL takes no two ranks on one GPU")

    def test_two_ranks_on_one_gpu_unasked(self):
        run = Run(["bench", *self.PRODUCT, "--set", "run.device=cuda"],
                  environment=self.ONE_GPU).wait(60)
        self.assert_refused(run, "run.share_gpus")


class Peers(Case):
    """scripts/bench_peers.py, as far as it goes without PyTorch."""

    SCRIPT = SOURCE / "scripts/bench_peers.py"

    def test_without_pytorch(self):
        self.write("torch.py", "raise ImportError('none here')")
        run = subprocess.run([sys.executable, self.SCRIPT], capture_output=True, text=True, timeout=60,
                             env={**os.environ, "PYTHONPATH": str(self.dir)})
        self.assertEqual(run.returncode, 2, run.stderr)
        self.assertIn("PyTorch is missing", run.stderr)
        self.assertIn("remedy: ", run.stderr)

    def test_blocks_are_those_of_the_definition(self):
        spec = importlib.util.spec_from_file_location("bench_peers", self.SCRIPT)
        peers = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(peers)
        for tokens, window, stride in ((1024, 200, 64), (1024, 512, 1), (1024, 129, 0), (512, 128, 2), (512, 900, 64)):
            pattern = peers.Pattern(tokens, window, stride)
            i, j, g = np.arange(tokens)[:, None], np.arange(tokens), np.arange(pattern.padded)
            seen = np.concatenate([(j <= i) & (j > i - window), g * max(stride, 1) <= i - window], axis=1)
            self.assertEqual(pattern.pairs(), seen.sum())
            for row in (0, 255, tokens - 1):
                self.assertEqual(pattern.visible(row), np.flatnonzero(seen[row]).tolist())
            blocks = seen.reshape(tokens // 128, 128, -1, 128)
            some, every = blocks.any((1, 3)), blocks.all((1, 3))
            for row in range(tokens // 128):
                partly, wholly = pattern.blocks(row)
                self.assertEqual(wholly, np.flatnonzero(every[row]).tolist(), (tokens, window, stride, row))
                self.assertEqual(partly, np.flatnonzero(some[row] & ~every[row]).tolist(), (tokens, window, stride, row))
