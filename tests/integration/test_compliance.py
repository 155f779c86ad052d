"""llm-comply holds the answers of the real server, over a stub engine, against the published schemas of the three APIs.

Tests that it is not given, and why: `LEFT_OUT`. Errors that it is told to pass over: `PASSED_OVER`.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from breaking import Port, words_of
from harness.host import Host
from harness.model import Vocabulary

from openclaw_rl.engines.base import Tap
from openclaw_rl.engines.dialect import GenerateReply, GenerateRequest
from openclaw_rl.testing import FakeEngine, Scripted, stub_app

COMMAND = str(Path(sys.executable).parent / "llm-comply")
FORMATS = {
    "openai-chat": [],
    "open-responses": [],
    "anthropic": ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"],
}
LEFT_OUT = {
    "image-input": "this model reads text only: an image is refused",
    "chat-image-input": "the same",
    "anth-image-input": "the same",
    "error-handling": "it wants a request without a model refused: here the policy answers it",
    "chat-error-handling": "the same",
    "compact-response": "no route of this server: a client compacts its own chat",
    "compact-missing-model": "the same",
    "chat-reasoning-summary": "it wants a model whose name llm-comply knows",
    "reasoning-summary": "the same",
    "anth-thinking-display": "the same",
}
PASSED_OVER = {
    "unknown SSE event type: response.reasoning_text": "Open Responses calls them response.reasoning; OpenAI's clients"
    " read reasoning_text",
}


class Caller(FakeEngine):
    """Calls the first tool of the prompt, else thinks and answers."""

    words: Vocabulary

    async def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        start = "<|im_start|>system\n"
        prompt = self.words.text(request.input_ids)
        text = "<think>\nThe short answer.\n</think>\n\nred and blue"
        if prompt.startswith(start + "[{"):
            name = json.loads(prompt[len(start) : prompt.index("<|im_end|>")])[0]["function"]["name"]
            if request.sampling_params.json_schema:  # the server demands a call of the engine's grammar
                text = json.dumps([{"name": name, "parameters": {"location": "Oslo"}}])
            else:
                text = f'<tool_call>\n{{"name": "{name}", "arguments": {{"location": "Oslo"}}}}\n</tool_call>'
        self.script(Scripted(ids=tuple(self.words.ids([text, "<eos>"]))))
        async for reply in super().stream(request):
            yield reply


async def names_of(form: str) -> list[str]:
    listed = (await run([COMMAND, "--format", form, "--list"])).stdout
    return re.findall(r"^  ([a-z-]+)  ", listed, re.MULTILINE)


async def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)


async def test_answers_of_all_three_apis_are_as_their_schemas_say(
    host: Host, model_folder: Path, tmp_path: Path
) -> None:
    words = Vocabulary.of(model_folder)
    fake = Caller(policy=words_of(words))
    fake.words = words
    engine = Port(stub_app(fake))
    await engine.up()
    keys = [{"key": "sk-test", "user": "uma"}]
    given = {"engine.kind": "url", "engine.url": engine.url, "trainer.kind": "external", "judge.kind": "rules"}
    try:
        async with host.server(tmp_path, given | {"server.api_keys": keys}) as server:
            for form, more in FORMATS.items():
                names = await names_of(form)
                assert set(names) & LEFT_OUT.keys(), "the names of the tests are others now"
                argv = [
                    COMMAND,
                    "--json",
                    "--format",
                    form,
                    *more,
                    "-u",
                    f"{server.url}/v1",
                    "-k",
                    "sk-test",
                    "-m",
                    "policy",
                ]
                argv += ["-f", ",".join(name for name in names if name not in LEFT_OUT)]
                done = await run([*argv, "-i", ",".join(PASSED_OVER)])
                assert done.returncode == 0, f"{form}: {done.stdout[-5000:]}{done.stderr[-1000:]}"
    finally:
        await engine.down()
        engine.let_go()
