"""The engine: continuous batching over per-request state, and the servers and clients around it."""
