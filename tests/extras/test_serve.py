"""extras/serve: the same text as on a terminal, only our own page is answered, the page in a
real browser."""

import errno
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch

import sample
from common.commands import ROOT
from common.errors import UserError
from sample import SampleConfig, Step, open_model

pytest.importorskip("starlette", reason="needs starlette and uvicorn")
pytest.importorskip("uvicorn", reason="needs starlette and uvicorn")

from starlette.testclient import TestClient

from extras.serve import server
from extras.serve.__main__ import main

HOME = "http://127.0.0.1:8000"
PROMPT = "the king of"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def config():
    return SampleConfig(device="cpu", max_new_tokens=40)


@pytest.fixture(scope="module")
def opened(runs, config):
    return [open_model(name, [PROMPT], config, "cpu", "float32") for name in runs]


@pytest.fixture
def client(opened, config):
    app = server.make_app(server.Page(opened, config), 8000)
    return TestClient(app, base_url=HOME)


def post(client, path, **data):
    response = client.post(path, json=data)
    assert response.status_code == 200, response.text
    return response


def written(client, **data):
    """(what the model reads first, its tokens, the end) of a text, as the server sends them."""
    head, *tokens, end = map(json.loads, post(client, "/write", **data).text.splitlines())
    return head, tokens, end


def text_of(tokens, end):
    return "".join(token["text"] for token in tokens) + end["rest"]


def writing(monkeypatch, ids):
    """Let the models write `ids`."""

    def steps(model, idx, max_new_tokens, seeds, **settings):
        for token in ids[:max_new_tokens]:
            logits = torch.zeros(1, settings["vocab_size"])
            logits[0, token] = 3.0
            yield Step(torch.tensor([[token]]), logits)

    monkeypatch.setattr(server, "steps", steps)


def test_one_model_or_two():
    for names in ([], ["a", "b", "c"]):
        with pytest.raises(UserError, match="one model or two"):
            main(names)


# ---------------------------------------------------------------- the texts


@pytest.mark.parametrize(
    "number, settings",
    [
        (0, {}),
        (1, {"temperature": 0}),
        (0, {"temperature": 1.3, "top_p": 0.9, "seed": 7}),
        (1, {"top_k": 5, "min_p": 0.02, "repetition_penalty": 1.2}),
        (0, {"top_k": None, "stop": "a character of the text"}),
    ],
)
def test_the_text_is_that_of_sample_py(runs, client, capsys, number, settings):
    """Also past the context of 16 tokens, and where `stop` cuts it."""

    def text_on_a_terminal():
        options = [f"--{key}={value}" for key, value in settings.items()]
        options += [f"--start={PROMPT}", "--num_samples=1", "--max_new_tokens=40", "--jsonl"]
        sample.main([f"--out_dir={runs[number]}", "--device=cpu", *options])
        return json.loads(capsys.readouterr().out)

    expected = text_on_a_terminal()
    if "stop" in settings:
        later = expected["text"][8:38]
        settings = settings | {"stop": next(c for c in later if c.isascii() and c.isprintable())}
        expected = text_on_a_terminal()
    model = {"model": number} if number else {}  # 0 is the default
    head, tokens, end = written(client, **model, prompt=PROMPT, **settings)
    assert text_of(tokens, end) == expected["text"]
    assert "".join(head["texts"]) == PROMPT
    is_cut = len(expected["tokens"]) < 40
    assert end["end"] == ("stop" if is_cut else "length") and is_cut == ("stop" in settings)
    if not is_cut:
        assert [token["id"] for token in tokens] == expected["tokens"]


def test_each_token_comes_with_its_surprise_and_its_alternatives(opened, client):
    head, tokens, _ = written(client, model=0, prompt=PROMPT, temperature=1.5, max_new_tokens=12)
    model, tokenizer = opened[0].model, opened[0].tokenizer
    ids = torch.tensor([head["tokens"] + [token["id"] for token in tokens[:5]]])  # (1, 16)
    with torch.inference_mode():
        losses = -model(ids)[0][0].log_softmax(-1)
    first = ids.size(1) - 6
    nats = losses[range(first, first + 5), ids[0, first + 1 :]]
    tokens = tokens[:5]
    assert [token["surprise"] for token in tokens] == pytest.approx(nats.tolist(), abs=1e-4)
    for token in tokens:
        likely = [p for _, _, p in token["top"]]
        assert likely == sorted(likely, reverse=True) and len(likely) == server.ALTERNATIVES
        assert all(text == tokenizer.decode([other]) for other, text, _ in token["top"])


def test_going_on_from_an_alternative(opened, client):
    """The tokens before it stay as they are, and what follows is the text after all of them."""
    _, tokens, _ = written(client, model=0, prompt=PROMPT, temperature=1.5)
    other = next(id for id, _, _ in tokens[4]["top"] if id != tokens[4]["id"])
    kept = [token["id"] for token in tokens[:4]] + [other]
    head, after, end = written(client, model=0, prompt=PROMPT, kept=kept, temperature=1.5)
    whole = PROMPT + opened[0].tokenizer.decode(kept)
    assert "".join(head["texts"]) == whole and head["kept"] == 5
    _, alone, alone_end = written(client, model=0, prompt=whole, temperature=1.5)
    assert text_of(after, end) == text_of(alone, alone_end)


def test_a_character_of_several_tokens_belongs_to_the_last_of_them(client, monkeypatch):
    ids = list("aé中".encode()) + [0xE4]
    writing(monkeypatch, ids)
    _, tokens, end = written(client, model=1, prompt="b")
    assert [token["text"] for token in tokens] == ["a", "", "é", "", "", "中", ""]
    assert end == {"end": "length", "rest": "�"}
    assert [token["label"] for token in tokens][1:3] == ["\\xc3", "\\xa9"]
    kept = list("é".encode())[:1]  # a text that goes on within a character
    writing(monkeypatch, list("é".encode())[1:])
    head, tokens, end = written(client, model=1, prompt="b", kept=kept)
    assert head["texts"] == ["b", ""] and text_of(tokens, end) == "é"


def test_no_part_of_stop_is_shown(client, monkeypatch):
    """A token that may begin `stop` is sent when the next ones are known."""
    for text, shown, why in ((b"ab--x--cd", "ab--x", "stop"), (b"ab--", "ab--", "length")):
        writing(monkeypatch, list(text))
        _, tokens, end = written(client, model=1, prompt="b", stop="--c")
        assert [t["text"] for t in tokens] == list(shown) and end == {"end": why, "rest": ""}


def test_the_page_is_whole_and_asks_nobody_else(client, runs):
    for path in ("/", "/page.css", "/page.js"):
        response = client.get(path)
        assert response.status_code == 200 and len(response.text) > 1000
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "://" not in response.text, "an address of another server"
    facts = client.get("/models").json()
    assert [model["name"] for model in facts["models"]] == runs
    assert facts["prompt"] == PROMPT and facts["settings"]["max_new_tokens"] == 40


@pytest.mark.parametrize(
    "status, headers",
    [
        (403, {"Host": "evil.example:8000"}),
        (403, {"Host": "127.0.0.1:8001"}),
        (200, {"Host": "localhost:8000"}),
        (403, {"Origin": "http://evil.example"}),
        (403, {"Origin": "null"}),
        (200, {"Origin": HOME}),
        (415, {"Content-Type": "text/plain"}),
    ],
)
def test_host_origin_and_type_are_checked(client, status, headers):
    body = json.dumps({"model": 0, "prompt": "the", "max_new_tokens": 1})
    response = client.post("/write", content=body, headers=JSON | headers)
    assert response.status_code == status
    if status != 200:
        assert list(response.json()) == ["error"] and "\n" not in response.json()["error"]
    if "Host" in headers:
        assert client.get("/", headers={"Host": headers["Host"]}).status_code == status


@pytest.mark.parametrize(
    "path, data, words",
    [
        ("write", {"model": 2}, "model=2 is out of range"),
        ("write", {"prompt": "\ud800"}, "half a character"),
        ("write", {"prompt": "§"}, "'§' is not in the vocabulary"),
        ("write", {"temperature": 10**400}, "temperature is too large"),
        ("write", {"max_new_tokens": 2001}, "max_new_tokens=2001 is out of range"),
        ("write", {"kept": [0, 999]}, "a token=999 is out of range"),
        ("write", {"out_dir": "/etc"}, "unknown key 'out_dir'"),
        ("write", [], "a JSON object"),
        ("write", b"{", "not JSON"),
        ("write", b"[" * 100_000, "not JSON"),
        ("write", b" " * (server.BODY + 1), "more than 262,144 bytes"),
    ],
)
def test_a_wrong_value_is_named(client, path, data, words):
    body = data if isinstance(data, bytes) else json.dumps(data)
    response = client.post(f"/{path}", content=body, headers=JSON)
    assert response.status_code == (413 if len(body) > server.BODY else 400)
    assert words in response.json()["error"] and "\n" not in response.json()["error"]


# ---------------------------------------------------------------- the real server


@pytest.fixture
def running(opened, config):
    """(the port of a server in a thread, a function that stops it)."""
    listener = server.listen(0)
    port = listener.getsockname()[1]
    process = server.make_server(opened, config, port)
    thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
    thread.start()

    def stop():
        process.should_exit = True
        thread.join(20)
        assert not thread.is_alive()

    yield port, stop
    stop()


def send(port, **data):
    """A connection on which a text has been asked for."""
    body = json.dumps(data).encode()
    head = f"POST /write HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def until(connection, words):
    read = b""
    while words not in read:
        more = connection.recv(4096)
        assert more, read
        read += more
    return read


@pytest.fixture
def taken(monkeypatch):
    """Let models write 20 tokens a second. A list with an entry for each token, and for an end."""
    entries = []

    def slow_steps(*args, **settings):
        try:
            for step in sample.steps(*args, **settings):
                time.sleep(0.05)
                entries.append("step")
                yield step
        finally:
            entries.append("closed")

    monkeypatch.setattr(server, "steps", slow_steps)
    return entries


def test_a_text_ends_when_its_reader_leaves(taken, running):
    """Meanwhile each model also writes for others."""
    port, _ = running
    first = send(port, model=0, prompt="the", max_new_tokens=1000)
    until(first, b'"surprise"')
    for model in (0, 1):
        with send(port, model=model, prompt="the", max_new_tokens=1) as other:
            until(other, b'"end": "length"')
    first.close()
    deadline = time.monotonic() + 10
    while taken.count("closed") < 3:
        assert time.monotonic() < deadline, taken
        time.sleep(0.05)
    assert taken.count("step") < 100


def test_the_end_of_the_server_ends_a_text(taken, running):
    """A text of 50 seconds."""
    port, stop = running
    with send(port, model=0, prompt="the", max_new_tokens=1000) as connection:
        until(connection, b'"surprise"')
        stop()
    assert taken.count("step") < 100


def test_no_file_descriptor_is_left_is_one_line(capsys):
    """asyncio reports it with a traceback, thousands of times a second."""
    record = logging.makeLogRecord({"msg": "socket.accept() out of system resource"})
    try:
        raise OSError(errno.EMFILE, "Too many open files")
    except OSError:
        record.exc_info = sys.exc_info()
    assert not server.warn(record) and not server.warn(record)
    assert capsys.readouterr().err.count("\n") == 1


def test_ctrl_c_ends_quietly_and_a_taken_port_is_one_line(runs):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "extras.serve", runs[0], "--device=cpu"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([*command, f"--port={port}"], cwd=ROOT, **pipes)
    try:
        assert process.stdout.readline().startswith(f"http://127.0.0.1:{port} ")
        with pytest.raises(UserError, match=f"cannot listen.*port={port}.*choose another"):
            main([runs[0], f"--port={port}"])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as page:
            page.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err
    assert err.splitlines()[-1] == "stopped"


def visible(text):
    """A text as the page shows it: a sign in place of each control character."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\ufffd", text)


@pytest.mark.slow
def test_the_page_in_a_browser(browser, running, client):
    from playwright.sync_api import expect

    page, requested, complaints = browser.new_page(), [], []
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"http://127.0.0.1:{running[0]}/")
    status, texts = page.locator("#status"), page.locator(".text")
    popover, tokens_of = page.get_by_role("dialog"), lambda text: text.locator("span")

    # The sliders have names, and keys move them. Both models write what sample.py writes.
    slider = page.get_by_role("slider", name="temperature")
    expect(slider).to_have_value("0.8")
    slider.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuetext", "0.81")
    page.get_by_role("textbox", name="Prompt").fill("the Zo")
    page.get_by_role("textbox", name="Prompt").press("Control+Enter")
    expect(status).to_contain_text("done")
    for number in (0, 1):
        text = texts.nth(number)
        _, tokens, end = written(client, model=number, prompt="the Zo", temperature=0.81)
        expect(tokens_of(text)).to_have_count(6 + 40)
        assert text.text_content() == visible("the Zo" + text_of(tokens, end))
        levels = [sum(t["surprise"] >= limit for limit in (0.5, 1, 2, 4, 8)) for t in tokens]
        for i in (0, 20, 39):
            expect(tokens_of(text).nth(6 + i)).to_contain_class(f"s{levels[i]}")

    # The pointer shows the alternatives of a token; one of them is where the text goes on.
    _, tokens, _ = written(client, model=0, prompt="the Zo", temperature=0.81)
    tokens_of(texts.nth(0)).nth(9).hover()
    expect(popover).to_be_visible()
    buttons = popover.get_by_role("button")
    expect(buttons).to_have_count(10 + (tokens[3]["id"] not in [t[0] for t in tokens[3]["top"]]))
    i = next(i for i, other in enumerate(tokens[3]["top"]) if other[0] != tokens[3]["id"])
    before = "the Zo" + "".join(t["text"] for t in tokens[:3])
    buttons.nth(i).click()
    expect(tokens_of(texts.nth(0))).to_have_count(6 + 4 + 40)
    expect(status).to_contain_text("done")
    assert texts.nth(0).text_content().startswith(visible(before + tokens[3]["top"][i][1]))

    # A mistake is one line.
    page.get_by_role("textbox", name="Prompt").fill("§")
    page.get_by_role("button", name="Write").click()
    expect(page.get_by_role("alert")).to_contain_text("'§' is not in the vocabulary")
    complaints[:] = [line for line in complaints if "400 (Bad Request)" not in line]
    assert not complaints
    assert requested and all(f"//127.0.0.1:{running[0]}/" in url for url in requested)
