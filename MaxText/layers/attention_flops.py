"""Average number of keys per query, by MFU rule and as executed."""

from MaxText.config.layer_sections import AttentionConfig
from MaxText.layers.attention_core import MAX_BLOCKS, window_blocks
from MaxText.layers.flash_attention import TILE
from MaxText.layers.flash_attention import average_keys_computed as flash_keys_multiplied


def average_keys_visible(length: int, *, causal: bool, window: int | None = None) -> float:
    """Returns the average number of visible keys per query, for the MFU."""
    visible = min(window or length, length)
    return visible - visible**2 / (2 * length) if causal else float(visible)


def average_keys_computed(
    section: AttentionConfig, length: int, window: int | None = None
) -> float:
    """Returns the average keys multiplied per query, masked ones included."""
    if section.attention == "flash" and length % TILE == 0:
        return flash_keys_multiplied(length, causal=section.causal, window=window)
    if window is not None:
        rows = window_blocks(window, length, causal=section.causal)
        if rows is None:
            return float(length)
        return -(-length // rows) * rows * rows * (2 if section.causal else 3) / length
    block = query_block(section, length)
    ends = ((start, min(start + block, length)) for start in range(0, length, block))
    return sum((end - start) * end for start, end in ends) / length


def query_block(section: AttentionConfig, length: int) -> int:
    """Returns the query rows per block of dot_product_attention."""
    if section.attention == "dot_product" or not section.causal:
        return length
    return min(max(section.attention_block_size, -(-length // MAX_BLOCKS)), length)
