#!/usr/bin/env bash
# Makes .venv in this folder and installs the project and its dependencies into it.
#
#   bash setup.sh                      the device is detected: tpu, gpu or cpu
#   bash setup.sh DEVICE=gpu           or is named; the environment variable DEVICE does the same
#   PYTHON=python3.12 bash setup.sh    another Python than the newest on the PATH
#
# Needs Python 3.12 to 3.14, which get jax 0.12, or 3.11, which gets jax 0.10; with pip or venv, and
# no root. A second run finds nothing to do and ends at once; to start over, remove .venv.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

refuse() {
  printf 'setup.sh: %s\n' "$@" >&2
  exit 2
}

for argument in "$@"; do
  case $argument in
    DEVICE=*) DEVICE=${argument#*=} ;;
    PYTHON=*) PYTHON=${argument#*=} ;;
    *) refuse "unknown argument '$argument'; known: DEVICE=cpu|tpu|gpu, PYTHON=..." ;;
  esac
done

# --- Device ---------------------------------------------------------------------------------------

has_tpu() {
  local file vendor chip
  # Google is also the vendor of virtual network cards and disks, so the chip's number decides:
  # v2 and v3, v4, v5p, v5e, v6e, v7x.
  for file in /sys/bus/pci/devices/*/vendor; do
    read -r vendor 2>/dev/null <"$file" || continue
    [ "$vendor" = 0x1ae0 ] || continue
    read -r chip 2>/dev/null <"${file%vendor}device" || continue
    case $chip in 0x0027 | 0x005e | 0x0062 | 0x0063 | 0x006f | 0x0076) return 0 ;; esac
  done
  # For containers that hide the bus. With a digit: the folder /dev/accel belongs to other chips.
  compgen -G '/dev/accel[0-9]*' >/dev/null && return 0
  [ -e /dev/vfio ] && [ -n "${TPU_NAME:-}${TPU_WORKER_ID:-}${TPU_ACCELERATOR_TYPE:-}" ]
}

has_gpu() {
  [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}

origin=named
if [ -z "${DEVICE:-}" ]; then
  origin=detected
  if has_tpu; then DEVICE=tpu; elif has_gpu; then DEVICE=gpu; else DEVICE=cpu; fi
fi
packages=(-c constraints.txt -e '.[test]')
case $DEVICE in
  cpu) ;;
  tpu | gpu) packages+=(-r "requirements_$DEVICE.txt") ;;
  *) refuse "DEVICE=$DEVICE is none of cpu, tpu, gpu" ;;
esac

# --- Python ---------------------------------------------------------------------------------------

python_version() {
  "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null
}

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

candidates=(python3.14 python3.13 python3.12 python3 python3.11)
if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
python=
for candidate in "${candidates[@]}"; do
  if is_new_enough "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  named=${PYTHON:-python3}
  found=$(python_version "$named") || found='does not run'
  refuse "needs Python 3.11 or newer; $named: $found" \
    'install one (sudo apt-get install python3.12 python3.12-venv, or uv python install 3.13)' \
    'and name it: PYTHON=python3.12 bash setup.sh'
fi
version=$(python_version "$python")

# --- Is there anything to do? ---------------------------------------------------------------------

# A virtual environment cannot be moved, hence the folder.
state="$PWD $DEVICE $version"
state+=" $(cat setup.sh pyproject.toml constraints.txt requirements_*.txt | cksum)"
if [ "$(cat .venv/.set-up 2>/dev/null)" = "$state" ] && .venv/bin/python -c '' 2>/dev/null; then
  echo "Nothing to do: .venv has Python $version and the packages for DEVICE=$DEVICE ($origin)."
  exit 0
fi

# --- Stages ---------------------------------------------------------------------------------------

log=$(mktemp "${TMPDIR:-/tmp}/setup.XXXXXX")
clock=

stop_clock() {
  [ -z "$clock" ] || kill "$clock" 2>/dev/null || true
  clock=
}
trap stop_clock EXIT

# stage LABEL COMMAND...: runs the command with its output in the log, prints the seconds it took.
stage() {
  local label=$1 start=$SECONDS status=0
  shift
  printf '  %-44s ' "$label"
  if [ -t 1 ]; then
    while sleep 1; do printf '\r  %-44s %4d s' "$label" $((SECONDS - start)); done &
    clock=$!
  fi
  "$@" >"$log" 2>&1 </dev/null || status=$?
  stop_clock
  if [ "$status" -ne 0 ]; then
    printf ' failed\n\n'
    tail -n 30 "$log"
    printf '\nsetup.sh: stopped at "%s"; everything it printed: %s\n' "$label" "$log" >&2
    exit 1
  fi
  if [ -t 1 ]; then printf '\r  %-44s ' "$label"; fi
  printf '%4d s\n' $((SECONDS - start))
}

make_environment() {
  if [ "$(python_version .venv/bin/python)" != "$version" ] ||
    ! grep -qF -- "$PWD/.venv" .venv/bin/activate; then
    "$python" -m venv --clear --without-pip .venv || return
  fi
  rm -f .venv/.set-up
  .venv/bin/python -m pip --version && return
  # The pip outside brings the newest pip, which is twice as fast as the one Debian's venv would
  # put there; and Debian's python3 has no ensurepip at all without the package python3-venv.
  "$python" -m pip --python .venv/bin/python install pip && return
  .venv/bin/python -m ensurepip && .venv/bin/python -m pip install --upgrade pip && return
  echo "$python has neither pip 22.3 or newer nor ensurepip. On Debian, as root:"
  echo '  apt-get install python3-pip python3-venv'
  return 1
}

# Compiling all 5,300 files to bytecode doubles the time this takes; a run imports 1,200 of them,
# and the next stage compiles those.
install_packages() {
  .venv/bin/python -m pip install --no-compile --progress-bar off "${packages[@]}"
}

import_packages() {
  env -u PYTHONDONTWRITEBYTECODE JAX_PLATFORMS=cpu .venv/bin/python - <<'PROGRAM'
import flax.nnx, grain, jax, jinja2, matplotlib.figure, optax, orbax.checkpoint, pydantic, pytest
import tensorboardX, tiktoken, tokenizers, yaml

import MaxText.config.loading

jax.jit(lambda x: x + 1)(1).block_until_ready()
print(f"jax {jax.__version__}")
PROGRAM
}

# A pip configured to install for the user refuses to install into a virtual environment.
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

echo "Python $version, DEVICE=$DEVICE ($origin)"
case $version in
  3.11.*)
    echo 'Python 3.11 gets jax 0.10, the last one for it, and no newer compilers for TPU and GPU.'
    echo 'Python 3.12 to 3.14 get jax 0.12: PYTHON=python3.13 bash setup.sh'
    ;;
esac
stage 'virtual environment .venv' make_environment
stage "packages" install_packages
stage 'first import' import_packages
jax=$(tail -n 1 "$log")
echo "$state" >.venv/.set-up
rm -f "$log"
echo "Ready in $SECONDS s: $jax. Next: .venv/bin/python MaxText/train.py configs/quickstart.yml"
