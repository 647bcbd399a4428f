"""Train a byte-level BPE on a text, by the `tokenizers` library, for use through tiktoken."""

from common.errors import UserError
from tokens.encode import pieces, safe_cut
from tokens.tokenizer import BPETokenizer

END = "<|endoftext|>"
LARGEST = 1_000_000  # tokens; the library takes memory for all at once

# GPT-4's pattern (cl100k_base in tiktoken/model.py and tiktoken_ext/openai_public.py), as it was
# first published and as LLaMA 3 has it. tiktoken's own copy has since become faster to match, but
# cuts white space at the end of a text differently.
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# GPT-2's letters for the 256 bytes: a printable byte is its own letter, the others are code points
# from 256 on.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {byte: chr(byte) for byte in PRINTED} | {
    byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in PRINTED)
}
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def train_bpe(texts, vocab_size, documents=False):
    """A BPETokenizer of vocab_size tokens: the 256 bytes, the merges of the pairs that are most
    frequent in `texts`, an iterator of str, and <|endoftext|>. The same text gives the same tokens.

    The texts are consecutive pieces of one text, however it was cut; with `documents`, each is a
    text of its own. Memory grows with the number of different words, not with the text. Raises
    UserError if vocab_size is too small or too large, or the text too short for so many tokens."""
    where = f"vocab_size={vocab_size}"
    if not 257 <= vocab_size <= LARGEST:
        what = "a vocabulary has 257 tokens, the 256 bytes and <|endoftext|>, or more"
        raise UserError(what, where, f"choose 257 to {LARGEST:,}")
    try:
        trained = learn(texts if documents else pieces(texts, safe_cut), vocab_size - 1)
    except ImportError:
        fix = "pip install tokenizers"
        raise UserError("training a BPE needs the package tokenizers", where, fix) from None

    vocab = trained.get_vocab()
    if len(vocab) < vocab_size - 1:
        what = f"the text is too short: it yields only {len(vocab) + 1:,} tokens"
        raise UserError(what, where, f"choose {len(vocab) + 1} or less, or a longer text")
    return BPETokenizer(encoding_of(vocab))


def learn(texts, size):
    """The library's own tokenizer of `size` tokens, or fewer if the texts yield no more."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    split = pre_tokenizers.Split(Regex(GPT4), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = [*LETTERS.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encoding_of(vocab):
    """The tiktoken.Encoding of {token in GPT-2's letters: rank}, with <|endoftext|> after them."""
    import tiktoken

    ranks = {bytes(BYTES[letter] for letter in token): rank for token, rank in vocab.items()}
    special = {END: len(ranks)}
    return tiktoken.Encoding("trained", pat_str=GPT4, mergeable_ranks=ranks, special_tokens=special)
