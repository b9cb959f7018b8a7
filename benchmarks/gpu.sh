#!/usr/bin/env bash
# The runs of docs/results on a GPU machine that is lent for minutes, and starts bare: each call is one command there, in the
# repository. Runs go on where the last call stopped them; what is kept in docs/results is not run again.
#
#   bash benchmarks/gpu.sh carry FOLDER FILES...       before it starts, on the machine at home: FILES (the packed data, begun-*.tar)
#                                                      into FOLDER/0, FOLDER/1, ..., each of which fits into a call
#   bash benchmarks/gpu.sh data CARRIED                copy packed data aside; unpack it once all of it has come
#   bash benchmarks/gpu.sh restore CARRIED/*           go on with runs that an earlier machine did not finish: begun-*.tar,
#                                                      fewshot.tar.gz
#   bash benchmarks/gpu.sh sweep SECONDS RECIPE [FLAGS of warpi sweep]
#                                                      runs for that long at most, then stores, and packs everything
#   bash benchmarks/gpu.sh fewshot SECONDS speed|train [FLAGS of fewshot_gpu.py]
#   bash benchmarks/gpu.sh tests SECONDS [FLAGS]       the tests that need a GPU, or those FLAGS of pytest choose; $OUT/tests.log
#   bash benchmarks/gpu.sh memory SECONDS              ResNet-50 at 224 pixels: peak memory, fused as far as the time goes, and not
#   bash benchmarks/gpu.sh step SECONDS                a step of ResNet-50 at 224 pixels, L = 1 and 4; $OUT/samples-h200.json
#   bash benchmarks/gpu.sh time [FLAGS of warpi sweep] L = 1 .. 50, one run at a time
#
#   bash benchmarks/gpu.sh start NAME [--after OTHER] VERB ...
#                                                      any of these in the background, from a copy of the repository: it goes on
#                                                      while other calls bring data; its log is $WORK/NAME.log. --after: when
#                                                      the one started as OTHER has ended, so that the GPU never waits for us
#   bash benchmarks/gpu.sh wait SECONDS                until all of that has ended, at most that long; then packs everything
#
# The machine goes back half a minute after a call, with all that was not packed: let `wait` follow `wait` without a pause.
# Results come back in $OUT: kept.tar.gz (finished runs; `python benchmarks/keep.py kept.tar.gz` puts them into docs/results),
# begun-*.tar (weights of the others, for `restore`; those of WRN-28-10 and ResNet-18 are too large), fewshot.tar.gz (rows).
set -euo pipefail
shopt -s nullglob
declare -A LEAST=([carry]=3 [data]=2 [restore]=2 [sweep]=3 [fewshot]=3 [tests]=2 [memory]=2 [step]=2 [time]=1 [start]=3 [wait]=2)
if [ $# -eq 0 ] || [ $# -lt "${LEAST[$1]:-99}" ]; then
    sed -n '2,26p' "$0" | sed 's/^# \{0,1\}//'
    exit 2
fi
cd "$(dirname "$0")/.."
WORK=${WORK:-/tmp/warpi}
OUT=${OUT:-$WORK/out}
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$WORK/inductor
mkdir -p "$WORK/runs" "$WORK/packed" "$WORK/pids" "$OUT"

# Processes that share the GPU by MPS, where there is one: while one reads its data, traces or evaluates, the others train.
mps() {
    export CUDA_MPS_PIPE_DIRECTORY=$WORK/mps CUDA_MPS_LOG_DIRECTORY=$WORK/mps-log
    mkdir -p "$WORK/mps" "$WORK/mps-log"
    if ! { echo get_server_list | timeout 5 nvidia-cuda-mps-control || nvidia-cuda-mps-control -d; } > "$WORK/mps-log/start" 2>&1; then
        echo "gpu.sh: no MPS here: processes take turns on the GPU"
        unset CUDA_MPS_PIPE_DIRECTORY
    fi
}

pack() {
    # With `arrays` also what figures are drawn from, where it is wanted: the first seed of WarPI, and what it is compared with.
    local wanted=() run tables=("$WORK"/runs/*) rows=("$WORK"/fewshot/*.json "$WORK"/fewshot/rows/*.json "$WORK"/fewshot/runs/*/results.jsonl)
    if [ ${#rows[@]} -gt 0 ]; then tar czf "$OUT/fewshot.tar.gz" -C "$WORK" "${rows[@]#"$WORK/"}"; fi
    if [ ${#tables[@]} -eq 0 ]; then
        echo "gpu.sh: no run was begun"
        return
    fi
    if [ "${1:-}" = arrays ]; then
        for run in "$WORK"/runs/*/*_seed0; do
            case $run in */samples* | */cifar10-*/*) continue ;; esac
            if [ -e "$run/done" ] && [ ! -e "$run/figures.npz" ]; then wanted+=("$run"); fi
        done
    fi
    if [ ${#wanted[@]} -gt 0 ]; then ${PYTHON:-python3} -m warpi figures "${wanted[@]}" --arrays || echo "gpu.sh: no arrays this time"; fi
    ${PYTHON:-python3} benchmarks/keep.py "${tables[@]}" --tar "$OUT/kept.tar.gz" --begun "$OUT"
    ls -l "$OUT"
}

case ${1:-} in
carry)
    # 64 MiB go along at a time, the repository's own files among them
    folder=$2 room=$((63 * 2 ** 20 - $(git ls-files -coz --exclude-standard | du --files0-from=- -cbD | tail -n 1 | cut -f 1)))
    part=0 used=0
    for file in "${@:3}"; do
        size=$(stat -Lc %s "$file") name=${file##*/}
        if [ "$size" -gt "$room" ]; then
            echo "gpu.sh: $file has $size bytes, and $room fit into a call" >&2
            exit 2
        fi
        if [ $((used + size)) -gt "$room" ]; then part=$((part + 1)) used=0; fi
        used=$((used + size))
        case $name in *.webp.zip | frames.*) name=$(basename "$(dirname "$file")")/$name ;; esac
        mkdir -p "$(dirname "$folder/$part/$name")"
        cp -f --no-preserve=mode "$file" "$folder/$part/$name"
    done
    du -sb "$folder"/*
    ;;
data)
    cp -r "$2"/. "$WORK/packed/"
    for name in cifar10 cifar100; do
        here=$WORK/packed/$name
        if [ -e "$here/train0.webp.zip" ] && [ -e "$here/train1.webp.zip" ] && [ -e "$here/test.webp.zip" ] &&
            [ ! -e "$WORK/$name.unpacked" ]; then
            ${PYTHON:-python3} "$WORK/packed/unpack.py" "$WORK/data" "$name"
            touch "$WORK/$name.unpacked"
        fi
    done
    for name in cifar-n omniglot; do
        if [ -d "$WORK/packed/$name" ] && [ ! -e "$WORK/$name.unpacked" ]; then
            ${PYTHON:-python3} "$WORK/packed/unpack.py" "$WORK/data" "$name"
            touch "$WORK/$name.unpacked"
        fi
    done
    ;;
restore)
    shift
    for file in "$@"; do
        case $file in
        *fewshot.tar.gz) tar xzf "$file" -C "$WORK" ;;
        *begun-*.tar) ${PYTHON:-python3} benchmarks/keep.py "$file" --to "$WORK/runs" ;;
        *) echo "gpu.sh: $file is left alone: neither begun-*.tar nor fewshot.tar.gz" ;;
        esac
    done
    ;;
sweep)
    seconds=$2 recipe=$3
    shift 3
    if [ ! -e "recipes/$recipe.toml" ]; then
        echo "gpu.sh: there is no recipes/$recipe.toml" >&2
        exit 2
    fi
    out=$(sed -n 's/^out = "runs\/\(.*\)"/\1/p' "recipes/$recipe.toml")
    mps
    # SIGTERM: every run under way stores a checkpoint, and the next call goes on with it
    timeout --signal=TERM --kill-after=45 "$seconds" \
        ${PYTHON:-python3} -m warpi sweep "recipes/$recipe.toml" --root "$WORK/data" --out "$WORK/runs/$out" "$@" || echo "gpu.sh: rc $?"
    pack arrays
    ;;
fewshot)
    seconds=$2 what=$3
    shift 3
    mps
    mkdir -p "$WORK/fewshot"
    name=${what/train/runs}
    ${PYTHON:-python3} benchmarks/fewshot_gpu.py "$what" --root "$WORK/data" --out "$WORK/fewshot" --json "$WORK/fewshot/fewshot-$name.json" \
        --seconds "$seconds" "$@" || echo "gpu.sh: rc $?"
    pack
    ;;
start)
    name=$2 repo=$WORK/repo-$2 other=
    shift 2
    if [ "$1" = --after ]; then
        other=$2
        shift 2
        if [ ! -e "$WORK/pids/$other" ]; then
            echo "gpu.sh: nothing was started as $other; give the NAME of an earlier start" >&2
            exit 2
        fi
    fi
    if [ -e "$WORK/pids/$name" ] && [ ! -e "$repo/ended" ]; then
        echo "gpu.sh: $name is under way; choose another name" >&2
        exit 2
    fi
    rm -rf "$repo"
    mkdir -p "$repo"
    tar cf - --exclude='./.*' --exclude=./ended . | tar xf - -C "$repo"
    OUT=$WORK/out-$name TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-3} OMP_NUM_THREADS=2 \
        setsid nohup bash -c 'while [ "$2" ] && [ ! -e "$2/ended" ] && kill -0 "$3"; do sleep 1; done; bash "$0" "${@:4}"; touch "$1/ended"' \
        "$repo/benchmarks/gpu.sh" "$repo" "${other:+$WORK/repo-$other}" "${other:+$(cat "$WORK/pids/$other")}" "$@" \
        > "$WORK/$name.log" 2>&1 < /dev/null &
    echo $! > "$WORK/pids/$name"
    ;;
wait)
    until=$((SECONDS + $2))
    while [ $SECONDS -lt $until ]; do
        going=0
        for file in "$WORK"/pids/*; do
            if [ ! -e "$WORK/repo-${file##*/}/ended" ] && kill -0 "$(cat "$file")" 2> /dev/null; then going=1; fi
        done
        if [ $going = 0 ]; then break; fi
        sleep 1
    done
    for log in "$WORK"/*.log; do
        echo "== $log"
        tail -n 6 "$log"
    done
    for file in "$WORK"/out-*/*; do  # what is made by none of the runs: logs of tests, figures of speed
        case $file in */kept.tar.gz | */begun-*.tar | */fewshot.tar.gz) continue ;; esac
        cp "$file" "$OUT/"
    done
    pack
    ;;
tests)
    # SIGINT: what has failed until then is told
    timeout --signal=INT --kill-after=20 "$2" \
        ${PYTHON:-python3} -m pytest -m gpu -v -n 6 -p no:cacheprovider -p no:benchmark tests --show-capture=no "${@:3}" > "$OUT/tests.log" 2>&1 || echo "gpu.sh: rc $?"
    grep -E "FAILED|ERROR|passed|failed" "$OUT/tests.log" | sort | uniq | head -40
    ;;
memory)
    # A process for each row: only memory counts, so they may run side by side. Compiling takes minutes; without it the graphs
    # are the same, with more tensors between their kernels.
    for variant in warpi warpi_checkpointing warpi_accumulate2 sgd_eager,double_backward_autograd,published; do
        for off in 0 1; do
            if [ $off = 0 ] && [ "${variant#sgd}" != "$variant" ]; then continue; fi
            TORCHDYNAMO_DISABLE=$off TORCH_COMPILE_DISABLE=$off timeout "$2" ${PYTHON:-python3} -m warpi bench meta-step --net resnet50 \
                --image-size 224 --batch 32 --precision bf16 --variants "sgd,$variant" --repeats 2 \
                --json "$WORK/memory-$off-${variant%%,*}.json" > "$WORK/memory-$off-${variant%%,*}.log" 2>&1 &
        done
    done
    wait
    tar czf "$OUT/memory.tgz" -C "$WORK" $(cd "$WORK" && ls memory-*)
    grep -hE "sgd|warpi|double|published" "$WORK"/memory-*.log || true
    ;;
step)
    # Compiling takes minutes: started once beside other runs, whose cores are idle, it is in inductor's cache when it counts
    timeout "$2" ${PYTHON:-python3} -m warpi bench meta-step --net resnet50 --image-size 224 --classes 14 --batch 32 --precision bf16 \
        --variants sgd,warpi,published --samples 1,4 --repeats 5 --json "$OUT/samples-h200.json" || echo "gpu.sh: rc $?"
    ;;
time)
    timeout --signal=TERM --kill-after=45 400 \
        ${PYTHON:-python3} -m warpi sweep recipes/samples-time.toml --root "$WORK/data" --out "$WORK/runs/samples-time" --per-gpu 1 "${@:2}" ||
        echo "gpu.sh: rc $?"
    pack
    ;;
esac
