"""How long engines may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnginePatience:
    """How long an engine may take, in seconds."""

    connect_s: float = 2.0
    """To accept a connection. Raising it: an unreachable engine is found later."""
    answer_s: float = 5.0
    """To answer a question that needs no model. Raising it: an engine that hangs is found later. Busy engines on slow machines were seen to take 1 s."""
    quiet_s: float = 2.0
    """Silence in an answer until the engine is asked whether it lives. Raising it: an engine that hangs is found later; lowering it: more questions while
    prompts are read. Together with `answer_s` it stays under 10 s.
    """
    half_event_s: float = 5.0
    """From one part of an event to the next. Raising it: an engine that stops in the middle of one is found later. Engines write events whole."""
    first_token_s: float = 900.0
    """To the first token, or from one report of progress to the next, of an engine that lives. It may read a long prompt, or load a model from a slow disk.
    Raising it: an engine that lives and lost the request is found later.
    """
    next_token_s: float = 180.0
    """From one token to the next, of an engine that lives. It may read 2,048 tokens of another request's prompt, at 13 tokens a second on old processors.
    Raising it: as above.
    """
    figures_s: float = 3.0
    """To send figures after the end of an answer. Raising it: an engine that does not end its stream holds a client for longer."""
    load_s: float = 1800.0
    """To load a model. Raising it: a load that hangs is found later; 200 GB from a USB disk take half an hour."""
