"""KV pages of one node: what it holds in which memory, and what leaves first."""
