"""Published measurements, and how near the model comes to them."""
