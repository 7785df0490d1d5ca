"""What a packed model holds and where: a function of its config and precision alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.engine.kernels.cpu.library import MOST_GROUP, MOST_HEAD_DIM, PANEL, Format, padded
from headrace.engine.models.config import ModelConfig

# Written into every file. Their names carry a digest of the code too, so this one is for a file read by hand.
LAYOUT_VERSION = 2
ALIGNMENT = 64

FORMATS = {"bfloat16": Format.BF16, "int8": Format.INT8, "int4": Format.INT4}
# Errors in the last product reach the answer undiluted, and the embedding is read from it where the two are tied.
HEAD_FORMATS = {**FORMATS, "int4": Format.INT8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One packed matrix: `parts` are the checkpoint's modules and their rows.

    Parts lie one below the other; with `alternate` their panels take turns.
    """

    name: str
    format: Format
    depth: int
    parts: tuple[tuple[str, int], ...]
    bias: bool = False
    alternate: bool = False

    @property
    def columns(self) -> int:
        """Outputs of the product, as its user counts them; with `alternate`, padding between the parts included."""
        return self.panels * PANEL if self.alternate else sum(rows for _, rows in self.parts)

    @property
    def panels(self) -> int:
        """Panels of all parts."""
        if self.alternate:
            return sum(-(-rows // PANEL) for _, rows in self.parts)
        return -(-sum(rows for _, rows in self.parts) // PANEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Bytes of one array in the file."""

    offset: int
    size: int


def unsupported(config: ModelConfig, precision: str, block_size: int) -> str | None:
    """Why the native kernels cannot run this model; None when they can."""
    if precision not in FORMATS:
        return f"precision {precision} is torch's"
    if block_size % 16:
        return f"block_size={block_size} is not a multiple of 16"
    if config.head_dim > MOST_HEAD_DIM or config.num_heads // config.num_kv_heads > MOST_GROUP:
        return f"heads of {config.head_dim} or {config.num_heads} heads over {config.num_kv_heads} are too many"
    return None


def matrices(config: ModelConfig, precision: str) -> Iterator[Matrix]:
    """All matrices, in the order of the file."""
    c, packed = config, FORMATS[precision]
    head = "model.embed_tokens" if c.tied_embeddings else "lm_head"
    yield Matrix(
        name="head", format=HEAD_FORMATS[precision], depth=c.hidden_size, parts=((head, c.vocab_size),)
    )  # fmt: skip
    for i in range(c.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        qkv = ((f"{attention}q_proj", c.q_size), (f"{attention}k_proj", c.kv_size), (f"{attention}v_proj", c.kv_size))
        gate_up = ((f"{mlp}gate_proj", c.intermediate_size), (f"{mlp}up_proj", c.intermediate_size))
        out, down = ((f"{attention}o_proj", c.hidden_size),), ((f"{mlp}down_proj", c.hidden_size),)
        hidden, q_size, inner = c.hidden_size, c.q_size, c.intermediate_size
        yield Matrix(name=f"{i}.qkv", format=packed, depth=hidden, parts=qkv, bias=c.qkv_bias)
        yield Matrix(name=f"{i}.out", format=packed, depth=q_size, parts=out, bias=c.out_bias)
        yield Matrix(
            name=f"{i}.gate_up", format=packed, depth=hidden, parts=gate_up, bias=c.mlp_bias, alternate=True
        )  # fmt: skip
        yield Matrix(name=f"{i}.down", format=packed, depth=inner, parts=down, bias=c.mlp_bias)


def sizes(config: ModelConfig, precision: str, library: Any) -> dict[str, int]:
    """Bytes of every array by its name, in the order of the file."""
    c = config
    found: dict[str, int] = {}
    if not c.tied_embeddings:
        found["embedding"] = 2 * c.vocab_size * c.hidden_size
    for matrix in matrices(config, precision):
        found[f"{matrix.name}.weights"] = library.hr_weights_bytes(matrix.format, matrix.panels, matrix.depth)
        found[f"{matrix.name}.scales"] = library.hr_scales_bytes(matrix.format, matrix.panels)
        found[f"{matrix.name}.bias"] = 4 * PANEL * matrix.panels if matrix.bias else 0
    for i in range(c.num_layers):
        found[f"{i}.input_norm"] = found[f"{i}.mlp_norm"] = 4 * padded(c.hidden_size)
        found[f"{i}.head_norms"] = 4 * (c.num_heads + c.num_kv_heads) * c.head_dim if c.qk_norm else 0
    found["final_norm"] = 4 * padded(c.hidden_size)
    return found


def places(bytes_of: Mapping[str, int]) -> dict[str, Place]:
    """Where the arrays lie, counted from the first; those without bytes are left out."""
    found: dict[str, Place] = {}
    end = 0
    for name, size in bytes_of.items():
        if size:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            found[name] = Place(offset=offset, size=size)
            end = offset + size
    return found
