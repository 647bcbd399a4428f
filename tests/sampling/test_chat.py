"""Special tokens in a prompt, and conversations by a model's own chat template."""

import io
import json

import pytest
import torch

import sample
from helpers.formats import small_model
from helpers.pretrained import write_model
from helpers.texts import message, tiny_bpe
from sampling.prompts import chat_prompt
from weights import export, hf

TEMPLATE = """{{- bos_token }}
{%- if tools is not none or documents is not none %}{{ raise_exception('no tools') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- else %}
        {%- generation %}{{- '<|im_start|>assistant\n' + message.content + '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}"""
FIRST = "<|endoftext|><|im_start|>user\nthe king<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with Qwen's tokenizer and a chat template, exported and so read again."""
    root = tmp_path_factory.mktemp("chat")
    source = write_model(root / "qwen", "qwen")
    (source / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = hf.load_tokenizer(str(source))
    made = small_model("llama", tokenizer.vocab_size)
    config, tensors = export.to_hf("llama", vars(made.config), made.state_dict())
    export.write_folder(root / "out", config, tensors, tokenizer)
    return root / "out"


@pytest.fixture
def answers(monkeypatch, folder):
    """Texts that the model writes, one for each prompt, and the prompts that it was given."""
    tokenizer = hf.load_tokenizer(str(folder))
    end = tokenizer.library.token_to_id("<|im_end|>")
    texts, asked = [], []

    def steps(model, idx, *args, **settings):
        asked.append(tokenizer.decode(idx[0].tolist()))
        for token in [*tokenizer.encode(texts.pop(0)), end, *tokenizer.encode("never")]:
            yield sample.Step(torch.tensor([[token]]), torch.zeros(1, tokenizer.vocab_size))

    monkeypatch.setattr(sample, "steps", steps)
    return texts, asked


def test_special_tokens_count_in_a_prompt(folder, answers, capsys):
    texts, asked = answers
    texts.append(" shall speak")
    sample.main([f"--init_from={folder}", f"--start={FIRST}", "--num_samples=1"])
    printed = capsys.readouterr()
    assert "special tokens in the prompt (4): <|endoftext|> <|im_start|> <|im_end|>" in printed.err
    assert printed.out.startswith(FIRST + " shall speak\n") and asked == [FIRST]
    tokenizer = hf.load_tokenizer(str(folder))
    assert len(tokenizer.prompt(FIRST)) < len(tokenizer.encode(FIRST)) - 20
    assert tiny_bpe().prompt("a<|endoftext|>") == [97, 260]


def test_one_message(folder, answers, capsys, tmp_path):
    """The template is not printed."""
    texts, asked = answers
    (tmp_path / "prompts.txt").write_text("the king\n")
    for prompt in ("--start=the king", f"--prompts={tmp_path / 'prompts.txt'}"):
        texts.append("no more")
        sample.main([f"--init_from={folder}", "--chat", prompt])
        printed = capsys.readouterr()
        assert asked.pop() == FIRST and printed.out.startswith("no more\n")
        assert "special tokens" not in printed.err


def test_a_conversation_goes_on(folder, answers, capsys, monkeypatch, tmp_path):
    """With one answer to each message, whatever a config file says."""
    (tmp_path / "three.py").write_text("num_samples = 3\n")
    texts, asked = answers
    texts += ["no more", "of Rome", "no"]
    context = len(hf.load_tokenizer(str(folder)).prompt(FIRST)) + 9  # of the first message alone

    def chat(typed, *more):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
        sample.main([str(tmp_path / "three.py"), f"--init_from={folder}", "--chat", *more])

    chat(b"the king\nand Rome?\nand?", "--max_new_tokens=9", f"--context={context}")
    second = "no more<|im_end|>\n<|im_start|>user\nand Rome?<|im_end|>\n<|im_start|>assistant\n"
    assert asked[:2] == [FIRST, FIRST + second] and len(asked) == 3
    printed, notes = capsys.readouterr()
    assert printed.index("no more") < printed.index("of Rome") and "<|im" not in printed
    assert notes.count("the text may outgrow the context") == 1
    assert message(chat, b"\xff").startswith("this message is not utf-8 (stdin)")
    assert message(chat, b"", "--num_samples=3").startswith("num_samples changes nothing here")
    assert message(sample.build_config, {"chat": True}).startswith("this command holds no convers")


@pytest.mark.slow
def test_the_template_is_rendered_as_by_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = hf.load_tokenizer(str(folder))
    messages = [{"role": "user", "content": "the king"}]
    messages += [{"role": "assistant", "content": "{{ Rome }}"}, messages[0]]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat_prompt(tokenizer, messages) == text


@pytest.mark.parametrize(
    "template, words",
    [
        (None, "no chat template"),
        ("{{ raise_exception(strftime_now('%d %b %Y')) }}", "26 Jul 2024"),  # always this date
        ("{% for %}", "template fails"),
        ("{{ messages.append(1) }}{{ ''.__class__.mro() }}", "template fails"),
    ],
)
def test_a_template_that_is_missing_or_fails_is_one_line(template, words, folder):
    tokenizer = hf.load_tokenizer(str(folder))
    tokenizer.chat = template and {"template": template, "bos_token": "", "eos_token": ""}
    assert words in message(chat_prompt, tokenizer, [{"role": "user", "content": "a"}])
    assert "no chat template" in message(chat_prompt, tiny_bpe(), [])


def test_several_templates_by_name(tmp_path):
    source = write_model(tmp_path / "llama2", "llama2")
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    about = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": named}
    (source / "tokenizer_config.json").write_text(json.dumps(about))
    chat = hf.load_tokenizer(str(source)).chat
    assert chat == {"template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(about | {"bos_token": None}))
    tokenizer = hf.load_tokenizer(str(source))
    config = {"model_type": "llama", "max_position_embeddings": 8}
    export.write_folder(tmp_path / "out", config, {"x": torch.zeros(1)}, tokenizer)
    assert hf.load_tokenizer(str(tmp_path / "out")).chat == chat | {"bos_token": ""}
