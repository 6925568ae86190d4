"""The files whose tests take longest, longest first, by what they took a core of two.

A worker of `make test` runs a file at a time, so that what its tests share is made once; the
longest come first, and the short ones even out when workers end.
"""

SLOW = (
    "tests/test_sanity.py",
    "tests/runtime/test_sharded.py",
    "tests/launcher/test_launch.py",
    "tests/solve/test_exact.py",
    "tests/launcher/test_soak.py",
    "tests/launcher/test_nodes.py",
    "tests/runtime/deepspeed/test_worker.py",
    "tests/profile/test_machine.py",
    "tests/runtime/test_native.py",
    "tests/runtime/test_checkpoint_split.py",
    "tests/runtime/test_checkpoint_ranks.py",
    "tests/runtime/test_checkpoint_killed.py",
    "tests/test_planner.py",
    "tests/solve/test_free.py",
    "tests/solve/test_times.py",
    "tests/solve/test_search.py",
    "tests/test_verify.py",
    "tests/cli/test_output.py",
    "tests/cli/test_intake.py",
    "tests/cli/test_kernels.py",
    "tests/test_recheck.py",
    "tests/runtime/test_checkpoint.py",
    "tests/solve/test_bounds.py",
    "tests/runtime/test_equivalence.py",
    "tests/docs/test_notebooks.py",
    "tests/profile/test_collectives.py",
    "tests/cli/test_commands.py",
    "tests/simulate/test_simulate.py",
    "tests/cli/test_profile.py",
    "tests/runtime/test_validation.py",
)
