"""The chat APIs that clients speak. Each is a translation to one request and from one reply; no dialect has a pipeline.

`chat` is OpenAI's Chat Completions, the form in which turns are recorded. `responses_request` and `responses_reply`
speak OpenAI's Responses, `messages_request` and `messages_reply` Anthropic's Messages. The converters are pure
functions of JSON: the same conversation gives the same prompt in all three.
"""

from openclaw_rl.proxy.dialects.base import Dialect
from openclaw_rl.proxy.dialects.chat import ChatCompletions
from openclaw_rl.proxy.dialects.messages_reply import AnthropicMessages
from openclaw_rl.proxy.dialects.responses_reply import OpenAIResponses

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), OpenAIResponses(), AnthropicMessages())

__all__ = ["DIALECTS", "AnthropicMessages", "ChatCompletions", "Dialect", "OpenAIResponses"]
