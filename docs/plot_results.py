"""Writes the table of docs/reference/results.md and its figure from results.csv.

python docs/plot_results.py
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from MaxText.experiments.seed_statistics import Estimate, paired_difference  # noqa: E402

PAGE = DOCS / "reference" / "results.md"
HEADER = "| comparison | losses | difference | interval |\n|---|---|---:|---|\n"
# Row of the table: comparison in results.csv, configurations A and B
ROWS = {
    "GPT-2 layer, Llama layer": ("gpt2_llama", "gpt2_style", "llama_style"),
    "rotary, learned positions": ("rotary_learned", "position_rotary", "position_learned"),
    "Transformer++, MUDDFormer, 6 layers": ("mudd", "transformer_pp", "muddformer"),
    "equal parameters, 2 layers": ("mudd_2_layers", "tiny_transformer_pp", "tiny_muddformer"),
    "equal parameters, 4 layers": ("mudd_4_layers", "tiny_transformer_pp", "tiny_muddformer"),
    "equal parameters, 8 layers": ("mudd_8_layers", "tiny_transformer_pp", "tiny_muddformer"),
    "rotary, ALiBi at 128 tokens": ("alibi_128", "rotary", "alibi"),
    "rotary, ALiBi at 256 tokens": ("alibi_256", "rotary", "alibi"),
    "rotary, ALiBi at 512 tokens": ("alibi_512", "rotary", "alibi"),
    "global, alternating local attention": (
        "attention", "global_attention", "alternating_attention",
    ),
    "global, linear attention": ("attention", "global_attention", "linear_attention"),
    "attention, gated DeltaNet in 3 of 4 layers": (
        "hybrids", "hybrid_attention", "hybrid_gated_deltanet",
    ),
    "attention, KDA in 3 of 4 layers": ("hybrids", "hybrid_attention", "hybrid_kda"),
    "attention, Mamba-2 in 3 of 4 layers": ("hybrids", "hybrid_attention", "hybrid_mamba2"),
    "experts without balance, with a loss": ("experts", "tiny_experts", "tiny_experts_loss"),
    "experts without balance, with a bias": ("experts", "tiny_experts", "tiny_experts_bias"),
    "without, with Head-QK": ("head_qk", "head_qk=false", "head_qk=true"),
    "TokenFormer, width 16: grown, full size": (
        "tokenformer_width_16", "tokenformer_grown", "tokenformer_scratch",
    ),
    "width 32: grown, full size": (
        "tokenformer", "tokenformer_grown", "tokenformer_fixed,slot_num=256",
    ),
    "width 64: grown, full size": (
        "tokenformer_width_64", "tokenformer_grown", "tokenformer_scratch",
    ),
    "width 32: grown, 64 slots": (
        "tokenformer", "tokenformer_grown", "tokenformer_fixed,slot_num=64",
    ),
    "width 32: grown, 128 slots": (
        "tokenformer", "tokenformer_grown", "tokenformer_fixed,slot_num=128",
    ),
    "width 32: grown, Transformer": (
        "tokenformer", "tokenformer_grown", "transformer_for_tokenformer",
    ),
}  # fmt: skip
# Panel of the figure: x axis -> {value: row}
PANELS = {
    "MUDDFormer - Transformer++\nlayers": {n: f"equal parameters, {n} layers" for n in (2, 4, 8)},
    "ALiBi - rotary\nlength of evaluation in tokens": {
        n: f"rotary, ALiBi at {n} tokens" for n in (128, 256, 512)
    },
    "TokenFormer: full size - grown\nwidth": {
        16: "TokenFormer, width 16: grown, full size",
        32: "width 32: grown, full size",
        64: "width 64: grown, full size",
    },
}


def losses() -> dict[tuple[str, str], dict[int, float]]:
    """Returns (comparison, configuration) -> seed -> nats per token."""
    read = defaultdict(dict)
    with open(PAGE.with_suffix(".csv"), newline="") as file:
        for row in csv.DictReader(file):
            read[row["comparison"], row["configuration"]][int(row["seed"])] = float(
                row["validation_loss"]
            )
    return read


def table(read: dict[tuple[str, str], dict[int, float]]) -> tuple[str, dict[str, Estimate]]:
    """Returns the rows as Markdown, and each row's difference B - A."""
    text, differences = HEADER, {}
    for title, (comparison, a, b) in ROWS.items():
        first, other = read[comparison, a], read[comparison, b]
        differences[title] = one = paired_difference(first, other)
        text += (
            f"| {title} | {fmean(first.values()):.4f}, {fmean(other.values()):.4f} "
            f"| {one.mean:+.4f} | {one.ci_low:+.4f}, {one.ci_high:+.4f} |\n"
        )
    return text, differences


def draw(differences: dict[str, Estimate], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        heading, label = title.split("\n")
        shown = [differences[row] for row in rows.values()]
        errors = [
            [one.mean - one.ci_low for one in shown], [one.ci_high - one.mean for one in shown]
        ]  # fmt: skip
        axes.axhline(0, color="0.6", linewidth=1)
        axes.errorbar(list(rows), [one.mean for one in shown], errors, fmt="o", capsize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(rows), [str(value) for value in rows])
        axes.minorticks_off()
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel(label)
    figure.supylabel("difference, nats/token", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    rows, differences = table(losses())
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEADER)
    _, _, after = rest.partition("\n\n")
    PAGE.write_text(f"{before}{rows}\n{after}", encoding="utf-8")
    draw(differences, DOCS / "images" / "differences.png")


if __name__ == "__main__":
    main()
