"""How models write tool calls and reasoning: descriptions of formats, and the one reader of them."""
