"""Faults of the config, the command line and the output folder."""

import re
import subprocess

import h5py
import yaml

from harness import EXECUTABLE, SOURCE, Case, Run, files_below, records_of, shared_model


class BadConfig(Case):
    """The YAML file: every fault in one go, each with its line; nothing is touched."""

    def refuse_yaml(self, yaml, *words, arguments=(), **kwargs):
        before = self.old_results()
        run = self.infer(yaml, *arguments, **kwargs)
        self.assert_refused(run, *words)
        self.assertEqual(files_below(self.out), before)
        return run

    def test_all_faults_in_one_go(self):
        yaml = (
            "model:\n"
            "  pth: somewhere\n"
            "attention:\n"
            "  window: forty\n"
            "  landmark_strid: 8\n"
            "input:\n"
            "  documents: text.txt\n"
            "generate:\n"
            "  temperature: -1\n"
            "tasks: [generate, summarise]\n"
            "output: {directory: %s}\n"
            "nonsense: 1\n" % self.out
        )
        run = self.refuse_yaml(yaml)
        for line, words in ((2, "model.pth"), (4, "forty"), (5, "landmark_strid"), (9, "temperature"),
                            (10, "summarise"), (12, "nonsense")):
            self.assertRegex(run.err, rf"{re.escape(str(self.yaml))}:{line}:\d+.*{words}")
        for hint in ("model.path", "attention.landmark_stride"):  # the nearest known keys
            self.assertIn(hint, run.err)

    def test_stride_above_window(self):
        config = self.config(attention={"window": 16, "landmark_stride": 32})
        self.refuse_yaml(config, "landmark_stride 32", "window 16")
        self.assertIn(f"{self.yaml}:", self.yaml and self.last_error)

    def test_unknown_key(self):
        self.refuse_yaml(self.config(run={"treads": 1}), "run.treads", "run.threads")

    def test_no_yaml(self):
        self.refuse_yaml("model: {path: [\n")
        self.assertIn(str(self.yaml), self.last_error)

    def test_key_twice(self):
        self.refuse_yaml("model: {path: a}\nmodel: {path: b}\n", "model")

    def test_missing_file(self):
        run = Run(["infer", "--config", self.dir / "no.yaml"]).wait()
        self.assert_refused(run, self.dir / "no.yaml")

    def test_bands_that_see_nothing(self):
        config = self.config(attention={"window": None, "landmark_stride": None, "bands": [[1, 0, 64], [8, 64, 64]]})
        self.refuse_yaml(config, "attention.bands", "sees nothing")

    def test_generate_without_prompts(self):
        self.refuse_yaml(self.config(input={"prompts": []}), "prompts")

    def test_documents_and_tokens(self):
        self.refuse_yaml(self.config(input={"tokens": "tokens.h5"}), "input.tokens", "input.documents")

    def test_override(self):
        self.refuse_yaml(self.config(), "--set attention.windo=1", "attention.window",
                         arguments=("--set", "attention.windo=1"))

    def test_environment(self):
        self.refuse_yaml(self.config(), "LONGHALO_ATTENTION__WINDOW", "many",
                         environment={"LONGHALO_ATTENTION__WINDOW": "many"})

    def infer(self, *arguments, **kwargs):
        run = super().infer(*arguments, **kwargs)
        self.last_error = run.err
        return run


class CommandLine(Case):
    """What is asked without a job."""

    def say(self, *arguments, code=0, ranks=2):
        run = Run(arguments, ranks=ranks).wait()
        self.assertEqual(run.code, code, run.out + run.err)
        self.assertEqual(run.alive(), [])
        return run

    def test_help(self):
        out = self.say("--help").out
        for word in ("infer", "bench", "tokenize", "Exit codes"):
            self.assertIn(word, out)
        self.assertEqual(out.count("Exit codes"), 1, "said once, not once a rank")

    def test_help_of_a_subcommand(self):
        self.assertIn("--print-config", self.say("infer", "--help").out)

    def test_version(self):
        self.assertRegex(self.say("--version").out, r"^longhalo \d+\.\d+\.\d+\n$")

    def wrong(self, *arguments, words):
        # Four ranks: the first one to leave must not end rank 0 before it has spoken.
        run = self.say(*arguments, code=2, ranks=4)
        self.assertIn(words, run.err)
        self.assertEqual(run.err.count("  remedy: "), 1, run.err)

    def test_unknown_subcommand(self):
        self.wrong("infre", "--config", "x.yaml", words="infre")

    def test_unknown_benchmark(self):
        self.wrong("bench", "everything", words="everything")

    def test_no_subcommand(self):
        self.wrong(words="subcommand")

    def test_unknown_option(self):
        self.wrong("infer", "--confg", "x.yaml", words="--confg")

    def shell(self, line, *arguments):
        """Runs a shell line in which "$@" is longhalo with the arguments."""
        words = ["sh", "-c", line, "sh", EXECUTABLE, *map(str, arguments)]
        return subprocess.run(words, capture_output=True, timeout=60).returncode

    def test_closed_standard_streams(self):
        """A file opened as descriptor 2 must not receive the log: the tokens are the same with and without."""
        files = [self.dir / "open.h5", self.dir / "closed.h5", self.dir / "all_closed.h5"]
        for file, closed in zip(files, ("", "2>&-", "<&- >&- 2>&-")):
            code = self.shell(f'"$@" {closed}', "tokenize", "--model", shared_model(), "--output", file, self.document)
            self.assertEqual(code, 0)
        tokens = []
        for file in files:
            with h5py.File(file) as opened:
                tokens.append(opened["tokens"][:].tolist())
        self.assertEqual(tokens[0], tokens[1])
        self.assertEqual(tokens[0], tokens[2])

    def test_full_standard_output(self):
        self.infer(self.config(), "--print-config", ranks=0)
        self.assertEqual(self.shell('"$@" >/dev/full', "infer", "--config", self.yaml, "--print-config"), 2)
        for word in ("--version", "--help"):
            self.assertEqual(self.shell('"$@" >/dev/full', word), 2, word)

    def test_no_room_for_libraries(self):
        """OpenBLAS asks for its buffers before main, and again without end where there is no room for them."""
        refusals = []
        for megabytes in range(100, 4000, 50):
            line = f'ulimit -v {megabytes}000; "$@"'
            run = subprocess.run(["sh", "-c", line, "sh", EXECUTABLE, "--version"], capture_output=True, text=True,
                                 timeout=20)
            if run.returncode == 0:
                break
            self.assertIn(run.returncode, (2, 127), run.stderr)  # 127: not even the libraries themselves
            if run.returncode == 2:
                refusals.append(run.stderr)
        self.assertEqual(run.returncode, 0, "it starts where there is room")
        self.assertGreater(len(refusals), 1, "a buffer is larger than a step of this test")
        for words in refusals:
            self.assertIn("no room for the buffers of OpenBLAS", words)
            self.assertIn("remedy: raise the limit of a process's memory (ulimit -v)", words)

    def test_print_config(self):
        config = self.config(attention={"window": 56})
        auto = {"LONGHALO_RUN__DEVICE": "auto"}  # the default, in place of what these tests run with
        run = self.infer(config, "--set", "embed.chunk_tokens=32", "--print-config",
                         environment={"LONGHALO_GENERATE__SEED": "77", "LONGHALO_EMBED__CHUNK_TOKENS": "16", **auto})
        self.assertEqual(run.code, 0, run.err)
        effective = yaml.safe_load(run.out)
        self.assertEqual(effective["attention"]["window"], 56)
        self.assertEqual(effective["generate"]["seed"], 77)
        self.assertEqual(effective["embed"]["chunk_tokens"], 32, "--set beats the environment")
        defaults = yaml.safe_load((SOURCE / "configs/reference.yaml").read_text())
        self.assertEqual(effective["run"], defaults["run"], "defaults are shown")
        self.assertFalse(self.out.exists(), "nothing but printing")
        # What is printed is a config: it prints itself again.
        self.assertEqual(self.infer(run.out, "--print-config", environment=auto).out, run.out)


class BadOutput(Case):
    """Output folders that cannot be written, and results that must not be overwritten."""

    def test_file_in_its_place(self):
        self.out.write_text("a file")
        self.assert_refused(self.infer(self.config()), self.out)
        self.assertEqual(self.out.read_text(), "a file")

    def test_below_a_file(self):
        file = self.write("file", "a file")
        self.assert_refused(self.infer(self.config(output={"directory": str(file / "sub" / "out")})), file)
        self.assertEqual(file.read_text(), "a file")

    def test_where_nobody_can_write(self):
        self.assert_refused(self.infer(self.config(output={"directory": "/proc/longhalo_results"})),
                            "/proc/longhalo_results")

    def test_folder_in_place_of_results(self):
        (self.out / "results.jsonl").mkdir(parents=True)
        self.assert_refused(self.infer(self.config(output={"if_exists": "replace"})), self.out)

    def test_file_in_place_of_arrays(self):
        self.out.mkdir()
        (self.out / "arrays").write_text("a file")
        self.assert_refused(self.infer(self.config()), self.out / "arrays")
        self.assertEqual((self.out / "arrays").read_text(), "a file")

    def test_folder_in_place_of_an_array_file(self):
        """Without results there is nothing to resume or to refuse, but the arrays have no place: said before the work."""
        (record,) = self.succeed(self.config(tasks=["score"])).values()
        (self.out / "results.jsonl").unlink()
        (self.out / record["arrays"]).unlink()
        (self.out / record["arrays"]).mkdir()
        run = self.infer(self.config(tasks=["score"]))
        self.assert_refused(run, self.out / record["arrays"], "a folder, device or pipe")
        self.assertNotIn("prefill", run.err)
        self.assertFalse((self.out / "results.jsonl").exists())

    def test_existing_results_are_kept(self):
        before = self.old_results()
        self.assert_refused(self.infer(self.config()), self.out / "results.jsonl", "resume")
        self.assertEqual(files_below(self.out), before)

    def test_resume_of_damaged_results(self):
        self.old_results()
        (self.out / "results.jsonl").write_text('{"document":"old","task":"score"}\n{"document":"ol')
        before = files_below(self.out)
        self.assert_refused(self.infer(self.config(output={"if_exists": "resume"})), self.out / "results.jsonl")
        self.assertEqual(files_below(self.out), before)

    def test_log_that_cannot_be_written(self):
        before = self.old_results()
        log = self.dir / "no_folder" / "log.jsonl"
        self.assert_refused(self.infer(self.config(run={"log": str(log)}, output={"if_exists": "replace"})), log)
        self.assertEqual(files_below(self.out), before)
        new = self.dir / "new"
        self.assert_refused(self.infer(self.config(run={"log": str(log)}, output={"directory": str(new)})), log)
        self.assertFalse(new.exists(), "nothing is made for a job that cannot be")

    def test_log_in_place_of_what_is_read(self):
        """A model's file, a folder, a link that leads nowhere: said once, before anything is made."""
        nowhere = self.dir / "link"
        nowhere.symlink_to(self.dir / "none" / "log.jsonl")
        model = shared_model() / "config.json"
        before = model.read_bytes()
        for log, words in ((model, "model.path"), (self.dir, "is a folder"), (nowhere, "leads nowhere")):
            self.assert_refused(self.infer(self.config(run={"log": str(log)})), "run.log", log, words)
        self.assertEqual(model.read_bytes(), before)
        self.assertFalse(self.out.exists())

    def test_another_job_at_work(self):
        """Two jobs on one folder: the second is refused, the first does not notice."""
        config = self.config(generate={"max_new_tokens": 1000000}, tasks=["generate"])
        first = self.start(config)
        first.wait_for(lambda: "answering" in first.so_far(), "answer")
        self.assert_refused(self.infer(self.config()), self.out)
        self.assertEqual(len(first.alive()), 2)
        first.process.terminate()
        first.wait()
        self.assertEqual(first.alive(), [])

    def test_several_started_at_once(self):
        """One of them has the folder; the others are refused and take nothing from it."""
        for mode in ("error", "replace"):
            self.out = self.dir / mode
            config = self.config(output={"directory": str(self.out), "if_exists": mode},
                                 generate={"max_new_tokens": 3000})
            runs = [self.start(config) for _ in range(3)]
            codes = sorted(run.wait().code for run in runs)
            self.assertEqual(codes[0], 0)
            self.assertLessEqual(set(codes), {0, 2})  # one that began when another was over may replace its results
            if mode == "error":
                self.assertEqual(codes, [0, 2, 2])
            for run in runs:
                self.assertEqual(run.alive(), [])
                if run.code != 0:
                    self.assertRegex(run.err, "another job is writing into this folder|there are results already")
            self.assertEqual(len(records_of(self.out)), 3)
            self.assertEqual([p.name for p in self.out.rglob("*") if ".tmp." in p.name or p.name.endswith(".lock")], [])
