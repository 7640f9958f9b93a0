"""Flash-MSA by its definition, key by key, in float64 numpy: slow and plain.

It settles what LongHalo's attention means; make_attention_cases.py makes the tests' stored cases with it.
`python3 data/flash_msa.py` checks it against itself. A band is (stride, near, far): kernels/attention/bands.hpp.
Shapes: q [n, H, d], k and v [n, H_kv, d] BEFORE rotary; out [n, H, d]; lse [H, n]. Rotary is the half-split
(Hugging Face Llama) form. The whole sequence is given: shards and halos must not change the result.
"""
import numpy as np


def rotate(x, position, theta=10000.0):
    """Rotary embedding of x [..., d] at a (possibly fractional) position."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * np.cos(angle) - second * np.sin(angle),
                           second * np.cos(angle) + first * np.sin(angle)], axis=-1)


def pool(k, v, stride, query):
    """Summaries of every complete segment: kbar, vbar [G, H_kv, d]; query = landmark_query [H_kv, d]."""
    d = k.shape[-1]
    kbar, vbar = [], []
    for g in range(k.shape[0] // stride):
        ks, vs = k[g * stride:(g + 1) * stride], v[g * stride:(g + 1) * stride]
        score = np.einsum("jhd,hd->jh", ks, query) / np.sqrt(d)
        weight = np.exp(score - score.max(0))
        weight /= weight.sum(0)
        kbar.append(np.einsum("jh,jhd->hd", weight, ks))
        vbar.append(np.einsum("jh,jhd->hd", weight, vs))
    shape = (len(kbar),) + k.shape[1:]
    return np.reshape(kbar, shape), np.reshape(vbar, shape)


def flash_msa(q, k, v, bands, landmark_query=None, landmark_bias=None, doc_start=None, theta=10000.0, scale=None):
    """bands: list of (stride, near, far); stride 1 = exact tokens. Band b > 0 uses landmark_query[b - 1]
    [H_kv, d] (default 0: mean) and every band with stride > 1 adds landmark_bias [H] (default 0)."""
    n, H, d = q.shape
    H_kv = k.shape[1]
    scale = d ** -0.5 if scale is None else scale
    doc_start = np.zeros(n, dtype=np.int64) if doc_start is None else doc_start
    bias = np.zeros(H) if landmark_bias is None else landmark_bias
    scales = []
    for b, (stride, near, far) in enumerate(bands):
        if stride == 1:
            keys = np.stack([rotate(k[j], j, theta) for j in range(n)])
            values = v
        else:
            u = np.zeros((H_kv, d)) if landmark_query is None else landmark_query[b - 1]
            keys, values = pool(k, v, stride, u)
            keys = np.stack([rotate(x, g * stride + (stride - 1) / 2, theta) for g, x in enumerate(keys)]) \
                if len(keys) else keys
        scales.append((stride, near, far, keys, values))
    out, lse = np.zeros((n, H, d)), np.full((H, n), -np.inf)
    for i in range(n):
        qi = rotate(q[i], i, theta)
        for h in range(H):
            kv, scores, rows = h // (H // H_kv), [], []
            for stride, near, far, keys, values in scales:
                for g in range(len(keys)):
                    first, last = g * stride, (g + 1) * stride - 1
                    if first <= i - near and last <= i and last > i - far and first >= doc_start[i]:
                        scores.append(scale * (qi[h] @ keys[g, kv]) + (bias[h] if stride > 1 else 0.0))
                        rows.append(values[g, kv])
            if scores:
                s = np.array(scores)
                top = s.max()
                w = np.exp(s - top)
                lse[h, i] = top + np.log(w.sum())
                out[i, h] = (w / w.sum()) @ np.array(rows)
    return out, lse


def _self_check():
    rng = np.random.default_rng(0)
    n, H, H_kv, d = 70, 4, 2, 8
    q, k, v = rng.normal(size=(n, H, d)), rng.normal(size=(n, H_kv, d)), rng.normal(size=(n, H_kv, d))
    dense, _ = flash_msa(q, k, v, [(1, 0, n)])
    wide, _ = flash_msa(q, k, v, [(1, 0, n), (8, n, 10 ** 9)])
    assert np.array_equal(dense, wide)                                  # window >= n is dense causal attention
    bands = [(1, 0, 16), (8, 16, 10 ** 9)]
    u, b = [rng.normal(size=(H_kv, d))], rng.normal(size=H)
    base, _ = flash_msa(q, k, v, bands, u, b)
    for t in (69, 40, 17):                                              # the future never changes the past
        q2, k2, v2 = q.copy(), k.copy(), v.copy()
        q2[t:], k2[t:], v2[t:] = 9.0, -7.0, 5.0
        assert np.array_equal(flash_msa(q2, k2, v2, bands, u, b)[0][:t], base[:t])
    for i in range(n):                                                  # every past token is reachable
        seen = set(range(max(0, i - 15), i + 1))
        for g in range(n // 8):
            if g * 8 <= i - 16:
                seen |= set(range(g * 8, g * 8 + 8))
        assert seen == set(range(i + 1))
    start = np.where(np.arange(n) < 23, 0, 23)                          # a packed document equals the document alone
    packed, _ = flash_msa(q, k, v, [(1, 0, 16)], doc_start=start)
    alone, _ = flash_msa(q[23:], k[23:], v[23:], [(1, 0, 16)])
    assert np.allclose(packed[23:], alone, atol=1e-12)
    print("reference agrees with itself")


if __name__ == "__main__":
    _self_check()
