"""Starts longhalo as a user does, through mpirun, and judges what it leaves behind.

The environment names the programs: LONGHALO_EXECUTABLE, LONGHALO_MPIEXEC. Every process of a run carries a mark of its
own in its environment, so that survivors are found without a look at anybody else's processes.
"""

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import unittest
import uuid
from pathlib import Path

import tiny_model

EXECUTABLE = os.environ["LONGHALO_EXECUTABLE"]
MPIEXEC = os.environ["LONGHALO_MPIEXEC"]
SOURCE = Path(__file__).resolve().parents[2]
# A refused job ends in a second or two; a busy machine may take a few times that. A rank that hangs takes for ever.
GONE_WITHIN_SECONDS = 20
_MARK = "LONGHALO_TEST_RUN"
_model_lock = threading.Lock()
_model = None


def shared_model():
    """The sound model that no test changes, made once."""
    global _model
    with _model_lock:
        if _model is None:
            folder = tempfile.mkdtemp(prefix="longhalo_model_")
            unittest.addModuleCleanup(shutil.rmtree, folder)
            _model = tiny_model.write_model(Path(folder) / "model")
        return _model


class Run:
    """One mpirun: started by __init__, `wait()` fills code, out, err and seconds. It ends with its test at the latest."""

    _of_this_thread = threading.local()

    def __init__(self, arguments, ranks=2, environment=None, cwd=None, before=()):
        self.mark = uuid.uuid4().hex
        line = [MPIEXEC, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), EXECUTABLE]
        line = list(before) + (line if ranks else [EXECUTABLE]) + [str(a) for a in arguments]
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._start = time.monotonic()
        self.process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, cwd=cwd,
            env={**os.environ, **(environment or {}), _MARK: self.mark})
        started = self._of_this_thread
        started.runs = [*getattr(started, "runs", []), self]

    @classmethod
    def end_all(cls):
        """Those that tests of this thread have started and not seen to their end."""
        for run in getattr(cls._of_this_thread, "runs", []):
            if run.process.poll() is None:
                for pid in run.alive(any_program=True):
                    _kill(pid)
                run.process.wait()
        cls._of_this_thread.runs = []

    def wait(self, timeout=60):
        try:
            self.code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            for pid in self.alive(any_program=True):
                _kill(pid)
            self.process.wait()
            raise AssertionError(f"not done after {timeout} s:\n{self._read(self._err)}") from None
        self.seconds = time.monotonic() - self._start
        self.out, self.err = self._read(self._out), self._read(self._err)
        return self

    def so_far(self):
        """Standard error of a run that is still going."""
        return os.pread(self._err.fileno(), 1 << 20, 0).decode(errors="replace")

    def alive(self, any_program=False):
        """Process ids of this run's ranks that are still there (not mpirun's, which ends last)."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{_MARK}={self.mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                if any_program or os.path.realpath(entry / "exe") == os.path.realpath(EXECUTABLE):
                    found.append(int(entry.name))
            except OSError:
                continue
        return sorted(found)

    def wait_for(self, condition, what, timeout=30):
        """Waits until condition() holds while the run is going on."""
        end = time.monotonic() + timeout
        while not (value := condition()):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise AssertionError(f"no {what}:\n{self.so_far()}")
            time.sleep(0.01)
        return value

    def wait_for_end(self, work, timeout=60):
        """Does some work again and again until the run has ended."""
        end = time.monotonic() + timeout
        while self.process.poll() is None:
            if time.monotonic() > end:
                self.process.kill()
                raise AssertionError(f"did not end:\n{self.so_far()}")
            try:
                work()
            except OSError:  # what it works on may go with the run
                pass

    def wait_gone(self):
        """Waits until no rank is left; after a kill they end a moment after mpirun."""
        end = time.monotonic() + GONE_WITHIN_SECONDS
        while self.alive():
            if time.monotonic() > end:
                raise AssertionError("ranks are left")
            time.sleep(0.02)

    @staticmethod
    def _read(file):
        file.seek(0)
        return file.read().decode(errors="replace")


def _kill(pid):
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


def records_of(folder):
    """{(document, query, task): record}; fails on anything but whole lines."""
    text = (Path(folder) / "results.jsonl").read_text()
    assert text.endswith("\n"), "results.jsonl ends in half a line"
    records = [json.loads(line) for line in text.splitlines()]
    table = {(r["document"], r.get("query"), r["task"]): r for r in records}
    assert len(table) == len(records), "a record appears twice"
    return table


def files_below(folder):
    """{relative path: bytes} of every file."""
    folder = Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Case(unittest.TestCase):
    """A test with a scratch folder `self.dir`, a document and a config that works."""

    maxDiff = None

    def setUp(self):
        self.dir = Path(tempfile.mkdtemp(prefix="longhalo_cli_"))
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.addCleanup(Run.end_all)  # before its folder goes
        self.document = self.write("document.txt", tiny_model.document(60))
        self.out = self.dir / "out"

    def write(self, name, contents):
        path = self.dir / name
        path.write_bytes(contents) if isinstance(contents, bytes) else path.write_text(contents)
        return path

    def own_model(self, **kwargs):
        return tiny_model.write_model(self.dir / "own_model", **kwargs)

    def config(self, **sections):
        """A config that runs all tasks; each argument changes keys of its section (None removes one)."""
        config = {
            "model": {"path": str(shared_model())},
            "attention": {"window": 40, "landmark_stride": 8},
            "input": {"documents": [str(self.document)], "prompts": ["What?"]},
            "tasks": ["generate", "score", "embed"],
            "generate": {"max_new_tokens": 8},
            "embed": {"chunk_tokens": 64},
            "output": {"directory": str(self.out)},
        }
        for section, keys in sections.items():
            if isinstance(keys, dict):
                merged = {**config.get(section, {}), **keys}
                config[section] = {k: v for k, v in merged.items() if v is not None}
            else:
                config[section] = keys
        return config

    def infer(self, config, *more, ranks=2, timeout=60, **kwargs):
        """Runs `longhalo infer` with the config, given as a dictionary or as YAML text, to its end."""
        return self.start(config, *more, ranks=ranks, **kwargs).wait(timeout)

    def start(self, config, *more, **kwargs):
        self.yaml = self.dir / f"{uuid.uuid4().hex[:8]}.yaml"
        self.yaml.write_text(config if isinstance(config, str) else json.dumps(config, ensure_ascii=False, indent=1))
        return Run(["infer", "--config", self.yaml, *more], **kwargs)

    def succeed(self, config, *more, **kwargs):
        """The records of a run that has to work."""
        run = self.infer(config, *more, **kwargs)
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(run.alive(), [])
        folder = config["output"]["directory"]
        return records_of(Path(kwargs.get("cwd") or "") / folder)

    def assert_refused(self, run, *words):
        """Exit code 2, everybody gone at once, and one message that has place, remedy and `words`."""
        self.assertEqual(run.code, 2, run.out + run.err)
        self.assertEqual(run.alive(), [], "ranks are left")
        self.assertLess(run.seconds, GONE_WITHIN_SECONDS)
        self.assertEqual(run.err.count(" error: "), 1, f"one message, not one a rank:\n{run.err}")
        self.assertIn("\n  where:  ", run.err)
        self.assertIn("\n  remedy: ", run.err)
        message = run.err[run.err.index(" error: "):]
        for word in words:
            self.assertIn(str(word), message)
        self.assertNotIn("internal error", run.err)

    def old_results(self):
        """Puts results of an earlier job where the next one would write, to be compared afterwards."""
        (self.out / "arrays").mkdir(parents=True)
        (self.out / "results.jsonl").write_text('{"document":"old","task":"score","query":null}\n')
        (self.out / "arrays" / "old.h5").write_bytes(b"old arrays")
        return files_below(self.out)

    def refuse(self, config, *words, **kwargs):
        """A job that must be refused leaves what stands at its output, although it was told to replace it."""
        before = self.old_results()
        config = json.loads(json.dumps(config))
        config["output"]["if_exists"] = "replace"
        run = self.infer(config, **kwargs)
        self.assert_refused(run, *words)
        after = files_below(self.out)
        after.pop("log.jsonl", None)  # the log of the refused run may be there: it is appended to, never replaced
        self.assertEqual(after, before)
        return run
