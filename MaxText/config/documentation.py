"""Generates configs/base.yml, configuration.md and layers/built_in.yml.

    python -m MaxText.config.documentation

configs/base.yml has every key with its default. Its values rank as schema defaults as long as they
equal them (see merging.py): `base_config: base.yml` must not undo the part choices of a
decoder_block. A copy under another name is an ordinary config file.
"""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml

from MaxText.config import config_files, registry, serialization, sources, values
from MaxText.config.merging import format_accepted
from MaxText.config.schema import Key, keys_by_section

CONFIGURATION_MD = config_files.REPOSITORY / "docs" / "reference" / "configuration.md"
PACKAGE = Path(__file__).parents[1]
_REGENERATE = "python -m MaxText.config.documentation"

_BASE_HEADER = f"""\
# Every key with its default. Generated from the schema by
#   {_REGENERATE}
#
# Start a config file with `base_config: base.yml`, or with nothing: a value here that equals the
# schema's default ranks as one, so it never beats a choice of configs/decoder_blocks/. A copy of
# this file under another name is an ordinary config file, whose every line counts.
"""

_COMMENTS = textwrap.TextWrapper(
    100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False, break_long_words=False
)
# The page before its tables: {layers} is filled in.
_MD_HEADER = Path(__file__).with_name("configuration_header.md").read_text(encoding="utf-8")


def base_yml() -> str:
    """Returns configs/base.yml: every key with its default, under a comment that explains it."""
    lines = [_BASE_HEADER.rstrip()]
    for section, keys in keys_by_section().items():
        lines += ["", f"# ---- {'.'.join(section)}: {keys[0].title}"]
        for key in keys:
            lines += ["", *_comment(key)]
            if not key.entries:
                lines += serialization.entry_lines(key.name, key.default)
                continue
            lines.append(f"{key.name}:")
            for name, entry in key.entries.items():
                described = [*_comment(entry), f"{name}: {values.to_yaml(entry.default)}"]
                lines += [f"  {line}" for line in described]
    return "\n".join(lines) + "\n"


def _comment(key: Key) -> list[str]:
    """Returns comment lines with all that is declared about a key."""
    facts = [key.help]
    if key.choices:
        facts.append(f"Choices: {', '.join(str(choice) or 'empty' for choice in key.choices)}.")
    facts += [f"Unit: {key.unit}."] if key.unit else []
    facts += [f"Bounds: {bounds}."] if (bounds := values.bounds_text(key.constraints)) else []
    facts += [f"Only if {_condition(key)}."] if key.conditions else []
    return _COMMENTS.wrap(" ".join(facts))


def _condition(key: Key) -> str:
    return " and ".join(map(key.condition_text, key.conditions))


def configuration_md() -> str:
    """Returns the reference page: the layers of settings, and a table of keys per section."""
    undocumented = (sources.Source.SAVED_CONFIG, sources.Source.ARGUMENT, sources.Source.DERIVED)
    documented = [source for source in sources.Source if source not in undocumented]
    layers = "\n".join(
        f"{number}. {source.value}" for number, source in enumerate(documented, start=1)
    )
    lines = [_MD_HEADER.format(layers=layers).rstrip()]
    for section, keys in keys_by_section().items():
        lines += ["", f"## {'.'.join(section)}", "", keys[0].title, ""]
        lines += ["| key | default | values | meaning | only if |", "|---|---|---|---|---|"]
        for key in keys:
            lines += [_row(key), *map(_row, key.entries.values())]
    return "\n".join(lines) + "\n"


# Parts of a description of values -> how the table words them.
_SHORT_TYPES = {
    "an integer": "integer",
    "a number": "number",
    "true or false": "boolean",
    "a list [...], each: one of": "list from",
    "a list [...], each: ": "list of ",
    " and other than 0": ", not 0",
}
_SAME_TYPES = {"moe_activations": "as mlp_activations, or null"}  # 50 names


def _row(key: Key) -> str:
    """Returns the line of a key in its section's table."""
    default = values.to_yaml(key.default)
    default = f"`{default}`" if len(default) < 60 else "see configs/base.yml"
    accepted = _SAME_TYPES.get(key.name) or format_accepted(key)
    if key.entries:
        # their rows follow
        default = ""
        accepted = "{entry: value}"
    for long_type, short_type in _SHORT_TYPES.items():
        accepted = accepted.replace(long_type, short_type)
    accepted = accepted.removeprefix("one of ")
    accepted += f" ({key.unit})" if key.unit else ""
    cells = [f"`{key.name}`", default, accepted, key.help, _condition(key)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def built_in_yml() -> str:
    """Returns layers/built_in.yml: the parts registered in the package."""
    parts: dict[str, dict[str, str]] = {kind: {} for kind in registry.KINDS}
    for package in ("layers", "training"):
        for path in (PACKAGE / package).rglob("*.py"):
            module = ".".join(["MaxText", *path.relative_to(PACKAGE).with_suffix("").parts])
            for kind, name, target in _registered_in(path, module):
                parts[kind][name] = target
    return f"# Built-in parts. Generated by {_REGENERATE}\n{yaml.safe_dump(parts)}"


def _registered_in(path: Path, module: str) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, name, line of built_in.yml) of the parts that a file registers.

    The file is parsed, not imported.

    Args:
      path: Of the file.
      module: Its dotted name.
    """
    body = ast.parse(path.read_text(encoding="utf-8")).body
    origins = {
        name.asname or name.name: f"{node.module}:{name.name}"
        for node in body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            match decorator:
                case ast.Call(func=ast.Name(id="register"), args=[kind, name], keywords=keywords):
                    attributes = [f"{module}:{node.name}"]
                    attributes += [origins[ast.unparse(keyword.value)] for keyword in keywords]
                    if "keeps_shapes = False" in map(ast.unparse, node.body):
                        attributes.append("unrolled")
                    yield ast.literal_eval(kind), ast.literal_eval(name), " ".join(attributes)


if __name__ == "__main__":
    for file, text in (
        (registry.BUILT_IN, built_in_yml),  # first, because its parts have keys
        (config_files.BASE_YML, base_yml),
        (CONFIGURATION_MD, configuration_md),
    ):
        file.write_text(text(), encoding="utf-8")
        registry.read_built_in()
        print(config_files.short_path(file))
