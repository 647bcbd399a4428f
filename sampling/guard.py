"""
What the server of `sample.py --serve` answers: requests of its own page, in their form and size.
"""

import asyncio
import dataclasses
import json
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from common.configurator import check, keys
from sampling.settings import DRAWING, SampleConfig

SETTINGS = (*DRAWING, "max_new_tokens", "seed", "stop")  # the keys that the page may set
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

BODY = 2**18  # bytes of a request at most
READING = 10  # seconds to receive it
TEXT = 20_000  # characters of a prompt, and tokens of a text, at most
STOP = 200  # characters of `stop` at most
WRITTEN = 2_000  # new tokens of a request at most, unless the command line asks for more
BURST, RATE = 40, 10  # requests at once, and per second


# ---------------------------------------------------------------- who may ask


class Guard:
    """Refuses requests that do not come from our own page: with another Host (a foreign name that
    was made to point here), or a POST of another Origin; and requests that come too fast. Adds
    HEADERS to every response."""

    def __init__(self, app, port):
        self.app = app
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        if port == 80:
            self.hosts |= {"127.0.0.1", "localhost"}
        self.left, self.refilled = BURST, time.monotonic()

    def refuse(self, method, headers):
        """(HTTP status, why) if a request is refused, else None."""
        if headers.get("host") not in self.hosts:
            return 403, f"this server answers only to {min(self.hosts)}"
        if method not in ("GET", "HEAD"):
            origin = headers.get("origin")
            if origin is not None and origin not in {f"http://{host}" for host in self.hosts}:
                return 403, "this request comes from another page"
            if headers.get("content-type", "").split(";")[0] != "application/json":
                return 415, "send JSON, as application/json"

        now = time.monotonic()
        self.left = min(BURST, self.left + RATE * (now - self.refilled))
        self.refilled = now
        if self.left < 1:
            return 429, f"too many requests: {RATE} a second at most"
        self.left -= 1
        return None

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self.app
        refused = self.refuse(scope["method"], Headers(scope=scope))
        if refused:
            app = JSONResponse({"error": refused[1]}, refused[0])
        await app(scope, receive, send_with_headers)


# ---------------------------------------------------------------- what they ask for


async def read_json(request, known):
    """The object in a request's body. Raises HTTPException if it is too long, arrives too slowly,
    is no JSON object, or has a key outside `known`."""
    body = b""
    try:
        async with asyncio.timeout(READING):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY:
                    raise HTTPException(413, f"this request has more than {BODY:,} bytes")
    except TimeoutError:
        raise HTTPException(408, "this request took too long to arrive") from None

    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "this is not JSON") from None
    if not isinstance(data, dict):
        raise HTTPException(400, "a request is a JSON object")
    if data.keys() - known:
        raise HTTPException(400, f"unknown key {min(data.keys() - known)[:40]!r}")
    return data


def read_number(data, key, below):
    """data[key], an integer from 0 to below - 1."""
    value = data.get(key)
    if type(value) is not int or not 0 <= value < below:
        raise HTTPException(400, f"{key} must be a whole number from 0 to {below - 1}")
    return value


def read_tokens(data, key, tokenizer):
    """data[key], a list of token ids."""
    ids, size = data.get(key, []), tokenizer.vocab_size
    if not isinstance(ids, list) or len(ids) > TEXT:
        raise HTTPException(400, f"{key} must be a list of at most {TEXT:,} token ids")
    if any(type(token) is not int or not 0 <= token < size for token in ids):
        raise HTTPException(400, f"{key} must hold token ids from 0 to {size - 1}")
    return ids


def read_prompt(data):
    prompt = data.get("prompt", "")
    if not isinstance(prompt, str) or len(prompt) > TEXT:
        raise HTTPException(400, f"prompt must be a text of at most {TEXT:,} characters")
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise HTTPException(400, "prompt holds half a character")
    return prompt


def read_settings(data, config):
    """`config` with the settings that are in data."""
    kinds = keys(SampleConfig)
    given = {key: check(key, data[key], kinds[key], "request") for key in SETTINGS if key in data}
    most = max(WRITTEN, config.max_new_tokens)
    if given.get("max_new_tokens", 0) > most:
        raise HTTPException(400, f"max_new_tokens is at most {most}")
    if len(given.get("stop", "")) > STOP:
        raise HTTPException(400, f"stop has at most {STOP} characters")
    return dataclasses.replace(config, **given)
