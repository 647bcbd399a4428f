"""
Prompts and answers in a row of a table:

    {"prompt": "...", "answer": "..."}                        a pair
    {"prompt": "...", "chosen": "...", "rejected": "..."}     a preference
    {"messages": [{"role": "user", "content": "..."}, ...]}   a conversation
    {"conversations": [{"from": "human", "value": "..."}, ...]}   the same, as ShareGPT has it
"""

import re

from common.errors import UserError

COLUMNS = {"pairs": ["prompt", "answer"], "preferences": ["prompt", "chosen", "rejected"]}
FORM = 'a line is {"prompt": "...", "answer": "..."}, or {"messages": [...]}'
MESSAGE = 'a message is {"role": "user", "content": "..."}'
SHAREGPT = {"human": "user", "gpt": "assistant"}  # its names of the two roles


def text_of(row, key, where, fix=FORM):
    """row[key], which must be a text of whole characters; else a UserError."""
    text = row.get(key)
    if not isinstance(text, str):
        raise UserError(f"{key} is missing or not a text", where, fix)
    if re.search("[\ud800-\udfff]", text):
        raise UserError(f"the {key} holds half a character, \\ud800 to \\udfff", where, "remove it")
    return text


def answers(row, kind, where):
    """[(prompt, answer)] of a row, or of a preference [(prompt, chosen), (prompt, rejected)].
    Raises UserError if a text is missing, or the answers are the same."""
    prompt, *texts = (text_of(row, key, where) for key in COLUMNS[kind])
    if not all(text.strip() for text in texts):
        raise UserError("an answer is empty", where, "leave the row out, or write an answer")
    if len({*texts}) < len(texts):
        raise UserError("both answers are the same", where, "leave the preference out")
    return [(prompt, text) for text in texts]


def chat_pairs(messages, where):
    """[(prompt, answer), ...] of a conversation, one for each message of the assistant, whose
    prompt is what stands before it:

        User: What is the capital of France?
        Assistant:

    A message without content, such as the call of a tool, is left out. Raises UserError if the
    conversation is malformed."""
    if not isinstance(messages, list):
        raise UserError("the messages are missing or not a list", where, FORM)
    pairs = []
    before = ""
    for message in messages:
        if not isinstance(message, dict):
            raise UserError("a message is not an object", where, MESSAGE)
        if "role" not in message and "from" in message:
            role = text_of(message, "from", where, MESSAGE)
            message = {"role": SHAREGPT.get(role, role), "content": message.get("value")}
        role = text_of(message, "role", where, MESSAGE).capitalize()
        if message.get("content") is None:
            continue
        content = content_of(message, where)
        if role == "Assistant" and content.strip():
            pairs.append((f"{before}{role}:", f" {content}"))
        before += f"{role}: {content}\n"
    return pairs


def content_of(message, where):
    """The text of a message, whose content is a text or a list of parts."""
    content = message["content"]
    if not isinstance(content, list):
        return text_of(message, "content", where, MESSAGE)
    if not all(isinstance(part, dict) for part in content):
        raise UserError("a part of the content is not an object", where, MESSAGE)
    return "".join(text_of(part, "text", where, MESSAGE) for part in content)
