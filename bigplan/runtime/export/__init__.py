"""Checkpoints as folders that Hugging Face's transformers and peft load."""
