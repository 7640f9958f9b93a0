#!/usr/bin/env python3
"""Make data/gradient_cases.h5: the gradients of data/attention_cases.h5's problems by torch's autograd, in float64.

The attention is written down here once more, in torch, straight from its definition: pooling, rotary embedding, one
softmax over all bands. What it gives is first compared with the stored answers of flash_msa.py; then autograd goes back
from a random gradient of the output to every input. No gradient is derived by hand, so the C++ references, which are,
cannot share a mistake with it. data/README.md lists the datasets.

    python3 -m venv /tmp/reference && /tmp/reference/bin/pip install torch h5py numpy
    /tmp/reference/bin/python data/make_gradient_cases.py
"""
from pathlib import Path

import h5py
import numpy as np
import torch

FOLDER = Path(__file__).resolve().parent
INPUTS = ("q", "k", "v", "landmark_query", "landmark_bias")
# Learned queries and biases, grouped heads, several scales, packed documents, a gap, rows that see nothing.
CASES = ("window_and_learned_landmarks", "one_kv_head_of_eight", "three_scales", "packed_documents",
         "gap_between_window_and_landmarks", "rows_that_see_nothing")


def rotated(x, positions, theta):
    """x [n, heads, d] turned at positions [n]: dimension c with c + d/2."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def summaries(k, v, stride, query):
    """One key and value [G, H_kv, d] for each whole segment of `stride` tokens."""
    whole = k.shape[0] // stride
    shape = (whole, stride, *k.shape[1:])
    k, v = k[:whole * stride].reshape(shape), v[:whole * stride].reshape(shape)
    weight = torch.softmax((k * query).sum(-1) / k.shape[-1] ** 0.5, dim=1)[..., None]
    return (weight * k).sum(1), (weight * v).sum(1)


def attention(q, k, v, landmark_query, landmark_bias, bands, doc_start, theta):
    """out [n, H, d]."""
    n, heads, d = q.shape
    group = heads // k.shape[1]
    at = torch.arange(n)
    scores, values, seen = [], [], []
    for b, (stride, near, far) in enumerate(bands.tolist()):
        keys, own = (k, v) if stride == 1 else summaries(k, v, stride, landmark_query[b - 1])
        first = torch.arange(len(keys)) * stride
        last = first + stride - 1
        keys = rotated(keys, first + (stride - 1) / 2, theta)
        score = torch.einsum("ihd,ghd->hig", rotated(q, at.double(), theta), keys.repeat_interleave(group, 1)) / d ** 0.5
        scores.append(score + (landmark_bias[:, None, None] if stride > 1 else 0))
        values.append(own.repeat_interleave(group, 1))
        i = at[:, None]
        # far may be 2^63 - 1: the difference is what cannot overflow.
        seen.append((first <= i - near) & (last <= i) & (i - last < far) & (first >= doc_start[:, None]))
    score = torch.cat(scores, 2).masked_fill(~torch.cat(seen, 1), -torch.inf)
    top = score.amax(2, keepdim=True).detach()
    weight = torch.exp(score - torch.where(top.isinf(), 0, top))
    total = weight.sum(2, keepdim=True)
    return torch.einsum("hig,ghd->ihd", weight / torch.where(total > 0, total, 1), torch.cat(values))


def write_case(group, case, seed):
    n, heads, d = case["q"].shape
    bands, kv_heads = case["bands"][:], case["k"].shape[1]
    absent = {"landmark_query": (len(bands) - 1, kv_heads, d), "landmark_bias": (heads,)}
    inputs = {name: torch.tensor(case[name][:] if name in case else np.zeros(absent[name]), requires_grad=True)
              for name in INPUTS}
    doc_start = torch.tensor(case["doc_start"][:] if "doc_start" in case else np.zeros(n, np.int64))
    out = attention(*inputs.values(), torch.tensor(bands), doc_start, float(case.attrs["theta"]))
    np.testing.assert_allclose(out.detach().numpy(), case["out"][:], rtol=0, atol=1e-12)
    d_out = torch.tensor(np.random.default_rng(seed).normal(size=out.shape))
    (out * d_out).sum().backward()
    group["d_out"] = d_out.numpy()
    for name, value in inputs.items():
        group[f"d_{name}"] = value.grad.numpy()


def main():
    path = FOLDER / "gradient_cases.h5"
    with h5py.File(FOLDER / "attention_cases.h5") as cases, h5py.File(path, "w") as file:
        file.attrs["made_with"] = f"torch {torch.__version__}, float64"
        for seed, name in enumerate(CASES):
            write_case(file.create_group(name), cases[name], seed)
    print(f"{path.name}: {len(CASES)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
