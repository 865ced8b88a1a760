"""Libraries that agents are written with, each in a session with a real server, over a model that does what they ask of one (`tests.fakes.scripted_agent`).

Those that are not installed are skipped: `make clients` installs them, in an environment of their own, and runs this.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.fakes.api_clients import OPEN_CLIENTS
from tests.fakes.scripted_agent import ScriptedAgent
from tests.fakes.served import Served

KEY = "sk-no-key-is-asked-for"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def url() -> Generator[str, None, None]:
    served = Served(ScriptedAgent(name="agent", max_context=1 << 16, tokens_per_item=5))
    yield f"{served.url}/v1"
    served.close()


def test_langchain_by_its_own_suite(url: str, tmp_path: Path) -> None:
    """All of it but images, PDFs and sounds."""
    pytest.importorskip("langchain_tests")
    (tmp_path / "test_model.py").write_text(
        f"""
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

class TestPaceline(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params = {{"model": "agent", "base_url": {url!r}, "api_key": {KEY!r}, "stream_usage": True}}
    supports_image_inputs = False
    supports_json_mode = True
"""
    )
    loops = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"]  # the client keeps its connections over loops
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *loops, str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout


def test_pydantic_ai(url: str) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("agent", provider=OpenAIProvider(base_url=url, api_key=KEY))
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        return f"sunny in {city}"

    assert agent.run_sync("Use weather for 'Paris'").output == "The results: sunny in Paris"
    assert Agent(model, output_type=Person).run_sync("'Ann' is 33").output == Person(name="Ann", age=33)
    assert Agent(model, output_type=NativeOutput(Person)).run_sync("'Ann' is 33").output == Person(name="Ann", age=33)

    async def streamed() -> str:
        async with agent.run_stream("Use weather for 'Oslo'") as run:
            return "".join([text async for text in run.stream_text(delta=True)])

    assert asyncio.run(streamed()) == "The results: sunny in Oslo"


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    client = instructor.from_openai(OPEN_CLIENTS.enter_context(openai.OpenAI(base_url=url, api_key=KEY)), mode=instructor.Mode[mode])
    asked: Any = [{"role": "user", "content": "'Ann' is 33"}]
    answer = client.chat.completions.create(model="agent", response_model=Person, messages=asked, max_retries=0)
    assert answer.model_dump() == {"name": "Ann", "age": 33}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "lm_studio"])
def test_litellm(url: str, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for prices in the network
    litellm = pytest.importorskip("litellm")
    body: dict[str, Any] = {
        "model": f"{provider}/agent", "api_base": url, "api_key": KEY,
        "messages": [{"role": "user", "content": "weather in 'Paris'"}], "tools": [TOOL],
    }  # fmt: skip
    (choice,) = litellm.completion(**body).choices
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    pieces = [chunk.choices[0].delta.tool_calls for chunk in litellm.completion(**body, stream=True) if chunk.choices]
    assert json.loads("".join(piece[0].function.arguments or "" for piece in pieces if piece)) == {"city": "Paris"}


def test_llm(url: str, tmp_path: Path) -> None:
    """`llm` with a schema, and with functions as tools."""
    pytest.importorskip("llm")
    models = {"model_id": "pace", "model_name": "agent", "api_base": url, "supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([models]))
    (tmp_path / "functions.py").write_text("def weather(city: str) -> str:\n    'How it is there'\n    return 'sunny in ' + city\n")

    def said(*arguments: str) -> str:
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": KEY}
        command = [sys.executable, "-m", "llm", "-m", "pace", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout

    assert json.loads(said("--schema", "name, age int", "'Ann' is 33")) == {"name": "Ann", "age": 33}
    assert "sunny in Paris" in said("--functions", str(tmp_path / "functions.py"), "weather for 'Paris'")


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, model: str) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed: make clients")
    import openai

    def weather(city: str) -> str:
        """How it is there."""
        return f"sunny in {city}"

    async def session() -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key=KEY)
        served = getattr(agents, model)(model="agent", openai_client=client)
        agent = agents.Agent(name="a", model=served, tools=[agents.function_tool(weather)])
        typed = agents.Agent(name="b", model=served, output_type=Person)
        first = await agents.Runner.run(agent, "Use weather for 'Paris'")
        assert first.final_output == "The results: sunny in Paris"
        streamed = agents.Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": "Use weather for 'Oslo'"}])
        deltas = [event.data.delta async for event in streamed.stream_events() if getattr(event, "data", None) and is_text(event.data)]
        assert "".join(deltas) == streamed.final_output == "The results: sunny in Paris; sunny in Oslo"
        assert (await agents.Runner.run(typed, "'Ann' is 33")).final_output == Person(name="Ann", age=33)
        await client.close()

    def is_text(event: Any) -> bool:
        return event.type == "response.output_text.delta"

    agents.set_tracing_disabled(True)
    asyncio.run(session())


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_aider(url: str, stream: str, tmp_path: Path) -> None:
    """A file in a repository is edited and committed. The model repeats the edit that it is told."""
    pytest.importorskip("aider", reason="aider is not installed: make clients")
    file = tmp_path / "greet.py"
    file.write_text('print("hello")\n')
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "Greet"]):
        subprocess.run([*git, *arguments], check=True)
    message = 'Edit:\n\ngreet.py\n```python\n<<<<<<< SEARCH\nprint("hello")\n=======\nprint("bye")\n>>>>>>> REPLACE\n```\n'
    switches = (
        "--yes-always --no-check-update --analytics-disable --no-show-model-warnings --no-show-release-notes --no-gitignore --map-tokens 0"
    )
    asked = [
        "--edit-format",
        "diff",
        stream,
        "--openai-api-base",
        url,
        "--openai-api-key",
        KEY,
        "--model",
        "openai/agent",
        "--message",
        message,
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "aider", *switches.split(), *asked, file.name],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    assert file.read_text() == 'print("bye")\n', ended.stdout + ended.stderr
    commits = subprocess.run([*git, "log", "--oneline"], capture_output=True, text=True, check=True).stdout
    assert len(commits.splitlines()) == 2
