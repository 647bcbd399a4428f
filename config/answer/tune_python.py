# Does the rate that suits Muon on plays suit Python files, too, for the base and for the part about
# which the two texts disagree most? Give this file after the shelf's:
#   python bench/ablate.py config/answer/llama.py config/answer/tune_python.py --workers=2
# 12 runs of four minutes. The convolution at that rate has run in the shelf's column python.
question = "Does the learning rate of plays suit Python files?"
out_dir = "bench/results/answer/tune-python-llama"
design = "arms"
screening = True
seeds = 2
# What the shelf has and a search of rates does not need.
controls = None
also = None
curve = []
# As in the column python of the page.
dataset = "python_source"
prompt = "def "
dtype = "float32"

arms = {
    "rate x0.5": dict(learning_rate=4e-3),
    "rate x2": dict(learning_rate=16e-3),
    "convolution, rate x0.5": dict(conv=4, learning_rate=4e-3),
    "convolution, rate x2": dict(conv=4, learning_rate=16e-3),
}
