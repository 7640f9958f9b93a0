#!/usr/bin/env python3
"""Make data/attention_cases.h5: small attention problems with the answers of data/flash_msa.py, in float64.

The C++ reference kernels are held against these to rounding, so they cannot drift from the definition. Lengths are
odd on purpose, and every feature occurs: bands of up to four scales, grouped heads, learned landmark queries and
biases, packed documents, several rotary bases, rows that see nothing. data/README.md lists the datasets.

    .venv/bin/python data/make_attention_cases.py
"""
from pathlib import Path

import h5py
import numpy as np

from flash_msa import flash_msa, pool, rotate

UNLIMITED = np.iinfo(np.int64).max  # kUnlimited of kernels/attention/bands.hpp

# name: (n, H, H_kv, d, theta, bands (stride, near, far), features)
CASES = {
    "one_token": (1, 2, 1, 8, 1e4, [(1, 0, 4)], ""),
    "dense_causal": (37, 4, 4, 8, 1e4, [(1, 0, UNLIMITED)], ""),
    "window_only": (53, 2, 2, 16, 1e5, [(1, 0, 7)], ""),
    "window_and_mean_landmarks": (71, 4, 2, 8, 1e4, [(1, 0, 8), (8, 8, UNLIMITED)], ""),
    "window_and_learned_landmarks": (61, 6, 2, 8, 1e5, [(1, 0, 12), (4, 12, UNLIMITED)], "query bias"),
    "one_kv_head_of_eight": (43, 8, 1, 8, 5e5, [(1, 0, 9), (3, 9, UNLIMITED)], "query bias"),
    "stride_equals_window": (67, 3, 3, 8, 1e4, [(1, 0, 16), (16, 16, UNLIMITED)], "bias"),
    "three_scales": (97, 4, 2, 8, 1e4, [(1, 0, 8), (4, 8, 32), (16, 32, UNLIMITED)], "query bias"),
    "four_scales": (101, 2, 1, 16, 1e4, [(1, 0, 6), (2, 6, 20), (5, 20, 60), (10, 60, UNLIMITED)], "query bias"),
    "packed_documents": (59, 4, 2, 8, 1e4, [(1, 0, 8), (4, 8, UNLIMITED)], "documents query bias"),
    "gap_between_window_and_landmarks": (47, 2, 2, 8, 1e4, [(1, 0, 4), (4, 10, 30)], "bias"),
    "rows_that_see_nothing": (29, 2, 1, 8, 1e4, [(1, 5, 9), (4, 9, UNLIMITED)], "bias"),
}


def document_starts(n, random):
    """Per-token first position of its document: four documents, one of them a single token."""
    cuts = np.sort(random.choice(np.arange(2, n - 1), 2, replace=False))
    starts = np.array([0, cuts[0], cuts[0] + 1, max(cuts[1], cuts[0] + 2)])
    return starts[np.searchsorted(starts, np.arange(n), side="right") - 1].astype(np.int64)


def band_keys(k, v, stride, query, theta):
    """The keys and values of one band as the attention kernel takes them: pooled, then rotated."""
    if stride == 1:
        keys, values, offset = k, v, 0.0
    else:
        keys, values = pool(k, v, stride, query)
        offset = (stride - 1) / 2
    rotated = [rotate(key, g * stride + offset, theta) for g, key in enumerate(keys)]
    return np.reshape(rotated, keys.shape), values


def write_case(group, seed, n, heads, kv_heads, d, theta, bands, features):
    random = np.random.default_rng(seed)
    q = random.normal(size=(n, heads, d))
    k, v = random.normal(size=(2, n, kv_heads, d))
    queries = random.normal(size=(len(bands) - 1, kv_heads, d)) if "query" in features else None
    bias = random.normal(size=heads) - 1 if "bias" in features else None
    starts = document_starts(n, random) if "documents" in features else None
    out, lse = flash_msa(q, k, v, bands, queries, bias, starts, theta)

    group.attrs["theta"] = theta
    group["bands"] = np.array(bands, dtype=np.int64)
    group["q"], group["k"], group["v"] = q, k, v
    if queries is not None:
        group["landmark_query"] = queries
    if bias is not None:
        group["landmark_bias"] = bias
    if starts is not None:
        group["doc_start"] = starts
    group["q_rotated"] = np.stack([rotate(q[i], i, theta) for i in range(n)])
    for b, (stride, _, _) in enumerate(bands):
        query = queries[b - 1] if queries is not None and b > 0 else np.zeros((kv_heads, d))
        group[f"band{b}/k"], group[f"band{b}/v"] = band_keys(k, v, stride, query, theta)
    group["out"], group["lse"] = out, lse


def main():
    path = Path(__file__).resolve().parent / "attention_cases.h5"
    with h5py.File(path, "w") as file:
        for seed, (name, case) in enumerate(CASES.items()):
            write_case(file.create_group(name), seed, *case)
    print(f"{path.name}: {len(CASES)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
