"""The only module that imports SGLang's front end: the package llm-router-utils, its template and parser code.

The import of xgrammar is blocked meanwhile. The proxy compiles no grammar, and xgrammar imports torch where torch is
installed (4 s and 300 MB); the server process stays without torch.
"""

import logging
import sys

_is_absent = "xgrammar" not in sys.modules
if _is_absent:
    sys.modules["xgrammar"] = None  # type: ignore[assignment]  # its import raises ImportError, which SGLang handles
try:
    from llm_router_utils.sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, Tool
    from llm_router_utils.sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from llm_router_utils.sglang.srt.function_call.function_call_parser import FunctionCallParser
    from llm_router_utils.sglang.srt.function_call.utils import get_json_schema_constraint
    from llm_router_utils.sglang.srt.parser.reasoning_parser import ReasoningParser
    from llm_router_utils.sglang.srt.parser.template_manager import TemplateManager
    from llm_router_utils.sglang.srt.server_args import ServerArgs
finally:
    if _is_absent:
        del sys.modules["xgrammar"]

# SGLang's parsers log the model's text; this server logs no reply text above debug.
logging.getLogger("llm_router_utils").setLevel(logging.CRITICAL)

__all__ = [
    "ChatCompletionRequest",
    "FunctionCallParser",
    "OpenAIServingChat",
    "ReasoningParser",
    "ServerArgs",
    "TemplateManager",
    "Tool",
    "get_json_schema_constraint",
]
