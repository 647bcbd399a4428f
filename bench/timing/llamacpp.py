"""llama.cpp: our weights as GGUF in its number formats, and the commands that read them."""

import os
import shutil
import subprocess
from pathlib import Path

import torch

from common.errors import UserError
from weights import gguf
from weights.export import to_hf

FORMATS = {"F32": "F32", "F16": "F16", "Q8_0": "F16"}  # of the weights: of the keys and values
SCRIPT = Path(__file__).with_suffix(".mjs")


def check_folder(folder):
    """Raise UserError unless node runs and node-llama-cpp, which brings llama.cpp, is there."""
    if not Path(folder, "node_modules", "node-llama-cpp").is_dir():
        fix = "run `npm install node-llama-cpp` there"
        raise UserError("no node-llama-cpp here", f"llamacpp={folder}", fix)
    if not shutil.which("node"):
        raise UserError("node-llama-cpp needs node", f"llamacpp={folder}", "install Node.js")


def one_word_each(vocab_size):
    """A tokenizer, in the form of to_json(), for a model that has none."""
    return {"kind": "char", "chars": "".join(map(chr, range(256, 256 + vocab_size)))}


def commands(path, model, folder):
    """{name: the command line that generates, without the number of tokens} for each format. The
    files are written to `folder`."""
    config, tensors = to_hf("llama", vars(model.config), model.state_dict(), ("llama",))
    words = one_word_each(config["vocab_size"])
    formats = {}
    for kind, cache in FORMATS.items():
        file = folder / f"{kind}.gguf"
        gguf.write(file, config, tensors, words, kind)
        formats[f"llama.cpp, {kind}"] = ["node", SCRIPT, Path(path).resolve(), file, cache]
    return formats


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
