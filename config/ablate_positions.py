# All position schemes with LLaMA's other parts, and how well each works beyond the training
# context.
#   python prepare.py python_source          # for a GPU
#   python bench/ablate.py config/ablate_positions.py --workers=2
# 6 schemes and the base, which is there twice. On a CPU a screening: 8 arms x 3 seeds = 24 runs of
# the size of config/ablate_shakespeare.py, about 16 minutes on two cores. On a GPU 6 x 8 runs to
# report, 20 of the base, 9 for its curve of tokens, and 63 to choose learning rates.
# Expect rope, alibi and relative ahead of learned and sinusoidal, and none last. Beyond the
# training context learned has no positions, rope gets worse, and alibi and relative do not.
question = "Which position scheme helps, and which carries beyond the training context?"
out_dir = "out-ablate-positions"
axis = "position"
model = "llama"
dataset = "plays"
dtype = "float32"  # so that rows of several machines can be joined
prompt = "ROMEO:"

if device == "cpu":
    screening = True
    seeds = 3
    # 4 * 12 * 64^2 = 0.2 M parameters; 1080 steps * 12 * 128 tokens = 1.7 M characters, 0.4 epochs.
    # With Muon GPT-2 ends at 1.70, where counting 5-grams gives 1.75.
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
multiple_of = 8
log_interval = 100
