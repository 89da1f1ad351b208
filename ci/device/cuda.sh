#!/usr/bin/env bash
# Judge and measure the cuda backend on one GPU, in under 8 minutes and without a network:
# `ci/device/cuda.sh RESULTS`, where torch, triton and the packages that requirements.txt names are
# installed and ci/device/wheels.sh has put the others beside this script. With `--dry`, tiny
# shapes on the host: what can be tried without a GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [[ " $* " != *" --dry "* ]] && compgen -G 'ci/device/wheels/*.whl' >/dev/null; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" ci/device/wheels/*.whl
fi
export PYTHONPATH="$PWD/core:$PWD/backends/torch:$PWD/backends/cuda:$site${PYTHONPATH:+:$PYTHONPATH}"
# Many processes of the kit run side by side.
export OMP_NUM_THREADS=2
python3 ci/device/parts.py "$@"
