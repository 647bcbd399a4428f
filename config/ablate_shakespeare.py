# Which part of LLaMA helps a tiny GPT-2? A screening for a CPU: about 15 minutes on two cores.
#   python bench/ablate.py config/ablate_shakespeare.py --workers=2
# The arms are the five parts in which LLaMA differs, one at a time, the base, and the base again: 7
# arms x 3 seeds = 21 runs, two at a time on one thread each: 21 / 2 * 60 to 80 s = 11 to 14
# minutes. Three seeds show only large effects, and no learning rate is tuned: the report ranks the
# arms and marks effects larger than the noise. --screening=False --seeds=8 makes a sweep that
# decides, with 18 runs of the base, its curve of tokens, and a tuned learning rate for each arm.
# Expect a clear gain from rope, and small differences from the other parts.
question = "Which part of LLaMA helps a tiny GPT-2 on the characters of Shakespeare's plays?"
out_dir = "out-ablate-shakespeare"
design = "leave_one_in"
model = "gpt2"
dataset = "plays"
screening = True
seeds = 3
dtype = "float32"  # so that rows of several machines can be joined
prompt = "ROMEO:"

# 4 * 12 * 64^2 + 65 * 64 + 128 * 64 = 0.2 M parameters; 1080 steps * 12 * 128 tokens = 1.7 M
# characters, 0.4 epochs: 6 * 0.2 M * 1.7 M = 2 TFLOP, 65 s at the 30 GFLOP/s that one core reaches
# with operations this small. With Muon GPT-2 ends at 1.70, where counting 5-grams gives 1.75.
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
dropout = 0.0
log_interval = 100
