"""Anthropic's Messages API: its requests become chats as every API's do, and its answers are written from the same parts."""
