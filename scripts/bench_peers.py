#!/usr/bin/env python3
"""Measure what PyTorch makes of the attention that `longhalo bench attention` measures, in the same terms.

FlexAttention (compiled) computes window and landmarks in one masked softmax: landmark keys stand behind the tokens'
keys, and a block mask names the blocks that a block of queries sees. Beside it, cuDNN's and FlashAttention's dense
causal attention, a matrix product and a copy, all in this process. Options, table and JSON keys are those of
`longhalo bench attention`; docs/performance.md defines the numbers. No landmark bias is added, which favours the peer.

Needs PyTorch and a GPU, neither of which the rest of LongHalo's scripts need:
    python3 scripts/bench_peers.py --tokens 131072 --window 4096 --stride 256 --heads 32 --kv-heads 8 --head-dim 128
"""
import argparse
import json
import statistics
import sys
import time

BLOCK = 128  # FlexAttention's block of queries and of keys
WARM_UP_SECONDS = 0.2
SAMPLE_SECONDS = 2e-3
SAMPLES = 64  # rows that are checked
MATMUL_SIDE = 8192
COPY_BYTES = 2 << 30


def fail(what, remedy):
    sys.stderr.write(f"bench_peers: {what}\n  remedy: {remedy}\n")
    sys.exit(2)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=131072, help="queries and exact keys N; a multiple of 128")
    parser.add_argument("--window", type=int, default=4096, help="window W in tokens")
    parser.add_argument("--stride", type=int, default=256, help="landmark stride S in tokens, 0 for none")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dense-tokens", type=int, default=16384, help="length for dense causal attention")
    parser.add_argument("--repeats", type=int, default=10, help="timed samples")
    parser.add_argument("--autotune", action="store_true",
                        help="let FlexAttention try all its block sizes, which takes minutes")
    parser.add_argument("--backward", action="store_true", help="measure the gradients, too")
    parser.add_argument("--json", help="write the result as JSON to this file")
    arguments = parser.parse_args()
    if arguments.tokens % BLOCK or arguments.tokens < BLOCK:
        parser.error("--tokens must be a multiple of 128")
    if arguments.stride > arguments.window or arguments.window < 1 or arguments.stride < 0:
        parser.error("--stride must be at most --window")
    if arguments.heads % arguments.kv_heads:
        parser.error("--kv-heads must divide --heads")
    return arguments


class Pattern:
    """Window and landmarks as longhalo defines them: token i sees tokens j, i - W < j <= i, and landmarks g, g * S <= i - W."""

    def __init__(self, tokens, window, stride):
        self.tokens, self.window, self.stride = tokens, window, stride
        self.landmarks = tokens // stride if stride else 0
        self.padded = -(-self.landmarks // BLOCK) * BLOCK  # a whole number of blocks; nobody sees the padding

    def describe(self):
        text = f"{{1, 0, {self.window}}}"
        return text + (f" {{{self.stride}, {self.window}, inf}}" if self.stride else "")

    def seen_landmarks(self, i):
        return max(0, (i - self.window) // self.stride + 1) if self.stride else 0

    def pairs(self):
        return sum(min(i + 1, self.window) + self.seen_landmarks(i) for i in range(self.tokens))

    def visible(self, i):
        """Rows of k and v that query i sees."""
        return (list(range(max(0, i - self.window + 1), i + 1))
                + list(range(self.tokens, self.tokens + self.seen_landmarks(i))))

    def blocks(self, block):
        """(partly, wholly) visible blocks of keys for a block of queries, by the extremes of both."""
        first, last = block * BLOCK, block * BLOCK + BLOCK - 1
        partly, wholly = [], []
        for keys in range(max(0, first - self.window + 1) // BLOCK, block + 1):
            whole = keys * BLOCK + BLOCK - 1 <= first and last - keys * BLOCK < self.window
            (wholly if whole else partly).append(keys)
        seen_by_last, seen_by_first = self.seen_landmarks(last), self.seen_landmarks(first)
        for keys in range(-(-seen_by_last // BLOCK)):
            whole = (keys + 1) * BLOCK <= seen_by_first
            (wholly if whole else partly).append(self.tokens // BLOCK + keys)
        return partly, wholly

    def block_mask(self, torch, device):
        """Written down directly: deriving it from the mask would evaluate every (query, key) pair."""
        from torch.nn.attention.flex_attention import BlockMask
        tokens, window, stride = self.tokens, self.window, self.stride

        def mask(_batch, _head, query, key):
            local = (key <= query) & (query - key < window)
            if not stride:
                return local
            landmark = (key >= tokens) & ((key - tokens) * stride <= query - window)
            return ((key < tokens) & local) | landmark

        rows, columns = tokens // BLOCK, (tokens + self.padded) // BLOCK
        counts = torch.zeros(2, 1, 1, rows, dtype=torch.int32)
        indices = torch.zeros(2, 1, 1, rows, columns, dtype=torch.int32)
        for row in range(rows):
            for kind, blocks in enumerate(self.blocks(row)):
                counts[kind, 0, 0, row] = len(blocks)
                indices[kind, 0, 0, row, :len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        counts, indices = counts.to(device), indices.to(device)
        return BlockMask.from_kv_blocks(counts[0], indices[0], counts[1], indices[1], BLOCK_SIZE=BLOCK, mask_mod=mask,
                                        seq_lengths=(tokens, tokens + self.padded))


def timed(torch, repeats, work):
    """Median and smallest of `repeats` samples between CUDA events, in seconds a run, after a warm-up."""
    work()
    torch.cuda.synchronize()
    start, runs = time.monotonic(), 0
    while runs < 3 or time.monotonic() - start < WARM_UP_SECONDS:
        work()
        torch.cuda.synchronize()
        runs += 1
    inner = max(1, min(200, int(SAMPLE_SECONDS / ((time.monotonic() - start) / runs))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    work()  # keeps the GPU busy until the first sample is queued behind it
    events[0].record()
    for event in events[1:]:
        for _ in range(inner):
            work()
        event.record()
    torch.cuda.synchronize()
    samples = [a.elapsed_time(b) * 1e-3 / inner for a, b in zip(events, events[1:])]
    return statistics.median_high(samples), min(samples)


def sampled_error(torch, q, k, v, out, visible):
    """Relative Frobenius error of sampled rows against fp64; q, k, v, out are [1, heads, rows, d]."""
    generator = torch.Generator().manual_seed(5)
    rows = [0, q.shape[2] - 1] + torch.randint(q.shape[2], (SAMPLES - 2,), generator=generator).tolist()
    heads = torch.randint(q.shape[1], (SAMPLES,), generator=generator).tolist()
    difference = norm = 0.0
    for row, head in zip(rows, heads):
        keys = torch.tensor(visible(row), device=q.device)
        kv_head = head * k.shape[1] // q.shape[1]
        scores = k[0, kv_head, keys].double() @ q[0, head, row].double() * q.shape[3] ** -0.5
        exact = torch.softmax(scores, 0) @ v[0, kv_head, keys].double()
        difference += (out[0, head, row].double() - exact).square().sum().item()
        norm += exact.square().sum().item()
    return (difference / norm) ** 0.5


class Bench:
    def __init__(self, torch, arguments):
        self.torch, self.arguments = torch, arguments
        self.device = torch.device("cuda")

    def arrays(self, queries, keys):
        """bf16 as longhalo lays it: q [rows, H, d] and interleaved rows [2, H_kv, d] of keys and values."""
        a, torch = self.arguments, self.torch
        q = torch.randn(queries, a.heads, a.head_dim, device=self.device, dtype=torch.bfloat16)
        kv = torch.randn(keys, 2, a.kv_heads, a.head_dim, device=self.device, dtype=torch.bfloat16)
        return (q.transpose(0, 1)[None], kv[:, 0].transpose(0, 1)[None], kv[:, 1].transpose(0, 1)[None])

    def rates(self):
        """(FLOP/s of a bf16 product, bytes a second read and written by a copy)."""
        torch = self.torch
        a = torch.randn(MATMUL_SIDE, MATMUL_SIDE, device=self.device, dtype=torch.bfloat16)
        b = torch.randn(MATMUL_SIDE, MATMUL_SIDE, device=self.device, dtype=torch.bfloat16)
        c = torch.empty_like(a)
        matmul = 2 * MATMUL_SIDE ** 3 / timed(torch, 7, lambda: torch.matmul(a, b.t(), out=c))[0]
        source = torch.randn(COPY_BYTES // 2, device=self.device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        return matmul, 2 * COPY_BYTES / timed(torch, 7, lambda: target.copy_(source))[0]

    def rows(self, name, work, arrays, flops, visible):
        """Forward and, if wanted, backward: five products a visible pair instead of two."""
        forward = self.row(name, work, arrays, flops, visible)
        if not self.arguments.backward:
            return [forward]
        for array in arrays:
            array.requires_grad_(True)
        out = work()
        gradient = self.torch.randn_like(out)

        def back():
            self.torch.autograd.grad(out, arrays, gradient, retain_graph=True)

        median, smallest = timed(self.torch, self.arguments.repeats, back)
        return [forward, {"kernel": f"{name} backward", "median_seconds": median, "min_seconds": smallest,
                          "useful_tflops": 2.5 * flops / median / 1e12, "moved_bytes": 0, "relative_error": None}]

    def row(self, name, work, arrays, flops, visible):
        q, k, v = arrays
        median, smallest = timed(self.torch, self.arguments.repeats, work)
        moved = (2 * q.numel() + k.numel() + v.numel()) * q.element_size()
        return {"kernel": name, "median_seconds": median, "min_seconds": smallest, "useful_tflops": flops / median / 1e12,
                "moved_bytes": moved, "relative_error": sampled_error(self.torch, q, k, v, work(), visible)}

    def flex(self, pattern):
        from torch.nn.attention.flex_attention import flex_attention
        torch, a = self.torch, self.arguments
        arrays = self.arrays(pattern.tokens, pattern.tokens + pattern.padded)
        mask = pattern.block_mask(torch, self.device)
        mode = "max-autotune-no-cudagraphs" if a.autotune else None
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)

        def work():
            return compiled(*arrays, block_mask=mask, enable_gqa=a.heads != a.kv_heads)

        flops = 4 * a.head_dim * a.heads * pattern.pairs()
        return self.rows("flex_attention", work, arrays, flops, pattern.visible)

    def dense(self, name):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        torch, a = self.torch, self.arguments
        tokens = a.dense_tokens
        q, k, v = self.arrays(tokens, tokens)
        backend = SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION

        def attend(keys, values):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True,
                                                                        enable_gqa=a.heads != keys.shape[1])

        try:
            attend(k, v)
        except RuntimeError:  # a backend that wants as many key heads as query heads
            k, v = (x.repeat_interleave(a.heads // a.kv_heads, 1) for x in (k, v))

        def work():
            return attend(k, v)

        flops = 4 * a.head_dim * a.heads * (tokens * (tokens + 1) // 2)
        return self.rows(f"sdpa_{name}", work, (q, k, v), flops, lambda i: list(range(i + 1)))


def shares(rows, matmul, copy):
    for row in rows:
        row["matmul_percent"] = 100 * row["useful_tflops"] * 1e12 / matmul
        row["copy_percent"] = 100 * row.pop("moved_bytes") / row["median_seconds"] / copy
    return rows


def measure(torch, arguments):
    bench = Bench(torch, arguments)
    pattern = Pattern(arguments.tokens, arguments.window, arguments.stride)
    torch.manual_seed(1)
    first = bench.rates()
    rows, dense, refused = [], [], {}
    for name, job, results in (("flex_attention", lambda: bench.flex(pattern), rows),
                               ("sdpa_cudnn", lambda: bench.dense("cudnn"), dense),
                               ("sdpa_flash", lambda: bench.dense("flash"), dense)):
        try:
            results.extend(job())
        except (RuntimeError, ImportError) as error:  # a backend that this PyTorch or GPU has not
            refused[f"no_{name}"] = str(error).splitlines()[0]
        torch.cuda.empty_cache()
    matmul, copy = ((a + b) / 2 for a, b in zip(first, bench.rates()))
    result = {
        "benchmark": "attention, bf16, PyTorch", "torch": torch.__version__,
        "device": torch.cuda.get_device_name(), "tokens": arguments.tokens, "first_query": 0, "heads": arguments.heads,
        "kv_heads": arguments.kv_heads, "head_dim": arguments.head_dim, "bands": pattern.describe(), "ranks": 1,
        "repeats": arguments.repeats,
        "useful_tflop": 4 * arguments.head_dim * arguments.heads * pattern.pairs() / 1e12,
        "kernels": shares(rows, matmul, copy), "dense_tokens": arguments.dense_tokens,
        "dense_kernels": shares(dense, matmul, copy), "matmul_tflops": matmul / 1e12, "copy_gb_per_second": copy / 1e9}
    return {**result, **refused}


def print_table(result):
    def shown(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    print(result["benchmark"])
    for key, value in result.items():
        if key == "benchmark":
            continue
        if not isinstance(value, list):
            print(f"  {key:28}{shown(value):>14}")
            continue
        print(f"  {key:28}{len(value)} below")
        if value:
            lines = [list(value[0])] + [[shown(cell) for cell in row.values()] for row in value]
            widths = [max(len(line[c]) for line in lines) for c in range(len(lines[0]))]
            for line in lines:
                print("    " + " ".join(cell.rjust(width) for cell, width in zip(line, widths)))


def main():
    arguments = parse_arguments()
    try:
        import torch
    except ImportError:
        fail("PyTorch is missing", "run it with a Python that has torch; it is not among scripts/requirements.txt")
    if not torch.cuda.is_available():
        fail("there is no GPU that PyTorch can use", "run it on a host with a GPU, with a torch built for CUDA")
    result = measure(torch, arguments)
    print_table(result)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
