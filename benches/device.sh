#!/usr/bin/env bash
# Everything that a GPU is needed for, in one call: the tests on the device, its kernels beside their floors, and prefill and
# decode of models with random weights. It has not run on a device yet.
#
#   bash benches/device.sh pack    where Rust and nvcc are: builds what travels, into .device
#   bash benches/device.sh         where the GPU is: runs it all, without Rust, nvcc or a network
#
# OUT: where the reports go (default: .device).
set -uo pipefail
cd "$(dirname "$0")/.."
packed=.device
out=${OUT:-$packed}
mkdir -p "$packed" "$out"

pack() {
  rm -rf "${packed:?}"/*
  python3 -m pip wheel --quiet --no-deps --wheel-dir "$packed" .
  local built
  for built in "test --release --test kernels" "bench --bench kernels"; do
    # shellcheck disable=SC2086 # words
    cargo $built --locked --no-run -p octavo-kernels 2>&1 | tee /dev/stderr |
      sed -n 's/.*Executable.*(\(.*\))$/\1/p' | xargs -I{} cp {} "$packed/${built%% *}-kernels"
  done
  strip "$packed"/*-kernels
  ls -lh "$packed"
}

report() { # report NAME COMMAND …: its output, also as a file; a failure does not end the others
  local name=$1
  shift
  printf '\n== %s (%s)\n' "$name" "$(date +%H:%M:%S)"
  "$@" 2>&1 | tee "$out/$name.txt" || { echo "FAILED: $name"; failed=1; }
}

matrix_rate() { # operations per second of a large bf16 product, as PyTorch does it
  python3 - <<'PYTHON'
import torch
a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
for _ in range(3):
    a @ b
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
for _ in range(10):
    a @ b
end.record()
torch.cuda.synchronize()
print(2 * 8192**3 * 10 / (begin.elapsed_time(end) / 1000))
PYTHON
}

run() {
  failed=0
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv
  venv=$(mktemp -d)
  python3 -m venv --system-site-packages "$venv"
  "$venv/bin/python" -m pip install --quiet --no-index --no-deps "$packed"/*.whl
  export OCTAVO_MATRIX_RATE
  OCTAVO_MATRIX_RATE=$(matrix_rate) || unset OCTAVO_MATRIX_RATE
  report doctor "$venv/bin/octavo" doctor
  report kernel-tests "$packed/test-kernels"
  report python-tests "$venv/bin/python" -m pytest -q tests/python/test_cuda.py
  report kernel-floors "$packed/bench-kernels" --bench --cuda
  local shape
  for shape in qwen3-0.6b llama-3.1-8b qwen3-8b; do
    report "model-$shape" "$venv/bin/python" benches/device.py "$shape"
  done
  return "$failed"
}

case ${1:-run} in
  pack) pack ;;
  run) run ;;
  *) echo "pack or run, not $1" >&2; exit 2 ;;
esac
