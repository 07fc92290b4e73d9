"""The weights of a model, module by module, as the checkpoint names them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Module:
    """One matrix or vector, or `copies` equal ones."""

    name: str
    """As in the checkpoint, without a composite model's prefix, e.g. model.layers.3.self_attn.q_proj."""
    component: str
    outputs: int
    inputs: int = 1
    bias: int = 0
    copies: int = 1
    split: str = "tensor"
    place: str = "layers"
    linear: bool = True
    """A linear layer, which a quantized checkpoint may keep in fewer bits; False: always in the model's own type."""

    @property
    def elements(self) -> int:
        """Elements of all copies, with their biases."""
        return self.copies * (self.outputs * self.inputs + self.bias)


def linear(
    name: str, component: str, inputs: int, outputs: int, bias: bool = False, copies: int = 1, split: str = "tensor"
) -> Module:
    """Return a linear layer of `inputs` to `outputs` elements."""
    return Module(name, component, outputs, inputs, outputs if bias else 0, copies, split)


def vector(name: str, elements: int, component: str = "norms", split: str = "whole") -> Module:
    """Return a plain tensor that nothing quantizes: a norm, a scale, a table."""
    return Module(name, component, elements, split=split, linear=False)


def total(modules: Iterable[Module]) -> int:
    """Return the elements of all modules."""
    return sum(module.elements for module in modules)
