#!/bin/bash
# From a fresh clone to answers: set-up, build, model, then the main job on two ranks, and a look at what it wrote.
# `scripts/demo.sh --help` says more.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

case ${1:-} in
  --help | -h)
    cat <<'END'
Usage: scripts/demo.sh [--set section.key=value ...]

Sets up (scripts/setup.sh), fetches the model, builds build/release, then runs on two ranks
  mpirun -np 2 build/release/longhalo infer --config configs/demo.yaml
which reads licence texts that every Debian machine has and writes results/demo. What follows on the command line
goes to longhalo, e.g. --set generate.max_new_tokens=32. RANKS=n in the environment changes the number of ranks.
END
    exit 0 ;;
esac

RANKS=${RANKS:-2}
RESULTS=results/demo/results.jsonl

show_results() {
  "$PYTHON" - "$RESULTS" <<'END'
import json, sys, textwrap

def short(value):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "..."

with open(sys.argv[1], encoding="utf-8") as file:
    for line in file:
        print()
        for key, value in json.loads(line).items():
            if isinstance(value, str) and len(value) > 90:
                value = "\n" + textwrap.indent(textwrap.fill(value, 100), "      ")
                print(f"  {key}:{value}")
            else:
                print(f"  {key}: {short(value)}")
END
}

step "setting up" scripts/setup.sh
step "fetching the model" "$PYTHON" scripts/fetch_model.py
step "configuring build/release" cmake --preset release --log-level=WARNING
step "building build/release on $CORES cores" cmake --build build/release --parallel "$CORES" --target longhalo

# The cores are shared out among the ranks; none is bound to a core, because ranks may outnumber the cores.
export OMP_NUM_THREADS=$((CORES > RANKS ? CORES / RANKS : 1))
job=(mpirun -np "$RANKS" --oversubscribe --bind-to none
  build/release/longhalo infer --config configs/demo.yaml "$@")
step "running ${job[*]}" "${job[@]}"

say "$RESULTS:"
show_results
say "arrays (scores, embeddings) and the run's log are beside it in $(dirname "$RESULTS")"
