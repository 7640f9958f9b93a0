"""Trains small tokenizers of every supported kind and writes what the `tokenizers` and `sentencepiece` packages make
of the corpus, for tokenizer_agreement_test.cpp.

    tokenizer_reference.py OUTPUT_FOLDER [MODEL_FOLDER...]

OUTPUT_FOLDER/texts.bin holds the corpus; OUTPUT_FOLDER/<name>/ a model directory with reference.bin beside it. A blob
file is a sequence of (uint32 length, bytes). reference.bin has the stride first (every how many-th text is there), then
three blobs a text: ids with special tokens as text, ids with them parsed (int32), and the package's decoding of the
latter. Exit code 77: a package is missing.
"""
import io
import json
import pathlib
import shutil
import struct
import sys

try:
    import numpy
    import sentencepiece
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
except ImportError as missing:
    print(missing)
    sys.exit(77)

import tokenizer_corpus

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FLAGGED = [
    AddedToken("<keep>", lstrip=True, normalized=False),
    AddedToken("<strip>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("WORD", single_word=True, rstrip=True, normalized=True),
    AddedToken("чаи\u0306", normalized=True),
    AddedToken("\u2126mega", normalized=False),
    AddedToken("  ", normalized=False),
    AddedToken("<|im", normalized=True),
]


def byte_level(**options):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior, invert=invert), byte_level(use_regex=False)])


def train(pre_tokenizer, text, whole_alphabet=True, normalizer=None, **model_options):
    tokenizer = Tokenizer(models.BPE(**model_options))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    unknown = [model_options["unk_token"]] if "unk_token" in model_options else []
    trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=SPECIAL + unknown, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if whole_alphabet else [])
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def edited(tokenizer, edit):
    description = json.loads(tokenizer.to_str())
    edit(description)
    return Tokenizer.from_str(json.dumps(description))


def with_unreachable_words(description):
    """Whole words that no merges lead to: ignore_merges finds them, merging does not."""
    vocabulary = description["model"]["vocab"]
    for word in ("Ġlicense", "Ġmodification", "Ġ'tis", "中文文本没有空格", "éĤ", "self", "importĠos"):
        vocabulary.setdefault(word, max(max(vocabulary.values()), 3100) + 1)
    description["model"]["ignore_merges"] = True


def byte_level_tokenizers():
    text = tokenizer_corpus.training_text()
    gpt2 = train(byte_level(), text)
    yield "gpt2", gpt2

    flagged = train(pre_tokenizers.ByteLevel(add_prefix_space=True), text)
    flagged.add_tokens(FLAGGED)
    yield "gpt2_prefix_space_added_tokens", flagged

    smollm2 = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])
    yield "smollm2", train(smollm2, text)
    yield "smollm2_bytes_missing", train(smollm2, text[:100], whole_alphabet=False)
    yield "smollm2_unknown", train(smollm2, text[:100], whole_alphabet=False, unk_token="<unk>")
    yield "smollm2_unknown_fused", train(smollm2, text[:100], whole_alphabet=False, unk_token="<unk>", fuse_unk=True)

    llama3 = edited(train(split(LLAMA3), text), with_unreachable_words)
    llama3.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])])
    yield "llama3", llama3

    qwen2 = train(split(QWEN2), text, normalizer=normalizers.NFC())
    qwen2.add_tokens(FLAGGED)
    yield "qwen2", qwen2
    yield "gpt4o", train(split(GPT4O), text)

    for behavior in ("removed", "contiguous", "merged_with_previous", "merged_with_next"):
        for invert in (False, True):
            def replace_split(description, part=split(r"[\s\p{P}]", behavior, invert)):
                other = Tokenizer(models.BPE())
                other.pre_tokenizer = part
                description["pre_tokenizer"] = json.loads(other.to_str())["pre_tokenizer"]
            yield f"split_{behavior}{'_inverted' if invert else ''}", edited(gpt2, replace_split)

    def digits_together(description):
        description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": False},
            {"type": "Split", "pattern": {"String": ". "}, "behavior": "MergedWithPrevious", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}]}
    yield "digits_together", edited(gpt2, digits_together)


def encode_byte_level(tokenizer, content):
    """Valid stretches through the package, each byte between them by its own token."""
    ids = []
    while content:
        try:
            valid, rest = content.decode(), b""
        except UnicodeDecodeError as error:
            valid, rest = content[:error.start].decode(), content[error.start:]
        if valid:
            ids += tokenizer.encode(valid, add_special_tokens=False).ids
        if rest:
            ids += byte_ids(tokenizer)[rest[0]]
        content = rest[1:]
    return ids


def byte_ids(tokenizer, cache={}):
    if id(tokenizer) not in cache:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        unknown = tokenizer.model.unk_token
        ids = [tokenizer.token_to_id(spelling[byte]) for byte in range(256)]
        fallback = [] if unknown is None else [tokenizer.token_to_id(unknown)]
        cache[id(tokenizer)] = [fallback if i is None else [i] for i in ids]
    return cache[id(tokenizer)]


class Blobs(io.BytesIO):
    def add(self, content):
        self.write(struct.pack("<I", len(content)))
        self.write(content)

    def add_ids(self, ids):
        self.add(numpy.array(ids, dtype="<i4").tobytes())


def write_byte_level(folder, tokenizer, texts):
    folder.mkdir(parents=True)
    description = json.loads(tokenizer.to_str())
    if folder.name in ("gpt2", "qwen2"):  # the older spelling of merges
        description["model"]["merges"] = [" ".join(pair) for pair in description["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=folder.name == "gpt2"))
    stride = 7 if folder.name.startswith("split_") else 1
    blobs = Blobs()
    blobs.add_ids([stride])
    for text in texts[::stride]:
        for as_text in (True, False):
            tokenizer.encode_special_tokens = as_text
            ids = encode_byte_level(tokenizer, text)
            blobs.add_ids(ids)
        blobs.add(tokenizer.decode(ids, skip_special_tokens=False).encode())
    (folder / "reference.bin").write_bytes(blobs.getvalue())


def write_sentencepiece(folder, texts, **options):
    folder.mkdir(parents=True)
    model = io.BytesIO()
    lines = [line for text in tokenizer_corpus.training_text()[::2] for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, vocab_size=2000,
                                             minloglevel=2, num_threads=1, **options)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    blobs = Blobs()
    blobs.add_ids([1])
    for text in texts:
        ids = processor.encode(text)
        blobs.add_ids(ids)
        blobs.add_ids(ids)
        blobs.add(processor.decode(ids).encode())
    (folder / "reference.bin").write_bytes(blobs.getvalue())


def main():
    output = pathlib.Path(sys.argv[1])
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    texts = tokenizer_corpus.records()
    blobs = Blobs()
    for text in texts:
        blobs.add(text)
    (output / "texts.bin").write_bytes(blobs.getvalue())
    for name, tokenizer in byte_level_tokenizers():
        write_byte_level(output / name, tokenizer, texts)
    for folder in map(pathlib.Path, sys.argv[2:]):
        write_byte_level(output / folder.name, Tokenizer.from_file(str(folder / "tokenizer.json")), texts)
    write_sentencepiece(output / "sentencepiece_unigram", texts, model_type="unigram")
    write_sentencepiece(output / "sentencepiece_bpe", texts, model_type="bpe", byte_fallback=True, split_digits=True,
                        normalization_rule_name="identity", remove_extra_whitespaces=False,
                        allow_whitespace_only_pieces=True)


if __name__ == "__main__":
    main()
