"""
python -m extras.serve RUN [RUN] [--port=8000] [--start="ROMEO:"]

A page on which one model writes, or two side by side, token by token. RUN is a run folder, or
pretrained weights as in sample.py --init_from. The page begins with the settings of the command
line, those keys of sample.py that apply. It needs starlette and uvicorn.
"""

from dataclasses import dataclass
from typing import Annotated

from common import early
from common.errors import UserError, run

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.serve")

from common.configurator import Range, build, load
from sample import choose_device, open_model
from sampling.prompts import read_prompts
from sampling.settings import NAMING, SampleConfig, refuse_idle


@dataclass
class ServeConfig:
    port: Annotated[int, Range(least=1, most=65535)] = 8000  # on 127.0.0.1


def read(argv):
    """(ServeConfig, SampleConfig, names of the models) of a command line."""
    given = load(argv, [ServeConfig, SampleConfig], __doc__)
    names = given.words
    if len(names) not in (1, 2):
        fix = "python -m extras.serve RUN [RUN]"
        raise UserError("the page shows one model or two", "command line", fix)
    if given.values.get("chat"):
        raise UserError("the page has no conversations", "--chat", "chat with sample.py")
    refuse_idle(given.typed, [*NAMING, "prompts", "num_samples", "jsonl", "show_probs"])
    return (
        build(ServeConfig, given.values),
        build(SampleConfig, {"num_samples": 1} | given.values),
        names,
    )


def main(argv):
    settings, config, names = read(argv)
    from extras.serve import server  # here, since --help needs none of its packages

    texts = read_prompts(config.start)
    listener = server.listen(settings.port)
    device, dtype = choose_device(config)
    opened = [open_model(name, texts, config, device, dtype) for name in names]
    print(f"http://127.0.0.1:{settings.port} shows the page; Ctrl-C ends it", flush=True)
    server.make_server(opened, config, settings.port).run(sockets=[listener])


if __name__ == "__main__":
    run(main)
