"""Names and places of the special tokens, one table per family.

A real vocabulary is `n` byte-pair ranks followed by 256 special ids; a family's table says which of the 256 has which
name, as an offset from `n` (for the published `tiktoken.model`, n = 163,584). The K3 and K2 families put *different*
tokens at the same offsets (2 to 5 are `<|end_of_msg|>`, `<|open|>`, `<|close|>`, `<|sep|>` in K3 and `<|im_end|>`,
`<|im_user|>`, `<|im_assistant|>`, nothing in K2), so nothing here is shared between them.

Source: the tokenizer files of Kimi K3, Kimi K2 and Kimi Linear.
"""

from dataclasses import dataclass

NUM_SPECIAL_IDS = 256
"""How many ids a tiktoken vocabulary reserves after its ranks."""

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"

K3_OFFSETS: dict[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    END_OF_MESSAGE: 2,
    OPEN: 3,
    CLOSE: 4,
    SEP: 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": 254,
    "[PAD]": 255,
}

K2_OFFSETS: dict[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "[UNK]": 254,
    "[PAD]": 255,
}

SMALL_SPECIALS: tuple[str, ...] = (
    "[BOS]",
    "[EOS]",
    END_OF_MESSAGE,
    OPEN,
    CLOSE,
    SEP,
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[UNK]",
    "[PAD]",
)
"""What our own byte and BPE vocabularies carry, in this order, at the end of their id range: the K3 names in use."""


@dataclass(frozen=True)
class SpecialTokenFamily:
    """One family's special-token table, and which of its tokens ends a message (where generation stops)."""

    name: str
    offsets: dict[str, int]
    end_of_message: str

    def names(self, num_ranks: int) -> tuple[str, ...]:
        """The 256 special names in id order for a vocabulary of `num_ranks` ranks; ids the table leaves open get reserved names."""
        by_offset = {offset: name for name, offset in self.offsets.items()}
        return tuple(by_offset.get(offset, f"<|reserved_token_{num_ranks + offset}|>") for offset in range(NUM_SPECIAL_IDS))


KIMI_K3 = SpecialTokenFamily("kimi_k3", K3_OFFSETS, END_OF_MESSAGE)
KIMI_K2 = SpecialTokenFamily("kimi_k2", K2_OFFSETS, "<|im_end|>")
FAMILIES: dict[str, SpecialTokenFamily] = {family.name: family for family in (KIMI_K3, KIMI_K2)}
