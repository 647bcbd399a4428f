# Fine-tune GPT-2 on Shakespeare, as nanoGPT's config of this name does with gpt2-xl
# (--init_from=gpt2-xl works here, too).
#   python train.py config/finetune_shakespeare.py
#   python sample.py --out_dir=out-finetuned --checkpoint=best --start="ROMEO:" --num_samples=1
# If the data are missing, `python prepare.py shakespeare` runs first: 301,966 tokens to train on,
# 36,059 to validate. The first loss is the pretrained model's own on this text, and it should
# fall within the 20 steps; with more steps the model soon memorizes the text. We could not test
# with GPT-2's weights. With SmolLM2-135M's (--init_from=FOLDER, the text prepared with
# --tokenizer=FOLDER) the loss fell from 3.41 to 3.24 in 10 steps on a CPU, 4 minutes of training.
init_from = "gpt2"  # 124 M parameters
dataset = "shakespeare"
out_dir = "out-finetuned"

batch_size = 1
if device == "cpu":
    # 4 * 512 = 2,048 tokens a step: 6 * 124 M * 2,048 = 1.5 TFLOP, at 100 GFLOP/s 15 s; 20 steps
    # are 41 k tokens, 0.14 epochs, in 5 minutes. Five evaluations of 2 * 124 M * 2 * 4,096 tokens,
    # 20 s each, and all of val at the end, 90 s. 16 bytes a parameter: 2 GB; activations: 2 GB.
    block_size = 512
    gradient_accumulation_steps = 4
    eval_tokens = 4096
else:
    # nanoGPT's: 32 * 1024 = 32,768 tokens a step, an epoch in 9.2 steps, 20 steps 2.2 epochs.
    block_size = 1024
    gradient_accumulation_steps = 32
max_iters = 20
eval_interval = 5
log_interval = 1

# a small, constant learning rate, since the weights are already close to good ones
learning_rate = 3e-5
schedule = "constant"
warmup_iters = 0
