"""The jobs of a soak, some seconds each: what they are made of, and whether what they left is right."""

import json
import re
import shutil
import struct
import threading
from pathlib import Path

import h5py
import numpy as np

import tiny_model
from harness import Run, records_of
from train_resume_cases import EXACT

STEPS, CHECKPOINT_EVERY = 80, 4  # of more computing than messages, which a busy machine is slow to pass on
DOCUMENTS, ANSWER_TOKENS = 40, 900
# How far undisturbed jobs on 1, 2 and 3 ranks are from each other is what rounding does when ranks change. A job that
# changes them again and again may be a few times as far away.
SPREADS = 10
LEAST_SPREAD = 2.0 ** -20  # of a loss, which is a mean in fp32 of some hundred terms


UNDISTURBED_SECONDS = 240  # on a machine that others use too


class Wrong(Exception):
    """A result, an end or a remainder that must not be."""


class Work:
    """One job with a folder of its own. `variant`: "train", "train on disk" (activations there) or "infer"."""

    def __init__(self, variant, folder, model, deadline):
        self.variant, self.folder, self.out = variant, Path(folder), Path(folder) / "out"
        self.command = variant.split()[0]
        self.scratch = self.folder / "scratch"
        self.folder.mkdir(parents=True)
        self.scratch.mkdir()
        config = {"model": {"path": str(model)}, "attention": {"window": 40, "landmark_stride": 8},
                  "output": {"directory": str(self.out), "if_exists": "resume"},
                  "run": {"deadline_seconds": deadline, "device": "cpu"}}
        config.update(self._train() if self.command == "train" else self._infer())
        self.config = self.folder / "job.yaml"
        self.config.write_text(json.dumps(config, indent=1))

    def _train(self):
        text = self.folder / "text.txt"
        text.write_text(tiny_model.document(1500))
        on_disk = self.variant == "train on disk"
        activations = {"store": "nvme", "directory": str(self.scratch)} if on_disk else {"store": "off"}
        return {"input": {"documents": [str(text)]}, "activations": activations,
                "train": {"steps": STEPS, "sequence_tokens": 480, "learning_rate": 1e-3, "warmup_steps": 2,
                          "validation_share": 0.2, "validate_every": 40, "checkpoint_every": CHECKPOINT_EVERY}}

    def _infer(self):
        names = []
        for index in range(DOCUMENTS):
            path = self.folder / f"document_{index}.txt"
            path.write_text(tiny_model.document(20 + index, seed=index))
            names.append(str(path))
        return {"input": {"documents": names, "prompts": ["What?", "Why?"]}, "tasks": ["generate", "score", "embed"],
                "generate": {"max_new_tokens": ANSWER_TOKENS}, "embed": {"chunk_tokens": 64}}

    def start(self, ranks):
        return Run([self.command, "--config", self.config], ranks=ranks)

    def renew(self):
        """The same job from its beginning."""
        shutil.rmtree(self.out)

    def metrics(self, event):
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == event]

    def expect_no_remains(self, pids):
        """Of this job's scratch folders only those of `pids`, the ranks of the last run, may be there."""
        for path in self.scratch.glob("longhalo-activations@*"):
            if int(re.search(r"@(\d+)-\d+$", path.name)[1]) not in pids:
                raise Wrong(f"{path.name} is of an earlier run")

    def expect_finished(self):
        """All of it was done."""
        if self.command == "train":
            steps = [record["step"] for record in self.metrics("step")]
            if steps != list(range(1, STEPS + 1)):
                raise Wrong(f"exit code 0, but its records are of the steps {steps}")
        elif len(records_of(self.out)) != 4 * DOCUMENTS:
            raise Wrong(f"exit code 0, but there are {len(records_of(self.out))} records")


class References:
    """What undisturbed jobs give, each made once and only if it is asked for."""

    def __init__(self, folder, model, deadline):
        self._folder, self._model, self._deadline = Path(folder), model, deadline
        self._lock, self._made = threading.Lock(), {}
        self.runs = []

    def of(self, variant, ranks):
        with self._lock:
            lock = self._made.setdefault((variant, ranks), [threading.Lock(), None])
        with lock[0]:
            if lock[1] is None:
                work = Work(variant, self._folder / f"{variant.replace(' ', '_')}_{ranks}", self._model, self._deadline)
                run = work.start(ranks)
                self.runs.append(run)
                run.wait(UNDISTURBED_SECONDS)
                if run.code != 0:
                    raise Wrong(f"an undisturbed job ended with {run.code}:\n{run.err}")
                work.expect_finished()
                lock[1] = work
        return lock[1]

    def compare(self, work, ranks):
        """Raises Wrong unless the finished job gives what undisturbed ones give; `ranks`: None where they changed."""
        work.expect_finished()
        if work.command == "infer":
            self._compare_records(work)
        elif ranks is None:
            self._compare_losses(work)
        else:
            whole = self.of(work.variant, ranks)
            for event, keys in (("step", EXACT), ("validation", ("cross_entropy",))):
                for mine, other in zip(work.metrics(event), whole.metrics(event), strict=True):
                    for key in keys:
                        if mine[key] != other[key]:
                            raise Wrong(f"{key} of step {mine['step']} is {mine[key]}, undisturbed {other[key]}")
            models = [(w.out / "model" / "model.safetensors").read_bytes() for w in (work, whole)]
            if models[0] != models[1]:
                raise Wrong("the trained model is not the undisturbed one")

    def _compare_losses(self, work):
        """Ranks have changed: as near to undisturbed jobs as these are to each other, and a whole model."""
        losses = {r: [step["loss"] for step in self.of(work.variant, r).metrics("step")] for r in (1, 2, 3)}
        for number, (loss, *others) in enumerate(zip([s["loss"] for s in work.metrics("step")], *losses.values()), 1):
            most = SPREADS * max(max(others) - min(others), LEAST_SPREAD * others[0])
            if not abs(loss - others[0]) <= most:
                raise Wrong(f"the loss of step {number} is {loss}; {others} undisturbed on 1, 2 and 3 ranks")
        sizes = [_tensors(w.out / "model" / "model.safetensors") for w in (work, self.of(work.variant, 1))]
        if sizes[0] != sizes[1]:
            raise Wrong("the trained model has other tensors than an undisturbed one")

    def _compare_records(self, work):
        """Every record was made in one go by one number of ranks, so that not a bit may differ from theirs."""
        records = records_of(work.out)
        ranks_of = {}  # of a document: a kill between two of its records may leave them to different ranks
        for (document, _, _), record in records.items():
            ranks_of.setdefault(document, set()).add(record["figures"]["ranks"])
        for key, record in records.items():
            other = self._record(key, record["figures"]["ranks"])
            for field in set(record) | set(other):
                if field not in ("figures", "document", "arrays", "settings") and record.get(field) != other.get(field):
                    raise Wrong(f"{field} of {key} is {record.get(field)}, undisturbed {other.get(field)}")
            if "arrays" in record:
                mine = _arrays(work.out / record["arrays"])
                wholes = [_arrays(self.of("infer", r).out / self._record(key, r)["arrays"]) for r in ranks_of[key[0]]]
                if mine not in wholes:
                    raise Wrong(f"arrays of {key[0]} are not the undisturbed ones")

    def _record(self, key, ranks):
        whole = self.of("infer", ranks)
        return records_of(whole.out)[(str(whole.folder / Path(key[0]).name), *key[1:])]


def _arrays(path):
    with h5py.File(path) as file:
        return {name: (file[name].shape, file[name][:].tobytes()) for name in ("tokens", "scores", "embeddings")}


def _tensors(path):
    """{name: shape} of a safetensors file, all of whose numbers have to be finite."""
    contents = path.read_bytes()
    (length,) = struct.unpack("<Q", contents[:8])
    header = json.loads(contents[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        words = np.frombuffer(contents[8 + length + begin : 8 + length + end], np.uint8)
        if tensor["dtype"] == "F32" and not np.isfinite(words.view(np.float32)).all():
            raise Wrong(f"{name} is not finite")
    return {name: tensor["shape"] for name, tensor in header.items()}
