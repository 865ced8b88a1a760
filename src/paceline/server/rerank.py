"""POST /v1/rerank, in the form that Jina, Cohere, llama-server and vLLM share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from paceline.core.encoding import EncodeRequest, Task
from paceline.server.application import Application
from paceline.server.embeddings import MOST_INPUTS, EmbeddingUsage, encoder_of, parse_texts_body
from paceline.server.fields import ignored_fields, json_response
from paceline.server.lazy_model import LazyModel
from paceline.server.messages import ClosedObject, Strict
from paceline.server.replies import ErrorReply, body_of, refusals
from paceline.server.requests import ModelName

if TYPE_CHECKING:
    from paceline.server.service import ApiService

Text = Annotated[str, Field(min_length=1)]


class RerankDocument(ClosedObject):
    text: Text


def _kind_of(value: object) -> str | None:
    return "as-string" if isinstance(value, str) else "as-text" if isinstance(value, dict | RerankDocument) else None


Document = Annotated[
    Annotated[Text, Tag("as-string")] | Annotated[RerankDocument, Tag("as-text")],
    Discriminator(_kind_of, custom_error_type="document", custom_error_message="Input should be a string, or an object with a text"),
]


class RerankRequest(Strict):
    """Body of POST /v1/rerank."""

    model: ModelName
    query: Text
    documents: Annotated[list[Document], Field(min_length=1, max_length=MOST_INPUTS)]
    top_n: int | None = Field(default=None, ge=1, lt=1 << 31, description="Number of results; where missing: all.")
    return_documents: bool | None = Field(default=None, description="true: each result has its document.")
    user: str | None = Field(default=None, description="Ignored.")


class RankedDocument(LazyModel):
    text: str


class RankedResult(LazyModel):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Reranked(LazyModel):
    object: str
    model: str
    results: list[RankedResult]
    usage: EmbeddingUsage


PATH: Final = "/v1/rerank"


def add_routes(app: Application, service: ApiService) -> None:
    answers = {200: {"model": Reranked}, **refusals(ErrorReply, service.settings)}

    @app.post(PATH, summary="Rank texts by a query", responses=answers, openapi_extra=body_of(RerankRequest))
    async def rerank(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        asked = await service.read(request, partial(parse_texts_body, service.encoders, RerankRequest))
        encoder = encoder_of(asked.model, Task.RERANK, service)
        texts = [each if isinstance(each, str) else each.text for each in asked.documents]
        wanted = EncodeRequest(texts, asked.query, service.via_of(request), "documents")
        made = await service.while_wanted(service.encoders.encode(encoder.name, wanted), request)
        usage = {"prompt_tokens": made.tokens, "total_tokens": made.tokens}
        results = _results(asked, texts, made.values.tolist())
        return json_response({"object": "list", "model": encoder.name, "results": results, "usage": usage}, ignored_fields(asked))


def _results(asked: RerankRequest, texts: list[str], scores: list[float]) -> list[dict[str, Any]]:
    """Return the best results, the best first; of equal ones the first in the request."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    documents = [{"document": {"text": texts[index]}} if asked.return_documents else {} for index in order]
    return [{"index": index, "relevance_score": scores[index], **document} for index, document in zip(order, documents, strict=True)]
