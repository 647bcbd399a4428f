"""The model card of an exported run: what its checkpoint knows of base, data and loss."""

import json
import os
import re
from pathlib import Path

from common.errors import printable
from weights.hf import HUB

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [nanoparts]
license: unknown
{base_model}---

# {name}

{architecture}, {parameters:,} parameters, trained and written by nanoparts.

| | |
|---|---|
| base | {base} |
| data | {dataset}, in a vocabulary of {vocab_size:,} tokens; fingerprint {fingerprint} |
| training | {step:,} of {max_iters:,} steps, {optimizer}, learning rate {learning_rate:g} |
| context | {block_size:,} tokens |
| loss | {loss} |

```python
from transformers import pipeline

write = pipeline("text-generation", model="{name}")
print(write("The", max_new_tokens={new_tokens})[0]["generated_text"])
```

With nanoparts: `python sample.py --init_from={name}`

**Licence.** The checkpoint does not know it. The terms of the text, and of the weights that the run
began with, may hold for these weights too: before you publish them, put a licence in place of
`unknown` above.
"""


BEGINNINGS = {  # init_from
    "scratch": "none: trained from scratch",
    "resume": "not known, since the run was resumed",  # of older runs
}


def model_card(name, architecture, parameters, vocab_size, trained, state):
    """The text of README.md for an exported folder. name: of the folder. architecture: the class in
    transformers. parameters: their number. vocab_size: of the tokenizer. trained: the configuration
    of the run. state: of its checkpoint."""
    start = trained["init_from"]
    repo = hub_name(start)
    return CARD.format(
        name=printable(name),
        architecture=architecture,
        parameters=parameters,
        base_model=f"base_model: {json.dumps(repo)}\n" if repo else "",
        base=BEGINNINGS.get(start) or repo or printable(Path(start).name),
        dataset=printable(trained["dataset"]),
        vocab_size=vocab_size,
        fingerprint=state["data"],
        block_size=trained["block_size"],
        new_tokens=min(100, trained["block_size"] // 2),  # which its positions have room for
        step=state["step"],
        max_iters=trained["max_iters"],
        optimizer=trained["optimizer"],
        learning_rate=trained["learning_rate"],
        loss=loss_of(state, trained.get("eval_tokens"), "dpo_beta" in trained),
    )


def hub_name(start):
    """The name on the hub of the weights that a run began with; None for others."""
    if start in HUB:
        return HUB[start]
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", start) and not os.path.exists(start):
        return start
    return None


def loss_of(state, eval_tokens, of_preferences=False):
    """The validation loss of a checkpoint as a text: it knows its own if that is the lowest.
    eval_tokens: as many tokens were scored at most; 0 or None: all."""
    loss = state["best_val_loss"]
    if loss is None:
        return "not evaluated"
    bits = state.get("best_bits_per_byte")
    of_bytes = f", {bits:.4f} bits per byte" if bits is not None else ""
    part = f"at most {eval_tokens:,} tokens of " if eval_tokens else ""
    unit = "(of preferences)" if of_preferences else "nats"
    text = f"{loss:.4f} {unit}{of_bytes} on {part}validation data"
    best = state["best_step"]
    if best == state["step"]:
        return f"{text}, the lowest of the run"
    text = f"not known at this step; the lowest of the run was {text}, at step {best:,}"
    return f"{text}, which --checkpoint=best exports" if best else text
