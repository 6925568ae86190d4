"""How config.json files name an MLP's activation."""

from __future__ import annotations

# transformers' names; the tanh approximation goes by three
GELUS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
