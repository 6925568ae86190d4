"""Optimizers: AdamW, SGD and Muon, their moments in fewer bits, loss scale and clipping."""
