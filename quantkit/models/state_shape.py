"""Bytes that one recurrent layer keeps of a sequence, whatever the sequence's length. Torch-free.

G heads of queries and keys with N channels, H heads of values with P; what is computed says `models.recurrent`.
"""

from dataclasses import dataclass
from typing import Literal

from quantkit.models.cache import DEFAULT_PAGE_SIZE, KVForm

_STATE_BYTES = 4  # float32: a state is added to once per token, and would lose what is small in 16 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """State that one recurrent layer keeps of a sequence, whatever its length.

    Args:
        key_heads, key_dim: of queries and keys, G and N.
        value_heads, value_dim: of values, H and P.
        conv_width: W.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_width: int

    @property
    def kind(self) -> Literal["state"]:
        """Kind of the layer, see `AttentionShape.kind`."""
        return "state"

    @property
    def num_kv_heads(self) -> int:
        """Zero: the layer has no heads of keys and values that a cache could hold."""
        return 0

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Channels of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of the state and of the last tokens that the convolution still reads."""
        numbers = self.values * self.key_dim + (self.conv_width - 1) * self.channels
        return _STATE_BYTES * numbers

    def describe(self) -> str:
        """Short form for tables, e.g. `state 32 x 128 x 128`."""
        return "nothing" if not self.channels else f"state {self.value_heads} x {self.key_dim} x {self.value_dim}"

    def offers(self, form: KVForm) -> bool:
        """Whether it is kept beside a cache in that form: always, as it is no part of it."""
        return True

    def page_bytes(self, form: KVForm) -> int:
        """Zero: the layer takes no pages."""
        return 0

    def allocated_bytes(
        self, tokens: int, form: KVForm, dtype_bytes: int = 2, page_size: int = DEFAULT_PAGE_SIZE
    ) -> float:
        """Bytes of one sequence of any length."""
        return self.num_bytes

    def token_bytes(self, form: KVForm) -> float:
        """Bytes that one more token adds."""
        return 0.0

    def cached_bytes(self, tokens: int, form: KVForm) -> float:
        """Bytes of one sequence of any length."""
        return self.num_bytes

    def read_bytes(self, tokens: int, form: KVForm) -> float:
        """Bytes that a decode step reads; it writes as many."""
        return self.num_bytes

    def decode_flops(self, tokens: int) -> float:
        """Operations of a decode step, the projections not counted: the state decays, is added to and is read."""
        return 2 * 3 * self.values * self.key_dim

    def prefill_flops(self, tokens: int) -> float:
        """Operations of so many tokens, as `decode_flops` counts them."""
        return tokens * self.decode_flops(1)


NOTHING = StateShape(key_heads=0, key_dim=0, value_heads=0, value_dim=0, conv_width=1)
"""Shape of a layer that looks at each token by itself."""
