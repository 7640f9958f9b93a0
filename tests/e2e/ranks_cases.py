"""The same input gives the same results, however many ranks read it and however it is given."""

import h5py
import numpy as np

import tiny_model
from harness import Case, Run, shared_model

RANKS = (1, 2, 3, 4, 7)


class Results:
    """Answers, scores and embeddings of a job, by (document, query)."""

    def __init__(self, records, folder):
        self.records = records
        self.answers = {(d, q): r["answer_ids"] for (d, q, task), r in records.items() if task == "generate"}
        self.scores, self.embeddings, self.tokens = {}, {}, {}
        for (document, _, task), record in records.items():
            if task == "generate":
                continue
            with h5py.File(folder / record["arrays"]) as file:
                self.tokens[document] = file["tokens"][:]
                if task == "score":
                    self.scores[document] = file["scores"][:]
                else:
                    self.embeddings[document] = file["embeddings"][:]


class RankCase(Case):

    def results(self, config, ranks, name=None, **kwargs):
        folder = self.dir / (name or f"ranks{ranks}")
        config = {**config, "output": {"directory": str(folder)}}
        return Results(self.succeed(config, ranks=ranks, **kwargs), folder)

    def assert_same(self, one, other, documents=None):
        documents = documents or {d: d for d in one.scores}
        self.assertTrue(documents or one.answers)
        self.assertEqual(list(one.answers.values()), list(other.answers.values()))
        for a, b in documents.items():
            np.testing.assert_array_equal(one.tokens[a], other.tokens[b])
            np.testing.assert_allclose(one.scores[a], other.scores[b], rtol=0, atol=1e-4)
            error = np.linalg.norm(one.embeddings[a] - other.embeddings[b]) / np.linalg.norm(one.embeddings[a])
            self.assertLess(error, 1e-5)


class SameOnAnyRanks(RankCase):
    """1, 2, 3, 4 and 7 ranks, with shards so short that some own nothing."""

    def check(self, words, ranks=RANKS[1:], **sections):
        self.document.write_text(tiny_model.document(words))
        sections = {"input": {"prompts": ["What?", "Why, and where to?", "When?"]}, **sections}
        config = self.config(generate={"max_new_tokens": 24}, **sections)
        alone = self.results(config, 1)
        self.assertEqual(len(alone.answers), 3)
        self.assertEqual({len(ids) for ids in alone.answers.values()}, {24})
        self.assertGreater(len({tuple(ids) for ids in alone.answers.values()}), 1, "prompts matter")
        for count in ranks:
            with self.subTest(ranks=count):
                together = self.results(config, count)
                self.assert_same(alone, together)
                figures = next(iter(together.records.values()))["figures"]
                self.assertGreater(figures["halo_bytes"], 0)
        return alone

    def test_window_shorter_than_a_shard(self):
        """Some 700 tokens in shards of 128: seven ranks, one or two of which own nothing."""
        alone = self.check(290)
        (tokens,) = alone.tokens.values()
        self.assertTrue(600 < len(tokens) < 768, len(tokens))

    def test_halos_of_several_hops(self):
        """A window of 300 over shards of 128: keys come from three ranks to the left."""
        self.check(290, attention={"window": 300, "landmark_stride": 8})

    def test_bands_of_three_scales(self):
        bands = [[1, 0, 150], [8, 150, 400], [64, 400, "inf"]]
        self.check(290, ranks=(4,), attention={"window": None, "landmark_stride": None, "bands": bands})

    def test_odd_stride(self):
        """Shards begin at multiples of lcm(128, 7) = 896: every rank but the first two owns nothing."""
        self.check(400, ranks=(3,), attention={"window": 33, "landmark_stride": 7})

    def test_far_from_the_beginning(self):
        """150,000 tokens on: a token sees what it would near the beginning, for positions count by their distance.

        Of a window of 40 without landmarks, through two layers, nothing before the last 79 tokens matters. What 16 bits
        of a position, or an angle in fp32, would make of it is larger by far than what is allowed here.
        """
        generator = np.random.default_rng(11)
        ids = generator.integers(3, tiny_model.VOCABULARY, 150_001)
        scores = []
        for name, part in (("far", ids), ("near", ids[-1000:])):
            tiny_model.write_tokens(self.dir / f"{name}.h5", shared_model(), [part])
            config = self.config(input={"documents": None, "prompts": None, "tokens": str(self.dir / f"{name}.h5")},
                                 tasks=["score"], attention={"window": 40, "landmark_stride": 0})
            scores.append(next(iter(self.results(config, 2, name).scores.values()))[-900:])
        np.testing.assert_allclose(*scores, rtol=0, atol=1e-4)

    def test_sampling_repeats_with_its_seed(self):
        prompts = ["What?", "Why?", "When?"]

        def config(seed):
            return self.config(tasks=["generate"], input={"prompts": prompts},
                               generate={"max_new_tokens": 24, "temperature": 1.3, "top_p": 0.9, "seed": seed})
        first = self.results(config(5), 1, "a").answers
        self.assertEqual(first, self.results(config(5), 2, "b").answers)
        self.assertEqual(first, self.results(config(5), 3, "c").answers)
        self.assertNotEqual(first, self.results(config(6), 2, "d").answers)
        greedy = self.config(tasks=["generate"], input={"prompts": prompts}, generate={"max_new_tokens": 24})
        self.assertNotEqual(first, self.results(greedy, 2, "e").answers)

    def test_sampling_does_not_depend_on_order(self):
        """Documents and prompts the other way round, one alone, or a rest that a resumed job does: the same answers."""
        documents = [str(self.document), str(self.write("twin.txt", self.document.read_text()))]
        prompts = ["What?", "Why?", "When?"]

        def answers(name, documents, prompts, ranks, **output):
            config = self.config(tasks=["generate"], input={"documents": documents, "prompts": prompts},
                                 generate={"max_new_tokens": 24, "temperature": 1.3, "top_p": 0.9, "seed": 5},
                                 output={"directory": str(self.dir / name), **output})
            return {key: record["answer_ids"] for key, record in self.succeed(config, ranks=ranks).items()}
        first = answers("a", documents, prompts, 1)
        self.assertEqual(len({tuple(ids) for ids in first.values()}), 6, "each draws its own")
        self.assertEqual(first, answers("b", documents[::-1], prompts[::-1], 2))
        for key, ids in answers("c", documents[1:], prompts[2:], 1).items():
            self.assertEqual(ids, first[key])
        self.assertEqual(first, answers("c", documents, prompts, 3, if_exists="resume"))


class SameByAnyWay(RankCase):
    """Text and token files, prompts in the config and in a file, one document and several."""

    def test_token_file(self):
        second = self.write("second.txt", tiny_model.document(90, seed=3))
        tokens = self.dir / "tokens.h5"
        made = Run(["tokenize", "--model", shared_model(), "--output", tokens, self.document, second], ranks=0).wait()
        self.assertEqual(made.code, 0, made.err)
        from_text = self.results(self.config(input={"documents": [str(self.document), str(second)]}), 2, "text")
        from_tokens = self.results(self.config(input={"documents": None, "tokens": str(tokens)}), 2, "tokens")
        self.assert_same(from_text, from_tokens)
        self.assertEqual(len(from_text.scores), 2)
        # And back to the text.
        back = Run(["tokenize", "--model", shared_model(), "--decode", tokens, "--output", self.dir / "texts"],
                   ranks=0).wait()
        self.assertEqual(back.code, 0, back.err)
        for document in (self.document, second):
            self.assertEqual((self.dir / "texts" / document.name).read_bytes(), document.read_bytes())

    def test_prompts_file(self):
        prompts = ["What is it?", "Wo ist die Übersicht? 🙂"]
        file = self.write("prompts.txt", "\ufeff" + prompts[0] + "\r\n\n" + prompts[1])
        listed = self.results(self.config(input={"prompts": prompts}), 2, "listed")
        read = self.results(self.config(input={"prompts": None, "prompts_file": str(file)}), 2, "read")
        self.assertEqual(listed.answers, read.answers)
        self.assertEqual([query for _, query in read.answers], prompts)

    def test_documents_do_not_depend_on_each_other(self):
        """More documents than ranks, and prompts that do not divide by them: each as if it were alone."""
        documents = [self.write(f"{i}.txt", tiny_model.document(20 + 70 * i, seed=i)) for i in range(3)]
        prompts = ["What?", "Why?", "When?", "Who?", "Where?"]
        names = [str(d) for d in documents]
        together = self.results(self.config(input={"documents": names, "prompts": prompts}), 3, "together")
        self.assertEqual(len(together.answers), 15)
        for name in names:
            alone = self.results(self.config(input={"documents": [name], "prompts": prompts}), 2, "alone" + name[-5])
            np.testing.assert_allclose(alone.scores[name], together.scores[name], rtol=0, atol=1e-4)
            for query in prompts:
                self.assertEqual(alone.answers[name, query], together.answers[name, query])

    def test_window_of_the_whole_text_is_dense(self):
        """Landmarks behind a window that holds everything change nothing."""
        dense = self.results(self.config(attention={"window": 4096, "landmark_stride": 0}), 2, "dense")
        behind = self.results(self.config(attention={"window": 4096, "landmark_stride": 128}), 2, "behind")
        self.assert_same(dense, behind)
        figures = next(iter(dense.records.values()))["figures"]
        self.assertEqual(figures["attended_fraction"], 1)

    def test_token_tile_changes_nothing(self):
        one = self.results(self.config(run={"token_tile": 1}), 2, "one")
        odd = self.results(self.config(run={"token_tile": 37}), 2, "odd")
        self.assert_same(one, odd)
        self.assert_same(one, self.results(self.config(), 2, "standard"))
