"""python -m extras.speed train|optimizer|attention|decode|race|page

Time training steps, optimizers, decoding and whole runs, beside other libraries:

    python -m extras.speed train      # the training step
    python -m extras.speed optimizer  # a step of Muon beside one of AdamW
    python -m extras.speed attention  # its formula beside the fused kernels
    python -m extras.speed decode     # tokens per second
    python -m extras.speed race       # whole runs beside nanoGPT's
    python -m extras.speed page       # writes bench/results/speed.md from all that was measured

Each has its own keys: add --help. All sides take turns, so that a busy machine slows all of them
equally; a ratio is the median over the rounds, with its 95 % bootstrap interval. Appends to
bench/results/speed.jsonl, and writes the page.
"""

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.need(*early.ABLATE)
    early.start("extras.speed")

import torch

from common.configurator import build, load, print_help
from common.errors import UserError, run
from common.runtime import with_number
from extras.speed import attention, decode, optimizer, page, race, results, train

MEASUREMENTS = {
    "train": train,
    "optimizer": optimizer,
    "attention": attention,
    "decode": decode,
    "race": race,
}


def read(argv):
    """(name of a measurement, its SpeedConfig) of a command line; ("page", None) for the page."""
    names = [word for word in argv if not word.startswith("-")]
    if argv == ["page"]:
        return "page", None
    if len(names) != 1 or names[0] not in MEASUREMENTS:
        print_help(argv, __doc__, [])
        fix = "write python -m extras.speed train, optimizer, attention, decode, race or page"
        raise UserError("give exactly one measurement", "command line", fix)
    measurement = MEASUREMENTS[names[0]]
    given = load(argv, [measurement.SpeedConfig], measurement.__doc__)
    return names[0], build(measurement.SpeedConfig, given.values)


def main(argv):
    name, config = read(argv)
    if name == "page":
        return page.main()
    device = with_number(config.device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # whose memory and name are read
    torch.set_num_threads(getattr(config, "threads", None) or 1)
    for measured in MEASUREMENTS[name].measure(config, device):
        threads = torch.get_num_threads()
        if name == "race":
            threads = None  # each run chooses its own
        line = results.record(name, measured, device, results.command_text(argv), threads)
        print(page.table([line]), flush=True)
        page.main()


if __name__ == "__main__":
    run(main)
