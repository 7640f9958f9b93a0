#!/usr/bin/env python3
"""Bits per byte by position, of models that read the same documents.

    evaluate.py cut --bytes N --output FOLDER FILE...        the first N bytes of each text (whole characters)
    evaluate.py table --trained N --json FILE NAME=RESULTS... a markdown table, a line a model

RESULTS is the output.directory of `longhalo infer` with the task score and a byte tokenizer: every token is one byte.
A byte at position p is foreseen from the p bytes before it; the first byte of a document from nothing, so it does not
count. Means are over all bytes of a bucket, whatever their document.
"""

import argparse
import json
import math
import pathlib
import sys

import h5py
import numpy as np


def cut(arguments):
    arguments.output.mkdir(parents=True, exist_ok=True)
    for old in arguments.output.glob("*.txt"):
        old.unlink()
    for file in arguments.files:
        content = file.read_bytes()[:arguments.bytes].decode("utf-8", errors="ignore").encode()
        (arguments.output / file.name).write_bytes(content)


def edges_of(trained, longest):
    """Bounds of the buckets: powers of 4 from 1,024 on, and the trained length doubled until all is covered."""
    edges = {0, trained} | {1024 * 4**k for k in range(16) if 1024 * 4**k < trained}
    while max(edges) < longest:
        edges.add(2 * max(edges))
    return sorted(edges)


def scores_of(results):
    """{document's name: log-probabilities [N], natural, NaN where nothing stood before} of a results folder."""
    scores = {}
    for line in (results / "results.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["task"] == "score":
            with h5py.File(results / record["arrays"]) as arrays:
                scores[pathlib.Path(record["document"]).name] = arrays["scores"][:].astype(np.float64)
    if not scores:
        sys.exit(f"evaluate: {results}/results.jsonl holds no scores; run longhalo infer with tasks: [score]")
    return scores


def bits_by_bucket(scores, edges):
    """(bits per byte, bytes) of each bucket; NaN where no document reaches."""
    bits, counts = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1, np.int64)
    for values in scores.values():
        for index, (begin, end) in enumerate(zip(edges, edges[1:])):
            known = values[begin:end]
            known = known[~np.isnan(known)]
            bits[index] -= known.sum() / math.log(2)
            counts[index] += known.size
    return np.where(counts > 0, bits / np.maximum(counts, 1), np.nan), counts


def short(count):
    return f"{count // 1024}k" if count % 1024 == 0 and count else str(count)


def markdown(title, rows, counts, edges, trained):
    """`rows` is {name: bits per byte of each bucket}. A bold head is beyond the trained length."""
    heads = [f"{short(a)}-{short(b)}" if b <= trained else f"**{short(a)}-{short(b)}**"
             for a, b in zip(edges, edges[1:])]
    lines = [title, "", f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|",
             f"| bytes measured | {' | '.join(f'{count:,}' for count in counts)} |"]
    for name, bits in rows.items():
        lines.append(f"| {name} | {' | '.join('' if math.isnan(b) else f'{b:.4f}' for b in bits)} |")
    return "\n".join(lines)


def table(arguments):
    models = {}
    for entry in arguments.models:
        name, _, folder = entry.partition("=")
        models[name] = scores_of(pathlib.Path(folder))
    lengths = {name: {document: values.size for document, values in scores.items()} for name, scores in models.items()}
    first = next(iter(lengths.values()))
    for name, of_model in lengths.items():
        if of_model != first:
            sys.exit(f"evaluate: {name} was measured on other documents than {next(iter(lengths))}")
    longest = max(first.values())
    edges = edges_of(arguments.trained, longest)
    long = {document for document, length in first.items() if length > longest - 4}  # cut at a character
    report = {"trained_tokens": arguments.trained, "edges": edges, "documents": first, "bits_per_byte": {}}
    parts = []
    for kind, documents in (("all", set(first)), ("longest", long)):
        rows, counts = {}, None
        for name, scores in models.items():
            bits, counts = bits_by_bucket({d: s for d, s in scores.items() if d in documents}, edges)
            rows[name] = bits
        report["bits_per_byte"][kind] = {"bytes": counts.tolist(),
                                         **{name: [None if math.isnan(b) else round(b, 6) for b in bits]
                                            for name, bits in rows.items()}}
        title = f"Bits per byte by position in {len(documents)} documents that were not trained on"
        if kind == "longest":
            title = f"The same of the {len(documents)} longest of them alone, so that a line compares the same texts"
        parts.append(markdown(f"{title} (bold: beyond the trained length of {arguments.trained:,}):", rows, counts,
                              edges, arguments.trained))
        if len(long) == len(first):
            break
    print("\n\n".join(parts))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("cut")
    command.add_argument("--bytes", type=int, required=True)
    command.add_argument("--output", type=pathlib.Path, required=True)
    command.add_argument("files", nargs="+", type=pathlib.Path)
    command.set_defaults(run=cut)
    command = commands.add_parser("table")
    command.add_argument("--trained", type=int, required=True)
    command.add_argument("--json", type=pathlib.Path)
    command.add_argument("models", nargs="+", metavar="NAME=RESULTS")
    command.set_defaults(run=table)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
