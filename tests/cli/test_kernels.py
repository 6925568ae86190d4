"""`bigplan kernels`: explained without a GPU; measured where there is one."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_a_block_is_explained_in_both_forms(bigplan: Run) -> None:
    code, out, _ = bigplan("kernels", "explain", "gpt2-xl", "--gpu", "t4", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["seconds"] < data["apart"]
    assert {line["side"] for line in data["lines"] if line["generated"]} == {"forward", "backward"}
    assert all(edge["reason"] for edge in data["boundaries"])
    code, out, _ = bigplan("kernels", "explain", "gpt2-xl", "--source", "--gpu", "t4")
    assert code == 0
    assert out.count("@triton.jit") == sum(line["generated"] for line in data["lines"])
    assert "torch runs addmm: no generated kernel computes it" in out


def test_a_link_makes_the_forward_keep_less(bigplan: Run) -> None:
    kept = []
    for more in ((), ("--keep-at", "25 GB/s")):
        code, out, _ = bigplan("kernels", "explain", "gpt2-xl", "--json", *more)
        assert code == 0
        kept.append(json.loads(out)["kept_bytes"])
    assert kept[1] < kept[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("gpt3",), "did you mean"),
        (("qwen3.5-27b",), "has a gate, which kernels are not chosen for"),
        (
            ("deepseek-v2",),
            "has 160 experts and latent attention, which kernels are not chosen for",
        ),
        (("gpt2-xl", "--gpu", "h200"), "h200-sxm"),
        (("gpt2-xl", "--precision", "fp8"), "use one of them"),
        (("gpt2-xl", "--micro-batch", "0"), "write more"),
        (("gpt2-xl", "--seq-len", "0"), "write more"),
        (("gpt2-xl", "--seq-len", "1000000000"), "write fewer"),
        (("falcon-h1-7b",), "has a state space, which kernels are not chosen for"),
        (("mixtral-8x7b",), "8 experts"),
        (("gpt2-xl", "--keep-at", "0 GB/s"), "a link has a bandwidth"),
        (("gpt2-xl", "--keep-at", "fast"), "such as"),
        (("nowhere:nothing",), "package.module:function"),
    ],
)
def test_bad_input_is_told(bigplan: Run, arguments: tuple[str, ...], told: str) -> None:
    code, out, err = bigplan("kernels", "explain", *arguments)
    assert (code, out) == (2, "")
    assert told in err


@pytest.mark.skipif(not (find_spec("torch") and find_spec("triton")), reason="needs Triton")
def test_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    """What registers are estimated by, and that none spills, in the assembler's own words."""
    code = (
        "import sys; from bigplan.cli import main; "
        "sys.argv = ['bigplan', 'kernels', 'explain', 'tiny-llama-test', '--micro-batch', '64', "
        "'--compile', '--json']; main()"
    )
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=False
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["compiled"].values()
    assert made
    for kernel in made:
        assert kernel["spilled"] == 0
        assert 0.4 < kernel["registers"] / kernel["estimated"] < 2.5


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
def test_measuring_needs_a_gpu_or_a_rehearsal(bigplan: Run) -> None:
    import torch

    code, out, _ = bigplan("kernels", "bench", "--list")
    assert code == 0
    assert "workloads" in out
    if not torch.cuda.is_available():
        code, _, err = bigplan("kernels", "bench", "--part", "norms")
        assert code == 2
        assert "--rehearse" in err
    code, _, err = bigplan("kernels", "bench", "--part", "all", "--rehearse")
    assert code == 2
    assert "sweep-norms" in err


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
def test_a_rehearsal_writes_records(bigplan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first workload: a residual block takes Triton's interpreter 20 s of a core.

    tests/kernels/test_batch_norm.py has its kernels.
    """
    from bigplan.kernels.benchmark import cases

    block, *_ = cases.workloads(small=True)
    monkeypatch.setattr(cases, "workloads", lambda *, small: [block] if small else [])
    code, out, _ = bigplan(
        "kernels", "bench", "--part", "workloads", "--rehearse", "--out", "records.jsonl"
    )
    assert code == 0
    assert "gpt-2 block (inference)" in out
    lines = [json.loads(line) for line in Path("records.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "machine"
    found = [line for line in lines if line["kind"] == "workload"]
    assert {line["way"] for line in found} >= {"eager", "generated", "generated, less kept"}
    assert not any("failed" in line for line in found)
