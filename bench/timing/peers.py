"""Models of other libraries, with the sizes of ours. `c` has n_layer, n_head, n_embd, block_size,
vocab_size and, for a LLaMA, multiple_of. Each function returns (model, its loss function)."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path

from torch.nn import functional as F

from common.errors import UserError

# LLaMAs with a larger vocabulary than this have tied embeddings, as in config/llama_124m.py.
TIED_FROM = 50000
THEIRS = {"use_cache": False, "attn_implementation": "sdpa"}  # of transformers' models


def with_loss(model):
    """A model of transformers and its loss function."""
    return model, lambda x, y: F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())


def check_nanogpt(path):
    """Raise UserError unless the folder, if one is given, is a checkout of nanoGPT."""
    if path and not Path(path, "model.py").exists():
        fix = "clone nanoGPT there, or leave the key out"
        raise UserError("no nanoGPT here", f"nanogpt={path}", fix)


def nanogpt(path, c):
    """nanoGPT's own model.py, from its checkout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path, "model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where torch.compile looks for it
    spec.loader.exec_module(module)
    sizes = (c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd)
    with contextlib.redirect_stdout(io.StringIO()):
        model = module.GPT(module.GPTConfig(*sizes, dropout=0.0, bias=False))
    return model, lambda x, y: model(x, y)[1]


def transformers_gpt2(c):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {key: getattr(c, key) for key in ("vocab_size", "n_embd", "n_layer", "n_head")}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_positions=c.block_size, **sizes, **dropout, **THEIRS)
    return with_loss(GPT2LMHeadModel(config))


def transformers_llama(c):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.n_embd,
        intermediate_size=c.multiple_of * -(-int(8 * c.n_embd / 3) // c.multiple_of),
        num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head,
        max_position_embeddings=c.block_size,
        tie_word_embeddings=c.vocab_size > TIED_FROM,
        **THEIRS,
    )
    return with_loss(LlamaForCausalLM(config))
