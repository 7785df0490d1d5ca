"""The shape of a decoder, whatever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import StartError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder with rotary positions and a gated MLP; sizes in elements.

    What sets the families apart is data here, so that one forward pass serves them all. `rope_divisors` holds one
    divisor per rotary frequency (head_dim / 2 of them), which is how every supported kind of context extension reads
    after load; it is empty for plain rotary embeddings. `rope_attention_factor` multiplies rotated queries and keys.
    `windows` says for each layer how many positions a query sees, its own included, None standing for all of them; it
    is empty when every layer sees all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    eos_ids: frozenset[int]
    rope_divisors: tuple[float, ...] = ()
    rope_attention_factor: float = 1.0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head before they are rotated
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        """StartError for shapes that no forward pass could have."""
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers, self.num_kv_heads)
        if min(*sizes, self.num_heads, self.head_dim, self.max_position) < 1:
            raise StartError(f"the model's shape has a size below 1: {self}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise StartError(
                f"{self.num_heads} attention heads of size {self.head_dim} over {self.num_kv_heads} KV heads is not"
                " supported: the heads must be a multiple of the KV heads, and their size even"
            )
        if not (self.rope_theta > 0 and self.rms_eps > 0):  # also when one of them is not a number
            raise StartError(f"rope_theta={self.rope_theta} and rms_eps={self.rms_eps} must both be above 0")
        if any(window is not None and window < 1 for window in self.windows):
            raise StartError(f"the sliding windows {self.windows} are not all at least 1")

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """How many positions a query of `layer` sees, its own included; None: all of them."""
        return self.windows[layer] if self.windows else None
