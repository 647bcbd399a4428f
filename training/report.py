"""What train.py prints before the first step, after the last one, and when a run fails."""

import json
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from common import files
from common.configurator import keys, load
from common.errors import Failure, UserError, folded
from parts import moe
from parts.architectures import CORNERS, configure
from parts.costs import training_flops_per_token
from parts.variant import VariantConfig
from tokens.mixture import bits_per_byte, open_split
from tokens.pairs import Pairs
from training import losses
from training.run_folder import DIVERGED, evaluation_lines, measures_text
from training.settings import NanoGPT, TrainConfig, scope
from weights import checkpoint

OTHER = {"gpt2": "llama", "llama": "gpt2"}
NAMES = {"gpt2": "GPT-2", "llama": "LLaMA"}

# Dense TFLOP/s in bfloat16 and float16, summed in float32, from NVIDIA's data sheets (which list
# twice as much "with sparsity"), of GPUs whose name has all of these words; the first that fits.
PEAKS = {
    "B200": 2250,
    "H200": 989,
    "GH200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "5090": 210,
    "4090": 165,
    "3090": 71,
}
OTHER_CHIPS = {"Laptop", "MIG"}  # slower chips, or parts of one, with these names


def variant(run):
    """The model's configuration as a VariantConfig, which parts/costs.py reads."""
    c = run.model.config
    if isinstance(c, VariantConfig):
        return c
    return configure(asdict(c) | {"model": run.config.model}, as_variant=True)


def used_parameters(model):
    """The number of a model's parameters that one token uses: not all experts."""
    count = sum(p.numel() for p in model.parameters())
    return count - sum(layer.unused() for layer in moe.layers_of(model))


def peak_flops(runtime):
    """The FLOP/s that a runtime's device could do in its dtype, by the maker's figure, or None
    where there is none: for a CPU, an unknown GPU, and float32."""
    if not runtime.device.startswith("cuda") or runtime.dtype == "float32":
        return None
    words = set(re.split("[^A-Za-z0-9]", torch.cuda.get_device_name(runtime.device)))
    fitting = [peak for name, peak in PEAKS.items() if words.issuperset(name.split())]
    return fitting[0] * 1e12 if fitting and not words & OTHER_CHIPS else None


def peak_speed(run):
    """The tokens/s at which the devices would compute nothing else and never wait, or None. The
    MFU, the model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311), is the share of it
    that a run reaches."""
    runtime, c, peak = run.runtime, variant(run), peak_flops(run.runtime)
    if peak is None:
        return None
    print(f"100 % MFU is {peak * runtime.world_size / 1e12:,.0f} TFLOP/s, of the data sheet, dense")
    return peak * runtime.world_size / training_flops_per_token(c, c.block_size)


# ---------------------------------------------------------------- before the first step


def describe(run):
    """Print the machine, the data, the parts of the model and the optimizers of a run."""
    print("\n".join(run.runtime.reasons))
    if run.saved is not None:
        print(f"resumed after step {run.step} of {run.config.max_iters}")
    for source in run.sources:
        describe_source(source, mixed=len(run.sources) > 1)

    count, used = sum(p.numel() for p in run.model.parameters()), used_parameters(run.model)
    active = f", of which a token uses {used:,}" if used < count else ""
    print(f"model {run.config.arch or run.config.model}: {count:,} parameters{active}")
    for part, number in parameters_by_part(run.model).items():
        print(f"  {part:<22}{number:>12,}")
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            number, tensors = sum(p.numel() for p in group["params"]), len(group["params"])
            print(
                f"{type(optimizer).__name__}: {number:,} parameters in {tensors} tensors, "
                f"weight decay {group['weight_decay']}"
            )

    samples, passes = run.config.max_iters * run.step_samples, []
    for source in run.sources:
        epochs = samples * source.weight / source.batches.windows_per_epoch
        of = f" of {source.name}" if len(run.sources) > 1 else ""
        passes.append(f"{epochs:.2f} epochs{of}")
    steps = f"{run.config.max_iters} steps of {run.step_tokens:,} tokens"
    print(folded(f"{steps}: {', '.join(passes)}", 2))


def print_once(runtime, text):
    """Print a text on rank 0 alone."""
    if runtime.main:
        print(text)


def describe_source(source, mixed):
    """Print the sizes of a dataset, and of its vocabulary."""
    train, val = source.splits["train"], source.splits["val"]
    share = f"{source.weight:.2%} of the samples, " if mixed else ""
    counts = f"{share}{len(train):,} tokens to train on, {len(val):,} to validate"
    print(folded(f"data {source.name}: {counts}, vocabulary {source.meta['vocab_size']}", 2))
    if isinstance(train, Pairs):
        left_out, cut = train.left_out + val.left_out, train.cut + val.cut
        texts = [f"  {len(train.starts):,} pairs to train on, {len(val.starts):,} to validate"]
        if left_out:
            texts.append(f"{left_out:,} more left out: their answers begin beyond block_size")
        if cut:
            texts.append(f"{cut:,} cut there")
        print(folded("; ".join(texts), 4))


def parameters_by_part(model):
    """{part: number of parameters}. A part of the blocks is summed over all blocks."""
    counts = {}
    for name, p in model.named_parameters():
        words = name.split(".")
        part = words[0]
        if part == "blocks":
            part = f"{words[2]} (in {model.config.n_layer} blocks)"
        counts[part] = counts.get(part, 0) + p.numel()
    return counts


# ---------------------------------------------------------------- after the last step


def print_results(run, speed):
    """The best loss, the time, and the median speed in tokens/s."""
    best, bits = run.state["best_val_loss"], run.state.get("best_bits_per_byte")
    units = "" if bits is None else f" nats per token, {bits:.4f} bits per byte"
    part = f" on {run.config.eval_tokens:,} tokens" * bool(run.config.eval_tokens)
    print(f"\nbest validation loss {best:.4f}{units}{part}")
    for name, loss in list(losses.yardsticks(run).items())[:1]:
        source = run.sources[0]
        units = f" nats per token, {loss * source.bits_per_byte:.4f} bits per byte"
        print(f"{name} of the same text: {loss:.4f}{units * (source.meta['tokenizer'] != 'char')}")
    seconds, step = run.state["seconds"], run.state["best_step"]
    print(f"at step {step}; {seconds:.0f} s of training, {speed:,.0f} tokens/s")
    print()


def print_how_to_continue(run):
    """The command that continues a run that was stopped."""
    print(f"stopped after step {run.step}, saved; continue with:")
    program, ranks = "python", run.runtime.world_size
    if ranks > 1:
        program = f"torchrun --standalone --nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"
    words = "--init_from=resume", f"--out_dir={run.config.out_dir}"
    print(files.command("train.py", *words, program=program))


def print_evaluation(run, score, evaluate):
    """Print what --eval_only asks for: the losses, or those of another split, by train.py's `score`
    and `evaluate`. Returns the exit status. Raises UserError if a dataset has no such split."""
    limit = run.config.eval_tokens
    if run.config.split == "val":
        print_once(run.runtime, evaluation_lines(score(run)))
        return 0
    for source in run.sources:
        folder = Path(run.config.data_dir) / source.name
        split = open_split(folder, run.config.split, run.model.config.block_size)
        sums = evaluate(run, split, limit)
        loss = losses.mean_loss(sums)
        row = {"bits_per_byte": loss * bits_per_byte(split, run.tokenizer, limit)}
        row |= losses.measures([sums], [1.0], [split.measures])
        what = f"{run.config.split} loss {loss:.4f}{measures_text(row)}"
        print_once(run.runtime, f"step {run.step}: {source.name}: {what}")
    return 0


def closing_prompt(split, tokenizer):
    """(prompt, where to stop) of the sample at the end: the first prompt of the validation split if
    the data are prompts and answers, else that of a new text: none if a special token starts it."""
    special = {tokenizer.bos, *tokenizer.stops} - {None}
    newline = "" if special else tokenizer.decode([tokenizer.end])
    if not isinstance(split, Pairs):
        return newline, ""
    first, answer, end = split.starts[0], split.answers[0], split.ends[0] - 1
    prompt = [i for i in split.tokens[first:answer].tolist() if i not in special]
    known = tokenizer.decode(split.tokens[answer:end].tolist())
    print(f"a prompt that it has not seen, whose answer in the data is {known!r}:")
    return tokenizer.decode(prompt), newline


def print_next_commands(folder, config, given):
    """The checkpoint's folder, and commands that sample from it and train the other model."""
    out_dir = Path(config.out_dir)
    print(f"\ncheckpoint: {folder}\ncurves:     {out_dir / 'loss.png'}")
    print(f"sample more:\n{files.command('sample.py', f'--out_dir={out_dir}')}")
    twin = twin_arguments(given)
    if twin:
        print(f"compare with {NAMES[OTHER[config.model]]}:\n{files.command('train.py', *twin)}")


def twin_arguments(given):
    """The arguments that train the other model in the same way: its config file, and what the user
    typed. [] if there is no such config, if the user chose the model or the weights to start from,
    or if the other model does not take these keys or sizes. given: configurator.Given."""
    word = "llama" if any("llama" in name for name in given.files) else "gpt2"
    other = OTHER[word]
    config_files = [name.replace(word, other) for name in given.files]
    start = {"model", "arch", "init_from", "overwrite", "allow_data_change"}
    if config_files == given.files or not start.isdisjoint(given.typed):
        return []

    texts = dict(given.texts)
    if "out_dir" in texts:
        parent, slash, name = texts["out_dir"].rpartition("/")
        renamed = f"{name}-{other}"
        if word in name:
            renamed = name.replace(word, other)
        texts["out_dir"] = f"{parent}{slash}{renamed}"
    arguments = [*config_files, *texts.values()]
    try:
        configure(load(arguments, [TrainConfig, VariantConfig, NanoGPT], "", scope).values)
    except UserError:  # no such config, or sizes that it cannot have, such as heads of odd width
        return []
    known = keys(TrainConfig, NanoGPT, CORNERS[other][0])
    return arguments if given.typed.keys() <= known.keys() else []


# ---------------------------------------------------------------- a run that fails


@contextmanager
def explained(run, save=None):
    """Turn an expected kind of error into a Failure of one line. With save(run), a single process
    saves its steps if only a file failed, such as a log on a full disk, and a loss that is not
    finite leaves a note in the run folder, which a sweep counts as a result."""
    try:
        yield
    except Failure:
        if save and run.runtime.world_size == 1 and run.step > (run.saved or 0):
            with suppress(Failure, FloatingPointError):  # the save may fail, or a step before it
                save(run)
                print(f"saved step {run.step}: --init_from=resume continues from it")
        raise
    except (FloatingPointError, RuntimeError) as error:
        if isinstance(error, FloatingPointError) and save and run.runtime.main:
            note = {"step": run.step, "reason": str(error)}
            with suppress(Failure):  # a full disk
                files.write(Path(run.config.out_dir) / DIVERGED, json.dumps(note))
        failure = explain(error, run)
        if failure is None:
            raise
        raise failure from error


def explain(error, run):
    """The Failure that describes what ended a run; None if `error` is of an unexpected kind."""
    config, text = run.config, str(error)
    saved = checkpoint.steps(config.out_dir)
    good = "no checkpoint yet"
    if saved:
        good = f"last good checkpoint: {Path(config.out_dir) / 'ckpt' / f'{saved[-1]:06d}'}"
    if isinstance(error, FloatingPointError):
        return Failure(text, good, "nothing of this step was kept; try a lower learning_rate")

    if isinstance(error, torch.OutOfMemoryError) or "alloc_cpu" in text:
        rows = 2 if config.objective == "dpo" else 1  # of a sample: a preference has two
        smaller = [n for n in range(rows, config.batch_size, rows) if config.batch_size % n == 0]
        fix = "choose a smaller block_size or model, or --activation_checkpointing"
        if smaller:
            steps = config.gradient_accumulation_steps * config.batch_size // smaller[-1]
            fix = f"--batch_size={smaller[-1]} --gradient_accumulation_steps={steps}"
            fix += " takes the same steps in less memory"
        sizes = f"batch_size={config.batch_size}, block_size={run.model.config.block_size}"
        return Failure("out of memory", sizes, fix)

    if run.runtime.world_size > 1 and re.search("onnection|peer|NCCL", text):
        lost = f"rank {run.runtime.rank} lost another rank"
        return Failure(lost, good, "continue with --init_from=resume")
    return None
