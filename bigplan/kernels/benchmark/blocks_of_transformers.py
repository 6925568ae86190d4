"""Blocks of Hugging Face transformers, as they are written there, for `bigplan kernels bench`.

No kernel was made for them by hand. They are built from their configurations with random weights,
so nothing is fetched. Dropout is off: its random numbers are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bigplan.errors import InputError
from bigplan.kernels.benchmark.cases import Workload

NO_DROPOUT = {
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
}


def _with_index(layer: Any, config: Any) -> nn.Module:
    made: nn.Module = layer(config, layer_idx=0)
    return made


@dataclass(frozen=True)
class _Block:
    """A layer's class and what it is built from and called with."""

    family: str  # module below transformers.models
    layer: str
    config: str
    shape: tuple[int, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    made: Callable[[Any, Any], nn.Module] = _with_index
    rotary: bool = False

    def workload(self, name: str) -> Workload:
        """Built on the CPU in fp32. Raises what this version of transformers raises."""
        home = f"transformers.models.{self.family}"
        settings = {**dict.fromkeys(NO_DROPOUT.get(self.family, ()), 0.0), **self.sizes}
        config = getattr(import_module("transformers"), self.config)(**settings)
        config._attn_implementation = self.attention
        layer = getattr(import_module(f"{home}.modeling_{self.family}"), self.layer)
        further: dict[str, Any] = {}
        if self.rotary:
            heads = config.num_attention_heads
            width = getattr(config, "head_dim", None) or config.hidden_size // heads
            further["position_embeddings"] = _positions(self.shape[1], width)
        if self.family in ("gpt_neox", "whisper"):
            further["attention_mask"] = None
        return Workload(name, self.made(layer, config), self.shape, further)


def _positions(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, both [1, s, d]."""
    rates = 10_000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), rates).repeat(1, 2)[None]
    return angles.cos(), angles.sin()


Pair = tuple[_Block, _Block]  # a small one, to see that it runs, and one of a size in use

SMALL: Mapping[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
FEW = (2, 3, 32)  # sequences, tokens, columns


def _gpt2(width: int, heads: int) -> Pair:
    def block(batch: int, length: int, width: int, heads: int) -> _Block:
        sizes = {"n_embd": width, "n_head": heads}
        return _Block("gpt2", "GPT2Block", "GPT2Config", (batch, length, width), sizes)

    return block(*FEW, 4), block(16, 1024, width, heads)


def _decoder(prefix: str, tokens: tuple[int, int], sizes: tuple[int, int, int, int, int]) -> Pair:
    """`sizes`: hidden, MLP's, heads, key-value heads, columns of a head."""
    names = (*SMALL, "num_key_value_heads", "head_dim")
    family, layer, config = prefix.lower(), f"{prefix}DecoderLayer", f"{prefix}Config"
    attention = "eager" if family == "gemma2" else "sdpa"  # sdpa has no soft cap

    def block(shape: tuple[int, ...], sizes: tuple[int, ...]) -> _Block:
        named = dict(zip(names, sizes, strict=True))
        return _Block(family, layer, config, shape, named, attention, rotary=True)

    return block(FEW, (32, 64, 4, 2, 8)), block((*tokens, sizes[0]), sizes)


def _neox() -> Pair:
    def block(shape: tuple[int, ...], sizes: Mapping[str, Any]) -> _Block:
        return _Block("gpt_neox", "GPTNeoXLayer", "GPTNeoXConfig", shape, sizes, rotary=True)

    pythia = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    return block(FEW, SMALL), block((4, 2048, 2048), pythia)


def _encoder(family: str, prefix: str, shape: tuple[int, ...]) -> Pair:
    def block(shape: tuple[int, ...], sizes: Mapping[str, Any]) -> _Block:
        return _Block(family, f"{prefix}Layer", f"{prefix}Config", shape, sizes, made=_plainly)

    return block(FEW, SMALL), block(shape, {})


def _plainly(layer: Any, config: Any) -> nn.Module:
    made: nn.Module = layer(config)
    return made


def _t5() -> Pair:
    def made(layer: Any, config: Any) -> nn.Module:
        block: nn.Module = layer(config, has_relative_attention_bias=True, layer_idx=0)
        return block

    def block(shape: tuple[int, ...], sizes: tuple[int, int, int, int]) -> _Block:
        named = dict(zip(("d_model", "d_kv", "d_ff", "num_heads"), sizes, strict=True))
        gated = {**named, "feed_forward_proj": "gated-gelu"}
        return _Block("t5", "T5Block", "T5Config", shape, gated, "eager", made)

    return block(FEW, (32, 8, 64, 4)), block((16, 512, 768), (768, 64, 2048, 12))


def _resnet() -> Pair:
    def block(shape: tuple[int, ...]) -> _Block:
        def made(layer: Any, config: Any) -> nn.Module:
            bottleneck: nn.Module = layer(shape[1], shape[1])
            return bottleneck

        return _Block("resnet", "ResNetBottleNeckLayer", "ResNetConfig", shape, made=made)

    return block((2, 16, 6, 6)), block((64, 256, 56, 56))


def _convnext() -> Pair:
    def block(shape: tuple[int, ...]) -> _Block:
        def made(layer: Any, config: Any) -> nn.Module:
            module: nn.Module = layer(config, dim=shape[1])
            return module

        return _Block("convnext", "ConvNextLayer", "ConvNextConfig", shape, made=made)

    return block((2, 16, 8, 8)), block((64, 96, 56, 56))


BLOCKS: Mapping[str, Pair] = {
    "GPT-2": _gpt2(768, 12),
    "GPT-2 XL": _gpt2(1600, 25),
    "Llama 3 8B": _decoder("Llama", (4, 2048), (4096, 14336, 32, 8, 128)),
    "Qwen3 0.6B": _decoder("Qwen3", (4, 2048), (1024, 3072, 16, 8, 128)),
    "Gemma 2 2B": _decoder("Gemma2", (4, 1024), (2304, 9216, 8, 4, 256)),
    "Pythia 1.4B": _neox(),
    "BERT base": _encoder("bert", "Bert", (32, 512, 768)),
    "ViT base": _encoder("vit", "ViT", (64, 197, 768)),
    "T5 base": _t5(),
    "ResNet-50": _resnet(),
    "ConvNeXt tiny": _convnext(),
}


class Absent(NamedTuple):
    """A block that this version of transformers does not build."""

    name: str
    reason: str


def blocks(*, small: bool) -> Iterator[Workload | Absent]:
    """Each block, or why it cannot be built.

    Raises InputError where transformers is not installed.
    """
    try:
        import_module("transformers")
    except ImportError:
        raise InputError(
            "part library measures blocks of Hugging Face transformers, which is not installed: "
            "pip install transformers, or name another --part"
        ) from None
    for name, (few, many) in BLOCKS.items():
        try:
            yield (few if small else many).workload(name)
        except Exception as problem:  # noqa: BLE001 -- another version's classes may differ
            yield Absent(name, f"{type(problem).__name__}: {problem}"[:300])
