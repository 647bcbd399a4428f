# Learn from preferences (DPO, extras/preferences.py): 48 lines for Shakespeare's characters,
# each once as an exclamation, which is chosen, and once as a plain sentence, which is rejected.
#   python train.py config/llama_shakespeare.py
#   python prepare.py exclaim --tokenizer=out-llama-shakespeare \
#       --input=docs/examples/preferences.jsonl
#   python -m extras.preferences config/dpo_example.py
#   python sample.py --out_dir=out-exclaim --start=$'ROMEO:\n' --num_samples=3 --max_new_tokens=60
# The model of the first command is both where training starts and the frozen reference. The loss
# begins at ln 2 = 0.693. With one seed it fell to 0.05 on the 5 validation pairs in 40 steps, and
# all of them were right from step 10 on (docs/finetuning.md).
init_from = "out-llama-shakespeare"
dataset = "exclaim"
out_dir = "out-exclaim"

# 8 preferences of two rows in a step, 41 to train on: 40 steps are 8 epochs. A row has 128 places,
# so on a CPU with two cores it takes less than a minute.
batch_size = 16
max_iters = 40
eval_interval = 10
log_interval = 10
# a small, constant learning rate, since the weights are already close to good ones
learning_rate = 1e-4
schedule = "constant"
warmup_iters = 0
weight_decay = 0.0
dropout = 0.0
