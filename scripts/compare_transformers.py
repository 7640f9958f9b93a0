#!/usr/bin/env python3
"""Holds a model directory, such as one that `longhalo train` has written, against the `transformers` library.

`transformers` and `longhalo infer` (task score, a window longer than the text: dense causal attention) give every
token of a text its log-probability, both in float32; the largest difference must be at most 2e-3, which is what the
tests allow a logit. torch and transformers are not among LongHalo's own packages:

    python3 -m venv /tmp/reference && /tmp/reference/bin/pip install torch transformers h5py
    /tmp/reference/bin/python scripts/compare_transformers.py results/train_smollm2/model

Exit code: 0 they agree, 1 they do not.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
LARGEST_DIFFERENCE = 2e-3


def scores_of_longhalo(executable, ranks, model, text, folder):
    """(tokens [n], log-probability of each [n]) as `longhalo infer` stores them."""
    config = {"model": {"path": str(model)}, "attention": {"window": 1 << 30, "landmark_stride": 0}, "tasks": ["score"],
              "input": {"documents": [str(text)]}, "output": {"directory": str(folder)}, "run": {"device": "cpu"}}
    (folder / "config.yaml").write_text(json.dumps(config))
    launcher = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    subprocess.run([*launcher, executable, "infer", "--config", folder / "config.yaml"], check=True, env=environment)
    record = json.loads((folder / "results.jsonl").read_text())
    with h5py.File(folder / record["arrays"]) as file:
        return file["tokens"][:], file["scores"][:]


def scores_of_transformers(model, tokens):
    """Log-probability of tokens 1 to n-1, each after those before it."""
    ids = torch.tensor(np.asarray(tokens, np.int64))[None]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = network(ids).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with config.json, *.safetensors and the tokenizer")
    parser.add_argument("--text", type=Path, default=ROOT / "data/reference_text.txt")
    parser.add_argument("--executable", type=Path, default=ROOT / "build/release/longhalo")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens, scores = scores_of_longhalo(arguments.executable, arguments.ranks, arguments.model, arguments.text,
                                            Path(folder))
    expected = scores_of_transformers(arguments.model, tokens)
    difference = np.abs(scores[1:] - expected)
    agrees = bool((difference <= LARGEST_DIFFERENCE).all())  # not where there is a NaN
    print(f"{arguments.model}: {len(tokens)} tokens, perplexity {np.exp(-expected.mean()):.4f} by transformers, "
          f"{np.exp(-scores[1:].mean()):.4f} by longhalo; largest difference of a log-probability "
          f"{difference.max():.2e} ({'within' if agrees else 'NOT within'} {LARGEST_DIFFERENCE})")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
