"""YAML and JSON files: read strictly, problems told by line, written back."""
