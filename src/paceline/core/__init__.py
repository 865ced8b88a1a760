"""What every other package may lean on: ids, errors, clocks, model sizes, request types. Stdlib, pydantic and numpy only."""
