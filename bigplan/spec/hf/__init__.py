"""Models as Hugging Face writes them: config.json and the names of tensors in its files."""
