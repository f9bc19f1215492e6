"""What log_layer_metrics adds to a compiled train step; needs libtpu, no TPU.

    python benchmarks/layer_metrics.py                                        llama3.2-1b on v5p-8
    python benchmarks/layer_metrics.py v5e-16 model_name=qwen3-1.7b           other keys

Prints a row without the key and one with it: the compiler's estimate of a step's time, to which
kernels and collectives do not count, and the peak memory of a device. Each compilation takes two
minutes of CPU time.
"""

import os
import subprocess
import sys

from compiled import KEYS, compile_own, estimated_ms

MODEL = "model_name=llama3.2-1b max_target_length=2048 per_device_batch_size=4 remat_policy=full"


def measure(machine: str, keys: list[str]) -> None:
    """Compiles a step in this process and prints its row."""
    from MaxText.compilation import targets
    from MaxText.compilation.hlo import HloModule

    targets.prepare_environment(targets.find_target(machine))
    all_keys = [*KEYS.split(), *MODEL.split(), f"compile_topology={machine}", *keys]
    last_of_each = {key.partition("=")[0]: key for key in all_keys}
    step, _ = compile_own(list(last_of_each.values()), machine, 1)
    milliseconds = estimated_ms(HloModule(step.as_text() or ""), machine)
    peak_gb = step.memory_analysis().peak_memory_in_bytes / 1e9  # pyright: ignore
    print(f"{keys[-1]:24}{milliseconds:9.2f} ms {peak_gb:8.3f} GB", flush=True)


def main() -> None:
    machine = "v5p-8"
    keys = sys.argv[1:]
    if keys and "=" not in keys[0]:
        machine = keys.pop(0)
    if keys and keys[-1].startswith("log_layer_metrics="):
        measure(machine, keys)
        return
    for value in ("false", "true"):
        command = [sys.executable, __file__, machine, *keys, f"log_layer_metrics={value}"]
        subprocess.run(command, check=True, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": ""})


if __name__ == "__main__":
    main()
