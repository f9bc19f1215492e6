"""Checks a part: python MaxText/check_part.py PARTS.py:NAME [key=value]."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText import exit_codes
from MaxText.config import command_line, registry, values
from MaxText.config.loading import load_config
from MaxText.config.problems import ConfigIssue
from MaxText.config.program_options import NoOptions, read_options
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.runtime.start_up import FAST_COMPILATION

if TYPE_CHECKING:
    from MaxText.conformance.checks import Check
    from MaxText.conformance.source_checks import SourceSubject
    from MaxText.conformance.subject import Subject

USAGE = """
usage: check_part.py MODULE[:CLASS] [key=value ...]

Builds a small model with a part, on the CPU, and checks what every part must do: causality, no
leak between documents or into padding, gradients, scanned = unrolled, remat, decoding from its
state, FLOPs, bfloat16, 8 simulated devices, resuming, growth. Of an optimizer: its state, its
updates, 8 devices, resuming (docs/tutorials/add_an_architecture.md). Of a data source: its ids,
that they repeat, its lengths, resuming (docs/how-to/add_a_data_source.md).

  python MaxText/check_part.py examples/deltanet.py
  python MaxText/check_part.py my_package.parts:MyMixer my_key=3 base_num_kv_heads=2

MODULE is a module or the path of a .py file; without CLASS all of its parts are checked. Keys are
those of train.py. Exits with 1 if a check fails.
"""

_FLAGS = f"--xla_force_host_platform_device_count=8 {FAST_COMPILATION}"


def main() -> int:
    """Returns 0 if all checks pass, 1 if not."""
    arguments = sys.argv[1:]
    if not arguments:
        print(USAGE.strip())
        return exit_codes.USER_ERROR
    without_module = [
        argument for argument in arguments if not argument.endswith(".py") and ":" not in argument
    ]
    command_line.answer_questions("check_part.py", without_module, USAGE, NoOptions)
    with command_line.exit_on_user_error():
        parsed = read_options(NoOptions, arguments)
        if len(parsed.operands) != 1:
            parsed.problems.append(ConfigIssue("one MODULE[:CLASS] is needed, then key=value"))
        parsed.check()
        (spec,) = parsed.operands
        keys = {}
        for setting in parsed.settings:
            name, text = setting.split("=", 1)
            keys[name] = values.from_text(text)
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the partitioner's advice
        parts = _parts(spec, keys)
        have_failed = [_check(part, keys) for part in parts]
    return int(any(have_failed))


def _parts(spec: str, keys: dict[str, Any]) -> list[registry.Registration]:
    """Imports a module and returns its registered parts."""
    module, name = registry.split_part_spec(spec)
    parts_before = set(registry.registrations())
    keys["import_modules"] = [module]
    load_config(import_modules=keys["import_modules"])
    all_parts = registry.registrations()
    parts = [part for part in all_parts if part not in parts_before]
    if not parts:  # the module had been imported already
        parts = [part for part in all_parts if not part.is_built_in]
    if name:
        parts = registry.parts_named(parts, name)
    if not parts:
        raise UserError(f"{spec} registers no part (MaxText.layers.part.register)")
    return parts


def _check(part: registry.Registration, keys: dict[str, Any]) -> bool:
    """Prints the result of each check; returns whether one failed."""
    if part.kind == "data_source":
        return _check_source(part, keys)
    from MaxText.conformance.checks import CHECKS, OPTIMIZER_CHECKS
    from MaxText.conformance.subject import SIZES, TRAINED, Subject

    part_keys = SIZES | {registry.KINDS[part.kind]: part.name} | keys

    def make_config(**overrides: values.UntypedValue) -> Config:
        with contextlib.redirect_stderr(io.StringIO()):  # notices, of each of many configurations
            return load_config(**TRAINED | part_keys | overrides)

    make_config()
    print(f"{part.kind} {part.name} ({part.location})")
    decodes = part.kind != "mixer" or part.target.decodes()
    part_under_test = Subject(make_config, decodes=decodes)
    checks = OPTIMIZER_CHECKS if part.kind == "optimizer" else CHECKS
    return _run_checks(part, checks, part_under_test, decodes=decodes)


def _check_source(part: registry.Registration, keys: dict[str, Any]) -> bool:
    """Prints the result of each check of a data source; returns whether one failed."""
    from MaxText.conformance.checks import SOURCE_CHECKS
    from MaxText.conformance.source_checks import SOURCE_KEYS, SourceSubject

    with contextlib.redirect_stderr(io.StringIO()):
        source_keys: dict[str, Any] = SOURCE_KEYS | {"dataset_type": part.name} | keys
        config = load_config(**source_keys)
    print(f"{part.kind} {part.name} ({part.location})")
    return _run_checks(part, SOURCE_CHECKS, SourceSubject(config))


def _run_checks(
    part: registry.Registration,
    checks: Sequence["Check"],
    subject: "Subject | SourceSubject",
    *,
    decodes: bool = True,
) -> bool:
    """Prints the result of each check of a part; returns whether one failed."""
    from MaxText.conformance.checks import Problem, find_problem

    file, _, _ = part.location.rpartition(":")
    first_check: dict[Problem, str] = {}  # that has found a problem
    for check in checks:
        problem = find_problem(check, subject, file)
        if check.name == "decode state" and not decodes:
            result = "not supported: no prefill and decode_step, so decode.py rejects it"
        elif problem is None:
            result = "ok"
        elif problem in first_check:
            result = f"FAILED: as {first_check[problem]}"
        else:
            result = f"FAILED: {problem.description}\n{'':18}{problem.remedy}"
            first_check[problem] = check.name
        print(f"  {check.name:<16}{result}")
    return bool(first_check)


if __name__ == "__main__":
    sys.exit(main())
