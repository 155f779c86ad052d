"""The configuration that Codex, Claude Code and Open WebUI need, as text, and its merge into their own files."""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.cli.connect.served import MODEL, Served
from openclaw_rl.data_dir import write_private
from openclaw_rl.errors import ClientError

NO_KEY = "none"
"""Any word is a key for a server without keys; clients refuse an empty one."""
KEY_VARIABLE = "OPENCLAW_RL_API_KEY"


@dataclass(frozen=True, slots=True)
class Configured:
    """A file of a client, and the notes beside it."""

    path: Path
    content: str
    shown: str
    """Text for a person: the file's part that is ours."""
    notes: tuple[str, ...]


def codex(served: Served, name: str, path: Path | None) -> Configured:
    """Return a profile of Codex: a file of its own, in force with `codex --profile NAME`."""
    lines = [
        f"model = {json.dumps(MODEL)}",
        f"model_provider = {json.dumps(name)}",
        f"model_context_window = {served.context}",
        "",
        f"[model_providers.{name}]",
        f"name = {json.dumps(name)}",
        f"base_url = {json.dumps(served.base_url)}",
        'wire_api = "responses"',
    ]
    notes = [f"start it with: codex --profile {name}"]
    if served.key is not None:
        lines.append(f"env_key = {json.dumps(KEY_VARIABLE)}")
        notes.insert(0, f"first: export {KEY_VARIABLE}={shlex.quote(served.key)}")
    if served.context < 16384:
        notes.append(f"its own prompt has 6,500 tokens, and the context {served.context}: chats will be short")
    if not served.has_tools:
        notes.append("the model's template shows no tools: Codex can run no command with it")
    home = Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")
    content = "\n".join(lines) + "\n"
    return Configured(path or home / f"{name}.config.toml", content, content, tuple(notes))


def claude_code(served: Served, path: Path | None) -> Configured:
    """Return the user's settings file of Claude Code with our variables in its `env`. Raises ClientError."""
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key or NO_KEY,
        "ANTHROPIC_API_KEY": "",  # a key of the user's shell would win over the token
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.reply_tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(served.context),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    home = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
    file = path or home / "settings.json"
    try:
        old = json.loads(file.read_text()) if file.exists() else {}
        merged = old | {"env": (old.get("env") or {}) | variables}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ClientError(f"{file} is no JSON object that can be merged, and stays as it is: {error}") from error
    shown = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    notes = () if served.has_tools else ("the model's template shows no tools: Claude Code can do no work with it",)
    return Configured(file, json.dumps(merged, indent=2, ensure_ascii=False) + "\n", shown, notes)


def open_webui(served: Served, path: Path | None) -> Configured:
    """Return an environment file for Open WebUI, for its process or for `docker run --env-file`."""
    content = f"OPENAI_API_BASE_URL={served.base_url}\nOPENAI_API_KEY={served.key or NO_KEY}\n"
    notes = (
        "Open WebUI reads them at its first start alone; later: Admin Panel, Settings, Connections",
        "in a container, 127.0.0.1 is the container: name this machine with --url, and in server.allowed_hosts",
    )
    return Configured(path or Path("open-webui.env").absolute(), content, content, notes)


def write(path: Path, content: str) -> None:
    """Write the file, readable by its owner only: it may hold a key. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, content.encode())
