#!/bin/bash
# Trains the small byte-level model with five attentions at equal steps and measures bits per byte by position.
# `scripts/small_model/run.sh --help` says more.
# shellcheck source-path=SCRIPTDIR disable=SC2034
chosen_python=${PYTHON:-}
. "$(dirname "$0")/../common.sh"
SCRIPT_NAME=small_model
PYTHON=${chosen_python:-$PYTHON}

case ${1:-} in
  --help | -h)
    cat <<'END'
Usage: [NAME=value ...] scripts/small_model/run.sh

Fetches free manuals (scripts/small_model/make_corpus.py), trains configs/train_small.yaml with each attention of
VARIANTS, scores books that were not trained on, each up to EVALUATE bytes, and prints a table. Stopped or killed, it goes
on where it was when called again with the same settings. What is wanted is taken from the environment:

  STEPS      optimizer steps (800)                   SEQUENCE  bytes of a sequence, one sequence a step (131072)
  RANKS      MPI ranks (1)                           DEVICE    auto, cpu, cuda (auto)
  VARIANTS   of window landmarks_from_0 landmarks pyramid dense (all of them, in this order)
  EVALUATE   bytes of a held-out book that are read (8 x SEQUENCE)
  OUT        results (results/small_model)           CORPUS    corpus folder, or a .tar.xz of one (OUT/corpus)
  LONGHALO   executable (build/release/longhalo)     PYTHON    with numpy and h5py (.venv/bin/python)
  SETTINGS   more settings of every training, e.g. "--set train.learning_rate=0.002"

On one H200: scripts/small_model/run.sh. On two CPU cores, a few minutes to see that it all works:
  STEPS=3 SEQUENCE=2048 RANKS=2 OUT=/tmp/small_model scripts/small_model/run.sh
OUT then holds tables.md, evaluation.json and for each variant the training run (metrics.jsonl, model/) and its scores
(evaluation/). scripts/small_model/pack.py makes a model that can be shipped of one of them.
END
    exit 0 ;;
esac

STEPS=${STEPS:-800}
SEQUENCE=${SEQUENCE:-131072}
RANKS=${RANKS:-1}
DEVICE=${DEVICE:-auto}
VARIANTS=${VARIANTS:-window landmarks_from_0 landmarks pyramid dense}
EVALUATE=${EVALUATE:-$((8 * SEQUENCE))}
OUT=${OUT:-results/small_model}
CORPUS=${CORPUS:-$OUT/corpus}
LONGHALO=${LONGHALO:-build/release/longhalo}
read -ra more_settings <<<"${SETTINGS:-}"
CONFIG=configs/train_small.yaml
TOKENIZER=data/byte_tokenizer

# The variants differ in nothing but this.
attention_of() {
  case $1 in
    window) bands='[[1, 0, 1024]]' bias=-3 ;;
    landmarks_from_0) bands='[[1, 0, 1024], [64, 1024, inf]]' bias=0 ;;
    landmarks) bands='[[1, 0, 1024], [64, 1024, inf]]' bias=-3 ;;
    pyramid) bands='[[1, 0, 1024], [16, 1024, 16384], [128, 16384, inf]]' bias=-3 ;;
    dense) bands='[[1, 0, inf]]' bias=-3 ;;
    *) die "there is no variant $1; there are window, landmarks_from_0, landmarks, pyramid and dense" ;;
  esac
}

on_ranks() { mpirun -np "$RANKS" --oversubscribe --bind-to none "$LONGHALO" "$@" --set run.device="$DEVICE"; }

# Token files are made in one rename, so one that is there is whole; the note says of which corpus and length.
tokens_of() { # output.h5 note texts...
  local output=$1 note=$2
  shift 2
  if [[ -e $output && $(cat "$output.note" 2>/dev/null) == "$note" ]]; then return; fi
  step "tokens: $output" "$LONGHALO" tokenize --model "$TOKENIZER" --output "$output" --force "$@"
  echo "$note" >"$output.note"
}

# Goes on with what the same settings began; what other settings made is replaced.
train() {
  local folder=$OUT/$1 note="corpus $corpus_sum, $STEPS steps of $SEQUENCE ${SETTINGS:-}" if_exists=replace
  if [[ $(cat "$folder/settings" 2>/dev/null) == "$note" ]]; then
    if_exists=resume
    if [[ -e $folder/trained ]]; then
      say "$1: trained already"
      return
    fi
  fi
  mkdir -p "$folder"
  rm -f "$folder/trained"
  echo "$note" >"$folder/settings"
  step "$1: training" on_ranks train --config "$CONFIG" --set input.tokens="$OUT/train.h5" \
    --set output.directory="$folder" --set output.if_exists=$if_exists --set attention.bands="$bands" \
    --set attention.landmark_bias="$bias" --set train.steps="$STEPS" --set train.warmup_steps=$(((STEPS + 9) / 10)) \
    --set train.sequence_tokens="$SEQUENCE" "${more_settings[@]}"
  touch "$folder/trained"
}

evaluate() {
  local folder=$OUT/$1 if_exists=resume
  [[ $folder/model/model.safetensors -nt $folder/evaluation/log.jsonl ]] && if_exists=replace
  step "$1: scoring" on_ranks infer --set model.path="$folder/model" --set input.tokens="$OUT/held_out.h5" \
    --set 'tasks=[score]' --set attention.bands="$bands" --set output.directory="$folder/evaluation" \
    --set output.if_exists=$if_exists
}

[[ -x $LONGHALO ]] || die "there is no $LONGHALO; build it: cmake --preset release && cmake --build build/release"
for variant in $VARIANTS; do attention_of "$variant"; done
mkdir -p "$OUT"
if [[ $CORPUS == *.tar.* ]]; then
  mkdir -p "$OUT/corpus"
  [[ -d $OUT/corpus/train ]] || step "unpacking $CORPUS" tar -xf "$CORPUS" -C "$OUT/corpus"
  CORPUS=$OUT/corpus
fi
[[ -d $CORPUS/train ]] || step "fetching the text" "$PYTHON" scripts/small_model/make_corpus.py "$CORPUS"
corpus_sum=$(cat "$CORPUS"/{train,held_out}/*.txt | sha256sum | cut -c 1-16)
tokens_of "$OUT/train.h5" "corpus $corpus_sum" "$CORPUS"/train/*.txt
"$PYTHON" scripts/small_model/evaluate.py cut --bytes "$EVALUATE" --output "$OUT/held_out" "$CORPUS"/held_out/*.txt
tokens_of "$OUT/held_out.h5" "corpus $corpus_sum, $EVALUATE bytes" "$OUT"/held_out/*.txt

# The cores are shared out among the ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES > RANKS ? CORES / RANKS : 1))}
measured=()
for variant in $VARIANTS; do
  attention_of "$variant"
  train "$variant"
  evaluate "$variant"
  measured+=("$variant=$OUT/$variant/evaluation")
done
"$PYTHON" scripts/small_model/evaluate.py table --trained "$SEQUENCE" --json "$OUT/evaluation.json" "${measured[@]}" |
  tee "$OUT/tables.md"
