#!/usr/bin/env python3
"""Make data/transformers_reference.h5: what the Hugging Face `transformers` library computes for SmolLM2-135M-Instruct.

The tests hold LongHalo against these numbers: with a window at least as long as the text, its attention is dense
causal attention, so logits, log-probabilities, hidden states and greedily generated tokens have to be the same.
data/README.md lists every dataset. The file is stored; this script is run by hand when it has to change:

    python3 -m venv /tmp/reference && /tmp/reference/bin/pip install torch transformers h5py
    .venv/bin/python scripts/fetch_model.py
    /tmp/reference/bin/python data/make_transformers_reference.py

Weights are the model's bfloat16 widened to float32, attention is the `eager` one. The same logits are computed in
float64 too, to state how far float32 rounding alone moves them (attribute `float64_difference`).
"""
import argparse
from pathlib import Path

import h5py
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
FULL_POSITIONS = 4
SAMPLED_POSITIONS = 64
SAMPLED_VOCABULARY = 256
CHUNK_TOKENS = 256
GENERATED_TOKENS = 64
MINIMUM_GAP = 0.01  # a generated token whose lead over the next is smaller would make the test a coin toss


def load(model_dir, dtype):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager").eval()


def forward(model, ids):
    """Logits [n, V] and final hidden state after the last norm [n, D] of one sequence, as numpy arrays."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        return model.lm_head(hidden)[0].numpy(), hidden[0].numpy()


def utf8(text):
    """Text as a dataset that any HDF5 reader takes: its bytes."""
    return np.frombuffer(text.encode(), dtype=np.uint8)


def log_sum_exp(logits):
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    return (top + np.log(np.exp(wide - top).sum(axis=-1, keepdims=True)))[..., 0]


def write_scores(file, text, ids, logits, hidden, exact_logits):
    n, vocabulary = logits.shape
    random = np.random.default_rng(20240229)
    lse = log_sum_exp(logits)

    file["text"] = utf8(text)
    file["token_ids"] = np.array(ids, dtype=np.int32)
    file["token_logprob"] = (logits[np.arange(n - 1), ids[1:]] - lse[:-1]).astype(np.float32)

    full = np.linspace(0, n - 1, FULL_POSITIONS).astype(np.int32)
    file["full/positions"] = full
    file["full/logits"] = logits[full]

    positions = np.unique(np.linspace(0, n - 1, SAMPLED_POSITIONS).astype(np.int32))
    columns = np.sort(random.choice(vocabulary, SAMPLED_VOCABULARY, replace=False)).astype(np.int32)
    file["sampled/positions"] = positions
    file["sampled/vocabulary_ids"] = columns
    file["sampled/logits"] = logits[np.ix_(positions, columns)]
    file["sampled/logsumexp"] = lse[positions].astype(np.float32)
    best = np.sort(logits[positions], axis=-1)[:, -2:]
    file["sampled/lead"] = best[:, 1] - best[:, 0]
    file["sampled/argmax"] = logits[positions].argmax(axis=-1).astype(np.int32)

    chunks = [hidden[begin:begin + CHUNK_TOKENS].astype(np.float64).mean(axis=0)
              for begin in range(0, n, CHUNK_TOKENS)]
    file["embed/means"] = np.array(chunks, dtype=np.float32)
    file["embed"].attrs["chunk_tokens"] = CHUNK_TOKENS
    file.attrs["float64_difference"] = float(np.abs(logits - exact_logits).max())


def write_generation(group, tokenizer, model, messages):
    """GENERATED_TOKENS greedy tokens after the chat template. Ends early nowhere: every prompt has to last."""
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    output = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                            max_new_tokens=GENERATED_TOKENS, do_sample=False, output_scores=True,
                            return_dict_in_generate=True)
    tokens = output.sequences[0, len(ids):].numpy().astype(np.int32)
    best = torch.stack(output.scores)[:, 0].topk(2).values
    gap = (best[:, 0] - best[:, 1]).numpy()
    if len(tokens) != GENERATED_TOKENS or gap.min() < MINIMUM_GAP:
        raise SystemExit(f"{group.name}: {len(tokens)} tokens, smallest lead {gap.min():.4f}: choose another prompt "
                         f"(answer so far: {tokenizer.decode(tokens)!r})")
    for name, text in {"prompt": messages[-1]["content"], "rendered": rendered,
                       "answer": tokenizer.decode(tokens)}.items():
        group[name] = utf8(text)
    group["prompt_ids"] = np.array(ids, dtype=np.int32)
    group["output_ids"] = tokens
    group["lead"] = gap.astype(np.float32)
    print(f"{group.name}: {len(ids)} prompt tokens, smallest lead {gap.min():.3f}\n  {tokenizer.decode(tokens)!r}")


def main():
    parser = argparse.ArgumentParser(description="Make data/transformers_reference.h5.")
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2-135m-instruct")
    parser.add_argument("--output", type=Path, default=ROOT / "data/transformers_reference.h5")
    arguments = parser.parse_args()

    text = (ROOT / "data/reference_text.txt").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    exact_logits, _ = forward(load(arguments.model, torch.float64), ids)
    model = load(arguments.model, torch.float32)
    logits, hidden = forward(model, ids)

    with h5py.File(arguments.output, "w") as file:
        file.attrs["made_with"] = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager"
        file.attrs["model"] = "SmolLM2-135M-Instruct as written by scripts/fetch_model.py"
        write_scores(file, text, ids, logits, hidden, exact_logits)
        write_generation(file.create_group("generate/short"), tokenizer, model,
                         [{"role": "user", "content": "Why is the sky blue? Explain it to a child."}])
        write_generation(file.create_group("generate/document"), tokenizer, model,
                         [{"role": "user", "content": text + "\nSummarise this text in a few sentences."}])
        print(f"{len(ids)} tokens, mean log-probability {file['token_logprob'][...].mean():.4f}, "
              f"float32 differs from float64 by {file.attrs['float64_difference']:.2e}")


if __name__ == "__main__":
    main()
