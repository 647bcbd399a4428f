"""The settings of sample.py: SampleConfig declares each key once."""

from dataclasses import dataclass
from typing import Annotated, Literal

from common.configurator import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    Share,
)

DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
EXCLUDES = {  # {key: keys that have no meaning beside it}
    "prompts": ("start", "attention"),
    "compare": ("init_from", "draft", "attention", "show_probs"),
    "knn": ("init_from", "compare", "draft", "attention", "score"),
    "serve": ("prompts", "score", "attention", "draft", "knn", "jsonl", "show_probs"),
}


@dataclass
class SampleConfig:
    """The model that sample.py uses, the text it generates, and how it prints it."""

    OFTEN = (
        *("out_dir", "init_from", "start", "num_samples", "max_new_tokens", "temperature"),
        *("top_k", "stop", "serve", "device"),
    )
    # the model
    init_from: str = "resume"  # the run in out_dir; gpt2[-medium|-large|-xl], HF folder or name
    out_dir: str = "out"  # the run folder
    checkpoint: str = "latest"  # latest, best, or a step
    compare: str = ""  # comma-separated run folders, each of which continues the prompts
    # the prompt
    start: str = ""  # FILE:path reads it from a file; empty: a newline, or the end of a text
    prompts: str = ""  # a file with a prompt on each line, continued as batches
    skip_unknown: bool = False  # drop characters that are not in the vocabulary
    # the text
    num_samples: NonNegativeInt = 10  # of each prompt
    max_new_tokens: NonNegativeInt = 500  # per sample
    stop: str = ""  # end where this text first appears, and leave it out
    temperature: NonNegativeFloat = 0.8  # 1 = the model's own, 0 = always the likeliest token
    top_k: PositiveInt | None = 200  # draw from the k likeliest tokens only
    top_p: Share | None = None  # draw from the likeliest tokens that together have probability p
    min_p: Probability | None = None  # draw from tokens at least p times as likely as the likeliest
    repetition_penalty: PositiveFloat = 1.0  # above 1: tokens of the text so far are less likely
    seed: NonNegativeInt = 1337  # of the draws
    # what is shown
    jsonl: bool = False  # print a line of JSON per sample
    show_probs: bool = False  # a table of the likeliest tokens at each step, at temperature 1
    score: str = ""  # a text file: its loss, its surprising tokens; samples only with a prompt
    attention: str = ""  # a PNG to write: the attention over the prompt, instead of samples
    layer: NonNegativeInt = 0  # of attention, from 0
    # rare: a page in the browser
    serve: bool = False  # a page on 127.0.0.1, on which one or two models write token by token
    port: Annotated[int, Range(least=1, most=65535)] = 8000  # of that page
    # rare: memory and speed
    context: PositiveInt | None = None  # tokens the model looks back on at most; None: block_size
    draft: str = ""  # speculative decoding: run folder of a smaller model, or lookup
    knn: str = ""  # a datastore of bench/knn.py: the next token is drawn from the model and from it
    device: str = "auto"  # cpu, cuda, cuda:N, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = (
        "auto"  # of the weights; int8: a quarter of the memory, and the fastest on a CPU
    )
    compile: bool | Literal["auto"] = (
        "auto"  # CPU: takes half a minute, once for each shape of a model; auto: for 20,000 tokens
    )

    def __post_init__(self):
        for key, others in EXCLUDES.items():
            for other in others if getattr(self, key) else ():
                if getattr(self, other) != getattr(SampleConfig, other):
                    raise ValueError(f"{key} does not go with {other}: leave one of them out")
        if self.knn and self.dtype not in ("auto", "float32"):
            raise ValueError(f"knn needs float32, not dtype={self.dtype}: leave dtype out")
        if self.serve and self.compare.count(",") > 1:
            raise ValueError("serve shows two models at most: name two after compare")

    def writes(self):
        """Whether to generate samples, instead of only analysing a given text."""
        return not self.attention and bool(self.start or self.prompts or not self.score)

    def settings(self):
        """The settings of decoding.probabilities."""
        return {key: getattr(self, key) for key in DRAWING}
