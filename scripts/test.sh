#!/usr/bin/env bash
# Installs what the tests need, builds the CPU back end (and the CUDA objects where a CUDA toolkit can be had), and runs every test
# that needs no GPU.  Ends with ctest's summary.
#
#     scripts/test.sh                # all tests
#     scripts/test.sh --sanitize     # the same tests under the address and undefined-behaviour sanitizers, CPU only
#     scripts/test.sh -R Golden      # further arguments go to ctest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
show_help "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/packages.sh
source scripts/cuda_toolkit.sh

preset=test
if [[ ${1:-} == --sanitize ]]; then
  preset=sanitize
  shift
fi
say() { printf '\n== %s\n' "$*"; }

say "packages"
install_packages "${kestrel_build_packages[@]}" "${kestrel_optional_packages[@]}" "${kestrel_text_packages[@]}" "${kestrel_test_packages[@]}"
venv=build/venv
if ! [[ -e $venv/ready ]]; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet 'tokenizers>=0.20' 'jsonschema>=4' nvidia-cudnn-frontend
  touch "$venv/ready"
fi

if [[ $preset == test ]]; then
  find_cuda_toolkit "$venv" build/cuda || echo "no CUDA toolkit can be had: building the CPU back end only" >&2
fi

# As many jobs as the machine has processors (nproc would obey OMP_NUM_THREADS); the tests compute with one thread each.
jobs=$(env -u OMP_NUM_THREADS nproc)
export OMP_NUM_THREADS=1
# mpirun as root, with more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

say "build ($preset)"
cmake --preset "$preset"
if [[ $preset == test ]] && command -v nvcc >/dev/null; then
  cmake -B "build/$preset" -DKESTREL_CUDA=ON >/dev/null  # a toolkit that does not work is an error, not a smaller build
fi
cmake --build "build/$preset" -j "$jobs"

say "tests"
exec ctest --test-dir "build/$preset" -j "$jobs" --output-on-failure "$@"
