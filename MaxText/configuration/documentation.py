"""Writes configs/base.yml and docs/configuration.md from the schema.

    python -m MaxText.configuration.documentation

configs/base.yml names every key with its default, so that people can read and copy it. Its values
rank as schema defaults as long as they equal them (see loading.py): `base_config: base.yml` or
naming base.yml itself must not undo the part choices of a decoder_block. A copy under any other
name is an ordinary config file, whose every line counts.
"""

import textwrap
from pathlib import Path
from typing import Any

from MaxText.configuration import config_files, layering, saved, values
from MaxText.configuration.catalogue import Key, by_section
from MaxText.configuration.loading import accepted
from MaxText.configuration.maxtext_keys import ALIASES

CONFIGURATION_MD = config_files.REPOSITORY / "docs" / "configuration.md"
_REGENERATE = "python -m MaxText.configuration.documentation"

_BASE_HEADER = f"""\
# Every key with its default. Generated from the schema by
#   {_REGENERATE}
#
# Start a config file with `base_config: base.yml`, or with nothing: a value here that equals the
# schema's default ranks as one, so it never beats a choice of configs/decoder_blocks/. A copy of
# this file under another name is an ordinary config file, whose every line counts.
"""

_MD_HEADER = f"""\
# Configuration

Generated from the schema by `{_REGENERATE}`; edit the schema, not this file.

    python MaxText/train.py [config.yml] [key=value ...]

## Where values come from

Last wins:

{{layers}}

- A config path is looked up as given, then by its name among the shipped configs:
  `configs/gpt2.yml`, `MaxText/configs/gpt2.yml` and `gpt2.yml` all work from any folder.
- `base_config: FILE` in a YAML file inherits another file, looked up next to it first.
- `model_name=NAME` lays `configs/models/NAME.yml` over the config file; it may be set anywhere.
  Keys written in the file that names the preset beat it.
- `decoder_block: NAME` takes the part choices of `configs/decoder_blocks/NAME.yml` as defaults.
- A value of `configs/base.yml` that equals the schema's default ranks as the default, so
  `base_config: base.yml` never beats a decoder_block's choices.
- Values are YAML: `true`, `3e-5`, `[a, b]`; `none` is null; `key=` is the empty text. A text key
  takes what was typed as it is, so `run_name=123` and `prompt=yes` need no quotes.
- `logical_axis_rules`: rules given replace all rules of those names and leave the others.
- A key that has no effect under the chosen parts prints a `warning:` (keys of the model) or a
  `note:` (others) where it was set on purpose (config file, environment, command line), unless a
  stronger layer made that choice. `strict_config=true` refuses it.
- Several config files are laid over each other, the last one wins; so does the last value of a key
  that is given twice on the command line. `--key=value` and `--key value` are `key=value`.
- `config.yml` in the folder of a run holds `schema_version` and every resolved key. Given as the
  config file it restores that configuration: its `model_name` preset is not laid over it again.

`--show-config` prints the result, `--why KEY` where a value comes from and what it beat,
`--help KEY` everything about one key, `--from-maxtext FILE` what becomes of a MaxText YAML file.

## Old names

Accepted with a notice: {{aliases}}.
"""


def base_yml() -> str:
    """Text of configs/base.yml."""
    lines = [_BASE_HEADER.rstrip()]
    for section, keys in by_section().items():
        lines += ["", f"# ---- {'.'.join(section)}: {keys[0].title}"]
        for key in keys:
            lines += ["", *_comment(key), *saved.entry_lines(key.name, key.default)]
    return "\n".join(lines) + "\n"


def _comment(key: Key) -> list[str]:
    facts = [key.meaning]
    if key.choices:
        facts.append(f"Choices: {', '.join(str(choice) or 'empty' for choice in key.choices)}.")
    facts += [f"Unit: {key.unit}."] if key.unit else []
    facts += [f"Bounds: {key.bounds_text}."] if key.bounds_text else []
    facts += [f"Only if {_condition(key)}."] if key.conditions else []
    return textwrap.wrap(
        " ".join(facts),
        width=100,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _condition(key: Key) -> str:
    def one_of(group: dict[str, list[Any]]) -> str:
        said = " or ".join(
            f"{other} is {' or '.join(values.to_yaml(value) for value in effective)}"
            for other, effective in group.items()
        )
        return f"either {said}" if len(group) > 1 else said

    return " and ".join(map(one_of, key.conditions))


def configuration_md() -> str:
    """Text of docs/configuration.md."""
    shown = [layer for layer in layering.Layer if layer not in _NOT_FOR_READERS]
    layers = "\n".join(f"{number}. {layer.value}" for number, layer in enumerate(shown, start=1))
    aliases = ", ".join(f"`{old}` (`{new}`)" for old, new in ALIASES.items())
    lines = [_MD_HEADER.format(layers=layers, aliases=aliases).rstrip()]
    for section, keys in by_section().items():
        lines += ["", f"## {'.'.join(section)}", "", keys[0].title, ""]
        lines += ["| key | default | type | meaning |", "|---|---|---|---|"]
        lines += [_row(key) for key in keys]
    return "\n".join(lines) + "\n"


_NOT_FOR_READERS = (layering.Layer.SAVED_CONFIG, layering.Layer.ARGUMENT, layering.Layer.DERIVED)


def _row(key: Key) -> str:
    default = values.to_yaml(key.default)
    default = default if len(default) < 60 else "see configs/base.yml"
    meaning = key.meaning + (f" Unit: {key.unit}." if key.unit else "")
    meaning += f" Only if {_condition(key)}." if key.conditions else ""
    cells = [f"`{key.name}`", f"`{default}`", accepted(key), meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write(folder: Path | None = None) -> list[Path]:
    """Writes both files, into another folder if one is given; returns their paths."""
    targets = {config_files.BASE_YML: base_yml(), CONFIGURATION_MD: configuration_md()}
    written = []
    for target, text in targets.items():
        path = folder / target.name if folder else target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    for file in write():
        print(config_files.display(file))
