"""Writes data/byte_tokenizer: a tokenizer in which every byte of a text is one token, whose id is the byte.

    python3 data/make_byte_tokenizer.py [FOLDER]

It is byte-level BPE without merges, so longhalo and the tokenizers and transformers packages read it as any other
tokenizer.json. There are no special tokens: documents are told apart by where they begin, not by a token.
"""
import json
import pathlib
import sys


def byte_alphabet():
    """The character that byte-level BPE writes for each byte: the printable ones of Latin-1 for themselves, the other
    68 in order from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(byte_alphabet())},
        "merges": [],
    },
}

# What AutoTokenizer of transformers goes by.
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "byte_tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", TOKENIZER), ("tokenizer_config.json", SETTINGS)):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
