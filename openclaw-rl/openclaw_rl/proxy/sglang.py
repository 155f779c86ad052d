"""The one place that imports SGLang's front end (the package llm-router-utils: its template and parser code without
the engine).

xgrammar is kept out while it loads: nothing here compiles a grammar, and importing it drags in torch (4 s and 300 MB)
wherever torch is installed. The server process stays without torch.
"""

import logging
import sys

_is_absent = "xgrammar" not in sys.modules
if _is_absent:
    sys.modules["xgrammar"] = None  # type: ignore[assignment]  # an import of it raises ImportError, which SGLang expects
try:
    from llm_router_utils.sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, Tool
    from llm_router_utils.sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from llm_router_utils.sglang.srt.function_call.function_call_parser import FunctionCallParser
    from llm_router_utils.sglang.srt.parser.reasoning_parser import ReasoningParser
    from llm_router_utils.sglang.srt.parser.template_manager import TemplateManager
    from llm_router_utils.sglang.srt.server_args import ServerArgs
finally:
    if _is_absent:
        del sys.modules["xgrammar"]

# Its parsers log what the model wrote; no reply text is logged above debug here.
logging.getLogger("llm_router_utils").setLevel(logging.CRITICAL)

__all__ = [
    "ChatCompletionRequest",
    "FunctionCallParser",
    "OpenAIServingChat",
    "ReasoningParser",
    "ServerArgs",
    "TemplateManager",
    "Tool",
]
