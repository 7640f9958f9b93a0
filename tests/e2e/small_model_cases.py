"""scripts/small_model: the text out of packages, training and measuring variants, and the model that is shipped."""

import gzip
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import unittest

import h5py
import numpy as np

import tiny_model
from harness import EXECUTABLE, SOURCE, Case

SCRIPTS = SOURCE / "scripts/small_model"


def script(name):
    """A script of the folder as a module; the scripts import each other by name."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SmallModel(Case):
    """run.sh and pack.py on a small corpus and a smaller model."""

    VARIANTS = ("window", "landmarks")
    SEQUENCE = 1152
    SMALLER = ("--set model.shape.layers=1 --set model.shape.hidden=32 "
               "--set model.shape.ffn=64 --set model.shape.heads=2 --set model.shape.kv_heads=1 "
               "--set model.shape.head_dim=16")

    def write_corpus(self):
        corpus = self.dir / "corpus"
        for part, words, seeds in (("train", 400, (1, 2)), ("held_out", 500, (3,)), ("held_out", 90, (4,))):
            (corpus / part).mkdir(parents=True, exist_ok=True)
            for seed in seeds:
                (corpus / part / f"book{seed}.txt").write_text("Größe: 水 " + tiny_model.document(words, seed))
        (corpus / "SOURCES.md").write_text(
            "| package | version | licence | book | bytes | used for | SHA-256 |\n|---|---|---|---|---|---|---|\n"
            "| a-doc | 1.0-1 | GPL-2 | book1 | 100 | train | 0 |\n| a-doc | 1.0-1 | GPL-2 | book2 | 200 | train | 0 |\n"
            "| b-doc | 2.0 | public domain | book3 | 400 | held_out | 0 |\n")
        return corpus

    def run_script(self, corpus, **environment):
        run = subprocess.run(
            [SCRIPTS / "run.sh"], capture_output=True, text=True, timeout=200,
            env={**os.environ, "SHORT_STEPS": "2", "SHORT_SEQUENCE": "256", "STEPS": "2",
                 "SEQUENCE": str(self.SEQUENCE), "RANKS": "2", "DEVICE": "cpu",
                 "VARIANTS": " ".join(self.VARIANTS), "EVALUATE": "2500", "RESULTS": str(self.dir / "small"),
                 "CORPUS": str(corpus), "LONGHALO": EXECUTABLE, "PYTHON": sys.executable,
                 "SHORT_SETTINGS": self.SMALLER,
                 "SETTINGS": "--set train.validation_share=0 --set train.log_every=1",
                 **environment})
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        return run.stdout

    def bits(self, variant, begin, end):
        """Bits per byte of the positions, from the arrays that longhalo wrote."""
        bits, count = 0.0, 0
        folder = self.dir / "small" / variant / "evaluation"
        for line in (folder / "results.jsonl").read_text().splitlines():
            with h5py.File(folder / json.loads(line)["arrays"]) as arrays:
                for position, score in enumerate(arrays["scores"][:]):
                    if begin <= position < end and not math.isnan(score):
                        bits -= float(score) / math.log(2)
                        count += 1
        return bits / count, count

    def test_trains_measures_goes_on_and_packs(self):
        corpus = self.write_corpus()
        out = self.run_script(corpus)
        report = json.loads((self.dir / "small/evaluation.json").read_text())
        longest = 2500
        self.assertEqual(report["edges"], [0, 1024, self.SEQUENCE, 2 * self.SEQUENCE, 4 * self.SEQUENCE])
        lengths = sorted(report["documents"].values())
        self.assertEqual(lengths[-1], longest)
        self.assertLess(lengths[0], 1024)
        table = report["bits_per_byte"]["all"]
        for variant in self.VARIANTS:
            self.assertIn(f"\n| {variant} |", out)
            for index, (begin, end) in enumerate(zip(report["edges"], report["edges"][1:])):
                if begin >= longest:
                    self.assertIsNone(table[variant][index])
                    continue
                bits, count = self.bits(variant, begin, end)
                self.assertEqual(table["bytes"][index], count)
                self.assertAlmostEqual(table[variant][index], bits, delta=1e-5)
        # Beyond the window the variants see different things.
        self.assertNotEqual(table["window"][2], table["landmarks"][2])

        # What was done is not done again.
        before = (self.dir / "small/window/model/model.safetensors").stat().st_mtime_ns
        again = self.run_script(corpus)
        self.assertIn("window, short: trained already", again)
        self.assertIn("window, long: trained already", again)
        self.assertEqual((self.dir / "small/window/model/model.safetensors").stat().st_mtime_ns, before)
        self.assertEqual(json.loads((self.dir / "small/evaluation.json").read_text()), report)

        self.check_packing()

        # Other settings begin anew, on what the folders hold already.
        self.run_script(corpus, STEPS="1", VARIANTS="window")
        steps = [json.loads(line) for line in (self.dir / "small/window/metrics.jsonl").read_text().splitlines()]
        self.assertEqual([r["step"] for r in steps if r["event"] == "step"], [1])
        shorter = json.loads((self.dir / "small/evaluation.json").read_text())["bits_per_byte"]["all"]["window"]
        self.assertNotEqual(shorter, table["window"])

    def check_packing(self):
        packed = self.dir / "packed"
        run = subprocess.run([sys.executable, SCRIPTS / "pack.py", self.dir / "small", "landmarks", packed, "--sources",
                              self.dir / "corpus/SOURCES.md"], capture_output=True, text=True, timeout=60)
        self.assertEqual(run.returncode, 0, run.stderr)
        pack = script("pack")
        trained = pack.read_safetensors(self.dir / "small/landmarks/model/model.safetensors")
        rounded = pack.read_safetensors(packed / "model.safetensors")
        self.assertEqual(trained.keys(), rounded.keys())
        self.assertIn("model.layers.0.self_attn.landmark_query", rounded)
        for name, values in trained.items():
            self.assertTrue((rounded[name].view(np.uint32) & 0xFFFF == 0).all(), name)
            # bfloat16 has 8 significant bits: rounding to nearest is at most 2^-8 of the value away.
            self.assertTrue((np.abs(rounded[name] - values) <= np.abs(values) * 2.0**-8).all(), name)
        readme = " ".join((packed / "README.md").read_text().split())
        self.assertIn("| a-doc | 1.0-1 | GPL-2 | 2 | 300 |", readme)
        self.assertNotIn("b-doc", readme)
        self.assertIn("2 steps of 256 bytes at", readme)
        self.assertIn("then 2 steps of 1,152 bytes at", readme)

        # The shipped demo's config runs it.
        config = self.load_demo(packed)
        records = self.succeed(config)
        self.assertEqual({record["task"] for record in records.values()}, {"score", "embed", "generate"})

    def load_demo(self, model):
        import yaml
        config = yaml.safe_load((SOURCE / "configs/demo_small.yaml").read_text())
        config["model"]["path"] = str(model)
        config["input"]["documents"] = [str(self.write("text.txt", tiny_model.document(300)))]
        config["generate"]["max_new_tokens"] = 8
        config["output"] = {"directory": str(self.out), "if_exists": "replace"}
        return config

    def test_names_a_variant_that_there_is_not(self):
        run = subprocess.run([SCRIPTS / "run.sh"], capture_output=True, text=True, timeout=60,
                             env={**os.environ, "VARIANTS": "window windows", "LONGHALO": EXECUTABLE})
        self.assertEqual(run.returncode, 1)
        self.assertIn("there is no variant windows", run.stderr)


SHIPPED = SOURCE / "data/small_model"


class Shipped(Case):
    """The model that comes with the repository."""

    def test_demo_runs_and_the_model_has_learned(self):
        import yaml
        text = ("This file is about programs that you may copy, distribute and modify, and about what they do with "
                "their arguments. When a function returns an error, the caller has to free the memory that was "
                "allocated for the buffer; see the section about options below. ") * 3
        config = yaml.safe_load((SOURCE / "configs/demo_small.yaml").read_text())
        config["model"]["path"] = str(SHIPPED)
        config["input"]["documents"] = [str(self.write("text.txt", text))]
        config["generate"]["max_new_tokens"] = 16
        config["output"] = {"directory": str(self.out)}
        records = self.succeed(config)
        self.assertEqual({task for _, _, task in records}, {"score", "embed", "generate"})
        score = next(record for record in records.values() if record["task"] == "score")
        self.assertEqual(score["document_tokens"], len(text))
        # A model that knew how often each byte of this very text occurs, and nothing else, would need this many bits.
        counts = np.bincount(np.frombuffer(text.encode(), np.uint8))
        shares = counts[counts > 0] / len(text)
        self.assertLess(score["bits_per_byte"], -(shares * np.log2(shares)).sum() - 1)

    def test_is_small_and_says_where_it_comes_from(self):
        pack = script("pack")
        self.assertLessEqual((SHIPPED / "model.safetensors").stat().st_size, 8 << 20)
        for name, values in pack.read_safetensors(SHIPPED / "model.safetensors").items():
            self.assertTrue((values.view(np.uint32) & 0xFFFF == 0).all(), f"{name} is not in bfloat16")
        self.assertEqual((SHIPPED / "tokenizer.json").read_bytes(),
                         (SOURCE / "data/byte_tokenizer/tokenizer.json").read_bytes())
        readme = (SHIPPED / "README.md").read_text()
        for package in ("linux-doc-6.1", "python3.11-doc", "git-doc", "perl-doc", "postgresql-doc-15"):
            self.assertRegex(readme, rf"\| {re.escape(package)} \| \S+ \| .*\S+ \|")


class Corpus(Case):
    """make_corpus.py on packages made here, with the folders of the real ones."""

    FILES = {
        "linux-doc-6.1": {"Documentation/filesystems/index.rst": "Files\n",
                          "Documentation/filesystems/ext4.rst.gz": "ext4\n",
                          "Documentation/userspace-api/a.rst": "api\n", "Documentation/virt/a.rst": "virt\n",
                          "Documentation/sound/a.txt": "sound\n", "Documentation/mm/z.rst": "z\n",
                          "Documentation/mm/index.rst": "first\n", "Documentation/mm/deep/a.rst": "deep\n",
                          "Documentation/translations/a.rst": "no\n", "Documentation/atomic.txt.gz": "loose\n"},
        "python3.11-doc": {"/usr/share/doc/python3.11/html/_sources/howto/a.rst.txt": "howto\n",
                           "/usr/share/doc/python3.11/html/_sources/library/os.rst.txt": "os\r\nmodule\r\n"},
        "git-doc": {"git.txt": b"na\xefve git\n", "technical/pack.txt": "pack\n"},
        "perl-doc": {"/usr/share/perl/5.36.0/pod/perl.pod": "perl\n",
                     "/usr/share/perl/5.36.0/pod/perl5360delta.pod": "new\n",
                     "/usr/share/perl/5.36.0/pod/perltoc.pod": "no\n"},
        "postgresql-doc-15": {
            "html/index.html": '<html><head><title>no</title><link rel="next" href="b.html" /></head><body>'
                               '<div class="navheader"><p>no</p></div><h1>The  manual</h1><p>One\n two</p></body>',
            "html/b.html": '<html><head><link rel="next" href="a.html"></head><body><p>B &amp; C<br>D</p>'
                           "<pre>\n  x = 1;\n    y\n</pre></body></html>",
            "html/a.html": "<html><body><table><tr><td>k</td><td>v</td></tr></table></body></html>",
            "html/lost.html": "<p>no link leads here</p>"},
        "vim-runtime": {"/usr/share/vim/vim90/doc/usr_01.txt": "user\n", "/usr/share/vim/vim90/doc/eval.txt": "eval\n",
                        "/usr/share/vim/vim90/doc/version9.txt": "no\n"},
    }
    BOOKS = {
        "held_out/linux-filesystems": "Files\n\next4\n", "held_out/linux-userspace-api": "api\n",
        "held_out/linux-virt": "virt\n", "held_out/linux-sound": "sound\n", "held_out/python-howto": "howto\n",
        "held_out/vim-user-manual": "user\n", "held_out/vim-reference-manual": "eval\n",
        "train/linux-mm": "first\n\nz\n\ndeep\n", "train/linux-overview": "loose\n",
        "train/python-library": "os\nmodule\n",
        "train/git-commands": "naïve git\n", "train/git-technical": "pack\n", "train/perl-manual": "perl\n",
        "train/perl-history": "new\n",
        "train/postgresql-manual": "The manual\n\nOne two\n\nB & C\nD\n\n  x = 1;\n    y\n\nk v\n",
    }

    def write_packages(self, folder):
        folder.mkdir(parents=True)
        for package, files in self.FILES.items():
            tree = self.dir / package
            (tree / "DEBIAN").mkdir(parents=True)
            (tree / "DEBIAN/control").write_text(
                f"Package: {package}\nVersion: 1.2-3\nArchitecture: all\nMaintainer: x <x@y>\nDescription: test\n")
            for name, content in files.items():
                path = tree / (name[1:] if name.startswith("/") else f"usr/share/doc/{package}/{name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                content = content if isinstance(content, bytes) else content.encode()
                path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
            subprocess.run(["dpkg-deb", "-Znone", "--root-owner-group", "--build", tree,
                            folder / f"{package}_1.2-3_all.deb"], check=True, capture_output=True)

    @unittest.skipUnless(shutil.which("dpkg-deb"), "there is no dpkg-deb here")
    def test_books_out_of_packages(self):
        corpus = self.dir / "corpus"
        self.write_packages(corpus / "packages")
        for _ in range(2):  # the second time replaces what the first left
            run = subprocess.run([sys.executable, SCRIPTS / "make_corpus.py", corpus], capture_output=True, text=True,
                                 timeout=60)
            self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
            books = {f"{path.parent.name}/{path.stem}": path.read_text() for path in corpus.glob("*/*.txt")}
            self.assertEqual(books, self.BOOKS)
            sources = (corpus / "SOURCES.md").read_text()
            self.assertIn("| git-doc | 1.2-3 | GPL-2 | git-technical | 5 | train |", sources)
            (corpus / "train/old.txt").write_text("of another version")
