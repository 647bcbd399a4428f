# After the config of a large model: its first 10 steps on any machine, on a text that is at hand.
#   python train.py config/gpt2_124m.py config/first_steps.py --check     is the loss right? (a minute or two on two CPU cores)
#   python train.py config/llama_124m.py config/first_steps.py --check
# What is checked is the model at its real size with GPT-2's tokens, its weights at the start, and the optimizer; without
# --check the same steps leave a checkpoint. To expect: a loss that falls from ln 50,304 = 10.8 to about 8.
dataset = "shakespeare"  # 301,966 tokens to train on; `python prepare.py shakespeare` is done first if need be
out_dir = "out-first-steps"

# 512 tokens a step: 6 * 124 M * 512 = 0.4 TFLOP, some 4 s at 100 GFLOP/s. 16 bytes a parameter: 2 GB, and 3.5 GB in all.
batch_size, gradient_accumulation_steps, block_size = 1, 1, 512
max_iters, warmup_iters, lr_decay_iters = 10, 5, 10
eval_interval, eval_tokens, log_interval = 10, 4096, 1
