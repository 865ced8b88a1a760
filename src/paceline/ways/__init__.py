"""Ways to spread a model's work over machines, a room each: a way imports no other way."""
