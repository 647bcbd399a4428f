"""What the published architectures are, by the code of the library `transformers`: its default
configurations, and small models of them with random weights."""

import torch

from bench.ledger.micro import largest, normal
from bench.ledger.table import NotMeasurable
from parts.mlp import MLP

SMALL = {
    "gpt2": dict(n_layer=1, n_head=2, n_embd=16, vocab_size=11, n_positions=16),
    "bloom": dict(n_layer=1, n_head=2, hidden_size=16, vocab_size=11),
    "falcon": dict(num_hidden_layers=1, num_attention_heads=2, hidden_size=16, vocab_size=11),
}
ATTENTION = {"gpt2": "attn", "bloom": "self_attention", "falcon": "self_attention"}


def library():
    try:
        import transformers
    except ImportError:
        raise NotMeasurable("the package transformers is not installed") from None
    transformers.logging.set_verbosity_error()
    return transformers


def config_of(family, **sizes):
    """The default configuration of a family, that of its first published model, at some sizes."""
    return library().AutoConfig.for_model(family, **sizes)


def model_of(family):
    """A small model of a family."""
    torch.manual_seed(0)
    config = config_of(family, **SMALL[family])
    return library().AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def seen_by(family, path, spoil=None):
    """What the module at this path of the first block reads; with `spoil`, after noise was added to
    the output of the module at that path."""
    model, seen = model_of(family), []
    block = model.transformer.h[0]

    def note(module, args, kwargs):
        seen.append((args or tuple(kwargs.values()))[0].clone())

    def change(module, args, out):
        noise = normal(*(out[0] if isinstance(out, tuple) else out).shape)
        return (out[0] + noise, *out[1:]) if isinstance(out, tuple) else out + noise

    block.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)
    if spoil:
        block.get_submodule(spoil).register_forward_hook(change)
    model(torch.arange(8)[None] % 11)
    return seen[0]


def norm_before(family):
    """The mean square of what the first block's attention reads: 1 if a norm stands before it."""
    return seen_by(family, ATTENTION[family]).square().mean().item()


def parallel(family):
    """How much what the MLP reads changes with the output of attention: 0 if they are parallel."""
    attention = ATTENTION[family]
    return largest(seen_by(family, "mlp") - seen_by(family, "mlp", spoil=attention))


def queries_per_key(family):
    """Query heads for each key head."""
    c = config_of(family)
    return c.num_attention_heads / c.num_key_value_heads


def activation_difference(family, other):
    """The largest difference between a family's activation and that of a word of our MLPs."""
    from transformers.activations import ACT2FN

    c = config_of(family)
    keys = ("hidden_activation", "hidden_act", "activation_function")
    name = next(getattr(c, key) for key in keys if getattr(c, key, None))
    x = normal(1000) * 2
    return largest(ACT2FN[name](x) - MLP[other].act(x))


def embedding_norms(family):
    """The number of norms between the embedding and the first block."""
    names = [name for name, _ in model_of(family).transformer.named_children()]
    return sum("norm" in name for name in names[: names.index("h")])
