"""SequenceState: what sequences carry from one forward to the next, kept in slots.

Per KDA layer the recurrent state and the last inputs of the short convolutions, of fixed size; per MLA layer one latent row a
token. A slot belongs to one sequence at a time; `clear` gives it to another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.model.config import ModelConfig


class SequenceState:
    """State of up to `num_slots` sequences of up to `max_length` tokens.

    Indexed by 0-based layer number: `recurrent` [slots, heads, key_dim, value_dim], key-first, fp32 (fp64 for fp64 models);
    `conv` [slots, kernel - 1, 3 * width], the inputs of q, k and v side by side, oldest first; `latents`
    [slots, max_length, kv_lora_rank + qk_rope_head_dim]. All are updated in place by the forward.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, max_length: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        self.max_length = max_length
        self.num_slots = num_slots
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        heads, dim, width = config.kda_num_heads, config.kda_head_dim, config.kda_width
        history = config.short_conv_kernel_size - 1
        self.recurrent: dict[int, Tensor] = {
            layer: torch.zeros(num_slots, heads, dim, dim, dtype=wide, device=device) for layer in config.kda_layers
        }
        self.conv: dict[int, Tensor] = {
            layer: torch.zeros(num_slots, history, 3 * width, dtype=dtype, device=device) for layer in config.kda_layers
        }
        self.latents: dict[int, Tensor] = {
            layer: torch.zeros(num_slots, max_length, config.latent_cache_width, dtype=dtype, device=device) for layer in config.mla_layers
        }

    def clear(self, slots: Sequence[int], num_tokens: int | None = None) -> None:
        """Make the slots ready for new sequences. Latents too, of the `num_tokens` that the old ones had (None: all): a masked key
        still meets its value as 0 * value, and 0 * NaN is NaN, so what a broken sequence left behind would reach the slot's next owner."""
        index = torch.tensor(list(slots), dtype=torch.int64)
        for tensor in (*self.recurrent.values(), *self.conv.values()):
            tensor[index] = 0
        for tensor in self.latents.values():
            tensor[index, :num_tokens] = 0
