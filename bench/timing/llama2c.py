"""llama2.c: our weights in the format that its run.c reads, and the compiled program."""

import os
import struct
import subprocess
from pathlib import Path

import torch

from common.errors import Failure, UserError, one_line

GCC = ["gcc", "-Ofast", "-march=native", "-fopenmp"]


def find_source(path):
    """The path of run.c, from it or from the folder that holds it. Raises UserError if it is
    missing."""
    source = Path(path)
    if source.is_dir():
        source = source / "run.c"
    if not source.is_file():
        fix = "give the folder of llama2.c, or its run.c"
        raise UserError("no run.c here", f"llama2c={path}", fix)
    return source


def compile_program(source, folder):
    """Compile run.c into folder/run. Raises Failure, with the compiler's first line, if it does not
    compile."""
    command = [*GCC, "-o", str(folder / "run"), str(source), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise UserError("llama2.c needs gcc", f"llama2c={source}", "install gcc") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        fix = "check that it is run.c of llama2.c"
        raise Failure(f"gcc cannot compile it: {one_line(lines[0])}", f"llama2c={source}", fix)


def program_arm(folder):
    """A function that writes n tokens with folder/run and returns (tokens, its own tokens/s)."""

    def write(n):
        model, words = folder / "model.bin", folder / "tokenizer.bin"
        done = subprocess.run(
            [folder / "run", model, "-z", words, "-t", "0", "-n", str(n)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        )
        return [int(word) for word in done.stdout.split()], float(done.stderr.split()[-1])

    return write


def write_llama2c(model, folder):
    """Write our weights in the older format that run.c reads: seven integers, then fp32 matrices,
    all layers of one kind together. Its RoPE rotates neighbouring pairs, so the rows of wq and wk
    are reordered. Its tokenizer gets the ids as words."""
    c, state = model.config, model.state_dict()

    def all_layers(name, heads=0):
        for i in range(c.n_layer):
            w = state[f"blocks.{i}.{name}.weight"]
            if heads:
                w = w.view(heads, 2, -1, c.n_embd).transpose(1, 2).reshape_as(w)
            yield w

    kinds = [
        ("norm1",),
        ("attn.wq", c.n_head),
        ("attn.wk", c.n_kv_head),
        ("attn.wv",),
        ("attn.wo",),
        ("norm2",),
        ("mlp.gate",),
        ("mlp.down",),
        ("mlp.up",),
    ]
    layers = [w for kind in kinds for w in all_layers(*kind)]
    angles = torch.zeros(c.block_size * c.n_embd // c.n_head)  # tables of RoPE, which it skips
    ends = [state["norm_f.weight"], angles, state["lm_head.weight"]]
    width = model.blocks[0].mlp.gate.out_features
    sizes = (c.n_embd, width, c.n_layer, c.n_head, c.n_kv_head, -c.vocab_size, c.block_size)
    with open(folder / "model.bin", "wb") as file:
        file.write(struct.pack("7i", *sizes))
        for tensor in [state["wte.weight"], *layers, *ends]:
            file.write(tensor.contiguous().float().numpy().tobytes())
    with open(folder / "tokenizer.bin", "wb") as file:
        file.write(struct.pack("i", 6))
        for i in range(c.vocab_size):
            word = f"{i:05d} ".encode()
            file.write(struct.pack("fi", 0.0, len(word)) + word)
