"""What train.py prints when a run has taken all its steps: its results, and what to type next."""

import shlex
from pathlib import Path


def print_results(run, speed):
    """The best loss, the time, the median speed in tokens/s, and the share of each dataset."""
    best, bits = run.state["best_val_loss"], run.state["best_bits_per_byte"]
    units = "" if bits is None else f" nats per token, {bits:.4f} bits per byte"
    print(f"\nbest validation loss {best:.4f}{units}")
    seconds, step = run.state["seconds"], run.state["best_step"]
    print(f"at step {step}; {seconds:.0f} s of training, {speed:,.0f} tokens/s")
    if len(run.data.sources) > 1:
        drawn = [run.state.get("samples", {}).get(source.name, 0) for source in run.data.sources]
        for count, source in zip(drawn, run.data.sources, strict=True):
            share, epochs = count / max(1, sum(drawn)), count / source.batches.windows_per_epoch
            shares = f"{share:.2%} (asked for: {source.weight:.2%})"
            print(f"samples drawn: {count:,} of {source.name}, {shares}, {epochs:.2f} epochs")
    print()


def print_next_commands(folder, out_dir, argv):
    """The checkpoint's folder, and commands that sample from it and train the other model."""
    print(f"\ncheckpoint: {folder}   curves: {Path(out_dir) / 'loss.png'}")
    print(f"sample more:        python sample.py --out_dir={shlex.quote(out_dir)}")
    for path in argv:
        twin, name = path.replace("llama", "gpt2"), "GPT-2"
        if twin == path:
            twin, name = path.replace("gpt2", "llama"), "LLaMA"
        if path.endswith(".py") and twin != path and Path(twin).exists():
            print(f"compare with {name}: python train.py {twin}")
