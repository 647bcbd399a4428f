"""
The page of `python sample.py --serve`: one or two models write side by side, token by token. The
server answers this computer alone, on 127.0.0.1.

    GET  /, /page.css, /page.js    the page; it requests nothing from anywhere else
    GET  /models       what the page must know: the models, and the settings to begin with
    POST /write        {model, prompt, kept, a setting...}: a line of JSON for each token
    POST /attention    {model, tokens, at, layer}: {start, weights (H, n)} of token `at` over the n
                       tokens from `start` on

model is 0 or 1; prompt is a text; kept and tokens are token ids. An error is {error: one line}.
All computation runs in one thread, so that two models take turns and no two requests use a model
at once. Its packages are in requirements-serve.txt.
"""

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from common.errors import UserError, one_line
from common.runtime import seed_for
from sampling import terminal
from sampling.attention_map import attention_weights, has_map
from sampling.decoding import Reader, Sample, likeliest
from sampling.guard import (
    SETTINGS,
    WRITTEN,
    Guard,
    read_json,
    read_number,
    read_prompt,
    read_settings,
    read_tokens,
)
from sampling.prompts import fit

FILES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

ALTERNATIVES = 10  # likeliest tokens that are sent with each token
MAPPED = 2_048  # tokens of an attention map at most: it holds their square
PATIENCE = 5  # seconds that a request waits for a model that writes
CONNECTIONS = 32


# ---------------------------------------------------------------- one model


def label(tokenizer, token):
    """The text of a token, with bytes that are part of a character as \\xe4."""
    return tokenizer.decode_bytes([token]).decode("utf-8", "backslashreplace")


def explained(tokenizer, token, logits):
    """What the page shows of a token drawn from logits (V,), at temperature 1: its probability, its
    surprise in nats, and the likeliest tokens instead of it, [[id, text, probability], ...]."""
    nats = -logits.float().log_softmax(-1)[token].item()
    top = [[other, label(tokenizer, other), p] for other, p in likeliest(logits, ALTERNATIVES)]
    return {"id": token, "label": label(tokenizer, token), "surprise": nats, "top": top}


def write(opened, config, steps, prompt, kept):
    """Continue a prompt and the tokens `kept` after it. Yields dictionaries: the tokens that the
    model reads first, with their texts; each new token with its text (empty for a token that ends
    within a character, which belongs to the last of its tokens); and why the text ends, with the
    rest of the text. The texts together are that of sample.py's first sample."""
    tokenizer = opened.tokenizer
    ids = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.start]
    ids += kept
    labels = [label(tokenizer, token) for token in ids]
    texts = terminal.pieces(tokenizer, ids)
    yield {"tokens": ids, "texts": texts, "labels": labels, "kept": len(kept)}

    sample = Sample(prompt, tokenizer, config.stop)
    sample.decoder.decode(tokenizer.decode_bytes(kept))  # it may end within a character
    idx = torch.tensor([ids], device=next(opened.model.parameters()).device)  # (1, T)
    seeds = [seed_for(config.seed, 0, *ids)]
    settings = dict(context=config.context, vocab_size=tokenizer.vocab_size, **config.settings())
    waiting, begin = [], 0  # tokens whose text may be the beginning of `stop`
    for step in steps(opened.model, idx, config.max_new_tokens, seeds, **settings):
        token = step.token.item()
        facts = explained(tokenizer, token, step.logits[0])
        sample.add(token, step.logits[0])
        waiting.append((begin, max(begin, len(sample.text)), facts))
        begin = len(sample.text)
        while waiting and waiting[0][1] <= sample.shown and not sample.done:
            first, end, facts = waiting.pop(0)
            yield facts | {"text": sample.text[first:end]}
        if sample.done:
            break

    stopped = sample.done
    sample.end()
    for first, end, facts in waiting:
        if first < len(sample.text):
            yield facts | {"text": sample.text[first:end]}
    yield {"end": "stop" if stopped else "length", "rest": sample.text[begin:]}


def readable(opened):
    """The model itself, without the Fast one around it."""
    return getattr(opened.model, "model", opened.model)


def heads(opened):
    """The number of heads in each layer, 0 for one without attention to show."""
    mixers = [block.attn for block in readable(opened).blocks]
    return [attn.n_head if has_map(attn) else 0 for attn in mixers]


def about(opened):
    return {
        "name": opened.name,
        "context": opened.model.config.block_size,
        "vocabulary": opened.tokenizer.vocab_size,
        "heads": heads(opened),
    }


class Maps:
    """The attention maps of one model. The last one is kept, since a cursor moves over one text."""

    def __init__(self, opened, context):
        self.model = readable(opened)
        self.reader = Reader(self.model, context)
        self.key = self.weights = None

    def row(self, tokens, at, layer):
        """The attention of token `at`, in the window of tokens that the model reads it in."""
        start = self.reader.start(at + 1)
        window = tokens[start : start + self.reader.context]
        if self.key != (layer, window):
            idx = torch.tensor([window], device=next(self.model.parameters()).device)
            self.weights = attention_weights(self.model, idx, layer)  # (H, T, T)
            self.key = layer, window
        rows = self.weights[:, at - start, : at - start + 1]  # (H, n)
        return {"start": start, "weights": [[round(w, 5) for w in row] for row in rows.tolist()]}


# ---------------------------------------------------------------- the server


class Stream(StreamingResponse):
    """Calls finish() when the response ends in any way: at its end, or because the reader left."""

    def __init__(self, lines, finish):
        super().__init__(lines, media_type="application/x-ndjson")
        self.finish = finish

    async def __call__(self, scope, receive, send):
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.finish()


class Page:
    """The endpoints. steps: sample.steps; stopping: whether the server is about to end."""

    def __init__(self, opened, config, steps):
        self.opened, self.config, self.steps = opened, config, steps
        self.maps = [Maps(o, config.context) for o in opened]
        self.writing = [asyncio.Lock() for _ in opened]
        self.worker = ThreadPoolExecutor(1)
        self.stopping = lambda: False

    def compute(self, function, *args):
        return asyncio.get_running_loop().run_in_executor(self.worker, function, *args)

    async def models(self, request):
        settings = {key: getattr(self.config, key) for key in SETTINGS}
        start = self.opened[0].prompts[0]
        levels = [limit for limit, _ in terminal.LEVELS[:-1]]
        most = max(WRITTEN, self.config.max_new_tokens)
        facts = {"settings": settings, "prompt": start, "levels": levels, "most": most}
        return JSONResponse({"models": [about(o) for o in self.opened]} | facts)

    async def write(self, request):
        data = await read_json(request, {"model", "prompt", "kept", *SETTINGS})
        number = read_number(data, "model", len(self.opened))
        opened, writing = self.opened[number], self.writing[number]
        config = read_settings(data, self.config)
        prompt = fit(opened.tokenizer, read_prompt(data), "", config.skip_unknown)
        kept = read_tokens(data, "kept", opened.tokenizer)
        try:
            await asyncio.wait_for(writing.acquire(), PATIENCE)
        except TimeoutError:
            raise HTTPException(409, "this model is writing for another page") from None

        written = write(opened, config, self.steps, prompt, kept)

        def finish():  # the generator is closed after the step that may be running
            self.worker.submit(written.close)
            writing.release()

        return Stream(self.lines(written), finish)

    async def lines(self, written):
        """Lines of JSON, as `written` yields dictionaries."""
        try:
            while not self.stopping():
                piece = await self.compute(next, written, None)
                if piece is None:
                    return
                yield json.dumps(piece) + "\n"
        except Exception as error:  # the response has begun, so its status cannot tell
            yield json.dumps({"error": one_line(error)}) + "\n"

    async def attention(self, request):
        data = await read_json(request, {"model", "tokens", "at", "layer"})
        number = read_number(data, "model", len(self.opened))
        opened, maps = self.opened[number], self.maps[number]
        tokens = read_tokens(data, "tokens", opened.tokenizer)
        at, layer = read_number(data, "at", len(tokens)), data.get("layer")
        layer = read_number(data, "layer", len(heads(opened)))
        if not heads(opened)[layer]:
            raise HTTPException(400, f"layer {layer} has no attention to show")
        if min(len(tokens), maps.reader.context) > MAPPED:
            raise HTTPException(400, f"attention is shown for {MAPPED:,} tokens at most")
        return JSONResponse(await self.compute(maps.row, tokens, at, layer))


async def show_error(request, error):
    """An error as one line. Mistakes in a request are UserErrors and HTTPExceptions."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    status = 400 if isinstance(error, UserError) else 500
    line = " ".join(str(error).split())[:300]
    return JSONResponse({"error": line or type(error).__name__}, status)


def make_app(page, port):
    """The ASGI application of a Page that is served on a port."""
    routes = [
        Route("/models", page.models),
        Route("/write", page.write, methods=["POST"]),
        Route("/attention", page.attention, methods=["POST"]),
    ]
    for path, name in FILES.items():
        file = Path(__file__).with_name(name)
        shown = partial(Response, file.read_bytes(), media_type=TYPES[file.suffix])
        routes.append(Route(path, lambda request, shown=shown: shown()))
    handlers = dict.fromkeys((HTTPException, UserError, Exception), show_error)
    guard = Middleware(Guard, port=port)
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


def listen(port):
    """A socket that listens on 127.0.0.1. Raises UserError if the port is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        what = f"cannot listen on this port: {error.strerror}"
        raise UserError(what, f"port={port}", "choose another") from None
    listener.listen()
    return listener


def make_server(opened, config, steps, port):
    """A uvicorn.Server, to be run with a socket of `listen`."""
    page = Page(opened, config, steps)
    options = dict(http="h11", ws="none", lifespan="off", log_level="critical", access_log=False)
    limits = dict(limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=2)
    app = make_app(page, port)
    server = uvicorn.Server(uvicorn.Config(app, **options, **limits, server_header=False))
    page.stopping = lambda: server.should_exit
    return server


def serve(opened, config, steps, listener):
    """Serve the page of the opened models until Ctrl-C."""
    port = listener.getsockname()[1]
    print(f"http://127.0.0.1:{port} shows the page; Ctrl-C ends it", flush=True)
    make_server(opened, config, steps, port).run(sockets=[listener])
