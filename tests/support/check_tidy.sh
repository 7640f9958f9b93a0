#!/bin/bash
# check_tidy.sh BUILD_DIR [FILE...]: clang-tidy with .clang-tidy over the sources of src and kernels that BUILD_DIR
# compiles (compile_commands.json), one process a core; FILEs narrow it down. Exit code 77: skipped, with the reason.
set -euo pipefail
build=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."

skip() {
  echo "skipped: $*"
  exit 77
}
command -v clang-tidy-14 >/dev/null || skip "clang-tidy-14 is not installed; scripts/setup.sh installs it"
# The folder in front holds a <source_location> that clang 14 can read.
shim=(--extra-arg-before=-isystem"$PWD/tests/support/tidy")
problem=$(clang-tidy-14 --quiet --checks='-*,misc-unused-using-decls' "${shim[@]}" tests/support/tidy/probe.cpp -- \
  -std=c++20 2>&1) || skip "clang 14 cannot read this system's C++ library: $(grep -m1 'error:' <<<"$problem")"

if (($# > 0)); then
  files=("$@")
else
  mapfile -t files < <(sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' "$build/compile_commands.json" |
    grep -E "^$PWD/(src|kernels)/.*\.cpp$" | sort -u)
fi
((${#files[@]} > 0)) || { echo "$build/compile_commands.json names no sources of $PWD: this check is broken"; exit 1; }

# One file: silent when clean. Options that only g++ knows are no fault of the file.
check_file() {
  local file=$1 report
  shift
  report=$(clang-tidy-14 --quiet --extra-arg=-Wno-unknown-warning-option "$@" "$file" 2>&1) && return
  grep -vE '^[0-9]+ warnings? (generated|treated as error)' <<<"$report"
  return 1
}
export -f check_file
printf '%s\0' "${files[@]}" |
  xargs -0 -P "$(nproc)" -I{} bash -c 'check_file "$@"' check_file {} -p "$build" "${shim[@]}"
echo "${#files[@]} files are clean"
