# From GPT-2 to LLaMA one part at a time: the gain of each change, on top of the changes before.
#   python prepare.py python_source          # for a GPU
#   python bench/ablate.py config/ladder_gpt2_to_llama.py --workers=4
# 6 rungs, and the base, which is there twice. On a CPU a screening: 8 arms x 5 seeds = 40 runs; on
# a GPU 8 seeds, the base's curve of tokens, and tuned learning rates. Each rung is compared with
# the one below it, and has as many parameters as the base. The last rung, after the five parts, is
# grouped-query attention with two query heads for each key and value head; the larger LLaMA 2 and
# LLaMA 3 use it, too. Expect most of the gain from one rung, the positions.
question = "What does each step from GPT-2 to LLaMA add?"
out_dir = "out-ladder"
design = "ladder"
dataset = "plays"
dtype = "float32"  # so that rows of several machines can be joined
prompt = "ROMEO:"

if device == "cpu":
    screening = True
    seeds = 5
    # 4 * 12 * 64^2 = 0.2 M parameters; 1080 steps * 12 * 128 tokens = 1.7 M characters, 0.4 epochs.
    # With Muon GPT-2 ends at 1.70, where counting 5-grams gives 1.75. 40 runs / 2 * 80 s =
    # 27 minutes on two cores.
    n_layer = 4
    n_head = 4
    n_embd = 64
    block_size = 128
    batch_size = 12
    max_iters = 1080
    eval_interval = 135
    eval_tokens = 9216
    optimizer = "muon"
    learning_rate = 8e-3
    min_lr = 8e-4
    warmup_iters = 100
else:
    # 6 * 12 * 384^2 + 2048 * 384 = 11.4 M parameters, 1000 steps * 64 * 256 = 16 M tokens, 0.9
    # epochs, 6 * 11.4 M * 16 M = 1.1 PFLOP a run. We have not run it.
    dataset = "python_source"
    prompt = "def "
    n_layer = 6
    n_head = 6
    n_embd = 384
    block_size = 256
    batch_size = 64
    max_iters = 1000
    eval_interval = 50
    eval_tokens = 262144
    learning_rate = 1e-3
    min_lr = 1e-4
    warmup_iters = 100
    beta2 = 0.99
arms = {
    "rmsnorm": dict(norm="rmsnorm"),
    "rope": dict(position="rope"),
    "swiglu": dict(mlp="swiglu"),
    "no biases": dict(bias="none"),
    "untied": dict(tie_embeddings=False),
    "gqa": dict(n_kv_head=n_head // 2),
}
log_interval = 100
