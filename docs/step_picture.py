"""Draws docs/step.svg: a plan's step, lane by lane, over where its tensors live.

    bigplan plan --model llama-like-5.5b --cluster h200-1x --cap gpu=24GiB --engine native \
        --seq-len 4096 --global-batch 16 --out plan.yaml
    pip install matplotlib
    python docs/step_picture.py plan.yaml docs/step.svg
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from bigplan.placement import Tier
from bigplan.plan import Plan, load_plan
from bigplan.planner import simulate_plan
from bigplan.program import Op

LANES = (
    "gpu compute",
    "host to device",
    "device to host",
    "state to device",
    "gpu update",
    "state to host",
    "cpu",
)
COLOURS = {Op.FORWARD: "#2a6f97", Op.BACKWARD: "#d17a22"}
OTHER = "#8a9a5b"  # of moves and updates
PURPOSES = {
    "parameters": "#2a6f97",
    "gradients": "#d17a22",
    "optimizer": "#8a9a5b",
    "activations": "#b56576",
    "slots": "#6d9dc5",
    "staging": "#6d9dc5",
    "workspace": "#c9c9c9",
    "processes": "#c9c9c9",
}
GIB = 1 << 30


def main() -> None:
    """Draw it."""
    plan = load_plan(Path(sys.argv[1]))
    figure, (above, below) = plt.subplots(
        2, figsize=(9, 4.6), height_ratios=(3, 1), layout="constrained"
    )
    _lanes(above, plan)
    _memory(below, plan)
    figure.savefig(sys.argv[2], metadata={"Date": None})


def _lanes(axes: plt.Axes, plan: Plan) -> None:
    timeline = simulate_plan(plan)
    rows = [lane for lane in LANES if any(str(e.lane) == lane for e in timeline.events)]
    for event in timeline.events:
        if str(event.lane) in rows:
            axes.barh(
                rows.index(str(event.lane)),
                event.end - event.start,
                left=event.start,
                color=COLOURS.get(event.op, OTHER),
                edgecolor="white",
                linewidth=0.2 if event.end - event.start > timeline.seconds / 200 else 0.0,
            )
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.seconds)
    axes.set_xlabel("seconds of a step, predicted (blue: forward, orange: backward)")
    model = plan.model.parameter_count / 1e9
    axes.set_title(f"{model:.1f} B on one {plan.cluster.group.gpu.name} held to 24 GiB", loc="left")


def _memory(axes: plt.Axes, plan: Plan) -> None:
    used = [use for use in plan.predicted.memory if use.used_bytes]
    for row, use in enumerate(used):
        left = 0.0
        for purpose, nbytes in sorted(use.by_purpose.items(), key=lambda item: -item[1]):
            width = nbytes / GIB
            axes.barh(row, width, left=left, color=PURPOSES.get(purpose, OTHER), edgecolor="white")
            if width > 9.5:
                axes.text(left + width / 2, row, purpose, ha="center", va="center", fontsize=8)
            left += width
    names = {Tier.GPU: "GPU", Tier.HOST: "host memory", Tier.NVME: "drives"}
    axes.set_yticks(range(len(used)), [names[use.tier] for use in used])
    axes.invert_yaxis()
    axes.set_xlabel("GiB")


if __name__ == "__main__":
    main()
