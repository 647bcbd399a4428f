"""Models of other libraries, with the sizes of ours. `shape` has n_layer, n_head, n_embd,
block_size, vocab_size and, for a LLaMA, multiple_of. Each function returns (model, its loss
function)."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path

from torch.nn import functional as F

from common.errors import UserError

# LLaMAs with a larger vocabulary than this have tied embeddings, as in config/llama_124m.py.
TIED_FROM = 50000


def with_loss(model):
    """A model of transformers and its loss function."""
    return model, lambda x, y: F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())


def check_nanogpt(path):
    """Raise UserError unless the folder, if one is given, is a checkout of nanoGPT."""
    if path and not Path(path, "model.py").exists():
        fix = "clone nanoGPT there, or leave the key out"
        raise UserError("no nanoGPT here", f"nanogpt={path}", fix)


def nanogpt(path, shape):
    """nanoGPT's own model.py, from its checkout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path, "model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where torch.compile looks for it
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=shape.block_size,
        vocab_size=shape.vocab_size,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        dropout=0.0,
        bias=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        model = module.GPT(config)
    return model, lambda x, y: model(x, y)[1]


def transformers_gpt2(shape):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.block_size,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return with_loss(GPT2LMHeadModel(config))


def transformers_llama(shape):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.n_embd,
        intermediate_size=shape.multiple_of * -(-int(8 * shape.n_embd / 3) // shape.multiple_of),
        num_hidden_layers=shape.n_layer,
        num_attention_heads=shape.n_head,
        max_position_embeddings=shape.block_size,
        tie_word_embeddings=shape.vocab_size > TIED_FROM,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return with_loss(LlamaForCausalLM(config))
