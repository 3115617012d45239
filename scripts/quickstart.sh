#!/usr/bin/env bash
# From a fresh clone to a trained model: installs what is missing, builds, prepares real text (the King James Bible), trains a
# tokenizer and a small K3 on the GPU (where there are one and nvcc) or on the CPU, compares it with gzip on the held-out text,
# and lets it write.
#
#     scripts/quickstart.sh                    # a few minutes on two cores, without a GPU
#     scripts/quickstart.sh train.steps=50     # any field of configs/quickstart.json can be overridden
#
# Stopped (Ctrl-C, SIGTERM) and started again, it goes on from the newest checkpoint; checkpoint.resume=never starts over.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
show_help "$@"
for argument in "$@"; do
  if [[ $argument != [a-z]*.?*=* ]]; then
    echo "quickstart: \"$argument\" is not an override such as train.steps=50; scripts/quickstart.sh --help tells more" >&2
    exit 2
  fi
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/packages.sh
source scripts/cuda_toolkit.sh

say() { printf '\n== %s\n' "$*"; }
data=runs/data/kjv
started=$SECONDS

say "packages"
install_packages "${kestrel_build_packages[@]}"
# The text is optional: prepare_kjv.sh has an excerpt to fall back on, and says so.
install_packages "${kestrel_text_packages[@]}" || echo "going on with the shipped excerpt"

# A GPU that works, and a compiler for it.
preset=cpu
if nvidia-smi -L 2>/dev/null | grep -q '^GPU' && find_nvcc; then preset=cuda; fi
say "build ($preset back end; log in build/quickstart.log)"
mkdir -p build
if ! { cmake --preset $preset -DKESTREL_TESTS=OFF -B build/quickstart && cmake --build build/quickstart --target kestrel; } >build/quickstart.log 2>&1; then
  tail -n 30 build/quickstart.log
  echo "the build failed: see build/quickstart.log" >&2
  exit 1
fi
kestrel=build/quickstart/kestrel
built=$SECONDS
run=$("$kestrel" config configs/quickstart.json "$@" | sed -n '/^  "log": {/,/^  }/ s/^    "dir": "\(.*\)",*$/\1/p')

say "text, tokenizer, token shards"
scripts/prepare_kjv.sh "$data/kjv.txt"
"$kestrel" tokenizer train --vocab-size 4096 --split-documents blank-line --out "$data/tokenizer.json" --force "$data/kjv.txt"
"$kestrel" data build --tokenizer "$data/tokenizer.json" --split-documents blank-line --validation-fraction 0.05 \
  --write-validation-text "$data/validation.txt" --out "$data" --force "$data/kjv.txt"
prepared=$SECONDS

say "training"
"$kestrel" train configs/quickstart.json "$@"
trained=$SECONDS

say "result"
metrics=$run/metrics.jsonl
# First or last value of a field of metrics.jsonl.
field() {
  awk -v name="\"$1\":" -v which="$2" '{
    at = index($0, name)
    if (at == 0 || (which == "first" && found)) next
    value = substr($0, at + length(name))
    sub(/[,}].*/, "", value)
    found = 1
  } END { print value }' "$metrics"
}
first=$(field loss first)
last=$(field loss last)
bits=$(field val_bits_per_byte last)
bytes=$(wc -c <"$data/validation.txt")
packed=$(gzip -9 -c "$data/validation.txt" | wc -c)
awk -v first="$first" -v last="$last" -v bits="$bits" -v bytes="$bytes" -v packed="$packed" 'BEGIN {
  printf "training loss            %.4f -> %.4f nats per token\n", first, last
  printf "held-out text            %d bytes that the model has not seen\n", bytes
  printf "Kestrel                  %.4f bits per byte\n", bits
  printf "gzip -9                  %.4f bits per byte\n", 8 * packed / bytes
}'
printf 'time                     build %d s, data %d s, training %d s\n' $((built - started)) $((prepared - built)) $((trained - prepared))

say "a sample (kestrel generate $run --prompt ...)"
"$kestrel" generate "$run" --prompt "And it came to pass" --max-tokens 96 --temperature 0.8 --top-k 50 --seed 1

say "report: $run/report.html   metrics: $metrics   checkpoints: $run/checkpoints"
awk -v bits="$bits" -v bytes="$bytes" -v packed="$packed" 'BEGIN { exit !(bits < 8 * packed / bytes) }' || {
  echo "the model did not beat gzip -9 on the held-out text; with overrides that shorten training this is expected" >&2
}
