"""An engine without a model: real API, real KV accounting, iteration times from a timing profile."""
