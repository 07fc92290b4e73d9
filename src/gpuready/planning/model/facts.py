"""The sizes of a model, in the form in which every engine's arithmetic takes them.

Counts are elements over the whole model, not yet split over GPUs; bytes are bytes on one copy of the model.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

KINDS = ("full", "sliding", "chunked", "latent", "recurrent", "none")
"""What a layer keeps of a request.

full: K and V of every token. sliding and chunked: of the last `window` tokens. latent: one compressed vector per token
(multi-head latent attention), without V. recurrent: one state per request (Mamba, linear attention). none: nothing, the
layer reads another's.
"""

SPLITS = ("tensor", "kv_heads", "vocabulary", "experts", "whole")
"""How tensor parallelism divides a component: evenly; by KV heads, of which every GPU holds at least one; vocabulary,
padded; the experts, by tensor or by expert parallelism; not at all."""

PLACES = ("first", "last", "layers")
"""Where in a pipeline a component lies: on the first stage (embeddings), the last (head), or spread with the layers."""


@dataclass(frozen=True)
class AttentionGroup:
    """Layers of one model that keep the same for a request."""

    kind: str
    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int = 0
    """Tokens that a sliding or chunked layer still sees."""
    latent: int = 0
    """Elements per token of a latent layer: the compressed KV and the rotary part."""
    indexer: int = 0
    """Bytes per token that a sparse layer's indexer keeps beside it."""
    compression: int = 1
    """Tokens of a latent layer that share one vector; the last `window` tokens are kept one by one beside it."""
    conv_elements: int = 0
    """Elements of a recurrent layer's convolution state, for one request."""
    state_elements: int = 0
    """Elements of a recurrent layer's state, for one request."""
    state_bytes_per_element: int = 4

    @property
    def elements_per_token(self) -> float:
        """Elements that one of these layers keeps per token, over all its heads; 0 for one that keeps a state."""
        if self.kind in ("recurrent", "none"):
            return 0
        return self.latent / self.compression or self.kv_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True)
class Component:
    """Weights of one kind."""

    name: str
    """embedding, head, attention, kv, mlp, experts, shared_experts, router, norms, recurrent, vision, draft, other."""
    elements: int
    bytes: int
    """Bytes in the checkpoint's own format, with scales and zero points of quantized parts."""
    split: str = "tensor"
    place: str = "layers"
    quantizable: bool = False
    """A linear layer that engines quantize while they load, where that is asked of them."""


@dataclass(frozen=True)
class Tensor:
    """A large tensor in which engines keep weights; allocators round its size."""

    bytes: int
    kv_bytes: int = 0
    """The part of it that is divided by KV heads."""
    split: str = "tensor"
    place: str = "layers"
    count: int = 1
    """How many equal ones there are."""


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture-of-experts model."""

    count: int
    active: int
    """Experts that one token passes, without shared ones."""
    intermediate: int
    layers: int
    shared_intermediate: int = 0


@dataclass(frozen=True)
class Quantization:
    """The format in which a checkpoint keeps its linear layers."""

    method: str
    """fp8, int8, awq, gptq, wna16 (compressed-tensors), mxfp4, nvfp4 or bitsandbytes."""
    weight_bits: int
    activation_bits: int = 16
    group_size: int = 0
    """Weights that share a scale; 0: one per channel or tensor."""
    ignored: tuple[str, ...] = ()
    """Names or patterns of modules that stay in 16 bits."""
    kv_dtype: str | None = None
    """The checkpoint brings scales for a KV cache of this type."""


@dataclass(frozen=True)
class ModelFacts:
    """Everything that the planner knows of a model."""

    architecture: str
    """As `architectures` of config.json says, e.g. LlamaForCausalLM; empty where it says nothing."""
    model_type: str
    task: str
    """generate, embed, rerank or classify: what its architecture is made for."""
    layers: int
    hidden: int
    heads: int
    intermediate: int
    """Width of the widest dense feed-forward part."""
    vocabulary: int
    context_tokens: int
    dtype: str
    """Type of what is not quantized, as published: bfloat16, float16 or float32."""
    groups: tuple[AttentionGroup, ...]
    order: tuple[int, ...]
    """For each layer, from the first to the last, the index of its group."""
    components: tuple[Component, ...]
    weights_from: str
    """`headers` when the sizes come from safetensors headers, `config` when they were computed from config.json."""
    experts: Experts | None = None
    quantization: Quantization | None = None
    vision: bool = False
    vision_layers: int = 0
    """Layers of the image encoder as vision_config says; 0 where it does not say num_hidden_layers."""
    vision_hidden: int = 0
    """Its width as vision_config says; 0 where it does not say hidden_size."""
    pixels_per_token: int = 0
    """Elements of an image, over its colours, that become one token; 0 where vision_config does not tell."""
    latent_up_elements: int = 0
    """Elements, over all layers, of the projection that decompresses a latent KV (kv_b_proj); vLLM keeps a copy."""
    draft_layers: int = 0
    """Layers that the checkpoint brings for speculative decoding (MTP); they are not loaded unless asked for."""
    draft_components: tuple[Component, ...] = ()
    """The weights of those layers; they are not among `components`."""
    tensors: tuple[Tensor, ...] = ()
    """The tensors that make up `components`, but for those under a MiB, computed from config.json."""
    rotary_elements: int = 0
    """Elements of the cosine and sine tables that engines build beside the weights."""
    sampled_vocabulary: int = 0
    """Entries of the logits; 0: `vocabulary`. Another figure where the embedding is padded beyond it."""
    assumptions: tuple[str, ...] = ()
    """What config.json does not say and was filled in, in sentences."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole checkpoint that an engine loads."""
        return sum(component.bytes for component in self.components)

    @property
    def parameters(self) -> int:
        """Elements of the whole checkpoint that an engine loads."""
        return sum(component.elements for component in self.components)

    @functools.cached_property
    def family(self) -> str:
        """dense, moe, vision or hybrid: how sure the arithmetic is; the least sure one counts."""
        kinds = {group.kind for group in self.groups}
        if kinds - {"full", "latent"} or any(group.compression > 1 for group in self.groups):
            return "hybrid"
        return "vision" if self.vision else "moe" if self.experts else "dense"

    def kv_bytes_per_token(self, element_bytes: float = 2) -> float:
        """Bytes per token over all layers as if every one of them kept every token, not split over GPUs."""
        return sum(group.layers * group.elements_per_token * element_bytes for group in self.groups)
