"""What a job tells while it runs: its records, the Prometheus file, links with errors, slow ranks; and the page that
scripts/report.py makes of it."""

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest

import h5py
import numpy as np

import tiny_model
from harness import SOURCE
from train_cases import TrainingCase

try:
    import matplotlib
except ImportError:
    matplotlib = None

# Long enough to be met by what a test does meanwhile; tests end these jobs by a signal.
MANY_STEPS = 100000


class TelemetryCase(TrainingCase):

    def prometheus(self):
        """{name: [(labels, value)]} of the file, whose form is checked."""
        text = (self.out / "metrics.prom").read_text()
        self.assertTrue(text.endswith("\n"))
        found, typed = {}, set()
        for line in text.splitlines():
            if line.startswith("# "):
                typed.add(line.split()[2])
                continue
            name, labels, value = re.fullmatch(r"([a-z_]+)\{(.*)\} (\S+)", line).groups()
            self.assertIn(name, typed)
            found.setdefault(name, []).append((dict(re.findall(r'([a-z_]+)="([^"]*)"', labels)), float(value)))
        return found

    def start_long(self, *more, **train):
        """A training job that goes on until it is stopped; each rank has a half of each sequence."""
        job = self.training(train={"steps": MANY_STEPS, "sequence_tokens": 256, "validation_share": 0,
                                   "checkpoint_every": 0, "learning_rate": 1e-3, **train})
        return self.start_training(job, *more)

    def stop(self, run):
        for pid in run.alive():
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
        run.wait(60)
        self.assertEqual(run.code, 75, run.err)

    def first(self, event, **keys):
        """The first record of this event with these values, if it is there yet."""
        if not (self.out / "metrics.jsonl").exists():
            return None
        fits = [r for r in self.metrics(event) if all(r[k] == v for k, v in keys.items())]
        return fits[0] if fits else None


class Telemetry(TelemetryCase):

    def test_what_a_step_says(self):
        scratch = self.dir / "scratch"
        scratch.mkdir()
        steps, every, layers, window = 6, 2, 2, 40
        self.train_well(self.training(
            train={"steps": steps, "log_every": every, "sequence_tokens": 256, "validation_share": 0},
            activations={"store": "nvme", "directory": str(scratch)}))
        records = self.metrics("step")
        self.assertEqual([r["step"] for r in records], [2, 4, 6])
        host = socket.gethostname()
        for record in records:
            self.assertLessEqual({"forward", "loss", "backward", "recompute", "optimizer", "exposed_halo", "exposed_landmarks",
                                  "exposed_return", "exposed_reduction", "exposed_store"}, set(record["phases"]))
            for name, spread in {**record["phases"], **record["memory"]}.items():
                self.assertTrue(0 <= spread["min"] <= spread["mean"] <= spread["max"], name)
                if spread["min"] < spread["max"]:
                    self.assertIn(spread["rank"], (0, 1))
                    self.assertEqual(spread["host"], host)
            self.assertGreater(record["phases"]["forward"]["min"], 0)
            seconds = record["seconds_per_step"]
            self.assertAlmostEqual(record["tokens_per_second"], 256 / seconds, delta=1e-6 * 256 / seconds)
            # Useful FLOPs of a sequence, by hand: 6 a weight and token (the head is tied to the embedding), and
            # attention's 4 and 10 a channel for each key that a query sees.
            hidden, heads, head_dim, kv, ffn = tiny_model.HIDDEN, 4, 16, 2 * 16, tiny_model.CONFIG["intermediate_size"]
            weights = layers * hidden * (2 * heads * head_dim + 2 * kv + 3 * ffn) + hidden * tiny_model.VOCABULARY
            seen = sum(min(i + 1, window) + max((i - window) // 8 + 1, 0) for i in range(256))
            flops = 6 * weights * 256 + 14 * head_dim * heads * layers * seen
            self.assertAlmostEqual(record["mfu"] * record["matmul_flops_per_second"] * seconds, flops, delta=1e-6 * flops)
            moved = record["bytes"]
            # The second rank's halo: keys and values of 40 tokens, 2 x 16 fp32, in two layers; again in backward, from
            # the stored input. Their gradients go back once.
            halo = layers * window * 2 * kv * 4 * every
            self.assertEqual(moved["halo"], 2 * halo)
            self.assertGreater(moved["return"], halo)
            self.assertGreater(moved["landmarks"], 0)
            self.assertEqual(moved["store_put"], layers * 256 * hidden * 4 * every)
            self.assertEqual(moved["store_fetched"], moved["store_put"])
            # Two ranks: each gradient goes to its owner and each weight comes back from there.
            self.assertGreater(moved["reduction"], 2 * 4 * weights * every)
            self.assertGreater(record["memory"]["peak_resident"]["min"], 1 << 20)
            self.assertEqual(record["memory"]["peak_device_arrays"]["max"], 0, "there is no device")

        told = self.prometheus()
        self.assertEqual(told["longhalo_step"], [({"command": "train", "job": "local"}, steps)])
        self.assertAlmostEqual(told["longhalo_loss"][0][1], records[-1]["loss"], places=6)
        halo = [v for labels, v in told["longhalo_bytes_total"] if labels["kind"] == "halo"]
        self.assertEqual(halo, [sum(r["bytes"]["halo"] for r in records)])
        forward = {labels["stat"]: v for labels, v in told["longhalo_phase_seconds"] if labels["phase"] == "forward"}
        self.assertAlmostEqual(forward["mean"], records[-1]["phases"]["forward"]["mean"], places=6)
        self.assertEqual(told["longhalo_running"][0][1], 0, "it is done")
        self.assertFalse((self.out / "metrics.prom.longhalo-tmp").exists())

    def test_every_number_is_defined(self):
        """docs/telemetry.md names each key of a record."""
        page = (SOURCE / "docs" / "telemetry.md").read_text()
        scratch = self.dir / "scratch"
        scratch.mkdir()
        self.train_well(self.training(train={"steps": 4, "validate_every": 2, "checkpoint_every": 2},
                                      activations={"store": "nvme", "directory": str(scratch)}))
        records = [r for event in ("step", "validation", "checkpoint") for r in self.metrics(event)]
        self.assertEqual({r["event"] for r in records}, {"step", "validation", "checkpoint"})
        self.out = self.dir / "read"
        figures = [r["figures"] for r in self.succeed(self.config()).values()]
        self.assertTrue(any("decode_tokens_per_second" in f for f in figures))
        for record in records + figures:
            for key, value in record.items():
                self.assertIn(f"`{key}`", page)
                if key in ("phases", "bytes", "memory", "phase_seconds"):
                    for part in value:
                        self.assertIn(f"`{part}`", page, key)

    def test_the_last_validation_is_told(self):
        self.train_well(self.training(train={"steps": 3, "log_every": 3, "validate_every": 3}))
        told = self.prometheus()
        last = self.metrics("validation")[-1]
        self.assertEqual(last["step"], 3)
        self.assertAlmostEqual(told["longhalo_validation_cross_entropy"][0][1], last["cross_entropy"], places=6)

    def test_what_a_document_says(self):
        records = self.succeed(self.config(telemetry={"prometheus": str(self.dir / "elsewhere.prom")}))
        for record in records.values():
            figures = record["figures"]
            self.assertGreater(figures["mfu"], 0)
            self.assertGreater(figures["matmul_flops_per_second"], 0)
            for spread in (*figures["phase_seconds"].values(), figures["exposed_communication_seconds"]):
                self.assertTrue(0 <= spread["min"] <= spread["mean"] <= spread["max"])
            self.assertEqual(figures["phase_seconds"]["attention"]["host"], socket.gethostname())
        self.assertFalse((self.out / "metrics.prom").exists())
        (self.dir / "elsewhere.prom").rename(self.out / "metrics.prom")
        told = self.prometheus()
        self.assertEqual(told["longhalo_running"], [({"command": "infer", "job": "local"}, 0)])
        self.assertEqual(told["longhalo_documents_total"], [({"command": "infer", "job": "local"}, 1)])
        self.assertEqual(told["longhalo_document_tokens"][0][1], next(iter(records.values()))["sequence_tokens"])

    def test_a_link_with_errors_is_named(self):
        counters = self.dir / "infiniband" / "mlx5_3" / "ports" / "2" / "counters"
        counters.mkdir(parents=True)
        (counters / "symbol_error").write_text("40\n")
        (counters / "port_rcv_data").write_text("1\n")
        run = self.start_long("--set", f"telemetry.link_counters={self.dir / 'infiniband'}")
        run.wait_for(lambda: self.first("step"), "step", 60)
        self.assertEqual(self.prometheus()["longhalo_running"][0][1], 1)
        self.assertIsNone(self.first("link_errors"), "40 errors are of the time before")
        (counters / "port_rcv_data").write_text("2\n")
        (counters / "symbol_error").write_text("43\n")
        record = run.wait_for(lambda: self.first("link_errors"), "word of the link", 60)
        self.assertEqual({k: record[k] for k in ("host", "device", "port", "counter", "added", "count")},
                         {"host": socket.gethostname(), "device": "mlx5_3", "port": "2", "counter": "symbol_error",
                          "added": 3, "count": 43})
        self.stop(run)
        self.assertEqual(self.prometheus()["longhalo_running"][0][1], 0, "it was stopped on request")
        self.assertEqual(len(self.metrics("link_errors")), 1)
        warning = f"a network link of host {socket.gethostname()} has errors: mlx5_3 port 2: symbol_error +3 (now 43)"
        self.assertEqual(run.err.count(warning), 1, f"once, not once a rank:\n{run.err}")
        ((labels, errors),) = self.prometheus()["longhalo_link_errors_total"]
        self.assertEqual((labels["device"], labels["port"], labels["counter"], errors), ("mlx5_3", "2", "symbol_error", 3))

    def test_a_slow_rank_is_named(self):
        """A rank that has a fifth of the time, as if its core were throttled."""
        run = self.start_long("--set", "telemetry.straggler_ratio=1.5", sequence_tokens=1024, log_every=8)
        run.wait_for(lambda: self.first("step"), "step", 60)
        slow = run.wait_for(lambda: [p for p in run.alive() if _rank_of(p) == 1], "rank 1")[0]

        def hold_up():
            # For less time than a step takes, so that no part of a step is spared.
            for _ in range(25):
                os.kill(slow, signal.SIGSTOP)
                time.sleep(0.008)
                os.kill(slow, signal.SIGCONT)
                time.sleep(0.002)
            return self.first("straggler", rank=1, slow=True)

        record = run.wait_for(hold_up, "word of the slow rank", 60)
        self.assertEqual(record["host"], socket.gethostname())
        self.assertGreater(record["ratio"], 1.5)
        run.wait_for(lambda: self.first("straggler", rank=1, slow=False), "word that it is well again", 60)
        self.stop(run)
        self.assertIn(f"rank 1 on host {socket.gethostname()} is slow", run.err)
        self.assertIn(f"rank 1 on host {socket.gethostname()} is as fast as the others again", run.err)


def _rank_of(pid):
    for entry in open(f"/proc/{pid}/environ", "rb").read().split(b"\0"):
        if entry.startswith(b"OMPI_COMM_WORLD_RANK="):
            return int(entry.split(b"=")[1])
    return None


@unittest.skipUnless(matplotlib, "this Python has no matplotlib; scripts/setup.sh installs it")
class Report(TelemetryCase):
    """scripts/report.py RUN."""

    def report(self, *arguments):
        return subprocess.run([sys.executable, SOURCE / "scripts" / "report.py", *arguments], capture_output=True, text=True,
                              timeout=120)

    def page(self, folder, *titles):
        done = self.report(folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        page = (folder / "report.html").read_text()
        for title in titles:
            self.assertIn(f"<h2>{title}</h2><figure>", page)
        pictures = re.findall(r'src="([^"]*)"', page)
        self.assertEqual(len(pictures), page.count("<figure>"))
        for picture in pictures:
            self.assertTrue(picture.startswith("data:image/png;base64,"), "the page stands alone")
            self.assertEqual(base64.b64decode(picture.split(",")[1], validate=True)[:8], b"\x89PNG\r\n\x1a\n")
        self.assertNotRegex(page, r"(href|src)=\"?(https?:|/)|<script|<link|@import")
        return page

    def test_training(self):
        self.train_well(self.training(train={"steps": 12, "checkpoint_every": 4, "validate_every": 4}))
        with open(self.out / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps({"event": "link_errors", "seconds": 1, "host": "<node>", "device": "mlx5_0", "port": "1",
                                      "counter": "symbol_error", "added": 3, "count": 4}) + '\n{"event":"st')
        page = self.page(self.out, "Loss", "Speed", "Phases over ranks", "Bytes moved", "Halo bandwidth", "Memory",
                         "Checkpoints")
        self.assertIn("&lt;node&gt;, mlx5_0 port 1: symbol_error +3", page)
        self.assertNotIn("<node>", page)
        picture = self.dir / "overview.png"
        elsewhere = self.dir / "page.html"
        done = self.report(self.out, "--output", elsewhere, "--picture", picture)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(picture.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        self.assertIn("<h2>Loss</h2>", elsewhere.read_text())

    def test_damaged_records(self):
        """Lines that are cut, or are no records, are counted and left out; what is there is shown."""
        folder = self.dir / "run"
        folder.mkdir()
        step = {"event": "step", "step": 1, "loss": None, "tokens_per_second": 10.0, "seconds_per_step": 2.0, "mfu": None,
                "phases": {}}
        (folder / "metrics.jsonl").write_text("\n".join(
            ['{"event": "run", "command": "train", "hosts": ["node7"]}', json.dumps(step), '{"event": "step"}', '{"event": "st', '[1]', '"x"',
             '{"event": "validation", "cross_entropy": 2}', json.dumps({**step, "step": 2, "loss": 3.0}), '{"event": "st']))
        (folder / "log.jsonl").write_text('{"event": "run", "command": "infer", "hosts": ["node8"]}\n')
        done = self.report(folder, "--picture", self.dir / "overview.of")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("metrics.jsonl: 5 damaged lines are left out", done.stderr)
        page = (folder / "report.html").read_text()
        self.assertIn("<h2>Loss</h2>", page)
        self.assertIn("node7", page)
        self.assertNotIn("node8", page, "an inference job wrote into the same folder")
        self.assertEqual((self.dir / "overview.of").read_bytes()[:8], b"\x89PNG\r\n\x1a\n", "whatever its name")
        (folder / "metrics.jsonl").unlink()
        figures = {"prefill_tokens_per_second": 10.0, "prefill_seconds": 2.0}
        (folder / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (
            {"document": "a", "task": "score", "perplexity": 2, "figures": figures}, {"document": "b", "task": "score"},
            {"document": "b", "figures": {}}, {"task": "score"})))
        done = self.report(folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("results.jsonl: 3 damaged lines are left out", done.stderr)
        (folder / "results.jsonl").unlink()
        (folder / "metrics.jsonl").write_text('{"event": "run", "command": "train"}\n')
        done = self.report(folder, "--picture", self.dir / "none.png")
        self.assertEqual((done.returncode, done.stderr.splitlines()[0]), (2, "report: there are no plots for a picture yet"))

    def test_records_of_another_form(self):
        """JSON whose numbers are none, too large or nested without end: the page shows what can be shown."""
        folder = self.dir / "run"
        (folder / "arrays").mkdir(parents=True)
        step = {"event": "step", "step": 1, "loss": 2.0, "tokens_per_second": 10.0, "seconds_per_step": 2.0}
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in (
            *(json.dumps({**step, **other}) for other in (
                {}, {"step": 2, "memory": {"peak_resident": 5}}, {"loss": "x"}, {"bytes": []}, {"event": []}, {"step": 10**400},
                {"phases": {"forward": {"min": 1}}})),
            "[" * 100000, json.dumps({"event": "straggler", "rank": 1, "host": "node7", "slow": True, "ratio": None}))))
        done = self.report(folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("metrics.jsonl: 6 damaged lines are left out", done.stderr)
        self.assertIn("the plot 'Memory' is left out", done.stderr)
        page = (folder / "report.html").read_text()
        self.assertIn("<h2>Loss</h2>", page)
        self.assertNotIn("<h2>Memory</h2>", page)
        self.assertIn("node7", page)
        (folder / "metrics.jsonl").unlink()
        # Arrays that are a pipe, or lie elsewhere, are not opened.
        elsewhere = self.dir / "scores.h5"
        with h5py.File(elsewhere, "w") as file:
            file["scores"] = np.full(64, -1.0)
        os.mkfifo(folder / "arrays" / "pipe.h5")
        figures = {"prefill_tokens_per_second": 10.0, "prefill_seconds": 2.0}
        (folder / "results.jsonl").write_text("".join(
            json.dumps({"document": name, "task": "score", "arrays": arrays, "figures": figures}) + "\n"
            for name, arrays in (("a", "arrays/pipe.h5"), ("b", str(elsewhere)), ("c", "../scores.h5"), ("d", 5))))
        self.assertNotIn("Perplexity by position", self.page(folder, "Speed"))
        shutil.copy(elsewhere, folder / "arrays" / "pipe.h5.whole")
        os.replace(folder / "arrays" / "pipe.h5.whole", folder / "arrays" / "pipe.h5")
        self.page(folder, "Perplexity by position", "Speed")

    def test_inference(self):
        self.succeed(self.config(input={"documents": [str(self.document), str(self.write("b.txt", tiny_model.document(80)))]}))
        self.page(self.out, "Perplexity by position", "Speed", "Phases over ranks", "Phases by document",
                  "Halo bandwidth", "Memory")
        shutil.rmtree(self.out / "arrays")
        self.assertNotIn("Perplexity by position", self.page(self.out, "Speed"))

    def test_not_through_a_link_in_a_shared_folder(self):
        self.succeed(self.config(tasks=["score"], input={"prompts": None}))
        shared, victim = self.dir / "shared", self.write("victim", "old")
        shared.mkdir()
        shared.chmod(0o1777)
        (shared / "page.html").symlink_to(victim)
        for option in ("--output", "--picture"):
            done = self.report(self.out, option, shared / "page.html")
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(f"{shared / 'page.html'} is a link", done.stderr)
        self.assertEqual(victim.read_text(), "old")
        done = self.report(self.out, "--output", "/dev/stdout")
        self.assertIn("<h2>Speed</h2>", done.stdout)
        self.assertTrue(done.stdout.startswith("<!doctype html>") and done.stdout.endswith("</html>\n"))

    def test_what_is_no_run(self):
        for folder, word in ((self.dir, "neither metrics.jsonl nor results.jsonl"), (self.dir / "absent", "is not a folder")):
            done = self.report(folder)
            self.assertEqual(done.returncode, 2)
            self.assertIn(word, done.stderr)
            self.assertIn("remedy: ", done.stderr)
            self.assertNotIn("Traceback", done.stderr)
