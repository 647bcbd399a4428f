# The recipe: which parts of LLaMA's shelf help together? Forward selection, one part a round. Give
# this file after the file of the shelf, and each command when the one before has ended:
#   python bench/ablate.py config/answer/llama.py config/answer/recipe.py --workers=2
#   the same with --also=confirm-1, then --also=together
# The base has QK norm, the shelf's best part in tokens that also saves time. The candidates are
# the other parts that were estimated, when this began, to save both. Four runs of each rank them.
# The best is confirmed by eight runs on seeds of their own, and would be in the base of a next
# round: it was not confirmed, so there is one round. Planned only after that: QK norm, and all five
# together, over plain LLaMA on seeds that no choice used.
question = "Which parts help a LLaMA of 0.8 M parameters together?"
out_dir = "bench/results/answer/recipe"
screening = True
seeds = 4
controls = None
qk_norm = "head"

arms = {
    name: arms[name]
    for name in ("window of 32", "x0 skip", "attention gate", "exclusive self-attention")
}
_confirm = dict(screening=False, seeds=8, controls=12, lr_grid=[1], curve=[])
also = {
    "confirm-1": dict(arms=["attention gate"], first_seed=100, **_confirm),
    "together": dict(
        qk_norm="none",
        arms={
            "qk norm": dict(qk_norm="head"),
            "all five": dict(
                qk_norm="head", window=32, residual="scaled", attn_extra="gate_head,xsa"
            ),
        },
        first_seed=200,
        **_confirm | dict(curve=[0.5, 2]),
    ),
}
