"""
Prompts and answers in a row of a table:

    {"prompt": "...", "answer": "..."}                        a pair
    {"messages": [{"role": "user", "content": "..."}, ...]}   a conversation
    {"conversations": [{"from": "human", "value": "..."}, ...]}   the same, as ShareGPT has it
    {"prompt": "...", "chosen": "...", "rejected": "..."}     a preference
    {"chosen": "...", "rejected": "..."}                      its prompt is how both texts begin
    {"chosen": [{"role": ...}, ...], "rejected": [...]}       the same of two conversations
"""

import os
import re

from common.errors import UserError

CHATS = ("messages", "conversations")  # columns of conversations
COLUMNS = {"pairs": ["prompt", "answer"], "preferences": ["prompt", "chosen", "rejected"]}
FORM = 'a row is {"prompt": "...", "answer": "..."}, or {"messages": [...]}'
MESSAGE = 'a message is {"role": "user", "content": "..."}'
ROLES = {  # how the line of a message begins: the roles, in lower case
    "User": ["user", "human", "prompter"],
    "Assistant": ["assistant", "gpt", "chatgpt", "ai", "bot", "model"],
    "System": ["system"],
    "Developer": ["developer"],
    "Tool": ["tool"],
    "Function": ["function"],
}
SPEAKERS = {role: speaker for speaker, roles in ROLES.items() for role in roles}


def text_of(row, key, where, fix=FORM):
    """row[key], which must be a text of whole characters; else a UserError. Line ends and a byte
    order mark are treated as those of a text file."""
    text = row.get(key)
    if not isinstance(text, str):
        raise UserError(f"{key} is missing or not a text", where, fix)
    if re.search("[\ud800-\udfff]", text):
        raise UserError(f"the {key} holds half a character, \\ud800 to \\udfff", where, "remove it")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def is_chat(value):
    """Whether a cell holds a list of messages."""
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def pair(row, where):
    """(prompt, answer) of a row. Raises UserError if one is missing, or the answer is empty."""
    prompt = text_of(row, "prompt", where)
    answer = text_of(row, "answer", where)
    check_answer(answer, where)
    return prompt, answer


def check_answer(text, where):
    """Raise UserError if an answer is empty."""
    if not text.strip():
        raise UserError("an answer is empty", where, "leave the row out, or write an answer")


def preference(row, where):
    """[(prompt, chosen), (prompt, rejected)] of a row. Raises UserError if a text is missing, or
    the answers are the same."""
    if is_chat(row.get("chosen")) and is_chat(row.get("rejected")):
        chosen_prompt, chosen = last_answer(row, "chosen", where)
        prompt, rejected = last_answer(row, "rejected", where)
        if chosen_prompt != prompt:
            what = "chosen and rejected differ before their last answers"
            raise UserError(what, where, "leave the preference out")
    else:
        chosen = text_of(row, "chosen", where)
        rejected = text_of(row, "rejected", where)
        if row.get("prompt") is None:
            prompt = common_beginning(chosen, rejected)
            chosen = chosen.removeprefix(prompt)
            rejected = rejected.removeprefix(prompt)
        else:
            prompt = text_of(row, "prompt", where)
    check_answer(chosen, where)
    check_answer(rejected, where)
    if chosen == rejected:
        raise UserError("both answers are the same", where, "leave the preference out")
    return [(prompt, chosen), (prompt, rejected)]


def last_answer(row, key, where):
    """(prompt, answer) of the last message of a conversation in row[key]. The prompt of the row
    stands before it: messages, or, if the conversation begins with its answer, a text."""
    messages = row[key]
    prompt = row.get("prompt")
    if is_chat(prompt):
        messages = [*prompt, *messages]
    elif prompt is not None and len(messages) == 1:
        messages = [{"role": "user", "content": prompt}, *messages]
    if not chat_pairs(messages[-1:], where):
        what = f"{key} does not end with an answer of the assistant"
        raise UserError(what, where, "leave the preference out")
    return chat_pairs(messages, where)[-1]


def common_beginning(first, second):
    """The words that two texts begin with, but not the whole of either."""
    common = os.path.commonprefix([first, second])
    return common[: max(common.rfind(" "), common.rfind("\n"), 0)]


def chat_pairs(messages, where):
    """[(prompt, answer), ...] of a conversation, one for each message of the assistant, whose
    prompt is what stands before it:

        User: What is the capital of France?
        Assistant:

    A message without content, such as the call of a tool, is left out. Raises UserError if the
    conversation is malformed, or has a role that is not in SPEAKERS."""
    if not isinstance(messages, list):
        raise UserError("the messages are missing or not a list", where, FORM)
    pairs = []
    before = ""
    for message in messages:
        if not isinstance(message, dict):
            raise UserError("a message is not an object", where, MESSAGE)
        if "role" not in message and "from" in message:
            message = {"role": message["from"], "content": message.get("value")}
        role = text_of(message, "role", where, MESSAGE)
        if role.lower() not in SPEAKERS:
            fix = f"rename it: {', '.join(SPEAKERS)} are known"
            raise UserError(f"the role {role!r} is not known", where, fix)
        speaker = SPEAKERS[role.lower()]
        if message.get("content") is None:
            continue
        content = content_of(message, where)
        if speaker == "Assistant" and content.strip():
            pairs.append((f"{before}{speaker}:", f" {content}"))
        before += f"{speaker}: {content}\n"
    return pairs


def content_of(message, where):
    """The text of a message, whose content is a text or a list of parts."""
    content = message["content"]
    if not isinstance(content, list):
        return text_of(message, "content", where, MESSAGE)
    if not all(isinstance(part, dict) for part in content):
        raise UserError("a part of the content is not an object", where, MESSAGE)
    return "".join(text_of(part, "text", where, MESSAGE) for part in content)
