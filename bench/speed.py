"""
Time training steps and decoding, with parts swapped and beside other libraries:

    python bench/speed.py slots      # a Variant beside the readable model with the same parts
    python bench/speed.py norm       # all choices for a slot, each beside its base (any slot)
    python bench/speed.py norm --compile --model=gpt2 --n_layer=6 --n_embd=384 --block_size=256
    python bench/speed.py train      # the training step beside other libraries
    python bench/speed.py optimizer  # a step of Muon beside one of AdamW
    python bench/speed.py decode     # tokens per second beside other libraries
    python bench/speed.py gqa        # what is gained by sharing keys and values
    python bench/speed.py mixers     # mixers with a state beside attention, to 64k tokens
    python bench/speed.py flash      # attention in one kernel beside its formula
    python bench/speed.py flex       # FlexAttention beside a mask
    python bench/speed.py shakespeare  # the Shakespeare configs, whole runs
    python bench/speed.py memory     # the estimate of --dry_run beside the measured peak
    python bench/speed.py ranks      # two processes beside one
    python bench/speed.py page       # writes bench/results/speed.md from all that was measured

All but slots have their own keys: add --help. All sides take turns, so that a busy machine slows
all of them equally; a ratio is the median over the rounds, with its 95 % bootstrap interval.
Appends to bench/results/speed.jsonl, and writes the page.
"""

import importlib

import repo_root  # noqa: F401 (puts the repo's root on the path)

from common.errors import UserError, run

# {what is measured: the module of bench/timing}; any other word is a slot
MODULES = {word: word for word in ("train", "optimizer", "gqa", "mixers")}
MODULES |= {"flash": "attention", "flex": "attention"}
MODULES |= dict.fromkeys(("shakespeare", "memory", "ranks"), "runs")


def main(argv):
    from bench.timing import page, results
    from common.configurator import build, load
    from common.runtime import find_device

    if "decode" in argv:
        importlib.import_module("bench.timing.decode").main(argv)
        return page.main()
    named = [word for word in argv if word in MODULES]
    module = importlib.import_module(f"bench.timing.{MODULES[named[0]] if named else 'slots'}")
    values, words = load(argv, [module.SpeedConfig], module.__doc__ if named else __doc__)
    if len(words) != 1:
        fix = "python bench/speed.py slots, or another of its --help"
        raise UserError("give exactly one measurement", "command line", fix)
    if words == ["page"]:
        return page.main()

    config = build(module.SpeedConfig, values)
    results.check_steps(config.steps)
    device = find_device(config.device)
    import torch

    torch.set_num_threads(config.threads)
    found = module.measure(words[0], config, device)
    print("\n".join(page.table(found["rows"])))
    results.record(found, device, config, argv)
    page.main()


if __name__ == "__main__":
    run(main)
