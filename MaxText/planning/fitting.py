"""Mesh, microbatch and remat policy that fit, the fastest first.

An update keeps its number of sequences: smaller microbatches are accumulated. What GPT-Neo's
--auto_layout and --auto_layout_and_mesh_shape did for its own model is done here for any.

Meshes are looked at in the order of the least time that they can take, which is known without
tracing a program; the search ends where none that is left can be among the proposals.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from MaxText.configuration.catalogue import build
from MaxText.configuration.rules import RULES
from MaxText.configuration.saved import differences, flat
from MaxText.configuration.schema import Config
from MaxText.errors import UserError
from MaxText.monitoring.peak_flops import PeakFlops
from MaxText.planning.communication import exchanges
from MaxText.planning.hardware import Hardware
from MaxText.planning.memory import least_memory
from MaxText.planning.meshes import MESH_KEYS, candidates, sequences_of
from MaxText.planning.planning import FULL, Plan, make_plan, program_on
from MaxText.planning.program import Program
from MaxText.planning.step_time import least_time

# From what keeps most to what keeps least.
POLICIES = ("none", "minimal", "save_dot_except_mlp", "save_qkv_proj", "full")
MOST_PROPOSED = 8
_BATCH = ("per_device_batch_size", "gradient_accumulation_steps")
_RAMP = ("per_device_batch_size_start", "per_device_batch_size_increment")


_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _Mesh:
    """A mesh to look at."""

    seconds: float  # the least that an update can take
    keys: dict[str, Any]  # that make it
    # keys of fewer and smaller microbatches, the largest that divides first
    batches: list[dict[str, Any]]


def fitting(config: Config, hardware: Hardware, peak: PeakFlops) -> list[Plan]:
    """Plans that fit, the one with the shortest update first, MOST_PROPOSED at most.

    Raises:
      UserError: nothing fits; says what comes closest.
    """
    search = _Search(flat(config), hardware, peak)
    found: list[Plan] = []
    smallest: Plan | None = None
    for mesh in sorted(search.meshes(config), key=lambda mesh: mesh.seconds):
        if len(found) == MOST_PROPOSED and mesh.seconds >= found[-1].time.middle:
            break
        fits, closest = search.plans(mesh)
        found = sorted([*found, *fits], key=lambda plan: plan.time.middle)[:MOST_PROPOSED]
        if closest and (smallest is None or closest.memory.total < smallest.memory.total):
            smallest = closest
    if found:
        return found
    if smallest is None:
        raise UserError(
            f"no mesh of {hardware.num_devices} devices in {hardware.num_slices} equal slices "
            "divides this model and batch. Set another number of devices, another "
            "per_device_batch_size, or a higher sharding_tolerance."
        )
    keys = " ".join(command((), smallest, config)) or "the configuration as it is"
    raise NothingFits(
        f"nothing fits {hardware.describe()}: the least that is needed is "
        f"{smallest.memory.total / 1e9:.1f} GB per device, with {keys}; there "
        f"are {hardware.memory / 1e9:.1f} GB. Take more devices, a smaller model, or an optimizer "
        "with less state (opt_type=adafactor, mu_dtype=bfloat16)."
    )


class NothingFits(UserError):
    """No mesh, microbatch and remat policy fits; the exit code is that of a plan that does not."""

    exit_code = 1


def words(plan: Plan, config: Config) -> dict[str, str]:
    """The keys that make a plan of `config`, as they are typed."""
    changed = differences(flat(config), flat(plan.program.config))
    searched = (*MESH_KEYS, *_BATCH, *_RAMP, "remat_policy")
    # Quotes that YAML needs, the command line does not.
    return {name: changed[name][1].strip('"') for name in searched if name in changed}


def command(arguments: Sequence[str], plan: Plan, config: Config) -> list[str]:
    """The command line of `config` with a plan's keys: each key is given once."""
    new = words(plan, config)
    kept = [word for word in arguments if word.partition("=")[0] not in new]
    return [*kept, *(f"{name}={value}" for name, value in new.items())]


@dataclasses.dataclass(frozen=True)
class _Search:
    """What all candidates share."""

    given: dict[str, Any]  # keys of the configuration
    hardware: Hardware
    peak: PeakFlops

    def meshes(self, config: Config) -> Iterator[_Mesh]:
        """Those that divide model and batch and that no rule refuses."""
        every = microbatches(config, self.hardware)
        for keys in candidates(config, self.hardware):
            for number, batch in enumerate(every):
                program = self._program(keys | batch | {"remat_policy": POLICIES[0]})
                if program is not None:
                    exchanged = exchanges(program, self.hardware)
                    seconds = least_time(program, self.hardware, exchanged, self.peak)
                    yield _Mesh(seconds, keys, every[number:])
                    break

    def plans(self, mesh: _Mesh) -> tuple[list[Plan], Plan | None]:
        """Plans that fit, and what needs least.

        Of each policy the one with the largest microbatch, unless a policy that keeps more fits
        with one as large, and so is faster.
        """
        batches = self._small_enough(mesh)

        @functools.cache
        def plan_of(policy: str, number: int) -> Plan | None:
            return self._plan(mesh.keys | batches[number] | {"remat_policy": policy})

        def fits(policy: str, number: int) -> bool:
            plan = plan_of(policy, number)
            return plan is not None and plan.fits

        closest = plan_of(POLICIES[-1], len(batches) - 1) if batches else None
        found: list[Plan] = []
        if closest is None or not closest.fits:
            return found, closest
        larger = len(batches)  # microbatches before this one are larger than those that fit so far
        for policy in POLICIES:
            if larger and fits(policy, larger - 1):
                is_fit = functools.partial(fits, policy)
                larger = bisect.bisect_left(range(larger - 1), True, key=is_fit)
                plan = plan_of(policy, larger)
                assert plan is not None, "it fits"
                found.append(plan)
        return found, closest

    def _small_enough(self, mesh: _Mesh) -> list[dict[str, Any]]:
        """The microbatches of a mesh without those that need too much by a first look; the last
        one in any case.
        """
        left, last = [], []
        for batch in mesh.batches:
            program = self._program(mesh.keys | batch | {"remat_policy": POLICIES[-1]})
            if program is not None:
                last = [batch]
                if least_memory(program) <= FULL * self.hardware.memory:
                    left.append(batch)
        return left or last

    def _config(self, changes: dict[str, Any]) -> Config | None:
        """The configuration with other keys; None where a rule refuses them."""
        config = build(self.given | changes)
        of_training = [rule for rule in RULES if not rule.programs or "train" in rule.programs]
        blamed = [rule for rule in of_training if set(rule.keys) & set(changes)]
        return None if any(rule.check(config) for rule in blamed) else config

    def _program(self, changes: dict[str, Any]) -> Program | None:
        return self._made(lambda config: program_on(config, self.hardware), changes)

    def _plan(self, changes: dict[str, Any]) -> Plan | None:
        return self._made(lambda config: make_plan(config, self.hardware, self.peak), changes)

    def _made(self, make: Callable[[Config], _T], changes: dict[str, Any]) -> _T | None:
        """What is made of the configuration with other keys; None where they do not go together."""
        config = self._config(changes)
        try:
            return None if config is None else make(config)
        except UserError:
            return None


def microbatches(config: Config, hardware: Hardware) -> list[dict[str, Any]]:
    """The update's sequences in more and more microbatches."""
    given, sequences = config.batch, sequences_of(config, hardware)
    found = []
    steps = 1
    while True:
        sizes = {
            "per_device_batch_size": sequences / steps / hardware.num_devices,
            "gradient_accumulation_steps": steps,
        }
        if given.enable_rampup_batch_size:
            smaller = given.gradient_accumulation_steps / steps
            sizes |= {name: getattr(given, name) * smaller for name in _RAMP}
        found.append(sizes)
        rest = sequences // steps
        if rest <= 1:
            return found
        # Most often by two; at the end each sequence by itself.
        steps *= next(factor for factor in range(2, rest + 1) if rest % factor == 0)
