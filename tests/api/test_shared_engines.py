"""Models of engines of other makers, as clients of the API see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import httpx
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.core.inference import ModelFacts, ServedModel

HOME = ModelFacts(stored_as="Q4_K_M", engine="llama-server b9000")


class Holding(ScriptedInference):
    """Has models of several names, with the facts given."""

    facts: dict[str, ModelFacts]

    def models(self) -> Sequence[ServedModel]:
        (model,) = super().models()
        return [replace(model, name=name, facts=facts) for name, facts in self.facts.items()]


def holding(serve_with: Callable[..., Served[ScriptedInference]], facts: dict[str, ModelFacts], **settings: object) -> str:
    inference = Holding()
    inference.facts = facts
    return serve_with(inference, **settings).url


def test_models_are_listed_with_engine_version_quantisation_and_promise(serve_with: Callable[..., Served[ScriptedInference]]) -> None:
    url = holding(serve_with, {"own": ModelFacts(), "m": HOME, "unversioned": ModelFacts(engine="openai")})
    own, shared, unversioned = httpx.get(f"{url}/v1/models").json()["data"]
    assert "engine" not in own
    fields = {"engine": "llama-server", "engine_version": "b9000", "promise": "none", "quantisation": "Q4_K_M", "leaves_network": False}
    assert fields.items() <= shared.items()
    assert (unversioned["engine"], unversioned["engine_version"]) == ("openai", "")
    assert httpx.get(f"{url}/v1/models/m").json() == shared
