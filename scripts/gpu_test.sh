#!/usr/bin/env bash
# Runs everything that needs a GPU: tests/gpu, every model fixture through `kestrel parity` in fp32 and bf16, the benchmarks
# of the step and of every operation; then writes tests/gpu/last_run.json.
#
#     scripts/gpu_test.sh                       # builds first (preset cuda)
#     scripts/gpu_test.sh --binaries DIR        # uses DIR/kestrel and DIR/test_gpu
#     scripts/gpu_test.sh --out FILE            # writes the record there
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
show_help "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

binaries='' record=tests/gpu/last_run.json
while [[ $# -gt 0 ]]; do
  case $1 in
    --binaries | --out)
      [[ $# -ge 2 ]] || { echo "gpu_test: $1 needs a value; scripts/gpu_test.sh --help tells more" >&2; exit 2; }
      [[ $1 == --out ]] && record=$2 || binaries=$2
      shift 2 ;;
    *) echo "gpu_test: unknown argument \"$1\"; scripts/gpu_test.sh --help tells more" >&2; exit 2 ;;
  esac
done
if [[ -z $binaries ]]; then
  cmake --preset cuda >build/cuda.log 2>&1 && cmake --build build/cuda -j "$(env -u OMP_NUM_THREADS nproc)" --target kestrel test_gpu >>build/cuda.log 2>&1 || {
    tail -n 30 build/cuda.log
    exit 1
  }
  binaries=build/cuda/gpu
  mkdir -p $binaries && ln -sf ../kestrel ../tests/test_gpu $binaries/
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== tests/gpu"
"$binaries/test_gpu" --gtest_output=json:"$work/tests.json" >"$work/tests.log" 2>&1
tests_rc=$?
grep -E '^\[  (FAILED|PASSED)' "$work/tests.log" | sort -u | head -n 40
[[ $tests_rc -ne 0 ]] && grep -E 'Failure' -A 7 "$work/tests.log" | head -n 80
grep -E '^KDA ' "$work/tests.log"

echo "== model fixtures on the GPU, and the floor of bf16: fp32 arithmetic on the CPU with weights rounded to bf16"
parity() {  # PRECISION-NAME FIXTURE MODEL DEVICE PRECISION: a line into parity.jsonl
  local expected=tests/fixtures/$2/expected.safetensors line
  if "$binaries/kestrel" parity --device "$4" --precision "$5" --model "$3" --tokens "$expected" --out "$work/out.safetensors" --grads \
    >"$work/parity.log" 2>&1; then
    line=$(python3 tests/gpu/compare_parity.py "$work/out.safetensors" "$expected" --json)
  else
    line="{\"error\": $(python3 -c 'import json,sys; print(json.dumps(open(sys.argv[1]).read()[-400:]))' "$work/parity.log")}"
  fi
  echo "{\"fixture\": \"$2\", \"precision\": \"$1\", \"result\": $line}" >>"$work/parity.jsonl"
}
for fixture in tests/fixtures/model_*; do
  name=$(basename "$fixture")
  python3 tests/gpu/round_weights.py "$fixture" "$work/rounded" || exit 1
  parity fp32 "$name" "$fixture" cuda fp32
  parity bf16 "$name" "$fixture" cuda bf16
  parity "fp32, weights in bf16" "$name" "$work/rounded" cpu fp32
done
python3 - "$work/parity.jsonl" <<'P'
import json, sys
for line in open(sys.argv[1]):
    j = json.loads(line); r = j["result"]
    print(f"{j['fixture']:30s} {j['precision']:21s}", r["error"][:300] if "error" in r else
          f"loss {r['loss']:.1e} logits {r['logits']:.1e} gradient {r['worst_gradient']:.1e} ({r['worst_gradient_name']}) cosine {r['worst_cosine']:.5f} ({r['worst_cosine_name']}), median {r['median_cosine']:.5f}, {r['cosines_of_0.999']} of {r['gradients']} at least 0.999")
P

echo "== step"
"$binaries/kestrel" bench step configs/bench_2p8b.json --json --profile >"$work/step.json" 2>"$work/step.err" || { cat "$work/step.err"; echo null >"$work/step.json"; }
python3 - "$work/step.json" <<'P'
import json, sys
j = json.load(open(sys.argv[1]))
if j:
    print(f"{j['tokens_per_s']:.0f} tokens/s, micro-batch {j['micro_batch_ms']:.1f} ms, update {j['update_ms']:.1f} ms, {j['memory_bytes'] / 2**30:.2f} GiB")
P

echo "== operations"
"$binaries/kestrel" bench op --json >"$work/ops.json" 2>"$work/ops.err" || { cat "$work/ops.err"; echo null >"$work/ops.json"; }
python3 - "$work/ops.json" <<'P'
import json, sys
for t in json.load(open(sys.argv[1])) or []:
    print(f"{t['operation']:34s} {t['median_ms']:9.4f} ms {t['bytes'] / t['median_ms'] * 1e-9:7.3f} TB/s {t['flops'] / t['median_ms'] * 1e-9:8.1f} TFLOP/s {100 * t['fraction_of_bound']:6.1f} % of bound")
P

python3 - "$work" "$record" "$tests_rc" <<'P'
import datetime, hashlib, json, os, subprocess, sys
work, record, rc = sys.argv[1], sys.argv[2], int(sys.argv[3])
digest = hashlib.sha256()
for root in ("kernels", "src"):
    for folder, _, files in sorted(os.walk(root)):
        for f in sorted(files):
            digest.update(os.path.join(folder, f).encode() + b"\0" + open(os.path.join(folder, f), "rb").read())
gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()
tests = json.load(open(f"{work}/tests.json")) if os.path.exists(f"{work}/tests.json") else {}
result = {
    "date": datetime.date.today().isoformat(),
    "source_sha256": digest.hexdigest(),
    "gpu": gpu,
    "tests": {"run": tests.get("tests"), "failed": tests.get("failures"), "exit_code": rc},
    "timings": [l.strip() for l in open(f"{work}/tests.log") if l.startswith("KDA ")],
    "parity": [json.loads(l) for l in open(f"{work}/parity.jsonl")],
    "bench_2p8b": json.load(open(f"{work}/step.json")),
    "operations": json.load(open(f"{work}/ops.json")),
}
json.dump(result, open(record, "w"), indent=1)
print("written", record)
P
exit $tests_rc
