"""Stage 5: KV blocks go from the pool of a prefill worker into blocks reserved on a decode worker (docs/serving.md)."""
