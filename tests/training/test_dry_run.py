"""The memory that --dry_run estimates is what a step really takes from the allocator."""

import pytest
from torch.profiler import ProfilerActivity, profile

import train
from helpers.runs import ready
from training import dry_run


def nodes(tree):
    for node in tree:
        yield node
        yield from nodes(node.children)


def most_bytes(work):
    """The most bytes that work() has from torch's CPU allocator at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    found = nodes(profiler.profiler.kineto_results.experimental_event_tree())
    changes = sorted((n for n in found if n.name == "[memory]"), key=lambda n: n.start_time_ns)
    held = most = 0
    for change in changes:
        held += change.typed[1].alloc_size
        most = max(most, held)
    return most


SHAPES = {
    "deep": ["--n_layer=6", "--n_embd=128", "--n_head=4", "--batch_size=8", "--block_size=64"],
    "few tokens": ["--n_layer=2", "--n_embd=128", "--n_head=4", "--batch_size=2"],
}
KINDS = [
    ["--model=gpt2"],
    ["--model=llama"],
    ["--model=llama", "--vocab_size=5000", "--multiple_of=8"],
    ["--model=gpt2", "--gradient_accumulation_steps=2"],
    ["--model=gpt2", "--activation_checkpointing"],
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_estimate_is_the_peak_of_the_allocator(data_dir, tmp_path, kind, shape, dtype):
    run = ready(data_dir, tmp_path, *SHAPES[shape], *kind, f"--dtype={dtype}")
    for _ in range(2):  # makes the moments
        train.train_step(run)
    parts = dry_run.memory(run)
    before = parts["weights and moments"]
    measured = before + most_bytes(lambda: train.train_step(run))
    assert dry_run.peak(run, parts) == pytest.approx(measured, rel=0.1)


def test_a_measured_peak_comes_first_and_an_estimate_is_called_one(data_dir, tmp_path):
    run = ready(data_dir, tmp_path)
    estimated = dry_run.size(dry_run.peak(run, dry_run.memory(run)))
    assert dry_run.memory_text(run, None).startswith(f"about {estimated} at the peak, an estimate")
    text = dry_run.memory_text(run, 8_400_000_000)
    assert text.startswith(f"8.4 GB at the peak, measured ({estimated} estimated: weights and ")


def test_a_compiled_loss_makes_one_gradient(data_dir, tmp_path):
    """Float32: 4 bytes for each of the logits, and 8 if eager."""
    run = ready(data_dir, tmp_path, "--vocab_size=5000")
    logits = 4 * 16 * 5000  # sequences, tokens each, words
    assert dry_run.memory(run)["loss"] == 8 * logits
    run.runtime.compile = True
    assert dry_run.memory(run)["loss"] == 4 * logits
