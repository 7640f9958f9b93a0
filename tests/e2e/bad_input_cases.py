"""Bad models, documents, token files and prompts: refused by name, at once, without a touch on old results."""

import json

import h5py
import numpy as np

import tiny_model
from harness import Case


class BadWeights(Case):
    """model.safetensors as downloads and converters break it."""

    def setUp(self):
        super().setUp()
        self.model = self.own_model()
        self.weights = self.model / "model.safetensors"
        self.contents = tiny_model.tensors()

    def refuse_weights(self, *words):
        self.refuse(self.config(model={"path": str(self.model)}), *words)

    def test_missing(self):
        self.weights.unlink()
        self.refuse_weights(self.model, "neither model.safetensors nor model.safetensors.index.json")

    def test_empty(self):
        self.weights.write_bytes(b"")
        self.refuse_weights(self.weights, "empty")

    def test_truncated(self):
        whole = self.weights.read_bytes()
        self.weights.write_bytes(whole[: len(whole) - 1000])
        self.refuse_weights(self.weights, "reach beyond")

    def test_truncated_in_header(self):
        self.weights.write_bytes(self.weights.read_bytes()[:300])
        self.refuse_weights(self.weights, "header claims", "300")

    def test_header_length_beyond_file(self):
        tiny_model.write_safetensors(self.weights, self.contents, stated_bytes=90_000_000)
        self.refuse_weights(self.weights, "90000000")

    def test_header_length_absurd(self):
        tiny_model.write_safetensors(self.weights, self.contents, stated_bytes=2**64 - 1)
        self.refuse_weights(self.weights, str(2**64 - 1))

    def test_header_no_json(self):
        whole = bytearray(self.weights.read_bytes())
        whole[8] = ord("[")
        self.weights.write_bytes(bytes(whole))
        self.refuse_weights(self.weights, "JSON")

    def test_offsets_overlap(self):
        header = tiny_model.header_of(self.contents)
        size = 2 * tiny_model.HIDDEN
        begin = header["model.norm.weight"]["data_offsets"][0]
        header["model.norm.weight"]["data_offsets"] = [begin - size, begin]
        tiny_model.write_safetensors(self.weights, self.contents, header)
        self.refuse_weights(self.weights, "overlap")

    def test_offsets_out_of_range(self):
        header = tiny_model.header_of(self.contents)
        begin, end = header["model.norm.weight"]["data_offsets"]
        header["model.norm.weight"]["data_offsets"] = [begin + 10**12, end + 10**12]
        tiny_model.write_safetensors(self.weights, self.contents, header)
        self.refuse_weights(self.weights, "model.norm.weight", "reach beyond")

    def test_offsets_backwards(self):
        header = tiny_model.header_of(self.contents)
        header["model.norm.weight"]["data_offsets"].reverse()
        tiny_model.write_safetensors(self.weights, self.contents, header)
        self.refuse_weights(self.weights, "model.norm.weight", "backwards")

    def test_shape_overflows(self):
        header = tiny_model.header_of(self.contents)
        header["model.norm.weight"]["shape"] = [2**40, 2**40]
        tiny_model.write_safetensors(self.weights, self.contents, header)
        self.refuse_weights(self.weights, "model.norm.weight", "overflows")

    def test_wrong_dtype(self):
        name = "model.layers.1.self_attn.k_proj.weight"
        _, shape, data = self.contents[name]
        self.contents[name] = ("I16", shape, data)
        tiny_model.write_safetensors(self.weights, self.contents)
        self.refuse_weights(self.weights, name, "I16")

    def test_unknown_dtype(self):
        header = tiny_model.header_of(self.contents)
        header["model.norm.weight"]["dtype"] = "Q4_K"
        tiny_model.write_safetensors(self.weights, self.contents, header)
        self.refuse_weights(self.weights, "model.norm.weight", "Q4_K")

    def test_wrong_shape(self):
        name = "model.layers.0.mlp.down_proj.weight"
        dtype, shape, data = self.contents[name]
        self.contents[name] = (dtype, shape[::-1], data)
        tiny_model.write_safetensors(self.weights, self.contents)
        self.refuse_weights(self.weights, name, "[96, 48]", "[48, 96]", "config.json")

    def test_missing_tensor(self):
        name = "model.layers.1.mlp.up_proj.weight"
        del self.contents[name]
        tiny_model.write_safetensors(self.weights, self.contents)
        self.refuse_weights(self.weights, name, "nearest")

    def with_value(self, value):
        """One value of one matrix replaced."""
        name = "model.layers.1.mlp.down_proj.weight"
        contents = tiny_model.tensors("F32")
        dtype, shape, data = contents[name]
        values = np.frombuffer(data, np.float32).copy()
        values[5] = value
        contents[name] = (dtype, shape, values.tobytes())
        tiny_model.write_safetensors(self.weights, contents)
        return name

    def test_not_a_number(self):
        self.refuse_weights(self.weights, self.with_value(np.nan), "no number")

    def test_infinite(self):
        self.refuse_weights(self.weights, self.with_value(-np.inf), "infinite")

    def test_values_that_overflow(self):
        """Finite, but the hidden states are not: results would look like results and mean nothing."""
        self.with_value(1e38)
        self.refuse_weights("hidden state", "token 0 of the sequence")

    def test_missing_shard(self):
        self.weights.unlink()
        index = self.model / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {name: "model-00001-of-00002.safetensors" for name in self.contents}}))
        self.refuse_weights(index, "model-00001-of-00002.safetensors", "missing")


class BadModel(Case):
    """config.json, tokenizer.json and the chat template."""

    def refuse_config(self, changes, *words):
        model = self.own_model()
        path = model / "config.json"
        path.write_text(json.dumps({**tiny_model.CONFIG, **changes}))
        self.refuse(self.config(model={"path": str(model)}), path, *words)

    def refuse_tokenizer(self, change, *words):
        model = self.own_model()
        path = model / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        change(tokenizer)
        path.write_text(json.dumps(tokenizer))
        self.refuse(self.config(model={"path": str(model)}), path, *words)

    def test_absurd_hidden(self):
        self.refuse_config({"hidden_size": 2**40}, "hidden_size", 2**40)

    def test_absurd_layers(self):
        self.refuse_config({"num_hidden_layers": 10**9}, "num_hidden_layers")

    def test_absurd_integer(self):
        self.refuse_config({"vocab_size": 2**63}, "vocab_size")

    def test_negative(self):
        self.refuse_config({"intermediate_size": -96}, "intermediate_size")

    def test_zero_heads(self):
        self.refuse_config({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads")

    def test_heads_no_multiple(self):
        self.refuse_config({"num_key_value_heads": 3}, "multiple")

    def test_text_for_number(self):
        self.refuse_config({"hidden_size": "48"}, "hidden_size")

    def test_other_architecture(self):
        self.refuse_config({"model_type": "mamba"}, "model_type", "mamba")

    def test_other_rope_scaling(self):
        self.refuse_config({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn")

    def test_larger_than_the_weights(self):
        """Sensible on its own, but not what model.safetensors holds."""
        model = self.own_model()
        (model / "config.json").write_text(json.dumps({**tiny_model.CONFIG, "num_hidden_layers": 4000}))
        self.refuse(self.config(model={"path": str(model)}), model / "model.safetensors", "model.layers.2.")

    def test_no_config(self):
        model = self.own_model()
        (model / "config.json").unlink()
        self.refuse(self.config(model={"path": str(model)}), model / "config.json")

    def test_no_model(self):
        self.refuse(self.config(model={"path": str(self.dir / "nowhere")}), self.dir / "nowhere",
                    "the model's folder cannot be opened: No such file or directory")

    def test_model_that_is_a_file(self):
        self.refuse(self.config(model={"path": str(self.document)}), "cannot be opened: Not a directory")

    def test_config_no_json(self):
        model = self.own_model()
        (model / "config.json").write_text('{"hidden_size": 48,')
        self.refuse(self.config(model={"path": str(model)}), model / "config.json", "JSON")

    def test_tokenizer_without_merges(self):
        self.refuse_tokenizer(lambda t: t["model"].pop("merges"), "merges")

    def test_tokenizer_without_vocabulary(self):
        self.refuse_tokenizer(lambda t: t["model"].pop("vocab"), "vocab")

    def test_tokenizer_of_other_kind(self):
        self.refuse_tokenizer(lambda t: t["model"].update(type="Unigram"), "Unigram")

    def test_no_tokenizer(self):
        model = self.own_model()
        (model / "tokenizer.json").unlink()
        self.refuse(self.config(model={"path": str(model)}), model, "tokenizer.json")

    def test_tokenizer_of_larger_vocabulary(self):
        """A tokenizer whose ids the model has no embedding for."""
        model = self.own_model()
        config = {"vocab_size": 300}
        (model / "config.json").write_text(json.dumps({**tiny_model.CONFIG, **config}))
        tiny_model.write_safetensors(model / "model.safetensors", tiny_model.tensors(config=config))
        self.refuse(self.config(model={"path": str(model)}), self.document, "vocabulary of 300")

    def test_broken_chat_template(self):
        model = self.own_model()
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for x in %}"}))
        self.refuse(self.config(model={"path": str(model)}), model, "template")


class BadDocuments(Case):
    """What is read and what is asked."""

    def token_file(self, tokens, vocabulary=tiny_model.VOCABULARY, offsets=None):
        path = self.dir / "tokens.h5"
        with h5py.File(path, "w") as file:
            file.attrs["format"] = "longhalo tokens 1"
            file.attrs["vocabulary_size"] = np.int64(vocabulary)
            file["tokens"] = np.asarray(tokens, np.uint32)
            file["document_offsets"] = np.asarray([0, len(tokens)] if offsets is None else offsets, np.int64)
        return path

    def refuse_tokens(self, path, *words):
        config = self.config(input={"documents": None, "tokens": str(path)})
        self.refuse(config, *words)

    def test_empty(self):
        empty = self.write("empty.txt", "")
        self.refuse(self.config(input={"documents": [str(self.document), str(empty)]}), empty, "empty")

    def test_missing(self):
        self.refuse(self.config(input={"documents": [str(self.dir / "no.txt")]}), self.dir / "no.txt")

    def test_folder(self):
        self.refuse(self.config(input={"documents": [str(self.dir)]}), self.dir)

    def test_several_at_once(self):
        """One start tells of all that is to be corrected."""
        empty, absent = self.write("empty.txt", ""), self.dir / "no.txt"
        documents = [str(path) for path in (empty, self.document, absent, self.dir)]
        self.refuse(self.config(input={"documents": documents}), "3 documents", f"{empty}: the document is empty",
                    f"{absent}: ", "No such file", f"{self.dir}: ", "Is a directory", "input.documents")

    def test_nul_bytes(self):
        binary = self.write("binary.txt", b"first line\nsecond\0line\n")
        self.refuse(self.config(input={"documents": [str(binary)]}), f"{binary}:2", "NUL", "offset 17")

    def test_utf16(self):
        wide = self.write("wide.txt", "A text of Windows\n".encode("utf-16"))
        self.refuse(self.config(input={"documents": [str(wide)]}), wide, "iconv")

    def test_ids_beyond_vocabulary_of_the_file(self):
        path = self.token_file([1, 2, 5000, 3])
        self.refuse_tokens(path, path, "token id 5000", "position 2")

    def test_ids_beyond_vocabulary_of_the_model(self):
        path = self.token_file([1, 2, 3, 450], vocabulary=500)
        self.refuse_tokens(path, path, "token id 450", "400")

    def test_token_file_with_empty_document(self):
        path = self.token_file([1, 2, 3], offsets=[0, 3, 3])
        self.refuse_tokens(path, path, "empty")

    def test_token_file_without_documents(self):
        path = self.token_file([], offsets=[0])
        self.refuse_tokens(path, path)

    def test_token_file_with_wrong_offsets(self):
        path = self.token_file([1, 2, 3], offsets=[0, 9])
        self.refuse_tokens(path, path, "document_offsets", "9")

    def test_token_file_is_no_hdf5(self):
        self.refuse_tokens(self.document, self.document)

    def test_token_file_truncated(self):
        path = self.token_file(list(range(300)) * 20)
        path.write_bytes(path.read_bytes()[:3000])
        self.refuse_tokens(path, path)

    def test_token_file_without_tokens(self):
        path = self.token_file([1, 2])
        with h5py.File(path, "a") as file:
            del file["tokens"]
        self.refuse_tokens(path, path, "tokens")

    def test_empty_prompts_file(self):
        prompts = self.write("prompts.txt", "\n  \n")
        self.refuse(self.config(input={"prompts": None, "prompts_file": str(prompts)}), prompts, "prompt")

    def test_missing_prompts_file(self):
        prompts = self.dir / "no_prompts.txt"
        self.refuse(self.config(input={"prompts": None, "prompts_file": str(prompts)}), prompts)
