"""What a web page in the owner's browser, or a stranger on the network, can have of the API: nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

import httpx
import pytest
from starlette.routing import Route
from tests.fakes.api_clients import openai_client
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.server.fields import FITTED, HEADER
from paceline.server.settings import ServerSettings

Serve = Callable[[ServerSettings], Served[ScriptedInference]]
BODY = json.dumps({"model": "echo", "prompt": "ab", "max_tokens": 2})
KEY = "open-sesame-open-sesame"
EVIL, CHAT = "https://evil.example", "https://chat.example"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/echo", "/metrics", "/openapi.json", "/health", "/")
CORS = "access-control-allow-origin"


@pytest.fixture
def serve() -> Generator[Serve, None, None]:
    started: list[Served[ScriptedInference]] = []

    def start(settings: ServerSettings) -> Served[ScriptedInference]:
        started.append(Served(ScriptedInference(), settings))
        return started[-1]

    yield start
    for served in started:
        served.close()


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    "headers", [{"Origin": EVIL}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}]
)
@pytest.mark.parametrize("key", [None, KEY])
def test_row_42_a_page_that_posts_text_is_refused(serve: Serve, key: str | None, headers: dict[str, str]) -> None:
    served = serve(ServerSettings(api_key=key))
    for kind in ("text/plain", "application/json"):
        answer = served.http.post("/v1/completions", content=BODY, headers={"Content-Type": kind, **headers})
        assert code_of(answer) == (403, "origin_not_allowed")
        assert CORS not in answer.headers


LINK = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document", "Sec-Fetch-User": "?1", "Accept": "text/html,*/*;q=0.8"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("key", [None, KEY])
def test_row_42_a_link_on_any_page_leads_to_the_page_and_to_nothing_else(serve: Serve, key: str | None, site: str) -> None:
    served, link = serve(ServerSettings(api_key=key)), {**LINK, "Sec-Fetch-Site": site}
    page = served.http.get("/", headers=link)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["x-frame-options"] == "DENY"
    assert page.headers["cross-origin-opener-policy"] == "same-origin"
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert CORS not in page.headers
    for path in PATHS[:-1]:
        assert code_of(served.http.get(path, headers=link)) == (403, "origin_not_allowed"), path
    for other in (
        {"Sec-Fetch-Dest": "iframe"}, {"Sec-Fetch-Dest": "object"}, {"Sec-Fetch-Mode": "no-cors"}, {"Sec-Fetch-Mode": "cors"}, {"Origin": EVIL},
    ):  # fmt: skip
        assert code_of(served.http.get("/", headers={**link, **other})) == (403, "origin_not_allowed"), other
    for method in ("POST", "HEAD", "PUT"):
        assert served.http.request(method, "/", headers=link).status_code == 403, method
    if key is None:
        assert code_of(served.http.get("/", headers={**link, "Host": "evil.example"})) == (403, "host_not_allowed")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json"])
def test_row_42_a_body_that_a_page_could_send_unasked_is_no_json(serve: Serve, kind: str) -> None:
    served = serve(ServerSettings())
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert code_of(served.http.post(path, content=BODY, headers={"Content-Type": kind})) == (415, "unsupported_media_type")
    assert served.http.post("/v1/completions", content=BODY, headers={"Content-Type": "Application/JSON; charset=utf-8"}).is_success


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "localhost:1@evil.example"]
)
def test_row_43_a_name_that_is_not_this_machines_is_refused_on_every_path(serve: Serve, host: str) -> None:
    served = serve(ServerSettings())
    for path in PATHS:
        assert code_of(served.http.request("GET", path, headers={"Host": host})) == (403, "host_not_allowed"), path
        assert code_of(served.http.post(path, content=BODY, headers={"Host": host})) == (403, "host_not_allowed"), path


def test_row_43_own_names_and_addresses_are_answered(serve: Serve) -> None:
    served = serve(ServerSettings(allow_hosts=("nas.local",)))
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "192.168.1.5:8000", "nas.local", "NAS.local:8000"):
        assert served.http.get("/v1/models", headers={"Host": host}).is_success, host
    keyed = serve(ServerSettings(api_key=KEY))  # a page that had its own name looked up has no key
    assert keyed.http.get("/v1/models", headers={"Host": "any.name"}).is_success


def test_row_44_a_preflight_from_a_foreign_page_gets_no_cors_headers(serve: Serve) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for settings in (ServerSettings(), ServerSettings(api_key=KEY), ServerSettings(allow_origins=(CHAT,))):
        served = serve(settings)
        for path in PATHS:
            answer = served.http.options(path, headers={"Origin": EVIL, **asked})
            assert code_of(answer) == (403, "origin_not_allowed")
            assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("key", [None, KEY])
def test_row_44_a_page_that_was_allowed_asks_first_and_is_answered(serve: Serve, key: str | None) -> None:
    served = serve(ServerSettings(api_key=key, allow_origins=(CHAT,)))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    answer = httpx.options(served.url + "/v1/chat/completions", headers={"Origin": CHAT, "Sec-Fetch-Site": "cross-site", **asked})
    assert answer.status_code == 204
    assert answer.headers[CORS] == CHAT
    assert answer.headers["access-control-allow-headers"] == asked["Access-Control-Request-Headers"]
    assert "Origin" in answer.headers["vary"]
    answer = served.http.post("/v1/completions", content=BODY, headers={"Origin": CHAT, "Sec-Fetch-Site": "cross-site"})
    assert (answer.status_code, answer.headers[CORS]) == (200, CHAT)
    readable = answer.headers["access-control-expose-headers"].split(", ")
    assert {HEADER, FITTED, "x-request-id", "retry-after"} == set(readable)
    if key is not None:  # so that the page can say what is wrong
        answer = httpx.get(served.url + "/v1/models", headers={"Origin": CHAT})
        assert (answer.status_code, answer.headers[CORS]) == (401, CHAT)


def test_row_44_own_pages_and_clients_that_are_no_pages_pass(serve: Serve) -> None:
    served = serve(ServerSettings())
    own = {"Origin": served.url, "Sec-Fetch-Site": "same-origin"}
    assert served.http.post("/v1/completions", content=BODY, headers=own).is_success
    assert served.http.get("/v1/models", headers={"Sec-Fetch-Site": "none"}).is_success
    client = openai_client(served.url)
    assert client.completions.create(model="echo", prompt="ab", max_tokens=2).choices[0].text == "ab"


def test_row_47_a_key_is_taken_in_either_header(serve: Serve) -> None:
    served = serve(ServerSettings(api_key=KEY))
    for headers in ({"x-api-key": KEY}, {"Authorization": f"bearer {KEY}"}, {"Authorization": "Basic eDp5", "x-api-key": KEY}):
        assert httpx.get(served.url + "/v1/models", headers=headers).is_success, headers
    for headers in ({"x-api-key": "no"}, {"Authorization": "Bearer no", "x-api-key": KEY}):
        assert httpx.get(served.url + "/v1/models", headers=headers).status_code == 401, headers


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"echo","prompt":"a","seed":' + b"9" * (4 << 20) + b"}",
        b'{"model":"echo","prompt":"a","top_p":2.' + b"1" * (4 << 20) + b"}",
        b'{"model":"echo","prompt":' + b"[" * (1 << 20) + b"]" * (1 << 20) + b"}",
        b'{"model":"echo","prompt":"a","metadata":' + b'{"a":' * (1 << 18) + b"1" + b"}" * (1 << 18) + b"}",
        b'{"model":"echo","prompt":[' + b"1," * (4 << 20) + b"1]}",
    ],
    ids=["digits", "fraction", "depth", "objects", "commas"],
)
def test_row_46_bodies_of_digits_depth_and_commas_are_refused_and_others_served(serve: Serve, body: bytes) -> None:
    served = serve(ServerSettings())
    assert 400 <= served.http.post("/v1/completions", content=body).status_code < 500
    assert served.http.post("/v1/completions", content=BODY).is_success


def test_no_path_is_forgotten_by_the_guard(serve: Serve) -> None:
    """Whatever the application serves: without the key, for a foreign page, and by a name that is not this machine's, it does nothing."""
    keyed, keyless = serve(ServerSettings(api_key=KEY)), serve(ServerSettings())
    routes = [
        (method, re.sub(r"{[^}]*}", "x", route.path))
        for route in keyed.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    ]
    assert {("POST", "/v1/embeddings"), ("POST", "/v1/messages"), ("DELETE", "/v1/responses/x"), ("GET", "/api/tags")} <= set(routes)
    for method, path in routes:
        unknown = httpx.request(method, keyed.url + path)
        assert unknown.status_code == 200 if path in {"/", "/health"} else unknown.status_code in {401, 429}, path
        for url, key, headers in ((keyed.url, KEY, {"Origin": EVIL}), (keyless.url, KEY, {"Host": "evil.example"})):
            assert httpx.request(method, url + path, headers={"x-api-key": key, **headers}).status_code == 403, path
