"""OpenAI's Responses API: its bodies and answers, over the same inner request as a chat's, and the conversations kept for it."""
