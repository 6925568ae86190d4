"""Device, host and disk memory, and where a layer's elements lie in it."""
