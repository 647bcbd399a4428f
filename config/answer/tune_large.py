# Which rate suits Muon at four times the size, tokens and batch of the shelf? Give this file after
# the file of the shelf, on a machine with a GPU:
#   python bench/ablate.py config/answer/llama.py config/answer/tune_large.py --workers=12
question = "Does the learning rate of plays suit a larger LLaMA on Python files?"
out_dir = "bench/results/answer/tune-large-llama"
design = "arms"
screening = True
seeds = 2
# What the shelf has and a search of rates does not need.
controls = None
also = None
curve = []
# As in the column large of the page.
dataset = "python_source"
prompt = "def "
dtype = "float32"
n_embd = 256
n_head = 8
batch_size = 48
device = "cuda"
compile = False

arms = {
    "rate x0.5": dict(learning_rate=4e-3),
    "rate x2": dict(learning_rate=16e-3),
    "rate x4": dict(learning_rate=32e-3),
}
