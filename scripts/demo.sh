#!/bin/bash
# From a fresh clone to answers: set-up, build, the small model that comes with the repository, then a real one: the
# main job on two ranks, a look at what it wrote, and a short training job.
# `scripts/demo.sh --help` says more.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

only_small=no
case ${1:-} in
  --small) only_small=yes; shift ;;
  --help | -h)
    cat <<'END'
Usage: scripts/demo.sh [--small] [--set section.key=value ...]

Sets up (scripts/setup.sh), builds build/release, then runs on two ranks
  mpirun -np 2 build/release/longhalo infer --config configs/demo_small.yaml
with the small model of data/small_model, which takes seconds. With --small that is all, and no model is downloaded.
Otherwise it fetches SmolLM2-135M-Instruct and runs
  mpirun -np 2 build/release/longhalo infer --config configs/demo.yaml
which reads licence texts that every Debian machine has and writes results/demo, and the first steps of
  mpirun -np 2 build/release/longhalo train --config configs/train_smollm2.yaml
which lets the same model learn on, into results/train_smollm2 (3 GB of disk). What follows on the command line goes to
the last infer job, e.g. --set generate.max_new_tokens=32. RANKS=n in the environment changes the number of ranks,
TRAIN_STEPS=n the steps of training (3; 0 leaves it out).
END
    exit 0 ;;
esac

RANKS=${RANKS:-2}
TRAIN_STEPS=${TRAIN_STEPS:-3}

show_results() { # results.jsonl
  "$PYTHON" - "$1" <<'END'
import json, sys, textwrap

with open(sys.argv[1], encoding="utf-8") as file:
    records = [json.loads(line, parse_float=lambda number: float(f"{float(number):.4g}")) for line in file]
for record in records:
    print(f"\n{record['task']}  {record['document']}")
    if record["task"] == "generate":
        print(textwrap.fill(f"  Q: {record['query']}", 110, subsequent_indent="     "))
        print(textwrap.fill(f"  A: {record['answer']}", 110, subsequent_indent="     "))
    else:
        shown = {k: v for k, v in record.items() if k not in ("task", "document", "query", "figures")}
        print(textwrap.fill("  " + json.dumps(shown, ensure_ascii=False), 110, subsequent_indent="  "))

def show(name, value, indent):
    if not isinstance(value, dict):
        print(f"{indent}{name}: {value}")
    elif any(isinstance(part, dict) for part in value.values()):
        print(f"{indent}{name}:")
        for part in value.items():
            show(*part, indent + "  ")
    else:
        print(f"{indent}{name}: " + ", ".join(f"{key} {part}" for key, part in value.items()))

print(f"\nfigures of the last record, one of {len(records)}:")
for figure in records[-1]["figures"].items():
    show(*figure, "  ")
END
}

show_training() {
  "$PYTHON" - results/train_smollm2/metrics.jsonl <<'END'
import json, sys

keys = ("step", "cross_entropy", "perplexity", "bits_per_byte", "gradient_norm", "learning_rate", "tokens_per_second")
for record in map(json.loads, open(sys.argv[1], encoding="utf-8")):
    if record["event"] in ("step", "validation"):
        print(f"  {record['event']:10} " + "  ".join(f"{key} {record[key]:.4g}" for key in keys if key in record))
END
}

# infer_on_ranks CONFIG RESULTS [SETTINGS...]: the job, and what it wrote in the folder RESULTS.
infer_on_ranks() {
  local job=(mpirun -np "$RANKS" --oversubscribe --bind-to none build/release/longhalo infer --config "$1" "${@:3}")
  step "running ${job[*]}" "${job[@]}"
  say "$2/results.jsonl:"
  show_results "$2/results.jsonl"
  say "arrays (scores, embeddings) and the run's log are beside it in $2"
}

step "setting up" scripts/setup.sh
step "configuring build/release" cmake --preset release --log-level=WARNING
step "building build/release on $CORES cores" cmake --build build/release --parallel "$CORES" --target longhalo

# The cores are shared out among the ranks; none is bound to a core, because ranks may outnumber the cores.
export OMP_NUM_THREADS=$((CORES > RANKS ? CORES / RANKS : 1))
if [[ $only_small == yes ]]; then
  infer_on_ranks configs/demo_small.yaml results/demo_small "$@"
  exit
fi
infer_on_ranks configs/demo_small.yaml results/demo_small
step "fetching the model" "$PYTHON" scripts/fetch_model.py
infer_on_ranks configs/demo.yaml results/demo "$@"

if ((TRAIN_STEPS > 0)); then
  job=(mpirun -np "$RANKS" --oversubscribe --bind-to none
    build/release/longhalo train --config configs/train_smollm2.yaml
    --set train.steps="$TRAIN_STEPS" --set train.checkpoint_every=0)
  step "running ${job[*]}" "${job[@]}"
  say "results/train_smollm2/metrics.jsonl, losses in nats a token:"
  show_training
  say "the trained model, which transformers opens too, is results/train_smollm2/model"
fi
