"""Ranks and launchers that die in mid-job, and what a resumed job makes of what they left."""

import json
import os
import shutil
import signal
import time

import h5py
import numpy as np

import tiny_model
from harness import GONE_WITHIN_SECONDS, Case, records_of, shared_model

DOCUMENTS = 40
PROMPTS = ["What?", "Why?", "When?"]


class Killed(Case):

    def setUp(self):
        super().setUp()
        names = []
        for index in range(DOCUMENTS):
            names.append(str(self.write(f"document_{index}.txt", tiny_model.document(20 + index, seed=index))))
        self.job = self.config(input={"documents": names, "prompts": PROMPTS}, generate={"max_new_tokens": 300})

    def lines(self):
        path = self.out / "results.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def interrupted(self, interrupt, code=None):
        """Starts the job, calls interrupt(run, ranks' process ids) in its middle, and looks at what remains."""
        run = self.start(self.job)
        run.wait_for(lambda: self.lines() > 0, "records")
        pids = run.alive()
        self.assertEqual(len(pids), 2)
        interrupt(run, pids)
        at = time.monotonic()
        run.wait()
        self.assertLess(time.monotonic() - at, GONE_WITHIN_SECONDS)
        end = time.monotonic() + GONE_WITHIN_SECONDS
        while run.alive() and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(run.alive(), [], "ranks are left")
        self.assertNotEqual(run.code, 0)
        records = records_of(self.out)
        self.assertGreater(len(records), 0)
        self.assertLess(len(records), DOCUMENTS * 5, "the job was over before it was interrupted")
        self.assert_arrays_whole(records)
        return records

    def assert_arrays_whole(self, records):
        for record in records.values():
            if "arrays" in record:
                with h5py.File(self.out / record["arrays"]) as file:
                    self.assertEqual(len(file["scores"][:]), record["document_tokens"])

    def test_rank_one_killed(self):
        self.interrupted(lambda run, pids: os.kill(pids[1], signal.SIGKILL))

    def test_launcher_terminated(self):
        self.interrupted(lambda run, pids: run.process.send_signal(signal.SIGTERM))

    def test_interrupted_by_keyboard(self):
        self.interrupted(lambda run, pids: run.process.send_signal(signal.SIGINT))

    def test_terminal_closed(self):
        self.interrupted(lambda run, pids: run.process.send_signal(signal.SIGHUP))

    def test_a_rank_that_other_signals_end(self):
        """No request of ours: whoever sends one of these to a rank wants it gone."""
        def hang_up(run, pids):
            os.kill(pids[1], signal.SIGHUP)
            run.wait()
            self.assertEqual(run.code, 128 + signal.SIGHUP, run.err)
        self.interrupted(hang_up)

    def test_asked_to_stop(self):
        """The document that is being read is finished; then all ranks stop, and a resumed job does the rest."""
        run = self.start(self.job)
        run.wait_for(lambda: self.lines() > 0, "records")
        os.kill(run.alive()[1], signal.SIGTERM)
        run.wait()
        self.assertEqual(run.code, 75, run.err)
        self.assertEqual(run.alive(), [])
        self.assertEqual(run.err.count("stopped on request after"), 1, run.err)
        records = records_of(self.out)
        self.assertLess(len(records), DOCUMENTS * 5)
        self.assertEqual(len(records) % 5, 0, "whole documents")
        resumed = self.succeed({**self.job, "output": {**self.job["output"], "if_exists": "resume"}})
        self.assertEqual(len(resumed), DOCUMENTS * 5)
        for key, record in records.items():
            self.assertEqual(resumed[key], record)

    def test_launcher_killed(self):
        """Nobody is left to end the ranks: they notice themselves."""
        self.interrupted(lambda run, pids: run.process.kill())

    def test_resume_after_a_kill(self):
        """Rank 0, the one that writes, is killed; the resumed job on another number of ranks ends as if nothing was."""
        before = self.interrupted(lambda run, pids: os.kill(pids[0], signal.SIGKILL))
        log = (self.out / "log.jsonl").read_text()
        resumed = self.succeed({**self.job, "output": {**self.job["output"], "if_exists": "resume"}}, ranks=3)
        for key, record in before.items():
            self.assertEqual(resumed[key], record, "what was finished is kept")
        self.assertTrue((self.out / "log.jsonl").read_text().startswith(log[: log.rindex("\n") + 1]))
        kept = self.out
        self.out = self.dir / "uninterrupted"
        whole = self.succeed({**self.job, "output": {"directory": str(self.out)}})
        self.assertEqual(len(whole), DOCUMENTS * 5)
        self.assertEqual(set(resumed), set(whole))
        for key, record in whole.items():
            self.assertEqual(record.get("answer_ids"), resumed[key].get("answer_ids"))
            if "arrays" in record:
                with h5py.File(self.out / record["arrays"]) as a, h5py.File(kept / resumed[key]["arrays"]) as b:
                    np.testing.assert_allclose(a["scores"][:], b["scores"][:], rtol=0, atol=1e-4)
                    np.testing.assert_allclose(a["embeddings"][:], b["embeddings"][:], rtol=1e-4, atol=1e-5)
        self.assertEqual([p.name for p in kept.rglob("*") if ".tmp." in p.name], [], "remains of the kill are swept")

    def test_resume_of_a_finished_job(self):
        job = self.config(output={"if_exists": "resume"})
        first = self.succeed(job)
        text = (self.out / "results.jsonl").read_bytes()
        self.assertEqual(self.succeed(job), first)
        self.assertEqual((self.out / "results.jsonl").read_bytes(), text)
        # One more prompt is one more record.
        more = self.succeed(self.config(input={"prompts": ["What?", "Why?"]}, output={"if_exists": "resume"}))
        self.assertEqual(len(more), len(first) + 1)
        for line in text.decode().splitlines():
            self.assertIn(json.loads(line), more.values())


class Vanishing(Case):
    """Files that go away or change while the job runs."""

    def while_answering(self, change, **sections):
        """Two documents; change() happens while the first is being answered."""
        self.second = self.write("second.txt", tiny_model.document(30, seed=4))
        config = self.config(tasks=["generate", "score"], generate={"max_new_tokens": 6000},
                             input={"documents": [str(self.document), str(self.second)]}, **sections)
        run = self.start(config)
        run.wait_for(lambda: "answering" in run.so_far(), "answer")
        change()
        return run.wait()

    def test_document_removed(self):
        run = self.while_answering(lambda: self.second.unlink())
        self.assert_refused(run, self.second)
        self.assertEqual({document for document, _, _ in records_of(self.out)}, {str(self.document)})

    def test_document_emptied(self):
        run = self.while_answering(lambda: self.second.write_text(""))
        self.assert_refused(run, self.second, "empty")
        self.assertEqual(len(records_of(self.out)), 2)

    def test_document_changed(self):
        """Its records would say that they are of the text that was there at first."""
        run = self.while_answering(lambda: self.second.write_text(tiny_model.document(30, seed=5)))
        self.assert_refused(run, self.second, "changed while the job ran", "resume")
        before = records_of(self.out)
        self.assertEqual({document for document, _, _ in before}, {str(self.document)})
        config = json.loads(self.yaml.read_text())
        after = self.succeed({**config, "output": {**config["output"], "if_exists": "resume"}})
        self.assertEqual(len(after), 4)
        for key, record in before.items():
            self.assertEqual(after[key], record)

    def test_tokens_changed(self):
        tokens = self.dir / "tokens.h5"
        tiny_model.write_tokens(tokens, shared_model(), [[5, 6, 7] * 20, [8] * 60000])
        run = self.start(self.config(tasks=["generate"], input={"documents": None, "tokens": str(tokens)},
                                     generate={"max_new_tokens": 6000}))
        run.wait_for(lambda: "answering" in run.so_far(), "answer")
        with h5py.File(tokens, "r+") as file:
            file["tokens"][60:] = 9
        run.wait()
        self.assert_refused(run, "document 1", "changed while the job ran")

    def test_output_removed(self):
        run = self.while_answering(lambda: shutil.rmtree(self.out))
        self.assert_refused(run, self.out)

    def test_model_removed(self):
        """Everything of the model that is needed has been read before work begins."""
        model = self.own_model()
        run = self.while_answering(lambda: shutil.rmtree(model), model={"path": str(model)})
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(len(records_of(self.out)), 4)
