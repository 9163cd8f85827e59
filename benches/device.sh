#!/usr/bin/env bash
# Everything that a GPU is needed for: the tests on the device, its kernels beside their floors, prefill and decode of models
# with random weights, and what others make of the same shapes. It has not run on a device yet.
#
#   bash benches/device.sh pack       where Rust and nvcc are: builds what travels, into .device
#   bash benches/device.sh [PART …]   where the GPU is, without Rust, nvcc or a network: tests, kernels, models, peers
#                                     (default: all of them, in this order)
#
# What fails is told, and the rest goes on. After LIMIT seconds (default: 570) nothing more begins or goes on; what was left
# out is told too. OUT: where the reports go, a file for each part (default: .device). DEVICE=cuda-shim is for trying the
# script itself without a GPU: everything at a tiny size, with the octavo that PYTHON (default: python3) has if none is packed.
set -uo pipefail
cd "$(dirname "$0")/.."
packed=.device
out=${OUT:-$packed}
limit=${LIMIT:-570}
device=${DEVICE:-cuda}
python=${PYTHON:-python3}
tiny=()
[ "$device" = cuda-shim ] && tiny=(--tiny)
mkdir -p "$packed" "$out"
failed=()

pack() {
  set -e
  rm -rf "${packed:?}"/*
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$packed" .
  local built
  for built in "test --release --test kernels" "bench --bench kernels"; do
    # shellcheck disable=SC2086 # words
    cargo $built --locked --no-run -p octavo-kernels 2>&1 | tee /dev/stderr |
      sed -n 's/.*Executable.*(\(.*\))$/\1/p' | xargs -I{} cp {} "$packed/${built%% *}-kernels"
  done
  strip "$packed"/*-kernels
  "$python" - "$packed"/*.whl <<'PYTHON'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
extension = next(name for name in wheel.namelist() if name.endswith(".so"))
if b"\x50\xed\x55\xba" not in wheel.read(extension):  # what an image of kernels begins with
    sys.exit("there are no kernels in the wheel: is nvcc there (NVCC, CUDA_HOME)?")
PYTHON
  ls -lh "$packed"
}

# report PART SECONDS COMMAND …: its output, also in the part's file. It gets so many seconds, or what is left.
report() {
  local part=$1 most=$2 left=$((limit - SECONDS))
  shift 2
  ((left < most)) && most=$left
  printf '\n== %s: %s (%s, at most %s s)\n' "$part" "$*" "$(date +%H:%M:%S)" "$most" | tee -a "$out/$part.txt"
  if ((most < 5)); then
    echo "LEFT OUT: no time" | tee -a "$out/$part.txt"
    failed+=("$part: $* (no time)")
    return 1
  fi
  timeout --kill-after=5 "$most" "$@" 2>&1 | tee -a "$out/$part.txt"
  local code=${PIPESTATUS[0]}
  ((code == 0)) && return 0
  ((code == 124 || code == 137)) && echo "STOPPED after $most s" | tee -a "$out/$part.txt"
  failed+=("$part: $* ($code)")
  return 1
}

tests() {
  report tests 60 "$python" -m octavo.cli doctor
  if [ ! -x "$packed/test-kernels" ]; then
    failed+=("tests: $packed/test-kernels is not packed")
  elif ! report tests 240 "$packed/test-kernels"; then
    # A kernel that fails takes its process along: each test again on its own, where the launch that fails is the one named.
    sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$out/tests.txt" | sort -u | head -12 | while read -r test; do
      CUDA_LAUNCH_BLOCKING=1 report tests 30 "$packed/test-kernels" --exact "$test" </dev/null
    done
  fi
  # Whatever warns there is not what is tested.
  report tests 150 "$python" -m pytest -q -o addopts= -o filterwarnings=default -p no:cacheprovider tests/python/test_cuda.py
}

matrix_rate() { # operations per second of a large bf16 product, as PyTorch does it
  "$python" - <<'PYTHON'
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

kernels() {
  export OCTAVO_MATRIX_RATE
  OCTAVO_MATRIX_RATE=$(timeout 60 bash -c "$(declare -f matrix_rate); python=$python matrix_rate" 2>"$out/matrix-rate.err") ||
    { echo "no rate of matrices to hold products against: $(tail -1 "$out/matrix-rate.err")"; unset OCTAVO_MATRIX_RATE; }
  rm -f "$out/matrix-rate.err"
  if [ ! -x "$packed/bench-kernels" ]; then
    failed+=("kernels: $packed/bench-kernels is not packed")
  elif [ "$device" = cuda-shim ]; then
    report kernels 150 "$packed/bench-kernels"
  else
    report kernels 150 "$packed/bench-kernels" --bench --cuda
  fi
}

of_models() { # of_models PART SCRIPT: the script for every model
  local shape
  # Files of models are as large as the models: in memory, where that has room.
  (($(df --output=avail /dev/shm 2>/dev/null | tail -1) > 24 << 20)) && export TMPDIR=/dev/shm
  for shape in qwen3-0.6b llama-3.1-8b qwen3-8b; do
    report "$1" 200 "$python" "$2" "$shape" --device "$device" "${tiny[@]}"
  done
}

run() {
  local part site
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv || echo "no nvidia-smi"
  if compgen -G "$packed/*.whl" >/dev/null; then
    # Beside the packages that are there, wherever those are.
    site=$(mktemp -d)
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$packed"/*.whl
    export PYTHONPATH=$site PYTHONUNBUFFERED=1
  fi
  for part in "$@"; do
    rm -f "$out/$part.txt"
    case $part in
      tests | kernels) "$part" ;;
      models) of_models models benches/device.py ;;
      peers) of_models peers benches/device_peers.py ;;
    esac
  done
  printf '\n== %s s; %s failed\n' "$SECONDS" "${#failed[@]}"
  ((${#failed[@]} == 0)) || { printf 'FAILED %s\n' "${failed[@]}"; return 1; }
}

for part in "$@"; do
  case $part in
    pack | tests | kernels | models | peers) ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    *) echo "pack, or some of tests, kernels, models and peers, not $part" >&2; exit 2 ;;
  esac
done
if [ "${1:-}" = pack ]; then pack; elif (($#)); then run "$@"; else run tests kernels models peers; fi
