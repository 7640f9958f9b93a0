# shellcheck shell=bash disable=SC2034
# Shared by the scripts of this folder, which source it: `. "$(dirname "$0")/common.sh"`.
# It moves to the repository's root, stops at the first failing command, and defines
#   say TEXT              one line about what happens
#   die TEXT              message on stderr, exit 1
#   step TEXT COMMAND...  says TEXT, runs COMMAND, says how long it took; ends the script if COMMAND fails
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SCRIPT_NAME=$(basename "$0" .sh)
CORES=$(nproc)
PYTHON=.venv/bin/python

say() { printf '%s: %s\n' "$SCRIPT_NAME" "$*"; }

die() {
  printf '%s: %s\n' "$SCRIPT_NAME" "$*" >&2
  exit 1
}

step() {
  local text=$1 started=$SECONDS status=0
  shift
  say "$text"
  "$@" || status=$?
  if ((status != 0)); then
    printf '%s: failed after %d s with exit code %d: %s\n' "$SCRIPT_NAME" $((SECONDS - started)) "$status" "$*" >&2
    exit "$status"
  fi
  say "done in $((SECONDS - started)) s"
}

# Compilations that were done before come from ccache where it is installed; nothing needs it.
if [[ -z ${CMAKE_CXX_COMPILER_LAUNCHER:-} ]] && command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi

# Open MPI refuses to run as root unless told twice that this is meant; in a container it is.
if ((EUID == 0)); then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
