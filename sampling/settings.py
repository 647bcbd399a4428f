"""The settings of sample.py: SampleConfig declares each key once."""

from dataclasses import dataclass
from typing import Literal

from common.configurator import (
    NonNegativeFloat,
    NonNegativeInt,
    PathName,
    PositiveFloat,
    PositiveInt,
    Probability,
    Share,
)
from common.errors import UserError


@dataclass
class SampleConfig:
    """The model that sample.py uses, the text it writes, and how it prints it."""

    OFTEN = (
        "out_dir",
        "init_from",
        "start",
        "num_samples",
        "max_new_tokens",
        "temperature",
        "top_k",
        "stop",
        "device",
    )
    # the model
    #: resume: the run in out_dir; or a run folder, gpt2[-medium|-large|-xl], HF folder, HF name
    init_from: PathName = "resume"
    out_dir: PathName = "out"  # the run folder
    checkpoint: str = "latest"  # latest, best, or a step
    # the prompt
    start: str = ""  # FILE:path reads it from a file; empty: begin a new text
    prompts: PathName = ""  # a file with a prompt on each line, continued as batches
    chat: bool = False  # the prompt is a message to a chat model; without one, a conversation
    skip_unknown: bool = False  # drop characters that are not in the vocabulary
    # the text
    num_samples: NonNegativeInt = 10  # of each prompt
    max_new_tokens: NonNegativeInt = 500  # per sample
    stop: str = ""  # end where this text first appears, and leave it out ($'\n': a line break)
    temperature: NonNegativeFloat = 0.8  # 1 = the model's own, 0 = always the likeliest token
    top_k: PositiveInt | None = 200  # draw from the k likeliest tokens only
    top_p: Share | None = None  # draw from the likeliest tokens that together have probability p
    min_p: Probability | None = None  # draw from tokens at least p times as likely as the likeliest
    repetition_penalty: PositiveFloat = 1.0  # above 1: tokens of the text so far are less likely
    seed: NonNegativeInt = 1337  # of the draws
    # what is shown
    jsonl: bool = False  # print a line of JSON per sample
    show_probs: bool = False  # a table of the likeliest tokens at each step, at temperature 1
    # rare: memory and speed
    context: PositiveInt | None = None  # tokens the model looks back on at most; None: block_size
    device: str = "auto"  # cpu, cuda, cuda:N, mps
    #: of the weights; int8: a quarter of the memory, and the fastest on a CPU
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    #: CPU: takes up to a minute, once for each shape of a model; auto: for 20,000 tokens
    compile: bool | Literal["auto"] = "auto"

    def __post_init__(self):
        if self.prompts and self.start:
            raise ValueError("prompts does not go with start: leave one of them out")

    def converses(self):
        """Whether messages are to be typed."""
        return self.chat and not self.start and not self.prompts

    def drawing(self):
        """The arguments of sample.probabilities."""
        return {key: getattr(self, key) for key in DRAWING}


DRAWING = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
DRAWN = ["max_new_tokens", *DRAWING, "stop", "seed"]  # keys of what is drawn
# Keys of the text alone. The others name the model, the prompts and the form of what is printed.
OF_TEXT = [*DRAWN, "context", "skip_unknown"]

# Keys that name the model. A command that takes it as a word, such as RUN, refuses them.
NAMING = ["init_from", "out_dir"]


def refuse_idle(typed, idle):
    """Raise UserError for a key that was typed and that a command does not use."""
    for key in typed:
        if key in idle:
            raise UserError(f"{key} changes nothing here", "command line", "leave it out")


# Keys of other libraries.
RENAMED = {
    "prompt": "use --start",
    "model": "use --init_from",
    "max_tokens": "use --max_new_tokens",
    "max_length": "use --max_new_tokens",
    "num_return_sequences": "use --num_samples",
}
