#!/bin/bash
# Installs what LongHalo needs to be built and tested on Debian 12 or Ubuntu 24.04, and makes .venv.
# `scripts/setup.sh --help` says more. Running it again when nothing is missing takes a second.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/common.sh"

usage() {
  cat <<'END'
Usage: scripts/setup.sh [--no-packages] [--fuzz] [--help]

Installs the Debian packages LongHalo is built on, where they are missing, and makes the Python environment
.venv with the packages of scripts/requirements.txt (model conversion and test references).
Run it as root, as a user who may use sudo, or through sudo. It says what it does and can run any number of times.

slurm-wlm and munge are for tests/slurm, which starts daemons of its own; as services they are not configured here.

  --no-packages  leave the system alone: only check for the packages, and make .venv
                 (for machines where somebody else installs software)
  --fuzz         also clang 14 with its sanitizers, for scripts/fuzz.sh; no build or test needs it
END
}

# What the build and the tests stand on. HDF5 is the serial flavour: the MPI one is not thread-safe.
PACKAGES=(
  build-essential cmake git ninja-build pkg-config python3-venv
  libopenmpi-dev openmpi-bin libhdf5-dev libcli11-dev libyaml-cpp-dev nlohmann-json3-dev
  libopenblas-openmp-dev libpcre2-dev libutf8proc-dev libsentencepiece-dev libgtest-dev
)
# What some tests use: of style, of jobs under Slurm and on several hosts. Where a release does not offer them, those say so and
# are skipped.
OPTIONAL_PACKAGES=(clang-format-14 clang-tidy-14 iproute2)
# A machine that has a Slurm of its own keeps it.
command -v srun >/dev/null || OPTIONAL_PACKAGES+=(slurm-wlm munge)

install_packages=yes
for argument in "$@"; do
  case $argument in
    --help | -h) usage; exit 0 ;;
    --no-packages) install_packages=no ;;
    --fuzz) OPTIONAL_PACKAGES+=(clang-14 libclang-rt-14-dev) ;;
    *) usage >&2; die "unknown option '$argument'" ;;
  esac
done

missing_packages() {  # of the names given, those that dpkg does not have installed
  local installed name
  installed=$(dpkg-query --show --showformat='${binary:Package} ${db:Status-Abbrev}\n' "$@" 2>/dev/null |
    sed -n 's/^\([^: ]*\)\(:[^ ]*\)\? ii.*/\1/p' || true)
  for name in "$@"; do
    grep -qxF "$name" <<<"$installed" || echo "$name"
  done
}

as_root() {
  if ((EUID == 0)); then
    "$@"
  else
    sudo -- "$@"
  fi
}

# Through sudo, .venv is made by and for the user who called, not root.
as_owner() {
  if ((EUID == 0)) && [[ -n ${SUDO_USER:-} && $SUDO_USER != root ]]; then
    sudo --preserve-env --set-home --user="$SUDO_USER" -- "$@"
  else
    "$@"
  fi
}

apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends "$@"
}

# True where the package index, empty on a fresh machine, knows the package.
offered() { apt-cache show --no-all-versions "$1" >/dev/null 2>&1; }

may_install() { ((EUID == 0)) || command -v sudo >/dev/null; }

ensure_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    die "this is not Debian or Ubuntu. Install the counterparts of: ${PACKAGES[*]} (CMake 3.23 or later," \
      "g++ 12 or later, serial HDF5), then run scripts/setup.sh --no-packages."
  fi
  local wanted optional name
  mapfile -t wanted < <(missing_packages "${PACKAGES[@]}")
  mapfile -t optional < <(missing_packages "${OPTIONAL_PACKAGES[@]}")
  if ((${#wanted[@]} > 0)) && ! may_install; then
    die "these packages are missing and there is no sudo here: ${wanted[*]}. Run this script as root, or ask" \
      "an administrator to run: apt-get install ${wanted[*]} ${optional[*]}"
  fi
  if may_install && { ((${#wanted[@]} > 0)) || { ((${#optional[@]} > 0)) && ! offered build-essential; }; }; then
    step "updating the package index" as_root apt-get update --quiet=2
  fi
  for name in "${optional[@]}"; do
    if may_install && offered "$name"; then
      wanted+=("$name")
    else
      say "$name cannot be had here: what uses it cannot be run, and tests of it are skipped"
    fi
  done
  if ((${#wanted[@]} > 0)); then
    step "installing ${wanted[*]}" apt_install "${wanted[@]}"
  else
    say "all Debian packages are installed"
  fi
}

check_packages() {
  command -v dpkg-query >/dev/null || return 0
  local missing
  mapfile -t missing < <(missing_packages "${PACKAGES[@]}")
  if ((${#missing[@]} > 0)); then
    say "not installed as Debian packages, the build needs them from elsewhere: ${missing[*]}"
  fi
}

# .venv is up to date when it runs and holds what the requirements file of today says.
ensure_python() {
  local stamp=.venv/installed-requirements.txt system=/usr/bin/python3
  if cmp -s scripts/requirements.txt "$stamp" && "$PYTHON" -c '' 2>/dev/null; then
    say ".venv is up to date"
    return
  fi
  [[ -x $system ]] || system=python3
  $system -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    die "$system is missing or older than Python 3.11, which the pinned packages need"
  step "making .venv with $($system --version)" as_owner "$system" -m venv --clear .venv
  step "installing $(grep -c '==' scripts/requirements.txt) Python packages in .venv" \
    as_owner "$PYTHON" -m pip install --quiet --disable-pip-version-check --requirement scripts/requirements.txt
  as_owner cp scripts/requirements.txt "$stamp"
}

if [[ $install_packages == yes ]]; then
  ensure_packages
else
  check_packages
fi
ensure_python
