"""KV blocks that another node has: what prefixes it used last, when to fetch them is faster than to compute them, and how they come and go."""
