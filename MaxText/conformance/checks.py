"""Conformance checks for architectures and parts, run by check_part.py.

Most checks read one compiled program: loss and gradients of a small model, the same scanned and
with full remat, logits of sequences that differ in one token, and logits from the decode state
(subject.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from MaxText.conformance import model_checks, source_checks, training_checks
from MaxText.conformance.source_checks import SourceSubject
from MaxText.conformance.subject import Subject
from MaxText.errors import first_line, raising_line


class Check(NamedTuple):
    """One property; `problem` describes its violation, or is None."""

    name: str
    problem: Callable[[Any], str | None]  # of a Subject or a SourceSubject
    remedy: str


CHECKS = (
    Check(
        "initialization",
        training_checks.initialization,
        "draw every weight from rngs, by an initializer",
    ),
    Check(
        "logical axes",
        model_checks.logical_axes,
        "use names of logical_axis_rules, or add a rule for the axis",
    ),
    Check(
        "causality",
        model_checks.causality,
        "a token may see earlier tokens of its own segment only",
    ),
    Check("documents", model_checks.documents, "reset the state where context.segments_BT changes"),
    Check(
        "padding", model_checks.padding, "a token may not see tokens of another segment, or padding"
    ),
    Check("gradients", model_checks.gradients, "is a weight unused, or behind stop_gradient?"),
    Check(
        "scan and remat",
        model_checks.scan_and_remat,
        "keep nothing on self; draw from context.key_for()",
    ),
    Check(
        "remat policies",
        model_checks.remat_policies,
        "tag() only values that depend on nothing but the inputs",
    ),
    Check(
        "decode state",
        model_checks.decode_state,
        "prefill and decode_step have to agree with __call__",
    ),
    Check("FLOPs", model_checks.flops, "flops() counts the products besides those of weights"),
    Check(
        "formats", model_checks.formats, "the output has the format of x, a state always the same"
    ),
    Check("bfloat16", model_checks.bfloat16, "sums, norms and softmax in float32"),
    Check(
        "8 devices",
        training_checks.eight_devices,
        "no sizes of one device; with_logical_constraint() activations",
    ),
    Check("resume", training_checks.resume, "everything that training changes has to be a weight"),
    Check(
        "growth", model_checks.growth, "an axis is slots only where a slot with key 0 adds nothing"
    ),
)
# Checks of an optimizer.
OPTIMIZER_CHECKS = (
    Check(
        "initialization", training_checks.initialization, "init() depends on the parameters alone"
    ),
    Check(
        "updates",
        training_checks.updates,
        "update() returns a direction that is subtracted, in its format",
    ),
    Check(
        "8 devices", training_checks.updates_on_eight_devices, "no sizes of one device in the code"
    ),
    Check(
        "resume", training_checks.resume, "everything that update() changes has to be in its state"
    ),
)


# Checks of a data source.
SOURCE_CHECKS = (
    Check(
        "token ids",
        source_checks.token_ids,
        "return an array of integers below vocab_size; yours is given as vocab_size=N",
    ),
    Check(
        "deterministic",
        source_checks.is_deterministic,
        "depend on the index, the keys and context alone: np.random.default_rng([seed, index])",
    ),
    Check("lengths", source_checks.lengths, "lengths() counts the tokens of each document"),
    Check(
        "resume",
        source_checks.resume,
        "the state of an iterator is all that its next documents depend on",
    ),
)


class Problem(NamedTuple):
    """A violation that a check has found.

    Attributes:
      description: What is wrong.
      remedy: What to do about it.
    """

    description: str
    remedy: str


def find_problem(check: Check, subject: Subject | SourceSubject, file: str = "") -> Problem | None:
    """Returns the problem of a subject; an exception counts as one.

    An exception does not come from what the check is about: most checks run the same program. So
    its remedy names the line that raised it, and not that of the check.

    Args:
      check: The check to run.
      subject: The model with the part (`Subject`), or a data source (`SourceSubject`).
      file: Path of the source file of the part.
    """
    try:
        description = check.problem(subject)
    except Exception as error:  # a part can raise anything
        return Problem(
            description=f"{type(error).__name__}: {first_line(error)}",
            remedy=f"raised at {raising_line(error, file)}, before anything was compared",
        )
    return None if description is None else Problem(description, check.remedy)
