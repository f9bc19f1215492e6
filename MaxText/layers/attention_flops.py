"""Average number of keys per query, by MFU rule and as executed."""

from MaxText.config.layer_sections import AttentionConfig
from MaxText.layers.attention_core import MAX_BLOCKS, window_blocks
from MaxText.layers.flash_attention import TILE
from MaxText.layers.flash_attention import average_keys_computed as flash_keys_multiplied


def average_keys_visible(length: int, *, causal: bool, window: int | None = None) -> float:
    """Returns the average number of visible keys per query, for the MFU."""
    visible = min(window or length, length)
    return visible - visible**2 / (2 * length) if causal else float(visible)


def average_keys_computed(config: AttentionConfig, length: int, window: int | None = None) -> float:
    """Returns the average keys multiplied per query, masked ones included."""
    if config.attention == "flash" and length % TILE == 0:
        return flash_keys_multiplied(length, causal=config.causal, window=window)
    if window is not None:
        rows = window_blocks(window, length, causal=config.causal)
        if rows is None:
            return float(length)
        return -(-length // rows) * rows * rows * (2 if config.causal else 3) / length
    block = query_block(config, length)
    ends = ((start, min(start + block, length)) for start in range(0, length, block))
    return sum((end - start) * end for start, end in ends) / length


def query_block(config: AttentionConfig, length: int) -> int:
    """Returns the query rows per block of dot_product_attention."""
    if config.attention == "dot_product" or not config.causal:
        return length
    return min(max(config.attention_block_size, -(-length // MAX_BLOCKS)), length)
