"""
Time training steps and decoding, beside other libraries:

    python bench/speed.py train      # the training step
    python bench/speed.py optimizer  # a step of Muon beside one of AdamW
    python bench/speed.py decode     # tokens per second
    python bench/speed.py page       # writes bench/results/speed.md from all that was measured

Each has its own keys: add --help. All sides take turns, so that a busy machine slows all of them
equally; a ratio is the median over the rounds, with its 95 % bootstrap interval. Appends to
bench/results/speed.jsonl, and writes the page.
"""

import importlib

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from bench.timing import page, results
from common.configurator import build, load, print_help
from common.errors import UserError, run
from common.runtime import find_device

MODULES = ("train", "optimizer", "decode")  # of bench/timing: what is measured


def main(argv):
    if argv == ["page"]:
        return page.main()
    named = [word for word in argv if not word.startswith("-")]
    if len(named) != 1 or named[0] not in MODULES:
        print_help(argv, __doc__, [])
        fix = "write python bench/speed.py train, optimizer, decode or page"
        raise UserError("give exactly one measurement", "command line", fix)
    module = importlib.import_module(f"bench.timing.{named[0]}")
    import torch

    given = load(argv, [module.SpeedConfig], module.__doc__)
    config = build(module.SpeedConfig, given.values)
    device = find_device(getattr(config, "device", "cpu"))  # decoding: on a CPU alone
    torch.set_num_threads(config.threads or 1)
    command = results.command_text("speed.py", argv)
    for measured in module.measure(config, device):
        line = results.record(named[0], measured, device, command, torch.get_num_threads())
        print(page.table([line]), flush=True)
    page.main()


if __name__ == "__main__":
    run(main)
