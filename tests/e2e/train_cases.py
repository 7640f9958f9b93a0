"""longhalo train as a user meets it: a tiny model learns, its metrics say so, and what it leaves can be used."""

import json
import math
import os
import unittest
import uuid
from pathlib import Path

import h5py
import numpy as np

import tiny_model
from harness import Case, Run, files_below, shared_model

try:
    import torch
    import transformers
except ImportError:
    transformers = None


class TrainingCase(Case):
    """A training job from the shared model's weights on a text of some 2,700 tokens."""

    def training(self, **sections):
        text = self.write("text.txt", tiny_model.document(600))
        train = {"steps": 24, "sequence_tokens": 160, "learning_rate": 1e-2, "warmup_steps": 2, "validation_share": 0.2,
                 "validate_every": 12, **sections.pop("train", {})}
        return self.config(input={"documents": [str(text)], "prompts": None}, tasks=[], train=train, **sections)

    def start_training(self, config, *more, ranks=2, **kwargs):
        path = self.dir / f"train_{uuid.uuid4().hex[:8]}.yaml"
        path.write_text(json.dumps(config))
        return Run(["train", "--config", path, *more], ranks=ranks, **kwargs)

    def train(self, config, *more, ranks=2, timeout=120, **kwargs):
        return self.start_training(config, *more, ranks=ranks, **kwargs).wait(timeout)

    def train_well(self, config, *more, **kwargs):
        run = self.train(config, *more, **kwargs)
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(run.alive(), [])
        return run

    def metrics(self, event, folder=None):
        lines = ((folder or self.out) / "metrics.jsonl").read_text().splitlines()
        return [r for r in map(json.loads, lines) if r["event"] == event]


class Train(TrainingCase):
    """What a run does and leaves."""

    def test_a_gpu_that_is_not_there(self):
        run = self.train(self.training(), "--set", "run.device=cuda", environment={"CUDA_VISIBLE_DEVICES": ""})
        self.assert_refused(run, "run.device is cuda, but there is no GPU")
        self.assertFalse(self.out.exists(), "nothing is made for a job that cannot be")

    def test_a_log_that_cannot_be_written(self):
        """Said before anything is made, and before anything of an earlier run is touched."""
        text = self.write("notes.txt", "of somebody else\n")
        for log, words in ((self.dir / "no_folder" / "log.jsonl", "No such file"), (text, "no log of longhalo"),
                           (text / "log.jsonl", "Not a directory")):
            self.assert_refused(self.train(self.training(run={"log": str(log)})), log, words)
            self.assertFalse(self.out.exists())
        self.assertEqual(text.read_text(), "of somebody else\n")
        self.train_well(self.training(train={"steps": 2, "warmup_steps": 1}))
        before = files_below(self.out)
        job = self.training(run={"log": str(self.dir / "no_folder" / "log.jsonl")}, output={"if_exists": "replace"})
        self.assert_refused(self.train(job), "No such file")
        self.assertEqual(files_below(self.out), before)

    def test_weights_that_lack_a_tensor(self):
        """Seen in the headers, before anything is made, by training and by reading."""
        model, name = self.own_model(), "model.layers.1.mlp.down_proj.weight"
        kind, shape, data = tiny_model.tensors()[name]
        for change, words in (({}, "there is no tensor"), ({name: (kind, (*reversed(shape),), data)}, "shape")):
            contents = tiny_model.tensors()
            del contents[name]
            tiny_model.write_safetensors(model / "model.safetensors", {**contents, **change})
            for run in (self.train(self.training(model={"path": str(model)})),
                        self.infer(self.config(model={"path": str(model)}), ranks=1)):
                self.assert_refused(run, words, name, model / "model.safetensors")
                self.assertFalse(self.out.exists())

    def test_weights_with_landmarks_in_some_layers(self):
        model = self.own_model()
        first, second = (f"model.layers.{layer}.self_attn.landmark_bias" for layer in (0, 1))
        bias = {layer: ("F32", (4,), bytes(16)) for layer in (first, second)}
        job = self.training(model={"path": str(model)}, train={"steps": 1, "warmup_steps": 0})
        for there, missing in (((first,), second), ((second,), first)):
            tiny_model.write_safetensors(model / "model.safetensors",
                                         {**tiny_model.tensors(), **{name: bias[name] for name in there}})
            self.assert_refused(self.train(job), "there is no tensor", missing, model / "model.safetensors")
            self.assertFalse(self.out.exists())
        other = {first: bias[first], second: ("F32", (2,), bytes(8))}
        tiny_model.write_safetensors(model / "model.safetensors", {**tiny_model.tensors(), **other})
        self.assert_refused(self.train(job), "shape", second)
        tiny_model.write_safetensors(model / "model.safetensors", {**tiny_model.tensors(), **bias})
        self.train_well(job)

    def test_records_in_whose_place_is_a_folder(self):
        self.train_well(self.training(train={"steps": 2, "warmup_steps": 1}))
        (self.out / "metrics.jsonl").unlink()
        (self.out / "metrics.jsonl" / "own").mkdir(parents=True)
        before = files_below(self.out / "checkpoints")
        self.assert_refused(self.train(self.training(output={"if_exists": "replace"})), self.out / "metrics.jsonl",
                            "a folder has it")
        self.assertEqual(files_below(self.out / "checkpoints"), before)

    def arrays_in(self, folder):
        """Bytes of weights and of the optimizer's state; what else the files hold is their order."""
        total = 0
        for file in Path(folder).rglob("*.safetensors"):
            total += file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
        for path in Path(folder).rglob("optimizer_*.h5"):
            with h5py.File(path) as file:
                arrays = []
                file.visititems(lambda _, item: arrays.append(item.nbytes) if isinstance(item, h5py.Dataset) else None)
                total += sum(arrays)
        return total

    def test_plan_says_what_a_job_leaves_on_the_disk(self):
        shape = {"hidden_size": 80, "num_hidden_layers": 3}  # 1.9 MB a checkpoint: what is cut off shows
        model = self.own_model(shape=shape)
        for steps, every, there in ((3, 1, 3), (2, 0, 1), (6, 2, 3)):
            self.out = self.dir / f"out{steps}"
            job = self.training(model={"path": str(model)}, output={"directory": str(self.out)},
                                train={"steps": steps, "warmup_steps": 1, "checkpoint_every": every, "checkpoint_keep": 4})
            plan = self.train(job, "--plan")
            self.assertEqual(plan.code, 0, plan.err)
            self.train_well(job)
            checkpoints = sorted((self.out / "checkpoints").iterdir())
            self.assertEqual(len(checkpoints), there)
            one, all_of_them, trained = (self.arrays_in(folder) / 1e6
                                         for folder in (checkpoints[0], self.out / "checkpoints", self.out / "model"))
            self.assertAlmostEqual(all_of_them, there * one, places=6)
            several = f"{there} of {one:.1f} MB, the one being written included, " if there > 1 else ""
            self.assertRegex(plan.out, rf"\n  disk: job checkpoints +{all_of_them:.1f} MB  {several}of all ranks together, "
                                       rf"in {self.out}/checkpoints, ")
            self.assertRegex(plan.out, rf"\n  disk: trained model +{trained:.1f} MB  in {self.out}/model\n")

    def test_learns_and_leaves_a_model(self):
        run = self.train(self.training())
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(run.alive(), [])
        steps = self.metrics("step")
        self.assertEqual([s["step"] for s in steps], list(range(1, 25)))
        self.assertLess(steps[-1]["loss"], steps[0]["loss"] - 0.5)
        for step in steps:
            self.assertAlmostEqual(step["perplexity"], math.exp(step["cross_entropy"]), delta=1e-6 * step["perplexity"])
            self.assertGreater(step["gradient_norm"], 0)
            self.assertGreater(step["tokens_per_second"], 0)
            self.assertFalse(step["skipped"])
            self.assertLessEqual({"forward", "loss", "backward", "optimizer"}, set(step["phases"]))
        validations = self.metrics("validation")
        self.assertEqual([v["step"] for v in validations], [0, 12, 24])
        self.assertLess(validations[1]["cross_entropy"], validations[0]["cross_entropy"])
        self.assertLess(validations[2]["cross_entropy"], validations[1]["cross_entropy"])

        # longhalo reads it, with all its tensors.
        config = self.config(model={"path": str(self.out / "model")}, tasks=["score"], input={"prompts": None},
                             output={"directory": str(self.dir / "scores")})
        scored = self.succeed(config)
        self.assertEqual(len(scored), 1)

    @unittest.skipUnless(transformers, "this Python has no torch and transformers")
    def test_transformers_opens_the_model(self):
        """It has learned there too, and gives every token the log-probability that longhalo gives it."""
        self.train_well(self.training())
        trained = self.out / "model"
        (self.dir / "text.txt").write_text(tiny_model.document(20))
        losses = []
        for folder in (shared_model(), trained):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)(tiny_model.document(20))["input_ids"]])
            with torch.no_grad():
                logits = model(ids).logits[0, :-1].double()
            scores = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
            losses.append(-float(scores.mean()))
        self.assertLess(losses[1], losses[0] - 0.5)
        (record,) = self.succeed(self.config(model={"path": str(trained)}, attention={"window": 4096, "landmark_stride": 0},
                                             input={"documents": [str(self.dir / "text.txt")], "prompts": None},
                                             tasks=["score"], output={"directory": str(self.dir / "scores")})).values()
        with h5py.File(self.dir / "scores" / record["arrays"]) as file:
            np.testing.assert_array_equal(file["tokens"][:], ids[0].numpy())
            # Logits of a few units out of sums of 48 and 96 products: roundings of 2^-24 grow to some 1e-5.
            np.testing.assert_allclose(file["scores"][1:], scores.numpy(), rtol=0, atol=1e-4)

    def test_same_on_any_number_of_ranks(self):
        losses = []
        for ranks in (1, 3):
            self.out = self.dir / f"out{ranks}"
            run = self.train(self.training(output={"directory": str(self.out)}), ranks=ranks)
            self.assertEqual(run.code, 0, run.err)
            losses.append([s["loss"] for s in self.metrics("step")])
        for one, other in zip(*losses):
            self.assertAlmostEqual(one, other, delta=1e-5 * one)

    def test_token_file_and_random_weights(self):
        text = self.write("text.txt", tiny_model.document(600))
        tokens = self.dir / "t.h5"
        run = Run(["tokenize", "--model", shared_model(), "--output", tokens, text], ranks=0).wait(60)
        self.assertEqual(run.code, 0, run.err)
        shape = {"layers": 1, "hidden": 32, "ffn": 48, "heads": 2, "kv_heads": 1, "head_dim": 16,
                 "vocabulary": tiny_model.VOCABULARY}
        config = self.config(model={"path": None, "weights": "random", "shape": shape},
                             input={"documents": None, "prompts": None, "tokens": str(tokens)}, tasks=[],
                             train={"steps": 3, "sequence_tokens": 100, "accumulation": 2})
        run = self.train(config)
        self.assertEqual(run.code, 0, run.err)
        steps = self.metrics("step")
        self.assertEqual([s["sequences"] for s in steps], [2, 4, 6])
        # About the logarithm of 400 tokens: nothing is known at first.
        self.assertLess(abs(steps[0]["loss"] - math.log(tiny_model.VOCABULARY)), 2)
        self.assertEqual(json.loads((self.out / "model" / "config.json").read_text())["vocab_size"],
                         tiny_model.VOCABULARY)

    def test_a_token_file_is_its_text(self):
        """Also where the model wants a token before a text: not a bit differs, and bytes are known from both."""
        model = self.own_model()
        file = model / "tokenizer.json"
        begin = {"type": "TemplateProcessing", "pair": [],
                 "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                 "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}}
        file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": begin}))
        texts = [self.write(f"{i}.txt", tiny_model.document(100 + 20 * i, seed=i)) for i in range(4)]
        tokens = self.dir / "t.h5"
        run = Run(["tokenize", "--model", model, "--output", tokens, *texts], ranks=0).wait(60)
        self.assertEqual(run.code, 0, run.err)
        for packing in ("packed", "one_document"):
            found = []
            for name, given in (("text", {"documents": [str(t) for t in texts]}),
                                ("tokens", {"documents": None, "tokens": str(tokens)})):
                self.out = self.dir / f"{packing}_{name}"
                job = self.training(model={"path": str(model)}, output={"directory": str(self.out)},
                                    train={"steps": 6, "packing": packing, "sequence_tokens": 150})
                job["input"] = {k: v for k, v in given.items() if v}
                self.train_well(job)
                found.append([(s["loss"], s["bits_per_byte"]) for s in self.metrics("step")])
            self.assertEqual(*found)

    def test_bits_per_byte(self):
        """A sequence that is a whole text: its labels are the text without its first token."""
        text = tiny_model.document(40)
        ids = tiny_model.tokenizer().encode(text).ids
        job = self.training(train={"steps": 1, "warmup_steps": 0, "sequence_tokens": len(ids) + 5, "packing": "one_document",
                                   "validation_share": 0})
        (self.dir / "text.txt").write_text(text)
        self.train_well(job)
        (step,) = self.metrics("step")
        self.assertEqual(step["counted_tokens"], len(ids) - 1)
        size = len(text.encode()) - len(tiny_model.tokenizer().decode(ids[:1]).encode())
        self.assertAlmostEqual(step["bits_per_byte"], step["cross_entropy"] * (len(ids) - 1) / math.log(2) / size, places=9)

    def test_what_fills_up_changes_nothing(self):
        """The loss of a document is that of its tokens, however long the sequence is."""
        found = []
        for length in (330, 700):
            self.out = self.dir / str(length)
            job = self.training(output={"directory": str(self.out)},
                                train={"steps": 4, "sequence_tokens": length, "packing": "one_document",
                                       "validation_share": 0})
            texts = [self.write(f"{i}.txt", tiny_model.document(60 + 20 * i, seed=i)) for i in range(3)]
            job["input"]["documents"] = [str(t) for t in texts]
            self.train_well(job)
            found.append([(s["loss"], s["counted_tokens"]) for s in self.metrics("step")])
        for (one, counted), (other, also) in zip(*found):
            self.assertEqual(counted, also)
            self.assertAlmostEqual(one, other, delta=1e-5 * one)

    def test_validation_that_could_foretell_nothing(self):
        """The first sequences of the validation part are documents of one token, which have no label."""
        job = self.training(train={"sequence_tokens": 4, "validation_share": 0.5, "validation_sequences": 2})
        texts = [tiny_model.document(20), *["a"] * 24, tiny_model.document(20)]
        job["input"]["documents"] = [str(self.write(f"{i}.txt", text)) for i, text in enumerate(texts)]
        self.assert_refused(self.train(job), "to validate on", "train.validation_share")
        job["train"]["validation_sequences"] = 50  # the last of them has labels
        job["train"]["steps"] = 2
        self.train_well(job)
        self.assertGreater(self.metrics("validation")[0]["counted_tokens"], 1)

    def test_steps_that_have_nothing_to_foretell(self):
        """Documents of one token have no label: their steps count nothing, which is 0 and not no number."""
        job = self.training(train={"sequence_tokens": 4, "validation_share": 0, "steps": 20, "most_skipped": 0})
        texts = [tiny_model.document(5), *["a"] * 60]
        job["input"]["documents"] = [str(self.write(f"{i}.txt", text)) for i, text in enumerate(texts)]
        self.train_well(job)
        steps = self.metrics("step")
        self.assertEqual({step["skipped"] for step in steps}, {False})
        empty = [step["loss"] for step in steps if step["counted_tokens"] == 0]
        self.assertGreater(len(empty), 5)
        self.assertLess(len(empty), 20)
        self.assertEqual(set(empty), {0})

    def test_scores_of_all_words_are_never_there_at_once(self):
        """8,000 tokens by 65,536 words would be 2.1 GB in fp32, in training forward and backward."""
        vocabulary, ids = 1 << 16, np.random.default_rng(5).integers(0, 1 << 16, 8000)
        with h5py.File(self.dir / "t.h5", "w") as file:
            file["tokens"], file["document_offsets"] = ids.astype(np.uint16), np.array([0, len(ids)], np.int64)
            file.attrs["format"], file.attrs["vocabulary_size"] = "longhalo tokens 1", np.int64(vocabulary)
        job = self.config(model={"path": None, "weights": "random", "shape": {
            "layers": 1, "hidden": 8, "ffn": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "vocabulary": vocabulary}},
            input={"documents": None, "prompts": None, "tokens": str(self.dir / "t.h5")}, tasks=["score"])
        record = next(iter(self.succeed(job, ranks=1).values()))
        self.assertLess(record["figures"]["peak_memory_bytes"], 1e9)
        self.out = self.dir / "train"
        self.train_well({**job, "tasks": [], "output": {"directory": str(self.out)}, "train": {
            "steps": 1, "sequence_tokens": 8000, "validation_share": 0}}, ranks=1)
        self.assertLess(self.metrics("step")[0]["memory"]["peak_resident"]["max"], 1e9)

    def test_a_wild_learning_rate_stops_the_job(self):
        run = self.train(self.training(train={"learning_rate": 90, "clip": 0, "warmup_steps": 0, "steps": 40,
                                              "weight_decay": 100, "most_skipped": 2, "validation_share": 0}))
        self.assert_refused(run, "not finite", "3 steps in a row")
        self.assertTrue(self.metrics("step")[-1]["skipped"])
        self.assertFalse((self.out / "model").exists(), "no model is written of numbers that are none")

    def test_files_are_made_with_the_users_umask(self):
        run = self.train(self.training(train={"steps": 4, "checkpoint_every": 2}),
                         before=["sh", "-c", 'umask 027; exec "$@"', "sh"])
        self.assertEqual(run.code, 0, run.err)
        made = list(self.out.rglob("*"))
        self.assertGreater(len(made), 15)
        for path in made:
            self.assertEqual(oct(path.stat().st_mode & 0o777), "0o750" if path.is_dir() else "0o640", path)

    def test_nothing_is_written_through_a_link_in_a_shared_folder(self):
        shared, victim = self.dir / "shared", self.dir / "victim"
        shared.mkdir()
        shared.chmod(0o1777)
        victim.mkdir()
        (victim / "log").write_text("old")
        (shared / "out").symlink_to(victim)
        (shared / "scratch").symlink_to(victim)
        (shared / "log").symlink_to(victim / "log")
        job = self.training(train={"steps": 2, "warmup_steps": 0})
        self.assert_refused(self.train({**job, "output": {"directory": str(shared / "out")}}), shared / "out", "link")
        self.assert_refused(self.train({**job, "run": {"log": str(shared / "log")}}), shared / "log", "link")
        self.assert_refused(self.train({**job, "activations": {"store": "nvme", "directory": str(shared / "scratch")}}),
                            shared / "scratch", "link")
        lock = self.dir / "scratch"
        lock.mkdir()
        lock.chmod(0o1777)
        (lock / f".longhalo-activations.{os.geteuid()}.lock").symlink_to(victim / "new")
        self.assert_refused(self.train({**job, "activations": {"store": "nvme", "directory": str(lock)}}), "lock", "link")
        self.assertEqual({p.name: p.read_text() for p in victim.iterdir()}, {"log": "old"})

    def test_what_cannot_be_is_refused(self):
        self.assert_refused(self.train(self.training(train={"sequence_tokens": 100000})), "less than one sequence")
        self.assert_refused(self.train(self.training(train={"warmup_steps": 70})), "train.warmup_steps 70")
        self.assert_refused(self.train(self.training(), "--set", "run.device=cuda",
                                       environment={"CUDA_VISIBLE_DEVICES": ""}), "cuda, but there is no GPU")
        for precision in ("fp8", "int8"):
            self.assert_refused(
                self.train(self.training(), "--set", "run.device=auto", "--set", f"run.precision={precision}"),
                "training computes in bf16 on GPUs")
        self.out.mkdir(exist_ok=True)
        (self.out / "model").write_text("what the last step would meet")
        self.assert_refused(self.train(self.training()), self.out / "model", "a file has it")
        (self.out / "model").unlink()
        (self.out / "metrics.jsonl").write_text("{}\n")
        self.assert_refused(self.train(self.training()), "an earlier training run")
        self.assertEqual((self.out / "metrics.jsonl").read_text(), "{}\n")
