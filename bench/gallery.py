"""
Draw the pictures of docs/gallery.md, and write the page:

    python bench/gallery.py
    python bench/gallery.py --gpt2=RUN --llama=RUN

RUN is a run folder of train.py. The second command also draws what the heads of these two models
look at; without it, the pictures of them that are there stay.
"""

from dataclasses import dataclass

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from bench import pictures
from common import files
from common.configurator import build, load
from common.errors import UserError, run
from weights.checkpoint import open_run

FOLDER = files.ROOT / "docs/gallery"
PICTURES = {  # name of the files: (title, function that draws it, and whose docstring explains it)
    "rope": ("How RoPE turns queries and keys", pictures.rope),
    "alibi": ("ALiBi's slopes", pictures.alibi),
    "masks": ("What a token may see", pictures.masks),
}
MAPS = {  # a model of two: (title, explanation)
    "gpt2": (
        "What the heads of a trained GPT-2 look at",
        "A panel is a head, a row of it a token, and the darker a cell, the more of that earlier "
        "token the head takes; the weights of a row sum to 1. The number says how many tokens back "
        "a head looks on average: one that always looks at the token before would have nearly 1.",
    ),
    "llama": (
        "What the heads of a trained LLaMA look at",
        "The same prompt in the model whose queries and keys are turned by their positions. A line "
        "beside the diagonal is a head that has learned a fixed distance; a column that many rows "
        "share is a token that gets the weight which a head has no use for.",
    ),
}
INTRO = """# A gallery that explains

Each picture is drawn from the numbers of the model's own code, by `bench/pictures.py`. The first
command draws all but the attention maps, for which the second needs two trained models:
```sh
python bench/gallery.py
python bench/gallery.py --gpt2=out-gpt2-shakespeare --llama=out-llama-shakespeare
```
"""


@dataclass
class GalleryConfig:
    gpt2: str = ""  # the run folder of a GPT-2; empty: its attention is not drawn
    llama: str = ""  # the run folder of a LLaMA
    prompt: str = "To be, or not to be"  # over which their attention is drawn


def map_of(word, out_dir, prompt):
    """The Figure of the attention in the run at `out_dir`. Raises UserError if its model is not
    that of `word`, or cannot read the prompt."""
    model, tokenizer, trained, state = open_run(out_dir)
    if trained["model"] != word:
        what = f"this is a run of {trained['model']}"
        raise UserError(what, f"{word}={out_dir}", f"give a run of train.py --model={word}")
    title = f"{word} after {state['step']} steps on {trained['dataset']}: layer.head"
    return pictures.attention(model, tokenizer, prompt, title)


def page(folder):
    """docs/gallery.md: the pictures that are in the folder, each with its explanation."""
    texts = {name: (title, draw.__doc__) for name, (title, draw) in PICTURES.items()}
    texts |= {f"attention-{word}": text for word, text in MAPS.items()}
    sections = [INTRO]
    for name, (title, text) in texts.items():
        if (folder / f"{name}.png").is_file():
            picture = f"![{title}](gallery/{name}.png)"
            sections.append(f"## {title}\n\n{' '.join(text.split())}\n\n{picture}\n")
    return "\n".join(sections)


def draw_all(config, folder):
    """Draw the pictures into the folder, and write the page beside it."""
    runs = {word: getattr(config, word) for word in MAPS}
    figures = {  # the runs first: a mistake in the command shows before anything is written
        f"attention-{word}": map_of(word, out_dir, config.prompt)
        for word, out_dir in runs.items()
        if out_dir
    }
    figures |= {name: draw() for name, (_, draw) in PICTURES.items()}

    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
        print(f"{folder / name}.png")
    files.write(folder.with_suffix(".md"), page(folder))
    for word, out_dir in runs.items():
        if not out_dir:
            make = f"python train.py config/{word}_shakespeare.py, then --{word}=its out_dir"
            print(f"attention-{word} is not drawn: {make}")


def main(argv):
    values, words = load(argv, [GalleryConfig], __doc__)
    if words:
        fix = "write --gpt2=RUN --llama=RUN"
        raise UserError(f"{words[0]} is not a key", "command line", fix)
    draw_all(build(GalleryConfig, values), FOLDER)


if __name__ == "__main__":
    run(main)
