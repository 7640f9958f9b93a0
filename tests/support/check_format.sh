#!/bin/bash
# check_format.sh: every C++ and CUDA source against .clang-format. Exit code 77: skipped, with the reason.
# To repair what it names:  git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs clang-format-14 -i
set -euo pipefail
cd "$(dirname "$0")/../.."

if ! command -v clang-format-14 >/dev/null; then
  echo "skipped: clang-format-14 is not installed (other versions format differently); scripts/setup.sh installs it"
  exit 77
fi
mapfile -t files < <(find src kernels tests -type f \
  \( -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' \) | sort)
((${#files[@]} > 0)) || { echo "found no sources under $PWD: this check is broken"; exit 1; }
clang-format-14 --dry-run --Werror "${files[@]}"
echo "${#files[@]} files are formatted"
