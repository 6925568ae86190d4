"""Constants of GPT-OSS's activation (swiglu_alpha and swiglu_limit of its config.json)."""

ALPHA, LIMIT = 1.702, 7.0
