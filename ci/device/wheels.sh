#!/usr/bin/env bash
# Collect the wheels that ci/device/cuda.sh installs where there is no network, for Python 3.12 on
# Linux x86-64: run this with the network, and carry the folder ci/device/wheels along.
set -euo pipefail
cd "$(dirname "$0")"

fetch=("${PYTHON:-python3}" -m pip download --quiet --dest wheels --only-binary=:all:
  --python-version 3.12 --implementation cp)
for minor in 39 38 37 36 35 34 33 32 31 30 29 28 27 26 24 17 12 5; do
  fetch+=(--platform "manylinux_2_${minor}_x86_64")
done
fetch+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

rm -rf wheels
"${fetch[@]}" --no-deps --requirement requirements.txt
# With its requirements: it goes with one version of its core only.
"${fetch[@]}" 'pydantic>=2.8'
du -sh wheels
