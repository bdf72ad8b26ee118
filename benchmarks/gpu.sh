#!/usr/bin/env bash
# Everything that a GPU machine is for, in one go: build, tests, compute-sanitizer, benchmarks.
#
#     benchmarks/gpu.sh OUT_DIR
#
# Logs and results go to OUT_DIR; a short table comes last, and the exit status is 0 if all stages passed.
#
#     STAGES              which stages, in order       "build tests sanitize bench"
#     LIMIT_BUILD, LIMIT_TESTS, LIMIT_SANITIZE, LIMIT_BENCH     seconds for each (sanitize: for each tool; bench: for all)
#     JAXKERN_SKIP_BUILD  1: test the jaxkern that is installed or on PYTHONPATH
#     PYTHON              the interpreter that has JAX with CUDA            python3
#     PYTEST_ARGS         more arguments for pytest
#     BENCH_ARGS          more arguments for the benchmarks of operations, such as --quick or --algorithms
#     PROGRAM_ARGS        and for that of programs, such as --quick
#     OPERATIONS          which benchmarks             all, programs last; sharding too where there are several GPUs
#     SANITIZE_FAMILIES   lists of operations, a process each     all, in seven processes
#     SANITIZE_TOOLS      of compute-sanitizer         "memcheck racecheck initcheck synccheck"
#     SANITIZE_ARGS       more arguments for sanitize.py, such as --wide
#     GPUS                how many GPUs to use         all, or all of CUDA_VISIBLE_DEVICES
#
# With several GPUs, each process of the tests, of the sanitizer and of the benchmarks has one, side by side; the tests of several
# devices and the benchmarks of programs and of sharding come after them.
set -u

out=${1:?usage: benchmarks/gpu.sh OUT_DIR}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2

python=${PYTHON:-python3}
stages=${STAGES:-build tests sanitize bench}
IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}"
gpus=${GPUS:-${#devices[@]}}
[ "$gpus" -gt 0 ] || gpus=1
[ "${#devices[@]}" -ge "$gpus" ] || devices=($(seq 0 $((gpus - 1))))
families=${SANITIZE_FAMILIES:-softmax index_add,segment_softmax,cross_entropy messages select scan associative_scan,while_loop
  fused,score,elementwise,elementwise_kernel,row_kernel,reduction,norm,group_norm,quantize}
several=$([ "$gpus" -gt 1 ] && echo sharding)
operations=${OPERATIONS:-softmax fused_softmax score elementwise elementwise_kernel row_kernel scan while_loop associative_scan
  quantize reduction norm cross_entropy linear_cross_entropy index_add scatter select selected segment_softmax messages sparse
  programs $several}
tools=${SANITIZE_TOOLS:-memcheck racecheck initcheck synccheck}
[ "${JAXKERN_SKIP_BUILD:-0}" = 1 ] && stages=${stages//build/}

# A checkout has no built modules, and importing from it would shadow the installed package: everything
# runs from a folder that has all of the checkout but the package.
work=$(mktemp -d)
for entry in "$root"/*; do
  [ "${entry##*/}" = jaxkern ] || ln -s "$entry" "$work/"
done

export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
table=$(mktemp)
failed=$(mktemp)
trap 'rm -rf "$work" "$table" "$failed"' EXIT

# stage NAME LIMIT COMMAND...: runs it under a time limit, its output to OUT_DIR/NAME.log
stage() {
  local name=$1 limit=$2 log=$out/$1.log begin=$SECONDS status verdict
  shift 2
  echo "== $name (at most $limit s): $*"
  (cd "$work" && timeout --signal=INT --kill-after=20 "$limit" "$@") >"$log" 2>&1
  status=$?
  case $status in
    0) verdict=passed ;;
    124 | 137) verdict="out of time" ;;
    *) verdict="failed ($status)" ;;
  esac
  if [ $status -ne 0 ]; then
    echo "$name" >>"$failed"
    echo "-- end of $log"
    tail -n 15 "$log"
  fi
  printf '%-22s %-12s %5d s   %s\n' "$name" "$verdict" $((SECONDS - begin)) "$(tail -n 1 "$log" | cut -c1-110)" >>"$table"
}

# beside STAGE...: starts a stage beside the others, on the next GPU
next=0
beside() {
  if [ "$gpus" -gt 1 ]; then CUDA_VISIBLE_DEVICES=${devices[next]} stage "$@" & else stage "$@" & fi
  next=$(((next + 1) % gpus))
}

for s in $stages; do
  case $s in
    build) stage build "${LIMIT_BUILD:-300}" "$python" -m pip install --no-deps ${PIP_ARGS:-} "$root" ;;
    tests)
      pytest=("$python" -m pytest -q -p no:cacheprovider ${PYTEST_ARGS:-})
      if [ "$gpus" -gt 1 ]; then
        TEST_GPUS=$(IFS=,; echo "${devices[*]:0:gpus}") stage tests "${LIMIT_TESTS:-900}" "${pytest[@]}" -n $((2 * gpus)) tests --ignore-glob 'tests/test_sharding*'
        stage tests-sharding "${LIMIT_TESTS:-900}" bash -c '"$@" tests/test_sharding*.py' _ "${pytest[@]}"
      else
        stage tests "${LIMIT_TESTS:-900}" "${pytest[@]}" tests
      fi
      ;;
    sanitize)
      sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
      if [ -z "$sanitizer" ]; then
        echo "sanitize               not run      compute-sanitizer is not installed" | tee -a "$failed" >>"$table"
        continue
      fi
      # XLA asks the driver for what may be missing, so failing API calls are not reported; failing
      # kernels still are, and sanitize.py checks every value.
      # Tools and families run side by side: each process spends most of its time on the host. XLA starts ptxas for some of
      # its kernels, and a tool that watches that too ends with a segmentation fault.
      for tool in $tools; do
        for family in $families; do
          XLA_PYTHON_CLIENT_ALLOCATOR=platform beside "sanitize-$tool-${family%%,*}" "${LIMIT_SANITIZE:-600}" \
            "$sanitizer" --tool "$tool" --target-processes application-only --error-exitcode 9 --print-limit 20 \
            $([ "$tool" = memcheck ] && echo --report-api-errors no) \
            "$python" -m benchmarks.sanitize --only "$family" $([ "$tool" = initcheck ] && echo --honest) \
            ${SANITIZE_ARGS:-}
        done
      done
      wait
      ;;
    bench)
      stage selftest 120 "$python" -m benchmarks selftest
      stage first_use 120 "$python" -m benchmarks.first_use --out "$out/first_use.json"
      cat "$out/first_use.log"
      # Operations side by side: they compile together and measure one at a time on each GPU. Programs come last.
      for operation in $operations; do
        [[ " programs sharding " == *" $operation "* ]] ||
          beside "bench-$operation" "${LIMIT_BENCH:-1800}" "$python" -m benchmarks "$operation" --out "$out" ${BENCH_ARGS:-}
      done
      wait
      for operation in $operations; do
        case $operation in
          programs) stage bench-programs "${LIMIT_BENCH:-1800}" "$python" -m benchmarks programs --out "$out" ${PROGRAM_ARGS:-} ;;
          # Memory is taken once: two programs with much memory, one after the other, could leave it in pieces.
          sharding) XLA_PYTHON_CLIENT_PREALLOCATE=true stage bench-sharding "${LIMIT_BENCH:-1800}" "$python" -m benchmarks sharding --out "$out" ;;
        esac
      done
      for operation in $operations; do
        grep -E '^(missed|not run|note)' "$out/bench-$operation.log" | cut -c1-160 | head -n "${MISSES:-40}"
      done
      ;;
    *) echo "gpu.sh: no stage '$s'" >&2; exit 2 ;;
  esac
done

echo
cat "$table"
[ ! -s "$failed" ]
