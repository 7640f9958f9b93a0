"""A Llama-shaped model directory small enough that a run takes about a second.

Two layers, hidden 48, 4 query and 2 key/value heads of 16, random weights, a byte-level BPE tokenizer of 400 tokens
and a chat template. `Safetensors` writes the format by hand, so that tests can also write it wrongly.
"""

import hashlib
import json
import struct
from pathlib import Path

import h5py
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 400
HIDDEN = 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = "the shard of a rank reads its window and every landmark before it while halos travel from left to right"


def document(words, seed=7):
    """A text of `words` words, a good four tokens each."""
    vocabulary = _WORDS.split()
    generator = np.random.default_rng(seed)
    text = []
    for index in range(words):
        text.append(vocabulary[generator.integers(len(vocabulary))] + f"{generator.integers(100)}")
        text.append(".\n" if index % 11 == 10 else " ")
    return "".join(text)


def tensors(dtype="BF16", seed=3, config=None):
    """{name: (dtype, shape, bytes)} of the whole model, in file order."""
    c = {**CONFIG, **(config or {})}
    generator = np.random.default_rng(seed)
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for layer in range(c["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes[name + "input_layernorm.weight"] = (hidden,)
        shapes[name + "self_attn.q_proj.weight"] = (q, hidden)
        shapes[name + "self_attn.k_proj.weight"] = (kv, hidden)
        shapes[name + "self_attn.v_proj.weight"] = (kv, hidden)
        shapes[name + "self_attn.o_proj.weight"] = (hidden, q)
        shapes[name + "post_attention_layernorm.weight"] = (hidden,)
        shapes[name + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[name + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[name + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    result = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            values = np.ones(shape, np.float32)
        else:  # layers that change the residual stream as much as it is: errors between ranks would show
            values = (generator.standard_normal(shape) / np.sqrt(shape[1]) * 1.5).astype(np.float32)
        bits = values.view(np.uint32) >> 16
        data = bits.astype("<u2").tobytes() if dtype == "BF16" else values.astype("<f4").tobytes()
        result[name] = (dtype, shape, data)
    return result


def header_of(contents):
    """The header that describes `contents` when they follow one another."""
    header, at = {}, 0
    for name, (dtype, shape, data) in contents.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return header


def write_safetensors(path, contents, header=None, stated_bytes=None):
    """Writes `contents`; `header` and `stated_bytes` (the header's length) may be made to lie."""
    text = json.dumps(header if header is not None else header_of(contents)).encode()
    length = len(text) if stated_bytes is None else stated_bytes
    Path(path).write_bytes(struct.pack("<Q", length) + text + b"".join(data for _, _, data in contents.values()))


def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.train_from_iterator([document(2000, seed=1)], trainer)
    # A vocabulary that the training text did not fill is filled up, so that its size is known.
    fill = [AddedToken(f"<|extra_{i}|>") for i in range(VOCABULARY - made.get_vocab_size())]
    made.add_tokens(fill)
    return made


def write_model(directory, dtype="BF16", eos=None, shape=None):
    """A whole, sound model directory. Without `eos` answers always have their full length; `shape` changes CONFIG."""
    directory = Path(directory)
    directory.mkdir(parents=True)
    config = {**CONFIG, **(shape or {})}
    if eos is not None:
        config["eos_token_id"] = eos
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_safetensors(directory / "model.safetensors", tensors(dtype, config=shape))
    tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def write_tokens(path, model, documents):
    """A token file as `longhalo tokenize` makes it for this model, of ids that no text may give."""
    offsets = np.cumsum([0] + [len(d) for d in documents])
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", data=np.concatenate([np.asarray(d, np.uint16) for d in documents]))
        file.create_dataset("document_offsets", data=offsets.astype(np.int64))
        file.create_dataset("document_names", data=[f"document {i}" for i in range(len(documents))],
                            dtype=h5py.string_dtype())
        digest = hashlib.sha256((Path(model) / "tokenizer.json").read_bytes()).hexdigest()
        for name, value in (("format", "longhalo tokens 1"), ("vocabulary_size", VOCABULARY), ("tokenizer", "tiny"),
                            ("tokenizer_sha256", digest)):
            file.attrs[name] = value
