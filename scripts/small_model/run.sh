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

Fetches free manuals (scripts/small_model/make_corpus.py), trains a small model with each attention of VARIANTS, first
on short sequences (configs/train_small.yaml), then on long ones (configs/train_small_long.yaml), scores books that were
not trained on, each up to EVALUATE bytes, and prints a table. Stopped or killed, it goes on where it was when called
again with the same settings. What is wanted is taken from the environment:

  SHORT_STEPS     steps with short sequences (4000)     STEPS     steps with long sequences (400)
  SHORT_SEQUENCE  bytes of a short sequence (16384)     SEQUENCE  bytes of a long sequence (131072)
  RANKS           MPI ranks (1)                         DEVICE    auto, cpu, cuda (auto)
  VARIANTS        of window landmarks_from_0 landmarks pyramid dense (all of them, in this order)
  WINDOW          bytes that are seen exactly, but in dense (1024)
  EVALUATE        bytes of a held-out book that are read (8 x SEQUENCE)
  RESULTS         folder (results/small_model)          CORPUS    corpus folder, or its .tar.xz (RESULTS/corpus)
  LONGHALO        executable (build/release/longhalo)   PYTHON    with numpy and h5py (.venv/bin/python)
  SETTINGS        more settings of every training, e.g. "--set train.log_every=1"
  SHORT_SETTINGS  more settings of the first one, e.g. "--set train.learning_rate=0.001"

On one H200: scripts/small_model/run.sh. On two CPU cores, a few minutes to see that it all works:
  SHORT_STEPS=3 SHORT_SEQUENCE=1024 STEPS=3 SEQUENCE=2048 RANKS=2 RESULTS=/tmp/small_model scripts/small_model/run.sh
RESULTS then holds tables.md, evaluation.json and for each variant the second training run (metrics.jsonl, model/), the
first (short/) and the scores (evaluation/). scripts/small_model/pack.py makes of one of them a model to be shipped.
END
    exit 0 ;;
esac

SHORT_STEPS=${SHORT_STEPS:-4000}
SHORT_SEQUENCE=${SHORT_SEQUENCE:-16384}
STEPS=${STEPS:-400}
SEQUENCE=${SEQUENCE:-131072}
RANKS=${RANKS:-1}
DEVICE=${DEVICE:-auto}
WINDOW=${WINDOW:-1024}
VARIANTS=${VARIANTS:-window landmarks_from_0 landmarks pyramid dense}
EVALUATE=${EVALUATE:-$((8 * SEQUENCE))}
RESULTS=${RESULTS:-results/small_model}
CORPUS=${CORPUS:-$RESULTS/corpus}
LONGHALO=${LONGHALO:-build/release/longhalo}
SETTINGS=${SETTINGS:-}
SHORT_SETTINGS=${SHORT_SETTINGS:-}
TOKENIZER=data/byte_tokenizer

# The variants differ in nothing but this.
attention_of() {
  case $1 in
    window) bands="[[1, 0, $WINDOW]]" bias=-3 ;;
    landmarks_from_0) bands="[[1, 0, $WINDOW], [64, $WINDOW, inf]]" bias=0 ;;
    landmarks) bands="[[1, 0, $WINDOW], [64, $WINDOW, inf]]" bias=-3 ;;
    pyramid) bands="[[1, 0, $WINDOW], [16, $WINDOW, 8192], [128, 8192, inf]]" bias=-3 ;;
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

# train WHAT FOLDER NOTE CONFIG STEPS SEQUENCE SETTINGS...: goes on with what the same settings, which the note tells,
# began in the folder; what other settings made is replaced.
train() {
  local what=$1 folder=$2 note=$3 config=$4 steps=$5 sequence=$6 if_exists=replace
  if [[ $(cat "$folder/settings" 2>/dev/null) == "$note" ]]; then
    if_exists=resume
    if [[ -e $folder/trained ]]; then
      say "$what: trained already"
      return
    fi
  fi
  mkdir -p "$folder"
  rm -f "$folder/trained"
  echo "$note" >"$folder/settings"
  step "$what: $steps steps of $sequence bytes" on_ranks train --config "$config" \
    --set input.tokens="$RESULTS/train.h5" --set output.directory="$folder" --set output.if_exists=$if_exists \
    --set attention.bands="$bands" --set train.steps="$steps" --set train.warmup_steps=$((steps / 15 + 1)) \
    --set train.sequence_tokens="$sequence" "${@:7}"
  touch "$folder/trained"
}

train_variant() {
  local folder=$RESULTS/$1 more
  local note="corpus $corpus_sum, bands $bands, $SHORT_STEPS steps of $SHORT_SEQUENCE $SHORT_SETTINGS $SETTINGS"
  read -ra more <<<"$SETTINGS $SHORT_SETTINGS"
  train "$1, short" "$folder/short" "$note" configs/train_small.yaml "$SHORT_STEPS" "$SHORT_SEQUENCE" \
    --set attention.landmark_bias="$bias" "${more[@]}"
  read -ra more <<<"$SETTINGS"
  train "$1, long" "$folder" "$note, then $STEPS of $SEQUENCE" configs/train_small_long.yaml "$STEPS" "$SEQUENCE" \
    --set model.path="$folder/short/model" "${more[@]}"
}

evaluate() {
  local folder=$RESULTS/$1 if_exists=resume
  [[ $folder/model/model.safetensors -nt $folder/evaluation/log.jsonl ]] && if_exists=replace
  step "$1: scoring" on_ranks infer --set model.path="$folder/model" --set input.tokens="$RESULTS/held_out.h5" \
    --set 'tasks=[score]' --set attention.bands="$bands" --set output.directory="$folder/evaluation" \
    --set output.if_exists=$if_exists
}

[[ -x $LONGHALO ]] || die "there is no $LONGHALO; build it: cmake --preset release && cmake --build build/release"
for variant in $VARIANTS; do attention_of "$variant"; done
mkdir -p "$RESULTS"
if [[ $CORPUS == *.tar.* ]]; then
  mkdir -p "$RESULTS/corpus"
  [[ -d $RESULTS/corpus/train ]] || step "unpacking $CORPUS" tar -xf "$CORPUS" -C "$RESULTS/corpus"
  CORPUS=$RESULTS/corpus
fi
[[ -d $CORPUS/train ]] || step "fetching the text" "$PYTHON" scripts/small_model/make_corpus.py "$CORPUS"
corpus_sum=$(cat "$CORPUS"/{train,held_out}/*.txt | sha256sum | cut -c 1-16)
tokens_of "$RESULTS/train.h5" "corpus $corpus_sum" "$CORPUS"/train/*.txt
"$PYTHON" scripts/small_model/evaluate.py cut --bytes "$EVALUATE" --output "$RESULTS/held_out" "$CORPUS"/held_out/*.txt
tokens_of "$RESULTS/held_out.h5" "corpus $corpus_sum, $EVALUATE bytes" "$RESULTS"/held_out/*.txt

# The cores are shared out among the ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES > RANKS ? CORES / RANKS : 1))}
measured=()
for variant in $VARIANTS; do
  attention_of "$variant"
  train_variant "$variant"
  evaluate "$variant"
  measured+=("$variant=$RESULTS/$variant/evaluation")
done
"$PYTHON" scripts/small_model/evaluate.py table --trained "$SEQUENCE" --json "$RESULTS/evaluation.json" \
  "${measured[@]}" | tee "$RESULTS/tables.md"
