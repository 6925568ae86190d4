"""On a CPU, streams are priced at what those of layers reached."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from bigplan.cost.compute import Device, operator_seconds
from bigplan.cost.framework import NATIVE
from bigplan.cost.host import host_seconds
from bigplan.graph.build import build_graph
from bigplan.graph.operators import Stream
from bigplan.graph.strategy import Strategy
from bigplan.profile import stream
from bigplan.profile.bench import Bench
from bigplan.profile.stream import LAYER, STREAMED, TRAINING, measure_stream
from bigplan.spec.detect.cluster import detect


class Told(Bench):
    """A bench whose work takes 20 ms."""

    def median(self, work: object, seconds: float) -> float:
        assert callable(work)
        work()
        return 0.02


def test_a_layers_streams_are_priced_at_what_they_took() -> None:
    group = detect(cpu_devices=2, drive=False).group
    told = Told((torch.device("cpu"),), 2, 1)
    gpu = measure_stream(group, told, 1.0).gpu
    block = build_graph(LAYER, TRAINING, Strategy(dp=1)).kinds["block"]
    streams = tuple(one for one in (*block.forward, *block.backward) if one.name in STREAMED)
    assert all(isinstance(one, Stream) for one in streams)
    assert len(streams) == 2 * len(STREAMED)  # each forward and backward
    device = Device(gpu, TRAINING.precision, eager=1.0)
    priced = sum(operator_seconds(one, device) for one in streams)
    python = host_seconds(streams, device, NATIVE) - gpu.action_overhead
    assert priced + python == pytest.approx(0.02, rel=0.01)


def test_the_work_is_that_of_the_operators() -> None:
    """As many numbers in the tensors as the bytes are counted of."""
    block = build_graph(LAYER, TRAINING, Strategy(dp=1)).kinds["block"]
    by_name = {one.name: one for one in block.forward if isinstance(one, Stream)}
    tokens, ffn = stream.TOKENS, LAYER.ffn
    assert by_name["activation"].nbytes == 3 * 4 * tokens * ffn  # two read, one written
    turned = tokens * (LAYER.heads + LAYER.kv_heads) * LAYER.head_dim
    assert by_name["rotary embedding"].nbytes == 2 * 4 * turned
    stream._streaming()()
