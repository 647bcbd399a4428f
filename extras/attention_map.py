"""
python -m extras.attention_map RUN --start="First Citizen:" [--layer=0] [--out=map.png]

Draw how much each token of a prompt attends to each earlier one, in every head of a layer. RUN is a
run folder, or pretrained weights as in sample.py --init_from.
"""

import io
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, run, starting

if __name__ == "__main__":
    starting("extras.attention_map")

from common.configurator import NonNegativeInt, build, load
from common.files import write
from sample import check_context, choose_device, is_run, open_weights
from sampling.attention_map import attention_weights, check_layer, panel, read
from sampling.fast import make_fast
from sampling.prompts import fit, note, read_prompts
from sampling.settings import SampleConfig


@dataclass
class MapConfig:
    layer: NonNegativeInt = 0  # from 0
    out: str = "map.png"  # the picture


def picture(weights, labels, title):
    """A PNG (bytes) of weights (H, T, T), a panel per head; labels: the texts of the T tokens."""
    import matplotlib
    from matplotlib.figure import Figure

    H, T, _ = weights.shape
    across = math.ceil(math.sqrt(H))
    down = math.ceil(H / across)
    inches = min(12, max(2.4, 0.13 * T))  # of a panel
    size = min(8, max(3, 60 * inches / T))  # of a label, in points
    step = math.ceil(T * size / (60 * inches))  # tokens from one label to the next

    shape = (across * (inches + 0.3) + 0.2, down * (inches + 0.4) + 1.1)
    figure = Figure(figsize=shape, layout="constrained")
    with matplotlib.rc_context({"font.family": ["DejaVu Sans"]}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks are drawn as boxes
        for head, values in enumerate(weights):
            axes = figure.add_subplot(down, across, head + 1)
            image = panel(axes, values, labels, size, step)
            axes.set_title(f"head {head}", fontsize=9)

        figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04)
        figure.supylabel("the token that attends", fontsize=9)
        figure.supxlabel("the token it attends to", fontsize=9)
        figure.suptitle(title, fontsize=10)
        figure.colorbar(image, ax=figure.axes, location="top", aspect=40, label="weight")
        dpi = max(60, min(130, 8000 / max(figure.get_size_inches())))
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()


def check_path(path):
    """Raise UserError if no picture can be written to `path`. Called before a model is loaded."""
    path = Path(path)
    usable = path.suffix == ".png" and (path.is_file() or not path.exists())
    if not path.parent.is_dir() or not usable:
        fix = "give the name of a PNG file in a folder that exists"
        raise UserError("no picture can be written here", f"out={path}", fix)


def read_settings(argv):
    """(MapConfig, SampleConfig, name of the model) of a command line."""
    values, names = load(argv, [MapConfig, SampleConfig], __doc__)
    if len(names) != 1:
        fix = 'python -m extras.attention_map RUN --start="First Citizen:"'
        raise UserError("name one model", "command line", fix)
    return build(MapConfig, values), build(SampleConfig, values), names[0]


def main(argv):
    settings, config, name = read_settings(argv)
    (text,) = read_prompts(config.start)
    check_path(settings.out)
    device, dtype = choose_device(config)
    model, tokenizer, what = open_weights(name, config.checkpoint, device, not is_run(name))
    note(what)
    check_context(model, config.context)
    check_layer(model, settings.layer)
    prompt = fit(tokenizer, text, "", config.skip_unknown)
    idx, labels = read(model, tokenizer, prompt, config.context)
    model = make_fast(model, dtype)
    model = getattr(model, "model", model)  # without the Fast one around it
    weights = attention_weights(model, idx, settings.layer)
    write(settings.out, picture(weights, labels, f"{name}, layer {settings.layer}"))
    note(f"attention of layer {settings.layer}: {settings.out}")


if __name__ == "__main__":
    run(main)
