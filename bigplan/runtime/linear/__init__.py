"""Products with a layer's weights: 16, 8 or 4 bits, and low-rank adapters beside them."""
