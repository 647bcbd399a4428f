# Eleven dense named architectures compared with GPT-2 at one size: each has its own parts, but not
# its published width or depth.
#   python prepare.py python_source          # for a GPU
#   python bench/ablate.py config/archs.py --workers=4
#   python bench/ablate.py config/archs.py --arms='{"mistral": {"arch": "mistral"}}' --seeds=5
# The base is there twice. The MLP widths are chosen so that all have GPT-2's number of parameters.
# On a CPU a screening: 13 arms x 3 seeds = 39 runs / 2 * 85 s = 28 minutes on two cores. On a GPU
# 8 runs of each and 27 of the base, after its curve of tokens and the runs that choose learning
# rates.
# Expect architectures with rotary positions or ALiBi close together and ahead of GPT-2, and
# transformer2017 (norms after the sums) last, since it needs a lower learning rate.
question = "Which architecture's parts are best at one size?"
out_dir = "out-archs"
_words = ["llama", "llama2-70b", "llama3", "mistral", "bloom", "falcon", "gpt-neox", "olmo2"]
_words += ["qwen3", "transformer2017", "balanced"]
arms = {word: dict(arch=word) for word in _words}
model = "gpt2"
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
log_interval = 100
