"""How workers reach each other's KV pages."""
