"""Writes corpus/: for each fuzzer a few small inputs that a reader takes, and some, named bad_*, that it refuses.

    .venv/bin/python tests/fuzz/make_corpus.py

The same files each time. What the fuzzers found lies in crashes/ and stays as it is.
"""

import json
import shutil
import struct
import sys
from pathlib import Path

import h5py
import numpy as np

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
sys.path.insert(0, str(HERE.parent / "e2e"))
import tiny_model  # noqa: E402


def write(target, name, contents):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(contents, dict):
        contents = json.dumps(contents)
    (folder / name).write_bytes(contents.encode() if isinstance(contents, str) else contents)


def safetensors(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def weights():
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    half = {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]}
    write("safetensors", "two", safetensors({"a": entry, "b": half, "__metadata__": {"format": "pt"}}, bytes(26)))
    write("safetensors", "none", safetensors({}))
    write("safetensors", "empty_tensor", safetensors({"a": {"dtype": "U8", "shape": [0, 9], "data_offsets": [0, 0]}}))
    write("safetensors", "bad_overflow",
          safetensors({"a": {"dtype": "F64", "shape": [2**62, 8], "data_offsets": [0, 0]}}))
    write("safetensors", "bad_length", struct.pack("<Q", 2**63) + b"{}")
    write("safetensors", "bad_deep", struct.pack("<Q", 2000) + b"[" * 2000)
    write("weight_index", "both", {"metadata": {"total_size": 3},
                                   "weight_map": {"a": "shard.safetensors", "b": "shard.safetensors"}})
    for name, shard in (("up", "../shard.safetensors"), ("absolute", "/dev/zero"), ("folder", "."), ("nul", "a\0b"),
                        ("below", "x/shard.safetensors"), ("missing", "other.safetensors")):
        write("weight_index", f"bad_{name}", {"weight_map": {"a": shard}})


def models():
    config = {**tiny_model.CONFIG, "eos_token_id": [1, 2]}
    write("model_config", "tiny", config)
    write("model_config", "llama3", {**config, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}})
    write("model_config", "bad_type", {**config, "model_type": "other"})
    write("model_config", "bad_huge", {**config, "hidden_size": 2**61})
    write("model_config", "bad_deep", '{"model_type":"llama","vocab_size":' + "[" * 30000 + "]" * 30000 + "}")
    write("generation_config", "one", {"eos_token_id": 7})
    write("generation_config", "list", {"eos_token_id": [7, 8], "temperature": 0.5})
    write("generation_config", "bad_negative", {"eos_token_id": -1})
    write("generation_config", "bad_fraction", {"eos_token_id": [0.5]})


def tokenizers():
    made = json.loads(tiny_model.tokenizer().to_str())
    byte_tokens = {t: i for t, i in made["model"]["vocab"].items() if len(t) == 1 or i < 3}
    merges = []
    for left, right in (m if isinstance(m, list) else m.split(" ") for m in made["model"]["merges"]):
        if left in byte_tokens and right in byte_tokens and len(merges) < 8:
            merges.append([left, right])
    used = sorted(byte_tokens, key=byte_tokens.get) + [a + b for a, b in merges]
    made["model"]["vocab"] = {token: i for i, token in enumerate(used)}
    made["model"]["merges"] = merges
    made["added_tokens"] = [t for t in made["added_tokens"] if t["content"] in made["model"]["vocab"]]
    write("tokenizer_json", "bytes", made)
    digits = {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|(?i:'s)| ?\\p{L}+|\\s+"}, "behavior": "Isolated",
              "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {**made, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, level]},
             "normalizer": {"type": "NFC"}}
    write("tokenizer_json", "split", split)
    write("tokenizer_json", "bad_model", {**made, "model": {**made["model"], "type": "WordPiece"}})
    write("tokenizer_json", "bad_merge", {**made, "model": {**made["model"], "merges": [["a", "nothing"]]}})
    write("tokenizer_json", "bad_deep", "[" * 30000 + "]" * 30000)

    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": tiny_model.TEMPLATE}
    write("tokenizer_config", "text", config)
    write("tokenizer_config", "list",
          {**config, "chat_template": [{"name": "default", "template": tiny_model.TEMPLATE}]})
    write("tokenizer_config", "no_template", {"bos_token": "<s>"})
    write("tokenizer_config", "bad_list", {"chat_template": [1]})
    write("chat_template", "tiny", tiny_model.TEMPLATE)
    write("chat_template", "many", (
        "{%- set ns = namespace(seen=false) -%}{# a remark #}\n"
        "{%- macro head(role) -%}<{{ role | upper }}>{%- endmacro -%}\n"
        "{%- for m in messages if m.role != 'tool' -%}\n"
        "{%- if loop.first and m['role'] == 'system' -%}{{ head('sys') ~ m.content | trim }}"
        "{%- elif m.role == 'user' -%}{% set ns.seen = true %}{{ '[' + m.content + ']' }}"
        "{%- else -%}{{ raise_exception('no ' + m.role) }}{%- endif -%}\n"
        "{%- endfor -%}{{ 'A:' if add_generation_prompt and ns.seen else (1 + 2) * 3 // 2 % 5 }}"))
    write("chat_template", "bad_open", "{% for m in messages %}{{ m.content }}")
    write("chat_template", "bad_nesting", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}{{ messages[0].content }}")
    message = "{{ messages[0].content }}"
    for name, text in (
            ("doubling", "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"),
            ("tilde", "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"),
            ("lists", "{% set ns = namespace(s=[1]) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"),
            ("nesting_lists", "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}"),
            ("replace", "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s | replace('x', 'xxxxxxxx') %}{% endfor %}"),
            ("recursion", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}")):
        write("chat_template", f"bad_{name}", text + message)
    write("chat_template", "bad_endless", "{% for i in range(1000000000) %}{% for j in range(1000000000) %}x{% endfor %}{% endfor %}")


def sentencepieces():
    """A model of a few pieces in protocol buffers, written by hand: fields 1 (pieces), 2 (trainer), 3 (normalizer)."""
    def varint(value):
        out = b""
        while True:
            out += bytes([value & 127 | (128 if value > 127 else 0)])
            value >>= 7
            if not value:
                return out

    def field(number, value):
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        if isinstance(value, float):
            return varint(number << 3 | 5) + struct.pack("<f", value)
        return varint(number << 3 | 2) + varint(len(value)) + value

    def model(kind, fallback):
        pieces = [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
        if fallback:
            pieces += [(b"<0x%02X>" % b, 0.0, 6) for b in range(256)]
        pieces += [(p.encode(), float(-i), 1) for i, p in enumerate("▁ a e t h r the ▁the ▁a re".split())]
        out = b"".join(field(1, field(1, p) + field(2, s) + field(3, t)) for p, s, t in pieces)
        trainer = field(3, kind) + field(4, len(pieces)) + (field(35, 1) if fallback else b"")
        normalizer = field(1, b"identity") + field(3, 1) + field(4, 0) + field(5, 1)
        return out + field(2, trainer) + field(3, normalizer)

    write("tokenizer_model", "bpe", model(2, True))
    write("tokenizer_model", "unigram", model(1, False))
    write("tokenizer_model", "bad_half", model(2, True)[:700])
    write("tokenizer_model", "bad_text", "not a model")


def settings():
    write("config_yaml", "infer", (
        "model: {path: m}\nattention: {window: 64, landmark_stride: 8}\ninput:\n  documents: [a.txt, b.txt]\n"
        "  prompts: [\"What?\"]\ntasks: [generate, score]\noutput: {directory: out, if_exists: resume}\n"
        "run: {device: cpu, threads: 2}\n"))
    write("config_yaml", "train", (
        "model:\n  weights: random\n  seed: 3\n  shape: {layers: 1, hidden: 8, ffn: 8, heads: 1, kv_heads: 1, "
        "head_dim: 8, vocabulary: 9}\nattention:\n  bands: [[1, 0, 64], [8, 64, 512], [64, 512, inf]]\n"
        "input: {tokens: t.h5}\ntrain: {steps: 5, learning_rate: 1e-3, warmup_steps: 1}\n"
        "activations: {store: nvme, every: 2, directory: /scratch}\noutput: {directory: out}\n"))
    write("config_yaml", "bad_key", "modl: {path: m}\n")
    write("config_yaml", "bad_types", "model: [1, 2]\ntrain: {steps: .nan, sequence_tokens: 1e99}\nrun: 3\n")
    write("config_yaml", "bad_comma", ", , ,\n")
    write("config_yaml", "bad_alias", "a: &a [*a]\nb: *a\n")
    write("config_yaml", "bad_deep", "[" * 3000)


def tokens():
    def file(name, change=lambda f: None, dtype=np.uint16, offsets=(0, 3, 3, 7), **keys):
        path = CORPUS / "token_file" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w", libver=keys.pop("libver", "earliest")) as f:
            f.create_dataset("tokens", data=np.arange(7, dtype=dtype), track_times=False, **keys)
            f.create_dataset("document_offsets", data=np.array(offsets, np.int64), track_times=False)
            f.attrs["vocabulary_size"] = 300
            change(f)

    def named(f):
        f.create_dataset("document_names", data=["one", "two", "three"], dtype=h5py.string_dtype(), track_times=False)
        f.attrs["tokenizer"] = "tiny"

    file("plain")
    file("wide", named, np.uint32)
    file("packed", chunks=(4,), compression="gzip", shuffle=True, fletcher32=True)
    file("new_format", named, libver="latest")
    file("bad_offsets", offsets=(0, 5, 3, 7))
    file("bad_end", offsets=(0, 3, 3, 8))

    def replace(how):
        def change(f):
            del f["tokens"]
            how(f)
        return change

    def external(f):
        f["tokens"] = h5py.ExternalLink("/etc/passwd", "/tokens")

    def raw_file(f):
        f.create_dataset("tokens", (7,), np.uint16, external=[("/etc/passwd", 0, 14)], track_times=False)

    def view(f):
        layout = h5py.VirtualLayout((7,), np.uint16)
        layout[:] = h5py.VirtualSource("/etc/passwd", "tokens", (7,))
        f.create_virtual_dataset("tokens", layout)

    def huge(f):
        del f["document_offsets"]
        f.create_dataset("tokens", (2**50,), np.uint16, chunks=(4,), track_times=False)
        f.create_dataset("document_offsets", data=np.array([0, 2**50], np.int64), track_times=False)

    def many(f):
        f.create_dataset("tokens", data=np.arange(7, dtype=np.uint16), track_times=False)
        del f["document_offsets"]
        f.create_dataset("document_offsets", (2**50,), np.int64, chunks=(4,), track_times=False)

    file("bad_external_link", replace(external))
    file("bad_raw_file", replace(raw_file))
    file("bad_view", replace(view), libver="latest")
    file("bad_soft_link", replace(lambda f: f.__setitem__("tokens", h5py.SoftLink("/document_offsets"))))
    file("bad_never_written", replace(huge))
    file("bad_never_written_offsets", replace(many))


def manifests():
    manifest = {"format": "longhalo-checkpoint-1", "step": 7, "sequence": 2, "ranks": 1, "job_state": {"step": 7},
                "rank_states": [{}], "checksum": "0" * 16,
                "parts": [{"file": "model.safetensors", "bytes": 10, "checksum": "0123456789abcdef"},
                          {"file": "optimizer_00001_of_00001.h5", "bytes": 10, "checksum": "0123456789abcdef",
                           "optimizer": [{"group": "g", "begin": 0, "end": 4, "total": 4}]}]}
    write("manifest", "two_parts", manifest)
    write("manifest", "no_parts", {**manifest, "parts": []})
    for name, file in (("up", "../x"), ("absolute", "/etc/passwd"), ("folder", ".")):
        write("manifest", f"bad_{name}", {**manifest, "parts": [{**manifest["parts"][0], "file": file}]})
    hole = [{"group": "g", "begin": 1, "end": 4, "total": 4}]
    write("manifest", "bad_hole", {**manifest, "parts": [{**manifest["parts"][1], "optimizer": hole}]})
    write("manifest", "bad_deep", "[" * 30000 + "]" * 30000)


if __name__ == "__main__":
    shutil.rmtree(CORPUS, ignore_errors=True)
    for make in (weights, models, tokenizers, sentencepieces, settings, tokens, manifests):
        make()
    size = sum(p.stat().st_size for p in CORPUS.rglob("*") if p.is_file())
    print(f"{sum(p.is_file() for p in CORPUS.rglob('*'))} files, {size} bytes")
