#!/usr/bin/env bash
# Measure what needs a GPU, the most valuable first, and write bench/results/speed.md:
#
#     bash bench/gpu.sh              all steps that are not done yet, in about twelve minutes
#     bash bench/gpu.sh STEP         one step, again if it is done
#     bash bench/gpu.sh --dry_run    list the steps
#
# A step takes two minutes at most, and stores what it measured: rows in bench/results/speed.jsonl,
# with which it writes the page anew, and what it printed in $GPU_OUT/STEP.log (out-gpu). One that
# is done leaves $GPU_OUT/STEP.done, so that an interrupted measurement goes on with the next one.
# BENCH_RESULTS names another folder for the rows and the page, NANOGPT a checkout to compare with.
# Nothing needs a network: without tiny-shakespeare (also looked for in $CORPUS_DIR) the text is
# random characters, whose loss means nothing. TINY=1 tries all on a CPU, within out-gpu-tiny.
# shellcheck disable=SC2086  # several words in a variable
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python} DATA=${DATA:-data} TINY=${TINY:-}
GPU_OUT=${GPU_OUT:-out-gpu${TINY:+-tiny}}
[ -z "$TINY" ] || export BENCH_RESULTS="$GPU_OUT/results"

list() { # step, its limit in seconds, what it measures and stores
    cat <<'END'
train        120  rows: steps of 124 M parameters, our GPT-2 and LLaMA: tokens/s, MFU, memory
train_gpt2   120  rows: the same of our GPT-2 beside nanoGPT's and transformers'
train_llama  120  rows: the same of our LLaMA beside transformers'
data         120  a dataset: tiny-shakespeare, or random characters
gpt2         120  a row: config/gpt2_shakespeare.py for 90 seconds: its lowest loss, and when
llama        120  a row: config/llama_shakespeare.py, the same
decode       120  rows: tokens/s of one sequence and of 32, beside transformers'
attention    120  rows: its formula beside the fused kernels, 512 to 8,192 tokens: time, memory
tests        120  a log: the tests marked gpu: compiled FlexAttention, experts, resuming, two ranks
memory_gpt2  120  a log: the estimated memory of config/gpt2_124m.py beside the measured peak
memory_llama 120  a log: the same of config/llama_124m.py
END
}

if [ -n "$TINY" ]; then
    DEVICE="--device=cpu"
    SHAPE="--shape=S --compile=False --dtype=float32 --steps=2 --batch_size=1"
    RUN="--n_layer=1 --n_head=2 --n_embd=16 --block_size=64 --vocab_size=70 --batch_size=16
        --max_iters=4 --warmup_iters=0 --eval_interval=2 --eval_tokens=64 --compile=False"
    DECODE="--n_layer=1 --n_embd=48 --batch_size=2 --tokens=4 --steps=2 --threads=1"
    LENGTHS="--tokens=64 --shortest=32 --longest=64 --steps=2"
else
    DEVICE="--device=cuda"
    SHAPE="--shape=124m --compile=True --dtype=bfloat16"
    RUN=""
    DECODE="--n_layer=12 --n_head=12 --n_embd=768 --vocab_size=50304 --block_size=1024
        --dtype=bfloat16 --tokens=128 --steps=3"
    LENGTHS=""
fi

speed() { "$PYTHON" -m extras.speed "$@" $DEVICE; }

dataset() { # the arguments of a run
    local name=random_text
    [ ! -e "$DATA/shakespeare_char/meta.json" ] || name=shakespeare_char
    echo --dataset=$name "--data_dir=$DATA" $RUN
}

# ---- the steps

step_train() { speed train $SHAPE --only=our; }

step_train_gpt2() { speed train $SHAPE --only=GPT ${NANOGPT:+--nanogpt="$NANOGPT"}; }

step_train_llama() { speed train $SHAPE --only=LLaMA; }

step_data() {
    timeout 100 "$PYTHON" prepare.py shakespeare_char --data_dir="$DATA" && return
    [ -e "$DATA/random_text/meta.json" ] && return
    "$PYTHON" -c 'import random, string
print("".join(random.Random(0).choices(string.ascii_letters + " \n.,:;", k=1115394)))' >"$GPU_OUT/text"
    "$PYTHON" prepare.py random_text --input="$GPU_OUT/text" --tokenizer=char --data_dir="$DATA"
}

step_gpt2() { speed race --alone=gpt2_shakespeare --words="$(dataset)"; }

step_llama() { speed race --alone=llama_shakespeare --words="$(dataset)"; }

step_decode() { speed decode $DECODE; }

step_attention() { speed attention $LENGTHS; }

step_tests() {
    "$PYTHON" -m pytest -n0 -q -m gpu $(grep -rl --include=test_*.py mark.gpu tests)
}

dry_run() {
    local size="--gradient_accumulation_steps=4 --eval_tokens=65536"
    "$PYTHON" -m extras.dry_run "config/$1_124m.py" $DEVICE $size $(dataset)
}

step_memory_gpt2() { dry_run gpt2; }

step_memory_llama() { dry_run llama; }

case "${1:-}" in
--dry_run)
    list
    exit
    ;;
"") ;;
*)
    list | grep -q "^$1 " || { echo "no step $1: --dry_run lists them" >&2; exit 2; }
    mkdir -p "$GPU_OUT" && rm -f "$GPU_OUT/$1.done"
    "step_$1" 2>&1 | tee "$GPU_OUT/$1.log"
    [ "${PIPESTATUS[0]}" = 0 ] && touch "$GPU_OUT/$1.done"
    exit
    ;;
esac

gpu='import sys, torch; sys.exit(not torch.cuda.is_available())'
if [ -z "$TINY" ] && ! "$PYTHON" -c "$gpu"; then
    echo "no CUDA device is visible; the steps would be:" >&2
    list >&2
    exit 2
fi
left=""
while read -r step limit about; do
    [ -e "$GPU_OUT/$step.done" ] && continue
    [ -z "$TINY" ] || limit=600 # a CPU may be busy
    echo "== $step, at most $limit s: $about"
    timeout -k 10 "$limit" bash bench/gpu.sh "$step" </dev/null || left="$left $step"
done < <(list)
[ -z "$left" ] || { echo "not done:$left; start again to go on with these" >&2; exit 1; }
