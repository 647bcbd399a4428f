"""What train.py prints when a run has taken all its steps: its results, and what to type next."""

import shlex
from pathlib import Path

from common import files
from common.configurator import find_file, keys, load, typed
from common.errors import UserError
from parts.architectures import configure
from parts.variant import VariantConfig
from tokens.pairs import Pairs
from training.settings import TrainConfig, scope

WIDTH = 80  # columns of a terminal


def print_results(run, speed):
    """The best loss, the time, the median speed in tokens/s, and the share of each dataset."""
    best, bits = run.state["best_val_loss"], run.state["best_bits_per_byte"]
    units = "" if bits is None else f" nats per token, {bits:.4f} bits per byte"
    print(f"\nbest validation loss {best:.4f}{units}")
    seconds, step = run.state["seconds"], run.state["best_step"]
    print(f"at step {step}; {seconds:.0f} s of training, {speed:,.0f} tokens/s")
    if len(run.data.sources) > 1:
        drawn = [run.state.get("samples", {}).get(source.name, 0) for source in run.data.sources]
        for count, source in zip(drawn, run.data.sources, strict=True):
            share, epochs = count / max(1, sum(drawn)), count / source.batches.windows_per_epoch
            shares = f"{share:.2%} (asked for: {source.weight:.2%})"
            print(f"samples drawn: {count:,} of {source.name}, {shares}, {epochs:.2f} epochs")
    print()


def closing_prompt(data):
    """(prompt, where to stop) of the sample at the end: the first prompt of the validation split if
    the data are prompts and answers, else the token that starts a text."""
    tokenizer, split = data.tokenizer, data.sources[0].splits["val"]
    start = tokenizer.decode([tokenizer.start])
    if not isinstance(split, Pairs):
        return start, ""

    first, answer, end = split.starts[0], split.answers[0], split.ends[0] - 1
    prompt, known = (
        tokenizer.decode(split.tokens[a:b].tolist()) for a, b in ((first, answer), (answer, end))
    )
    print(f"a prompt that it has not seen, whose answer in the data is {known!r}:")
    return prompt, start


def print_how_to_continue(run):
    """The command that continues a run that was stopped."""
    print(f"stopped after step {run.step}, saved; continue with:")
    print(command("train.py", "--init_from=resume", f"--out_dir={run.config.out_dir}"))


def print_next_commands(folder, config, argv):
    """The checkpoint's folder, and commands that sample from it and train the other model."""
    out_dir = Path(config.out_dir)
    print(f"\ncheckpoint: {folder}\ncurves:     {out_dir / 'loss.png'}")
    print(f"sample more:\n{command('sample.py', f'--out_dir={out_dir}')}")
    twin = twin_arguments(argv)
    if twin:
        print(f"compare with {NAMES[OTHER[config.model]]}:\n{command('train.py', *twin)}")


def command(script, *arguments):
    """A command that can be pasted into a shell: in lines of at most 80 columns, as far as its
    words allow, all but the last with a backslash at the end."""
    lines = [f"python {shlex.quote(files.script(script))}"]
    for word in map(shlex.quote, arguments):
        if len(f"{lines[-1]} {word}") <= WIDTH - len(" \\"):
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return " \\\n".join(lines)


# ---------------------------------------------------------------- the other model

OTHER = {"gpt2": "llama", "llama": "gpt2"}
NAMES = {"gpt2": "GPT-2", "llama": "LLaMA"}
OF_THIS_RUN = {"init_from", "overwrite", "allow_data_change", "wandb_run_name"}


def twin_arguments(argv):
    """The arguments that train the other model in the same way: its config file, and what the user
    typed, except keys that this model does not have. [] if there is no such config, if the user
    chose the model, or if the other one cannot have these sizes."""
    given = typed(argv)
    paths = [arg for arg in argv if arg.endswith(".py") and not arg.startswith("--")]
    word = next((word for path in paths for word in OTHER if word in Path(path).name), None)
    if word is None or given & {"model", "arch"}:
        return []
    twins = [path.replace(word, OTHER[word]) for path in paths]
    if not all(Path(find_file(path)).exists() for path in twins):
        return []

    kept = [arg for arg in argv if arg.startswith("--") and not typed([arg]) & OF_THIS_RUN]
    try:
        found = [*map(find_file, twins), *kept]
        values, _ = load(found, [TrainConfig, VariantConfig], "", scope)
        known = keys(TrainConfig, type(configure(values))).keys()
    except UserError:  # the other model cannot have these sizes, such as heads of odd width
        return []
    kept = [arg for arg in kept if typed([arg]) & known]
    return [*twins, *(rename_folder(arg, word) for arg in kept)]


def rename_folder(arg, word):
    """--out_dir=FOLDER with the other model's name in it; another argument as it is."""
    key, _, folder = arg.partition("=")
    if key != "--out_dir":
        return arg
    path = Path(folder)
    name = path.name.replace(word, OTHER[word])
    return f"{key}={path.with_name(name if name != path.name else f'{name}-{OTHER[word]}')}"
