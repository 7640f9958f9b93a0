"""The plots of scripts/report.py: for each a title, a caption and a function that draws it on axes."""
import os
from collections import namedtuple

# A page is made without a display, and without a trace in the user's home.
os.environ.setdefault("MPLCONFIGDIR", "/tmp")
import h5py
import matplotlib
import matplotlib.ticker
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of the back end)

Plot = namedtuple("Plot", "title caption draw")  # draw(axes)
COLORS = ["#2f6db5", "#e0873a", "#4a9c6d", "#b0486a", "#7a63b8", "#8a7a5c", "#3aa0b0", "#c9a227", "#66758a", "#444444"]
PHASES = ["forward", "loss", "backward", "optimizer"]  # of a step, one after the other
READING = ["keys", "queries", "attention", "mlp", "halo_wait", "landmark_wait", "context_wait"]
WORK = {*PHASES, *(name for name in READING if not name.endswith("_wait"))}  # the others are times within these, or waiting
MB = 1e6
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6eaef",
                     "axes.edgecolor": "#9aa7b5", "axes.prop_cycle": matplotlib.cycler(color=COLORS), "font.size": 9,
                     "legend.frameon": False, "axes.axisbelow": True, "axes.titlesize": 10, "axes.titleweight": "bold"})


def draw(plot):
    figure, axes = plt.subplots(figsize=(9.5, 3.4), layout="constrained")
    plot.draw(axes)
    plt.close(figure)  # kept by the caller, not by pyplot
    return figure


def overview(job):
    """The first six plots in one picture; None where there are none."""
    chosen = plots(job)[:6]
    if not chosen:
        return None
    columns = min(len(chosen), 3)
    rows = -(-len(chosen) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.3 * columns, 2.9 * rows), layout="constrained", squeeze=False)
    for axes, plot in zip(grid.flat, chosen):
        plot.draw(axes)
        axes.set_title(plot.title)
    for axes in list(grid.flat)[len(chosen):]:
        axes.set_visible(False)
    plt.close(figure)
    return figure


def plots(job):
    """Those for which the job has data, in order."""
    return _train_plots(job) if job.kind == "train" else _infer_plots(job)


def _of_spread(spread, key):
    """Of {"min", "mean", "max"}; older records hold the mean alone."""
    return spread[key] if isinstance(spread, dict) else spread


def _mean(spread):
    return _of_spread(spread, "mean")


def _series(records, *path):
    """Steps and values of the records that have the number at this path of keys."""
    steps, values = [], []
    for record in records:
        value = record
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        value = _mean(value) if value is not None else None
        if value is not None:
            steps.append(record["step"])
            values.append(value)
    return np.array(steps), np.array(values, dtype=float)


def _smooth(values):
    """A mean over a fiftieth of the run, to be seen through the noise of single steps."""
    if not len(values):  # no record has the number, or it was never finite
        return values
    width = max(len(values) // 50, 1)
    finite = np.where(np.isfinite(values), values, np.nanmean(values) if np.isfinite(values).any() else 0)
    padded = np.pad(finite, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")


def _plain_numbers(axes):
    """2, 3, 4, 10 in place of powers of ten."""
    for kind in ("major", "minor"):
        getattr(axes.yaxis, f"set_{kind}_formatter")(matplotlib.ticker.LogFormatter(minor_thresholds=(2, 0.5)))


def _few(values, most=4):
    """Of the largest mean, at most so many keys; what is always 0 is left out."""
    kept = [(key, pair) for key, pair in values.items() if len(pair[1]) and np.nanmax(pair[1]) > 0]
    return sorted(kept, key=lambda one: -np.nanmean(one[1][1]))[:most]


def _train_plots(job):
    steps = job.events("step")
    if not steps:
        return []
    found = [Plot("Loss", "Nats a token: each step's (faint), their running mean, and validations.",
                  lambda axes: _loss(axes, steps, job.events("validation"))),
             Plot("Speed", "Tokens a second of all ranks together, and MFU: useful FLOPs over what the ranks' large matrix "
                  "products reach, measured when the job began.", lambda axes: _speed(axes, steps)),
             Plot("Phases over ranks", "Of a step, median of all records: the bar is the mean rank, the line reaches from the "
                  "fastest rank to the slowest. Recomputation is within backward, exposed times (waiting) are within the "
                  "others.", lambda axes: _phases(axes, steps))]
    moved = {kind: _series(steps, "bytes", kind) for kind in _keys(steps, "bytes")}
    if _few(moved):
        found.append(Plot("Bytes moved", "Received by all ranks a step, or put to and fetched from the activation store. "
                          "What a validation moves counts for the step after it.",
                          lambda axes: _bytes(axes, steps, moved)))
    bandwidth = {kind: _series(steps, "bandwidth", kind) for kind in _keys(steps, "bandwidth")}
    if _few(bandwidth):
        found.append(Plot("Halo bandwidth", "Of a rank while it receives, mean of ranks, as timed on the device; waiting for "
                          "a peer that is late counts.", lambda axes: _bandwidth(axes, bandwidth)))
    elif any(len(moved.get(kind, ((), ()))[1]) and moved[kind][1].max() > 0 for kind in ("halo", "landmarks")):
        found.append(Plot("Halo bandwidth", "Halo and landmarks that all ranks receive, by the time of whole steps: on the CPU "
                          "transfers are not timed, but for the waiting (see the phases).",
                          lambda axes: _bandwidth_of_steps(axes, steps)))
    found.append(Plot("Memory", "Peaks so far of the largest rank.", lambda axes: _memory(axes, steps)))
    if job.events("checkpoint"):
        found.append(Plot("Checkpoints", "From the begin of a checkpoint to its commit, and the part of it for which training "
                          "stood still.", lambda axes: _checkpoints(axes, job.events("checkpoint"))))
    found.append(Plot("Gradient norm and learning rate", "The whole gradient's norm before clipping.",
                      lambda axes: _gradients(axes, steps)))
    return found


def _keys(records, group):
    return sorted({key for record in records for key in (record.get(group) or {})})


def _loss(axes, steps, validations):
    at, loss = _series(steps, "loss")
    axes.plot(at, loss, color=COLORS[0], alpha=0.25, linewidth=0.8)
    axes.plot(at, _smooth(loss), color=COLORS[0], label="training")
    if validations:
        axes.plot(*_series(validations, "cross_entropy"), "o-", color=COLORS[1], markersize=4, label="validation")
    skipped = [s["step"] for s in steps if s.get("skipped")]
    for step in skipped:
        axes.axvline(step, color=COLORS[3], alpha=0.5, linewidth=0.8)
    axes.set(xlabel="step", ylabel="nats a token")
    axes.legend()


def _speed(axes, steps):
    at, rate = _series(steps, "tokens_per_second")
    axes.plot(at, rate, color=COLORS[0], alpha=0.3, linewidth=0.8)
    axes.plot(at, _smooth(rate), color=COLORS[0])
    axes.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    at, mfu = _series(steps, "mfu")
    if len(mfu):
        right = axes.twinx()
        right.plot(at, 100 * _smooth(mfu), color=COLORS[1])
        right.set_ylabel("MFU, %", color=COLORS[1])
        right.set_ylim(0, None)
        right.grid(False)
        axes.yaxis.label.set_color(COLORS[0])


def _per_step(steps):
    """How many steps each record stands for."""
    numbers = np.array([s["step"] for s in steps])
    return np.maximum(np.diff(numbers, prepend=numbers[0] - (numbers[1] - numbers[0] if len(numbers) > 1 else 1)), 1)


def _phases(axes, steps):
    counts = _per_step(steps)
    names = PHASES + sorted({k for s in steps for k in s.get("phases", {})} - set(PHASES))
    rows = []
    for name in names:
        spreads = [(s["phases"][name], n) for s, n in zip(steps, counts) if name in s.get("phases", {})]
        if not spreads:
            continue
        stats = [np.median([_of_spread(p, k) / n for p, n in spreads]) for k in ("min", "mean", "max")]
        rows.append((name, *stats))
    _spread_bars(axes, rows)
    axes.set(xlabel="seconds a step", xlim=(0, None))


def _spread_bars(axes, rows):
    """(name, min, mean, max) over ranks; what takes no time to speak of is left out."""
    longest = max((row[3] for row in rows), default=0)
    rows = [row for row in rows if row[3] > 1e-4 * longest]
    for at, (name, low, mean, high) in enumerate(rows):
        axes.barh(at, mean, color=COLORS[0] if name in WORK else COLORS[1], height=0.6)
        axes.plot([low, high], [at, at], color="#1d2733", linewidth=1.2, marker="|", markersize=7)
    axes.set_yticks(range(len(rows)), [name.replace("_", " ") for name, *_ in rows])
    axes.invert_yaxis()


def _bytes(axes, steps, moved):
    counts = dict(zip((s["step"] for s in steps), _per_step(steps)))
    for kind, (at, values) in _few(moved, 6):
        axes.plot(at, values / np.array([counts[step] for step in at]) / MB, label=kind.replace("_", " "))
    axes.set(xlabel="step", ylabel="MB a step", yscale="log")
    _plain_numbers(axes)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _bandwidth(axes, bandwidth):
    for kind, (at, values) in _few(bandwidth):
        axes.plot(at, _smooth(values) / 1e9, label=kind)
    axes.set(xlabel="step", ylabel="GB/s", ylim=(0, None))
    axes.legend()


def _bandwidth_of_steps(axes, steps):
    seconds = np.array([s["seconds_per_step"] for s in steps]) * _per_step(steps)
    for kind in ("halo", "landmarks"):
        values = np.array([s.get("bytes", {}).get(kind, 0) for s in steps])
        axes.plot([s["step"] for s in steps], _smooth(values / seconds) / MB, label=kind)
    axes.set(xlabel="step", ylabel="MB/s", ylim=(0, None))
    axes.legend()


def _memory(axes, steps):
    names = {"peak_resident": "host, resident", "peak_device_arrays": "device, arrays",
             "peak_device_reserved": "device, taken from the card"}
    drawn = False
    for name, label in names.items():
        pairs = [(s["step"], s["memory"][name]["max"]) for s in steps if name in s.get("memory", {})]
        if pairs and max(p[1] for p in pairs) > 0:
            axes.plot([p[0] for p in pairs], [p[1] / 1e9 for p in pairs], label=label)
            drawn = True
    if not drawn:  # of an older version
        at, resident = _series(steps, "peak_resident_bytes")
        axes.plot(at, resident / 1e9, label="host, resident, of rank 0")
    axes.set(xlabel="step", ylabel="GB", ylim=(0, None))
    axes.legend()


def _checkpoints(axes, checkpoints):
    at, seconds = _series(checkpoints, "seconds")
    axes.plot(at, seconds, "o-", markersize=4, label="until its commit")
    axes.plot(*_series(checkpoints, "waited_seconds"), "s-", markersize=4, label="training stood still")
    axes.set(xlabel="step", ylabel="seconds", ylim=(0, None))
    axes.legend()


def _gradients(axes, steps):
    at, norm = _series(steps, "gradient_norm")
    axes.plot(at, norm, color=COLORS[0], alpha=0.3, linewidth=0.8)
    axes.plot(at, _smooth(norm), color=COLORS[0])
    axes.set(xlabel="step")
    axes.set_ylabel("norm", color=COLORS[0])
    right = axes.twinx()
    right.plot(*_series(steps, "learning_rate"), color=COLORS[1])
    right.set_ylabel("learning rate", color=COLORS[1])
    right.set_ylim(0, None)
    right.grid(False)


def _infer_plots(job):
    documents = {}
    for record in job.results:
        if "figures" in record:
            documents.setdefault(record["document"], record)
    found = []
    scores = _scores(job)
    if scores:
        found.append(Plot("Perplexity by position", "Of the tokens of each stretch of a document; all documents together in "
                          "black.", lambda axes: _perplexity(axes, scores)))
    if documents:
        records = list(documents.values())
        found += [Plot("Speed", "Prefill by document, all ranks together, and MFU where it is recorded.",
                       lambda axes: _document_speed(axes, records)),
                  Plot("Phases over ranks", "Of a prefill, mean of all documents: the bar is the mean rank, the line reaches from "
                       "the fastest rank to the slowest.", lambda axes: _reading_phases(axes, records)),
                  Plot("Phases by document", "Seconds of the prefill, mean of ranks.",
                       lambda axes: _document_phases(axes, records))]
        if any(r["figures"].get("halo_bytes", 0) + r["figures"].get("landmark_bytes", 0) > 0 for r in records):
            found.append(Plot("Halo bandwidth", "Halo and landmarks that all ranks receive, by the time of the whole prefill.",
                              lambda axes: _document_bytes(axes, records)))
        found.append(Plot("Memory", "Peak of the largest rank, by document.", lambda axes: _document_memory(axes, records)))
    return found


def _scores(job):
    """{document: log-probabilities [N]} of the arrays that are there."""
    found = {}
    for record in job.results:
        if record.get("task") != "score" or not record.get("arrays"):
            continue
        try:
            arrays = (job.folder / record["arrays"]).resolve()
            # Records may come from anybody: nothing but files of the job is opened, and no pipe, which has no end.
            if not (arrays.is_relative_to(job.folder.resolve()) and arrays.is_file()):
                continue
            with h5py.File(arrays) as file:
                scores = file["scores"][:].astype(float)
            if scores.ndim == 1 and len(scores):
                found[record["document"]] = scores
        except (OSError, KeyError, TypeError, ValueError):  # removed, or of a job that is writing it now
            continue
    return {name: scores for name, scores in found.items() if np.isfinite(scores).any()}


def _perplexity(axes, scores):
    longest = max(len(s) for s in scores.values())
    # Stretches that grow with the position: the first tokens matter most, far ones are many.
    edges = np.unique(np.geomspace(1, longest, 25).astype(int)) if longest > 32 else np.array([1, longest])
    edges = np.concatenate([[0], edges])
    sums, counts = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for name, values in sorted(scores.items()):
        at = np.searchsorted(edges, np.arange(len(values)), side="right") - 1
        at = np.minimum(at, len(edges) - 2)
        good = np.isfinite(values)
        own = np.bincount(at[good], -values[good], len(edges) - 1)
        many = np.bincount(at[good], minlength=len(edges) - 1)
        sums, counts = sums + own, counts + many
        if len(scores) <= 12:
            shown = many > 0
            axes.plot(edges[1:][shown], np.exp(own[shown] / many[shown]), alpha=0.55, linewidth=1,
                      label=os.path.basename(name)[:28])
    shown = counts > 0
    axes.plot(edges[1:][shown], np.exp(sums[shown] / counts[shown]), "o-", color="#1d2733", markersize=3)
    axes.set(xlabel="position, tokens", ylabel="perplexity", xscale="log", yscale="log")
    _plain_numbers(axes)
    if 1 < len(scores) <= 12:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _labels(axes, records):
    many = len(records) > 20
    axes.set_xlim(-0.6, max(len(records), 4) - 0.4)  # the bars of few documents are no walls
    axes.set_xticks(range(len(records)) if not many else [],
                    [os.path.basename(r["document"])[:16] for r in records] if not many else [], rotation=30, ha="right")
    if many:
        axes.set_xlabel(f"{len(records)} documents, in the order of the results")


def _document_speed(axes, records):
    axes.bar(range(len(records)), [r["figures"]["prefill_tokens_per_second"] for r in records], color=COLORS[0], width=0.6)
    axes.set(ylabel="tokens/s")
    mfu = [(at, 100 * r["figures"]["mfu"]) for at, r in enumerate(records) if "mfu" in r["figures"]]
    if mfu:
        right = axes.twinx()
        right.plot(*zip(*mfu), "o", color=COLORS[1])
        right.set_ylabel("MFU, %", color=COLORS[1])
        right.set_ylim(0, None)
        right.grid(False)
    _labels(axes, records)


def _reading_phases(axes, records):
    phases = [r["figures"].get("phase_seconds", {}) for r in records]
    rows = []
    for name in READING:
        spreads = [p[name] for p in phases if name in p]
        if spreads:
            rows.append((name, *(np.mean([_of_spread(s, k) for s in spreads]) for k in ("min", "mean", "max"))))
    _spread_bars(axes, rows)
    axes.set(xlabel="seconds a document", xlim=(0, None))


def _document_phases(axes, records):
    phases = [r["figures"].get("phase_seconds", {}) for r in records]
    names = [n for n in READING if any(n in p for p in phases)]
    base = np.zeros(len(records))
    for name, color in zip(names, COLORS):
        values = np.array([_mean(p.get(name, 0)) for p in phases])
        axes.bar(range(len(records)), values, bottom=base, color=color, width=0.6, label=name.replace("_", " "))
        base += values
    axes.set(ylabel="seconds")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    _labels(axes, records)


def _document_bytes(axes, records):
    for at, (key, label) in enumerate((("halo_bytes", "halo"), ("landmark_bytes", "landmarks"))):
        rates = [r["figures"].get(key, 0) / r["figures"]["prefill_seconds"] / MB for r in records]
        axes.bar(np.arange(len(records)) + 0.3 * at - 0.15, rates, width=0.3, color=COLORS[at], label=label)
    axes.set(ylabel="MB/s")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    _labels(axes, records)


def _document_memory(axes, records):
    for at, (key, label) in enumerate((("peak_memory_bytes", "host, resident"),
                                       ("peak_device_memory_bytes", "device, arrays"))):
        values = [r["figures"].get(key, 0) / 1e9 for r in records]
        if any(values):
            axes.bar(np.arange(len(records)) + 0.3 * at - 0.15, values, width=0.3, color=COLORS[at], label=label)
    axes.set(ylabel="GB")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    _labels(axes, records)
