"""
Time training steps and decoding, with parts swapped and beside other libraries:

    python bench/speed.py slots      # a Variant beside the readable model with the same parts
    python bench/speed.py norm       # all choices for a slot, each beside its base (any slot)
    python bench/speed.py norm --compile --model=gpt2 --n_layer=6 --n_embd=384 --block_size=256
    python bench/speed.py train      # the training step beside other libraries
    python bench/speed.py optimizer  # a step of Muon beside one of AdamW
    python bench/speed.py decode     # tokens per second beside other libraries
    python bench/speed.py gqa        # what is gained by sharing keys and values

The last four have their own keys: add --help. All sides take turns, so that a busy machine slows
all of them equally; a ratio is the median over the rounds, with its 95 % bootstrap interval.
Writes bench/results/speed_<what>.md.
"""

import importlib

import repo_root  # noqa: F401 (puts the repo's root on the path)

from common.errors import run

OWN_KEYS = ("train", "optimizer", "decode", "gqa")  # the modules of bench/timing with a main


def main(argv):
    for word in OWN_KEYS:
        if word in argv:
            return importlib.import_module(f"bench.timing.{word}").main(argv)
    from bench.timing import slots

    return slots.main(argv, __doc__)


if __name__ == "__main__":
    run(main)
