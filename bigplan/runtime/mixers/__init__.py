"""What mixes a block's tokens, attention or what is in its place, with norms and positions."""
