"""What a decoder-only transformer consists of, layer by layer. Sizes only: no tensors, and no names of weights.

    dense = Layer(mixer=Grouped(heads=32, groups=8, head_dim=128), mlp=Dense(inner=12288))
    decoder = Decoder(layers=(dense,) * 36, hidden=4096, vocab=151936, tied=False, rope=Rope(base=1e6, dims=128))

A layer has a part that mixes positions, `mixer`, and one that treats each position alone, `mlp`; either may be absent.
A kind of part is a class here, its rules of names (megatron/rules.py), its sizes and modules (megatron/config.py and
layers.py) and its places (vllm/places.py). `families.py` reads Hugging Face configs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from stages.lora import LoRA


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's scaling of rotary frequencies: long wavelengths are divided by `factor`, short ones stay, and those
    in between are interpolated (transformers, modeling_rope_utils)."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's scaling of rotary frequencies (arXiv 2309.00071; transformers, modeling_rope_utils).

    Frequencies of dimensions that turn less than `slow` times in `original` positions are divided by `factor`, those
    that turn more than `fast` times stay, and those in between are interpolated; `truncated` rounds these bounds to
    whole dimensions. `amplitude` multiplies cosines and sines.
    """

    factor: float
    original: int
    fast: float
    slow: float
    amplitude: float
    truncated: bool


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding of the first `dims` dimensions of a head (arXiv 2104.09864)."""

    base: float
    dims: int
    scaling: Llama3Rope | Yarn | None = None


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Attention whose query heads share key-value heads (arXiv 2305.13245).

    heads, groups, head_dim    query heads, key-value heads, size of each
    bias, norm                 whether QKV has a bias; whether queries and keys are normalized
    """

    heads: int
    groups: int
    head_dim: int
    bias: bool = False
    norm: bool = False


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

    heads             heads of queries, keys and values
    query, key_value  sizes of the latents; `query` 0 projects queries from the hidden state
    plain, rotary     dimensions of a query or key without and with a rotary embedding; all heads share the rotary key
    value             size of a value
    interleaved       whether a rotary pair is two neighbors, not one of each half
    sharpness         factor of the attention scores besides 1 / sqrt(plain + rotary)
    """

    heads: int
    query: int
    key_value: int
    plain: int
    rotary: int
    value: int
    interleaved: bool = True
    sharpness: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """A Mamba-2 mixer (arXiv 2405.21060, section 7).

    heads, head_dim   heads of the state, and channels of each
    groups, state     groups of heads that share their inputs and outputs of the state, B and C, and the size of these
    kernel            positions that the convolution before the scan sees
    chunk             positions that the scan computes at once; results do not depend on it
    bias              whether the convolution has one
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    chunk: int = 128
    bias: bool = True

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels that are convolved: the heads' inputs, B and C."""
        return self.inner, self.groups * self.state, self.groups * self.state

    @property
    def projected(self) -> tuple[int, ...]:
        """Sizes of what a position is projected to: the gate, what is convolved, and a time step for each head."""
        return self.inner, *self.convolved, self.heads


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A feed-forward part of this inner size: SwiGLU (arXiv 2002.05202) if `gated`, otherwise with squared ReLU (arXiv
    2109.08668) between two matrices."""

    inner: int
    gated: bool = True


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """A mixture of experts, each a feed-forward part.

    experts, chosen, inner     experts, experts per token, inner size of one
    gated                      as `Dense.gated`
    renormalised               whether the weights of the chosen experts are normalized to 1
    sigmoid                    whether scores are sigmoids, and a constant per expert is added to choose among them
                               (DeepSeek-V3, arXiv 2412.19437, section 2.1.2); otherwise they are softmax
    divisions, kept            with sigmoids: experts are chosen from the `kept` best of `divisions` equal sets
    scale                      with sigmoids: factor of the weights
    shared                     inner size of the expert that every token has; 0 is none
    latent                     size of a space that tokens are projected to before experts, and back from after these
                               (LatentMoE, arXiv 2601.18089); 0 is the hidden state itself
    """

    experts: int
    chosen: int
    inner: int
    gated: bool = True
    renormalised: bool = True
    sigmoid: bool = False
    divisions: int = 1
    kept: int = 1
    scale: float = 1.0
    shared: int = 0
    latent: int = 0


Mixer: TypeAlias = Grouped | Latent | StateSpace
Mlp: TypeAlias = Dense | Sparse


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A block: each part normalizes its input, and adds its output to it."""

    mixer: Mixer | None
    mlp: Mlp | None


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder-only transformer with RMSNorm.

    layers          its blocks, from the first to the last
    hidden, vocab   hidden size, vocabulary size
    tied            whether input and output embeddings are tied
    pad             the token that pads; its row of the input embeddings is not trained. None: there is none
    eps, rope       of the norms; of attention
    lora            the adapter that is trained in its place
    renamed         what tensors are called in a folder where it is not as Llama's: pairs of a part of Llama's name, and
                    what takes its place
    """

    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    tied: bool
    pad: int | None = None
    eps: float = 1e-6
    rope: Rope | None = None
    lora: LoRA | None = None
    renamed: tuple[tuple[str, str], ...] = ()

    def called(self, name: str) -> str:
        """The name in a folder of what Llama calls `name`."""
        for llama, own in self.renamed:
            name = name.replace(llama, own)
        return name

    @property
    def gated(self) -> bool:
        """Whether its feed-forward parts are."""
        return all(mlp.gated for mlp in self.mlps)

    @property
    def mixers(self) -> list[Mixer]:
        """The different mixers of its layers."""
        return list(dict.fromkeys(layer.mixer for layer in self.layers if layer.mixer))

    @property
    def mlps(self) -> list[Mlp]:
        """The different feed-forward parts of its layers."""
        return list(dict.fromkeys(layer.mlp for layer in self.layers if layer.mlp))

    @property
    def sparse(self) -> tuple[int, ...]:
        """The numbers, from 0, of its layers with a mixture of experts."""
        return tuple(number for number, layer in enumerate(self.layers) if isinstance(layer.mlp, Sparse))

    @property
    def mixture(self) -> Sparse | None:
        """The mixture of experts that some of its layers have."""
        return next((mlp for mlp in self.mlps if isinstance(mlp, Sparse)), None)

    @property
    def experts(self) -> int:
        """The experts of a layer with a mixture; 0 if no layer has one."""
        return self.mixture.experts if self.mixture else 0
