"""The official SDKs on the real server over a stub engine: one conversation with tools and thoughts in three dialects.

Whatever API a client speaks, the recorded prompts are the same ids, each reply is one turn, and each turn is paired
with the tool's result or the user's next message.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from breaking import Port, words_of
from harness.host import Host, Server
from harness.model import Vocabulary

from openclaw_rl.testing import FakeEngine, Scripted, stub_app

SYSTEM = "You look things up."
FIRST, SECOND = "How long are the two rivers?", "Thanks, that is perfect!"
PARAMETERS = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
ABOUT = "Look up the length of a river."
RESULTS = {"red": "The red river has 12 km.", "blue": "The blue river has 7 km."}
ANSWER, GOODBYE = "The red one has 12 km, the blue one 7 km.", "You are welcome."


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "river", "arguments": {{"name": "{name}"}}}}\n</tool_call>'


REPLIES = (
    f"<think>\nThe red one first.\n</think>\n\nI look.\n{call('red')}",
    f"<think>\nNow the blue one.\n</think>\n\n{call('blue')}",
    f"<think>\nBoth are known.\n</think>\n\n{ANSWER}",
    GOODBYE,
)
"""The model's replies: two calls, the answer, and one more after the user's thanks."""


@dataclass(frozen=True)
class Served:
    server: Server
    engine: FakeEngine
    words: Vocabulary

    def script(self) -> None:
        """Let the engine give the replies of the conversation."""
        self.engine.script(*(Scripted(ids=tuple(self.words.ids([text, "<eos>"]))) for text in REPLIES))

    async def turns(self, count: int) -> list[Any]:
        """Return whole records of the newest `count` turns, oldest first, once all but the last are paired."""
        async with asyncio.timeout(60):
            while True:
                rows = (await self.admin(f"/v1/turns?limit={count}"))["turns"]
                if len(rows) == count and sum(row["state"] == "served" for row in rows) <= 1:
                    break
                await asyncio.sleep(0.05)
        return [await self.admin(f"/v1/turns/{row['turn_id']}") for row in reversed(rows)]

    async def admin(self, path: str) -> Any:
        return await asyncio.to_thread(self.server.admin, path)


@pytest.fixture
async def served(host: Host, model_folder: Path, tmp_path: Path) -> AsyncIterator[Served]:
    words = Vocabulary.of(model_folder)
    fake = FakeEngine(policy=words_of(words))
    engine = Port(stub_app(fake))
    await engine.up()
    given = {"engine.kind": "url", "engine.url": engine.url, "trainer.kind": "external", "judge.kind": "rules"}
    try:
        async with host.server(tmp_path, given) as server:
            yield Served(server, fake, words)
    finally:
        await engine.down()
        engine.let_go()


# -- one client for each API: it runs the tool loop, and then says thanks --


async def chat_sdk(url: str, *, streamed: bool) -> str:
    function = {"name": "river", "description": ABOUT, "parameters": PARAMETERS, "strict": True}
    tool = {"type": "function", "function": function}  # the SDK's own streams take strict tools alone
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
    asked: Any = {"model": "policy", "messages": messages, "tools": [tool], "max_tokens": 400}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        while True:
            if streamed:
                async with client.chat.completions.stream(**asked) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for made in message.tool_calls or ():
                result = RESULTS[json.loads(made.function.arguments)["name"]]
                messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
            if not message.tool_calls:
                if messages[-2].get("content") == SECOND:
                    return message.content or ""
                messages.append({"role": "user", "content": SECOND})


async def responses_sdk(url: str, *, streamed: bool) -> str:
    tool = {"type": "function", "name": "river", "description": ABOUT, "parameters": PARAMETERS, "strict": True}
    items: list[Any] = [{"role": "user", "content": FIRST}]
    asked: Any = {"model": "policy", "instructions": SYSTEM, "input": items, "tools": [tool], "max_output_tokens": 400}
    said_thanks = False
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        while True:
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    response: Any = await stream.get_final_response()
            else:
                response = await client.responses.create(**asked)
            calls = [item for item in response.output if item.type == "function_call"]
            # The typed stream adds its own fields; the wire's are those of the response.
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            for made in calls:
                result = RESULTS[json.loads(made.arguments)["name"]]
                items.append({"type": "function_call_output", "call_id": made.call_id, "output": result})
            if not calls:
                if said_thanks:
                    return str(response.output_text)
                items.append({"role": "user", "content": SECOND})
                said_thanks = True


async def messages_sdk(url: str, *, streamed: bool) -> str:
    tool = {"name": "river", "description": ABOUT, "input_schema": PARAMETERS, "strict": True}
    messages: list[Any] = [{"role": "user", "content": FIRST}]
    asked: Any = {"model": "policy", "system": SYSTEM, "messages": messages, "tools": [tool], "max_tokens": 400}
    said_thanks = False
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        while True:
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": message.content})
            calls: list[Any] = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason == ("tool_use" if calls else "end_turn")
            results = [
                {"type": "tool_result", "tool_use_id": made.id, "content": RESULTS[made.input["name"]]}
                for made in calls
            ]
            if results:
                messages.append({"role": "user", "content": results})
            elif said_thanks:
                return "".join(block.text for block in message.content if block.type == "text")
            else:
                messages.append({"role": "user", "content": SECOND})
                said_thanks = True


@function_tool(name_override="river", description_override=ABOUT, strict_mode=False)
def river(name: str) -> str:
    return RESULTS[name]


async def agents_sdk(url: str, *, streamed: bool, is_chat: bool = False) -> str:
    set_tracing_disabled(True)  # traces would go to another host
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        kind: Any = OpenAIChatCompletionsModel if is_chat else OpenAIResponsesModel
        agent = Agent(
            name="guide", instructions=SYSTEM, tools=[river], model=kind(model="policy", openai_client=client)
        )
        said: Any = FIRST
        for following in (SECOND, None):
            if streamed:
                result: Any = Runner.run_streamed(agent, said)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, said)
            if following is not None:
                said = [*result.to_input_list(), {"role": "user", "content": following}]
        return str(result.final_output)


async def agents_chat(url: str, *, streamed: bool) -> str:
    return await agents_sdk(url, streamed=streamed, is_chat=True)


CLIENTS: tuple[Callable[..., Awaitable[str]], ...] = (chat_sdk, responses_sdk, messages_sdk, agents_sdk, agents_chat)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_tool_loop_of_three_turns_is_recorded_alike_in_every_dialect(served: Served, streamed: bool) -> None:
    prompts = {}
    for client in CLIENTS:
        served.script()
        assert await client(served.server.url, streamed=streamed) == GOODBYE, client
        turns = await served.turns(len(REPLIES))
        prompts[client.__name__] = [turn["request"]["prompt_ids"] for turn in turns]
        assert [turn["turn"]["response_ids"] for turn in turns] == [
            served.words.ids([text, "<eos>"]) for text in REPLIES
        ], client
        next_states = [turn["next_state"] for turn in turns]
        assert [[message["role"] for message in state["messages"]] for state in next_states[:-1]] == [
            ["tool"],
            ["tool"],
            ["user"],
        ], client
        assert [state["messages"][0]["content"] for state in next_states[:-1]] == [*RESULTS.values(), SECOND], client
        assert next_states[-1] is None
        assert all(turn["turn"]["drop"] is None for turn in turns)
    schema_of_its_own = ("agents_sdk", "agents_chat")  # the Agents SDK derives the schema from the function
    reference = prompts["chat_sdk"]
    for name, found in prompts.items():
        if name not in schema_of_its_own:
            assert found == reference, name
    assert prompts["agents_sdk"] == prompts["agents_chat"]
