"""The host's cores: C++ compiled for them, and how they share a job."""
