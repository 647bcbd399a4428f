# The page of the answer: the arms of each part in both shelves, and the claims of others.
#   python bench/answer.py
# The planned settings (config/answer/settings.py) are the answer. Parts that ran in them come first
# on the page; the others follow, by their worth. No number of ours stands here.

# The older sweeps, each within one setting: its folder below bench/results/answer, its base and its
# name. The first of a base has many seeds, and stands for it where a part is in no planned setting.
settings = {
    "llama": ("llama", "plays"),
    "llama/small": ("llama", "plays, a quarter of the size"),
    "llama/adamw": ("llama", "plays, AdamW"),
    "llama/python": ("llama", "Python files"),
    "llama/large": ("llama", "Python files, larger and longer"),
    "gpt2": ("gpt2", "GPT-2, plays"),
    "gpt2/small": ("gpt2", "GPT-2, plays, a quarter of the size"),
}
# A claim: the effect of a part on the loss, as a verdict would say it (None: our runs cannot test
# it), who published it, and where it can be read. The first claim of a part is in the table.
ARXIV = "https://arxiv.org/abs/"
MARIN = "https://github.com/marin-community/marin/issues/"
GENESIS = "https://github.com/NahuelGenchi/genesis-ai/issues/148"
MODDED = "https://github.com/KellerJordan/modded-nanogpt#world-record-history"
NANOCHAT = "https://github.com/karpathy/nanochat/blob/master/dev/LOG.md"
NANOCHAT_646 = "https://github.com/karpathy/nanochat/pull/646"
LLM_C = "https://github.com/karpathy/llm.c/pull/"
ELEUTHER = "https://blog.eleuther.ai/rotary-embeddings/"
GOLF_2000 = "https://github.com/openai/parameter-golf/pull/2000"
MODDED_201 = "https://github.com/KellerJordan/modded-nanogpt/pull/201"
MARIN_8387 = "https://github.com/marin-community/marin/pull/8387"
XIE = "Xie et al. 2025"

ROPE = [
    ("better in GPT-2, 124 M", "better", "llm.c #756", LLM_C + "756"),
    ("1.6 % lower loss, CPU", "better", "genesis-ai #148", GENESIS),
    ("better training loss", "better", "EleutherAI", ELEUTHER),
]
SWIGLU = [
    ("lower perplexity than GELU", "better", "Shazeer 2020", ARXIV + "2002.05202"),
    ("early gain that goes away", "tie", "llm.c #755", LLM_C + "755"),
    ("no gain, 0.06 % higher loss, CPU", "tie", "genesis-ai #148", GENESIS),
    ("0.05 nats better in T5, 223 M", "better", "Narang et al. 2021", ARXIV + "2102.11972"),
    ("1.17 × the compute, 3.6 M", "better", "Gundlach et al. 2025", ARXIV + "2511.21622"),
]
RMSNORM = [
    ("comparable quality", "tie", "Zhang & Sennrich 2019", ARXIV + "1910.07467"),
    ("0.02 nats better in T5, 223 M", "better", "Narang et al. 2021", ARXIV + "2102.11972"),
    ("no gain, 0.1 % higher loss, CPU", "tie", "genesis-ai #148", GENESIS),
]
BIASES = [
    ("stabler training of large models", None, "PaLM 2022", ARXIV + "2204.02311"),
    ("0.0006 nats worse with Muon, one run", None, "Marin #5585", MARIN + "5585"),
]
UNTIED = [
    ("0.019 bits per byte better", "better", "parameter-golf #2000", GOLF_2000),
    ("0.004 to 0.010 nats worse", "worse", "Marin #9290", MARIN + "9290"),
]
NO_POSITIONS = [
    ("best at unseen lengths, reasoning", None, "Kazemnejad et al. 2023", ARXIV + "2305.19466"),
]
SHARED = [
    ("nearly as accurate, half the cache", "tie", "Brandon et al. 2024", ARXIV + "2405.12981"),
    ("0.010 to 0.011 nats better", "better", "Marin #9290", MARIN + "9290"),
]
QK_NORM = [
    ("better at width 512, worse at 768", None, "Marin #5230", MARIN + "5230"),
    ("better translation, 5 pairs", "better", "Henry et al. 2020", ARXIV + "2010.04245"),
]
MUON = [
    ("1.4 × at 0.1 B, 1.1 × at 1.2 B", "better", "Wen et al. 2025", ARXIV + "2509.02046"),
    ("a fifth less time, 124 M", "better", "modded-nanogpt, record 3", MODDED),
]
GATE = [
    ("better loss, 1.7 B and 15 B", "better", "Qiu et al. 2025", ARXIV + "2505.06708"),
    ("0.03 nats worse with Muon, one run", "worse", "Marin #5585", MARIN + "5585"),
    ("0.01 nats better with AdamH", None, "Marin #5585", MARIN + "5585"),
    ("no improvement", "tie", "nanochat", NANOCHAT),
]

# name: the arms that put the part into a base, the arms that take it out of a base that has it,
# the swap, and the claims.
parts = {
    "RoPE": dict(
        into=dict(gpt2="rope"),
        out_of=dict(llama="learned positions"),
        swap="rotary positions instead of learned ones",
        claims=ROPE,
    ),
    "SwiGLU": dict(
        into=dict(gpt2="swiglu"),
        out_of=dict(llama="gelu"),
        swap="a gated MLP of as many parameters instead of GELU",
        claims=SWIGLU,
    ),
    "RMSNorm": dict(
        into=dict(gpt2="rmsnorm"),
        out_of=dict(llama="layernorm"),
        swap="RMSNorm instead of LayerNorm",
        claims=RMSNORM,
    ),
    "No biases": dict(
        into=dict(gpt2="no biases"),
        out_of=dict(llama="biases"),
        swap="no bias in any layer",
        claims=BIASES,
    ),
    "Untied head": dict(
        into=dict(gpt2="untied head"),
        out_of=dict(llama="tied head"),
        swap="an output matrix of its own instead of the embedding",
        claims=UNTIED,
    ),
    "All five together": dict(
        into=dict(gpt2="all of llama"),
        swap="RoPE, SwiGLU, RMSNorm, no biases and an untied head together",
    ),
    "Muon": dict(
        out_of=dict(gpt2="adamw", llama="adamw"),
        swap="Muon on the matrices instead of AdamW on all, at 1,080 steps; of AdamW only rate, "
        "warm-up and beta2 were searched",
        claims=MUON,
    ),
    "QK norm": dict(
        into=dict(gpt2="qk norm", llama="qk norm"),
        swap="RMSNorm on the queries and keys of each head",
        claims=QK_NORM,
    ),
    "ReLU²": dict(
        into=dict(gpt2="relu squared"),
        swap="squared ReLU instead of GELU",
        claims=[("better than the usual MLP", "better", "Primer 2021", ARXIV + "2109.08668")],
    ),
    "GEGLU": dict(
        into=dict(gpt2="geglu"),
        swap="a gated GELU of as many parameters instead of GELU",
        claims=[
            ("lower perplexity than GELU", "better", "Shazeer 2020", ARXIV + "2002.05202"),
            ("0.05 nats better in T5, 223 M", "better", "Narang et al. 2021", ARXIV + "2102.11972"),
        ],
    ),
    "ALiBi": dict(
        into=dict(gpt2="alibi", llama="alibi"),
        swap="a penalty on distance instead of the base's positions",
        claims=[
            ("holds beyond the trained length", None, "Press et al. 2021", ARXIV + "2108.12409")
        ],
    ),
    "No positions": dict(
        into=dict(gpt2="no positions"),
        swap="no position scheme at all",
        claims=NO_POSITIONS,
    ),
    "NoPE 1 in 4": dict(
        into=dict(llama="no positions in every fourth layer"),
        swap="no rotation in every fourth layer",
        claims=[("better at long contexts", None, "Yang et al. 2025", ARXIV + "2501.18795")],
    ),
    "Attention gate": dict(
        into=dict(llama="attention gate"),
        swap="a sigmoid gate on the output of each head",
        claims=GATE,
    ),
    "Sink": dict(
        into=dict(llama="sink"),
        swap="a learned logit per head to which attention may go",
    ),
    "Value residual": dict(
        into=dict(llama="value residual"),
        swap="the first layer's values mixed into each layer's",
        claims=[("a fifth fewer tokens", "better", "Zhou et al. 2024", ARXIV + "2410.17897")],
    ),
    "Value embeddings": dict(
        into=dict(llama="value embeddings"),
        swap="an embedding of the token added to the values",
        claims=[("5 % less time, 124 M", "better", "modded-nanogpt, record 14", MODDED)],
    ),
    "Input skip": dict(
        into=dict(llama="x0 skip"),
        swap="the embedding added to the stream before each layer, both with learned weights",
        claims=[
            ("0.004 to 0.010 bits per byte better", "better", "nanochat", NANOCHAT),
            ("the gain fades with depth", None, "nanochat", NANOCHAT),
        ],
    ),
    "Hyper-connections": dict(
        into=dict(llama="hyper-connections"),
        swap="four residual streams that mix with one another",
        claims=[
            ("1.8 × faster, 7 B with experts", "better", "Zhu et al. 2024", ARXIV + "2409.19606"),
            ("0.005 to 0.007 nats better, as mHC", "better", "Marin #9290", MARIN + "9290"),
        ],
    ),
    "Exclusive attention": dict(
        into=dict(llama="exclusive self-attention"),
        swap="a token's own value taken out of what its heads read",
        claims=[
            ("better, to 2.7 B", "better", "Zhai 2026", ARXIV + "2603.09078"),
            ("no real gain on a newer recipe", "tie", "Marin #9288", MARIN + "9288"),
        ],
    ),
    "Convolution": dict(
        into=dict(llama="convolution"),
        swap="a causal convolution over four tokens before attention",
        claims=[
            ("deeper reasoning, synthetic tasks", None, "Allen-Zhu 2025", ARXIV + "2512.17351")
        ],
    ),
    "Window": dict(
        into=dict(llama="window of 32"),
        swap="attention to the last quarter of the context alone",
        claims=[("0.02 to 0.03 nats worse, 3 layers in 4", "worse", "Marin #5338", MARIN + "5338")],
    ),
    "Low rank": dict(into=dict(llama="rank 32"), swap="matrices of rank 32", claims=[]),
    "GQA": dict(
        into=dict(llama="2 key heads"),
        swap="two key heads for four query heads",
        claims=[
            ("close to full attention", "tie", "Ainslie et al. 2023", ARXIV + "2305.13245"),
            ("0.02 nats worse, width 768", "worse", "Marin #8227", MARIN + "8227"),
        ],
    ),
    "MQA": dict(
        into=dict(llama="1 key head"),
        swap="one key head for four query heads",
        claims=[
            ("0.024 nats worse, 4 heads to 1", "worse", "Marin #5151", MARIN + "5151"),
            ("minor quality degradation", "worse", "Shazeer 2019", ARXIV + "1911.02150"),
        ],
    ),
    "Latent attention": dict(
        into=dict(llama="latent attention"),
        swap="keys and values from one small latent vector",
        claims=[("better than full attention", "better", "DeepSeek-V2 2024", ARXIV + "2405.04434")],
    ),
    "Differential attention": dict(
        into=dict(llama="differential attention"),
        swap="the difference of two attention maps",
        claims=[("65 % of the size or tokens", "better", "Ye et al. 2024", ARXIV + "2410.05258")],
    ),
    "Gated DeltaNet": dict(
        into=dict(llama="gated deltanet"),
        swap="a linear recurrence instead of attention and RoPE",
        claims=[("lower perplexity, 1.3 B", "better", "Yang et al. 2024", ARXIV + "2412.06464")],
    ),
    "Mamba-2": dict(
        into=dict(llama="mamba-2"),
        swap="a state-space model instead of attention and RoPE",
        claims=[("competitive with Transformers", "tie", "Dao & Gu 2024", ARXIV + "2405.21060")],
    ),
    "Hybrid": dict(
        into=dict(llama="hybrid"),
        swap="Gated DeltaNet in three layers of four, attention without positions in the last",
        claims=[("better with Mamba-2, 8 B", None, "Waleffe et al. 2024", ARXIV + "2406.07887")],
    ),
    "Experts": dict(
        into=dict(llama="experts"),
        swap="eight experts, two for each token, instead of one MLP",
        claims=[("better per step, worse per second", "better", "nanochat", NANOCHAT)],
    ),
    "Parallel block": dict(
        into=dict(llama="parallel block"),
        swap="attention and MLP side by side",
        claims=[("slightly worse at 8 B", "worse", "PaLM 2022", ARXIV + "2204.02311")],
    ),
    "Post-norm": dict(
        into=dict(llama="norms after the sublayer"),
        swap="the norm after each sublayer instead of before it",
        claims=[("cannot do without warm-up", None, "Xiong et al. 2020", ARXIV + "2002.04745")],
    ),
    "Convolutions at four sites": dict(
        swap="causal convolutions over four tokens on keys, values and the outputs of attention "
        "and of the MLP",
        claims=[
            ("0.023 nats better, width 1,024", "better", "Marin #7585", MARIN + "7585"),
            ("0.05 and 0.03 nats better, widths 512 and 768", "better", "Marin #8387", MARIN_8387),
        ],
    ),
    "Shared keys and values": dict(
        swap="every second layer reads the keys and values of the layer before",
        claims=SHARED,
    ),
    "N-gram embeddings": dict(
        swap="rows of hashed tables for the last 2, 3 and 4 tokens added to the token's vector",
        claims=[
            ("as good as twice the size", "better", "Huang et al. 2025", ARXIV + "2501.16975"),
            ("gain tiny at depth 25, gone by wall clock", "tie", "nanochat", NANOCHAT),
            ("0.95 and 1.04 × the compute, two widths", None, "Marin #9290", MARIN + "9290"),
            ("5 % less time, 124 M, bigrams", "better", "modded-nanogpt #201", MODDED_201),
        ],
    ),
    "Wide heads": dict(
        swap="half as many heads, twice as wide",
        claims=[
            ("0.012 bits per byte better, 128 for 64", "better", "Marin #2862", MARIN + "2862"),
            ("prefers 128 to 64", "better", "nanochat", NANOCHAT),
        ],
    ),
    "Half RoPE": dict(
        swap="rotary positions on half of each head",
        claims=[
            ("slightly worse on a quarter", "worse", "nanochat", NANOCHAT),
            ("0.001 bits per byte better", "better", "Marin #2862", MARIN + "2862"),
        ],
    ),
    "DyT": dict(
        swap="a learned tanh in place of the norms",
        claims=[
            ("as good or better", "tie", "Zhu et al. 2025", ARXIV + "2503.10622"),
            ("never better, 10 % slower", "worse", "nanochat", NANOCHAT),
            (
                "27 % lower loss on 1 M tokens, 19 % higher on 118 M",
                None,
                "arXiv:2604.23434",
                ARXIV + "2604.23434",
            ),
        ],
    ),
    "Attention residuals": dict(
        swap="a softmax over what all sublayers wrote instead of their sum",
        claims=[
            ("1.25 × the compute", "better", "Kimi Team 2026", ARXIV + "2603.15031"),
            ("1.06 and 1.17 × the compute", "better", "Marin #9290", MARIN + "9290"),
            ("no gain, 500 steps, in a gated form", "tie", "nanochat #646", NANOCHAT_646),
        ],
    ),
    "mHC": dict(
        swap="four residual streams whose mix is doubly stochastic",
        claims=[
            ("0.021 nats better, 27 B with experts", "better", XIE, ARXIV + "2512.24880"),
            ("stable, 6.7 % more time", None, XIE, ARXIV + "2512.24880"),
            ("1.04 × the compute, 0.96 × in time", "better", "Marin #9290", MARIN + "9290"),
        ],
    ),
}

# The published worths of a part, in training tokens or in compute at one speed, and whose they are.
multiples = {
    "RoPE": [(1.3, "EleutherAI, 1.4 B")],
    "SwiGLU": [(1.17, "Gundlach et al. 2025, 3.6 M")],
    "QK norm": [
        (1 / 0.899, "Marin #5230, width 512"),
        (1 / 1.073, "Marin #5230, width 768"),
    ],
    "Untied head": [
        (1 / 1.02, "Marin #9290, width 512"),
        (1 / 1.07, "Marin #9290, width 768"),
    ],
    "Muon": [
        (1.4, "Wen et al. 2025, 0.1 B"),
        (1.1, "Wen et al. 2025, 1.2 B"),
    ],
    "Value residual": [(1 / 0.797, "Zhou et al. 2024")],
    "Attention gate": [(1 / 1.031, "Marin #4716, width 512")],
    "Hyper-connections": [(1.8, "Zhu et al. 2024, 7 B with experts")],
    "GQA": [
        (1 / 1.10, "Marin #5151 and #8227, at most"),
        (1 / 1.18, "Marin #5151 and #8227, at least"),
    ],
    "Latent attention": [
        (0.768, "Marin #6522"),
        (0.858, "Marin #6522, larger"),
    ],
    "Differential attention": [(1 / 0.65, "Ye et al. 2024")],
    "Convolutions at four sites": [(1.186, "Marin #7585, width 1,024")],
    "Shared keys and values": [
        (1.07, "Marin #9290, width 512"),
        (1.07, "Marin #9290, width 768"),
    ],
    "N-gram embeddings": [
        (0.95, "Marin #9290, width 512"),
        (1.04, "Marin #9290, width 768"),
    ],
    "Attention residuals": [
        (1.25, "Kimi Team 2026"),
        (1.06, "Marin #9290, width 512"),
        (1.17, "Marin #9290, width 768"),
    ],
    "mHC": [
        (1.05, "Marin #9290, width 512"),
        (1.04, "Marin #9290, width 768"),
    ],
}

# The base and the part of the annotated example.
example = ("gpt2", "RoPE")
