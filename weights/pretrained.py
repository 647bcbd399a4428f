"""
Load weights of other formats into our models:

    python sample.py --init_from=gpt2-medium --start="To be"
    python train.py config/finetune_shakespeare.py --init_from=FOLDER  # or owner/name, FILE.gguf
    python prepare.py more --input=TEXT --tokenizer=RUN  # of a run folder of ours

    word, values, tensors = load_pretrained("gpt2-medium")
    model = make(configure({"model": word} | values))
    load_weights(model, tensors)

"Theirs" means Hugging Face's config.json and tensors, "ours" our configuration and parameters;
families.py holds a table of both for each family. A model that ours cannot express exactly is
refused. Only safetensors and GGUF are read: a .bin or .pt file would have to be unpickled, which
can run any code.
"""

import functools
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.errors import UserError, one_line
from common.files import read_json
from parts.architectures import configure, make
from parts.costs import NoInitialValues
from tokens.tokenizer import tokenizer_from_json
from weights import checkpoint, gguf_format
from weights.families import NEOX
from weights.gguf_format import DAMAGED, EXPERT
from weights.hf_config import LARGEST, first_three, rows, simplest, understand
from weights.tokenizer_formats import from_tokenizer_json

GPT2_SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
HUB = {name: f"openai-community/{name}" for name in GPT2_SIZES}
TOKENIZER = ["tokenizer.json"]
FETCHED = ["config.json", "model*.safetensors*", *TOKENIZER]

# Buffers that older files store among the weights.
BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
LAYER = re.compile(r"\.([0-9]+)\.")  # the number of the layer in the name of a tensor
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of weights
UNFIT = "these are not the weights of this config.json"


# ---------------------------------------------------------------- their tensors to ours


def to_ours(config, tensors, where="config.json"):
    """(word of our model, values of its configuration, its tensors) from their config.json and
    tensors. The tensors must confirm the sizes in config.json before anything of those sizes is
    allocated. Raises UserError if the two do not fit, or if a tensor holds no finite weights."""
    family, values = understand(config, where)
    stored = with_prefix(family, tensors)
    check_numbers(family, values, stored, where)
    found = split(family, values, stored, where)
    head = found.get("lm_head.weight")
    if values["tie_embeddings"] and head is not None:  # transformers ties equal weights only
        values["tie_embeddings"] = torch.equal(head, found["wte.weight"].to(head.dtype))

    word, values_of_model = simplest(values)
    check_shapes(family, values, {"model": word} | values_of_model, found, where)
    return word, values_of_model, found


def with_prefix(family, tensors):
    """Their tensors under the names of the family's table; some files omit the prefix."""
    stored = {}
    for name, tensor in tensors.items():
        if family is NEOX:  # files have either name for its head
            name = name.replace("lm_head.", "embed_out.")
        whole = name.startswith((family.prefix, "lm_head.", "embed_out."))
        stored[name if whole else family.prefix + name] = tensor
    return stored


def check_numbers(family, values, stored, where):
    """Raise UserError if the configuration has more layers, or more experts, than the tensors."""
    numbered = [("n_layer", LAYER, "layer")]
    if any("*" in theirs for theirs, _, _ in family.tensors):
        numbered.append(("n_experts", EXPERT, "expert"))
    for key, pattern, noun in numbered:
        present = {match[1] for name in stored if (match := pattern.search(name))}
        if values[key] > len(present):
            claim = f"{family.keys[key]} is {values[key]}"
            what = f"{claim}, but there is no tensor of {noun} {len(present)}"
            raise UserError(what, where, UNFIT)


def split(family, values, stored, where):
    """{our name: tensor} from their tensors. Raises UserError if one is missing, has no place in
    our model, or holds no finite weights."""
    left, found, missing = dict(stored), {}, []
    for theirs, ours, layout in rows(family, values):
        names = expert_names(theirs, values)
        if left.keys() >= set(names):
            tensors = [left.pop(name) for name in names]
            for name, tensor in zip(names, tensors, strict=True):
                check_weights(name, tensor, where)
            try:
                whole = torch.stack(tensors) if "*" in theirs else tensors[0]
                found |= zip(ours, layout.split(whole, len(ours), values), strict=True)
            except (RuntimeError, ValueError, TypeError, IndexError):
                what = f"{theirs} has a shape that does not fit, {tuple(tensors[0].shape)}"
                raise UserError(what, where, UNFIT) from None
        elif ours != ["lm_head.weight"] or not values["tie_embeddings"]:
            missing += [name for name in names if name not in left]
    if missing:
        raise UserError(f"there is no tensor {first_three(missing)}", where, UNFIT)
    left = [name for name in left if not BUFFERS.search(name)]
    if left:
        raise UserError(f"our model has no place for {first_three(left)}", where, UNFIT)
    return found


def expert_names(name, values):
    """The tensor's name, or where it has a * the names of the tensors of all experts."""
    numbers = range(values["n_experts"]) if "*" in name else [0]
    return [name.replace("*", str(number)) for number in numbers]


def check_weights(name, tensor, where):
    """Raise UserError for tensors that are not finite floating-point weights: quantised integers,
    NaN, infinity."""
    if tensor.dtype not in DTYPES:
        what = f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}"
        raise UserError(what, where, "get the weights as float32, bfloat16 or float16")
    if tensor.numel():
        low, high = torch.aminmax(tensor)
        if not (low >= -LARGEST and high <= LARGEST):  # true for NaN, too
            raise UserError(f"{name} holds NaN or infinity", where, DAMAGED)


def check_shapes(family, values, keys, found, where):
    """Compare our tensors with the shapes of the model that configure(keys) describes. The model is
    built on the meta device, which takes no memory."""
    size = values["vocab_size"], values["n_embd"]
    stored = found["wte.weight"].shape
    if stored != size:  # checked first: all other sizes depend on it
        claim = f"{family.keys['vocab_size']}={size[0]} and {family.keys['n_embd']}={size[1]}"
        what = f"the token embedding is {tuple(stored)}, not that of {claim}"
        raise UserError(what, where, UNFIT)
    try:
        with torch.device("meta"), NoInitialValues():
            own = stored_tensors(make(configure(keys)))
    except UserError as error:
        raise UserError(error.parts[0], where, UNFIT) from None
    except (RuntimeError, OverflowError) as error:
        raise UserError(f"the sizes are too large: {one_line(error)}", where, UNFIT) from None
    theirs = {name: row for row, ours, _ in rows(family, values) for name in ours}
    wrong = [
        f"{theirs[name]} gives the shape {tuple(found[name].shape)}, not {tuple(parameter.shape)}"
        for name, parameter in own.items()
        if name in found and found[name].shape != parameter.shape
    ]
    if wrong:
        raise UserError(first_three(wrong), where, UNFIT)


def stored_tensors(model):
    """{name: tensor} of the parameters of a model, and of those buffers that a file holds."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return dict(model.named_parameters()) | buffers


# ---------------------------------------------------------------- files and folders


@functools.cache
def fetch(name, key="init_from"):
    """The folder of a model of the hub, downloaded at first use. Unless `key` is init_from, only
    its tokenizer is downloaded. If the hub does not answer, an earlier download is used."""
    wanted = FETCHED if key == "init_from" else TOKENIZER
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        fix = "pip install huggingface_hub, or give a folder"
        raise UserError("names of the hub need a package", f"{key}={name}", fix) from None

    try:
        try:
            # Without a timeout, an unresponsive network blocks forever.
            commit = HfApi().model_info(name, timeout=5).sha
            return Path(snapshot_download(name, revision=commit, allow_patterns=wanted))
        except Exception:
            return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    except Exception as error:  # the network, the hub and its client fail in many ways
        cause = str(error.__context__ or error).strip() or type(error).__name__
        what = f"no such folder, and the hub does not answer: {cause.splitlines()[0]}"
        files = " and ".join(wanted)
        fix = f"download {files} of huggingface.co/{name} elsewhere and give its folder"
        raise UserError(what, f"{key}={name}", fix) from None


def find(name, key="init_from"):
    """The folder or GGUF file that a name stands for. `key` is the key that messages name."""
    path = Path(os.path.expanduser(name))  # Path.expanduser raises where there is no home folder
    if name in HUB or not name or not os.path.exists(path):  # False for a name that is too long
        on_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", HUB.get(name, name))
        if not on_hub or name.endswith(".gguf"):
            words = ["scratch", "resume"] if key == "init_from" else ["auto", "char", "byte"]
            known = ", ".join([*words, *HUB])
            fix = f"give {known}, a folder, a .gguf file, or owner/name of the hub"
            raise UserError("no such folder or file", f"{key}={name}", fix)
        path = fetch(HUB.get(name, name), key)
    if not path.is_dir() and path.suffix != ".gguf":
        parts = "its config.json, *.safetensors and tokenizer.json"
        fix = f"give the folder of a model, with {parts}, or a .gguf file"
        raise UserError("this is not a folder", f"{key}={name}", fix)
    return path


def tensor_files(folder):
    """The files with a folder's tensors: those in the index of shards if there is one, else
    model.safetensors, else all *.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index, DAMAGED).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise UserError("weight_map does not name the file of each tensor", index, DAMAGED)
        return sorted({folder / name for name in names.values()})
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def read_folder(folder):
    """(config.json, {name: tensor}) of a folder, with the tensors in one file or in shards."""
    config, tensors = read_json(folder / "config.json", DAMAGED), {}
    for path in tensor_files(folder):
        try:
            tensors |= load_file(path)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"cannot read this part of the model: {why}", path, DAMAGED) from None
    if not tensors:
        pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
        what = "this folder has no *.safetensors file"
        if pickles:
            what = f"{first_three(pickles)} would need unpickling, which can run any code"
        raise UserError(what, folder, "get the model as safetensors")
    return config, tensors


def load_pretrained(name):
    """(word of our model, values of its configuration, its tensors) of a folder with config.json
    and *.safetensors, of a GGUF file, of gpt2[-medium|-large|-xl], or of owner/name on the hub.
    Raises UserError if it is missing or damaged, or if our model cannot express it."""
    path = find(name)
    if path.suffix == ".gguf":
        return to_ours(*gguf_format.read(path), path)
    return to_ours(*read_folder(path), path / "config.json")


def load_tokenizer(name, key="init_from"):
    """The tokenizer that belongs to the weights of load_pretrained(name), or of a run folder."""
    path = find(name, key)
    if checkpoint.steps(path):
        return tokenizer_from_json(checkpoint.read(checkpoint.find(path))[2])
    if path.suffix == ".gguf":
        return tokenizer_from_json(gguf_format.read_tokenizer(path))
    path = path / "tokenizer.json"
    whole = read_json(path, "prepare the text with a tokenizer of ours")
    return tokenizer_from_json(from_tokenizer_json(whole, path))


def same_tokens(name, tokenizer):
    """Whether a tokenizer has the same ids as the tokenizer of load_pretrained(name)'s weights;
    None if that one cannot be read."""
    try:
        theirs = load_tokenizer(name)
    except UserError:
        return None
    ids = range(min(tokenizer.vocab_size, theirs.vocab_size))
    return all(tokenizer.decode_bytes([i]) == theirs.decode_bytes([i]) for i in ids)


# ---------------------------------------------------------------- into our model


@torch.no_grad()
def load_weights(model, tensors):
    """Copy tensors into a model of ours; each tensor must have a parameter and the reverse. Weights
    without a head use their token embedding as the head. A model with a smaller block_size takes
    the first learned positions. Raises UserError, before anything is copied, if names or shapes
    differ."""
    own, fix = stored_tensors(model), "leave out the keys that change the architecture"
    tensors = {"lm_head.weight": tensors.get("wte.weight")} | tensors
    if "lm_head.weight" not in own:  # tied: it is wte.weight
        head, embedding = tensors.pop("lm_head.weight"), tensors.get("wte.weight")
        if head is not embedding and not torch.equal(head, embedding):
            what = "these weights have a head that differs from the embedding"
            raise UserError(what, "tie_embeddings=True", "use --tie_embeddings=False")

    missing, left = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    if missing:
        raise UserError(f"there are no weights for {first_three(missing)}", "init_from", fix)
    if left:
        raise UserError(f"the model has no place for {first_three(left)}", "init_from", fix)
    if "wpe.weight" in own:
        tensors["wpe.weight"] = tensors["wpe.weight"][: len(own["wpe.weight"])]
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}"
        for name, parameter in own.items()
        if tensors[name].shape != parameter.shape
    ]
    if wrong:
        raise UserError(first_three(wrong), "init_from", fix)
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def open_pretrained(name):
    """(model in evaluation mode, its tokenizer) for sampling. `name` as in load_pretrained."""
    word, values, tensors = load_pretrained(name)
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > values["vocab_size"]:
        what = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {values['vocab_size']}"
        fix = "get the tokenizer that belongs to these weights"
        raise UserError(what, f"init_from={name}", fix)
    model = make(configure({"model": word} | values))
    load_weights(model, tensors)
    return model.eval(), tokenizer
