"""Figure 1b: GPU memory against context length.

Claim: the KV cache that attention needs grows linearly with the context, to hundreds of GB, while what the non-attention
layers need stays flat. Reproduced: a straight line through the paper's values, and a flat one below the memory of one GPU.
Model: LLaMA2-7B [us]; the paper's values are those of its 524,288 bytes a token.
"""

import sys

import pandas as pd
from known import value
from matplotlib.figure import Figure
from sheet import legend_below, main, panels, paper_marks
from study import Study, instance_of

from experiments.plotstyle import BLUE, GREY, ORANGE

FIGURE = "1b"
TITLE = "Memory against context length, LLaMA2-7B"
PARTS = "Analytic: KV bytes a token, weights, and activations of a 2,048-token iteration, from the model's sizes."
WHY = "The same arithmetic; the paper's values are read off a picture."
MODEL = "llama2-7b"
CONTEXTS = (1_000, 250_000, 500_000, 750_000, 1_000_000, 1_500_000, 2_000_000)


def table(study: Study) -> pd.DataFrame:
    instance = instance_of(MODEL)
    account = instance.memory_account()
    flat_bytes = account["weight_bytes"] + account["activation_bytes"]
    rows = [(tokens, tokens * instance.model.kv_bytes_per_token, flat_bytes) for tokens in CONTEXTS]
    frame = pd.DataFrame(rows, columns=["context_tokens", "attention_bytes", "non_attention_bytes"])
    return frame.assign(gpu_bytes=instance.gpu.memory_bytes)


def draw(frame: pd.DataFrame) -> Figure:
    figure, [axes] = panels(1, width=4.6)
    contexts = frame["context_tokens"] / 1000
    axes.plot(contexts, frame["attention_bytes"] / 1e9, color=BLUE, marker="o", label="attention (KV cache)")
    axes.plot(contexts, frame["non_attention_bytes"] / 1e9, color=ORANGE, marker="s", label="non-attention")
    axes.axhline(frame["gpu_bytes"].iloc[0] / 1e9, color=GREY, ls=":", lw=1, label="one GPU")
    paper_marks(axes, (1000, 2000), [value(FIGURE, f"attention memory at {k}K") for k in ("1,000", "2,000")])
    axes.set(xlabel="context, K tokens", ylabel="memory, GB", xlim=(0, None), ylim=(0, None))
    legend_below(figure, [axes], 2)
    return figure


def ours(frame: pd.DataFrame) -> dict[str, float]:
    by_context = frame.set_index("context_tokens")["attention_bytes"] / 1e9
    return {f"attention memory at {tokens // 1000:,}K": by_context[tokens] for tokens in (1_000_000, 2_000_000)}


if __name__ == "__main__":
    main(sys.modules[__name__])
