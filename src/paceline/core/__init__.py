"""Types and helpers that every other package may import: ids, errors, clocks, model sizes, request types. Uses stdlib, numpy and prometheus_client only."""
