"""
The server of the page: it answers this computer alone, on 127.0.0.1; docs/sampling.md lists the
requests. All computation runs in one thread, so that two models take turns and no two requests use
a model at once.
"""

import asyncio
import dataclasses
import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from common.configurator import Range, check, keys
from common.errors import UserError, explained, one_line
from common.files import warn_once
from common.runtime import seed_for
from sample import steps
from sampling.prompts import fit
from sampling.settings import DRAWN, SampleConfig
from sampling.text import Sample, likeliest, texts_of

FILES = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
LEVELS = (0.5, 1, 2, 4, 8)  # nats of surprise at which a token gets the next colour
ALTERNATIVES = 10  # likeliest tokens that are sent with each token
WRITTEN = 2_000  # new tokens of a request at most, unless the command line asks for more
BODY = 2**18  # bytes of a request at most
CONNECTIONS = 32


# ---------------------------------------------------------------- requests


class Guard:
    """Refuses requests that do not come from our own page: with another Host (a foreign name that
    was made to point here), or a POST of another Origin or content type. Adds HEADERS to every
    response."""

    def __init__(self, app, port):
        self.app = app
        end = f":{port}" if port != 80 else ""  # browsers leave the usual port out
        self.hosts = {f"{name}{end}" for name in ("127.0.0.1", "localhost")}

    def refuse(self, method, headers):
        """(why, HTTP status) if a request is refused, else None."""
        if headers.get("host") not in self.hosts:
            return f"this server answers only to {min(self.hosts)}", 403
        if method in ("GET", "HEAD"):
            return None
        if headers.get("origin") not in {None, *(f"http://{host}" for host in self.hosts)}:
            return "this request comes from another page", 403
        if headers.get("content-type", "").split(";")[0] != "application/json":
            return "send JSON, as application/json", 415

    async def __call__(self, scope, receive, send):
        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self.refuse(scope["method"], Headers(scope=scope))
        app = JSONResponse({"error": refused[0]}, refused[1]) if refused else self.app
        await app(scope, receive, send_with_headers)


async def read(request, kinds):
    """The object in a request's body, {key: value}, each value as its kind in `kinds` demands.
    Raises HTTPException or UserError if it is something else or too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY:
            raise HTTPException(413, f"this request has more than {BODY:,} bytes")
    try:
        data = json.loads(body)
        json.dumps(data, ensure_ascii=False).encode()  # refuses half a character
    except UnicodeEncodeError:
        raise HTTPException(400, "the text holds half a character") from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "this is not JSON") from None
    if not isinstance(data, dict):
        raise HTTPException(400, "a request is a JSON object")
    if data.keys() - kinds:
        raise HTTPException(400, f"unknown key {min(data.keys() - kinds)[:40]!r}")
    return {key: check(key, value, kinds[key], "request") for key, value in data.items()}


def below(count):
    """The type of a number from 0 to count - 1."""
    return Annotated[int, Range(least=0, below=count)]


# ---------------------------------------------------------------- one model


def label(tokenizer, token):
    """The text of a token, with bytes that are part of a character as \\xe4."""
    return tokenizer.decode_bytes([token]).decode("utf-8", "backslashreplace")


def write(opened, config, prompt, kept):
    """Continue a prompt and the tokens `kept` after it. Yields dictionaries: the tokens that the
    model reads first, with their texts; each new token with its text (empty for a token that ends
    within a character, which belongs to the last of its tokens), its surprise in nats and the
    likeliest tokens instead of it; and why the text ends, with the rest of the text. All texts
    together are sample.py's first sample."""
    tokenizer = opened.tokenizer
    ids = tokenizer.prompt(prompt)
    ids += kept
    labels = [label(tokenizer, token) for token in ids]
    yield {"tokens": ids, "texts": texts_of(tokenizer, ids), "labels": labels, "kept": len(kept)}

    sample = Sample(prompt, ids, tokenizer, config.stop)
    idx = torch.tensor([ids], device=next(opened.model.parameters()).device)  # (1, T)
    seeds = [seed_for(config.seed, 0, *ids)]
    reading = {"context": config.context, "vocab_size": tokenizer.vocab_size}
    written = steps(opened.model, idx, config.max_new_tokens, seeds, **reading, **config.drawing())
    waiting = []  # tokens whose text may be the beginning of `stop`
    begin = 0
    for step in written:
        token = step.token.item()
        logits = step.logits[0]  # (V)
        nats = -logits.float().log_softmax(-1)[token].item()  # at temperature 1, as are the others
        top = [[id, label(tokenizer, id), p] for id, p in likeliest(logits, ALTERNATIVES)]
        facts = {"id": token, "label": label(tokenizer, token), "surprise": nats, "top": top}
        sample.add(token, logits)
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


# ---------------------------------------------------------------- the server


class Page:
    """The endpoints."""

    def __init__(self, opened, config):
        self.config = config
        self.opened = opened
        self.most = max(WRITTEN, config.max_new_tokens)
        self.worker = ThreadPoolExecutor(1)
        kinds = keys(SampleConfig)
        self.kinds = {"model": below(len(opened)), "prompt": str, "kept": list}
        self.kinds |= {key: kinds[key] for key in DRAWN}
        self.kinds["max_new_tokens"] = Annotated[int, Range(least=0, most=self.most)]

    def compute(self, function, *args):
        return asyncio.get_running_loop().run_in_executor(self.worker, function, *args)

    async def models(self, request):
        facts = {
            "models": [
                {"name": one.name, "vocabulary": one.tokenizer.vocab_size} for one in self.opened
            ],
            "settings": {key: getattr(self.config, key) for key in DRAWN},
            "prompt": self.opened[0].prompts[0],
            "levels": LEVELS,
            "most": self.most,
        }
        return JSONResponse(facts)

    async def write(self, request):
        data = await read(request, self.kinds)
        opened = self.opened[data.get("model", 0)]
        given = {key: data[key] for key in DRAWN if key in data}
        config = dataclasses.replace(self.config, **given)
        prompt = fit(opened.tokenizer, data.get("prompt", ""), "", config.skip_unknown)
        kind = below(opened.tokenizer.vocab_size)
        kept = [check("a token", token, kind, "request") for token in data.get("kept", [])]
        written = write(opened, config, prompt, kept)
        return StreamingResponse(self.lines(written), media_type="application/x-ndjson")

    async def lines(self, written):
        """Lines of JSON, as `written` yields dictionaries, until its reader leaves."""
        try:
            while piece := await self.compute(next, written, None):
                yield json.dumps(piece) + "\n"
        except Exception as error:  # the response has begun, so its status cannot tell
            yield json.dumps({"error": explained(error)[1]}) + "\n"
        finally:  # after the step that may be running
            self.worker.submit(written.close)


async def show_error(request, error):
    """An error as one line. Mistakes in a request are UserErrors and HTTPExceptions."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    status = 400 if isinstance(error, UserError) else 500
    return JSONResponse({"error": explained(error)[1][:300]}, status)


def make_app(page, port):
    """The ASGI application of a Page that is served on a port."""
    routes = [
        Route("/models", page.models),
        Route("/write", page.write, methods=["POST"]),
    ]
    for name, kind in FILES.items():
        shown = Response(Path(__file__).with_name(name).read_bytes(), media_type=kind)
        path = "/" if name == "page.html" else f"/{name}"
        routes.append(Route(path, lambda request, shown=shown: shown))
    handlers = dict.fromkeys((HTTPException, UserError, Exception), show_error)
    guard = Middleware(Guard, port=port)
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


def listen(port):
    """A socket that listens on 127.0.0.1. Raises UserError if the port is taken."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        what = f"cannot listen on this port: {os.strerror(error.errno)}"
        raise UserError(what, f"port={port}", "choose another") from None


def warn(record):
    """Print what asyncio reports, such as that no file descriptor is left, once and as one line."""
    error = record.exc_info[1] if record.exc_info else record.getMessage()
    warn_once(f"new connections wait: {one_line(error)}", about="asyncio")
    return False


def make_server(opened, config, port):
    """A server, to be run with a socket of `listen`."""
    logging.getLogger("asyncio").addFilter(warn)
    settings = uvicorn.Config(
        make_app(Page(opened, config), port),
        http="h11",  # it bounds the size of headers
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(settings)
