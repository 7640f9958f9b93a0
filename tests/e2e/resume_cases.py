"""What a resumed job keeps, and what it refuses because old and new records would not mean the same."""

import fcntl
import json
import os
import shutil
import signal

import h5py

import tiny_model
from harness import Case, Run, files_below, records_of, shared_model


class Resumed(Case):

    def resume(self, **sections):
        output = {"if_exists": "resume", **sections.pop("output", {})}
        return self.config(output=output, **sections)

    def test_killed_in_the_next_document(self):
        """All records of a finished document are on the disk while the next is read, however long that takes."""
        first = self.write("first.txt", tiny_model.document(50))
        second = self.write("second.txt", tiny_model.document(40000, seed=2))
        run = self.start(self.config(input={"documents": [str(first), str(second)], "prompts": ["What?", "Why?"]}))
        path = self.out / "results.jsonl"
        run.wait_for(lambda: path.exists() and path.read_text().count("\n") > 0, "records")
        for pid in run.alive():
            os.kill(pid, signal.SIGKILL)
        run.wait()
        records = records_of(self.out).values()
        self.assertEqual(sorted(r["task"] for r in records), ["embed", "generate", "generate", "score"])
        self.assertEqual({r["document"] for r in records}, {str(first)})

    def test_fewer_tasks_keep_the_arrays(self):
        score = next(iter(self.succeed(self.config(tasks=["score"])).values()))
        records = self.succeed(self.resume(tasks=["embed"]))
        self.assertEqual(len(records), 2)
        self.assertIn(score, records.values())
        with h5py.File(self.out / score["arrays"]) as file:
            self.assertEqual(len(file["scores"]), score["document_tokens"])
            self.assertEqual(file["embeddings"].shape[1], tiny_model.CONFIG["hidden_size"])

    def test_arrays_that_were_removed(self):
        """One file, then all: made again as they were, each record once, and nothing that lacks nothing."""
        second = self.write("second.txt", tiny_model.document(40, seed=2))
        both = {"input": {"documents": [str(self.document), str(second)]}}
        first = self.succeed(self.config(**both))
        made = files_below(self.out / "arrays").keys()
        self.assertEqual(len(made), 2)
        one = self.out / next(r["arrays"] for r in first.values() if r["document"] == str(second) and "arrays" in r)
        for remove in (one.unlink, lambda: shutil.rmtree(self.out / "arrays")):
            before = records_of(self.out)
            remove()
            kept = {key for key, record in before.items() if (self.out / record.get("arrays", ".")).exists()}
            run = self.infer(self.resume(**both))
            self.assertEqual(run.code, 0, run.err)
            self.assertEqual(run.err.count("are not there any more"), 1, run.err)
            after = records_of(self.out)
            self.assertEqual(after.keys(), first.keys())
            self.assertEqual({key for key in after if after[key] == before[key]}, kept)
            for key, record in after.items():
                self.assertEqual(record.get("log_probability"), first[key].get("log_probability"))
            self.assertEqual(files_below(self.out / "arrays").keys(), made)
        with h5py.File(one) as file:
            self.assertEqual({"tokens", "scores", "embeddings"}, set(file))
        self.assertNotIn("any more", self.infer(self.resume(**both)).err)

    def test_arrays_that_are_damaged(self):
        """Emptied or cut, as a disk or a copy may leave them: made again as they were."""
        first = self.succeed(self.config(tasks=["score", "embed"]))
        (name,) = {record["arrays"] for record in first.values()}
        whole = (self.out / name).read_bytes()
        for left in (0, len(whole) // 2):
            (self.out / name).write_bytes(whole[:left])
            run = self.infer(self.resume(tasks=["score", "embed"]))
            self.assertEqual(run.code, 0, run.err)
            self.assertIn("or not whole", run.err)
            self.assertEqual((self.out / name).read_bytes(), whole)
            self.assertEqual(records_of(self.out).keys(), first.keys())

    def test_arrays_of_another_document(self):
        """Two files of one length that were exchanged: made again as they were."""
        twin = self.write("twin.txt", self.document.read_text())
        both = {"input": {"documents": [str(self.document), str(twin)]}, "tasks": ["score"]}
        names = [record["arrays"] for record in self.succeed(self.config(**both)).values()]
        whole = [(self.out / name).read_bytes() for name in names]
        self.assertEqual(len(whole[0]), len(whole[1]))
        for name, of_other in zip(names, reversed(whole)):
            (self.out / name).write_bytes(of_other)
        run = self.infer(self.resume(**both))
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("or of another document", run.err)
        for name, own, document in zip(names, whole, (self.document, twin)):
            self.assertEqual((self.out / name).read_bytes(), own)
            with h5py.File(self.out / name) as file:
                self.assertEqual(file.attrs["document"], str(document).encode())

    def test_arrays_that_this_job_does_not_make(self):
        """What cannot be read of them does not stand in its way, as long as it makes none."""
        first = self.succeed(self.config(tasks=["generate", "score"]))
        (record,) = (record for record in first.values() if "arrays" in record)
        (self.out / record["arrays"]).unlink()
        (self.out / record["arrays"]).mkdir()
        self.assertEqual(len(self.succeed(self.resume(tasks=["generate"], input={"prompts": ["What?", "Why?"]}))), 3)
        for task in ("score", "embed"):
            run = self.infer(self.resume(tasks=["generate", task]))
            self.assert_refused(run, self.out / record["arrays"], "a folder, device or pipe")
            self.assertNotIn("prefill", run.err)

    def test_arrays_that_another_program_has_locked(self):
        """They may be whole: what took hours is not made again for that, and nothing is touched."""
        (name,) = {record["arrays"] for record in self.succeed(self.config(tasks=["score"])).values()}
        before = files_below(self.out)
        with open(self.out / name, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            run = self.infer(self.resume(tasks=["score"]), environment={"HDF5_USE_FILE_LOCKING": "TRUE"})
        self.assert_refused(run, name, "unable to lock file", "HDF5_USE_FILE_LOCKING")
        self.assertNotIn("or not whole", run.err)
        self.assertEqual(files_below(self.out), before)

    def test_arrays_folder_that_takes_no_file(self):
        """Is said before the document is read, and only where there are arrays to make."""
        self.succeed(self.config(tasks=["generate", "score"]))
        shutil.rmtree(self.out / "arrays")
        (self.out / "arrays").write_text("a file")
        run = self.infer(self.resume(tasks=["generate", "score"]))
        self.assert_refused(run, self.out / "arrays", "move away")
        self.assertNotIn("prefill", run.err)
        self.assertEqual((self.out / "arrays").read_text(), "a file")
        self.succeed(self.resume(tasks=["generate"]))

    def test_arrays_that_another_task_needs(self):
        """Both tasks' arrays are lost with their file, and one task alone brings both back."""
        first = self.succeed(self.config(tasks=["score", "embed"]))
        shutil.rmtree(self.out / "arrays")
        after = self.succeed(self.resume(tasks=["score"]))
        embed = next(key for key in first if key[2] == "embed")
        self.assertEqual(after[embed], first[embed])
        with h5py.File(self.out / after[embed]["arrays"]) as file:
            self.assertEqual(len(file["embeddings"]), after[embed]["chunks"])

    def refused(self, config, *words):
        before = (self.out / "results.jsonl").read_bytes()
        self.assert_refused(self.infer(config), "results.jsonl:1", *words)
        self.assertEqual((self.out / "results.jsonl").read_bytes(), before)

    def test_changed_settings(self):
        self.succeed(self.config(tasks=["score"]))
        self.refused(self.resume(tasks=["score", "embed"], attention={"window": 41}), "other settings")

    def test_changed_document(self):
        self.succeed(self.config(tasks=["score"]))
        self.document.write_text(tiny_model.document(60, seed=5))
        self.refused(self.resume(tasks=["score", "embed"]), "another text", self.document)

    def test_changed_model(self):
        """In the same folder: other weights, another number, another template."""
        model = self.own_model()
        self.succeed(self.config(model={"path": str(model)}))
        for name, contents in (("config.json", json.dumps({**tiny_model.CONFIG, "rope_theta": 500.0}).encode()),
                               ("tokenizer_config.json", json.dumps({"chat_template": "Say: " + tiny_model.TEMPLATE}).encode()),
                               ("model.safetensors", None)):
            before = (model / name).read_bytes()
            if contents is None:
                tiny_model.write_safetensors(model / name, tiny_model.tensors(seed=9))
            else:
                (model / name).write_bytes(contents)
            self.refused(self.resume(model={"path": str(model)}), "another model")
            (model / name).write_bytes(before)
        self.succeed(self.resume(model={"path": str(model)}))

    def test_another_opening(self):
        """With prompts the chat template stands before the document, and every score depends on it."""
        self.succeed(self.config(tasks=["score"], input={"prompts": None}))
        self.refused(self.resume(), "other settings")


    def test_names_and_prompts_that_are_no_utf8(self):
        """Records have U+FFFD in place of such bytes, and are found by it: nothing is done again."""
        name = os.fsdecode(bytes(self.dir) + b"/caf\xe9.txt")
        os.rename(self.document, name)
        tokens, prompts = self.dir / "tokens.h5", self.write("prompts.txt", b"What \xff?\nWhy?\n")
        made = Run(["tokenize", "--model", shared_model(), "--output", tokens, name], ranks=0).wait()
        self.assertEqual(made.code, 0, made.err)
        sections = {"input": {"documents": None, "tokens": str(tokens), "prompts": None, "prompts_file": str(prompts)}}
        first = self.succeed(self.config(**sections))
        shown = f"{self.dir}/caf\ufffd.txt"
        self.assertEqual(first.keys(), {(shown, None, "score"), (shown, None, "embed"),
                                        (shown, "What \ufffd?", "generate"), (shown, "Why?", "generate")})
        self.assertEqual(len({record["settings"] for record in first.values()}), 1)
        run = self.infer(self.resume(**sections))
        self.assertEqual(run.code, 0, run.err)
        self.assertNotIn("prefill", run.err)
        self.assertEqual(records_of(self.out), first)
        shutil.rmtree(self.out / "arrays")
        self.assertEqual(self.succeed(self.resume(**sections)).keys(), first.keys())
        prompts.write_bytes(b"What \xff?\n\nWhat \xfe?\n")
        self.assert_refused(self.infer(self.resume(**sections)), "no UTF-8", f"{prompts}:1 and :3")
        self.refused(self.resume(**{**sections, "attention": {"window": 41}, "tasks": ["score"]}), "other settings")


class TokenFiles(Case):

    def tokens_of(self, model):
        tokens = self.dir / "tokens.h5"
        made = Run(["tokenize", "--model", model, "--output", tokens, self.document], ranks=0).wait()
        self.assertEqual(made.code, 0, made.err)
        return self.config(input={"documents": None, "prompts": None, "tokens": str(tokens)}, tasks=["score"])

    def test_names_that_records_could_not_tell_apart(self):
        tokens = self.dir / "tokens.h5"
        tiny_model.write_tokens(tokens, shared_model(), [[5, 6], [7, 8], [9]])
        for names, words in (([b"caf\xe9", b"tea", b"caf\xe8"], "no UTF-8"), ([b"tea", b"a", b"tea"], '"tea" is there twice')):
            with h5py.File(tokens, "a") as file:
                file.pop("document_names", None)
                file.create_dataset("document_names", data=names, dtype=h5py.string_dtype())
            config = self.config(input={"documents": None, "prompts": None, "tokens": str(tokens)}, tasks=["score"])
            self.assert_refused(self.infer(config), words, f"{tokens}, documents 0 and 2")

    def test_of_another_tokenizer(self):
        other = self.own_model()
        file = other / "tokenizer.json"
        file.write_text(file.read_text() + "\n")  # the same tokenizer to a reader, but another file
        self.assert_refused(self.infer(self.tokens_of(other)), "another tokenizer", "tokens.h5",
                            shared_model() / "tokenizer.json")

    def test_a_limit_on_file_sizes_is_an_error_with_words(self):
        self.document.write_text(tiny_model.document(6000))
        run = Run(["tokenize", "--model", shared_model(), "--output", self.dir / "tokens.h5", self.document], ranks=0,
                  before=["sh", "-c", 'ulimit -f 8; exec "$@"', "sh"]).wait()
        self.assertEqual(run.code, 2, run.err)
        self.assertIn("tokens.h5", run.err)
        self.assertIn("ulimit -f", run.err)
        self.assertFalse((self.dir / "tokens.h5").exists())

    def test_one_that_breaks_its_library(self):
        """Texts of variable length lie in a heap whose sizes HDF5 1.10 believes: it reads beyond it and crashes."""
        config = self.tokens_of(shared_model())
        with h5py.File(self.dir / "tokens.h5", "a") as file:
            del file.attrs["tokenizer"]
            file.attrs["tokenizer"] = "tiny"
        contents = (self.dir / "tokens.h5").read_bytes()
        heap = contents.rindex(b"GCOL") + 16  # behind signature, version and size: the first object's index and size
        (self.dir / "tokens.h5").write_bytes(contents[: heap + 8] + b"\xff" * 7 + contents[heap + 15 :])
        self.assert_refused(self.infer(config), "tokens.h5")

    def test_a_lock_of_another_program(self):
        """HDF5 would not open what h5py has open for writing, and on some network disks nothing at all."""
        config = self.tokens_of(shared_model())
        with open(self.dir / "tokens.h5", "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertEqual(len(self.succeed(config)), 1)
            again = {**config, "output": {"directory": str(self.dir / "again")}}
            run = self.infer(again, environment={"HDF5_USE_FILE_LOCKING": "TRUE"})
            self.assert_refused(run, "tokens.h5", "unable to lock file", "HDF5_USE_FILE_LOCKING")

    def test_begin_token_stands_before_them(self):
        """Text and its token file are the same sequence, also where the model wants a token in front."""
        model = self.own_model()
        file = model / "tokenizer.json"
        begin = '{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<|im_start|>","type_id":0}},' \
                '{"Sequence":{"id":"A","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},' \
                '{"Sequence":{"id":"B","type_id":1}}],"special_tokens":{"<|im_start|>":{"id":"<|im_start|>",' \
                '"ids":[1],"tokens":["<|im_start|>"]}}}'
        text = file.read_text()
        self.assertEqual(text.count('"post_processor": null'), 1)
        file.write_text(text.replace('"post_processor": null', '"post_processor": ' + begin))
        config = self.tokens_of(model)
        config["model"]["path"] = str(model)
        from_tokens = next(iter(self.succeed(config).values()))
        self.out = self.dir / "text"
        of_text = self.config(model={"path": str(model)}, input={"prompts": None}, tasks=["score"])
        from_text = next(iter(self.succeed(of_text).values()))
        for key in ("sequence_tokens", "document_tokens", "predicted_tokens", "perplexity"):
            self.assertEqual(from_tokens[key], from_text[key], key)
        self.assertEqual(from_text["sequence_tokens"], from_text["document_tokens"] + 1)
