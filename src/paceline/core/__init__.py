"""Types and helpers that every other package may import: ids, errors, clocks, model sizes, request types. Uses stdlib, pydantic and numpy only."""
