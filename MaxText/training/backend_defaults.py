"""What `auto` means on the device at hand. Every choice is printed and can be overridden."""

from MaxText.configuration.model_sections import Model

# Measured on 2 cores of a server CPU (float32, GPT-2-like): written-out layers are 20 % faster at
# 6 layers of width 384 and 2 times slower at 12 layers of width 768.
CPU_UNROLLED_LAYERS = 8
CPU_UNROLLED_WIDTH = 512


def resolve(section: Model, backend: str) -> tuple[Model, list[str]]:
    """The section without `auto`, and one line for each choice made.

    Args:
      backend: "cpu", "gpu" or "tpu", as jax names it.
    """
    on_cpu = backend == "cpu"
    lines = []

    def choose(key: str, value, chosen, reason: str):
        if value != "auto":
            return value
        lines.append(f"{key}: auto -> {str(chosen).lower()} ({reason})")
        return chosen

    dtype = choose(
        "dtype",
        section.numerics.dtype,
        "float32" if on_cpu else "bfloat16",
        "bfloat16 takes twice the time on CPU" if on_cpu else f"fast on {backend}",
    )
    dimensions = section.shape.dimensions
    few = dimensions.num_layers <= CPU_UNROLLED_LAYERS and dimensions.emb_dim <= CPU_UNROLLED_WIDTH
    if section.dense_connections.dense_conn or not section.layers_are_alike:
        scanned, reason = False, "no two layers are alike"
    elif on_cpu and few:
        scanned, reason = False, "few small layers run faster written out on CPU"
    else:
        scanned, reason = True, "compile time does not grow with depth"
    scan = choose("scan_layers", section.memory.scan_layers, scanned, reason)
    unrolled_cpu = on_cpu and not scan
    policy = choose(
        "remat_policy",
        section.memory.remat_policy,
        "none" if unrolled_cpu else "full",
        "saves no memory for written-out layers on CPU" if unrolled_cpu else "least memory",
    )
    resolved = section.model_copy(
        update={
            "numerics": section.numerics.model_copy(update={"dtype": dtype}),
            "memory": section.memory.model_copy(
                update={"scan_layers": scan, "remat_policy": policy}
            ),
        }
    )
    return resolved, lines
