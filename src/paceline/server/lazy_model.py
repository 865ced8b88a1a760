"""The base of all shapes of requests and answers.

Pydantic builds a model's validator when it is first used: to build those of every API took half a second of each start, for one of them that is used.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class LazyModel(BaseModel):
    """Its validator is built when it is first used."""

    model_config = ConfigDict(defer_build=True)
