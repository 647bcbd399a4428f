#!/usr/bin/env bash
# Measure what needs a GPU, in 45 minutes, and write bench/results/speed.md:
#
#     bash bench/gpu.sh              all steps that are not done yet, each within ten minutes
#     bash bench/gpu.sh STEP         one step, again if it is done
#     bash bench/gpu.sh --dry_run    list the steps
#
# A step that is done leaves a file in $OUT (out-gpu), so that an interrupted measurement goes on
# with the next one. Nothing needs a network: without tiny-shakespeare (also looked for in
# $CORPUS_DIR) the text is random characters, whose loss means nothing, but whose speed does.
# NANOGPT names a checkout to compare with. TINY=1 tries all steps on a CPU, in two minutes, and
# leaves everything in out-gpu-tiny, its page of speeds too.
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python} DATA=${DATA:-data} TINY=${TINY:-}
OUT=${OUT:-out-gpu${TINY:+-tiny}}
[ -z "$TINY" ] || export BENCH_RESULTS="$OUT/results"
STEPS="data train shakespeare memory tests ranks page"

speed() { "$PYTHON" -m extras.speed "$@"; }

dataset() { if [ -e "$DATA/shakespeare_char/meta.json" ]; then echo shakespeare_char; else echo random_text; fi; }

more() { echo "--dataset=$(dataset) --data_dir=$DATA $*"; }

step_data() { # tiny-shakespeare, or random characters
    timeout 120 "$PYTHON" prepare.py shakespeare_char --data_dir="$DATA" && return
    [ -e "$DATA/random_text/meta.json" ] && return
    mkdir -p "$OUT"
    "$PYTHON" -c 'import random, string
print("".join(random.Random(0).choices(string.ascii_letters + " \n.,:;", k=1115394)))' >"$OUT/text"
    "$PYTHON" prepare.py random_text --input="$OUT/text" --tokenizer=char --data_dir="$DATA"
}

step_train() { # tokens/s, MFU and memory at 124 M beside nanoGPT and others
    [ -n "${NANOGPT:-}" ] || echo "without nanoGPT: NANOGPT names no checkout"
    local size="--shape=124m --dtype=bfloat16 --compile=True"
    [ -z "$TINY" ] || size="--compile=False --steps=2 --batch_size=1"
    # shellcheck disable=SC2086
    speed train $DEVICE $size ${NANOGPT:+--nanogpt="$NANOGPT"}
}

train() { # a config, at most ten minutes
    # shellcheck disable=SC2086
    "$PYTHON" train.py "config/$1.py" $DEVICE $(more "$TINY_RUN") "${@:2}"
}

step_shakespeare() { # the Shakespeare configs, nanoGPT's GPU setting
    for name in gpt2_shakespeare llama_shakespeare; do
        local begin="--overwrite"
        [ ! -e "$OUT/$name/latest" ] || begin="--init_from=resume" # go on
        train "$name" --out_dir="$OUT/$name" "$begin" || return
    done
    "$PYTHON" -m extras.compare "$OUT/gpt2_shakespeare" "$OUT/llama_shakespeare" --out="$OUT/compare.png"
}

step_memory() { # the estimated memory beside the measured peak at 124 M
    local size="--gradient_accumulation_steps=4 --eval_tokens=65536"
    for name in gpt2_124m llama_124m; do
        # shellcheck disable=SC2086
        "$PYTHON" -m extras.dry_run "config/$name.py" $DEVICE $(more "$TINY_RUN") $size || return
    done
}

step_tests() { # the tests that need a GPU, of a step that waits for nothing among them
    "$PYTHON" -m pytest -n0 -q -m gpu tests
    local status=$?
    [ $status = 5 ] && echo "no test is marked gpu" && return
    return $status
}

step_ranks() { # two processes, with NCCL on two GPUs
    if [ -z "$TINY" ] && [ "$(nvidia-smi -L | wc -l)" -lt 2 ]; then
        echo "left out: it needs two GPUs"
        return
    fi
    local words="--log_interval=1 --gradient_accumulation_steps=2 --warmup_iters=0 --max_iters=20"
    for ranks in 1 2; do # the same losses, more tokens/s
        # shellcheck disable=SC2086
        "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=$ranks train.py \
            config/gpt2_shakespeare.py $DEVICE $words $(more "$TINY_RUN") --out_dir="$OUT/ranks-$ranks" --overwrite || return
    done
    "$PYTHON" -m extras.compare "$OUT/ranks-1" "$OUT/ranks-2" --out="$OUT/ranks.png"
}

step_page() { speed page; }

DEVICE="--device=cuda" TINY_RUN=""
if [ -n "$TINY" ]; then
    DEVICE="--device=cpu"
    TINY_RUN="--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=2 --max_iters=4 --warmup_iters=0 \
        --eval_interval=2 --log_interval=1 --eval_tokens=64 --vocab_size=70 --compile=False"
fi

case "${1:-}" in
--dry_run)
    echo "steps: $STEPS"
    exit 0
    ;;
"") ;;
*)
    [[ " $STEPS " == *" $1 "* ]] || { echo "no step $1: choose from $STEPS" >&2; exit 2; }
    mkdir -p "$OUT" && rm -f "$OUT/$1.done"
    "step_$1" && touch "$OUT/$1.done"
    exit
    ;;
esac

if [ -z "$TINY" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device is visible; the steps would be: $STEPS" >&2
    exit 2
fi
left=""
for step in $STEPS; do
    [ -e "$OUT/$step.done" ] && [ "$step" != page ] && continue
    echo "== $step"
    timeout 600 bash bench/gpu.sh "$step" || left="$left $step"
done
[ -z "$left" ] || { echo "not done:$left; start again to go on with these" >&2; exit 1; }
