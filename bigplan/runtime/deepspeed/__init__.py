"""DeepSpeed as a plan's runtime: its engine on bigplan's layers, data, checkpoints and records.

Nothing here imports deepspeed before a worker starts.
"""
