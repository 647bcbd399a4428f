# From GPT-2 to LLaMA one part at a time: the gain of each change, on top of those before it.
#   python bench/ablate.py config/ladder_gpt2_to_llama.py --workers=4
# 6 rungs, the base and the base again: 8 arms x 5 seeds = 40 runs. Each rung is compared with the
# one below it, and has as many parameters as the base. The last rung, after the five parts, is
# grouped-query attention with two query heads for each key and value head; the larger LLaMA 2 and
# LLaMA 3 use it, too. Expect most of the gain from one rung, the positions.
question = "What does each step from GPT-2 to LLaMA add?"
out_dir = "out-ladder"
design = "ladder"
order = ["norm", "position", "mlp", "bias", "tie_embeddings", "gqa"]
dataset = "shakespeare_char"
seeds = 5
prompt = "ROMEO:"

if device == "cpu":
    screening = True
    # 4 * 12 * 64^2 = 0.2 M parameters; 40 runs / 2 * 80 s = 27 minutes on two cores
    n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
    batch_size, max_iters, eval_interval = 12, 2500, 500
    learning_rate, min_lr, warmup_iters = 3e-3, 0.0, 100
else:
    # 6 * 12 * 384^2 = 10.6 M parameters, 5000 steps * 64 * 256 = 82 M characters, 5.2 PFLOP a run
    n_layer, n_head, n_embd, block_size = 6, 6, 384, 256
    batch_size, max_iters, eval_interval = 64, 5000, 250
    learning_rate, min_lr, warmup_iters = 1e-3, 1e-4, 100
    dropout = 0.2
arms = {"gqa": dict(n_kv_head=n_head // 2)}
beta2 = 0.99
log_interval = 100
