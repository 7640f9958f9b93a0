#!/bin/bash
# Fuzzes the readers of files that come from elsewhere. `scripts/fuzz.sh --help` says more.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

usage() {
  cat <<'END'
Usage: scripts/fuzz.sh [SECONDS [READER...]]

Builds build/fuzz with clang and lets libFuzzer try each reader of tests/fuzz/targets.cpp, or those named, for SECONDS
(600), starting from tests/fuzz/corpus and from what earlier runs found (build/fuzz/found). What breaks a reader is kept
as build/fuzz/crashes/READER/*; the exit code is then 1. Such a file goes into tests/fuzz/crashes/READER when the reader
is mended: corpus_test then reads it on every machine. A reader may take a minute, of which a busy machine may give it a part, and 2 GB for an input.
Needs clang 14 with its sanitizers: scripts/setup.sh --fuzz installs them.
END
}

case ${1:-} in
  --help | -h) usage; exit 0 ;;
esac
EACH_SECONDS=${1:-600}
[[ $EACH_SECONDS =~ ^[1-9][0-9]*$ ]] || { usage >&2; die "'$EACH_SECONDS' is no number of seconds"; }
command -v clang++-14 >/dev/null || die "there is no clang++-14; scripts/setup.sh --fuzz installs it"
step "configuring build/fuzz" cmake --preset fuzz --log-level=WARNING
step "building build/fuzz on $CORES cores" cmake --build build/fuzz --parallel "$CORES"
mapfile -t all < <(find build/fuzz/tests/fuzz -maxdepth 1 -name 'fuzz_*' -type f -executable -printf '%f\n' |
  sed 's/^fuzz_//' | sort)
readers=("${@:2}")
((${#readers[@]} > 0)) || readers=("${all[@]}")

broken=()
for reader in "${readers[@]}"; do
  fuzzer=build/fuzz/tests/fuzz/fuzz_$reader
  [[ -x $fuzzer ]] || die "there is no reader '$reader'; there are: ${all[*]}"
  found=build/fuzz/found/$reader crashes=build/fuzz/crashes/$reader
  mkdir -p "$found" "$crashes"
  say "$reader for $EACH_SECONDS s; its words are in $crashes.log"
  # Leaks are not looked for: libraries keep what they have read when a file is refused.
  if ! ASAN_OPTIONS=detect_leaks=0 "$fuzzer" -max_total_time="$EACH_SECONDS" -timeout=60 -rss_limit_mb=4000 \
    -malloc_limit_mb=2000 -max_len=20000 -print_final_stats=1 -artifact_prefix="$crashes/" \
    "$found" "tests/fuzz/corpus/$reader" >"$crashes.log" 2>&1; then
    broken+=("$reader")
    grep -m1 SUMMARY "$crashes.log" || true
  fi
  say "$reader: $(sed -n 's/^stat::number_of_executed_units: *//p' "$crashes.log") inputs"
done
((${#broken[@]} == 0)) || die "broken: ${broken[*]}; build/fuzz/crashes has the inputs"
say "no reader was broken"
