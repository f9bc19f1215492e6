"""Sphinx configuration of the documentation.

    pip install '.[docs]' && sphinx-build -W docs docs/_build/html

The pages of docs/reference/generated/ are written here from the code, before each build.
"""

import ast
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

project = "jaxpretrain"
author = "The jaxpretrain authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "jaxpretrain"
myst_heading_anchors = 4
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_ivar = True  # attributes of a NamedTuple are members, too

PROGRAMS = (
    "train", "prepare_data", "inspect_data", "plan", "train_compile", "launch", "report", "compare",
    "decode", "eval", "convert", "check_part", "coord_check",
)  # fmt: skip


def commands() -> str:
    """Returns the page of all programs with their usage texts."""
    lines = ["# Commands", "", "`--help` of each program, without its list of keys."]
    for name in PROGRAMS:
        tree = ast.parse((REPOSITORY / "MaxText" / f"{name}.py").read_text(encoding="utf-8"))
        usage = next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "USAGE"
        )
        lines += ["", f"## {name}.py", "", "```text", usage.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def model_presets() -> str:
    """Returns the page of all presets with their sizes."""
    from MaxText.config import config_files
    from MaxText.config.loading import load_config

    lines = [
        "# Model presets",
        "",
        "`model_name=NAME` applies `configs/models/NAME.yml` on top of the config file.",
        "",
        "| `model_name` | `decoder_block` | parameters | layers | width | heads | length |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in config_files.preset_names(config_files.MODELS):
        header, _, _ = (config_files.MODELS / f"{name}.yml").read_text("utf-8").partition("\n")
        parameters = header.split()[-2]  # "# GPT-2 of 124M: 124,439,808 parameters."
        shape = load_config(model_name=name, run_name="r").model.shape
        sizes = shape.dimensions
        lines.append(
            f"| `{name}` | {shape.decoder_block} | {parameters} "
            f"| {sizes.num_layers} | {sizes.emb_dim} | {sizes.num_query_heads} "
            f"| {shape.max_target_length} |"
        )
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Returns the generated pages by file name."""
    return {"commands.md": commands(), "model_presets.md": model_presets()}


def write_generated(_app) -> None:
    folder = Path(__file__).parent / "reference" / "generated"
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app) -> None:
    app.connect("builder-inited", write_generated)
