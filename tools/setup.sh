#!/usr/bin/env bash
# Makes .venv, or completes it: Debian packages, torch, the pinned Python packages, the project itself in place with its native code.
# Run by `make setup`. Safe to interrupt and to repeat; does nothing when nothing changed. Why it is as it is: docs/decisions/002-setup.md.
#
#   PYTHON         the interpreter that makes .venv (python3)
#   TORCH_SPEC     the torch to install instead of the default rule, as pip writes it: torch==2.14.1, or the path of a wheel
#   TORCH_INDEX    the package index to take torch from
#   SETUP_DRY_RUN  1: look and say what would be done, change nothing
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH_SPEC=${TORCH_SPEC:-}
TORCH_INDEX=${TORCH_INDEX:-}
TORCH_VERSION=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=.venv
STAMP=$VENV/.perilune-setup # lines: digest of all inputs, digest of the Python packages' inputs, torch asked for, native files built

# Sizes in MB, measured with torch 2.13.0 on Linux: what is downloaded, and what it takes once installed.
TORCH_CPU_DOWNLOAD=192 TORCH_CPU_DISK=790
TORCH_CUDA_DOWNLOAD=2730 TORCH_CUDA_DISK=4790
sizes=$(sed -n 's/^# sizes: \([0-9]*\) MB to download, \([0-9]*\) MB installed$/\1 \2/p' constraints.txt)
read -r PACKAGES_DOWNLOAD PACKAGES_DISK <<<"${sizes:-100 600}"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}
run() {
  if [ -n "${SETUP_DRY_RUN:-}" ]; then printf 'would run: %s\n' "$*"; else "$@"; fi
}
pip() { run "$VENV/bin/python" -m pip "$@"; }
has() { command -v "$1" >/dev/null 2>&1; }

digest() { sha256sum | cut -d ' ' -f 1; }
package_inputs() {
  cat pyproject.toml constraints.txt
  readlink -f $VENV/bin/python || true
  cat $VENV/pyvenv.cfg 2>/dev/null || true
  pwd # an editable installation names its directory
}
all_inputs() {
  package_inputs
  cat setup.py tools/setup.sh tools/debian-packages.txt
  find csrc -type f -print0 | LC_ALL=C sort -z | xargs -0 -r sha256sum
  printf '%s\n' "${CC:-}" "${CXX:-}" "${CFLAGS:-}" "${CXXFLAGS:-}" "${LDFLAGS:-}"
  for compiler in "${CC:-cc}" "${CXX:-c++}" gcc clang; do command -v "${compiler%% *}" || true; done
}
native_files() { find perilune/native -maxdepth 1 -type f ! -name '*.py' | LC_ALL=C sort; }

read_stamp() {
  old_all='' old_packages='' old_torch='' old_native=()
  [ -f $STAMP ] || return 0
  { read -r old_all && read -r old_packages && read -r old_torch && mapfile -t old_native; } <$STAMP || true
}
up_to_date() {
  [ -x $VENV/bin/python ] && [ "$old_all" = "$(all_inputs | digest)" ] || return 1
  [ -z "$torch_request" ] || [ "$old_torch" = "$torch_request" ] || return 1
  local file
  for file in "${old_native[@]}"; do [ -e "$file" ] || return 1; done
}

check_python() { # the interpreter that will run everything: .venv's if there is one that starts, else $PYTHON
  venv_works='' interpreter=$PYTHON
  if [ -x $VENV/bin/python ] && $VENV/bin/python -c '' 2>/dev/null; then
    venv_works=yes interpreter=$VENV/bin/python
  elif ! has "$PYTHON"; then
    fail "there is no $PYTHON on PATH; install Python 3.11 or newer (apt-get install python3) or name one: make setup PYTHON=/path/to/python3"
  fi
  if ! "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    version=$("$interpreter" -c 'import sys; print(sys.version.split()[0])')
    fail "Perilune needs Python 3.11 or newer and $interpreter is $version; name a newer one: ${venv_works:+rm -r $VENV && }make setup PYTHON=python3.11"
  fi
}

# Prints the version of the torch in .venv; nothing unless it is whole and lies in pyproject's range.
usable_torch() {
  [ -n "$venv_works" ] || return 0
  $VENV/bin/python - 2>/dev/null <<'PYTHON' || true
import re
import sys
import tomllib
from importlib.metadata import distribution

from pip._vendor.packaging.specifiers import SpecifierSet

with open("pyproject.toml", "rb") as file:
    dependencies = tomllib.load(file)["project"]["dependencies"]
wanted = next(match[1] for match in (re.fullmatch(r"torch\b(.*)", dependency) for dependency in dependencies) if match)
torch = distribution("torch")
whole = torch.read_text("INSTALLER") is not None or not str(torch.locate_file("")).startswith(sys.prefix)
if whole and SpecifierSet(wanted).contains(torch.version, prereleases=True):
    print(torch.version)
PYTHON
}

plan() { # what is to be downloaded, said before anything is changed
  read_stamp
  same_packages='' torch_plan=keep
  if [ -n "$venv_works" ] && [ "$old_packages" = "$(package_inputs | digest)" ]; then same_packages=yes; fi
  if [ -n "$torch_request" ] && [ "$torch_request" != "$old_torch" ]; then
    torch_plan=requested
  elif [ -z "$same_packages" ]; then
    torch_installed=$(usable_torch)
    if [ -n "$torch_installed" ]; then
      say "keeping torch $torch_installed, which is in $VENV already"
    elif has nvidia-smi && nvidia-smi -L >/dev/null 2>&1; then
      torch_plan=cuda
    else
      torch_plan=cpu
    fi
  fi
  local download=$PACKAGES_DOWNLOAD disk=$PACKAGES_DISK what="the pinned packages"
  [ -z "$same_packages" ] || { download=0 disk=0 what=; }
  case $torch_plan in
    cpu) download=$((download + TORCH_CPU_DOWNLOAD)) disk=$((disk + TORCH_CPU_DISK)) what="torch $TORCH_VERSION (CPU build)${what:+ and $what}" ;;
    cuda) download=$((download + TORCH_CUDA_DOWNLOAD)) disk=$((disk + TORCH_CUDA_DISK)) what="torch $TORCH_VERSION (CUDA build)${what:+ and $what}" ;;
    requested) # of unknown size: at least what a CPU build takes
      download=$((download + TORCH_CPU_DOWNLOAD)) disk=$((disk + TORCH_CPU_DISK))
      what="${TORCH_SPEC:-torch of TORCH_INDEX} (its size is a guess)${what:+ and $what}" ;;
  esac
  [ "$download" -gt 0 ] || return 0
  disk=$((disk + download)) # pip keeps the downloads
  say "up to $download MB to download and $disk MB of disk needed for $what"
  local free
  free=$(($(df -Pk . | tail -n 1 | tr -s ' ' | cut -d ' ' -f 4) / 1000))
  [ "$free" -ge "$disk" ] || fail "only $free MB are free on the disk of $PWD and $disk MB are needed; make room and run make setup again"
}

debian_packages() {
  if ! has dpkg-query || ! has apt-get; then
    say "this is no Debian system: see to the packages of tools/debian-packages.txt yourself; going on"
    return
  fi
  local package reason missing=()
  while read -r package reason; do
    case $package in '#'* | '') continue ;; esac
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed && continue
    missing+=("$package")
    say "the Debian package $package is missing: $reason"
  done <tools/debian-packages.txt
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    say "install them with: sudo apt-get install --no-install-recommends ${missing[*]}"
    return
  fi
  export DEBIAN_FRONTEND=noninteractive
  if ! { run apt-get update -qq && run apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 "${missing[@]}"; }; then
    say "apt-get failed, going on without: ${missing[*]}"
  fi
}

make_venv() {
  if [ -z "$venv_works" ]; then
    if [ -e $VENV ]; then say "$VENV does not run; making it anew"; fi
    run "$PYTHON" -m venv --clear $VENV || fail "$PYTHON cannot make a virtual environment; install what it lacks: apt-get install python3-venv"
  elif ! $VENV/bin/python -m pip --version >/dev/null 2>&1; then
    run $VENV/bin/python -m ensurepip --upgrade >/dev/null || fail "$VENV has no pip; install it there, or remove $VENV and run make setup again"
  fi
  # pip writes INSTALLER after a package's files: without it the installation was interrupted, and pip would believe it complete.
  local half
  for half in $VENV/lib/python3*/site-packages/*.dist-info; do
    if [ -d "$half" ] && [ ! -e "$half/INSTALLER" ]; then
      say "$(basename "$half" .dist-info) is half installed; it is installed again"
      run rm -r "$half"
    fi
  done
}

hushed() { # for a step whose complaints matter only when it fails: pip grumbles at a torch that has no dependencies yet
  local errors status=0
  errors=$(mktemp)
  "$@" 2>"$errors" || { status=$? && cat "$errors" >&2; }
  rm -f "$errors"
  return $status
}

install_build_tools() { # into .venv itself, so that building the project downloads nothing of its own
  [ -z "$same_packages" ] || return 0
  hushed pip install -q -c constraints.txt 'setuptools>=77' || fail "pip could not install setuptools (its words are above)"
}

# Always without dependencies: those come from constraints.txt, with torch held, and never from an index that has torch alone.
pip_torch() {
  case $torch_plan in
    requested) pip install --no-deps --force-reinstall ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH_SPEC:-torch==$TORCH_VERSION}" ;;
    cuda) pip install --no-deps "torch==$TORCH_VERSION" ;;
    cpu) # PyPI's own builds are for CUDA, on x86-64 and aarch64 alike, so the version must say +cpu
      pip install --no-deps "torch==$TORCH_VERSION+cpu" || {
        say "the configured index has no CPU build of torch $TORCH_VERSION; trying PyTorch's own"
        pip install --no-deps --index-url $CPU_INDEX "torch==$TORCH_VERSION"
      }
      ;;
  esac
}

install_torch() {
  hushed pip_torch || fail "torch could not be installed (${TORCH_SPEC:-torch==$TORCH_VERSION}); name another with TORCH_SPEC, or where to" \
    "get it with TORCH_INDEX: TORCH_SPEC=torch==2.14.1 TORCH_INDEX=https://... make setup"
}

install_packages() {
  if [ -n "$same_packages" ] && [ "$torch_plan" = keep ]; then # only our own code changed
    pip install -q --no-deps --no-build-isolation -e .
    return
  fi
  local held torch
  held=$(mktemp)
  torch=$($VENV/bin/python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || echo $TORCH_VERSION)
  echo "torch==$torch" >"$held" # no dependency may put another build in its place
  if ! pip install -q --no-build-isolation -c constraints.txt -c "$held" -e '.[dev]'; then
    rm -f "$held"
    fail "pip could not install the pinned packages beside torch $torch (its words are above); run make setup again when that is put right"
  fi
  rm -f "$held"
}

finish() {
  local reason
  reason=$($VENV/bin/python -c 'from perilune.native.library import load_library; print(load_library().reason or "")')
  [ -z "$reason" ] || say "warning: only portable code will run: $reason"
  {
    all_inputs | digest
    package_inputs | digest
    echo "${torch_request:-$old_torch}"
    native_files
  } >$STAMP.new
  mv $STAMP.new $STAMP
  say "ready"
}

if has flock; then # two at a time would spoil each other's work
  exec 9<tools/setup.sh
  flock 9
fi
torch_request=${TORCH_SPEC:+spec $TORCH_SPEC }${TORCH_INDEX:+index $TORCH_INDEX}
torch_request=${torch_request% }
read_stamp
if up_to_date; then exit 0; fi
check_python
plan
[ -n "${SETUP_DRY_RUN:-}" ] || rm -f $STAMP
debian_packages
make_venv
install_build_tools
[ "$torch_plan" = keep ] || install_torch
install_packages
[ -n "${SETUP_DRY_RUN:-}" ] || finish
