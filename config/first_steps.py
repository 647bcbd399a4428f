# Give this after the config of a large model, to run its first 10 steps on any machine, on a small
# text.
#   python train.py config/gpt2_124m.py config/first_steps.py --check --device=cpu
#   python train.py config/llama_124m.py config/first_steps.py --check --device=cpu
# It checks the model at its real size with GPT-2's tokens, its initial weights, and the optimizer,
# in a minute or two on two CPU cores. Without --check the same steps write a checkpoint. Expect a
# loss that falls from ln 50,304 = 10.8 to about 8.
dataset = "shakespeare"  # 301,966 tokens to train on; prepared first if missing
out_dir = "out-first-steps"

# 512 tokens a step: 6 * 124 M * 512 = 0.4 TFLOP, some 4 s at 100 GFLOP/s. 16 bytes a parameter: 2
# GB, and 3.5 GB in all.
batch_size, gradient_accumulation_steps, block_size = 1, 1, 512
max_iters, warmup_iters, lr_decay_iters = 10, 5, 10
eval_interval, eval_tokens, log_interval = 10, 4096, 1
