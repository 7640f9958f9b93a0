#!/usr/bin/env python3
"""Makes a model that can be shipped of one that run.sh trained: weights in bfloat16, and a README that says of what.

    python3 scripts/small_model/pack.py results/small_model landmarks data/small_model

takes results/small_model/landmarks/model with what the run says about itself (metrics.jsonl), the measurements
(evaluation.json) and the list of texts (corpus/SOURCES.md, or --sources). transformers opens the folder, too.
"""

import argparse
import json
import math
import pathlib
import shutil
import struct
import sys
import textwrap

import numpy as np

import evaluate

LARGEST_BYTES = 8_000_000  # it lives in the repository


def read_safetensors(path):
    """{name: float32 array} of a file with F32 and BF16 tensors."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8:8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "F32":
            values = np.frombuffer(content[begin:end], "<f4")
        elif entry["dtype"] == "BF16":
            values = (np.frombuffer(content[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            sys.exit(f"pack: {path}: {name} is {entry['dtype']}; F32 and BF16 can be read")
        if not np.isfinite(values).all():
            sys.exit(f"pack: {path}: {name} holds numbers that are not finite")
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def to_bfloat16(values):
    """The upper halves of float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def write_safetensors(path, tensors):
    header, parts, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, values in tensors.items():
        data = to_bfloat16(values).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def stage_of(run):
    """(effective config, sentence) of a training run: what was done, up to its last step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    config = records[0]["config"]
    train, steps = config["train"], [record["step"] for record in records if record["event"] == "step"][-1]
    return config, (f"{steps} steps of {train['sequence_tokens']:,} bytes at a learning rate of "
                    f"{train['learning_rate']:g} after a warm-up of {train['warmup_steps']}, falling to "
                    f"{train['final_learning_rate']:g}, seed {train['seed']}")


def licences_of(sources):
    """Markdown rows, one a package, of what SOURCES.md says was trained on."""
    packages = {}
    for line in sources.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[5] == "train":
            entry = packages.setdefault(tuple(cells[:3]), [0, 0])
            entry[0] += 1
            entry[1] += int(cells[4])
    rows = ["| Debian package | version | licence of the text | books | bytes |", "|---|---|---|---|---|"]
    return "\n".join(rows + [f"| {name} | {version} | {licence} | {books} | {size:,} |"
                             for (name, version, licence), (books, size) in packages.items()])


def measured(report, variant):
    """The line of this model in the table of evaluation.json."""
    edges, of_all = report["edges"], report["bits_per_byte"]["all"]
    bits = [math.nan if b is None else b for b in of_all[variant]]
    return evaluate.markdown("", {"bits a byte": bits}, of_all["bytes"], edges, report["trained_tokens"]).strip()


def readme(variant, tensors, stages, report, sources):
    (first, first_told), (_, second_told) = stages
    attention = first["attention"]
    bands = " ".join("{" + ", ".join(str(value) for value in band) + "}" for band in attention["bands"])
    parameters = sum(values.size for values in tensors.values())
    how = textwrap.fill(
        f"`scripts/small_model/run.sh` trained it ({variant}) and `scripts/small_model/pack.py` wrote this folder: "
        f"{first_told}; then {second_told}. AdamW; attention bands {bands}, landmark bias from "
        f"{attention['landmark_bias']:g}.", 120)
    return f"""# A small byte-level model
{parameters / 1e6:.2f} M parameters in bfloat16, trained with LongHalo from nothing. Every byte of a text is a token
(data/byte_tokenizer). It knows the manner of technical manuals and little else; it is here so that the demo
(configs/demo_small.yaml) and tests have a trained model without a download.

{how}

Measured on books that were not trained on, by position in the book (bold: beyond the trained length):

{measured(report, variant)}

## What it learned from
{licences_of(sources)}

The texts are not part of this folder; they remain under their licences, which /usr/share/doc/PACKAGE/copyright says in
full. A model can repeat passages of what it read; who passes the weights on should pass on this list.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("results", type=pathlib.Path, help="RESULTS of run.sh")
    parser.add_argument("variant")
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--sources", type=pathlib.Path, help="SOURCES.md of the corpus (RESULTS/corpus/SOURCES.md)")
    arguments = parser.parse_args()
    run, output = arguments.results / arguments.variant, arguments.output
    sources = arguments.sources or arguments.results / "corpus" / "SOURCES.md"

    tensors = read_safetensors(run / "model" / "model.safetensors")
    stages = [stage_of(run / "short"), stage_of(run)]
    report = json.loads((arguments.results / "evaluation.json").read_text(encoding="utf-8"))
    text = readme(arguments.variant, tensors, stages, report, sources)
    size = 2 * sum(values.size for values in tensors.values())
    if size > LARGEST_BYTES:
        sys.exit(f"pack: the weights take {size:,} bytes in bfloat16; {LARGEST_BYTES:,} at most may be shipped")

    output.mkdir(parents=True, exist_ok=True)
    write_safetensors(output / "model.safetensors", tensors)
    description = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
    description["torch_dtype"] = "bfloat16"
    description["max_position_embeddings"] = stages[1][0]["train"]["sequence_tokens"]
    description["bos_token_id"] = description["eos_token_id"] = None  # there are no special tokens
    (output / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(run / "model" / name, output / name)
    (output / "README.md").write_text(text, encoding="utf-8")
    print(f"pack: {output}: {size:,} bytes of weights")


if __name__ == "__main__":
    main()
