#!/usr/bin/env python3
"""Make one HTML page with plots of a training or inference job from its output folder.

    scripts/report.py results/train            # writes results/train/report.html
    scripts/report.py RUN --output page.html --picture overview.png

The page holds its pictures and needs no network. It may be made while the job runs: it shows what is there.
Needs the packages of scripts/requirements.txt: .venv/bin/python scripts/report.py RUN, where python3 has them not.
"""
import argparse
import base64
import html
import io
import json
import math
import os
import stat
import sys
from pathlib import Path


def fail(what, remedy):
    sys.stderr.write(f"report: {what}\n  remedy: {remedy}\n")
    sys.exit(2)


try:
    import report_plots
except ImportError as missing:
    fail(f"Python package {missing.name} is missing", "run it with .venv/bin/python, which scripts/setup.sh makes")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 1120px; margin: 2em auto; padding: 0 1.2em }
h1 { font-size: 1.6em; margin-bottom: 0 } h2 { font-size: 1.15em; margin: 2em 0 .4em }
.where { color: #66758a; margin: .2em 0 1.4em; overflow-wrap: anywhere }
.cards { display: flex; flex-wrap: wrap; gap: .7em }
.card { border: 1px solid #dde3ea; border-radius: 6px; padding: .5em .9em; min-width: 8.5em }
.card b { display: block; font-size: 1.25em } .card span { color: #66758a; font-size: .85em }
figure { margin: 1.4em 0 } img { max-width: 100% } figcaption { color: #66758a; font-size: .9em }
table { border-collapse: collapse } td, th { text-align: left; padding: .15em 1.2em .15em 0; vertical-align: top }
th { color: #66758a; font-weight: normal } pre { background: #f5f7fa; padding: 1em; overflow: auto; font-size: .85em }
"""
# Records that say that something happened, in words.
EVENTS = {
    "straggler": lambda r: f"rank {r['rank']} on {r['host']} " + (
        f"is slow: {r['ratio']:.2f} times the median rank" if r["slow"] else "is as fast as the others again"),
    "link_errors": lambda r: f"{r['host']}, {r['device']} port {r['port']}: {r['counter']} +{r['added']}",
    "checkpoint_failed": lambda r: f"no checkpoint of step {r['step']}: {r['error']}",
    "stopped": lambda r: f"stopped on request after step {r['step']}",
}

# What code meets in records of another version, or damaged in a way that still is JSON.
UNLIKE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# Numbers without which a record of this event shows nothing.
NEEDED = {"step": ("step", "tokens_per_second", "seconds_per_step"), "validation": ("step",), "checkpoint": ("step",)}
OF_DOCUMENT = ("prefill_tokens_per_second", "prefill_seconds")
# What else is read of a record, where it is there: numbers, null where they are not finite, and groups of numbers or of
# spreads over ranks.
NUMBERS = {"step", "loss", "cross_entropy", "bits_per_byte", "mfu", "gradient_norm", "learning_rate", "waited_seconds", "seconds",
           "peak_resident_bytes", "document_tokens", "predicted_tokens", "perplexity", "log_probability", "halo_bytes",
           "landmark_bytes", "peak_memory_bytes", "peak_device_memory_bytes"}
GROUPS = {"bytes", "bandwidth", "phases", "memory", "phase_seconds"}
SPREAD = ("min", "mean", "max")


def is_number(value):
    """Whether arithmetic in double precision goes well with it; JSON's integers have no end."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) > 1e100


def has(numbers, keys):
    return isinstance(numbers, dict) and all(is_number(numbers.get(key)) for key in keys)


def is_sound(record):
    """Whether what is read of a record is numbers where it has to be."""
    for key, value in record.items():
        if key in NUMBERS and not (value is None or is_number(value)):
            return False
        if key in GROUPS and not (isinstance(value, dict)
                                  and all(is_number(part) or has(part, SPREAD) for part in value.values())):
            return False
    return True


def is_whole(record):
    """Whether a line's value is a record of a job; other numbers may be missing, or null where they are not finite."""
    if not (isinstance(record, dict) and is_sound(record)):
        return False
    if "document" in record or "event" not in record:
        figures = record.get("figures")
        return isinstance(record.get("document"), str) and has(figures, OF_DOCUMENT) and is_sound(figures)
    return isinstance(record["event"], str) and has(record, NEEDED.get(record["event"], ()))


def read_lines(file):
    """The records of a file, one a line. A last line that is still being written is left out; so are others that are no
    records, and a warning says how many."""
    if not file.is_file():
        return []
    records, damaged = [], 0
    try:
        lines = file.read_text(errors="replace").split("\n")
    except OSError as error:
        fail(f"cannot read {file}: {error.strerror}", "give this user the right to read it (ls -l shows the owner)")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, or nested without end
            damaged += number < len(lines)
            continue
        if is_whole(record):
            records.append(record)
        else:
            damaged += 1
    if damaged:
        sys.stderr.write(f"report: warning: {file}: {damaged} damaged line{'s are' if damaged > 1 else ' is'} left out\n")
    return records


class JobFolder:
    """What an output folder of longhalo holds: `kind` is "train" or "infer"."""

    def __init__(self, folder):
        self.folder = folder
        self.metrics = read_lines(folder / "metrics.jsonl")
        self.log = read_lines(folder / "log.jsonl")
        self.results = read_lines(folder / "results.jsonl")
        if self.metrics:
            self.kind = "train"
        elif self.results or any(r.get("event") == "record" for r in self.log):
            self.kind = "infer"
            self.results = self.results or [r for r in self.log if r.get("event") == "record"]
        else:
            fail(f"{folder} holds neither metrics.jsonl nor results.jsonl with a record",
                 "name the output.directory of longhalo train or longhalo infer, and wait for a job's first record")
        headers = [r for r in self.log + self.metrics
                   if r.get("event") == "run" and r.get("command", self.kind) == self.kind]
        # The job's own log knows most of hosts and devices; of several runs the last.
        known = [h for h in headers if h.get("hosts")] or headers
        self.header = known[-1] if known else {}
        self.runs = max(sum(r.get("event") == "run" for r in self.metrics), 1) if self.kind == "train" else 1

    def events(self, name):
        return [r for r in self.metrics if r.get("event") == name]

    def happened(self):
        """(step or None, kind, words) of all that is no ordinary record, in order."""
        step, list_ = None, []
        for record in self.metrics if self.kind == "train" else self.log:
            step = record.get("step", step)
            event = record.get("event")
            if event in EVENTS:
                try:
                    list_.append((step, event.replace("_", " "), EVENTS[event](record)))
                except UNLIKE:  # of another version
                    list_.append((step, event.replace("_", " "), json.dumps(record)))
        return list_


def number(value, unit=""):
    """1234567 -> "1.23 M"."""
    if value is None or not math.isfinite(value):
        return "-"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}".rstrip()
    return f"{value:.4g} {unit}".rstrip()


def cards(job):
    """(value, what it is) pairs, most wanted first."""
    if job.kind == "train":
        steps, validations = job.events("step"), job.events("validation")
        if not steps:
            return []
        rates = sorted(s["tokens_per_second"] for s in steps)
        told = [(f"{steps[-1]['step']}", "steps"), (number(steps[-1].get("loss")), "loss, nats a token")]
        if validations:
            told.append((number(validations[-1].get("cross_entropy")), "validation, nats a token"))
            if "bits_per_byte" in validations[-1]:
                told.append((number(validations[-1]["bits_per_byte"]), "validation, bits a byte"))
        told.append((number(rates[len(rates) // 2]), "tokens/s, median"))
        mfu = sorted(s["mfu"] for s in steps if s.get("mfu") is not None)
        if mfu:
            told.append((f"{100 * mfu[len(mfu) // 2]:.1f} %", "MFU, median"))
        return told + [(str(len(job.events("checkpoint"))), "checkpoints")]
    documents = {r["document"]: r for r in job.results}
    figures = [r["figures"] for r in documents.values() if "figures" in r]
    told = [(str(len(documents)), "documents"), (str(len(job.results)), "records")]
    told.append((number(sum(r.get("document_tokens", 0) for r in documents.values())), "tokens"))
    if figures:
        rates = sorted(f["prefill_tokens_per_second"] for f in figures)
        told.append((number(rates[len(rates) // 2]), "tokens/s of prefill, median"))
    scored = [r for r in job.results if r.get("task") == "score" and r.get("perplexity") and "log_probability" in r]
    if scored:
        tokens = sum(r.get("predicted_tokens", 0) for r in scored)
        told.append((number(math.exp(-sum(r["log_probability"] for r in scored) / max(tokens, 1))), "perplexity"))
    return told


def settings(job):
    """(name, value) pairs of the header."""
    header = job.header
    rows = [("command", header.get("command")), ("started", header.get("started")), ("ranks", header.get("ranks")),
            ("runs", job.runs if job.runs > 1 else None)]
    rows += [(name, ", ".join(sorted(set(map(str, header.get(name) or []))))) for name in ("hosts", "devices")]
    rows += [(name, header.get(name)) for name in ("precision", "transport", "threads_per_rank")]
    rows += [("versions", ", ".join(f"{k} {v}" for k, v in (header.get("versions") or {}).items()))]
    return [(name, value) for name, value in rows if value not in (None, "", [])]


def attempted(what, make, otherwise):
    """make(), or `otherwise` with a warning: records that fit one part of the page do not take the others with them."""
    try:
        return make()
    except UNLIKE as error:
        sys.stderr.write(f"report: warning: {what} left out, for the records have another form: {error!r}\n")
        return otherwise


def embedded(figure):
    """The figure as a data URI."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def page(job):
    title = f"LongHalo {job.kind}: {job.folder.resolve().name}"
    parts = [f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{html.escape(title)}</title>",
             f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
             f"<p class=where>{html.escape(str(job.folder.resolve()))}</p><div class=cards>"]
    parts += [f"<div class=card><b>{html.escape(v)}</b><span>{html.escape(w)}</span></div>"
              for v, w in attempted("the figures at the top are", lambda: cards(job), [])]
    parts.append("</div>")
    happened = job.happened()
    if happened:
        parts.append("<h2>What happened</h2><table><tr><th>step</th><th>what</th><th></th></tr>")
        parts += ["<tr>" + "".join(f"<td>{html.escape('' if x is None else str(x))}</td>" for x in row) + "</tr>"
                  for row in happened]
        parts.append("</table>")
    for plot in attempted("plots are", lambda: report_plots.plots(job), []):
        picture = attempted(f"the plot '{plot.title}' is", lambda: embedded(report_plots.draw(plot)), None)
        if picture:
            parts.append(f"<h2>{html.escape(plot.title)}</h2><figure><img alt=\"{html.escape(plot.title)}\" "
                         f"src=\"{picture}\"><figcaption>{html.escape(plot.caption)}</figcaption></figure>")
    parts.append("<h2>Settings</h2><table>")
    parts += [f"<tr><th>{html.escape(str(n))}</th><td>{html.escape(str(v))}</td></tr>"
              for n, v in attempted("settings are", lambda: settings(job), [])]
    parts.append("</table><details><summary>Effective config</summary><pre>"
                 + html.escape(json.dumps(job.header.get("config", {}), indent=1)) + "</pre></details></body></html>\n")
    return "".join(parts)


def opened(path):
    """A file to write bytes to; not through a link that anybody may have put there."""
    shared = path.parent.stat().st_mode & stat.S_IWOTH
    if shared and path.is_symlink():
        fail(f"{path} is a link in a folder that everybody may write to", "remove it, or name another file with --output")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_NOFOLLOW if shared else 0)
    return open(os.open(path, flags, 0o666), "wb")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output.directory of a job")
    parser.add_argument("--output", type=Path, help="the page (default: report.html in the folder)")
    parser.add_argument("--picture", type=Path, help="also write the first plots as one PNG")
    arguments = parser.parse_args()
    if not arguments.run.is_dir():
        fail(f"{arguments.run} is not a folder", "name the output.directory of longhalo train or longhalo infer")
    job = JobFolder(arguments.run)
    output = arguments.output or arguments.run / "report.html"
    try:
        contents = page(job).encode()
        with opened(output) as file:
            file.write(contents)
        if arguments.picture:
            overview = report_plots.overview(job)
            if overview is None:
                fail("there are no plots for a picture yet", "wait for the job's first record")
            with opened(arguments.picture) as picture:  # an open file: nothing is added to the name
                overview.savefig(picture, format="png", dpi=90)
    except OSError as error:
        fail(f"cannot write: {error}", "name a file in a folder that may be written to, with --output")
    # Nobody may listen, and the page itself may stand there.
    if sys.stdout and not os.path.samestat(output.stat(), os.fstat(sys.stdout.fileno())):
        print(output)


if __name__ == "__main__":
    main()
