"""What a job writes: records, arrays, log, progress."""

import json
import shutil
import subprocess
import unittest

import h5py
import numpy as np

import tiny_model
from harness import Case, EXECUTABLE, Run, files_below, shared_model


class Records(Case):
    """results.jsonl, arrays and log.jsonl."""

    def test_figures(self):
        self.document.write_text(tiny_model.document(150))
        records = self.succeed(self.config(input={"prompts": ["What?", "Why?", "When?"]}))
        self.assertEqual(len(records), 5)
        for (document, query, task), record in records.items():
            self.assertEqual(document, str(self.document))
            self.assertEqual(query is None, task != "generate")
            figures = record["figures"]
            n, opening = record["sequence_tokens"], record["sequence_tokens"] - record["document_tokens"]
            self.assertGreater(opening, 0, "the chat template opens")
            self.assertEqual(figures["ranks"], 2)
            self.assertAlmostEqual(figures["prefill_tokens_per_second"], n / figures["prefill_seconds"], delta=1)
            self.assertLessEqual(figures["prefill_seconds"], figures["total_seconds"])
            # What is seen, counted by hand: the window exactly, and one landmark for 8 tokens of what lies before.
            seen = sum(min(i + 1, 40) + max((i - 40) // 8 + 1, 0) for i in range(n))
            self.assertAlmostEqual(figures["attended_fraction"], seen / (n * (n + 1) / 2), places=9)
            # Two layers, keys and values of 2 x 16 fp32: the second rank receives 40 tokens before its shard.
            self.assertEqual(figures["halo_bytes"], 2 * 2 * 40 * 2 * 16 * 4)
            self.assertGreater(figures["landmark_bytes"], 0)
            self.assertGreater(figures["peak_memory_bytes"], 1 << 20)
            exposed = figures["exposed_communication_seconds"]
            self.assertTrue(0 <= exposed["min"] <= exposed["mean"] <= exposed["max"])
            if task == "generate":
                self.assertEqual(len(record["answer_ids"]), 8)
                self.assertEqual(record["finish_reason"], "length")
                self.assertGreater(figures["time_to_first_token_seconds"], figures["prefill_seconds"])
                self.assertGreater(figures["decode_tokens_per_second"], 0)
            context = figures["context_bytes"]
            self.assertAlmostEqual(figures["context_bytes_per_token"], context / n, places=6)
            self.assertLess(context, 2 * 2 * n * 2 * 16 * 4, "smaller than a key/value cache of every token")
        self.assertEqual({r["figures"]["answered_by_rank"] for r in records.values() if r["query"]}, {0, 1})

    def test_scores_and_perplexity(self):
        (record,) = self.succeed(self.config(tasks=["score"])).values()
        self.assertEqual(record["task"], "score")
        with h5py.File(self.out / record["arrays"]) as file:
            self.assertEqual(set(file), {"tokens", "scores"})
            tokens, scores = file["tokens"][:], file["scores"][:]
        self.assertEqual(scores.dtype, np.float32)
        self.assertEqual(scores.shape, tokens.shape)
        self.assertEqual(len(tokens), record["document_tokens"])
        self.assertTrue(np.isnan(scores[0]), "nothing stands before the first token")
        self.assertTrue(np.all(scores[1:] < 0))
        self.assertEqual(record["predicted_tokens"], len(tokens) - 1)
        total = scores[1:].astype(np.float64).sum()
        self.assertAlmostEqual(record["log_probability"], total, places=4)
        self.assertAlmostEqual(record["perplexity"] / np.exp(-total / (len(tokens) - 1)), 1, places=6)
        # Nothing foretells the first token, and its bytes are not divided by.
        vocabulary = json.loads((shared_model() / "tokenizer.json").read_text())["model"]["vocab"]
        (first,) = (len(token) for token, number in vocabulary.items() if number == tokens[0])
        bits = -total / np.log(2) / (self.document.stat().st_size - first)
        self.assertAlmostEqual(record["bits_per_byte"], bits, places=6)

    def test_scores_of_one_token(self):
        """Nothing is predicted, which no number stands for; with an opening before it, it is."""
        self.document.write_text("x")
        (record,) = self.succeed(self.config(tasks=["score"])).values()
        self.assertEqual((record["document_tokens"], record["predicted_tokens"]), (1, 0))
        self.assertIsNone(record["perplexity"])
        self.assertIsNone(record["bits_per_byte"])
        self.out = self.dir / "opened"
        record = self.succeed(self.config(tasks=["generate", "score"]))[str(self.document), None, "score"]
        self.assertEqual((record["document_tokens"], record["predicted_tokens"]), (1, 1))
        self.assertAlmostEqual(record["bits_per_byte"], -record["log_probability"] / np.log(2), places=6)

    def test_embeddings(self):
        (record,) = self.succeed(self.config(tasks=["embed"], embed={"chunk_tokens": 50})).values()
        with h5py.File(self.out / record["arrays"]) as file:
            self.assertEqual(set(file), {"tokens", "embeddings"})
            embeddings, count = file["embeddings"][:], len(file["tokens"])
        self.assertEqual(embeddings.dtype, np.float32)
        self.assertEqual(embeddings.shape, (-(-count // 50), tiny_model.HIDDEN))
        self.assertEqual(record["chunks"], len(embeddings))
        self.assertEqual(record["embedding_size"], tiny_model.HIDDEN)
        self.assertTrue(np.all(np.isfinite(embeddings)))

    def test_embeddings_of_single_tokens_average(self):
        whole, single = {}, {}
        for chunk, into in ((50, whole), (1, single)):
            folder = self.dir / f"chunk{chunk}"
            config = self.config(tasks=["embed"], embed={"chunk_tokens": chunk}, output={"directory": str(folder)})
            (record,) = self.succeed(config).values()
            with h5py.File(folder / record["arrays"]) as file:
                into["x"] = file["embeddings"][:]
        for i, row in enumerate(whole["x"]):
            np.testing.assert_allclose(row, single["x"][i * 50:(i + 1) * 50].mean(axis=0), rtol=1e-4, atol=1e-5)

    def test_generate_alone(self):
        (record,) = self.succeed(self.config(tasks=["generate"])).values()
        self.assertEqual(record["task"], "generate")
        self.assertNotIn("arrays", record)
        self.assertFalse((self.out / "arrays").exists() and any((self.out / "arrays").iterdir()))

    def test_answer_longer_than_the_window(self):
        (record,) = self.succeed(self.config(tasks=["generate"], generate={"max_new_tokens": 150})).values()
        self.assertEqual(len(record["answer_ids"]), 150)

    def test_end_token(self):
        """The first token of the answer, made the end token: the answer is empty."""
        (record,) = self.succeed(self.config(tasks=["generate"])).values()
        model = self.own_model(eos=[record["answer_ids"][3], 399])
        config = self.config(tasks=["generate"], model={"path": str(model)}, output={"if_exists": "replace"})
        (ended,) = self.succeed(config).values()
        self.assertEqual(ended["finish_reason"], "end_token")
        stop = record["answer_ids"].index(record["answer_ids"][3])
        self.assertEqual(ended["answer_ids"][:stop], record["answer_ids"][:stop])
        self.assertLessEqual(len(ended["answer_ids"]), stop + 1)

    def test_document_of_one_character(self):
        self.document.write_text("x")
        records = self.succeed(self.config(), ranks=3)
        self.assertEqual(len(records), 3)
        self.assertEqual({r["document_tokens"] for r in records.values()}, {1})
        score = records[str(self.document), None, "score"]
        self.assertEqual(score["predicted_tokens"], 1, "the chat template stands before it")
        (alone,) = self.succeed(self.config(tasks=["score"], output={"if_exists": "replace"})).values()
        self.assertEqual((alone["predicted_tokens"], alone["perplexity"]), (0, None))

    def test_replace(self):
        self.old_results()
        records = self.succeed(self.config(output={"if_exists": "replace"}))
        self.assertEqual(len(records), 3)
        names = set(files_below(self.out))
        self.assertEqual(len(names), 4, names)  # records, log, figures for Prometheus and one file of arrays
        self.assertNotIn("arrays/old.h5", names)

    def test_log(self):
        config = self.config()
        self.succeed(config)
        lines = [json.loads(line) for line in (self.out / "log.jsonl").read_text().splitlines()]
        head = lines[0]
        self.assertEqual((head["event"], head["command"], head["ranks"]), ("run", "infer", 2))
        self.assertEqual(len(head["hosts"]), 2)
        self.assertEqual(head["config"]["attention"]["window"], 40)
        self.assertEqual(head["config"]["generate"]["top_p"], 1, "defaults too")
        for part in ("longhalo", "mpi", "hdf5", "compiler"):
            self.assertRegex(head["versions"][part], r"\d+\.\d+")
        self.assertEqual([line["event"] for line in lines[1:]].count("record"), 3)

    def test_bf16_and_fp32_weights(self):
        """The values that bf16 holds exactly give the same answers from both."""
        answers = []
        for dtype in ("BF16", "F32"):
            model = self.dir / dtype
            tiny_model.write_model(model, dtype)
            if dtype == "F32":  # the fp32 file, rounded to what bf16 holds
                contents = {}
                for name, (kind, shape, data) in tiny_model.tensors("F32").items():
                    bits = np.frombuffer(data, np.uint32) & np.uint32(0xFFFF0000)
                    contents[name] = (kind, shape, bits.tobytes())
                tiny_model.write_safetensors(model / "model.safetensors", contents)
            config = self.config(model={"path": str(model)}, output={"directory": str(self.dir / f"out_{dtype}")})
            answers.append([r.get("answer_ids") for r in self.succeed(config).values()])
        self.assertEqual(*answers)


class Progress(Case):
    """Plain lines for files, a bar for a terminal."""

    def test_lines(self):
        run = self.infer(self.config())
        self.assertEqual(run.code, 0, run.err)
        self.assertNotIn("\r", run.err)
        self.assertNotIn("\x1b", run.err)
        for phase in ("loading weights", "tokenising", "prefill", "scoring", "answering"):
            self.assertRegex(run.err, rf"(?m)^{phase}.* 100% ")

    def test_off(self):
        run = self.infer(self.config(run={"progress": "off"}))
        self.assertEqual(run.code, 0, run.err)
        self.assertNotIn("100%", run.err)

    @unittest.skipIf(shutil.which("script") is None, "the program `script` is missing")
    def test_bar(self):
        self.start(self.config(), "--print-config", ranks=0).wait()
        command = f"'{EXECUTABLE}' infer --config '{self.yaml}'"
        done = subprocess.run(["script", "-qec", command, "/dev/null"], capture_output=True, timeout=60,
                              stdin=subprocess.DEVNULL)
        text = done.stdout.decode(errors="replace")
        self.assertEqual(done.returncode, 0, text)
        self.assertRegex(text, r"\r\x1b\[K\[#+\] prefill 100% ")
