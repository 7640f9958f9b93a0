#!/usr/bin/env python3
"""What rounding the layers' matrix products costs in perplexity, scheme by scheme, emulated on the CPU.

A Llama checkpoint reads each text with a window of exact keys, no landmarks, in fp32; weights and what products read
are rounded as the scheme says (the casts to e4m3 are exact). All else, attention and head included, stays as it is, but
for the scheme "bf16", which rounds what the GPU keeps in bf16. Two numbers a text: the change of perplexity, which for one text
may go either way by chance, and the divergence from the exact model's predictions (KL), which sees every rounding and is the
better guide. docs/performance.md, "fp8: what costs perplexity", has the results.

Needs PyTorch, safetensors and tokenizers, which the rest of LongHalo's scripts do not need:
    python3 scripts/fp8_perplexity.py --model models/smollm2-135m-instruct --texts data/reference_text.txt --tokens 1024
"""
import argparse
import json
import math
import pathlib
import sys
import time

KINDS = ("q", "kv", "o", "gate_up", "down")
PORTION = 512  # queries and logits that are worked on at once
FACTORS = 16  # scales an octave that are tried for least error


def fail(what, remedy):
    sys.stderr.write(f"fp8_perplexity: {what}\n  remedy: {remedy}\n")
    sys.exit(2)


try:
    import torch
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from torch.nn import functional
except ImportError as missing:
    fail(f"{missing.name} is missing",
         "run it with a Python that has torch, safetensors and tokenizers; they are not among scripts/requirements.txt")


# How rows are rounded: functions of x [..., width], one scale a row unless the name says otherwise.
def exact(x):
    return x


def bf16(x):
    return x.bfloat16().float()


def scales(x, largest):
    scale = x.abs().amax(-1, keepdim=True) / largest
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def rounded_e4m3(x, scale):
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def e4m3(x):
    return rounded_e4m3(x, scales(x, 448))


def e4m3_power_of_two(x):
    return rounded_e4m3(x, torch.exp2(torch.ceil(torch.log2(scales(x, 448)))))


def e4m3_least_error(x):
    """Of FACTORS scales, the largest magnitude at 448 down to half of that, the one with the least squared error."""
    best = least = None
    for step in range(FACTORS):
        y = rounded_e4m3(x, scales(x, 448 * 2 ** (-step / FACTORS)))
        error = (y - x).square().sum(-1, keepdim=True)
        if best is None:
            best, least = y, error
        else:
            best, least = torch.where(error < least, y, best), torch.minimum(error, least)
    return best


def e4m3_blocks(x, width=128):
    blocks = functional.pad(x, (0, -x.shape[-1] % width)).unflatten(-1, (-1, width))
    return e4m3(blocks).flatten(-2)[..., :x.shape[-1]]


def int8(x):
    scale = scales(x, 127)
    return (x / scale).round() * scale


def int8_rotated(x, block=None):
    """In the coordinates of a Hadamard transform of blocks (a power of two that divides the width, the largest unless
    given), which spreads outliers; weights and activations rotated alike leave the product as it is."""
    block = block or x.shape[-1] & -x.shape[-1]
    hadamard = torch.ones(1, 1)
    while len(hadamard) < block:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    hadamard = hadamard / math.sqrt(block)
    return (int8((x.unflatten(-1, (-1, block)) @ hadamard).flatten(-2)).unflatten(-1, (-1, block)) @ hadamard).flatten(-2)


def int8_rotated_64(x):
    return int8_rotated(x, 64)


class Scheme:
    """`weights` and `activations` are the roundings of a matrix and of what it is applied to, where `chosen` says so;
    elsewhere those of the scheme `others` hold, or none."""

    def __init__(self, weights=exact, activations=exact, chosen=lambda kind, layer, layers: True, stream=exact, smooth=None,
                 others=None):
        self.rounding = {"weights": weights, "activations": activations}
        self.chosen, self.stream, self.smooth, self.others = chosen, stream, smooth, others

    def of(self, operand, kind, layer, layers):
        if self.chosen(kind, layer, layers):
            return self.rounding[operand]
        return self.others.of(operand, kind, layer, layers) if self.others else exact


def alone(wanted):
    return lambda kind, layer, layers: kind == wanted


def without(*kinds):
    return lambda kind, layer, layers: kind not in kinds


SCHEMES = {
    "bf16": Scheme(bf16, bf16, stream=bf16),
    "e4m3": Scheme(e4m3, e4m3),
    "e4m3 weights alone": Scheme(weights=e4m3),
    "e4m3 activations alone": Scheme(activations=e4m3),
    **{f"e4m3 {kind} alone": Scheme(e4m3, e4m3, alone(kind)) for kind in KINDS},
    "first and last layer bf16": Scheme(e4m3, e4m3, lambda kind, layer, layers: 0 < layer < layers - 1),
    "first 3 and last 3 layers bf16": Scheme(e4m3, e4m3, lambda kind, layer, layers: 2 < layer < layers - 3),
    "power-of-two scales": Scheme(e4m3_power_of_two, e4m3_power_of_two),
    "activations in blocks of 128": Scheme(e4m3, e4m3_blocks),
    "both in blocks of 128": Scheme(e4m3_blocks, e4m3_blocks),
    "norms take the weights' spread": Scheme(e4m3, e4m3, smooth=0.5),
    "weights of least error": Scheme(e4m3_least_error, e4m3),
    "both of least error": Scheme(e4m3_least_error, e4m3_least_error),
    "weights of least error, kv bf16": Scheme(e4m3_least_error, e4m3, without("kv")),
    "weights of least error, q, kv bf16": Scheme(e4m3_least_error, e4m3, without("q", "kv")),
    "weights of least error, q, kv, o bf16": Scheme(e4m3_least_error, e4m3, without("q", "kv", "o")),
    "weights of least error, only o": Scheme(e4m3_least_error, e4m3, alone("o")),
    "int8": Scheme(int8, int8),
    "int8, rotated": Scheme(int8_rotated, int8_rotated),
    "int8, rotated by 64": Scheme(int8_rotated_64, int8_rotated_64),
    **{f"int8, rotated by 64, {', '.join(kinds)} e4m3":
       Scheme(int8_rotated_64, int8_rotated_64, without(*kinds), others=Scheme(e4m3_least_error, e4m3))
       for kinds in (("q", "o"), ("q", "kv", "o"), ("down",))},
}


class Model:
    def __init__(self, directory, window):
        with open(directory / "config.json", encoding="utf-8") as file:
            config = json.load(file)
        if config.get("rope_scaling") or config["model_type"] != "llama":
            fail(f"{directory} is not a plain Llama model", "give one with model_type llama and no rope_scaling")
        self.tensors = {}
        for path in sorted(directory.glob("*.safetensors")):
            self.tensors |= {name: tensor.float() for name, tensor in load_file(path).items()}
        self.window, self.layers = window, config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.theta, self.epsilon = config.get("rope_theta", 10000.0), config["rms_norm_eps"]
        self.embedding = self.tensors["model.embed_tokens.weight"]
        self.head = self.tensors.get("lm_head.weight", self.embedding)
        self.final_norm = self.tensors["model.norm.weight"]

    def rounded_layer(self, layer, scheme):
        """A layer's norms, and its matrices as the scheme rounds them."""
        def named(*names):
            return torch.cat([self.tensors[f"model.layers.{layer}.{name}.weight"] for name in names])

        w = {"attention_norm": named("input_layernorm"), "mlp_norm": named("post_attention_layernorm"),
             "q": named("self_attn.q_proj"), "kv": named("self_attn.k_proj", "self_attn.v_proj"),
             "o": named("self_attn.o_proj"), "gate_up": named("mlp.gate_proj", "mlp.up_proj"), "down": named("mlp.down_proj")}
        if scheme.smooth is not None:  # s_c = |norm_c|^a / max |w_c|^(1-a): columns times s, the norm divided by it
            for norm, kinds in (("attention_norm", ("q", "kv")), ("mlp_norm", ("gate_up",))):
                largest = torch.cat([w[kind] for kind in kinds]).abs().amax(0)
                s = w[norm].abs() ** scheme.smooth / largest ** (1 - scheme.smooth)
                w[norm] = w[norm] / s
                w |= {kind: w[kind] * s for kind in kinds}
        return {name: scheme.of("weights", name, layer, self.layers)(x) if name in KINDS else x for name, x in w.items()}

    def norm(self, x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * weight

    def rotated(self, x):
        frequencies = self.theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
        cosine, sine = angles.cos().float(), angles.sin().float()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    def attended(self, q, k, v):
        """q [n, H, d], k and v [n, H_kv, d] -> [n, H * d]."""
        n, out = len(q), []
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        for begin in range(0, n, PORTION):
            end, first = min(n, begin + PORTION), max(0, begin - self.window + 1)
            distance = torch.arange(begin, end)[:, None] - torch.arange(first, end)
            out.append(functional.scaled_dot_product_attention(
                q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end],
                attn_mask=(distance >= 0) & (distance < self.window), enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(out).flatten(1)

    def rounded(self, scheme):
        return [self.rounded_layer(layer, scheme) for layer in range(self.layers)]

    def hidden(self, tokens, scheme, weights):
        """Final hidden states [n, D]; `weights` are rounded(scheme)."""
        n, kept = len(tokens), scheme.stream
        x = self.embedding[tokens]
        for layer, w in enumerate(weights):
            def product(kind, a):
                return scheme.of("activations", kind, layer, self.layers)(a) @ w[kind].T

            normed = self.norm(x, w["attention_norm"])
            q = kept(product("q", normed)).view(n, self.heads, self.head_dim)
            kv = kept(product("kv", normed)).view(n, 2, self.kv_heads, self.head_dim)
            attended = self.attended(kept(self.rotated(q)), kept(self.rotated(kv[:, 0])), kv[:, 1])
            x = kept(x + product("o", kept(attended)))
            gate, up = kept(product("gate_up", self.norm(x, w["mlp_norm"]))).chunk(2, -1)
            x = kept(x + product("down", functional.silu(gate) * up))
        return kept(self.norm(x, self.final_norm))


def compared(model, tokens, hidden, right):
    """Mean of -log p of the tokens, and mean KL divergence of predictions from those made from `right`, in nats."""
    loss = divergence = 0.0
    last = len(tokens) - 1  # nothing follows it
    for begin in range(0, last, PORTION):
        rows = slice(begin, min(last, begin + PORTION))
        found = torch.log_softmax(hidden[rows] @ model.head.T, -1)
        loss -= found.gather(1, tokens[1:][rows, None]).double().sum().item()
        divergence += functional.kl_div(found, torch.log_softmax(right[rows] @ model.head.T, -1), reduction="sum",
                                        log_target=True).item()
    return loss / last, divergence / last


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="directory of a Llama checkpoint")
    parser.add_argument("--texts", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=2048, help="of each text, from its beginning")
    parser.add_argument("--window", type=int, default=2048, help="window W in tokens")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES), metavar="SCHEME",
                        help="; ".join(SCHEMES))
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    torch.set_grad_enabled(False)
    for path in (arguments.model / "config.json", arguments.model / "tokenizer.json", *arguments.texts):
        if not path.is_file():
            fail(f"{path} is not there", "give the directory of a checkpoint with a tokenizer, and texts that exist")
    model = Model(arguments.model, arguments.window)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    texts, as_they_are = [], model.rounded(Scheme())
    for path in arguments.texts:
        tokens = torch.tensor(tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False).ids[:arguments.tokens])
        if len(tokens) < 2:
            fail(f"{path} has fewer than two tokens", "give a longer text")
        right = model.hidden(tokens, Scheme(), as_they_are)
        loss = compared(model, tokens, right, right)[0]
        print(f"{path}: {len(tokens)} tokens, perplexity {math.exp(loss):.3f} in fp32", flush=True)
        texts.append((tokens, right, loss))
    print(f"\n{'':38} for each text: change of perplexity, KL in 1e-3 nats; mean KL of all tokens")
    for name in arguments.schemes:
        start, line, sum_of_all = time.monotonic(), f"{name:38}", 0.0
        weights = model.rounded(SCHEMES[name])
        for tokens, right, exact_loss in texts:
            loss, divergence = compared(model, tokens, model.hidden(tokens, SCHEMES[name], weights), right)
            line += f"  {100 * math.expm1(loss - exact_loss):+6.2f}% {1e3 * divergence:6.2f}"
            sum_of_all += divergence * (len(tokens) - 1)
        mean = sum_of_all / sum(len(tokens) - 1 for tokens, _, _ in texts)
        print(f"{line}  | {1e3 * mean:6.2f}   ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
