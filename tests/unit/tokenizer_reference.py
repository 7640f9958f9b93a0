"""Trains small tokenizers of every supported kind and writes what the `tokenizers` and `sentencepiece` packages make
of the corpus, for tokenizer_agreement_test.cpp.

    tokenizer_reference.py OUTPUT_FOLDER [MODEL_FOLDER...]

OUTPUT_FOLDER/texts.bin holds the corpus; OUTPUT_FOLDER/<name>/ a model directory with reference.bin beside it. A blob
file is a sequence of (uint32 length, bytes). reference.bin has the stride first (every how many-th text is there), then
three blobs a text: ids with special tokens as text, ids with them parsed (int32), and the package's decoding of the
latter. scores.bin beside a SentencePiece unigram model has the score of every piece (float32). Exit code 77: a package
is missing.
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


def train(pre_tokenizer, text, whole_alphabet=True, **model_options):
    tokenizer = Tokenizer(models.BPE(**model_options))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
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


def with_pre_tokenizer(tokenizer, pre_tokenizer):
    """The same vocabulary and merges behind another pre-tokenizer."""
    other = edited(tokenizer, lambda description: None)
    other.pre_tokenizer = pre_tokenizer
    return other


def byte_level_tokenizers():
    """(name, tokenizer, every how many-th text it is given)"""
    text = tokenizer_corpus.training_text()
    gpt2 = train(byte_level(), text)
    yield "gpt2", gpt2, 1

    smollm2 = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])
    yield "smollm2", with_pre_tokenizer(gpt2, smollm2), 1

    llama3 = train(split(LLAMA3), text)
    qwen2 = with_pre_tokenizer(llama3, split(QWEN2))
    qwen2.normalizer = normalizers.NFC()
    qwen2.add_tokens(FLAGGED)
    yield "qwen2", qwen2, 1
    yield "gpt4o", with_pre_tokenizer(llama3, split(GPT4O)), 2
    llama3 = edited(llama3, with_unreachable_words)
    llama3.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])])
    yield "llama3", llama3, 1

    flagged = with_pre_tokenizer(gpt2, pre_tokenizers.ByteLevel(add_prefix_space=True))
    flagged.add_tokens(FLAGGED)
    yield "prefix_space_added_tokens", flagged, 2
    for behavior in ("removed", "contiguous", "merged_with_previous", "merged_with_next"):
        for invert in (False, True):
            name = f"split_{behavior}{'_inverted' if invert else ''}"
            yield name, with_pre_tokenizer(gpt2, split(r"[\s\p{P}]", behavior, invert)), 11
    yield "digits_together", with_pre_tokenizer(gpt2, pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Split(". ", "merged_with_previous"),
        pre_tokenizers.ByteLevel(add_prefix_space=True)])), 3

    few = text[:100]
    yield "bytes_missing", train(smollm2, few, whole_alphabet=False), 5
    yield "unknown", train(smollm2, few, whole_alphabet=False, unk_token="<unk>"), 5
    yield "unknown_fused", train(smollm2, few, whole_alphabet=False, unk_token="<unk>", fuse_unk=True), 5


def encode_byte_level(tokenizer, byte_ids, content):
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
            ids += byte_ids[rest[0]]
        content = rest[1:]
    return ids


def ids_of_bytes(tokenizer):
    """The tokens of each byte alone: its own, else the unknown token, else none."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    unknown = tokenizer.model.unk_token
    fallback = [] if unknown is None else [tokenizer.token_to_id(unknown)]
    ids = [tokenizer.token_to_id(spelling[byte]) for byte in range(256)]
    return [fallback if i is None else [i] for i in ids]


class Blobs(io.BytesIO):
    def add(self, content):
        self.write(struct.pack("<I", len(content)))
        self.write(content)

    def add_ids(self, ids):
        self.add(numpy.array(ids, dtype="<i4").tobytes())


def write_byte_level(folder, tokenizer, texts, stride):
    folder.mkdir(parents=True)
    description = json.loads(tokenizer.to_str())
    if folder.name in ("gpt2", "qwen2"):  # the older spelling of merges
        description["model"]["merges"] = [" ".join(pair) for pair in description["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=folder.name == "gpt2"))
    byte_ids = ids_of_bytes(tokenizer)
    blobs = Blobs()
    blobs.add_ids([stride])
    for text in texts[::stride]:
        tokenizer.encode_special_tokens = True
        ids = encode_byte_level(tokenizer, byte_ids, text)
        blobs.add_ids(ids)
        if b"<" in text:  # every special token starts with it
            tokenizer.encode_special_tokens = False
            ids = encode_byte_level(tokenizer, byte_ids, text)
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
    if options["model_type"] == "unigram":
        scores = [processor.get_score(piece) for piece in range(processor.get_piece_size())]
        (folder / "scores.bin").write_bytes(numpy.array(scores, dtype="<f4").tobytes())
    blobs = Blobs()
    blobs.add_ids([3])
    for text in texts[::3]:
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
    for name, tokenizer, stride in byte_level_tokenizers():
        write_byte_level(output / name, tokenizer, texts, stride)
    for folder in map(pathlib.Path, sys.argv[2:]):
        write_byte_level(output / folder.name, Tokenizer.from_file(str(folder / "tokenizer.json")), texts, 1)
    write_sentencepiece(output / "sentencepiece_unigram", texts, model_type="unigram")
    write_sentencepiece(output / "sentencepiece_bpe", texts, model_type="bpe", byte_fallback=True, split_digits=True,
                        normalization_rule_name="identity", remove_extra_whitespaces=False,
                        allow_whitespace_only_pieces=True)


if __name__ == "__main__":
    main()
