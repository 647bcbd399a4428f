"""llama2.c: our weights in the formats of run.c and runq.c (int8), and the compiled programs."""

import os
import struct
import subprocess
from pathlib import Path

import torch

from common.errors import Failure, UserError, one_line
from sampling.fast import quantized

GCC = ["gcc", "-Ofast", "-march=native", "-fopenmp"]
MATRICES = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.gate", "mlp.down", "mlp.up")


def find_source(path):
    """The path of run.c, from it or from its folder. Raises UserError if it is missing."""
    source = Path(path)
    if source.is_dir():
        source = source / "run.c"
    if not source.is_file():
        fix = "give the folder of llama2.c, or its run.c"
        raise UserError("no run.c here", f"llama2c={path}", fix)
    return source


def compile_program(source, program):
    """Compile a source. Raises Failure, with the compiler's first line, if it does not compile."""
    command = [*GCC, "-o", str(program), str(source), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise UserError("llama2.c needs gcc", f"llama2c={source}", "install gcc") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        fix = f"check that it is {source.name} of llama2.c"
        raise Failure(f"gcc cannot compile it: {one_line(lines[0])}", f"llama2c={source}", fix)


def commands(path, model, folder):
    """{name: the command line that generates, without the number of tokens}, in float32 and, if
    there is a runq.c beside run.c, in int8. The files are written to `folder`."""
    source, words = find_source(path), folder / "tokenizer.bin"
    write_words(model.config.vocab_size, words)
    sides = {"llama2.c": (source, write_float32)}
    sides["llama2.c, int8"] = source.with_name("runq.c"), write_int8
    found = {}
    for name, (source, write) in sides.items():
        if source.is_file():
            program, weights = folder / source.stem, folder / f"{source.stem}.bin"
            compile_program(source, program)
            write(model, weights)
            found[name] = [program, weights, "-z", words, "-t", "0", "-n"]
    return found


def run_program(command):
    """Run a command with our number of threads. Returns the finished process."""
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=env)


def program_arm(command):
    """A function that writes n tokens with a command and returns (tokens, its own tokens/s)."""

    def write(n):
        done = run_program([*command, n])
        return [int(word) for word in done.stdout.split()], float(done.stderr.split()[-1])

    return write


# ---------------------------------------------------------------- their files


def by_kind(model):
    """{kind of tensor: those of all layers}. Their RoPE rotates neighbouring pairs, so the rows of
    wq and wk are reordered."""
    c, state = model.config, model.state_dict()
    layers = {}
    for kind in ("norm1", "norm2", *MATRICES):
        layers[kind] = [state[f"blocks.{i}.{kind}.weight"] for i in range(c.n_layer)]
    for kind, heads in {"attn.wq": c.n_head, "attn.wk": c.n_kv_head}.items():
        layers[kind] = [
            w.view(heads, 2, -1, c.n_embd).transpose(1, 2).reshape_as(w) for w in layers[kind]
        ]
    return layers


def sizes(model):
    """The first six of the seven integers in the header of both formats."""
    c = model.config
    width = model.blocks[0].mlp.gate.out_features
    return c.n_embd, width, c.n_layer, c.n_head, c.n_kv_head, c.vocab_size


def write_float32(model, path):
    """Write our weights in the older format that run.c reads: seven integers, then fp32 matrices,
    all layers of one kind together."""
    c, layers = model.config, by_kind(model)
    kinds = ("norm1", *MATRICES[:4], "norm2", *MATRICES[4:])
    angles = torch.zeros(c.block_size * c.n_embd // c.n_head)  # tables of RoPE, which it skips
    ends = [model.norm_f.weight, angles, model.lm_head.weight]
    *first, vocab_size = sizes(model)
    with open(path, "wb") as file:
        file.write(struct.pack("7i", *first, -vocab_size, c.block_size))
        for tensor in [model.wte.weight, *(w for kind in kinds for w in layers[kind]), *ends]:
            file.write(tensor.detach().contiguous().float().numpy().tobytes())


def write_int8(model, path):
    """Write our weights in version 2 of export.py, which runq.c reads: a header of 256 bytes, the
    norms in fp32, then each matrix in int8 with an fp32 scale for each group of 64 numbers, or
    fewer where 64 does not divide a row."""
    layers, group = by_kind(model), 64
    while any(size % group for size in sizes(model)[:2]):
        group //= 2
    header = (0x616B3432, 2, *sizes(model), model.config.block_size, 0, group)
    norms = [*layers["norm1"], *layers["norm2"], model.norm_f.weight]
    matrices = [w for kind in MATRICES for w in layers[kind]]
    with open(path, "wb") as file:
        file.write(struct.pack("<Ii7iBi", *header).ljust(256, b"\0"))
        for tensor in norms:
            file.write(tensor.detach().float().numpy().tobytes())
        for tensor in [model.wte.weight, *matrices, model.lm_head.weight]:
            for part in quantized(tensor.detach().reshape(-1, group)):
                file.write(part.numpy().tobytes())


def write_words(vocab_size, path):
    """Write a tokenizer whose words are the ids."""
    with open(path, "wb") as file:
        file.write(struct.pack("i", 6))
        for i in range(vocab_size):
            word = f"{i:05d} ".encode()
            file.write(struct.pack("fi", 0.0, len(word)) + word)
